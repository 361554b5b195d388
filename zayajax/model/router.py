"""The router: an MLP on a state that is averaged over depth, all in float32.

Shape letters: B batch, S sequence, D embed, R router width, C = E + 1 classes: the experts, then
the skip class.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from zayajax.model.common import Balance, rms_norm, vector, weight
from zayajax.settings import ModelConfig


class Router(nnx.Module):
    def __init__(self, cfg: ModelConfig, key):
        D, R, C, self.eps = cfg.hidden, cfg.router_hidden, cfg.experts + 1, cfg.norm_eps
        keys = iter(jax.random.split(key, 4))
        self.down, self.down_bias = _matrix(next(keys), (D, R), ("embed", None)), vector(R)
        self.norm = vector(R, 1.0)
        self.fc1, self.fc1_bias = _matrix(next(keys), (R, R), ("router", None)), vector(R)
        self.fc2, self.fc2_bias = _matrix(next(keys), (R, R), ("router", None)), vector(R)
        # Small, so that all classes start nearly even and the balance bias soon evens them out.
        self.out = weight(next(keys), (R, C), ("router", None), 100.0 * R, keep=True)
        balance_C = jnp.where(jnp.arange(C) < cfg.experts, jnp.float32(0), -1)
        self.balance_bias = Balance(balance_C, axes=(None,), keep=True)

    @jax.named_scope("router")
    def __call__(self, h_BSD, above_BSR, gamma_R):
        """`above_BSR` is the state of the layer before, which joins with weights `gamma_R`.

        Returns the chosen class `[B, S]` (ties: the lowest), its probability, and the state that
        the next layer receives.
        """
        state_BSR = _exact("bsd,dr->bsr", h_BSD.astype(jnp.float32), self.down[...])
        state_BSR += self.down_bias[...] + above_BSR * gamma_R
        x = rms_norm(state_BSR, self.norm[...], self.eps, jnp.float32)
        x = _gelu(_exact("bsr,rq->bsq", x, self.fc1[...]) + self.fc1_bias[...])
        x = _gelu(_exact("bsr,rq->bsq", x, self.fc2[...]) + self.fc2_bias[...])
        p_BSC = jax.nn.softmax(_exact("bsr,rc->bsc", x, self.out[...]), axis=-1)
        scores_BSC = jax.lax.stop_gradient(p_BSC + self.balance_bias[...])
        choice_BS = jnp.argmax(scores_BSC, axis=-1).astype(jnp.int32)
        p_BS = jnp.take_along_axis(p_BSC, choice_BS[..., None], axis=-1)[..., 0]
        return choice_BS, p_BS, state_BSR


def _exact(spec, x, w):
    # The first and the second choice can be 1e-5 apart: TF32 would swap them.
    return jnp.einsum(spec, x, w.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


@jax.custom_jvp
def _gelu(x):
    """x times the normal distribution's mass below x: the exact form, not the tanh one."""
    return x * _mass_below(x)


@_gelu.defjvp
def _gelu_jvp(primals, tangents):
    # Written out: jax 0.12 cannot differentiate erf and erfc under shard_map (`Primitive polynomial
    # requires varying manual axes to match`).
    (x,), (dx,) = primals, tangents
    below, density = _mass_below(x), jnp.exp(-x * x / 2) * (2 * math.pi) ** -0.5
    return x * below, dx * (below + x * density)


def _mass_below(x):
    return jax.lax.erfc(-x * 0.5**0.5) / 2


def _matrix(key, shape, axes):
    return weight(key, shape, axes, shape[0], keep=True)
