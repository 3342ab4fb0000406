"""What only the C++ kernels can get wrong: conversions in registers, exp, threads, NaN bits."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_kernels._cpu import build
from kda_kernels.contract.spec import Operator
from kda_kernels.testing.cases import clone, output_of
from kda_kernels.testing.compare import assert_same_bits

D = 128


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def run_kernel(operator: Operator, values: dict[str, Any]) -> Tensor:
    output = output_of(operator, values)
    build.load(operator.name)(*[values[a.name] for a in operator.abi], output)
    return output


def step(
    v: Tensor,
    state: Tensor,
    *,
    layout: str = "vk",
    write: bool = True,
    scale: float = 1.0,
    raw_gate: Tensor | None = None,
    A_log: Tensor | None = None,
    lower_bound: float | None = -5.0,
) -> Tensor:
    """One packed step with q = k = the first unit vector exactly, beta exactly 1 (write) or 0.

    v is [B, H, D]. In float32, (1024 / sqrt(1024**2 + 1e-6)) is 1.
    """
    rows, heads, _ = v.shape
    unit = torch.zeros_like(v)
    unit[..., 0] = 1024
    mixed = torch.stack([unit, unit, v], 1).reshape(rows, -1)
    gate = torch.zeros(rows, heads * D) if raw_gate is None else raw_gate
    beta = torch.full((rows, heads), 200.0 if write else -200.0)
    output = torch.empty(rows, 1, heads, D, dtype=v.dtype)
    A_log = torch.zeros(heads) if A_log is None else A_log
    gates = (gate.to(v.dtype), beta.to(v.dtype), A_log, torch.zeros(heads * D))
    tail = (None, scale, lower_bound, 0, layout, output)
    build.load("packed_decode")(mixed, *gates, state, *tail)
    return output


def first_key(state: Tensor, layout: str) -> Tensor:
    return state[..., 0] if layout == "vk" else state[..., 0, :]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_activation_is_read_exactly(dtype: torch.dtype) -> None:
    v = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(8, 64, D)
    state = torch.zeros(8, 64, D, D)
    step(v, state)
    read, expected = first_key(state, "vk"), v.float()
    assert torch.equal(read.isnan(), expected.isnan())
    assert torch.equal(read.nan_to_num(7), expected.nan_to_num(7))


def awkward(count: int) -> Tensor:
    """Give float32 numbers of all magnitudes, and many that lie halfway between two bf16."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    halfway = (bits & ~0xFFFF) | 0x8000
    numbers = torch.cat([bits, halfway, halfway + 1, halfway - 1]).view(torch.float32)
    numbers[:4] = torch.tensor([math.inf, -math.inf, math.nan, torch.finfo(torch.float32).max])
    return numbers


@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_a_bf16_state_is_rounded_to_nearest_even_and_keeps_nan(layout: str) -> None:
    v = awkward(4 * 4 * D // 4).view(4, 4, D)
    state = torch.zeros(4, 4, D, D, dtype=torch.bfloat16)
    step(v, state, layout=layout)
    kept, expected = first_key(state, layout), v.to(torch.bfloat16)
    assert torch.equal(kept.isnan(), expected.isnan())
    assert torch.equal(kept.nan_to_num(7), expected.nan_to_num(7))


def test_subnormal_numbers_survive_the_state() -> None:
    v = torch.full((1, 1, D), 2.0**-140)
    state = torch.zeros(1, 1, D, D)
    step(v, state)
    assert torch.equal(first_key(state, "vk"), v[0, 0].expand(1, 1, D))


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("payload", [0x7FFFFFFF, -1, 0x7F800001])
def test_a_nan_of_any_payload_stays_nan_in_a_bf16_state(layout: str, payload: int) -> None:
    nan = torch.tensor([payload], dtype=torch.int32).view(torch.float32)
    state = torch.ones(1, 1, D, D, dtype=torch.bfloat16)
    step(torch.ones(1, 1, D), state, layout=layout, A_log=nan)
    assert state.isnan().all()
    state = torch.ones(1, 1, D, D, dtype=torch.bfloat16)
    step(nan.expand(1, 1, D).contiguous(), state, layout=layout)
    assert first_key(state, layout).isnan().all()


def test_an_f16_output_is_rounded_to_nearest_even_also_where_it_is_subnormal_or_overflows() -> None:
    v = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    v = v[v.isfinite()].view(8, 62, D)
    v = torch.where(v == 0, torch.ones(()).half(), v)  # a sum with the state's +0 is +0
    for scale in (0.3, 3.0):
        output = step(v, torch.zeros(8, 62, D, D), scale=scale)
        expected = (v.float() * torch.tensor(scale)).to(torch.float16)
        assert_same_bits(output[:, 0], expected, f"scale {scale}")


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_decay_is_within_a_few_units_of_float64_over_the_whole_range(
    lower_bound: float | None,
) -> None:
    a = torch.linspace(-120, 120, 64 * D).view(1, 64 * D)
    state = torch.ones(1, 64, D, D)
    step(torch.zeros(1, 64, D), state, write=False, raw_gate=a, lower_bound=lower_bound)
    wide = a.double().view(64, D)
    if lower_bound is None:
        g = -torch.nn.functional.softplus(wide, threshold=1e9)
    else:
        g = lower_bound * torch.sigmoid(wide)
    exact, decay = g.exp(), state[0, :, 0].double()
    # 2 units for each exp, and g's own rounding, which exp multiplies by |g|.
    units = (decay - exact).abs() / (exact * 2.0**-24 + 2.0**-149)
    assert float((units / (4 + 4 * g.abs())).max()) <= 1


@pytest.mark.parametrize("gate", [-200.0, -20.0, 0.0, 19.9, 20.0, 20.1, 88.0, 89.0, 100.0, 3e38])
def test_softplus_neither_overflows_nor_makes_nan(gate: float) -> None:
    state = torch.ones(1, 1, D, D)
    log_rate = torch.tensor([math.log(1e-3)])
    gates = torch.full((1, D), gate)
    quiet = dict(write=False, raw_gate=gates, A_log=log_rate, lower_bound=None)
    step(torch.zeros(1, 1, D), state, **quiet)
    a = float(gates[0, 0])
    softplus = a if a > 20 else math.log1p(math.exp(a))
    expected = math.exp(-math.exp(float(log_rate)) * softplus)
    torch.testing.assert_close(state, torch.full_like(state, expected), rtol=1e-6, atol=0)


def test_any_number_of_threads_gives_the_same_bits(
    operator: Operator, call: Callable[..., dict[str, Any]], threads: Callable[[int], None]
) -> None:
    for heads, layout in ((1, "vk"), (1, "kv"), (3, "kv")):
        values = call(operator, H=heads, B=1, N=1, R=3, state_layout=layout)
        results = []
        for count in (1, 2, 3, 8):
            threads(count)
            mine = clone(values)
            results.append((run_kernel(operator, mine), mine["state"]))
        for output, state in results[1:]:
            assert_same_bits(output, results[0][0], "output")
            assert_same_bits(state, results[0][1], "state")


def test_duplicate_destinations_and_wild_boundaries_crash_nothing(
    call: Callable[..., dict[str, Any]], operator: Operator
) -> None:
    values = call(operator)
    values["state_indices"] = torch.full_like(values["state_indices"], 2)
    if "query_start_loc" in values:
        values["query_start_loc"] = torch.tensor([2**31 - 1, -5, 4], dtype=torch.int32)
    output = run_kernel(operator, values)
    assert not output.isnan().any()


def test_a_kernel_works_when_called_from_many_python_threads(
    call: Callable[..., dict[str, Any]], operator: Operator
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    values = call(operator)
    expected = run_kernel(operator, clone(values))
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: run_kernel(operator, clone(values)), range(16)))
    for output in outputs:
        assert_same_bits(output, expected, "output")
