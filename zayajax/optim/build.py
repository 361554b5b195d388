"""The optimizer: one transformation a group of parameters.

It works on {path: parameter}, so that a group is a set of names, and its moments carry the axes of
the parameters they belong to: `mesh.stored_specs` places both by the same table.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import optax

from zayajax.mesh import by_path, is_param
from zayajax.optim import balance, table
from zayajax.optim.adam import scale_by_adam
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
        return descent(scale_by_adam(cfg.beta1, cfg.beta2, cfg.eps, cfg.state_dtype), decay=decay)

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


def apply(tx: optax.GradientTransformation, grads, opt_state, params, skip=False):
    """One update of a whole tree: (params, opt_state).

    With `skip`, a boolean that may be traced, both come back bit for bit, whatever `grads` are: by
    selects, since 0 * NaN is NaN. The learning rate's schedule goes on, as the data does.
    """
    named = by_path(params)
    updates, opt_state = tx.update(by_path(grads), opt_state, named, skip=skip)
    new = optax.apply_updates(named, updates)
    leaves = jax.tree.map(partial(jnp.where, skip), named, new).values()
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_param), leaves), opt_state
