"""The command line: exit statuses, what it prints, and that a broken machine does not stop it."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import kda_ops
from kda_kernels._cpu import build
from kda_ops import doctor
from kda_ops.__main__ import main


@pytest.fixture
def findings(monkeypatch):
    """Examine with some examiners replaced, all others left out."""

    def examine(**examiners):
        monkeypatch.setattr(
            doctor, "_EXAMINERS", {k.replace("_", " "): v for k, v in examiners.items()}
        )
        return doctor.examine()

    return examine


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"kda-ops {kda_ops.__version__}\n"


def test_no_command_prints_the_commands_and_succeeds(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("demo", "doctor", "build", "explain"))


def test_an_unknown_command_is_a_usage_error():
    with pytest.raises(SystemExit) as stop:
        main(["dance"])
    assert stop.value.code == 2


def test_build_says_for_every_operator_whether_it_was_built_or_found(monkeypatch, capsys):
    kernels = [
        build.Built("packed_decode", "a.so", True),
        build.Built("fused_decode", "b.so", False),
    ]
    monkeypatch.setattr(build, "build_all", lambda: kernels)
    assert main(["build"]) == 0
    assert capsys.readouterr().out == "built  packed_decode  a.so\nfound  fused_decode  b.so\n"


def test_build_without_a_compiler_fails_and_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.artifacts, "find_like", lambda prefix: None)
    assert main(["build"]) == 1
    assert "install a C++17 compiler" in capsys.readouterr().err


def test_explain_wants_a_module_and_a_callable(capsys):
    assert main(["explain", "json"]) == 2
    assert "module:callable" in capsys.readouterr().err


def test_explain_prints_what_the_pass_says_about_the_callable(monkeypatch, tmp_path, capsys):
    (tmp_path / "model_to_explain.py").write_text("def case():\n    return 'model', (1, 2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(kda_ops, "explain", lambda *given: f"explained {given}", raising=False)
    assert main(["explain", "model_to_explain:case"]) == 0
    assert capsys.readouterr().out == "explained ('model', 1, 2)\n"


def test_explain_writes_the_page_where_it_is_told_to(monkeypatch, tmp_path, capsys):
    (tmp_path / "model_for_a_page.py").write_text("def case():\n    return 'model', ()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    report = SimpleNamespace(html=lambda: "<p>a page</p>")
    monkeypatch.setattr(kda_ops, "explain", lambda *_: report, raising=False)
    assert main(["explain", "model_for_a_page:case", "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text() == "<p>a page</p>"
    assert main(["explain", "model_for_a_page:case", "--html", str(tmp_path / "no" / "page")]) == 1
    assert "kda-ops explain: " in capsys.readouterr().err


def test_doctor_finds_this_machine_fit(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for subject in ("python", "torch", "C++ compiler", "kernel cache", "CPU operators", "CUDA"):
        assert subject in said
    assert "broken" not in said


def test_one_broken_part_does_not_hide_the_others(findings):
    def broken(subject):
        raise RuntimeError("first line\nsecond line")

    found = findings(tvm_ffi=broken, python=doctor._python)
    assert [f.state for f in found] == [doctor.State.BROKEN, doctor.State.GOOD]
    assert found[0].fact == "RuntimeError: first line"


def test_the_doctor_fails_only_when_the_operators_cannot_run(findings):
    def broken(subject):
        raise OSError("no")

    assert doctor.status(findings(CuTe_DSL=broken, kernel_cache=broken)) == 0
    assert doctor.status(findings(CPU_operators=broken)) == 1


def test_the_report_says_what_to_do_below_what_is_missing():
    report = doctor.report([doctor.Finding("compiler", doctor.State.ABSENT, "none", "install g++")])
    assert report == "absent  compiler  none\n                  -> install g++"


def test_without_a_compiler_the_doctor_says_so_and_the_operators_still_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.artifacts, "find_like", lambda prefix: None)
    found = {f.subject: f for f in doctor.examine()}
    assert found["C++ compiler"].state is doctor.State.ABSENT
    assert "g++" in found["C++ compiler"].remedy
    assert found["CPU operators"].state is doctor.State.ABSENT
    assert doctor.status(list(found.values())) == 0


@pytest.mark.parametrize("error", ["ImportError", "AttributeError", "RuntimeError"])
def test_a_cute_dsl_that_does_not_import_is_a_finding(error, monkeypatch, tmp_path):
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "__init__.py").write_text(f"raise {error}('broken on purpose')\n")
    # CuTe DSL, where it is installed, puts itself before PYTHONPATH.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor._cute_dsl("CuTe DSL")
    assert found.state is doctor.State.BROKEN
    assert f"{error}: broken on purpose" in found.fact
    assert "pip install" in found.remedy


def test_a_cute_dsl_below_the_floor_is_a_finding_with_the_version_found(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "4.3.0")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=0))
    found = doctor._cute_dsl("CuTe DSL")
    assert found.state is doctor.State.BROKEN
    assert found.fact == "4.3.0 is older than 4.8.1"


def test_an_unusable_cache_directory_is_a_finding_that_names_the_variable(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    done = subprocess.run(
        [sys.executable, "-m", "kda_ops", "doctor"],
        capture_output=True,
        text=True,
        env={**os.environ, "KDA_CACHE_DIR": str(tmp_path / "file")},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "broken  kernel cache" in done.stdout
    assert "KDA_CACHE_DIR" in done.stdout
