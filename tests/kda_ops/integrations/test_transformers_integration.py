"""Where flash-linear-attention is installed, transformers' own decode code can be put in place.

The libraries are stand-ins here: packages of their names whose functions torch.compile may not look
into, as theirs, and which count their calls.
"""

import inspect
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from kda_ops.integrations.transformers import DECODE_FUNCTIONS, use_plain_decode

transformers = pytest.importorskip("transformers", minversion="5.17")

CONFIG = """
import torch, transformers
config = transformers.KimiLinearConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=32,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16,
    qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, num_local_experts=2,
    num_experts_per_tok=1, linear_num_heads=2, linear_head_dim=128, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, layer_types=["linear_attention"], mlp_layer_types=["dense"],
)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
"""

STAND_IN = """
import torch
calls = []
@torch.compiler.disable
def {name}(*args, **kwargs):
    calls.append(1)
    raise RuntimeError("{name} of another library")
"""

STEPS = """
import sys, inspect
import torch, torch._dynamo
import kda_ops
from kda_ops.integrations.transformers import use_plain_decode

layer = next(m for m in model.modules() if type(m).__name__ == "KimiLinearDeltaAttention")
name = "cache" if "cache" in inspect.signature(layer.forward).parameters else "cache_params"

class Cache:
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.window = torch.randn(2, 768, 4, generator=generator)
        self.state = torch.randn(2, 2, 128, 128, generator=generator)
    def get_conv_state(self, *a, **k):
        return self.window
    def get_recurrent_state(self, *a, **k):
        return self.state
    def update_recurrent_state(self, new, *a, **k):
        self.state.copy_(new)

def step(x, cache):
    return layer(x, **{name: cache})

x = torch.randn(2, 1, 32)
def refused():
    try:
        step(x, Cache())
    except RuntimeError as error:
        return "of another library" in str(error)
    return False

with torch.no_grad():
    print("before", refused())
    with use_plain_decode(model) as exchange:
        print(exchange.modules)
        plain, cache = step(x, Cache()), Cache()
        torch._dynamo.utils.counters.clear()
        with kda_ops.enabled():
            made = torch.compile(step, fullgraph=True)(x, cache)
        print("close", torch.allclose(made, plain, rtol=1e-4, atol=1e-5))
        print("fused", torch._dynamo.utils.counters["kda"]["matched kda::fused_decode"])
    print("after", refused())
"""


def test_with_another_library_s_functions_a_layer_is_rewritten_and_they_come_back(tmp_path):
    pytest.importorskip("transformers", minversion="5.21", reason="older caches are read otherwise")
    for package, name in (("fla/ops/kda", "fused_recurrent_kda"), ("causal_conv1d", None)):
        room = tmp_path / package
        room.mkdir(parents=True)
        for parent in (room, *room.parents):
            if parent == tmp_path:
                break
            (parent / "__init__.py").write_text("")
        text = STAND_IN.format(name=name or "causal_conv1d_update")
        (room / "__init__.py").write_text(text)
    # A graph that another test left in the cache would not be rewritten here.
    there = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    done = subprocess.run(
        [sys.executable, "-c", CONFIG + textwrap.dedent(STEPS)],
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        env=os.environ | there,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "before True",
        "('transformers.models.kimi_linear.modeling_kimi_linear',)",
        "close True",
        "fused 1",
        "after True",
    ]


def test_undoing_twice_restores_once():
    scope = {}
    exec(CONFIG, scope)
    file = sys.modules[type(scope["model"]).__module__]
    before = [getattr(file, name) for name in DECODE_FUNCTIONS]
    exchange = use_plain_decode(scope["model"])
    now = [getattr(file, name) for name in DECODE_FUNCTIONS]
    assert now == [inspect.unwrap(function) for function in before]
    exchange.undo()
    again = use_plain_decode(scope["model"])
    exchange.undo()
    assert [getattr(file, name) for name in DECODE_FUNCTIONS] == now
    again.undo()
    assert [getattr(file, name) for name in DECODE_FUNCTIONS] == before


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match="Linear has no KDA layer of transformers"):
        use_plain_decode(torch.nn.Linear(2, 2))


def test_a_function_that_hides_nothing_is_refused_and_nothing_changes(monkeypatch):
    name = "transformers.models.made_up"
    file = SimpleNamespace(__name__=name, **{n: len for n in DECODE_FUNCTIONS})
    monkeypatch.setitem(sys.modules, name, file)
    layer = type("Layer", (torch.nn.Module,), {"__module__": name})()
    with pytest.raises(ValueError, match=r"made_up\.causal_conv1d_update hides no PyTorch"):
        use_plain_decode(layer)
    assert file.causal_conv1d_update is len
