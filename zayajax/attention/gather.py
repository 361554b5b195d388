"""Attention over a row that is spread over many devices: all keys come to every device.

Shape letters: B batch, S queries and U keys of one rank, R ranks, H query heads, N key-value heads,
J = 2N, K head width.

Compressed keys and values are small (ZAYA1: 2 heads of 128 for 8 of the queries), so a collective
that uses all links at once costs less than R - 1 hops over one of them.
"""

import jax
import jax.numpy as jnp

from zayajax.attention import local
from zayajax.exchange import ranks


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
    """`local.attend` over the keys of all ranks of the mesh `axes` (outermost first).

    One message a level: K and V together are gathered over the last axis, then over the one before
    it; gradients are scattered in the reverse order, in the dtype of k. For ("gpu", "node") the
    small message travels along the rail, the large one inside the node.

    Args:
      positions: of the queries `[B, S]`, and of the keys of all ranks `[R, B, U]`, R counted over
        `axes` row by row. They are the same in all layers: gathered once, by the caller.
      segments: likewise.

    Returns:
      out `[B, S, H, K]` in the dtype of q and log-sum-exp `[B, S, H]` in float32, of the queries.
    """
    k, v = _gathered(k_BUNK, v_BUNK, axes) if ranks(axes) > 1 else (k_BUNK, v_BUNK)
    positions, segments = ((queries, _in_a_row(keys)) for queries, keys in (positions, segments))
    return local.attend(q_BSHK, k, v, positions, segments, window, block)


@jax.named_scope("kv")
def _gathered(k_BUNK, v_BUNK, axes):
    kv_BUJK = jnp.concatenate([k_BUNK, v_BUNK], axis=2)
    for axis in reversed(axes):
        if ranks((axis,)) > 1:
            kv_BUJK = jax.lax.all_gather(kv_BUJK, axis, axis=1, tiled=True)
    return jnp.split(kv_BUJK, 2, axis=2)


def _in_a_row(x_RBU):
    return jnp.moveaxis(x_RBU, 0, 1).reshape(x_RBU.shape[1], -1)
