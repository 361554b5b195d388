"""`config.json` of a ZAYA checkpoint, native or legacy, to a `ModelConfig` and back.

What is not understood is refused by its key: a model that computes something else must not run.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zayajax.errors import UserError
from zayajax.settings import ModelConfig

FULL, SLIDING = KINDS = ("hybrid", "hybrid_sliding")

# our field: (native key, legacy keys that may hold it), whole numbers without a default
SIZES = {
    "vocab": ("vocab_size", ("vocab_size",)),
    "hidden": ("hidden_size", ("hidden_size",)),
    "heads": (
        "num_attention_heads",
        # The last one means something else where there is one of the others.
        ("cca_num_q_heads", "cca_num_q_heads_list", "num_attention_heads"),
    ),
    "kv_heads": (
        "num_key_value_heads",
        ("num_query_groups_list", "num_query_groups", "num_key_value_heads"),
    ),
    "head_dim": ("head_dim", ("kv_channels", "head_dim")),
    "experts": ("num_experts", ("num_experts",)),
    "expert_hidden": ("moe_intermediate_size", ("ffn_hidden_size_list", "ffn_hidden_size")),
    "router_hidden": (
        "router_hidden_size",
        ("zaya_mlp_expansion", "zaya_mlp_expansion_list"),
    ),
}
# our field: (key in both layouts, default)
SHARED = {
    "cca_time0": ("cca_time0", 2),
    "cca_time1": ("cca_time1", 2),
    "tied_head": ("tie_word_embeddings", True),
    "head_bias": ("lm_head_bias", False),
    "attention_bias": ("attention_bias", False),
}
# Other values of these would be another model. Where a key is missing, this is what it means.
MUST_NATIVE = {"num_experts_per_tok": 1, "hidden_act": "silu"}
MUST_LEGACY = {
    "activation_func": "swiglu",
    "add_bias_linear": False,
    "cca": True,
    "clamp_temp": False,
    "gated_linear_unit": True,
    "moe_router_topk": 1,
    "normalization": "RMSNorm",
    "residual_in_fp32": True,
    "scale_residual_merge": True,
    "zaya_use_eda": True,
    "zaya_use_mod": True,
}
# Legacy keys about kernels, which no other layout knows.
LEGACY_ONLY = {
    "activation_func_fp8_input_store",
    "apply_rope_fusion",
    "bias_activation_fusion",
    "fused_add_norm",
    "zaya_high_prec",
}
KEYS_NATIVE = {native for native, _ in SIZES.values()} | set(MUST_NATIVE)
KEYS_NATIVE |= {"num_hidden_layers", "rms_norm_eps", "layer_types", "sliding_window"}
KEYS_NATIVE |= {"rope_parameters", "model_type"}
KEYS_LEGACY = {key for _, keys in SIZES.values() for key in keys} | set(MUST_LEGACY) | LEGACY_ONLY
KEYS_LEGACY |= {"num_hidden_layers", "norm_epsilon", "zaya_layers", "swa_layers", "model_type"}
KEYS_LEGACY |= {"swa_rotary_base", "rope_theta", "partial_rotary_factor", "rope_parameters"}
KEYS_LEGACY |= {"rope_scaling", "sliding_window"}


class Read(NamedTuple):
    cfg: ModelConfig
    layout: str  # "native" or "legacy"
    raw: dict[str, Any]  # the file as it is


def is_zaya(path) -> bool:
    """Whether a folder has the config of a ZAYA model."""
    try:
        raw = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and raw.get("model_type") == "zaya"


def read(path) -> Read:
    """`path`: a checkpoint's folder. UserError names the file, the key and what is wrong."""
    path = Path(path) / "config.json"
    if not path.parent.is_dir():
        raise UserError(f"{path.parent}: is not a folder; a checkpoint is one, with a config.json")
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: does not exist; is {path.parent} a checkpoint?") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(raw, dict) or raw.get("model_type") != "zaya":
        found = repr(raw.get("model_type")) if isinstance(raw, dict) else "no object"
        raise UserError(f"{path}: model_type must be 'zaya', and is {found}")
    keys = _Keys(raw, path)
    keys.must({"quantization_config": None})
    if raw.get("layer_types") is not None or "moe_intermediate_size" in raw:
        layout, fields = "native", _native(keys)
    elif {"ffn_hidden_size", "ffn_hidden_size_list", "zaya_layers"} & set(raw):
        layout, fields = "legacy", _legacy(keys)
    else:
        raise UserError(
            f"{path}: has neither moe_intermediate_size (transformers' own layout) nor "
            "ffn_hidden_size (the older one), so the layout of its tensors is unknown"
        )
    for field, (key, default) in SHARED.items():
        fields[field] = keys.typed(key, type(default), default)
    try:
        return Read(ModelConfig(**fields), layout, raw)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


class _Keys:
    """Typed access to the file's keys."""

    def __init__(self, raw: Mapping, path: Path):
        self.raw, self.path = raw, path

    def refuse(self, key: str, reason: str):
        raise UserError(f"{self.path}: {key} {reason}")

    def typed(self, key: str, kind: type, default=None):
        """The value of a key; without a default it is required."""
        value = self.raw.get(key)
        if value is None:
            return self.refuse(key, "is missing") if default is None else default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            what = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
            self.refuse(key, f"must be {what}, and is {value!r}")
        return value

    def largest(self, *keys: str) -> int:
        """The first of these keys that is there: a number, or one for each layer, 0 for none."""
        key = next((k for k in keys if self.raw.get(k) is not None), keys[0])
        value = self.raw.get(key)
        if not isinstance(value, list):
            return self.typed(key, int)
        if not value or any(type(v) is not int or v < 0 for v in value):
            self.refuse(key, f"must list whole numbers, and is {value!r}")
        return max(value)

    def must(self, values: Mapping):
        for key, wanted in values.items():
            value = self.raw.get(key, wanted)
            # type: JSON's 1 is no `true`.
            if value != wanted or type(value) is not type(wanted):
                only = "cannot be read" if wanted is None else f"only {wanted!r} is supported"
                shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:57]}..."
                self.refuse(key, f"is {shown}, and {only}")


def _native(keys: _Keys) -> dict:
    keys.must(MUST_NATIVE)
    fields = {field: keys.typed(native, int) for field, (native, _) in SIZES.items()}
    L = fields["layers"] = keys.typed("num_hidden_layers", int)
    fields["norm_eps"] = keys.typed("rms_norm_eps", float, 1e-5)
    kinds = keys.raw.get("layer_types") or [FULL] * L
    if not isinstance(kinds, list) or len(kinds) != L:
        keys.refuse("layer_types", f"must have one entry for each of the {L} layers")
    for kind in kinds:
        if kind not in KINDS:
            keys.refuse("layer_types", f"holds {kind!r}, and only {FULL!r}, {SLIDING!r} are known")
    fields["sliding_layers"] = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
    if fields["sliding_layers"] or keys.raw.get("sliding_window") is not None:
        fields["sliding_window"] = keys.typed("sliding_window", int)
        if fields["sliding_window"] < 1:
            keys.refuse("sliding_window", f"must be positive, and is {fields['sliding_window']}")
    return fields | _native_rope(keys, set(kinds))


def _native_rope(keys: _Keys, used: set[str]) -> dict:
    ropes = keys.raw.get("rope_parameters")
    default = {"rope_type": "default", "partial_rotary_factor": 0.5}
    if ropes is None:  # as transformers has it
        ropes = {FULL: default | {"rope_theta": 5e6}, SLIDING: default | {"rope_theta": 1e4}}
    if not isinstance(ropes, dict):
        keys.refuse("rope_parameters", f"must be an object, and is {ropes!r}")
    if not set(KINDS) & set(ropes):
        if SLIDING in used:
            keys.refuse("rope_parameters", f"has no entries for {FULL!r} and {SLIDING!r}")
        ropes = {FULL: ropes}
    _only_default(keys, "rope_parameters", ropes)  # the Hub's configs have one beside the entries
    theta, fraction = {}, {}
    for kind in KINDS:
        here = ropes.get(kind)
        if kind in used and not isinstance(here, dict):
            keys.refuse("rope_parameters", f"has no entry for {kind!r}")
        if isinstance(here, dict):
            if kind in used:
                _only_default(keys, f"rope_parameters.{kind}", here)
            entry = _Keys({f"rope_parameters.{kind}.{k}": v for k, v in here.items()}, keys.path)
            theta[kind] = entry.typed(f"rope_parameters.{kind}.rope_theta", float)
            key = f"rope_parameters.{kind}.partial_rotary_factor"
            fraction[kind] = entry.typed(key, float, 1.0)
    if len({fraction[kind] for kind in used}) > 1:
        keys.refuse("rope_parameters", f"rotates {fraction} of a head, and these must be equal")
    fields = {"rope_fraction": fraction[FULL if FULL in used else SLIDING]}
    fields |= {"rope_theta": theta[FULL]} if FULL in theta else {}
    return fields | ({"rope_theta_sliding": theta[SLIDING]} if SLIDING in theta else {})


def _only_default(keys: _Keys, name: str, rope: Mapping):
    for key in ("rope_type", "type"):
        if rope.get(key, "default") != "default":
            keys.refuse(f"{name}.{key}", f"is {rope[key]!r}, and only 'default' is supported")


def _legacy(keys: _Keys) -> dict:
    keys.must(MUST_LEGACY)
    raw = dict(keys.raw)
    if layers := raw.get("zaya_layers"):
        pairs = (layers[::2], layers[1::2]) if isinstance(layers, list) else ([], [])
        alternate = all(a == "a" for a in pairs[0]) and all(type(m) is int for m in pairs[1])
        if not pairs[0] or len(pairs[0]) != len(pairs[1]) or not alternate:
            keys.refuse("zaya_layers", "must alternate: 'a' for attention, a number of experts")
        # The scalar may be stale; the list is what the tensors follow.
        raw |= {"num_hidden_layers": len(layers), "num_experts": list(pairs[1])}
        keys = _Keys(raw, keys.path)
    fields = {field: keys.largest(*legacy) for field, (_, legacy) in SIZES.items()}
    both = keys.typed("num_hidden_layers", int)
    if both % 2:
        keys.refuse("num_hidden_layers", f"is {both}, and attention and experts must alternate")
    if fields["expert_hidden"] % 2:
        keys.refuse("ffn_hidden_size", f"is {fields['expert_hidden']}, and must be gate and up")
    fields["layers"], fields["expert_hidden"] = both // 2, fields["expert_hidden"] // 2
    fields["norm_eps"] = keys.typed("norm_epsilon", float)
    ropes = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(ropes, dict):
        keys.refuse("rope_scaling", f"is {ropes!r}, which is not known")
    _only_default(keys, "rope_scaling", ropes)
    rope = _Keys(ropes | {k: v for k, v in raw.items() if v is not None}, keys.path)
    fields["rope_theta"] = rope.typed("rope_theta", float)
    fields["rope_fraction"] = rope.typed("partial_rotary_factor", float, 0.5)
    fields["rope_theta_sliding"] = keys.typed("swa_rotary_base", float, 1e4)
    return fields | _legacy_windows(keys, both)


def _legacy_windows(keys: _Keys, both: int) -> dict:
    windows = keys.raw.get("swa_layers")
    if not windows:
        if keys.raw.get("sliding_window"):
            keys.refuse("sliding_window", "is set, and no swa_layers say where")
        return {}
    if not isinstance(windows, list) or any(type(w) is not int or w < 0 for w in windows):
        keys.refuse("swa_layers", f"must list whole numbers, and is {windows!r}")
    if len(windows) < both:
        keys.refuse("swa_layers", f"has {len(windows)} entries, and there are {both} layers")
    windows = windows[:both]
    if any(windows[1::2]):
        keys.refuse("swa_layers", "has a window for a layer of experts")
    found = sorted({w for w in windows if w})
    if len(found) > 1:
        keys.refuse("swa_layers", f"holds different windows {found}, and only one is supported")
    if not found:
        return {}
    sliding = tuple(i for i, w in enumerate(windows[::2]) if w)
    # Tokens before the current one there, the current one included here.
    return {"sliding_layers": sliding, "sliding_window": found[0] + 1}


def write(cfg: ModelConfig, layout: str, dtype: str, source: Read | None = None) -> dict:
    """The `config.json` of a model in that layout.

    Keys of `source` that mean nothing to us travel along; so do the others, as they are written
    there, where they say the same model in the same layout.
    """
    name = "torch_dtype" if layout == "legacy" else "dtype"
    if source is None:
        ids = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": None}
        return (
            {"architectures": ["ZayaForCausalLM"]} | _generated(cfg, layout) | ids | {name: dtype}
        )
    same = dataclasses.replace(source.cfg, skip=cfg.skip) == cfg and source.layout == layout
    raw = {k: v for k, v in source.raw.items() if k not in ("dtype", "torch_dtype")}
    if not same:
        known = KEYS_NATIVE | KEYS_LEGACY
        raw = {k: v for k, v in raw.items() if k not in known} | _generated(cfg, layout)
    if "dtype" in source.raw and same:
        name = "dtype"
    return raw | {name: dtype}


def _generated(cfg: ModelConfig, layout: str) -> dict:
    shared = {key: getattr(cfg, field) for field, (key, _) in SHARED.items()}
    raw = {"model_type": "zaya"} | shared
    if layout == "native":
        raw |= {native: getattr(cfg, field) for field, (native, _) in SIZES.items()} | MUST_NATIVE
        kinds = [SLIDING if i in cfg.sliding_layers else FULL for i in range(cfg.layers)]
        thetas = {FULL: cfg.rope_theta, SLIDING: cfg.rope_theta_sliding}
        rope = {"rope_type": "default", "partial_rotary_factor": cfg.rope_fraction}
        return raw | {
            "num_hidden_layers": cfg.layers,
            "rms_norm_eps": cfg.norm_eps,
            "layer_types": kinds,
            "sliding_window": cfg.sliding_window or None,
            "rope_parameters": {kind: rope | {"rope_theta": t} for kind, t in thetas.items()},
        }
    raw |= MUST_LEGACY | {
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.hidden,
        "num_hidden_layers": 2 * cfg.layers,
        "num_attention_heads": max(1, cfg.hidden // cfg.head_dim),
        "num_key_value_heads": cfg.kv_heads,
        "num_query_groups": cfg.kv_heads,
        "cca_num_q_heads": cfg.heads,
        "kv_channels": cfg.head_dim,
        "num_experts": cfg.experts,
        "ffn_hidden_size": 2 * cfg.expert_hidden,
        "zaya_mlp_expansion": cfg.router_hidden,
        "norm_epsilon": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "partial_rotary_factor": cfg.rope_fraction,
    }
    if cfg.sliding_layers:
        before = cfg.sliding_window - 1
        if not before:
            raise UserError("a sliding window of 1 cannot be said in the legacy layout; use native")
        windows = [before if i in cfg.sliding_layers else 0 for i in range(cfg.layers)]
        raw["swa_layers"] = [w for window in windows for w in (window, 0)]
        raw["swa_rotary_base"] = cfg.rope_theta_sliding
    return raw
