"""Plots of reports, where matplotlib is installed."""

import json
import sys

import pytest

pytest.importorskip("matplotlib", reason="drawing needs the extra bench")

import plot


def decode_report():
    lines = [
        {
            "operator": operator,
            "state": state,
            "layout": "vk",
            "window": "",
            "heads": heads,
            "rows": rows,
            "share": 0.5,
            "over": {"SGLang packed (Triton)": 1.25},
        }
        for operator in ("packed_decode", "fused_decode")
        for state in ("f32", "bf16")
        for heads in (12, 64)
        for rows in (1, 31, 32)
    ]
    return {"machine": {"device": "GPU", "torch": "2.11"}, "ceiling": 4.2e12, "lines": lines}


def model_report():
    parts = {"projections": 10.0, "kda": 5.0, "rest": 1.0}
    lines = [
        {"state": "f32", "heads": 12, "rows": 8, "way": way, "us": 20.0, "parts": parts}
        for way in ("eager", "pass")
    ]
    machine = {"device": "GPU", "torch": "2.11"}
    return {"machine": machine, "layers": 24, "hidden": 7168, "lines": lines}


@pytest.mark.parametrize("report", [decode_report(), model_report()], ids=["decode", "model"])
def test_a_report_gives_the_same_picture_twice_with_its_machine_in_it(
    report, monkeypatch, tmp_path
):
    (tmp_path / "report.json").write_text(json.dumps(report), "utf-8")
    pictures = []
    for name in ("one.svg", "two.svg"):
        command = ["plot.py", str(tmp_path / "report.json"), "--out", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", command)
        plot.main()
        pictures.append((tmp_path / name).read_text("utf-8"))
    assert pictures[0] == pictures[1]
    assert "torch 2.11" in pictures[0]
