"""The ZAYA decoder, as pure functions of a tree of weights.

Shape letters: B batch, S sequence, D embed, R router width, C = E + 1 router classes, L layers,
V vocabulary.

B and S are what this device holds. Collectives run over the axes that a `Layout` names, and LOCAL
names none: `Decoder(cfg, key)(tokens)` needs no mesh. Matrix products are in the dtype of the
weights; the residual stream, norms, softmaxes and the router are in float32.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from zayajax.layout import LOCAL, Layout
from zayajax.model import head
from zayajax.model.cca import CCA
from zayajax.model.common import Packing, ResidualScale, precision, rms_norm, vector, weight
from zayajax.model.experts import Experts
from zayajax.model.router import Router
from zayajax.settings import ModelConfig

REMAT = {
    "none": None,
    # Attention is the one part of a layer whose cost grows with the length of the sequence.
    "names": jax.checkpoint_policies.save_only_these_names("attention", "moe"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Routing(NamedTuple):
    """What the routers of all layers did with the tokens of this device."""

    counts_LC: jax.Array  # tokens of each class, padding left out, int32
    choices_LBS: jax.Array  # the class of each token
    rooms_LC: jax.Array  # how often each capacity of the exchange was used, int32


class Block(nnx.Module):
    def __init__(self, cfg: ModelConfig, key):
        k_attn, k_router, k_experts = jax.random.split(key, 3)
        self.eps, self.skip = cfg.norm_eps, cfg.skip
        self.norm_attn, self.attn = vector(cfg.hidden, 1.0), CCA(cfg, k_attn)
        self.merge_attn = ResidualScale(cfg)
        self.norm_moe, self.router = vector(cfg.hidden, 1.0), Router(cfg, k_router)
        self.experts = Experts(cfg, k_experts)
        self.merge_moe = ResidualScale(cfg)

    def __call__(self, x_BSD, above_BSR, gamma_R, packing: Packing, rotation, window):
        """The residual stream and the router's state, one layer further; and its `Routing`."""
        dtype = self.attn.q.dtype
        h_BSD = rms_norm(x_BSD.astype(dtype), self.norm_attn[...], self.eps, dtype)
        with jax.named_scope("cca"):
            x_BSD = self.merge_attn(self.attn(h_BSD, packing, rotation, window), x_BSD)
        h_BSD = rms_norm(x_BSD.astype(dtype), self.norm_moe[...], self.eps, dtype)
        choice_BS, p_BS, state_BSR = self.router(h_BSD, above_BSR, gamma_R)
        with jax.named_scope("moe"):
            y_BSD, rooms_C = self.moe(h_BSD, choice_BS, p_BS, packing)
            x_BSD = self.merge_moe(y_BSD, x_BSD)
        C = self.router.out.shape[-1]
        chosen_BSC = (choice_BS[..., None] == jnp.arange(C)) & packing.real_BS[..., None]
        counts_C = chosen_BSC.sum(axis=(0, 1), dtype=jnp.int32)
        return x_BSD, state_BSR, Routing(counts_C, choice_BS, rooms_C)

    def moe(self, h_BSD, choice_BS, p_BS, packing: Packing):
        skip = self.router.out.shape[-1] - 1
        # Neither a skipped token nor padding travels.
        travels_BS = jnp.where(packing.real_BS, choice_BS, skip)
        h_TD = h_BSD.reshape(-1, h_BSD.shape[-1])
        y_TD, rooms_C = self.experts(h_TD, travels_BS.reshape(-1), packing.layout)
        y_BSD = y_TD.reshape(h_BSD.shape)
        if self.skip == "identity":
            y_BSD = jnp.where((choice_BS == skip)[..., None], h_BSD, y_BSD)
        return y_BSD * p_BS[..., None].astype(y_BSD.dtype), rooms_C


class Decoder(nnx.Module):
    def __init__(self, cfg: ModelConfig, key):
        D, R, V, L = cfg.hidden, cfg.router_hidden, cfg.vocab, cfg.layers
        k_embed, k_layers, k_head = jax.random.split(key, 3)
        self.cfg = cfg
        # Small: with a tied head it sets the size of the first logits (initial loss: ln V).
        self.embed = weight(k_embed, (V, D), (None, "embed"), 2500.0)
        self.input_scale, self.input_bias = vector(D, 1.0), vector(D)
        self.layers = jax.vmap(partial(Block, cfg))(jax.random.split(k_layers, L))
        # How much of the router state of the layer above joins; the first layer has none above.
        self.gamma = vector((L - 1, R), 1.0) if L > 1 else None
        self.norm_out = vector(D, 1.0)
        self.head = None if cfg.tied_head else weight(k_head, (V, D), (None, "embed"), 2500.0)
        self.head_bias = vector(V) if cfg.head_bias else None

    def __call__(self, tokens_BS, segments_BS=None, positions_BS=None):
        """Logits `[B, S, V]`, float32, on one device. By default a row is one document.

        `segments_BS`: 0 is padding, documents in a row are numbered from 1; `positions_BS` count
        inside each document (worked out from the segments by default).
        """
        with precision(self.embed.dtype):
            x_BSD, _ = self.hidden(jnp.asarray(tokens_BS), segments_BS, positions_BS)
            return head.logits(x_BSD, *self.head_weights())

    def head_weights(self):
        table = self.embed if self.head is None else self.head
        return table[...], None if self.head_bias is None else self.head_bias[...]

    def hidden(
        self,
        tokens_BS,
        segments_BS=None,
        positions_BS=None,
        *,
        layout: Layout = LOCAL,
        remat: str = "none",
        fetch: Callable[[Block], Block] = lambda block: block,
    ) -> tuple[jax.Array, Routing]:
        """What the head sees, `[B, S, D]` in the compute dtype, and the routing.

        `fetch` makes the stored weights of one layer usable, inside the loop over layers.
        """
        cfg, dtype = self.cfg, self.embed.dtype
        if segments_BS is None:
            segments_BS = jnp.ones_like(tokens_BS)
        packing = Packing(cfg, jnp.asarray(segments_BS), positions_BS, layout)
        with jax.named_scope("embed"):
            x_BSD = head.embed(self.embed[...], tokens_BS).astype(jnp.float32)
            x_BSD = (x_BSD + self.input_bias[...]) * self.input_scale[...]

        def layer(carry, xs):
            (x_BSD, above_BSR), (block, gamma_R, kind) = carry, xs
            cos, sin = (r[0] if kind is None else r[kind] for r in packing.rotations)
            window = None
            if kind is not None:
                window = jnp.where(kind == 1, cfg.sliding_window, jnp.iinfo(jnp.int32).max)
            x_BSD, state_BSR, routing = fetch(block)(
                x_BSD, above_BSR, gamma_R, packing, (cos, sin), window
            )
            return (x_BSD, state_BSR), routing

        if remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT[remat])
        gamma_LR = jnp.zeros((1, cfg.router_hidden))
        if self.gamma is not None:
            gamma_LR = jnp.pad(self.gamma[...], ((1, 0), (0, 0)))
        none_BSR = jnp.zeros_like(x_BSD, shape=(*tokens_BS.shape, cfg.router_hidden))
        xs = self.layers, gamma_LR, _kinds(cfg)
        (x_BSD, _), routing = jax.lax.scan(layer, (x_BSD, none_BSR), xs)
        x_BSD = rms_norm(x_BSD.astype(dtype), self.norm_out[...], cfg.norm_eps, dtype)
        return x_BSD, routing


def _kinds(cfg: ModelConfig):
    """1 for each sliding layer, 0 for a full one; None where all are full."""
    if not cfg.sliding_layers:
        return None
    return jnp.asarray([int(i in cfg.sliding_layers) for i in range(cfg.layers)])
