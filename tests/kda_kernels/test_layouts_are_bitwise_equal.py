"""How a tensor lies in memory changes no bit: strides, offsets, layouts, spellings."""

import math

import torch

from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import clone, strided
from kda_kernels.testing.compare import assert_same_bits, assert_storage_untouched

SPECULATIVE = CONTRACTS[2]
ROW_INPUTS = ("mixed_qkv", "x", "raw_gate", "raw_beta", "output_gate")
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def assert_equal_runs(operator, run, plain, other, what):
    """Two calls that say the same: equal outputs and equal pools, bit for bit."""
    assert_same_bits(run(operator, other), run(operator, plain), f"output, {what}")
    for name in ("state", "conv_state"):
        if name in plain:
            assert_same_bits(other[name], plain[name], f"{name}, {what}")


def row_axis(operator, name):
    return int(operator.tensor(name).extents[0][0].text == "1")


def test_every_row_input_equals_its_contiguous_copy_at_any_row_stride_and_alignment(
    operator, run, call
):
    names = [name for name in ROW_INPUTS if name in {a.name for a in operator.tensors}]
    assert len(names) == (3 if operator.name == "packed_decode" else 4)
    for i, activation in enumerate(TYPES):
        plain = call(operator, activation=activation, H=1 + i)
        for name in names:
            for padding, offset in ((1, 0), (0, 1), (5, 3), (64, 2)):
                values = clone(plain)
                axis = row_axis(operator, name)
                values[name] = strided(plain[name], axis, padding, offset)
                what = f"{name} in {activation} with {padding} between rows after {offset}"
                assert_equal_runs(operator, run, clone(plain), values, what)


def test_rows_that_are_all_the_same_memory_are_read_as_such(operator, run, call):
    # Gates and betas may be expanded (row stride 0); only the packed rows must be apart.
    plain = call(operator)
    for name in ROW_INPUTS[2:]:
        if name not in plain:
            continue
        values, axis = clone(plain), row_axis(operator, name)
        first = plain[name].narrow(axis, 0, 1)
        values[name] = first.expand(plain[name].shape)
        assert values[name].stride(axis) == 0
        copied = clone(plain)
        copied[name] = values[name].contiguous()
        assert_equal_runs(operator, run, copied, values, name)


def test_all_row_inputs_may_be_slices_of_one_projection(operator, run, call):
    for activation in TYPES:
        plain = call(operator, activation=activation, H=3)
        names = [name for name in ROW_INPUTS if name in plain]
        rows = plain[names[0]].shape[0]
        flat = [plain[name].reshape(rows, -1) for name in names]
        projection = torch.cat([*flat, torch.full((rows, 1), math.nan, dtype=activation)], 1)
        values, start = clone(plain), 0
        for name, part in zip(names, flat, strict=True):
            piece = projection[:, start : start + part.shape[1]]
            start += part.shape[1]
            if plain[name].dim() == 4:
                piece = piece.unflatten(1, (3, 128)).unsqueeze(0)
            elif row_axis(operator, name):
                piece = piece.unsqueeze(0)
            values[name] = piece
        assert_equal_runs(operator, run, plain, values, f"{activation}")


def test_every_spelling_of_gates_and_betas_means_the_same(operator, run, call):
    plain = call(operator, spelling=0)
    for spelling in (1, 2):
        values = call(operator, spelling=spelling)
        for name in ROW_INPUTS:
            if name in plain:
                values[name] = plain[name].reshape(values[name].shape)
        assert values["raw_gate"].dim() != plain["raw_gate"].dim()
        assert_equal_runs(operator, run, clone(plain), values, f"spelling {spelling}")


def test_parameters_of_any_shape_with_enough_elements_mean_the_same(operator, run, call):
    for dtype in (torch.float32, torch.bfloat16):
        plain = call(operator, H=3, parameter_dtype=dtype)
        for A_shape, bias_shape in (
            ((1, 1, 3, 1), (3, 128)),
            ((3, 1), (1, 1, 384)),
            ((1, 3), (384,)),
        ):
            values = clone(plain)
            values["A_log"] = plain["A_log"].view(A_shape)
            values["dt_bias"] = plain["dt_bias"].view(bias_shape)
            assert_equal_runs(operator, run, clone(plain), values, f"{A_shape} {dtype}")


def test_bf16_parameters_equal_their_float32_values(operator, run, call):
    for lower_bound in (-5.0, None):
        values = call(operator, parameter_dtype=torch.bfloat16, lower_bound=lower_bound)
        plain = clone(values)
        for name in ("A_log", "dt_bias"):
            plain[name] = values[name].float()
        assert_equal_runs(operator, run, plain, values, "parameters")


def test_sd_and_ds_windows_give_equal_outputs_and_equal_pools(fused, run, call):
    for columns in (3, 4, 6):
        for activation in TYPES:
            sd, ds = (
                call(fused, L=columns, T=columns - 2, R=2, S=12, activation=activation, window=w)
                for w in ("SD", "DS")
            )
            assert sd["conv_state"].stride(1) == 1 and ds["conv_state"].stride(2) == 1
            assert_equal_runs(fused, run, sd, ds, f"L = {columns}, {activation}")


def test_tap_major_and_channel_major_weights_give_equal_bits(fused, run, call):
    for dtype in (torch.float32, torch.bfloat16):
        for window in ("SD", "DS"):
            tap = call(fused, weight_dtype=dtype, H=3, window=window)
            channel = clone(tap)
            channel["weight"] = tap["weight"].mT.contiguous().mT
            assert channel["weight"].stride() == (4 * 384, 1, 4)
            assert_equal_runs(fused, run, tap, channel, f"weight, {dtype}")


def test_a_depthwise_conv1d_weight_is_a_channel_major_view(fused, run, call):
    tap = call(fused)
    conv = torch.nn.Conv1d(768, 768, 4, groups=768, bias=False)
    with torch.no_grad():
        conv.weight.copy_(tap["weight"].mT.reshape(768, 1, 4))
    values = clone(tap)
    values["weight"] = conv.weight.detach().view(3, 256, 4).transpose(1, 2)
    assert values["weight"].data_ptr() == conv.weight.data_ptr()
    assert_equal_runs(fused, run, tap, values, "weight")


def test_weights_in_the_activation_type_equal_their_float32_values(fused, run, call):
    for activation in (torch.bfloat16, torch.float16):
        values = call(fused, activation=activation, weight_dtype=activation)
        plain = clone(values)
        plain["weight"] = values["weight"].float()
        assert_equal_runs(fused, run, plain, values, f"{activation}")


def test_padding_between_slots_changes_nothing_and_is_not_touched(operator, run, call):
    for state_dtype in (torch.float32, torch.bfloat16):
        for window in ("SD", "DS"):
            padded = call(operator, slot_padding=24, state_dtype=state_dtype, window=window)
            plain, before = clone(padded), clone(padded)
            for name in ("state", "conv_state"):
                if name == "conv_state" and name in plain and window == "SD":
                    plain[name] = padded[name].mT.contiguous().mT
                elif name in plain:
                    plain[name] = padded[name].contiguous()
            assert_equal_runs(operator, run, plain, padded, f"{state_dtype}, {window}")
            for name in ("state", "conv_state"):
                if name in padded:
                    assert_storage_untouched(padded[name], before[name], name)


def test_a_kv_pool_is_the_transpose_of_a_vk_pool(operator, run, call):
    for state_dtype in (torch.float32, torch.bfloat16):
        vk = call(operator, state_dtype=state_dtype)
        kv = clone(vk)
        kv["state"], kv["state_layout"] = vk["state"].mT.contiguous(), "kv"
        first, second = run(operator, vk), run(operator, kv)
        grain = torch.finfo(first.dtype).eps
        torch.testing.assert_close(first, second, rtol=2 * grain, atol=grain)
        grain = max(torch.finfo(state_dtype).eps, 1e-6)
        torch.testing.assert_close(vk["state"], kv["state"].mT, rtol=2 * grain, atol=grain)


def test_bounds_counts_and_row_indices_may_lie_at_any_stride(run, call):
    for tokens, dtype in ((3, torch.int32), (1, torch.int32), (1, torch.int64)):
        plain = call(
            SPECULATIVE, T=tokens, N=2, R=2 * tokens, index_dtype=dtype, absent=frozenset()
        )
        values = clone(plain)
        for name in ("query_start_loc", "num_accepted_tokens", "t1_state_indices"):
            values[name] = torch.stack([plain[name], torch.full_like(plain[name], 8)], 1)[:, 0]
            assert values[name].stride(0) == 2
        assert_equal_runs(SPECULATIVE, run, plain, values, f"T = {tokens}, {dtype}")
