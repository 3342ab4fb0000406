"""Where values are rounded, and where they must not be.

Each test fails if the rounding it names is left out, and if it is done once too often.
"""

import math

import pytest
import torch

from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import clone, exact
from kda_kernels.testing.compare import assert_same_bits

PACKED, FUSED, SPECULATIVE = CONTRACTS
BIG = 32.0  # silu(32) is 32 in every activation type


def assert_rounded_once(stored, exact):
    """Every stored bf16 is the neighbour nearest to the exact number, but for float32's own error.

    Rounding twice, or at every token, would leave about a quarter of the elements further away.
    """
    _, exponent = torch.frexp(exact)
    half = torch.exp2((exponent - 9).double())
    far = (stored.double() - exact).abs() - half
    assert float(far.max()) < 2e-6


def one_row(call, operator, **changes):
    return call(operator, **({"B": 1, "R": 1, "N": 1, "T": 1, "H": 1, "L": 3, "S": 3} | changes))


def slot_of(values):
    return int(values["state_indices"].flatten()[0])


@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_convolutions_output_is_rounded_to_the_activation_type(
    fused, run, call, activation, bias
):
    absent = frozenset({"t1_state_indices"} | (set() if bias else {"conv_bias"}))
    values = one_row(call, fused, activation=activation, absent=absent)
    slot = slot_of(values)
    # k one-hot, S = 0, beta = 1: the state's first key column is v, to float32's accuracy.
    values["raw_beta"].fill_(100.0)
    values["state"][slot] = 0
    values["weight"][1] = 0
    values["weight"][1, 3, 0] = 1
    values["x"].view(3, 128)[1] = BIG
    if bias:
        values["conv_bias"].view(3, 128)[1] = 0
    taps = values["weight"][2].double()
    history = torch.cat([values["conv_state"][slot], values["x"].T], 1)[256:].double()
    z = (history * taps.T).sum(1) + (values["conv_bias"][256:].double() if bias else 0)
    silu = torch.nn.functional.silu(z)
    run(fused, values)
    v = values["state"][slot, 0, :, 0].double()
    rounded = silu.to(activation).double()
    # bf16 halves lie 2**-9 apart from the exact value at most; one value near a tie may flip.
    off = (v - rounded).abs() > 1e-6 * rounded.abs()
    assert int(off.sum()) <= 1
    assert int(((v - silu).abs() > 1e-5 * silu.abs()).sum()) > 100


def norm_of(o, values):
    gate = values["output_gate"].double().view(128)
    scaled = o * torch.rsqrt(o.square().mean() + values["norm_eps"])
    return scaled * values["norm_weight"].double() * torch.sigmoid(gate)


@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float16])
def test_o_is_rounded_to_the_activation_type_before_the_norm_and_the_result_once_after_it(
    fused, run, call, activation
):
    values = one_row(call, fused, activation=activation, scale=1.0)
    slot = slot_of(values)
    # No decay, beta = 0, q one-hot: o is the state's first key column.
    values["raw_beta"].fill_(-3e4)
    values["raw_gate"].fill_(-3e4)
    values["weight"].zero_()
    values["weight"][0, 3, 0] = 1
    values["x"].fill_(BIG)
    o = values["state"][slot, 0, :, 0].double()
    output = run(fused, values).view(128)
    expected = norm_of(o.to(activation).double(), values).to(activation)
    unrounded = norm_of(o, values).to(activation)
    assert int((output != expected).sum()) <= 1, "o is rounded before the norm"
    assert int((output != unrounded).sum()) > 10, "the test would notice"


def test_float32_activations_are_rounded_nowhere(fused, run, call):
    values = one_row(call, fused, activation=torch.float32, scale=1.0)
    slot = slot_of(values)
    values["raw_beta"].fill_(-3e4)
    values["raw_gate"].fill_(-3e4)
    values["weight"].zero_()
    values["weight"][0, 3, 0] = 1
    values["x"].fill_(BIG)
    o = values["state"][slot, 0, :, 0].double()
    output = run(fused, values).view(128).double()
    torch.testing.assert_close(output, norm_of(o, values), rtol=2e-6, atol=1e-7)


def test_a_bf16_pool_is_the_float32_result_rounded_to_nearest_even_when_stored(operator, run, call):
    for lower_bound in (-5.0, None):
        for state_layout in ("vk", "kv"):
            for activation in (torch.bfloat16, torch.float32):
                bf16 = call(
                    operator,
                    H=1,
                    T=2,
                    state_dtype=torch.bfloat16,
                    lower_bound=lower_bound,
                    state_layout=state_layout,
                    activation=activation,
                )
                wide = clone(bf16)
                wide["state"] = bf16["state"].float()
                _, state = exact(operator, bf16)
                output = run(operator, bf16)
                # The output comes from the float32 state, before the pool is rounded. (Sums over
                # pairs of bf16 may go in another order, which shows in float32's last bits.)
                grain = torch.finfo(activation).eps
                torch.testing.assert_close(
                    output, run(operator, wide), rtol=2 * grain, atol=max(grain / 8, 1e-6)
                )
                assert_rounded_once(bf16["state"], state)


def test_ties_go_to_the_even_neighbour_in_a_bf16_pool(run, call):
    values = one_row(call, PACKED, activation=torch.float32, state_dtype=torch.bfloat16)
    slot = slot_of(values)
    # No decay, beta = 1, k one-hot: the first key column becomes v, exactly.
    values["raw_beta"].fill_(100.0)
    values["raw_gate"].fill_(-3e38)
    q, k, v = values["mixed_qkv"].view(3, 128)
    k.zero_()
    k[0] = BIG
    halves = torch.arange(128) * 2.0**-8
    v.copy_(1 + halves)  # every other value lies midway between two bf16 numbers
    q.zero_()
    values["state"][slot] = 1
    run(PACKED, values)
    assert_same_bits(values["state"][slot, 0, :, 0], v.bfloat16(), "ties")
    odd = values["state"][slot, 0, 1::2, 0].float()
    steps = (odd - 1) * 2**7
    assert torch.equal(steps % 2, torch.zeros(64)), "a tie lands on an even mantissa"


def test_a_float32_output_is_the_unrounded_o(run, call):
    for activation in (torch.bfloat16, torch.float16):
        values = call(PACKED, activation=activation)
        wide = run(PACKED, clone(values), torch.float32)
        assert wide.dtype is torch.float32
        assert_same_bits(run(PACKED, values), wide.to(activation), "output")
        assert not torch.equal(wide.to(activation).float(), wide)


def test_o_is_formed_from_the_state_in_registers_not_from_the_rounded_pool(run, call):
    # S = 0, one-hot k and q, beta = 1: o is v, which a bf16 pool cannot hold.
    values = one_row(call, PACKED, activation=torch.float32, state_dtype=torch.bfloat16, scale=1.0)
    values["raw_beta"].fill_(100.0)
    q, k, v = values["mixed_qkv"].view(3, 128)
    q.zero_()
    k.zero_()
    q[0] = k[0] = BIG
    v.copy_(torch.linspace(1, 2, 128))
    values["state"][slot_of(values)] = 0
    output = run(PACKED, values).view(128)
    torch.testing.assert_close(output, v, rtol=1e-6, atol=0)
    assert not torch.equal(v.bfloat16().float(), v)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_a_bf16_pool_is_rounded_at_checkpoints_only(run, call, lower_bound):
    bf16 = call(
        SPECULATIVE, T=4, N=2, R=8, S=9, H=1, state_dtype=torch.bfloat16, lower_bound=lower_bound
    )
    _, state = exact(SPECULATIVE, bf16)  # rounds nothing on the way
    assert len(set(bf16["state_indices"].flatten().tolist())) == 8
    run(SPECULATIVE, bf16)
    assert_rounded_once(bf16["state"], state)


def test_rounding_to_f16_saturates_to_infinity_not_to_garbage(run, call):
    values = call(PACKED, activation=torch.float16, scale=1e6)
    wide = run(PACKED, clone(values), torch.float32)
    output = run(PACKED, values)
    assert_same_bits(output, wide.half(), "output")
    assert torch.isinf(output).any() and math.isinf(float(output.abs().max()))
