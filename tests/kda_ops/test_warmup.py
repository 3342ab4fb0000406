"""Warm-up: which kernels a description or a function's calls need, found without a GPU."""

import itertools
import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import kda_ops
from kda_kernels._cpu import build
from kda_kernels._cute import compile as backend
from kda_kernels._cute import parallel
from kda_kernels.artifacts import Artifact
from kda_kernels.contract.example import blank, shadow
from kda_kernels.errors import ContractError, DtypeError, UnsupportedError
from kda_kernels.packed_decode import launch
from kda_kernels.packed_decode.contract import CONTRACT
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, draw, output_of
from kda_kernels.testing.device import launch as call
from kda_ops import ahead, calls

BF16, F32 = torch.bfloat16, torch.float32
ON_H200 = {"arch": "sm_90a"}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The jobs that would be compiled; nothing is."""
    jobs = []

    def build_all(wanted, processes=None):
        jobs.extend(wanted)
        return [Artifact(tmp_path / "object", built=True) for _ in wanted]

    monkeypatch.setattr(backend, "missing", lambda: "")
    monkeypatch.setattr(parallel, "build_all", build_all)
    return jobs


def arguments(rows=3, heads=2, **fields):
    values = draw(CONTRACT, Case(sizes={"B": rows, "H": heads, "S": rows + 2}, **fields))
    return [values[t.name] for t in CONTRACT.tensors]


def test_on_the_cpu_the_operator_s_kernel_is_built_and_no_size_is_needed():
    (ready,) = kda_ops.warmup("packed_decode", device="cpu")
    assert (ready.operator, ready.arch, ready.variant) == ("packed_decode", "cpu", "")
    assert build.describe()["kernel packed_decode"] != "not built yet"
    (again,) = kda_ops.warmup("packed_kda_decode", device="cpu")
    assert not again.built


def test_every_number_of_rows_and_heads_gets_its_schedule_once(compiled):
    rows, heads = (1, 8, 32, 128, 512), (12, 64)
    ready = kda_ops.warmup("packed_decode", heads=heads, rows=rows, state_dtype=BF16, **ON_H200)
    wanted = set()
    for r, h in itertools.product(rows, heads):
        values = draw(CONTRACT, Case(sizes={"B": r, "H": h, "S": r}, state_dtype=BF16))
        wanted.add(repr(launch.variant_of(values, BF16, 132)))
    assert {one.variant for one in ready} == {repr(job.variant) for job in compiled} == wanted
    assert len(ready) == len(compiled) == len(wanted) >= 3
    assert all(one.built and one.arch == "sm_90a" for one in ready)


def test_processors_decide_on_the_schedule_where_the_device_is_not_here(compiled):
    described = {"heads": 12, "rows": 32, **ON_H200}
    few, many = (kda_ops.warmup("packed_decode", processors=p, **described) for p in (8, 4000))
    assert few[0].variant != many[0].variant


@pytest.mark.parametrize(
    ("options", "case"),
    [
        ({}, {}),
        ({"activation_dtype": torch.float16}, {"activation": torch.float16}),
        ({"state_layout": "kv", "state_dtype": BF16}, {"state_dtype": BF16}),
        ({"index_dtype": None}, {"absent": frozenset({"state_indices"})}),
        ({"index_dtype": torch.int64, "first_slot": None}, {"index_dtype": torch.int64}),
        ({"parameter_dtype": BF16, "lower_bound": None}, {"parameter_dtype": BF16}),
    ],
    ids=lambda value: ",".join(value) or "defaults",
)
def test_a_description_leads_to_the_variant_of_the_call_it_describes(options, case, compiled):
    (ready,) = kda_ops.warmup("packed_decode", heads=2, rows=3, **options, **ON_H200)
    scalars = {k: v for k, v in options.items() if not k.endswith("dtype")}
    values = draw(CONTRACT, Case(sizes={"B": 3, "H": 2, "S": 4}, scalars=scalars, **case))
    assert ready.variant == repr(launch.variant_of(values, values["mixed_qkv"].dtype, 132))


def test_a_function_s_calls_are_found_and_nothing_is_computed(compiled):
    values = arguments(rows=4)
    before = values[5].clone()

    def step(*tensors, output=None):
        kda_ops.packed_kda_decode(*tensors, state_layout="kv", output=output)
        return kda_ops.packed_kda_decode(*tensors, first_slot=None).float().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ready = kda_ops.warmup(step, *values, **ON_H200)
    assert torch.equal(values[5], before)
    found = [job.variant for job in compiled]
    assert [(v.layout, v.wraps) for v in found] == [("kv", False), ("vk", True)]
    assert [one.variant for one in ready] == [repr(v) for v in found]


def test_on_a_gpu_kernels_are_compiled_then_each_launched_once_on_nothing(compiled, monkeypatch):
    launched = []

    def cuda_kernel(operator, values, facts):
        assert values["state"].shape[0] == 0 and values["mixed_qkv"].shape[0] == 512
        return lambda *given: launched.append((operator.name, len(given), given[-1].dtype))

    host, properties = torch.device("cpu"), SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: launched.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(ahead, "blank", lambda operator, values, _: blank(operator, values, host))
    monkeypatch.setattr(ahead, "cuda_kernel", cuda_kernel)
    described = {"heads": 64, "rows": [512, 512], "output_dtype": F32, "index_dtype": None}
    monkeypatch.setattr(torch, "empty", partial(_empty_on, host, torch.empty))
    (ready,) = kda_ops.warmup("packed_decode", device="cuda:0", **described)
    assert launched == [("packed_decode", 12, F32), "synchronized"]
    assert ready.arch == "sm_90a" and ready.built
    assert [repr(job.variant) for job in compiled] == [ready.variant]


def _empty_on(host, empty, *shape, **options):
    if torch.device(options.get("device", host)).type == "cuda":
        options["device"] = host
    return empty(*shape, **options)


def test_a_module_s_parameters_and_pools_count_as_they_are(compiled):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.A_log = torch.nn.Parameter(torch.zeros(1, 1, 2, 1))
            self.register_buffer("pool", torch.zeros(5, 2, 128, 128, dtype=BF16))

        def forward(self, qkv, gate, beta, bias, slots):
            self.pool[0] += 1
            return kda_ops.packed_kda_decode(qkv, gate, beta, self.A_log, bias, self.pool, slots)

    layer = Layer()
    qkv, gate, beta, _, bias, _, slots = arguments()
    kda_ops.warmup(layer, qkv, gate, beta, bias, slots, **ON_H200)
    assert not layer.pool.any()
    assert compiled[0].variant.state == "bfloat16"
    assert compiled[0].variant.ranks["A_log"] == 4


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
@pytest.mark.parametrize("fields", [{}, {"row_padding": 4, "row_offset": 1, "slot_padding": 64}])
def test_shadows_and_blanks_lie_like_the_call(contract, fields):
    sizes = {"B": 3, "R": 4, "N": 2, "T": 2, "H": 2, "S": 9, "L": 3}
    values = draw(contract, Case(sizes=sizes, window="DS", **fields))
    shadows = {
        n: shadow(v, v.data_ptr()) if isinstance(v, torch.Tensor) else v for n, v in values.items()
    }
    pools = {t.name for t in contract.tensors if t.role.value == "updated in place"}
    blanks = blank(contract, shadows, torch.device("cpu"))
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            assert blanks[name] == value
            continue
        for other in (shadows[name], blanks[name]):
            assert other.dtype == value.dtype
            assert other.stride() == value.stride() or other.numel() < 2
            assert name in pools or other.data_ptr() % 16 == value.data_ptr() % 16
        assert shadows[name].shape == value.shape
        assert blanks[name].shape == ((0, *value.shape[1:]) if name in pools else value.shape)


def test_a_blank_call_writes_zeros_to_its_output_and_nothing_else():
    values = draw(CONTRACT, Case(sizes={"B": 3, "H": 2, "S": 5}))
    there = blank(CONTRACT, values, torch.device("cpu"))
    assert not call(CONTRACT, there, output_of(CONTRACT, values)).any()


@pytest.mark.parametrize(
    ("given", "options", "error", "said"),
    [
        (("nothing",), {}, ValueError, "no operator 'nothing'; there are 'packed_decode'"),
        (("packed_decode",), ON_H200, TypeError, "heads= and rows= choose the GPU kernel"),
        (("packed_decode",), {"arch": "sm_75"}, ValueError, "not compiled for 'sm_75'; they are"),
        (("packed_decode",), {"device": "cpu", "window": 3}, TypeError, "no option window; it has"),
        (("packed_decode",), {"device": "cpu", **ON_H200}, TypeError, "one of device and arch"),
        (("packed_decode",), {"device": "cpu", "bundle": "x"}, TypeError, "belong to arch"),
        (
            ("fused_decode",),
            {"device": "cpu", "conv_layout": "sd"},
            ValueError,
            "'sd' is no layout",
        ),
        (("packed_decode", 1), {}, TypeError, "inputs belong to a function"),
        ((kda_ops.packed_kda_decode, 1), {"rows": 1}, TypeError, "belong to an operator's name"),
        (
            ("packed_decode",),
            {"device": "cpu", "state_dtype": torch.float16},
            DtypeError,
            "state must be float32 or bfloat16",
        ),
        (
            ("packed_decode",),
            {"device": "cpu", "lower_bound": 1.0},
            ContractError,
            "lower_bound must be finite and < 0",
        ),
        (
            ("packed_fused_decode",),
            {"heads": 1, "rows": 17, "tokens": 17, **ON_H200},
            UnsupportedError,
            "T of at most 16 tokens on cuda, got T = 17",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(given, options, error, said):
    with pytest.raises(error, match=said):
        kda_ops.warmup(*given, **options)


def test_a_compiled_function_is_refused_because_calling_it_compiles():
    function = torch.compile(kda_ops.packed_kda_decode, backend="eager")
    with pytest.raises(TypeError, match="call it once with its inputs, outside of a CUDA graph"):
        kda_ops.warmup(function, *arguments())


def test_where_cute_dsl_is_missing_warm_up_for_a_gpu_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(backend, "missing", lambda: "no nvidia-cutlass-dsl")
    with pytest.raises(UnsupportedError, match=r"pip install 'kda-ops\[cu13\]'.* sm_90a and no nv"):
        kda_ops.warmup("packed_decode", heads=1, rows=1, **ON_H200)


def test_an_empty_batch_needs_no_kernel(compiled):
    assert kda_ops.warmup("packed_decode", heads=4, rows=[0], **ON_H200) == ()
    assert compiled == []


def test_calls_with_an_output_are_seen_with_its_type(compiled):
    values = arguments()
    output = torch.empty(3, 1, 2, 128)
    (seen,) = calls.seen(
        lambda *v: kda_ops.packed_kda_decode(*v[:-1], output=v[-1]), *values, output
    )
    assert seen.facts.output_dtype == F32
    assert seen.values["mixed_qkv"].is_meta
