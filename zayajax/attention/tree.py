"""Tree attention (arXiv 2408.04093): keys stay where they are, results come together.

Shape letters: B batch, S queries, U keys of one rank, R ranks, H query heads, N key-value heads,
K head width.

For few queries over many keys, as in decoding: what travels does not depend on the number of keys.
"""

from functools import partial

import jax
import jax.numpy as jnp

from zayajax.attention import local
from zayajax.exchange import ranks
from zayajax.mesh import total

# Up to here, partial results of all ranks together, one message costs less than two. By
# `planning.fabric` the order turns at 10 MB in a node of eight MI300X, and nowhere below 7 MB.
# experiments/tree_merge.py measures it.
ONE_MESSAGE_BYTES = 1 << 20


def attend(
    q_BSHK,
    k_BUNK,
    v_BUNK,
    positions,
    segments,
    window=None,
    axes: tuple[str, ...] = (),
    block: int | None = None,
):
    """`local.attend` of the same queries on all ranks of the mesh `axes`, each with its own keys.

    Each rank works through its keys; results are merged over the first axis, then over the next,
    in float32. A rank whose keys a query does not see contributes nothing. The gradient of q is
    summed over `axes` likewise; those of k and v stay.

    Args:
      q_BSHK: the same on all ranks. Where its type says that it varies over an axis, so does the
        gradient: each rank's own contribution.
      positions: of the queries `[B, S]` and of this rank's keys `[B, U]`.
      segments: likewise.

    Returns:
      out `[B, S, H, K]` in the dtype of q and log-sum-exp `[B, S, H]` in float32, over all keys,
      of a type that does not vary over `axes`.
    """
    if not axes:
        return local.attend(q_BSHK, k_BUNK, v_BUNK, positions, segments, window, block)
    block = block or local.default_block(k_BUNK.shape[1])
    args = q_BSHK, k_BUNK, v_BUNK, positions, segments
    return _attend(block, axes, *args, local.limit(window))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(block, axes, q, k, v, positions, segments, window):
    args = q, k, v, positions, segments, window
    out, lse = local.partial_forward(block, jnp.float32, *args)
    for axis in axes:
        out, lse = merge(out, lse, axis)
    return out.astype(q.dtype), lse


def _forward(block, axes, q, k, v, positions, segments, window):
    out, lse = local.named(*_attend(block, axes, q, k, v, positions, segments, window))
    return (out, lse), (q, k, v, positions, segments, window, out, lse)


def _backward(block, axes, saved, cotangents):
    *args, out, lse = saved
    q, k, v = args[:3]
    delta = local.score_offset(out, *cotangents)
    dq, dk, dv = local.partial_gradient(block, *args, lse, delta, cotangents[0])
    shared = tuple(a for a in axes if a not in jax.typeof(q).manual_axis_type.varying)
    with jax.named_scope("tree"):
        dq = total(dq, shared)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


_attend.defvjp(_forward, _backward)


@jax.named_scope("tree")
def merge(out_BSHK, lse_BSH, axis: str):
    """Results over the keys of all ranks of one mesh axis from each rank's own, float32.

    By the cheaper of two ways: a small message costs its latency, a large one its bytes.
    """
    gathered = ranks((axis,)) * 4 * (out_BSHK.size + lse_BSH.size)
    how = by_gather if gathered <= ONE_MESSAGE_BYTES else by_sums
    return how(out_BSHK, lse_BSH, axis)


def by_sums(out_BSHK, lse_BSH, axis: str):
    """Two messages, of the size of one rank's result: a maximum, and a sum of weighted results."""
    largest_BSH = jax.lax.pmax(lse_BSH, axis)
    # A rank that sees nothing has weight exp(-1e30) = 0; where none sees anything, all weigh 1, and
    # what they add up is 0.
    weight_BSH1 = jnp.exp(lse_BSH - largest_BSH)[..., None]
    both = jnp.concatenate([out_BSHK * weight_BSH1, weight_BSH1], axis=-1)
    return _divided(jax.lax.psum(both, axis), largest_BSH)


def by_gather(out_BSHK, lse_BSH, axis: str):
    """One message: the results of all ranks to every rank, R times the size of one."""
    both = jnp.concatenate([out_BSHK, lse_BSH[..., None]], axis=-1)
    both = jax.lax.all_gather(both, axis, to="invarying")
    out, lse = both[..., :-1], both[..., -1]
    largest_BSH = lse.max(0)
    weight = jnp.exp(lse - largest_BSH)[..., None]
    return _divided(jnp.concatenate([out * weight, weight], axis=-1).sum(0), largest_BSH)


def _divided(both, largest_BSH):
    """Sums of weighted results, and beside them of the weights: never less than 1."""
    sum_BSH = both[..., -1]
    return both[..., :-1] / sum_BSH[..., None], largest_BSH + jnp.log(sum_BSH)
