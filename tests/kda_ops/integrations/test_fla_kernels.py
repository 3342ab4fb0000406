"""Decoding through the operator agrees with flash-linear-attention's own Triton kernels."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.gpu
BF16, F32 = torch.bfloat16, torch.float32
# Both round q, k and v to the activation type, where an exponential of another last digit makes
# another value; states keep that in float32.
TOLERANCE = {BF16: 2e-2, F32: 5e-5}
MISSING = "flash-linear-attention is not installed"
imported = partial(pytest.importorskip, reason=MISSING, exc_type=ImportError)


@pytest.fixture(scope="session")
def kda():
    """The library's kernels; imported before a stand-in is in its layer's place."""
    return imported("fla.ops.kda")


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("options", "dtype"), [({}, BF16), ({"lower_bound": -5.0, "bias": True}, BF16), ({}, F32)]
)
def test_a_layer_of_the_library_s_parts_decodes_as_by_fused_recurrent_kda(
    kda, fla, options, dtype, rows
):
    modules = imported("fla.modules")
    parts = SimpleNamespace(
        conv=modules.ShortConvolution,
        norm=modules.FusedRMSNormGated,
        recurrent=kda.fused_recurrent_kda,
    )
    layer = fla.KimiDeltaAttention(parts, heads=4, **options).eval().to("cuda", dtype)
    fla.compare(layer, rows, tolerance=TOLERANCE[dtype])


def test_the_recurrence_alone_agrees_with_fused_recurrent_kda(kda, fla):
    fused = kda.fused_recurrent_kda
    rows, heads = 3, 4
    shapes = {"q": (128,), "k": (128,), "v": (128,), "g": (128,), "beta": ()}
    given = {n: torch.randn(rows, 1, heads, *s).to("cuda", BF16) for n, s in shapes.items()}
    given |= {"A_log": torch.randn(heads).cuda(), "dt_bias": torch.randn(heads * 128).cuda()}
    state = torch.randn(rows, heads, 128, 128).cuda()
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    options = dict.fromkeys((*flags, "output_final_state", "state_v_first"), True)
    with torch.no_grad():
        wanted, after = fused(**given, **options, initial_state=state.clone(), lower_bound=-5.0)
    found = torch.ops.kda.packed_decode(
        torch.cat([given[n].flatten(1) for n in "qkv"], 1),
        given["g"].flatten(1),
        given["beta"].flatten(1),
        given["A_log"],
        given["dt_bias"],
        state,
        None,
    )
    fla.close(found, wanted)
    fla.close(state, after, 1e-5)


def test_the_library_s_own_layer_decodes_with_its_own_cache(comparison):
    layers, models = imported("fla.layers.kda"), imported("fla.models.utils")
    layer = layers.KimiDeltaAttention(hidden_size=256, num_heads=4, layer_idx=0)
    comparison(layer.eval().to("cuda", BF16), tolerance=TOLERANCE[BF16], new=models.Cache)
