"""How kernels on a GPU's timeline are told apart, on timelines written by hand."""

import functools

import pytest
import torch

import gpu_timing
from gpu_timing import Launch, NothingProfiled


def test_kernels_belong_to_the_call_between_two_markers():
    launches = [
        Launch("fill", 0, 9),
        Launch("a", 10, 1),
        Launch("b", 12, 2),
        Launch("fill", 20, 9),
        Launch("fill", 40, 9),
        Launch("c", 50, 3),
        Launch("fill", 60, 9),
    ]
    found = gpu_timing.split(list(reversed(launches)), calls=3)
    assert [[launch.name for launch in call] for call in found] == [["a", "b"], [], ["c"]]


def test_a_timeline_with_lost_markers_is_refused():
    with pytest.raises(NothingProfiled, match="1 markers around 2 calls"):
        gpu_timing.split([Launch("fill", 0, 1), Launch("a", 2, 1)], calls=2)
    with pytest.raises(NothingProfiled, match="0 markers"):
        gpu_timing.split([], calls=1)


@pytest.mark.gpu
def test_calls_of_one_and_of_two_kernels_are_told_apart_direct_and_captured():
    x = torch.ones(1 << 22, device="cuda")

    def twice():
        x.mul_(1.5)
        x.add_(1)

    one = functools.partial(x.mul_, 1.5)
    one(), twice()
    runs = gpu_timing.timelines([one, twice, gpu_timing.captured(twice)], repeats=3)
    assert [[len(run) for run in call] for call in runs] == [[1] * 3, [2] * 3, [2] * 3]
    assert all(launch.us > 0 for call in runs for run in call for launch in run)


@pytest.mark.gpu
def test_the_ceiling_is_what_a_gpu_s_memory_can_move():
    assert 1e11 < gpu_timing.ceiling(5) < 5e13
