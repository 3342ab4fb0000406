"""bench_decode's report on a GPU, with the GPU's few functions replaced: the rest runs as there."""

import argparse
import json

import pytest

import bench_host
import cuda_decode
import decode_calls
import gpu_timing
import peers
import provenance


@pytest.fixture
def report(monkeypatch, tmp_path, capsys):
    """Run the report on the CPU at one size; return the JSON and what was printed."""
    monkeypatch.setattr(cuda_decode, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_timing, "captured", lambda call: call)
    monkeypatch.setattr(gpu_timing, "ceiling", lambda repeats: 4.0e12)
    monkeypatch.setattr(
        gpu_timing, "microseconds", lambda calls, repeats: [1.0 + i for i in range(len(calls))]
    )
    monkeypatch.setattr(bench_host, "beyond_an_empty_call", lambda device, rounds: {"call": 21.0})
    monkeypatch.setattr(provenance, "machine", lambda: {"device": "a model of a GPU"})

    def run(**changes):
        options = {
            "operators": ("packed_decode", "fused_decode"),
            "layouts": ("vk", "kv"),
            "states": ("f32",),
            "windows": ("SD", "DS"),
            "heads": [12],
            "rows": [1, 8],
            "more_rows": False,
            "rounds": 3,
            "warm": None,
            "json": tmp_path / "decode.json",
        }
        cuda_decode.report(argparse.Namespace(**options | changes))
        return json.loads((tmp_path / "decode.json").read_text("utf-8")), capsys.readouterr().out

    return run


def test_every_cell_has_both_launches_its_share_and_its_ratio_to_the_peers(report):
    found, printed = report()
    assert len(found["lines"]) == 2 * 2 + 2 * 2 * 2  # packed has no windows
    line = next(x for x in found["lines"] if x["operator"] == "fused_decode")
    assert (line["rows"], line["us"], line["graph_us"]) == (1, 1.0, 2.0)
    assert line["share"] == pytest.approx(line["bytes"] / 1e-6 / 4.0e12)
    # 4.1 us at a ceiling of 4.24 TB/s would be longer at 4.0 TB/s.
    assert line["over"][peers.FLASHINFER_FUSED.name] == pytest.approx(4.1 * 4.24 / 4.0)
    assert "missed by" in printed and "DS over SD" in printed
    assert found["ceiling"] == 4.0e12
    assert found["goals"][-1]["value"] == 21.0 and not found["goals"][-1]["met"]
    assert len(found["sources"]["fused_decode"]) == 64


def test_the_rows_of_the_packed_peers_are_measured_beside_the_usual_ones():
    options = argparse.Namespace(
        operators=("packed_decode", "fused_decode"),
        layouts=("vk", "kv"),
        states=("bf16",),
        windows=("SD",),
        heads=[12, 32],
        rows=[1, 8, 32, 128, 512],
        more_rows=True,
    )
    groups = {(g[0].operator, g[0].layout): g for g in cuda_decode.groups(options)}
    rows = [cell.rows for cell in groups["packed_decode", "vk"] if cell.heads == 12]
    assert rows == [1, 8, 16, 31, 32, 64, 128, 256, 512]
    assert [c.rows for c in groups["packed_decode", "vk"] if c.heads == 32] == options.rows
    assert [c.rows for c in groups["packed_decode", "kv"] if c.heads == 12] == options.rows
    assert [c.rows for c in groups["fused_decode", "vk"] if c.heads == 12] == options.rows


@pytest.mark.parametrize("operator", ["packed_decode", "fused_decode"])
@pytest.mark.parametrize("window", ["SD", "DS"])
def test_a_kernel_that_is_right_passes_and_a_wrong_one_is_not_timed(operator, window):
    cell = decode_calls.Cell(operator, "kv", "bf16", 2, 5, window)
    values = decode_calls.values_of(cell, "cpu")
    call, output = decode_calls.public_call(cell, values)
    decode_calls.refuse_if_wrong(cell, values, call, output)

    def wrong():
        call()
        output.view(-1)[-1] += 1

    with pytest.raises(SystemExit, match="nothing to measure"):
        decode_calls.refuse_if_wrong(cell, values, wrong, output)


def test_bytes_count_states_twice_and_windows_as_history_read_and_window_written():
    cell = decode_calls.Cell("fused_decode", "vk", "f32", 3, 4, "SD")
    moved = decode_calls.moved_bytes(cell, decode_calls.values_of(cell, "meta"))
    channels = 3 * 3 * 128
    windows = 2 * 4 * channels * 3 * 2
    activations = 4 * (channels + 2 * 3 * 128 + 3 + 3 * 128) * 2
    parameters = (4 * channels + 3 * 128 + 3 + 128) * 4
    indices = 4 * decode_calls.values_of(cell, "meta")["state_indices"].element_size()
    assert moved == 2 * cell.state_bytes + windows + activations + parameters + indices


def test_warming_makes_every_call_without_its_memory(monkeypatch):
    monkeypatch.setattr(cuda_decode, "DEVICE", "cpu")
    large = [decode_calls.Cell("fused_decode", "kv", "f32", 64, 1 << 20, "DS")]  # 4 TiB of states
    assert cuda_decode.warm([large], None) in (0, 1)


def test_a_kernel_that_this_process_has_loaded_is_in_the_report_by_its_hash():
    cell = decode_calls.Cell("packed_decode", "vk", "f32", 1, 1)
    decode_calls.public_call(cell, decode_calls.values_of(cell, "cpu"))[0]()
    hashes = provenance.kernel_hashes()
    assert any(key.startswith("packed_decode-") for key in hashes)
    assert all(len(value) == 64 for value in hashes.values())
