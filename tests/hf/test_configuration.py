"""`config.json` in both layouts: what is understood, and what is refused by its key."""

import json

import parity_tools
import pytest

from zayajax import hf
from zayajax.errors import UserError
from zayajax.hf import configuration
from zayajax.settings import ModelConfig

ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}


def written(folder, fixture, **changes):
    raw = json.loads((parity_tools.FIXTURES / fixture / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_fixtures():
    full, legacy, sliding = (hf.config(parity_tools.FIXTURES / n) for n in parity_tools.NAMES)
    assert full == legacy
    assert (full.layers, full.heads, full.kv_heads, full.head_dim) == (3, 4, 2, 16)
    assert (full.expert_hidden, full.router_hidden, full.rope_theta) == (40, 16, 5e6)
    assert sliding.sliding_layers == (1, 2) and sliding.sliding_window == 8


def test_hub_configs_have_a_stray_rope_type(tmp_path):
    sliding = ROPE | {"rope_theta": 3e4}
    ropes = {"hybrid": ROPE, "hybrid_sliding": sliding, "rope_type": "default"}
    cfg = hf.config(written(tmp_path, "sliding_and_padding", rope_parameters=ropes))
    assert (cfg.rope_theta, cfg.rope_theta_sliding, cfg.rope_fraction) == (1e6, 3e4, 0.5)


def test_legacy_windows_count_the_tokens_before(tmp_path):
    windows = dict(swa_layers=[7, 0, 0, 0, 7, 0], swa_rotary_base=2e4)
    cfg = hf.config(written(tmp_path, "legacy_layout", **windows))
    assert cfg.sliding_layers == (0, 2) and cfg.sliding_window == 8
    assert cfg.rope_theta_sliding == 2e4
    raw = configuration.write(cfg, "legacy", "float32")
    assert raw["swa_layers"] == windows["swa_layers"] and raw["swa_rotary_base"] == 2e4


def test_legacy_lists_by_layer(tmp_path):
    """One value a layer, 0 where it has none; some lists are longer than the model."""
    cfg = hf.config(
        written(
            tmp_path,
            "legacy_layout",
            zaya_layers=["a", 4] * 3,
            num_hidden_layers=80,
            cca_num_q_heads=[4, 0] * 3,
            num_query_groups_list=[2, 0] * 3,
            ffn_hidden_size_list=[0, 80] * 5,
            zaya_mlp_expansion=[0, 16] * 2,
            swa_layers=[0] * 10,
            rope_scaling=False,
        )
    )
    assert cfg == hf.config(parity_tools.FIXTURES / "legacy_layout")


@pytest.mark.parametrize("layout", ["native", "legacy"])
def test_every_field_comes_back(layout, tmp_path):
    cfg = ModelConfig(
        vocab=50,
        layers=4,
        hidden=24,
        heads=6,
        kv_heads=3,
        head_dim=20,
        experts=5,
        expert_hidden=14,
        router_hidden=10,
        cca_time0=3,
        cca_time1=4,
        rope_theta=7e5,
        rope_theta_sliding=2e4,
        rope_fraction=0.4,
        sliding_layers=(0, 3),
        sliding_window=9,
        norm_eps=1e-6,
        tied_head=False,
        head_bias=True,
        attention_bias=True,
    )
    (tmp_path / "config.json").write_text(json.dumps(configuration.write(cfg, layout, "float32")))
    assert configuration.read(tmp_path)[:2] == (cfg, layout)


REFUSED_NATIVE = {
    "model_type": "llama",
    "num_experts_per_tok": 2,
    "hidden_act": "gelu",
    "num_experts": 4.5,
    "hidden_size": None,
    "tie_word_embeddings": "yes",
    "quantization_config": {"quant_method": "fp8"},
    "layer_types": ["hybrid", "full_attention", "hybrid", "hybrid"],
    "num_hidden_layers": 5,
    "sliding_window": None,
    "rope_parameters": {"hybrid": ROPE | {"rope_type": "yarn"}, "hybrid_sliding": ROPE},
    "rope_parameters ": {"hybrid": ROPE},
    "rope_parameters  ": {
        "hybrid": ROPE,
        "hybrid_sliding": ROPE | {"partial_rotary_factor": 1.0},
    },
    "num_key_value_heads": 3,
}
REFUSED_LEGACY = {
    "moe_router_topk": 2,
    "clamp_temp": True,
    "zaya_use_mod": False,
    "activation_func": "gelu",
    "num_hidden_layers": 5,
    "rope_theta": None,
    "ffn_hidden_size": 81,
    "swa_layers": [7, 0, 3, 0, 0, 0],
    "swa_layers ": [7, 0, 0],
    "swa_layers  ": [0, 7, 0, 0, 0, 0],
    "sliding_window": 8,
    "rope_scaling": {"rope_type": "yarn", "factor": 4},
    "zaya_layers": ["a", "a", 4, "a", 4, 4],
}


@pytest.mark.parametrize(
    ("fixture", "key", "value"),
    [("sliding_and_padding", *item) for item in REFUSED_NATIVE.items()]
    + [("legacy_layout", *item) for item in REFUSED_LEGACY.items()],
)
def test_refused_by_name(fixture, key, value, tmp_path):
    key = key.strip()
    with pytest.raises(UserError) as error:
        hf.config(written(tmp_path, fixture, **{key: value}))
    message = str(error.value)
    names = {"num_hidden_layers": "layer", "num_key_value_heads": "kv_heads"}
    assert str(tmp_path / "config.json") in message and "\n" not in message
    assert names.get(key, key) in message, message


def test_no_config(tmp_path):
    with pytest.raises(UserError, match=r"config\.json: does not exist"):
        hf.config(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        hf.config(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        hf.config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "zaya", "hidden_size": 8}')
    with pytest.raises(UserError, match="neither moe_intermediate_size"):
        hf.config(tmp_path)


def test_a_window_of_one_has_no_legacy_form():
    raw = dict(sliding_layers=(0,), sliding_window=1, layers=1)
    sizes = dict(vocab=8, hidden=8, heads=2, kv_heads=2, head_dim=4, experts=2)
    cfg = ModelConfig(**raw, **sizes, expert_hidden=4, router_hidden=4)
    assert configuration.write(cfg, "native", "float32")["sliding_window"] == 1
    with pytest.raises(UserError, match="window of 1"):
        configuration.write(cfg, "legacy", "float32")
