"""What all parts of the model share: parameters, norms, and what packing makes visible.

Shape letters: B batch, S sequence, D embed, C any channels, Z = head_dim's rotated pairs; n chunks
of c positions, each behind a halo of h, as `zayajax.sequence` has them.
"""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from zayajax.exchange import all_gather
from zayajax.layout import LOCAL, Layout
from zayajax.sequence import round_robin, shift, with_halo
from zayajax.settings import ModelConfig

einsum32 = partial(jnp.einsum, preferred_element_type=jnp.float32)


def precision(dtype):
    """A context in which products of float32 are float32: a GPU would round their inputs to TF32,
    which moves logits by 1e-2 and sends tokens to other experts. bfloat16 is left as it is."""
    exact = jnp.dtype(dtype) == jnp.float32
    return jax.default_matmul_precision("highest") if exact else contextlib.nullcontext()


class Balance(nnx.Variable):
    """The balance bias of a router: moved by the counts of tokens, never by a gradient."""


def weight(key, shape, axes, fan_in: float, keep: bool = False) -> nnx.Param:
    """A matrix with normal entries of variance 1 / fan_in."""
    return nnx.Param(jax.random.normal(key, shape) * fan_in**-0.5, axes=axes, keep=keep)


def vector(shape, value: float = 0.0) -> nnx.Param:
    """Norms, scales and biases: whole on every device, and float32 in use, so that their gradients,
    which are sums over all tokens, are too."""
    shape = shape if isinstance(shape, tuple) else (shape,)
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=(None,) * len(shape), keep=True)


def rms_norm(x, scale_C, eps: float, dtype):
    """x / sqrt(mean(x^2) + eps) * scale, in float32; the result in `dtype`."""
    x = x.astype(jnp.float32)
    y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (y * scale_C).astype(dtype)


class ResidualScale(nnx.Module):
    """(new + bias) * scale + (residual + bias) * scale, in float32."""

    def __init__(self, cfg: ModelConfig):
        D = cfg.hidden
        self.new_scale, self.new_bias = vector(D, 1.0), vector(D)
        self.residual_scale, self.residual_bias = vector(D, 1.0), vector(D)

    def __call__(self, new_BSD, residual_BSD):
        new_BSD = (new_BSD.astype(jnp.float32) + self.new_bias[...]) * self.new_scale[...]
        residual_BSD = (residual_BSD + self.residual_bias[...]) * self.residual_scale[...]
        return new_BSD + residual_BSD


class Packing:
    """Which tokens belong together, worked out once for all layers.

    `segments_BS` numbers the documents of a row, 0 is padding; `positions_BS` restart at each. By
    default a row is one document, and positions count from its start. Where the layout splits the
    sequence both are in shard order, and what lies next to each other in the array need not do so
    in the row: only segments and positions tell.
    """

    def __init__(self, cfg: ModelConfig, segments_BS, positions_BS, layout: Layout = LOCAL):
        if positions_BS is None:
            if layout.sequence:
                raise ValueError("a row that is spread over devices needs its positions")
            positions_BS = count_positions(segments_BS)
        self.layout = layout
        self.segments_BS, self.positions_BS = segments_BS, positions_BS
        self.real_BS = segments_BS > 0
        self.rotations = _rotations(cfg, positions_BS)
        self.halo = cfg.halo
        (segments_Bnc,) = self.extend(segments_BS)
        reach = max(cfg.cca_time0, cfg.cca_time1, 2)
        self.same = [segments_Bnc == shift(segments_Bnc, i, axis=2) for i in range(reach)]
        if layout.keys:
            keys = self.own_keys(positions_BS), self.own_keys(segments_BS)
        else:
            with jax.named_scope("kv"):
                both_RBS2 = all_gather(jnp.stack([positions_BS, segments_BS], -1), layout.sequence)
            keys = both_RBS2[..., 0], both_RBS2[..., 1]
        self.positions, self.segments = zip((positions_BS, segments_BS), keys, strict=True)

    def extend(self, *arrays_BSC):
        """Chunks of each array behind their halos, `[B, n, h + c, ...]`: one message for all."""
        return with_halo(arrays_BSC, self.halo, self.layout.sequence)

    def back(self, x_BncC, i: int, before=0):
        """x of the token i places earlier; `before` where that is not in the same document."""
        if i == 0:
            return x_BncC
        same = self.same[i].reshape(self.same[i].shape + (1,) * (x_BncC.ndim - 3))
        return jnp.where(same, shift(x_BncC, i, axis=2), before)

    def own(self, x_BncC):
        """Without the halos, `[B, S, ...]`."""
        return x_BncC[:, :, self.halo :].reshape(*self.segments_BS.shape, *x_BncC.shape[3:])

    def own_keys(self, x_BSC):
        """The part of the keys and values that this device answers for."""
        return round_robin(x_BSC, self.layout.keys)


def count_positions(segments_BS):
    """Each token's distance from the start of its document, int32."""
    index_S = jnp.arange(segments_BS.shape[1], dtype=jnp.int32)
    starts_BS = segments_BS != shift(segments_BS, 1)
    start_BS = jax.lax.cummax(jnp.where(starts_BS, index_S, 0), axis=1)
    return index_S - start_BS


def _rotations(cfg: ModelConfig, positions_BS):
    """(cos, sin) `[kinds, B, S, Z]` of the rotary angles: full layers, then sliding ones if any."""
    R = cfg.rope_channels
    thetas = (cfg.rope_theta, cfg.rope_theta_sliding)[: 2 if cfg.sliding_layers else 1]
    power_Z = jnp.arange(0, R, 2, dtype=jnp.float32) / max(R, 1)
    frequency = jnp.stack([jnp.float32(theta) ** -power_Z for theta in thetas])
    angle = positions_BS.astype(jnp.float32)[None, :, :, None] * frequency[:, None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BSHK, cos_BSZ, sin_BSZ):
    """Rotary embedding: pair i is channels (i, i + Z); channels past 2Z pass."""
    Z = cos_BSZ.shape[-1]
    a, b, rest = x_BSHK[..., :Z], x_BSHK[..., Z : 2 * Z], x_BSHK[..., 2 * Z :]
    cos, sin = cos_BSZ[:, :, None], sin_BSZ[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
