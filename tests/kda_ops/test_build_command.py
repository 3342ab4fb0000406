"""`kda-ops build --arch`: what it compiles, prints, writes, refuses; what the doctor says of it."""

import re
from pathlib import Path

import pytest

from kda_kernels._cute import bundle, runtime
from kda_kernels._cute.target import TARGETS
from kda_kernels.artifacts import Artifact
from kda_ops import bundling, doctor
from kda_ops.__main__ import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
FACTS = {"registers": 64, "local": 0, "shared": 1024, "dynamic": 2048}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Jobs that would be compiled, to one object that takes what the test says."""
    jobs, facts = [], dict(FACTS)
    (tmp_path / "object").write_bytes(b"object")

    def compile_jobs(wanted, processes):
        jobs.extend(wanted)
        return [Artifact(tmp_path / "object", built=True, facts=facts) for _ in wanted]

    library = runtime.Library(tmp_path / "object", 13, "4.8.1")
    monkeypatch.setattr(bundling, "compile_jobs", compile_jobs)
    monkeypatch.setattr(bundling.backend, "dsl_version", lambda: "4.8.1")
    monkeypatch.setattr(runtime, "find", lambda: library)
    monkeypatch.setattr(runtime, "driver", lambda: None)
    return jobs, facts


def test_every_default_variant_of_every_operator_is_built_for_every_architecture(
    compiled, tmp_path, capsys
):
    jobs, _ = compiled
    assert main(["build", "--arch", "all", "--out", str(tmp_path / "bundle")]) == 0
    wanted = [job for target in TARGETS for job in bundling.matrix(target)]
    assert jobs == wanted
    assert {job.operator for job in jobs} >= {"packed_decode"}
    found = bundle.read(tmp_path / "bundle")
    assert set(found.architectures) == {target.arch for target in TARGETS}
    assert len(found.objects) == len(wanted)
    said = capsys.readouterr().out
    assert f"{len(wanted)} kernels, {len(wanted)} of them compiled now" in said
    assert "64 to 64 registers, at most 3072 bytes of shared and 0 of local memory" in said


def test_named_architectures_are_built_once_each(compiled, tmp_path):
    jobs, _ = compiled
    assert main(["build", "--arch", " sm_90a, sm_80,sm_90a"]) == 0
    assert {job.target.arch for job in jobs} == {"sm_80", "sm_90a"}
    assert len({(job.operator, job.target, repr(job.variant)) for job in jobs}) == len(jobs)


def test_the_runtime_library_comes_along_when_asked_for(compiled, tmp_path):
    command = ["build", "--arch", "sm_90a", "--with-runtime", "--out", str(tmp_path / "bundle")]
    assert main(command) == 0
    assert bundle.read(tmp_path / "bundle").runtime.read_bytes() == b"object"


def test_local_memory_fails_the_build_and_no_bundle_is_written(compiled, tmp_path, capsys):
    compiled[1]["local"] = 8
    assert main(["build", "--arch", "sm_90a", "--out", str(tmp_path / "bundle")]) == 1
    assert "sm_90a packed_decode 8 bytes of local memory: Variant(" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--arch", "sm_75"], 1, "not compiled for 'sm_75'; they are for sm_80"),
        (["--arch", ","], 1, "no architecture in ','"),
        (["--out", "somewhere"], 2, "need --arch"),
    ],
)
def test_what_cannot_be_built_is_said(arguments, status, said, compiled, capsys):
    assert main(["build", *arguments]) == status
    assert said in capsys.readouterr().err


def test_without_cute_dsl_the_build_fails_and_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(bundling.backend, "missing", lambda: "no nvidia-cutlass-dsl")
    assert main(["build", "--arch", "sm_90a"]) == 1
    assert "pip install 'kda-ops[cu13]'" in capsys.readouterr().err


def tables(page):
    """The rows of the table of each operator of a page, and its columns."""
    for part in page.split("\n## ")[1:]:
        lines = [line for line in part.splitlines() if line.startswith("|")]
        yield part.splitlines()[0], [cell.strip() for cell in lines[0].split("|")[1:-1]], lines[2:]


def test_the_report_has_a_row_for_every_variant_and_a_column_for_every_architecture(
    compiled, tmp_path
):
    report = tmp_path / "page.md"
    assert main(["build", "--arch", "all", "--report", str(report)]) == 0
    for operator, columns, rows in tables(report.read_text()):
        variants = {repr(job.variant) for job in compiled[0] if job.operator == operator}
        assert len(rows) == len(set(rows)) == len(variants)
        assert columns[-len(TARGETS) :] == [target.arch for target in TARGETS]
        assert all("64 / 3072" in row for row in rows)


def test_the_recorded_page_is_of_every_operator_and_architecture_and_the_pinned_compiler():
    page = (DOCS / "compiled.md").read_text("utf-8")
    recorded = {operator: columns for operator, columns, _ in tables(page)}
    assert recorded.keys() == {job.operator for job in bundling.matrix(TARGETS[0])}
    for columns in recorded.values():
        assert columns[-len(TARGETS) :] == [target.arch for target in TARGETS]
    constraints = (DOCS.parent / "constraints.txt").read_text("utf-8")
    pinned = re.search(r"^nvidia-cutlass-dsl==(.+)$", constraints, re.MULTILINE)
    assert f"CuTe DSL {pinned[1]}," in page
    assert "Local memory of a thread, where spilled registers would be: 0 bytes at most" in page


def test_the_doctor_names_the_bundle_in_use_or_what_is_wrong_with_it(
    compiled, tmp_path, monkeypatch
):
    monkeypatch.setattr(bundle, "_CHOSEN", [])
    monkeypatch.delenv(bundle.ENVIRONMENT_VARIABLE, raising=False)
    assert doctor._bundle("bundle").state is doctor.State.ABSENT
    main(["build", "--arch", "sm_90a,sm_80", "--out", str(tmp_path / "bundle")])
    monkeypatch.setenv(bundle.ENVIRONMENT_VARIABLE, str(tmp_path / "bundle"))
    found = doctor._bundle("bundle")
    assert found.state is doctor.State.GOOD
    assert "GPU kernels for sm_80, sm_90a" in found.fact and str(tmp_path) in found.fact
    monkeypatch.setenv(bundle.ENVIRONMENT_VARIABLE, str(tmp_path / "none"))
    broken = doctor._examined("bundle", doctor._bundle)
    assert broken.state is doctor.State.BROKEN
    assert "manifest" in broken.fact and "unset KDA_BUNDLE" in broken.remedy
