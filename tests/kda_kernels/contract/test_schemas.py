"""The torch schemas of all overloads, as text and as torch reads them."""

import textwrap

import expecttest
import torch

import kda_ops  # noqa: F401 - registers torch.ops.kda
from kda_kernels.contract.schema import schema
from kda_kernels.contract.spec import Role, ScalarArg
from kda_kernels.plan import CONTRACTS


class TestSchemas(expecttest.TestCase):
    def test_the_six_schemas_are_these(self):
        lines = [schema(contract, out=out) for contract in CONTRACTS for out in (False, True)]
        text = "\n".join(textwrap.fill(line, 92, subsequent_indent="    ") for line in lines)
        self.assertExpectedInline(
            text,
            """\
packed_decode(Tensor mixed_qkv, Tensor raw_gate, Tensor raw_beta, Tensor A_log, Tensor
    dt_bias, Tensor(a!) state, Tensor? state_indices, *, float? scale=None, float?
    lower_bound=-5.0, int? first_slot=0, str state_layout="vk", ScalarType?
    output_dtype=None) -> Tensor
packed_decode.out(Tensor mixed_qkv, Tensor raw_gate, Tensor raw_beta, Tensor A_log, Tensor
    dt_bias, Tensor(a!) state, Tensor? state_indices, *, float? scale=None, float?
    lower_bound=-5.0, int? first_slot=0, str state_layout="vk", Tensor(b!) output) -> ()
fused_decode(Tensor x, Tensor weight, Tensor(a!) conv_state, Tensor raw_gate, Tensor
    raw_beta, Tensor A_log, Tensor dt_bias, Tensor? state_indices, Tensor(b!) state, Tensor
    output_gate, Tensor norm_weight, float? lower_bound=-5.0, float norm_eps=1e-05, *,
    Tensor? conv_bias=None, float? scale=None, int? first_slot=1, str state_layout="vk") ->
    Tensor
fused_decode.out(Tensor x, Tensor weight, Tensor(a!) conv_state, Tensor raw_gate, Tensor
    raw_beta, Tensor A_log, Tensor dt_bias, Tensor? state_indices, Tensor(b!) state, Tensor
    output_gate, Tensor norm_weight, float? lower_bound=-5.0, float norm_eps=1e-05, *,
    Tensor? conv_bias=None, float? scale=None, int? first_slot=1, str state_layout="vk",
    Tensor(c!) output) -> ()
packed_fused_decode(Tensor x, Tensor weight, Tensor(a!) conv_state, Tensor raw_gate, Tensor
    raw_beta, Tensor A_log, Tensor dt_bias, Tensor state_indices, Tensor(b!) state, Tensor
    output_gate, Tensor norm_weight, Tensor query_start_loc, Tensor num_accepted_tokens,
    float? lower_bound=-5.0, float norm_eps=1e-05, *, Tensor? t1_state_indices=None, Tensor?
    conv_bias=None, float? scale=None, int? first_slot=1, str state_layout="vk") -> Tensor
packed_fused_decode.out(Tensor x, Tensor weight, Tensor(a!) conv_state, Tensor raw_gate,
    Tensor raw_beta, Tensor A_log, Tensor dt_bias, Tensor state_indices, Tensor(b!) state,
    Tensor output_gate, Tensor norm_weight, Tensor query_start_loc, Tensor
    num_accepted_tokens, float? lower_bound=-5.0, float norm_eps=1e-05, *, Tensor?
    t1_state_indices=None, Tensor? conv_bias=None, float? scale=None, int? first_slot=1, str
    state_layout="vk", Tensor(c!) output) -> ()""",
        )


def test_the_registered_operators_have_the_contracts_schemas():
    for contract in CONTRACTS:
        packet = getattr(torch.ops.kda, contract.name)
        for out, overload in ((False, packet.default), (True, packet.out)):
            assert str(overload._schema) == str(
                torch._C.parse_schema(f"kda::{schema(contract, out=out)}")
            )


def test_pools_and_outputs_are_written_under_letters_of_their_own_and_nothing_else_is():
    for contract in CONTRACTS:
        for out in (False, True):
            parsed = torch._C.parse_schema(f"kda::{schema(contract, out=out)}")
            written = [a.name for a in parsed.arguments if a.is_write]
            pools = [a.name for a in contract.tensors if a.role is Role.UPDATE]
            assert written == pools + (["output"] if out else [])
            aliases = [tuple(a.alias_info.before_set) for a in parsed.arguments if a.is_write]
            assert len(set(aliases)) == len(aliases)
            assert len(parsed.returns) == (0 if out else 1)


def test_the_defaults_of_the_schema_are_the_contracts():
    for contract in CONTRACTS:
        parsed = {
            a.name: a
            for a in torch._C.parse_schema(f"kda::{schema(contract, out=False)}").arguments
        }
        assert list(parsed) == [a.name for a in contract.arguments]
        for argument in contract.scalars:
            assert parsed[argument.name].default_value == argument.default
        for argument in contract.arguments:
            assert parsed[argument.name].kwarg_only is argument.keyword
            if isinstance(argument, ScalarArg) or (argument.optional and argument.keyword):
                assert parsed[argument.name].has_default_value()
