"""The tensors of a ZAYA checkpoint: one table of our names, transformers' two sets of names, and
how the axes of each lie here and there.

Axis letters: d embed, h query heads, n key-value heads, j = h + n, k head width, c head width on
the input side of the grouped convolution, w half of the values' channels, t and u taps of the two
convolutions, e experts, f expert hidden, g = 2f gate and up, r and q router width, z router
classes, v vocabulary; 1 is an axis of length one that only transformers has.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from zayajax.settings import ModelConfig

LAYOUTS = ("native", "legacy")


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of an array there and here: "h.k d -> d h k", where a dot joins two into one."""

    text: str

    @property
    def there(self) -> list[list[str]]:
        return [axis.split(".") for axis in self.text.split(" -> ")[0].split()]

    @property
    def here(self) -> list[str]:
        return self.text.split(" -> ")[1].split()

    @property
    def alone(self) -> list[str]:
        """Letters that are an axis of their own there too: only these can be sliced in the file."""
        return [axis[0] for axis in self.there if len(axis) == 1]

    def shape_there(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(math.prod(sizes[a] for a in axis) for axis in self.there)

    def shape_here(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[a] for a in self.here)

    def bring(self, x: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """An array from there, as it lies here."""
        apart = [a for axis in self.there for a in axis]
        x = x.reshape([sizes[a] for a in apart])
        return x.transpose([apart.index(a) for a in self._order()]).reshape(self.shape_here(sizes))

    def give(self, x: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """The inverse of `bring`."""
        apart, order = [a for axis in self.there for a in axis], self._order()
        x = x.reshape([sizes[a] for a in order])
        return x.transpose([order.index(a) for a in apart]).reshape(self.shape_there(sizes))

    def _order(self) -> list[str]:
        here = self.here
        return here + [a for axis in self.there for a in axis if a not in here]


class Row(NamedTuple):
    path: str  # our parameter; all layers of it are stacked
    axes: str  # of one layer
    native: str
    legacy: str
    first: int = 0  # the first layer that has it
    when: str = ""  # the switch in the config that it needs


# {i}: the layer. In the legacy layout it is two, of attention and of experts, and what merges its
# experts' output into the residual stream belongs to the layer after them.
N, A = "model.layers.{i}.", "model.layers.{attention}."
M, X = "model.layers.{moe}.", "model.layers.{following}."
QKV, OLD_QKV = N + "self_attn.qkv_proj.", A + "self_attn.qkv."
GATE, OLD_GATE = N + "mlp.gate.", M + "zaya_block.router."
OLD_EXPERT = M + "zaya_block.experts.local_experts.{expert}."


def _merge(path: str, native: str, legacy: str) -> list[Row]:
    names = {
        "new_scale": "hidden_states_scale",
        "new_bias": "hidden_states_bias",
        "residual_scale": "residual_scale",
        "residual_bias": "residual_bias",
    }
    return [Row(path + k, "d -> d", native + v, legacy + v) for k, v in names.items()]


def _linear(path: str, axes: str, native: str, legacy: str) -> list[Row]:
    """A matrix with its bias."""
    bias = axes.split()[0]
    return [
        Row(path, axes, native + ".weight", legacy + ".weight"),
        Row(path + "_bias", f"{bias} -> {bias}", native + ".bias", legacy + ".bias"),
    ]


def _projection(path: str, axes: str, native: str, legacy: str) -> list[Row]:
    """A matrix of the attention, whose bias is there only with `attention_bias`."""
    out = axes.split()[0]
    bias = f"{out} -> {out.replace('.', ' ')}"
    return [
        Row(path, axes, native + ".weight", legacy + ".weight"),
        Row(path + "_bias", bias, native + ".bias", legacy + ".bias", when="attention_bias"),
    ]


TABLE: tuple[Row, ...] = (
    Row("embed", "v d -> v d", "model.embed_tokens.weight", "model.embed_tokens.weight"),
    Row(
        "input_scale",
        "d -> d",
        "model.input_hidden_states_scale",
        "model.layers.0.res_scale.hidden_states_scale",
    ),
    Row(
        "input_bias",
        "d -> d",
        "model.input_hidden_states_bias",
        "model.layers.0.res_scale.hidden_states_bias",
    ),
    Row("layers.norm_attn", "d -> d", N + "input_layernorm.weight", A + "input_norm.weight"),
    *_projection("layers.attn.q", "h.k d -> d h k", QKV + "q_proj", OLD_QKV + "linear_q"),
    *_projection("layers.attn.k", "n.k d -> d n k", QKV + "k_proj", OLD_QKV + "linear_k"),
    *_projection("layers.attn.v_now", "w d -> d w", QKV + "v_proj_current", OLD_QKV + "val_proj1"),
    *_projection("layers.attn.v_late", "w d -> d w", QKV + "v_proj_delayed", OLD_QKV + "val_proj2"),
    *_projection("layers.attn.o", "d h.k -> h k d", N + "self_attn.o_proj", A + "self_attn.o_proj"),
    Row(
        "layers.attn.depthwise",
        "j.k 1 t -> t j k",
        QKV + "conv_qk_depthwise.weight",
        OLD_QKV + "conv_qk.0.weight",
    ),
    Row(
        "layers.attn.depthwise_bias",
        "j.k -> j k",
        QKV + "conv_qk_depthwise.bias",
        OLD_QKV + "conv_qk.0.bias",
    ),
    Row(
        "layers.attn.grouped",
        "j.k c u -> u j c k",
        QKV + "conv_qk_grouped.weight",
        OLD_QKV + "conv_qk.1.weight",
    ),
    Row(
        "layers.attn.grouped_bias",
        "j.k -> j k",
        QKV + "conv_qk_grouped.bias",
        OLD_QKV + "conv_qk.1.bias",
    ),
    Row("layers.attn.temp", "n -> n", N + "self_attn.qk_norm.temp", OLD_QKV + "temp"),
    *_merge("layers.merge_attn.", N + "post_attention_residual_scale.", M + "res_scale."),
    Row(
        "layers.norm_moe",
        "d -> d",
        N + "post_attention_layernorm.weight",
        M + "input_norm.weight",
    ),
    *_linear("layers.router.down", "r d -> d r", GATE + "down_proj", OLD_GATE + "down_proj"),
    Row(
        "layers.router.norm",
        "r -> r",
        GATE + "router_mlp.norm.weight",
        OLD_GATE + "rmsnorm_eda.weight",
    ),
    *_linear("layers.router.fc1", "q r -> r q", GATE + "router_mlp.fc1", OLD_GATE + "router_mlp.0"),
    *_linear("layers.router.fc2", "q r -> r q", GATE + "router_mlp.fc2", OLD_GATE + "router_mlp.2"),
    Row(
        "layers.router.out",
        "z r -> r z",
        GATE + "router_mlp.out_proj.weight",
        OLD_GATE + "router_mlp.4.weight",
    ),
    Row(
        "layers.router.balance_bias",
        "z -> z",
        GATE + "balancing_biases",
        OLD_GATE + "balancing_biases",
    ),
    Row("gamma", "r -> r", GATE + "router_states_scale", OLD_GATE + "router_states_scale", first=1),
    Row(
        "layers.experts.gate_up",
        "e g d -> e d g",
        N + "mlp.experts.gate_up_proj",
        OLD_EXPERT + "linear_fc1.weight",
    ),
    Row(
        "layers.experts.down",
        "e d f -> e f d",
        N + "mlp.experts.down_proj",
        OLD_EXPERT + "linear_fc2.weight",
    ),
    *_merge("layers.merge_moe.", N + "post_mlp_residual_scale.", X + "res_scale."),
    Row("norm_out", "d -> d", "model.norm.weight", "model.final_norm.weight"),
    Row("head", "v d -> v d", "lm_head.weight", "lm_head.weight", when="untied"),
    Row("head_bias", "v -> v", "lm_head.bias", "lm_head.bias", when="head_bias"),
)


class Tensor(NamedTuple):
    name: str  # in the file
    path: str  # of our parameter
    index: tuple[int, ...]  # its place there: (), (layer,) or (layer, expert)
    axes: Axes  # of what is left of our parameter at that place
    shape: tuple[int, ...]  # in the file


def sizes(cfg: ModelConfig) -> dict[str, int]:
    """The length of each axis letter."""
    H, N, K, F = cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.expert_hidden
    heads = {"h": H, "n": N, "j": H + N, "k": K, "c": K, "w": N * K // 2}
    experts = {"e": cfg.experts, "f": F, "g": 2 * F, "z": cfg.experts + 1}
    rest = {"t": cfg.cca_time0, "u": cfg.cca_time1, "r": cfg.router_hidden, "q": cfg.router_hidden}
    return {"1": 1, "d": cfg.hidden, "v": cfg.vocab} | heads | experts | rest


def tensors(cfg: ModelConfig, layout: str) -> list[Tensor]:
    """All tensors of a checkpoint in that layout, no more and no fewer, parameter by parameter."""
    lengths = sizes(cfg)
    switches = {"": True, "untied": not cfg.tied_head, "head_bias": cfg.head_bias}
    switches["attention_bias"] = cfg.attention_bias
    found = []
    for row in TABLE:
        if not switches[row.when]:
            continue
        pattern, axes = getattr(row, layout), Axes(row.axes)
        by_expert = "{expert}" in pattern
        if by_expert:  # one tensor an expert: the axis of experts goes
            axes = Axes(row.axes.replace("e ", ""))
        shape = axes.shape_there(lengths)
        # Ours is stacked if the parameter belongs to a layer, whatever it is called there.
        stacked = row.path.startswith("layers.") or row.path == "gamma"
        for i in range(row.first, cfg.layers) if stacked else [None]:
            for expert in range(cfg.experts) if by_expert else [None]:
                name = _name(pattern, cfg.layers, i, expert)
                index = () if i is None else (i - row.first,)
                index += () if expert is None else (expert,)
                found.append(Tensor(name, row.path, index, axes, shape))
    return found


def _name(pattern: str, layers: int, i: int | None, expert: int | None) -> str:
    if i is None:
        return pattern
    name = pattern.format(i=i, attention=2 * i, moe=2 * i + 1, following=2 * i + 2, expert=expert)
    # After the last layer there is none that the merge could belong to: it is the model's.
    return (
        name.replace(f"model.layers.{2 * layers}.", "model.") if "{following}" in pattern else name
    )
