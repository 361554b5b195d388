"""Compressed convolutional attention (arXiv 2510.04476), as ZAYA1 has it.

Shape letters: B batch, S sequence, D embed, H query heads, N key-value heads, J = H + N,
K head width, t0 and t1 taps of the two convolutions; n chunks of c positions behind their halos.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from zayajax import attention
from zayajax.model.common import Packing, einsum32, rotate, vector, weight
from zayajax.settings import ModelConfig

# The smallest length that q and k are divided by: float32's epsilon, as in transformers.
TINY = 1.1920929e-07


class CCA(nnx.Module):
    def __init__(self, cfg: ModelConfig, key):
        D, H, N, K, L = cfg.hidden, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.layers
        J, t0, t1 = H + N, cfg.cca_time0, cfg.cca_time1
        keys = iter(jax.random.split(key, 7))
        self.q = weight(next(keys), (D, H, K), ("embed", None, None), D)
        self.k = weight(next(keys), (D, N, K), ("embed", None, None), D)
        self.v_now = weight(next(keys), (D, N * K // 2), ("embed", None), D)
        self.v_late = weight(next(keys), (D, N * K // 2), ("embed", None), D)
        # 2L layers add to the residual stream: each starts small, so that their sum is of order 1.
        self.o = weight(next(keys), (H, K, D), (None, None, "embed"), H * K * 2 * L)
        self.depthwise = weight(next(keys), (t0, J, K), (None, None, None), t0)
        self.depthwise_bias = vector((J, K))
        self.grouped = weight(next(keys), (t1, J, K, K), (None, None, "channel", None), t1 * K)
        self.grouped_bias = vector((J, K))
        self.temp = vector(N, 1.0)

        def bias(shape):
            return vector(shape) if cfg.attention_bias else None

        self.q_bias, self.k_bias, self.o_bias = bias((H, K)), bias((N, K)), bias(D)
        self.v_now_bias, self.v_late_bias = bias(N * K // 2), bias(N * K // 2)

    def __call__(self, x_BSD, packing: Packing, rotation, window):
        """`rotation`: (cos, sin) of this layer; `window`: keys that a query sees. `[B, S, D]`."""
        dtype = x_BSD.dtype
        # What padding holds never matters: convolutions, value shift and attention all stop at it.
        q = _plus(jnp.einsum("bsd,dhk->bshk", x_BSD, self.q[...]), self.q_bias)
        k = _plus(jnp.einsum("bsd,dnk->bsnk", x_BSD, self.k[...]), self.k_bias)
        qk_BSJK = jnp.concatenate([q, k], axis=2)
        now, late = (x_BSD @ w[...] for w in (self.v_now, self.v_late))
        # Projections are local; what the chunk before has to say comes in one message.
        qk_BncJK, late_BncC = packing.extend(qk_BSJK, late)
        q, k = self.queries_and_keys(qk_BSJK, self.convolve(qk_BncJK, packing))
        q, k = (rotate(x, *rotation).astype(dtype) for x in (q, k))
        v = self.values(now, packing.own(packing.back(late_BncC, 1)))
        k, v = packing.own_keys(k), packing.own_keys(v)
        with jax.named_scope("attention"):
            o_BSHK, _ = attention.attend(
                q, k, v, packing.positions, packing.segments, window, packing.layout
            )
        return _plus(jnp.einsum("bshk,hkd->bsd", o_BSHK, self.o[...]), self.o_bias)

    @jax.named_scope("qk")
    def queries_and_keys(self, qk_BSJK, conv_BSJK):
        """Convolved, with the mean path, of length sqrt(K) (keys times `temp`), in float32."""
        qk_BSJK = qk_BSJK.astype(jnp.float32)
        (H, N), (B, S, _, K) = (self.q.shape[1], self.k.shape[1]), qk_BSJK.shape
        q, k = qk_BSJK[:, :, :H], qk_BSJK[:, :, H:]
        q_mean_BSNGK = (q.reshape(B, S, N, H // N, K) + k[:, :, :, None]) / 2
        q = conv_BSJK[:, :, :H] + q_mean_BSNGK.reshape(B, S, H, K)
        k = conv_BSJK[:, :, H:] + q_mean_BSNGK.mean(axis=3)
        return _to_length(q, K**0.5), _to_length(k, K**0.5) * self.temp[...][:, None]

    @jax.named_scope("convolutions")
    def convolve(self, qk_BncJK, packing: Packing):
        """Depthwise, then grouped by head, both causal inside the document. `[B, S, J, K]` float32.

        Before a document the depthwise taps read 0 and the grouped ones the depthwise bias, as if
        the document stood alone behind one padding for both.
        """
        t0, t1 = self.depthwise.shape[0], self.grouped.shape[0]
        bias_JK = self.depthwise_bias[...]
        depth_BncJK = bias_JK + sum(
            self.depthwise[i].astype(jnp.float32) * packing.back(qk_BncJK, t0 - 1 - i)
            for i in range(t0)
        )
        depth_BncJK = depth_BncJK.astype(qk_BncJK.dtype)
        before_JK = bias_JK.astype(qk_BncJK.dtype)
        taps = [packing.own(packing.back(depth_BncJK, t1 - 1 - i, before_JK)) for i in range(t1)]
        taps_BSJC = jnp.concatenate(taps, axis=-1)
        w_JCK = jnp.moveaxis(self.grouped[...], 0, 1).reshape(
            taps_BSJC.shape[2], -1, bias_JK.shape[1]
        )
        # Heads in front by hand: XLA for CPU refuses other bfloat16 products with float32 results.
        taps_JBSC = jnp.moveaxis(taps_BSJC, 2, 0)
        grouped_JBSK = einsum32("jbsc,jck->jbsk", taps_JBSC, w_JCK)
        grouped_BSJK = jnp.moveaxis(grouped_JBSK, 0, 2)
        return grouped_BSJK + self.grouped_bias[...]

    @jax.named_scope("v")
    def values(self, now_BSC, late_BSC):
        """Half of the channels of this token, half of the one before it in its document."""
        now, late = _plus(now_BSC, self.v_now_bias), _plus(late_BSC, self.v_late_bias)
        (B, S, _), (N, K) = now.shape, self.k.shape[1:]
        return jnp.concatenate([now, late], axis=-1).reshape(B, S, N, K)


def _plus(x, bias):
    return x if bias is None else (x.astype(jnp.float32) + bias[...]).astype(x.dtype)


def _to_length(x, length: float):
    """x scaled to `length`. max under the root, not outside it: the gradient at 0 is finite."""
    squared = jnp.sum(x * x, axis=-1, keepdims=True)
    return x * (length * jax.lax.rsqrt(jnp.maximum(squared, TINY**2)))
