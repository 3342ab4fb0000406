"""Bundles: what is written is read back, what does not fit is refused with the reason.

No compiler of GPU code and no GPU is needed: CPU kernels stand in for the objects.
"""

import json
import subprocess
import sys

import pytest
import torch

from kda_kernels import artifacts
from kda_kernels._cpu import build as cpu
from kda_kernels._cute import bundle, packing, runtime
from kda_kernels._cute import compile as backend
from kda_kernels._cute.target import TARGETS, target_of
from kda_kernels.errors import ContractError, UnsupportedError
from kda_kernels.packed_decode import launch

SOURCES = {"packed_decode": bundle.source_hash(launch.SOURCES)}
VARIANTS = launch.matrix()[:3]
HERE = target_of((9, 0))


def identity(variant, arch="sm_90a"):
    return {"operator": "packed_decode", "arch": arch, "variant": repr(variant)}


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No bundle is in use, and an installed runtime library of version 1.2.3 is found."""
    monkeypatch.delenv(bundle.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(bundle, "_CHOSEN", [])
    bundle._named.cache_clear()
    library = runtime.Library(tmp_path / "installed.so", 13, "1.2.3")
    monkeypatch.setattr(runtime, "find", lambda: library)
    monkeypatch.setattr(runtime, "driver", lambda: None)
    monkeypatch.setattr(backend, "_LOADED", {})
    yield
    bundle._named.cache_clear()


@pytest.fixture(scope="module")
def kernel():
    """A shared object that exports packed_decode through TVM-FFI."""
    cpu.load("packed_decode")
    return cpu._object("packed_decode").path


def made(path, content=None, **facts):
    if content is not None:
        path.write_bytes(content)
    return artifacts.Artifact(path, built=True, facts=facts)


@pytest.fixture
def directory(tmp_path, kernel):
    """A bundle of one variant for sm_90a and another one for sm_80."""
    entries = [(identity(VARIANTS[0]), made(kernel, registers=64))]
    entries += [(identity(VARIANTS[1], "sm_80"), made(tmp_path / "o", b"another object"))]
    packing.write(tmp_path / "bundle", bundle.versions("1.2.3", 13), SOURCES, entries)
    return tmp_path / "bundle"


def edit(directory, **changes):
    path = directory / bundle.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_was_written_is_read_back(directory, kernel, tmp_path):
    found = bundle.read(directory)
    assert (found.architectures, found.operators) == (("sm_80", "sm_90a"), ("packed_decode",))
    path = found.find("packed_decode", "sm_90a", repr(VARIANTS[0]))
    assert path.parent == directory and path.read_bytes() == kernel.read_bytes()
    assert found.runtime == tmp_path / "installed.so"
    assert [entry.get("registers") for entry in found.manifest["objects"]] == [None, 64]


def test_architectures_are_never_mixed_up(directory):
    found = bundle.read(directory)
    for target in TARGETS:
        for variant in VARIANTS:
            if target.arch not in ("sm_80", "sm_90a"):
                rule = f"built for {target.arch}, this device's, got one for sm_80, sm_90a"
                with pytest.raises(ContractError, match=rule):
                    found.find("packed_decode", target.arch, repr(variant))
                continue
            there = (target.arch, variant) in (("sm_90a", VARIANTS[0]), ("sm_80", VARIANTS[1]))
            path = found.find("packed_decode", target.arch, repr(variant))
            assert (path is not None) == there


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "built for format 1, got one for format 2"),
        ({"kda_ops": "9.9.9"}, "built for kda-ops .*, got one for kda-ops 9.9.9"),
        ({"tvm_ffi": "99.0.0"}, "built for tvm-ffi .*, got one for tvm-ffi 99.0.0"),
        ({"machine": "pdp11"}, "built for machine .*, got one for machine pdp11"),
        ({"cute_dsl": "1.2.4"}, "runtime library 1.2.4 .*cu13==1.2.4, .*got version 1.2.3"),
        ({"sources": {"packed_decode": "0" * 64}}, "version's sources of packed_decode"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_another_version_built_is_refused_with_both_versions(changes, said, directory):
    edit(directory, **changes)
    with pytest.raises(ContractError, match=said) as raised:
        bundle.load_bundle(directory)
    assert str(raised.value).startswith(f"kda::load_bundle: the bundle {directory} must be ")
    assert bundle.selected() is None


def test_what_an_older_tvm_ffi_of_the_same_series_built_fits(directory, monkeypatch):
    monkeypatch.setattr("tvm_ffi.__version__", "0.1.15.post2")
    edit(directory, tvm_ffi="0.1.12")
    assert bundle.read(directory).objects
    for other in ("0.1.16", "0.2.0", "1.1.1"):
        edit(directory, tvm_ffi=other)
        with pytest.raises(ContractError, match=other):
            bundle.read(directory)


def test_code_of_a_newer_cuda_than_the_driver_s_is_refused(directory, monkeypatch):
    monkeypatch.setattr(runtime, "driver", lambda: 13)
    assert bundle.read(directory).objects
    monkeypatch.setattr(runtime, "driver", lambda: 12)
    with pytest.raises(ContractError, match="built with CUDA 12 or older, got one built with CUDA"):
        bundle.read(directory)


def test_a_missing_runtime_library_is_named_with_the_wheel_that_has_it(directory, monkeypatch):
    monkeypatch.setattr(runtime, "find", lambda: None)
    with pytest.raises(ContractError, match=r"dsl-libs-cu13==1\.2\.3.* none installed"):
        bundle.read(directory)


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_object_is_refused_by_name(damage, directory):
    path = bundle.read(directory).find("packed_decode", "sm_90a", repr(VARIANTS[0]))
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut" else b"x" + content[1:])
    said = {"cut": "bytes, not", "changed": "another content", "gone": "No such file"}[damage]
    with pytest.raises(ContractError, match=f"undamaged, got {path.name}: .*{said}"):
        bundle.read(directory)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"objects": [{}]}', '{"objects": [1]}', '{"objects": {"a": 1}}']
)
def test_a_damaged_manifest_is_refused(text, directory):
    (directory / bundle.MANIFEST).write_text(text)
    with pytest.raises(ContractError, match=r"manifest\.json is whole, got a damaged one"):
        bundle.read(directory)


def test_a_directory_without_a_manifest_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ContractError, match=r"with a manifest, got manifest\.json: No such"):
            bundle.read(path)


def test_a_manifest_names_no_file_outside_of_its_directory(directory, tmp_path):
    objects = json.loads((directory / bundle.MANIFEST).read_text())["objects"]
    content = (directory / objects[0]["file"]).read_bytes()
    (tmp_path / "outside.so").write_bytes(content)
    edit(directory, objects=[objects[0] | {"file": "../outside.so"}])
    with pytest.raises(ContractError, match="undamaged"):
        bundle.read(directory)


def test_a_bundle_takes_more_from_the_same_sources_and_drops_what_others_built(directory, tmp_path):
    entries = [(identity(VARIANTS[2]), made(tmp_path / "m", b"more"))]
    packing.write(directory, bundle.versions("1.2.3", 13), SOURCES, entries)
    found = bundle.read(directory)
    assert len(found.objects) == 3
    assert found.find("packed_decode", "sm_90a", repr(VARIANTS[2])).read_bytes() == b"more"
    newer = bundle.versions("1.2.4", 13)
    packing.write(directory, newer, SOURCES, entries, library=tmp_path / "m")
    found = bundle.read(directory)
    assert list(found.objects) == [("packed_decode", "sm_90a", repr(VARIANTS[2]))]
    assert len(list(directory.glob("?" * 64 + ".so"))) == 1
    assert found.runtime == directory / runtime.NAME


def test_a_runtime_library_inside_the_bundle_is_checked_too(directory, kernel):
    entries = [(identity(VARIANTS[0]), made(kernel))]
    packing.write(directory, bundle.versions("1.2.3", 13), SOURCES, entries, library=kernel)
    assert bundle.read(directory).runtime.read_bytes() == kernel.read_bytes()
    (directory / runtime.NAME).write_bytes(kernel.read_bytes()[::-1])
    with pytest.raises(ContractError, match=f"{runtime.NAME}: another content"):
        bundle.read(directory)


ADD = """
import sys
from pathlib import Path
from kda_kernels import artifacts
from kda_kernels._cute import bundle, packing
directory, name = Path(sys.argv[1]), sys.argv[2]
path = directory.parent / name
path.write_bytes(name.encode())
identity = {"operator": "packed_decode", "arch": "sm_90a", "variant": name}
made = artifacts.Artifact(path, built=True)
for _ in range(10):
    packing.write(directory, bundle.versions("1.2.3", 13), {}, [(identity, made)])
"""


def test_processes_that_add_at_the_same_time_lose_nothing(tmp_path):
    directory = tmp_path / "shared"
    names = ["one", "two", "three"]
    adders = [
        subprocess.Popen(
            [sys.executable, "-c", ADD, str(directory), name], stdin=subprocess.DEVNULL
        )
        for name in names
    ]
    assert [adder.wait(120) for adder in adders] == [0, 0, 0]
    found = bundle.read(directory)
    assert sorted(variant for _, _, variant in found.objects) == sorted(names)


def test_the_variable_names_the_bundle_and_a_call_names_another(directory, tmp_path, monkeypatch):
    assert bundle.selected() is None
    monkeypatch.setenv(bundle.ENVIRONMENT_VARIABLE, str(directory))
    assert bundle.selected().directory == directory
    other = tmp_path / "other"
    packing.write(other, bundle.versions("1.2.3", 13), {}, [])
    assert bundle.load_bundle(str(other)) is bundle.selected()
    assert bundle.selected().directory == other


def test_a_variable_that_names_no_bundle_is_an_error_at_every_call(tmp_path, monkeypatch):
    monkeypatch.setenv(bundle.ENVIRONMENT_VARIABLE, str(tmp_path))
    for _ in range(2):
        with pytest.raises(ContractError, match=r"\(from KDA_BUNDLE\)$"):
            backend.require("packed_decode", "mixed_qkv", torch.device("cuda:0"))


def load(variant, target=HERE, trace=None):
    return backend.load("packed_decode", variant, target, trace, launch.SOURCES)


@pytest.fixture
def in_use(directory, kernel, monkeypatch):
    """The bundle in use where CuTe DSL is missing; its runtime library is any library."""
    library = runtime.Library(kernel, 13, "1.2.3")
    monkeypatch.setattr(runtime, "find", lambda: library)
    monkeypatch.setattr(backend, "missing", lambda: "no nvidia-cutlass-dsl")
    return bundle.load_bundle(directory)


def test_a_bundle_serves_its_variants_where_nothing_compiles(in_use):
    backend.require("packed_decode", "mixed_qkv", torch.device("cuda:0"))
    function = load(VARIANTS[0])
    assert callable(function)
    assert load(VARIANTS[0]) is function


def test_a_variant_that_is_not_in_the_bundle_is_named_with_how_to_build_it(in_use):
    with pytest.raises(UnsupportedError) as raised:
        load(VARIANTS[1])
    said = str(raised.value)
    assert str(in_use.directory) in said and f"got {VARIANTS[1]} for sm_90a" in said
    assert "kda_ops.warmup('packed_decode', ..., arch='sm_90a', bundle=...)" in said


def test_a_device_that_the_bundle_is_not_for_is_refused(in_use):
    with pytest.raises(ContractError, match="built for sm_100a, this device's"):
        load(VARIANTS[0], target_of((10, 0)))


def test_a_variant_that_is_not_in_the_bundle_is_compiled_where_cute_dsl_is(
    in_use, kernel, monkeypatch
):
    compiled = []

    def build(operator, variant, target, trace, sources):
        compiled.append(variant)
        return made(kernel)

    monkeypatch.setattr(backend, "missing", lambda: "")
    monkeypatch.setattr(backend, "build", build)
    assert callable(load(VARIANTS[0]))
    assert compiled == []
    assert callable(load(VARIANTS[1]))
    assert compiled == [VARIANTS[1]]


def test_a_first_use_while_a_graph_is_captured_names_the_warm_up(in_use, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match=r"run kda_ops\.warmup\(\.\.\.\) for these shapes"):
        load(VARIANTS[0])
