"""From source to callable: compilers found and missing, what a key depends on, damaged objects."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kda_kernels import artifacts
from kda_kernels._cpu import build


@pytest.fixture(autouse=True)
def _fresh_answers() -> Iterator[None]:
    build._version.cache_clear()
    yield
    build._version.cache_clear()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that takes no time: it writes its arguments to the object and counts its runs."""
    path = tmp_path / "quick-c++"
    script = """\
        #!/bin/sh
        if [ "$1" = --version ]; then echo quick 1.0; exit 0; fi
        echo run >> "$0.log"
        out=
        for argument in "$@"; do [ "$last" = -o ] && out=$argument; last=$argument; done
        echo "$@" > "$out"
    """
    path.write_text(textwrap.dedent(script))
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def runs(compiler: Path) -> int:
    log = compiler.with_name(compiler.name + ".log")
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_an_empty_path_means_a_missing_compiler_and_says_how_to_get_the_kernel(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.CompilerMissing, match=r"(?s)no c\+\+.*install a C\+\+17.*CXX"):
        build._object("packed_decode")


def test_a_cxx_that_does_not_run_is_named(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(build.CompilerMissing, match="CXX=/nowhere/c\\+\\+ does not run"):
        build._object("packed_decode")


def test_a_compiler_that_fails_is_quoted_and_leaves_no_entry(
    empty_cache: Path, compiler: Path
) -> None:
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo bad 1; exit 0; }\n'
        "echo no such header >&2; exit 1\n"
    )
    with pytest.raises(build.CompilerMissing, match=r"(?s)cannot compile.*no such header"):
        build._object("packed_decode")
    assert not list(empty_cache.glob("*.so"))


def test_a_processor_that_the_compiler_does_not_know_is_left_out_of_the_flags(
    empty_cache: Path, compiler: Path
) -> None:
    text = compiler.read_text()
    refuse = 'case "$*" in *native*) echo unknown processor >&2; exit 1;; esac\n'
    compiler.write_text(text.replace("out=\n", refuse + "out=\n", 1))
    assert "native" not in build._object("packed_decode").path.read_text()


def test_an_object_is_compiled_once_for_equal_facts(empty_cache: Path, compiler: Path) -> None:
    assert build._object("packed_decode").built
    assert not build._object("packed_decode").built
    assert runs(compiler) == 1


def test_a_truncated_object_is_compiled_again(empty_cache: Path, compiler: Path) -> None:
    path = build._object("packed_decode").path
    path.write_bytes(b"")
    assert build._object("packed_decode").path.stat().st_size > 0
    assert runs(compiler) == 2


def test_another_version_of_the_compiler_compiles_again(empty_cache: Path, compiler: Path) -> None:
    build._object("packed_decode")
    compiler.write_text(compiler.read_text().replace("quick 1.0", "quick 1.1"))
    build._version.cache_clear()
    assert build._object("packed_decode").built


@pytest.mark.parametrize("changed", ["source", "processor", "flags"])
def test_a_key_follows_source_processor_and_flags(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build._key_without_compiler("packed_decode")
    if changed == "source":
        source = tmp_path / "cpu.cc"
        source.write_text("// another source\n")
        monkeypatch.setattr(build, "_sources", lambda operator: [source])
    if changed == "processor":
        monkeypatch.setattr(build, "cpu_features", lambda: "x86_64 sse2")
    if changed == "flags":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build._key_without_compiler("packed_decode") != before


def test_a_machine_without_a_compiler_uses_what_was_built_for_it_before(
    empty_cache: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build._object("packed_decode")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert build._object("packed_decode") == artifacts.Artifact(built.path, built=False)


def test_build_all_reports_what_it_built_and_what_it_found(
    empty_cache: Path, compiler: Path
) -> None:
    assert [item.built for item in build.build_all()] == [True] * 3
    assert [item.built for item in build.build_all()] == [False] * 3
    assert [item.operator for item in build.build_all()] == list(build.OPERATORS)


def test_describing_never_compiles_and_never_raises(
    empty_cache: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = build.describe()
    assert runs(compiler) == 0
    assert facts["kernel packed_decode"] == "not built yet"
    assert "quick 1.0" in facts["compiler"]
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert build.describe()["compiler"].startswith("missing")


def test_the_vector_width_that_is_described_is_the_one_compiled() -> None:
    import tvm_ffi

    module = tvm_ffi.load_module(str(build._object("packed_decode").path))
    assert f"{module['vector_width']()} floats" in build.describe()["vectors"]


def test_an_unknown_operator_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no CPU kernel 'prefill'"):
        build.load("prefill")


def test_a_wrong_argument_list_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(TypeError, match="disagree about the argument list"):
        build.load("packed_decode")(None, 1.0)


def test_importing_the_backend_compiles_nothing_and_loads_no_ffi() -> None:
    code = "import sys, kda_kernels._cpu.build; print('tvm_ffi' in sys.modules)"
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert asked.stdout.strip() == "False"
