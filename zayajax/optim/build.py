"""The optimizer: one transformation a group of parameters.

It works on {path: parameter}, so that a group is a set of names, and its moments carry the axes of
the parameters they belong to: `mesh.stored_specs` places both by the same table.
"""

import jax
import jax.numpy as jnp
import optax

from zayajax.mesh import by_path, is_param
from zayajax.model.common import Balance
from zayajax.optim import balance
from zayajax.optim.schedule import learning_rate
from zayajax.settings import OptimConfig


def build(cfg: OptimConfig) -> optax.GradientTransformation:
    """AdamW for all that has a gradient, the balance rule for its biases; both take {path: v}."""

    def adamw(decay):
        rule = optax.chain(
            optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.eps),
            optax.add_decayed_weights(decay) if decay else optax.identity(),
            optax.scale_by_learning_rate(learning_rate(cfg)),
        )
        return _store_as(cfg.state_dtype, rule)

    groups = {
        "matrices": adamw(cfg.weight_decay),
        "others": adamw(0.0),
        "balance": balance.transform(cfg),
    }
    return optax.partition(groups, lambda named: {k: _group(k, v) for k, v in named.items()})


def apply(tx: optax.GradientTransformation, grads, opt_state, params):
    """One update of a whole tree: (params, opt_state)."""
    named = by_path(params)
    updates, opt_state = tx.update(by_path(grads), opt_state, named)
    leaves = optax.apply_updates(named, updates).values()
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_param), leaves), opt_state


def _group(path: str, v) -> str:
    """Only matrices decay: not vectors and biases, nor the depthwise taps and the vocabulary."""
    if isinstance(v, Balance):
        return "balance"
    if path in ("embed", "head") or path.endswith(("bias", "depthwise", "gamma")):
        return "others"
    return "matrices" if len(v.axes) >= 2 else "others"


def _store_as(dtype: str, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same rule in float32, with its moments at rest in `dtype`."""

    def cast(state, to):
        def one(x):  # step counts stay whole numbers
            return x.astype(to) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(one, state)

    def update(grads, state, params):
        updates, state = tx.update(grads, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(tx.init(params), dtype), update)
