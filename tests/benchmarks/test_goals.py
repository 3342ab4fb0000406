"""Verdicts on made-up lines: which cells a goal speaks of, and what a miss says."""

import pytest

import goals
import peers


def line(**changes):
    fields = {
        "operator": "fused_decode",
        "layout": "vk",
        "window": "SD",
        "state": "f32",
        "heads": 32,
        "rows": 128,
        "us": 100.0,
        "graph_us": 100.0,
        "share": 0.98,
        "over": {peers.FLASHINFER_FUSED.name: 1.1},
    }
    return fields | changes


def by_goal(lines):
    return {verdict.goal: verdict for verdict in goals.verdicts(lines)}


def test_a_mean_and_the_worst_cell_are_judged_each_by_its_own_number():
    worst = {peers.FLASHINFER_FUSED.name: 0.9}
    found = by_goal([line(), line(rows=8, share=0.5, over=worst)])
    mean = found["fused f32 over FlashInfer's fused, geometric mean"]
    assert mean.value == pytest.approx((1.1 * 0.9) ** 0.5) and not mean.met
    least = found["fused f32 over FlashInfer's fused, least"]
    assert least.sentence.endswith(
        ">= 0.98: 0.900, missed by 8.2% (fused_decode f32 vk SD, H 32, 8 rows)"
    )
    assert found["fused f32, rows >= 128, H >= 32, share"].met  # the small cell does not count


def test_other_layouts_are_held_against_the_one_the_peers_have():
    found = by_goal([line(), line(window="DS", us=103.0), line(layout="kv", us=107.0)])
    assert found["DS over SD, us"].value == pytest.approx(1.03)
    assert not found["DS over SD, us"].met
    assert found["kv over vk, us"].met
    assert found["fused f32 over FlashInfer's fused, geometric mean"].where == "1 cells"


def test_goals_without_a_cell_are_not_judged():
    assert {v.goal for v in goals.verdicts([line(over={}, rows=1)])} == set()


def test_a_figure_of_a_peer_scales_with_the_ceiling_of_the_run():
    scaled = peers.figures("packed_decode", "bf16", 12, 31, 2.12e12)
    assert scaled == pytest.approx(
        {peers.FLASHINFER_PACKED.name: 17.2, peers.SGLANG_PACKED.name: 20.4}
    )
    assert peers.figures("fused_decode", "f32", 3, 1, 1e12) == {}
