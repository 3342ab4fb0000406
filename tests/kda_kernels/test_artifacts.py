"""The artifact cache: whole entries, many processes, damage, locks, unusable directories."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from kda_kernels import artifacts

CONTENT = b"machine code " * 1000


def write(path: Path) -> None:
    path.write_bytes(CONTENT)


def never(path: Path) -> None:
    raise AssertionError(f"{path} was built although a valid entry is there")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    chosen = tmp_path / "cache"
    monkeypatch.setenv("KDA_CACHE_DIR", str(chosen))
    forget()
    yield chosen
    forget()


def forget() -> None:
    """Make this process look at its directories again, as a new one would."""
    artifacts._usable.cache_clear()
    artifacts._temporary.cache_clear()


def run(code: str, **environment: str | None) -> subprocess.Popen[str]:
    chosen = dict(os.environ)
    for name, value in environment.items():
        if value is None:
            chosen.pop(name, None)
        else:
            chosen[name] = value
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=chosen,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_entry_is_built_once_and_then_found(directory: Path) -> None:
    first = artifacts.get_or_build("key", write)
    second = artifacts.get_or_build("key", never)
    assert (first.built, second.built) == (True, False)
    assert [first.path] == [second.path] == list(directory.glob("*.so"))
    assert first.path.read_bytes() == CONTENT


def test_the_directory_is_private_and_holds_no_leftovers(directory: Path) -> None:
    artifacts.get_or_build("key", write)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert sorted(p.suffix for p in directory.iterdir()) == [".json", ".lock", ".so"]


def test_a_failed_build_passes_its_error_on_and_leaves_nothing(directory: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        artifacts.get_or_build("key", fail)
    assert [p.suffix for p in directory.iterdir()] == [".lock"]
    assert artifacts.get_or_build("key", write).built


@pytest.mark.parametrize("keep", [0, len(CONTENT) // 2, len(CONTENT) - 1])
def test_a_truncated_object_is_built_again(keep: int) -> None:
    path = artifacts.get_or_build("key", write).path
    path.write_bytes(CONTENT[:keep])
    again = artifacts.get_or_build("key", write)
    assert again.built
    assert again.path.read_bytes() == CONTENT
    assert not artifacts.get_or_build("key", never).built


def test_an_object_with_one_wrong_byte_is_built_again() -> None:
    path = artifacts.get_or_build("key", write).path
    path.write_bytes(b"x" + CONTENT[1:])
    assert artifacts.get_or_build("key", write).path.read_bytes() == CONTENT


@pytest.mark.parametrize("manifest", ["", "{", "[]", "{}", '{"file": "../other", "size": 1}'])
def test_a_damaged_manifest_is_a_missing_entry(directory: Path, manifest: str) -> None:
    artifacts.get_or_build("key", write)
    (directory / "key.json").write_text(manifest)
    assert artifacts.find("key") is None
    assert artifacts.get_or_build("key", write).built


def test_a_manifest_names_no_file_outside_the_directory(directory: Path, tmp_path: Path) -> None:
    artifacts.get_or_build("key", write)
    (tmp_path / "outside.so").write_bytes(CONTENT)
    facts = json.loads((directory / "key.json").read_text())
    (directory / "key.json").write_text(json.dumps(facts | {"file": "../outside.so"}))
    assert artifacts.find("key") is None


def test_eight_processes_on_an_empty_cache_all_get_the_object_and_one_builds_it(
    tmp_path: Path,
) -> None:
    code = f"""
        import os, time
        from pathlib import Path
        from kda_kernels import artifacts
        room = Path({str(tmp_path)!r})
        (room / f"ready-{{os.getpid()}}").touch()
        while len(list(room.glob("ready-*"))) < 8:
            time.sleep(0.001)
        def build(path):
            time.sleep(0.2)
            path.write_bytes({CONTENT[:100]!r})
        done = artifacts.get_or_build("key", build)
        assert done.path.read_bytes() == {CONTENT[:100]!r}
        print(done.built)
    """
    processes = [run(code) for _ in range(8)]
    answers = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, answers
    assert sorted(said.strip() for said, _ in answers) == ["False"] * 7 + ["True"]


def test_a_writer_killed_while_it_holds_the_lock_stops_nobody(directory: Path) -> None:
    process = run(
        """
        import time
        from kda_kernels import artifacts
        def build(path):
            path.write_bytes(b"half of it")
            print("building", flush=True)
            time.sleep(600)
        artifacts.get_or_build("key", build)
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "building"
    process.kill()
    process.communicate(timeout=30)
    begin = time.monotonic()
    assert artifacts.get_or_build("key", write).path.read_bytes() == CONTENT
    assert time.monotonic() - begin < 30


def test_a_lock_that_is_never_released_delays_a_build_by_the_bounded_wait_only(
    directory: Path,
) -> None:
    directory.mkdir()
    with (directory / "key.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert artifacts.get_or_build("key", write, wait_seconds=0.1).built


def test_leftovers_of_killed_writers_are_removed_after_a_day(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    old, young = directory / ".tmp-old", directory / ".tmp-young"
    for room in (old, young):
        room.mkdir()
        (room / "object.so").write_bytes(b"half")
    day_before_yesterday = time.time() - 2 * 24 * 3600
    os.utime(old, (day_before_yesterday, day_before_yesterday))
    artifacts.get_or_build("key", write)
    assert (old.exists(), young.exists()) == (False, True)


def test_the_newest_entry_with_a_prefix_is_found_without_its_whole_key() -> None:
    assert artifacts.find_like("op-") is None
    path = artifacts.get_or_build("op-abc", write).path
    assert artifacts.find_like("op-") == path
    assert artifacts.find_like("other-") is None


# Imports come before the step down to an ordinary user, who may not be able to read the checkout.
# Root itself may write anywhere, so it would see no read-only directory.
AS_NOBODY = """
    import os, random, shutil, warnings
    from kda_kernels import artifacts
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in ("key", "key", "other"):
            done = artifacts.get_or_build(key, lambda path: path.write_bytes(b"new"))
            print(done.path.parent, done.built, done.path.read_bytes() == b"new")
    print(len(caught), "warnings", *(str(w.message) for w in caught))
"""


def as_nobody(**environment: str | None) -> list[str]:
    """Build three entries as an ordinary user and return the printed lines."""
    process = run(AS_NOBODY, **environment)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return said.splitlines()


@pytest.fixture
def open_room() -> Iterator[Path]:
    """A directory that an ordinary user can reach (pytest's own are private)."""
    room = Path(tempfile.mkdtemp())
    room.chmod(0o755)
    yield room
    shutil.rmtree(room)


def test_a_read_only_cache_serves_what_it_holds_and_the_rest_goes_to_a_temporary_directory(
    open_room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = open_room / "shipped"
    monkeypatch.setenv("KDA_CACHE_DIR", str(shipped))
    artifacts.get_or_build("key", lambda path: path.write_bytes(b"new"))
    shipped.chmod(0o555)
    for path in shipped.iterdir():
        path.chmod(0o444)
    lines = as_nobody(KDA_CACHE_DIR=str(shipped))
    assert lines[0] == lines[1] == f"{shipped} False True"
    assert lines[2].endswith("True True")
    assert str(shipped) not in lines[2]
    assert lines[3].startswith("1 warnings")


@pytest.mark.parametrize("place", ["unset HOME", "read-only HOME", "missing parent"])
def test_without_a_usable_directory_one_warning_comes_and_a_temporary_one_serves(
    open_room: Path, place: str
) -> None:
    home = {"unset HOME": None, "read-only HOME": str(open_room), "missing parent": "/nowhere/x"}
    lines = as_nobody(KDA_CACHE_DIR=None, XDG_CACHE_HOME=None, HOME=home[place])
    built = [line.split()[1:] for line in lines[:3]]
    assert built == [["True", "True"], ["False", "True"], ["True", "True"]]
    assert lines[3].startswith("1 warnings")
    assert "KDA_CACHE_DIR" in lines[3]
    assert not Path(lines[0].split()[0]).exists()  # removed when the process ended


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_not_trusted(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir(mode=0o700)
    os.chown(directory, 12345, 12345)
    with pytest.warns(RuntimeWarning, match="belongs to user 12345"):
        used = artifacts.cache_directory()
    assert used != directory


def test_a_directory_that_everybody_may_write_is_not_trusted(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="written by everybody"):
        assert artifacts.cache_directory() != directory


def test_the_default_directory_follows_xdg_and_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert artifacts.default_directory() == Path("/home/someone/.cache/kda_ops")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert artifacts.default_directory() == Path("/xdg/kda_ops")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    assert artifacts.default_directory() is None


def test_an_open_default_directory_is_made_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KDA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "kda_ops").mkdir(mode=0o755)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        used = artifacts.cache_directory()
    assert used == tmp_path / "kda_ops"
    assert used.stat().st_mode & 0o777 == 0o700
