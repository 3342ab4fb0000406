"""torch.export and AOTInductor of a model that calls the operators: pools are mutated buffers."""

import pytest
import torch

from kda_kernels.contract.spec import Role
from kda_kernels.testing.cases import clone
from kda_kernels.testing.compare import assert_same_bits

BATCH = ("B", "R", "N")
SIZES = {"B": 4, "R": 4, "N": 4, "T": 1, "S": 9}


class Step(torch.nn.Module):
    """One call; pools are buffers, weights are parameters, everything else is an input."""

    def __init__(self, operator, function, values):
        super().__init__()
        self.function = function
        self.held = []
        for argument in operator.tensors:
            value = values[argument.name]
            if argument.role is Role.UPDATE:
                self.register_buffer(argument.name, value)
            elif value is not None and not self.counts_rows(argument):
                self.register_parameter(argument.name, torch.nn.Parameter(value))
            else:
                continue
            self.held.append(argument.name)

    @staticmethod
    def counts_rows(argument):
        return any(e.symbol in BATCH for extents in argument.extents for e in extents)

    def forward(self, inputs):
        return self.function(**inputs, **{name: getattr(self, name) for name in self.held})


def inputs_of(operator, values):
    names = [a.name for a in operator.tensors if Step.counts_rows(a)]
    return {name: values[name] for name in names if values[name] is not None}


def axes(operator, name, tensor):
    """The axes of an input that count rows, as dynamic dimensions."""
    extents = next(e for e in operator.tensor(name).extents if len(e) == tensor.dim())
    return {i: torch.export.Dim.DYNAMIC for i, e in enumerate(extents) if e.symbol in BATCH}


@pytest.fixture(scope="module")
def exported(operator, function, call):
    """The exported program of each operator, with as many rows as one likes."""
    values = call(SIZES)
    module = Step(operator, function, values)
    inputs = inputs_of(operator, values)
    dynamic = {name: axes(operator, name, tensor) for name, tensor in inputs.items()}
    with torch.no_grad():
        return torch.export.export(module, (inputs,), dynamic_shapes=(dynamic,))


def test_the_signature_lists_one_buffer_mutation_per_pool(operator, exported):
    pools = {a.name for a in operator.tensors if a.role is Role.UPDATE}
    signature = exported.run_decompositions().graph_signature
    mutated = list(signature.buffers_to_mutate.values())
    assert len(mutated) == len(pools) and set(mutated) == pools
    assert len(signature.user_outputs) == 1 and not signature.user_inputs_to_mutate


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("batch", [4, 2, 7])
def test_the_exported_program_gives_the_eager_bits(
    operator, function, call, exported, decomposed, batch
):
    program = exported.run_decompositions() if decomposed else exported
    values = call({**SIZES, "B": batch, "R": batch, "N": batch})
    module = program.module()
    # The exported program holds the pools and weights that it was exported with.
    held = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    values.update({name: tensor.detach() for name, tensor in held.items() if name in values})
    again = clone(values)
    actual = module(inputs_of(operator, values))
    assert_same_bits(actual, function(**again), f"output of {batch} rows")
    for name, buffer in module.named_buffers():
        assert_same_bits(buffer, again[name], name)


def test_an_ahead_of_time_package_gives_the_eager_bits(tmp_path):
    import kda_ops
    from kda_kernels.packed_decode.contract import CONTRACT as PACKED_DECODE
    from kda_kernels.testing.cases import Case, draw

    values = draw(PACKED_DECODE, Case({"B": 3, "H": 2, "S": 7}))
    values.pop("output_dtype")
    step = Step(PACKED_DECODE, kda_ops.packed_kda_decode, clone(values))
    inputs = inputs_of(PACKED_DECODE, values)
    program = torch.export.export(step, (inputs,))
    path = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "step.pt2"),
        # The wrapper only makes one call: optimising it would be most of the test's time.
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )
    package = torch._inductor.aoti_load_package(path)
    for i in range(2):
        # The package keeps its pool from call to call.
        assert_same_bits(
            package(inputs), kda_ops.packed_kda_decode(**values), f"output of step {i}"
        )
