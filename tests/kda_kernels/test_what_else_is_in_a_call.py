"""What else is in a call changes no bit of a row's result, where the sums allow for it.

On a GPU the number of rows and heads decides how the work is cut. In layout vk a sum over keys is
made in the same order whatever the cut; in layout kv it is not, and only the budget holds.
"""

import pytest
import torch

from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, clone, draw
from kda_kernels.testing.compare import assert_same_bits
from kda_kernels.testing.device import run_on

TOKENS = 3
HEADS = 3
LENGTHS = {"B": 1, "N": 1, "R": TOKENS}
"""By what counts them: how many each sequence has."""
ON = [
    pytest.param("cpu", "vk", (5, 1, 2), id="cpu-vk"),
    pytest.param("cpu", "kv", (5, 1, 2), id="cpu-kv"),
    pytest.param("cuda", "vk", (700, 1, 7, 20, 45, 130, 330), id="cuda-vk", marks=pytest.mark.gpu),
]
"""Where, in which layout, and how many rows or sequences there are: all, and those of parts."""


def shortened(operator, values, count):
    """The same call, of its first rows or sequences only, on the same pools."""
    shorter = clone(values)
    for argument in operator.tensors:
        tensor = shorter.get(argument.name)
        if tensor is None:
            continue
        for spelling in argument.extents:
            if len(spelling) != tensor.dim():
                continue
            for axis, extent in enumerate(spelling):
                if extent.text in LENGTHS:
                    tensor = tensor.narrow(axis, 0, count * LENGTHS[extent.text])
                elif extent.text == "N+1":
                    tensor = tensor.narrow(axis, 0, count + 1)
        shorter[argument.name] = tensor
    return shorter


@pytest.mark.parametrize("operator", CONTRACTS, ids=lambda contract: contract.name)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("device", "layout", "counts"), ON)
def test_a_row_has_the_same_bits_in_calls_of_any_size(operator, state, device, layout, counts):
    most, ragged = counts[0], operator.name == "packed_fused_decode"
    sizes = {"B": most, "N": most, "R": most * TOKENS, "T": TOKENS, "L": 3, "H": HEADS}
    sizes["S"] = most * (TOKENS if ragged else 1) + 1
    case = Case(sizes=sizes, state_dtype=state, scalars={"state_layout": layout})
    values = draw(operator, case)
    shorter = {count: shortened(operator, values, count) for count in counts[1:]}
    output = run_on(device, operator, values)
    for count, call in shorter.items():
        rows = int(call["query_start_loc"][-1]) if ragged else count
        found, whole = (o.flatten(0, 1)[:rows] for o in (run_on(device, operator, call), output))
        assert_same_bits(found, whole, f"output of {count}")
        slots = call["state_indices"].flatten().long()
        slots = slots[(slots >= 0) & (slots < len(values["state"]))]
        for pool in ("state", "conv_state"):
            if pool in values:
                assert_same_bits(call[pool][slots], values[pool][slots], f"{pool} of {count}")
