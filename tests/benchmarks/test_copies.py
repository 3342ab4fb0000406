"""bench_copies.py: the kernel that is timed copies what it says."""

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("block", [1024, 16384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_slot_of_a_sequence_gets_its_source_s_state(dtype, block):
    pytest.importorskip("triton")
    import bench_copies

    pool = torch.randn(13, 3, 128, 128, dtype=dtype, device="cuda")
    slots = torch.randperm(13, device="cuda")[:12].view(4, 3)
    sources = torch.tensor([2, 0, 1, 2], device="cuda")
    wanted = pool.clone()
    for t in range(3):
        wanted[slots[:, t]] = pool[slots.gather(1, sources[:, None])[:, 0]] + t
    bench_copies.copies(pool, slots.int(), sources.int(), block, warps=4)
    assert torch.equal(pool, wanted)
