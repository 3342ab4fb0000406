"""What a call on a GPU is compiled to, without a GPU: targets, schedules, variants, errors."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kda_kernels._cute import compile as backend
from kda_kernels._cute.target import TARGETS, target_of
from kda_kernels.errors import UnsupportedError
from kda_kernels.fused_decode import config as fused_config
from kda_kernels.packed_decode.config import SCHEDULES as PACKED
from kda_kernels.packed_decode.contract import CONTRACT
from kda_kernels.packed_decode.launch import adapter, variant_of
from kda_kernels.packed_fused_decode import config as tokens_config
from kda_kernels.schedule import choose, every
from kda_kernels.testing.cases import Case, draw, strided

SIZES = {"B": 3, "H": 2, "S": 6}


def call(**fields):
    return draw(CONTRACT, Case(sizes=SIZES, **fields))


def variant(values, output=torch.bfloat16):
    return variant_of(values, output, processors=132)


TABLES = {
    "packed": PACKED,
    "fused": fused_config.SCHEDULES,
    "fused-alone": fused_config.WITHOUT_CLUSTERS,
    "tokens": tokens_config.SCHEDULES,
    "tokens-alone": tokens_config.WITHOUT_CLUSTERS,
}


def cuts(name, layout, itemsize):
    """Every schedule that some call gets from a table."""
    table, found = TABLES[name], set()
    for processors in (1, 16, 108, 132, 148):
        for rows in (1, 2, 5, 8, 33, 512, 100_000):
            for heads in (1, 3, 12, 64, 96):
                found.add(choose(table, layout, itemsize, rows, heads, processors))
    assert found == set(every(table, layout, itemsize)), "one is never taken"
    return found


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("name", TABLES)
def test_every_schedule_cuts_a_head_into_whole_tiles_that_fit_registers(name, layout, itemsize):
    width = 4 if name.startswith("tokens") else itemsize
    vector = 16 // width
    for cut in cuts(name, layout, itemsize):
        keys = 128 if layout == "vk" else cut.tile
        lanes = keys // vector
        assert 1 <= lanes <= 32 and 32 % lanes == 0
        held = (cut.tile if layout == "vk" else 128 // cut.warps) // (32 // lanes)
        assert cut.splits(layout) >= 1
        assert 128 % (cut.splits(layout)) == 0
        assert cut.tile % (cut.batch or cut.tile) == 0
        assert held >= 1 and held & (held - 1) == 0
        if layout == "kv":
            assert 32 // lanes <= 2 * vector, "more lanes than sums"
        assert cut.threads <= 1024 and cut.min_blocks * cut.threads <= 2048
        assert held * 4 + 32 <= cut.registers, "the state alone does not fit"


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("name", [name for name in TABLES if name != "packed"])
def test_tokens_have_their_makers_and_heads_blocks_that_can_share_them(name, layout, itemsize):
    for cut in cuts(name, layout, itemsize):
        splits = cut.splits(layout)
        if name.endswith("-alone"):
            assert splits == 1
        else:
            assert splits in (1, 2, 4, 8), "larger clusters are not portable"
        if name == "fused":
            # Blocks share a head through warps that make the token in each of them.
            assert splits == 1 or cut.makers
        assert cut.makers in (0, 6 if name.startswith("tokens") else 4)
        parts = [cut.maker(part) for part in range(6)]
        assert len(set(parts[:4])) == 4, "q, k, v and the decays each have a warp of their own"
        assert all(n < cut.threads // 32 for n in parts)
        assert not (cut.makers and cut.token_first)
        if cut.makers:
            assert min(parts) == cut.warps


@pytest.mark.parametrize("operator", ["packed_decode", "fused_decode"])
def test_the_sources_that_a_key_hashes_are_there(operator):
    launch = importlib.import_module(f"kda_kernels.{operator}.launch")
    room = Path(launch.__file__).parents[1]
    assert all((room / name).is_file() for name in launch.SOURCES)
    assert all(name.startswith(f"{operator}/") for name in launch.SOURCES)


def test_few_rows_are_spread_over_more_warps_and_several_blocks():
    for itemsize in (2, 4):
        for layout in ("vk", "kv"):
            few = choose(PACKED, layout, itemsize, 1, 12, 132)
            many = choose(PACKED, layout, itemsize, 512, 64, 132)
            assert few.splits(layout) * few.warps >= many.splits(layout) * many.warps
            assert few.splits(layout) >= 2


def test_rows_slots_heads_and_strides_share_one_variant():
    values = call()
    other = draw(CONTRACT, Case(sizes={"B": 2, "H": 5, "S": 9}, row_padding=8, slot_padding=8))
    assert variant(values) == variant(other)
    assert hash(variant(values)) == hash(variant(other))


@pytest.mark.parametrize(
    "fields",
    [
        {"state_dtype": torch.bfloat16},
        {"activation": torch.float16},
        {"parameter_dtype": torch.bfloat16},
        {"index_dtype": torch.int64},
        {"spelling": 1},
        {"row_offset": 1},
        {"row_padding": 4},
        {"absent": frozenset({"state_indices"})},
        {"scalars": {"lower_bound": None}},
        {"scalars": {"first_slot": None}},
        {"scalars": {"state_layout": "kv"}},
    ],
    ids=lambda fields: str(*fields),
)
def test_what_the_code_depends_on_changes_the_variant(fields):
    assert variant(call(**fields)) != variant(call())
    assert variant(call(), torch.float32) != variant(call())


def test_numbers_do_not_change_the_variant():
    for scalars in ({"scale": 0.5}, {"lower_bound": -4.0}, {"first_slot": 3}):
        assert variant(call(scalars=scalars)) == variant(call())


def test_rows_are_read_in_vectors_exactly_when_every_row_starts_at_16_bytes():
    values = call()
    assert variant(values).aligned
    assert variant(call(row_padding=8, row_offset=16)).aligned
    assert not variant(call(row_padding=4)).aligned
    for name in ("mixed_qkv", "raw_gate", "dt_bias"):
        moved = strided(values[name], 0, 0, 1)
        assert not variant(values | {name: moved}).aligned
    # The alignment of what is read element by element does not matter.
    for name in ("raw_beta", "A_log"):
        assert variant(values | {name: strided(values[name], 0, 0, 1)}).aligned


def test_launches_overlap_on_hopper_and_newer_where_asked_to(monkeypatch):
    monkeypatch.delenv("KDA_PDL", raising=False)
    assert not variant(call()).overlaps
    monkeypatch.setenv("KDA_PDL", "0")
    assert not variant(call()).overlaps
    monkeypatch.setenv("KDA_PDL", "1")
    assert variant(call()).overlaps
    assert not variant_of(call(), torch.bfloat16, 108, overlap=False).overlaps


def test_a_single_row_s_stride_does_not_matter():
    values = draw(CONTRACT, Case(sizes={"B": 1, "H": 2, "S": 3}))
    values["mixed_qkv"] = values["mixed_qkv"].as_strided((1, 768), (771, 1))
    assert variant(values).aligned


def test_the_adapter_takes_the_contract_s_arguments_and_passes_what_was_compiled_for():
    values = call(scalars={"scale": 2, "lower_bound": None})
    values["first_slot"] = 2**70
    values["A_log"] = torch.zeros(())
    passed = []
    function = adapter(lambda *arguments: passed.append(arguments), values)
    output = torch.empty(0)
    function(*[values[a.name] for a in CONTRACT.abi], output)
    (given,) = passed
    assert given[0] is values["mixed_qkv"] and given[5] is values["state"]
    assert given[3].shape == (1,)
    assert given[6] is values["state_indices"] and given[7] is output
    assert given[8:] == (2.0, 0.0, 2**62)


def test_devices_get_the_target_of_their_architecture_or_none():
    for target in TARGETS:
        assert target_of(target.capability) == target
    assert target_of((8, 7)).arch == "sm_86"
    for capability in ((7, 5), (9, 1), (10, 1), (11, 0), (13, 0)):
        assert target_of(capability) is None


def test_a_device_without_a_target_is_named_with_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UnsupportedError, match=r"sm_80, .*got cuda:0 of compute capability 7\.5"):
        backend.target_for("packed_decode", "mixed_qkv", torch.device("cuda:0"))


REQUIRE = """
import torch
from kda_kernels._cute import compile as backend
from kda_kernels.errors import UnsupportedError
for _ in range(2):
    try:
        backend.require("packed_decode", "mixed_qkv", torch.device("cuda:0"))
        print("no error")
    except UnsupportedError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("deed", "version", "said"),
    [
        ("raise ImportError('libcuda')", "4.8.1", "4.8.1, which does not import: ImportError: lib"),
        ("raise RuntimeError('no')", "4.9.0", "4.9.0, which does not import: RuntimeError: no"),
        ("raise AttributeError('x')", None, "of unknown version, which does not import: Attribute"),
        ("", "4.2.0", "nvidia-cutlass-dsl 4.2.0"),
    ],
)
def test_a_broken_or_old_cute_dsl_is_named_with_its_version(deed, version, said, tmp_path):
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "__init__.py").write_text(deed)
    code = f"import importlib.metadata\nimportlib.metadata.version = lambda name: {version!r}\n"
    if version is None:
        code = (
            "import importlib.metadata as m\ndef version(name):\n"
            "    raise m.PackageNotFoundError(name)\nm.version = version\n"
        )
    # CuTe DSL, where it is installed, puts itself before PYTHONPATH.
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + code
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code + REQUIRE],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("kda::packed_decode: mixed_qkv must be on cpu, or CuTe DSL 4.8.1")
    assert said in first and "pip install 'kda-ops[cu13]'" in first


def test_a_linker_is_what_cc_names_or_the_first_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "")
    for name in ("gcc", "clang"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert backend.find_linker() == (str(tmp_path / "gcc"),)
    monkeypatch.setenv("CC", "clang -m64")
    assert backend.find_linker() == (str(tmp_path / "clang"), "-m64")
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert backend.find_linker() is None
