"""Load balancing without a loss: a bias on each expert's score follows the counts of tokens.

Shape letters: L layers, E experts, C = E + 1 classes, the skip class last.
"""

import jax.numpy as jnp
import optax

from zayajax.optim.adam import scale_by_adam
from zayajax.settings import OptimConfig


def transform(cfg: OptimConfig) -> optax.GradientTransformation:
    """AdamW without decay on the excess of load. Rate and betas as in AMD's port of ZAYA1."""
    return optax.chain(scale_by_adam(0.9, 0.999), optax.scale_by_learning_rate(cfg.balance_rate))


def excess(counts_LC, with_skip: bool):
    """What the bias descends on: each expert's share of the routed tokens, less the even share.

    `counts_LC` are exact int32 over the global batch: in bfloat16 the difference of two large
    counts loses its sign. The skip class stays where it is, unless `with_skip`.
    """
    C = counts_LC.shape[1]
    balanced_C = jnp.arange(C) < (C if with_skip else C - 1)
    counts_LC = jnp.where(balanced_C, counts_LC, 0)
    total_L1 = jnp.maximum(counts_LC.sum(axis=1, keepdims=True), 1)
    share_LC = counts_LC.astype(jnp.float32) / total_L1.astype(jnp.float32)
    # Without a single routed token there is nothing to correct.
    some_L1 = counts_LC.sum(axis=1, keepdims=True) > 0
    return jnp.where(balanced_C & some_L1, share_LC - 1.0 / balanced_C.sum(), 0.0)
