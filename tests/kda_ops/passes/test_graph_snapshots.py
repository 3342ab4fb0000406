"""Whole graphs before and after, to be read. Accept a change with EXPECTTEST_ACCEPT=1."""

import expecttest
import pytest
import torch


class TestGraphs(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _names(self, step):
        self.step = step

    def captured(self, dynamic=False, **changes):
        spelling = self.step.Spelling(**changes)
        x = self.step.inputs(spelling)
        if dynamic:
            for tensor in x:
                torch._dynamo.mark_dynamic(tensor, 0)
        return self.step.capture(self.step.StepLayer(spelling), *x)

    def test_the_step_before_the_pass(self):
        self.assertExpectedInline(
            self.captured().before,
            """\
arg0_1: bf16[4, 768]
arg1_1: bf16[4, 256]
arg2_1: f32[256]
arg3_1: f32[2]
arg4_1: f32[7, 2, 128, 128]
arg5_1: i64[4]
arg6_1: bf16[4, 2]
split = aten.split.Tensor(arg0_1, 256, -1)
getitem: bf16[4, 256] = getitem(split, 0)
getitem_1: bf16[4, 256] = getitem(split, 1)
getitem_2: bf16[4, 256] = getitem(split, 2)
view: bf16[4, 2, 128] = aten.view.default(getitem, [-1, 2, 128])
convert_element_type: f32[4, 2, 128] = prims.convert_element_type.default(view, torch.float32)
view_1: bf16[4, 2, 128] = aten.view.default(getitem_1, [-1, 2, 128])
convert_element_type_1: f32[4, 2, 128] = prims.convert_element_type.default(view_1,
    torch.float32)
view_2: bf16[4, 2, 128] = aten.view.default(getitem_2, [-1, 2, 128])
convert_element_type_2: f32[4, 2, 128] = prims.convert_element_type.default(view_2,
    torch.float32)
mul: f32[4, 2, 128] = aten.mul.Tensor(convert_element_type, convert_element_type)
sum_1: f32[4, 2, 1] = aten.sum.dim_IntList(mul, [-1], True)
add: f32[4, 2, 1] = aten.add.Tensor(sum_1, 1e-06)
rsqrt: f32[4, 2, 1] = aten.rsqrt.default(add)
mul_1: f32[4, 2, 128] = aten.mul.Tensor(convert_element_type, rsqrt)
mul_2: f32[4, 2, 128] = aten.mul.Tensor(convert_element_type_1, convert_element_type_1)
sum_2: f32[4, 2, 1] = aten.sum.dim_IntList(mul_2, [-1], True)
add_1: f32[4, 2, 1] = aten.add.Tensor(sum_2, 1e-06)
rsqrt_1: f32[4, 2, 1] = aten.rsqrt.default(add_1)
mul_3: f32[4, 2, 128] = aten.mul.Tensor(convert_element_type_1, rsqrt_1)
mul_4: f32[4, 2, 128] = aten.mul.Tensor(mul_1, 0.08838834764831845)
convert_element_type_3: f32[4, 256] = prims.convert_element_type.default(arg1_1, torch.float32)
view_3: f32[4, 2, 128] = aten.view.default(convert_element_type_3, [-1, 2, 128])
view_4: f32[2, 128] = aten.view.default(arg2_1, [2, 128])
add_2: f32[4, 2, 128] = aten.add.Tensor(view_3, view_4)
exp: f32[2] = aten.exp.default(arg3_1)
unsqueeze: f32[2, 1] = aten.unsqueeze.default(exp, 1)
neg: f32[2, 1] = aten.neg.default(unsqueeze)
exp_1: f32[4, 2, 128] = aten.exp.default(add_2)
log1p: f32[4, 2, 128] = aten.log1p.default(exp_1)
gt: torch.bool[4, 2, 128] = aten.gt.Scalar(add_2, 20)
where: f32[4, 2, 128] = aten.where.self(gt, add_2, log1p)
mul_5: f32[4, 2, 128] = aten.mul.Tensor(neg, where)
index: f32[4, 2, 128, 128] = aten.index.Tensor(arg4_1, [arg5_1])
exp_2: f32[4, 2, 128] = aten.exp.default(mul_5)
convert_element_type_4: f32[4, 2] = prims.convert_element_type.default(arg6_1, torch.float32)
sigmoid: f32[4, 2] = aten.sigmoid.default(convert_element_type_4)
unsqueeze_1: f32[4, 2, 128, 1] = aten.unsqueeze.default(exp_2, 3)
mul_6: f32[4, 2, 128, 128] = aten.mul.Tensor(index, unsqueeze_1)
unsqueeze_2: f32[4, 2, 128, 1] = aten.unsqueeze.default(mul_3, 3)
mul_7: f32[4, 2, 128, 128] = aten.mul.Tensor(mul_6, unsqueeze_2)
sum_3: f32[4, 2, 128] = aten.sum.dim_IntList(mul_7, [-2])
sub: f32[4, 2, 128] = aten.sub.Tensor(convert_element_type_2, sum_3)
unsqueeze_3: f32[4, 2, 1] = aten.unsqueeze.default(sigmoid, 2)
mul_8: f32[4, 2, 128] = aten.mul.Tensor(sub, unsqueeze_3)
unsqueeze_4: f32[4, 2, 128, 1] = aten.unsqueeze.default(mul_3, 3)
unsqueeze_5: f32[4, 2, 1, 128] = aten.unsqueeze.default(mul_8, 2)
mul_9: f32[4, 2, 128, 128] = aten.mul.Tensor(unsqueeze_4, unsqueeze_5)
add_3: f32[4, 2, 128, 128] = aten.add.Tensor(mul_6, mul_9)
unsqueeze_6: f32[4, 2, 128, 1] = aten.unsqueeze.default(mul_4, 3)
mul_10: f32[4, 2, 128, 128] = aten.mul.Tensor(add_3, unsqueeze_6)
sum_4: f32[4, 2, 128] = aten.sum.dim_IntList(mul_10, [-2])
index_put: f32[7, 2, 128, 128] = aten.index_put.default(arg4_1, [arg5_1], add_3)
convert_element_type_5: bf16[4, 2, 128] = prims.convert_element_type.default(sum_4,
    torch.bfloat16)
copy_: f32[7, 2, 128, 128] = aten.copy_.default(arg4_1, index_put)
return (convert_element_type_5,)
""",
        )

    def test_the_step_after_the_pass(self):
        self.assertExpectedInline(
            self.captured().after,
            """\
arg0_1: bf16[4, 768]
arg1_1: bf16[4, 256]
arg2_1: f32[256]
arg3_1: f32[2]
arg4_1: f32[7, 2, 128, 128]
arg5_1: i64[4]
arg6_1: bf16[4, 2]
auto_functionalized_v2 = auto_functionalized_v2(kda.packed_decode.default, mixed_qkv=arg0_1,
    raw_gate=arg1_1, raw_beta=arg6_1, A_log=arg3_1, dt_bias=arg2_1, state_indices=arg5_1,
    scale=0.08838834764831845, lower_bound=None, first_slot=None, state_layout=kv,
    output_dtype=None, _state_base_index=0, _all_bases=[arg4_1])
getitem_3: bf16[4, 1, 2, 128] = getitem(auto_functionalized_v2, 0)
getitem_4: f32[7, 2, 128, 128] = getitem(auto_functionalized_v2, 1)
reshape_default: bf16[4, 2, 128] = aten.reshape.default(getitem_3, [4, 2, 128])
copy_: f32[7, 2, 128, 128] = aten.copy_.default(arg4_1, getitem_4)
return (reshape_default,)
""",
        )

    def test_a_dynamic_batch_after_the_pass(self):
        captured = self.captured(dynamic=True, pool=torch.bfloat16, gate=self.step.bounded_gate)
        self.assertExpectedInline(
            captured.after,
            """\
arg0_1
arg1_1: bf16[s28, 768]
arg2_1: bf16[s28, 256]
arg3_1: f32[256]
arg4_1: f32[2]
arg5_1: bf16[7, 2, 128, 128]
arg6_1: i64[s28]
arg7_1: bf16[s28, 2]
auto_functionalized_v2 = auto_functionalized_v2(kda.packed_decode.default, mixed_qkv=arg1_1,
    raw_gate=arg2_1, raw_beta=arg7_1, A_log=arg4_1, dt_bias=arg3_1, state_indices=arg6_1,
    scale=0.08838834764831845, lower_bound=-5.0, first_slot=None, state_layout=kv,
    output_dtype=None, _state_base_index=0, _all_bases=[arg5_1])
getitem_3: bf16[s28, 1, 2, 128] = getitem(auto_functionalized_v2, 0)
getitem_4: bf16[7, 2, 128, 128] = getitem(auto_functionalized_v2, 1)
reshape_default: bf16[s28, 2, 128] = aten.reshape.default(getitem_3, [-1, 2, 128])
copy_: bf16[7, 2, 128, 128] = aten.copy_.default(arg5_1, getitem_4)
return (reshape_default,)
""",
        )

    def test_what_is_left_over_is_left_as_it_was(self):
        def split(mixed, heads):
            return tuple(p.tanh().view(-1, heads, 128).float() for p in mixed.chunk(3, -1))

        captured = self.captured(split=split, cast=False)
        self.assertExpectedInline(
            captured.after,
            """\
arg0_1: bf16[4, 768]
arg1_1: bf16[4, 256]
arg2_1: f32[256]
arg3_1: f32[2]
arg4_1: f32[7, 2, 128, 128]
arg5_1: i64[4]
arg6_1: bf16[4, 2]
split = aten.split.Tensor(arg0_1, 256, -1)
getitem: bf16[4, 256] = getitem(split, 0)
getitem_1: bf16[4, 256] = getitem(split, 1)
getitem_2: bf16[4, 256] = getitem(split, 2)
tanh: bf16[4, 256] = aten.tanh.default(getitem)
tanh_1: bf16[4, 256] = aten.tanh.default(getitem_1)
tanh_2: bf16[4, 256] = aten.tanh.default(getitem_2)
cat_default: bf16[4, 768] = aten.cat.default([tanh, tanh_1, tanh_2], 1)
auto_functionalized_v2 = auto_functionalized_v2(kda.packed_decode.default,
    mixed_qkv=cat_default, raw_gate=arg1_1, raw_beta=arg6_1, A_log=arg3_1, dt_bias=arg2_1,
    state_indices=arg5_1, scale=0.08838834764831845, lower_bound=None, first_slot=None,
    state_layout=kv, output_dtype=torch.float32, _state_base_index=0, _all_bases=[arg4_1])
getitem_3: f32[4, 1, 2, 128] = getitem(auto_functionalized_v2, 0)
getitem_4: f32[7, 2, 128, 128] = getitem(auto_functionalized_v2, 1)
reshape_default: f32[4, 2, 128] = aten.reshape.default(getitem_3, [4, 2, 128])
copy_: f32[7, 2, 128, 128] = aten.copy_.default(arg4_1, getitem_4)
return (reshape_default,)
""",
        )
