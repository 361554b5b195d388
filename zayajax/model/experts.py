"""SwiGLU experts, one for each token, on the GPUs of the node.

Shape letters: T tokens of this device, D embed, F expert hidden, E experts of this device,
R ranks, C slots from one rank to another.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from zayajax import exchange
from zayajax.kernels.grouped_matmul import grouped_matmul
from zayajax.layout import Layout
from zayajax.model.common import weight
from zayajax.settings import ModelConfig


class Experts(nnx.Module):
    def __init__(self, cfg: ModelConfig, key):
        D, E, F, L = cfg.hidden, cfg.experts, cfg.expert_hidden, cfg.layers
        k_up, k_down = jax.random.split(key)
        # One matrix for gate and up: the gate's columns first.
        self.gate_up = weight(k_up, (E, D, 2 * F), ("expert", "expert_embed", None), D)
        self.down = weight(k_down, (E, F, D), ("expert", None, "expert_embed"), F * 2 * L)

    def __call__(self, x_TD, choice_T, layout: Layout, buckets=exchange.BUCKETS):
        """The chosen expert of each token; zero where `choice_T` is past the last expert.

        Nothing is dropped: of the capacities in `exchange.capacities` the smallest that holds the
        fullest pair of ranks is used, the same on all ranks of the node. Also returns how often
        each of them was used, `[capacities]` int32: once.
        """
        E, way = self.gate_up.shape[0], (layout.travel, layout.exchange)
        if layout.summed:  # all ranks have these tokens: each computes those of its own experts
            here_T = choice_T - jax.lax.axis_index(layout.summed) * E
            choice_T = jnp.where((here_T >= 0) & (here_T < E), here_T, E)
        rooms = exchange.capacities(x_TD.shape[0], exchange.ranks(layout.travel), buckets)
        plan = exchange.route(choice_T, E, layout.travel, rooms)
        # Kept for the backward pass, or it would plan and send once more.
        plan = jax.tree.map(partial(checkpoint_name, name="moe"), plan)
        y_TD = _bucketed(way, rooms, x_TD, self.gate_up[...], self.down[...], plan)
        if layout.summed:
            with jax.named_scope("combine"):
                y_TD = jax.lax.psum(y_TD, layout.summed)
        return checkpoint_name(y_TD, "moe"), (plan.bucket == jnp.arange(len(rooms))).astype("int32")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _bucketed(way, rooms, x_TD, gate_up, down, plan: exchange.Route):
    branches = [partial(_at_capacity, way, room) for room in rooms]
    return jax.lax.switch(plan.bucket, branches, x_TD, gate_up, down, plan)


def _forward(way, rooms, x_TD, gate_up, down, plan):
    return _bucketed(way, rooms, x_TD, gate_up, down, plan), (x_TD, gate_up, down, plan)


def _backward(way, rooms, saved, dy_TD):
    # A switch of whole backward passes: differentiating through the switch itself would keep the
    # intermediate arrays of every capacity, the worst one included.
    x_TD, gate_up, down, plan = saved

    def branch(room, x_TD, gate_up, down, plan, dy_TD):
        # `send` and `give_back` are linear, and each is the other's transpose: three exchanges.
        x_RCD = exchange.send(x_TD, plan, room, *way)
        dy_RCD = exchange.send(dy_TD, plan, room, *way)
        with jax.named_scope("experts"):
            run = partial(_apply, plan=plan, room=room)
            dx_RCD, d_gate_up, d_down = jax.vjp(run, x_RCD, gate_up, down)[1](dy_RCD)
        return exchange.give_back(dx_RCD, plan, *way), d_gate_up, d_down

    branches = [partial(branch, room) for room in rooms]
    grads = jax.lax.switch(plan.bucket, branches, x_TD, gate_up, down, plan, dy_TD)
    return *grads, jax.tree.map(lambda i: np.zeros(i.shape, jax.dtypes.float0), plan)


_bucketed.defvjp(_forward, _backward)


def _at_capacity(way, room: int, x_TD, gate_up, down, plan: exchange.Route):
    """`way`: the axes over which tokens travel, and how."""
    x_RCD = exchange.send(x_TD, plan, room, *way)
    with jax.named_scope("experts"):
        y_RCD = _apply(x_RCD, gate_up, down, plan, room)
    return exchange.give_back(y_RCD, plan, *way)


def _apply(x_RCD, gate_up, down, plan: exchange.Route, room: int):
    """Empty slots come out as anything finite or zero: nobody reads them."""
    (R, C, D), E = x_RCD.shape, gate_up.shape[0]
    x = x_RCD.reshape(R * C, D)
    place_RC, sizes_E = exchange.by_expert(plan, room)
    place = place_RC.reshape(-1)
    if E > 1:
        x = jnp.zeros_like(x).at[place].set(x, mode="drop", unique_indices=True)
    h = grouped_matmul(x, gate_up, sizes_E)
    gate, up = jnp.split(h, 2, axis=-1)
    y = grouped_matmul(jax.nn.silu(gate) * up, down, sizes_E)
    if E > 1:
        y = y.at[place].get(mode="fill", fill_value=0, unique_indices=True)
    return y.reshape(R, C, D)
