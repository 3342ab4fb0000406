"""Two GPUs in one process: calls on the one that is not current, streams, mixed devices.

First uses, which ask for fresh processes, are in test_cuda_two_devices_first_use.py, slots that
move from one GPU to the other in test_state_cache_two_devices.py.
"""

import pytest
import torch

from kda_kernels.contract.spec import Role
from kda_kernels.errors import ContractError, UnsupportedError
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, draw
from kda_kernels.testing.compare import assert_same_bits
from kda_kernels.testing.device import assert_right_on, moved, on

pytestmark = pytest.mark.multigpu

F32, BF16 = torch.float32, torch.bfloat16
SIZES = {"B": 5, "R": 6, "N": 3, "H": 3, "S": 12, "L": 3}
SOME_WORK, MUCH_WORK = 100_000_000, 3_000_000_000  # clock cycles that a stream is busy

CASES = [
    pytest.param((contract, tokens), id=f"{contract.name}-{tokens}")
    for contract in CONTRACTS
    for tokens in ((1, 2) if "T" in contract.dims else (1,))
]


@pytest.fixture(params=CASES)
def operator(request):
    """An operator that has a GPU kernel, and how many tokens a sequence has."""
    return request.param


def inputs(operator, state=F32, layout="vk", seed=0):
    """A call on the CPU."""
    contract, tokens = operator
    scalars = {"state_layout": layout}
    sizes = SIZES | {"T": tokens, "R": 3 * tokens}
    fields = {"state_dtype": state, "slot_padding": 8, "seed": seed, "scalars": scalars}
    return draw(contract, Case(sizes=sizes, **fields))


def call(operator, values, out=None):
    """Call an operator as torch has it; return the output."""
    registered = getattr(torch.ops.kda, operator[0].name)
    if out is None:
        positional, keywords = arguments_of(operator[0].arguments, values)
        return registered(*positional, **keywords)
    positional, keywords = arguments_of(operator[0].abi, values)
    registered.out(*positional, **keywords, output=out)
    return out


def arguments_of(arguments, values):
    positional = [values[a.name] for a in arguments if not a.keyword]
    return positional, {a.name: values[a.name] for a in arguments if a.keyword}


def compiled(operator, values):
    """Call an operator in compiled code."""
    registered = getattr(torch.ops.kda, operator[0].name)
    positional, keywords = arguments_of(operator[0].arguments, values)

    @torch.compile(fullgraph=True)
    def run(*given, **named):
        return registered(*given, **named)

    return run(*positional, **keywords)


def pools(operator):
    return [a.name for a in operator[0].tensors if a.role is Role.UPDATE]


def assert_equal_calls(operator, here, output, wanted, expected):
    """Compare what a call left behind with what it left behind on the other device."""
    assert_same_bits(output.cpu(), expected.cpu(), "output")
    for name in pools(operator):
        assert_same_bits(here[name].cpu(), wanted[name].cpu(), name)


def on_first(operator, values):
    """What the call gives on the first device, while that is current."""
    wanted = on("cuda:0", values)
    with torch.cuda.device(0):
        return wanted, call(operator, wanted)


def captured(operator, there):
    """Run a call from a graph of its device, captured while the other one is current."""
    device = there["state"].device
    current = torch.cuda.current_device()
    call(operator, on(str(device), there))  # compiles the kernel
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with torch.cuda.graph(graph, stream=stream), torch.cuda.device(current):
        output = call(operator, there)
        assert torch.cuda.current_device() == current
    output.fill_(torch.nan)
    graph.replay()
    return output


@pytest.mark.parametrize("run", [call, compiled, captured])
@pytest.mark.parametrize("home", [0, 1])
def test_calls_are_right_where_the_other_device_is_current_and_it_stays_so(operator, home, run):
    values = inputs(operator, BF16 if home else F32, "kv" if home else "vk")
    wanted, expected = on_first(operator, values)
    there = on(f"cuda:{home}", values)
    with torch.cuda.device(1 - home):
        output = run(operator, there)
        assert torch.cuda.current_device() == 1 - home
    assert output.device == torch.device("cuda", home)
    assert_equal_calls(operator, there, output, wanted, expected)


@pytest.mark.parametrize(("state", "layout"), [(F32, "vk"), (BF16, "vk"), (F32, "kv")])
def test_calls_of_one_signature_that_alternate_between_devices_stay_apart(operator, state, layout):
    values = [inputs(operator, state, layout, seed) for seed in range(2)]
    wanted = [on_first(operator, some) for some in values]
    there = [on(f"cuda:{home}", some) for home, some in enumerate(values)]
    before = torch.cuda.current_device()
    outputs = [call(operator, there[home]) for home in (0, 1)]
    for home in (1, 0, 0, 1, 1):
        repeated = on(f"cuda:{home}", values[home])
        assert_equal_calls(operator, repeated, call(operator, repeated), *wanted[home])
    for home in (0, 1):
        assert_equal_calls(operator, there[home], outputs[home], *wanted[home])
    assert torch.cuda.current_device() == before


def test_the_second_device_s_results_are_within_the_budget_and_nothing_else_is_touched(operator):
    assert_right_on("cuda:1", operator[0], inputs(operator))


@pytest.mark.parametrize("home", [0, 1])
def test_a_side_stream_of_a_device_that_is_not_current_orders_the_call(operator, home):
    device, values, later = f"cuda:{home}", inputs(operator), inputs(operator, seed=1)
    first = operator[0].tensors[0].name
    wanted, expected = on_first(operator, values | {first: later[first]})
    there, new = on(device, values), on(device, later)[first]
    call(operator, on(device, values))  # compiles
    for other in (0, 1):
        torch.cuda.synchronize(other)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SOME_WORK)
        there[first].copy_(new)
        with torch.cuda.device(1 - home):
            output = call(operator, there)
            assert not side.query()  # nobody waited for it
            assert torch.cuda.current_device() == 1 - home
    side.synchronize()
    assert_equal_calls(operator, there, output, wanted, expected)


@pytest.mark.parametrize("home", [0, 1])
def test_a_busy_stream_of_the_other_device_holds_up_nothing(operator, home):
    device, values = f"cuda:{home}", inputs(operator)
    wanted, expected = on_first(operator, values)
    call(operator, on(device, values))  # compiles
    there = on(device, values)
    for other in (0, 1):
        torch.cuda.synchronize(other)
    with torch.cuda.device(1 - home):
        busy = torch.cuda.current_stream()
        torch.cuda._sleep(MUCH_WORK)
        output = call(operator, there)
        torch.cuda.current_stream(home).synchronize()
        assert not busy.query()
    busy.synchronize()
    assert_equal_calls(operator, there, output, wanted, expected)


@pytest.mark.parametrize("given", [False, True], ids=["allocated", "given output"])
def test_tensors_on_two_devices_are_refused_and_nothing_changes(operator, given):
    there = on("cuda:1", inputs(operator))
    with torch.cuda.device(0):
        output = call(operator, on("cuda:1", inputs(operator))).clone() if given else None
        names = [a.name for a in operator[0].tensors if there[a.name] is not None]
        before = {name: there[name].clone() for name in names}
        for name in names:
            mixed = there | {name: moved(there[name], "cuda:0")}
            with pytest.raises(ContractError, match=r"cuda:0|cuda:1"):
                call(operator, mixed, output)
            for kept in names:
                assert_same_bits(mixed[kept].cpu(), before[kept].cpu(), f"{kept} at {name}")
        if given:
            kept = output.clone()
            with pytest.raises(ContractError, match="output"):
                call(operator, there, output.to("cuda:0"))
            assert_same_bits(output.cpu(), kept.cpu(), "output")


def test_a_first_use_in_a_capture_of_a_device_that_is_not_current_says_what_to_do(monkeypatch):
    from kda_kernels._cute import compile as backend

    operator = (CONTRACTS[0], 1)
    values = inputs(operator) | {"scale": 0.71}  # a signature that nobody has called
    there = on("cuda:1", values)
    before = there["state"].clone()
    monkeypatch.setattr(backend, "_LOADED", {})
    with torch.cuda.device(0):
        stream = torch.cuda.Stream(1)
        with pytest.raises(UnsupportedError, match=r"kda_ops\.warmup\(\.\.\.\)"):
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream), torch.cuda.device(0):
                call(operator, there)
        torch.cuda.synchronize(1)
        assert_same_bits(there["state"].cpu(), before.cpu(), "state")
        assert bool(call(operator, there).any())
        assert torch.cuda.current_device() == 0
