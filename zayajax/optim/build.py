"""The optimizer: one transformation a group of parameters.

It works on {path: parameter}, so that a group is a set of names, and its moments carry the axes of
the parameters they belong to: `mesh.stored_specs` places both by the same table.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from zayajax.mesh import by_path, is_param
from zayajax.optim import balance, table
from zayajax.optim.muon import scale_by_muon
from zayajax.optim.schedule import learning_rate
from zayajax.settings import OptimConfig


def build(
    cfg: OptimConfig, stored: Mapping[str, tuple] | None = None
) -> optax.GradientTransformation:
    """All the rules of `optim.table` as one, on {path: parameter}.

    `stored`: path -> mesh axes of each dimension (`mesh.stored_axes`); None without a mesh. Its
    `update` depends on it, its state does not. Raises ValueError for a path without a rule.
    """

    def descent(*rule, decay: float):
        decay = optax.add_decayed_weights(decay) if decay else optax.identity()
        return optax.chain(*rule, decay, optax.scale_by_learning_rate(learning_rate(cfg)))

    def adamw(decay: float):
        rule = descent(optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.eps), decay=decay)
        return _store_as(cfg.state_dtype, rule)

    if cfg.matrices == "muon":
        muon = scale_by_muon(cfg.momentum, table.matrix, stored, cfg.state_dtype)
        matrices = descent(muon, decay=cfg.weight_decay)
    else:
        matrices = adamw(cfg.weight_decay)
    groups = {
        table.MATRICES: matrices,
        table.ADAMW_DECAYED: adamw(cfg.weight_decay),
        table.ADAMW: adamw(0.0),
        table.BALANCE: balance.transform(cfg),
    }
    return optax.partition(groups, table.groups)


def apply(tx: optax.GradientTransformation, grads, opt_state, params):
    """One update of a whole tree: (params, opt_state)."""
    named = by_path(params)
    updates, opt_state = tx.update(by_path(grads), opt_state, named)
    leaves = optax.apply_updates(named, updates).values()
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_param), leaves), opt_state


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
