"""Whatever a layer is put together from, it becomes one fused_decode that computes the same."""

import pytest
import torch


def check_layer(layers, seed, device):
    chosen = layers.sampled(seed)
    traced = layers.trace(chosen, device=device)
    assert [f.operator for f in traced.findings] == ["kda::fused_decode"], vars(chosen)
    assert traced.difference < 1
    assert "aten.convolution.default" not in traced.targets


@pytest.mark.parametrize("seed", range(120))
def test_a_layer_of_spellings_at_random_becomes_one_operator(layers, seed):
    check_layer(layers, seed, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(0, 120, 8))
def test_a_layer_of_spellings_at_random_becomes_one_operator_on_cuda(layers, seed):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        check_layer(layers, seed, "cuda")


def test_the_layers_are_120_different_ones_and_each_is_rewritten_above(layers):
    assert len({repr(vars(layers.sampled(seed))) for seed in range(120)}) == 120


def test_every_alternative_of_every_part_is_among_them(layers):
    drawn = [vars(layers.sampled(seed)) for seed in range(120)]
    for part, options in layers.PARTS.items():
        assert all(any(choice[part] is option for choice in drawn) for option in options)


def test_three_steps_in_a_row_are_three_operators_on_the_same_pools(layers):
    chosen = layers.sampled(3, form="indexed")

    def thrice(c, t):
        return layers.run(c, t) + layers.run(c, t) + layers.run(c, t)

    traced = layers.trace(chosen, thrice)
    assert [f.operator for f in traced.findings] == ["kda::fused_decode"] * 3
    assert traced.difference < 3


def test_the_taps_of_a_module_are_read_where_they_are(layers):
    traced = layers.trace(layers.sampled(5, conv=layers.conv_module, bias=False))
    (found,) = traced.findings
    assert found.arguments["weight"].startswith("arg")
    assert "aten.clone.default" not in traced.targets


def test_constants_of_the_norm_are_forwarded_exactly(layers):
    def norm(o, w):
        return o * torch.rsqrt((o * o).sum(-1, keepdim=True) / 128 + 3e-4) * w

    (found,) = layers.trace(layers.sampled(5, norm=norm)).findings
    assert found.arguments["norm_eps"] == "0.0003"


def test_a_norm_without_weight_is_one_with_ones(layers):
    def norm(o, w):
        return o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5)

    traced = layers.trace(layers.sampled(5, norm=norm))
    assert traced.findings[0].arguments["norm_weight"] == "ones"
    assert traced.difference < 1


@pytest.mark.parametrize("gate", ["gate", "out_gate"])
def test_a_gate_that_is_computed_from_the_convolution_leaves_it_outside(layers, gate):
    chosen = layers.sampled(5, form="dense", activation=torch.float32, bias=False)

    def layer(c, t):
        """The layer's gate is what its convolution makes of q."""
        window = t["window"].transpose(1, 2) if c.channels_last else t["window"]
        mixed = c.silu(c.conv(window, t["x"], t["w"], None))
        return layers.run(c, t | {gate: mixed[:, : c.heads * layers.D]})

    traced = layers.trace(chosen, layer)
    (found,) = traced.findings
    assert found.operator == "kda::packed_decode"
    assert "ORDER" in [left.reason.name for left in found.left], found.left
    assert traced.difference < 1


def test_a_product_with_one_is_its_operand(layers):
    def conv(h, x, w, b):
        return (h[..., -3:].float() * w[:, :3]).sum(-1) + x.float() * 1 * w[:, 3]

    traced = layers.trace(layers.sampled(5, conv=conv, bias=False))
    assert traced.findings[0].operator == "kda::fused_decode"
    assert traced.difference < 1
