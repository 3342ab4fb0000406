"""The key of a call: it changes with what the validator looks at, and with nothing else."""

import re

import pytest
import torch

from kda_kernels.contract.signature import key, parameters
from kda_kernels.contract.spec import Layout, Role
from kda_kernels.plan import CONTRACTS, Launcher, launcher
from kda_kernels.testing.cases import Case, clone, draw, output_of, strided

SIZES = {"B": 3, "R": 6, "N": 2, "T": 3, "H": 2, "S": 9, "L": 3}


def key_of(contract, values, output=None):
    out = output is not None
    namespace = {
        "grad_enabled": torch.is_grad_enabled,
        "inference_enabled": torch.is_inference_mode_enabled,
    }
    source = f"lambda {parameters(contract, out=out)}: {key(contract, out=out)}"
    arguments = contract.abi if out else contract.arguments
    positional = [values[a.name] for a in arguments if not a.keyword]
    keywords = {a.name: values[a.name] for a in arguments if a.keyword}
    if out:
        keywords["output"] = output
    return eval(source, namespace)(*positional, **keywords)


@pytest.fixture(params=CONTRACTS, ids=lambda contract: contract.name)
def contract(request):
    return request.param


def legal(contract, **fields):
    return draw(contract, Case(sizes=SIZES, absent=frozenset(), **fields))


def test_values_and_addresses_of_row_inputs_do_not_change_the_key(contract):
    values = legal(contract)
    same = legal(contract, seed=5)
    for argument in contract.tensors:
        if argument.layout in (Layout.ROWS, Layout.READ_ROWS):
            rows = same[argument.name]
            moved = torch.empty(rows.numel() + 1, dtype=rows.dtype)[1:].view(rows.shape)
            same[argument.name] = moved.copy_(rows)
    assert hash(key_of(contract, values)) == hash(key_of(contract, same))
    assert key_of(contract, values) == key_of(contract, same)


def test_shape_stride_and_type_of_every_tensor_change_the_key(contract):
    # Tensors without memory (meta, fake) need no key: the dispatcher sends them elsewhere.
    values = legal(contract)
    known = key_of(contract, values)
    for argument in contract.tensors:
        value = values[argument.name]
        others = [value.unsqueeze(0), value.double()]
        if value.dim() > 1 and argument.layout is not Layout.STRIDED:
            others.append(value.transpose(-1, -2))
        for other in others:
            assert key_of(contract, values | {argument.name: other}) != known, argument.name


def test_strides_of_indices_do_not_change_the_key_because_every_stride_is_legal(contract):
    values = legal(contract)
    known = key_of(contract, values)
    for argument in contract.tensors:
        if argument.layout is Layout.STRIDED:
            value = values[argument.name]
            apart = torch.stack([value, value], -1)[..., 0]
            assert apart.stride() != value.stride()
            assert key_of(contract, values | {argument.name: apart}) == known, argument.name


def test_alignment_of_pools_changes_the_key(contract):
    values = legal(contract, window="DS")
    for argument in contract.tensors:
        if argument.role is Role.UPDATE:
            keys = set()
            for offset in (0, 1, 2):
                moved = strided(values[argument.name].contiguous(), 0, 8, offset)
                keys.add(key_of(contract, values | {argument.name: moved}))
            assert len(keys) == 3


def test_on_gpus_alignment_of_rows_and_parameters_is_part_of_the_key_too(contract):
    class OnGpu:
        """What a key asks of a tensor, as a GPU's tensor at another address answers."""

        is_cuda = True

        def __init__(self, tensor, address):
            self.tensor, self.address = tensor, address

        def __getattr__(self, name):
            return getattr(self.tensor, name)

        def data_ptr(self):
            return self.address

    names = {a.name for a in contract.tensors if not a.optional and a.layout is not Layout.STRIDED}
    values = legal(contract)
    there = {k: OnGpu(v, 512) if k in names else v for k, v in values.items()}
    known = key_of(contract, there)
    for name in names:
        for address, same in ((1024, True), (514, False), (520, False)):
            moved = key_of(contract, there | {name: OnGpu(values[name], address)})
            assert (moved == known) is same, name


def test_every_scalar_and_every_absent_argument_changes_the_key(contract):
    values = legal(contract)
    known = key_of(contract, values)
    others = {
        "scale": 0.5,
        "lower_bound": None,
        "norm_eps": 1e-6,
        "first_slot": 7,
        "state_layout": "kv",
        "output_dtype": torch.float32,
    }
    for argument in contract.scalars:
        assert key_of(contract, values | {argument.name: others[argument.name]}) != known
    for argument in contract.tensors:
        if argument.optional:
            assert key_of(contract, values | {argument.name: None}) != known


def test_the_caller_s_output_is_part_of_the_out_overloads_key(contract):
    values = legal(contract)
    output = output_of(contract, values)
    known = key_of(contract, values, output)
    assert key_of(contract, values, output.clone()) == known
    for other in (output.float(), output.mT, output.unsqueeze(0)):
        assert key_of(contract, values, other) != known


def test_asking_for_a_gradient_changes_the_key_under_grad_mode_only(contract):
    values = legal(contract)
    known = key_of(contract, values)
    wanting = values | {"A_log": values["A_log"].clone().requires_grad_()}
    assert key_of(contract, wanting) != known
    with torch.no_grad():
        assert key_of(contract, wanting) == known


def test_a_call_that_is_no_call_never_reaches_a_plan(contract):
    values = legal(contract)
    with pytest.raises(AttributeError):
        key_of(contract, values | {"state": None})
    assert key_of(contract, values | {"scale": float("nan")}) != key_of(
        contract, values | {"scale": float("nan")}
    )


def test_equal_signatures_share_a_plan_and_forget_drops_it(contract):
    run = Launcher(contract)
    first, second = legal(contract), legal(contract, seed=3)
    for values in (first, second, clone(first)):
        positional = [values[a.name] for a in contract.arguments if not a.keyword]
        run.allocate(
            *positional, **{a.name: values[a.name] for a in contract.arguments if a.keyword}
        )
    assert [len(plans) for plans in run._plans] == [1, 0]
    run.forget()
    assert [len(plans) for plans in run._plans] == [0, 0]
    assert launcher(contract.name) is not run


def test_the_key_of_the_cpu_is_the_general_key_without_devices(contract):
    for out in (False, True):
        lean = key(contract, out=out, cpu_only=True)
        assert "get_device" not in lean and "is_cuda" not in lean
        general = re.sub(r", \w+\.get_device\(\)", "", key(contract, out=out))
        assert lean == re.sub(r"\w+\.is_cuda and \([^()]*(?:\(\)[^()]*)*\), ", "", general)
