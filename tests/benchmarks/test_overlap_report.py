"""bench_overlap.py's table."""

import bench_overlap


def test_a_row_has_the_times_without_and_with_behind_every_neighbour():
    line = {"operator": "fused_decode", "state": "f32", "rows": 8, "tokens": 1}
    for n, which in enumerate(bench_overlap.NEIGHBOURS):
        line |= {f"{which} 0": n + 1.0, f"{which} 1": n + 0.5}
    row = bench_overlap.row(line)
    assert row.split() == (
        "fused_decode f32 8 1 1.0 -> 0.5 2.0 -> 1.5 3.0 -> 2.5 4.0 -> 3.5".split()
    )
