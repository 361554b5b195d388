"""Ring attention (arXiv 2310.01889): keys and values travel from rank to rank. The baseline.

Shape letters: B batch, S queries and U keys of one rank, R ranks, H query heads, N key-value heads,
K head width.

A fair one: K and V are not repeated to the query heads and travel together, each hop is issued
before the products that it can hide behind, and what has come round is not sent once more.
"""

import math
from functools import partial

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
    """As `gather.attend`, with R - 1 hops of K and V past all ranks of `axes`.

    The backward pass makes as many again, and as many of dK and dV, which then go home, in the
    dtype of k. Memory does not grow with R. Over two axes keys go round the first (the node), then
    one hop along the second (the rail), and so on: each hop spans one axis.
    """
    if ranks(axes) == 1:
        whole = ((queries, keys[0]) for queries, keys in (positions, segments))
        return local.attend(q_BSHK, k_BUNK, v_BUNK, *whole, window, block)
    block = block or local.default_block(k_BUNK.shape[1])
    args = local.alike(q_BSHK, k_BUNK, v_BUNK, positions, segments)
    return _attend(block, axes, *args, local.limit(window))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(block, axes, q, k, v, positions, segments, window):
    def station(hops, carry, arrived, leaving):
        kv, out, lse = carry
        ahead = _hop(kv, leaving)
        where = _keys_of(_source(axes, hops), positions, segments)
        part = local.partial_forward(block, jnp.float32, q, *kv, *where, window)
        return ahead, *_merge((out, lse), part)

    out = jnp.zeros_like(q, dtype=jnp.float32)
    carry = jnp.stack([k, v]), out, out[..., 0] + local.NOTHING
    _, out, lse = _around(axes, station, carry)
    return out.astype(q.dtype), lse


def _forward(block, axes, q, k, v, positions, segments, window):
    out, lse = local.named(*_attend(block, axes, q, k, v, positions, segments, window))
    return (out, lse), (q, k, v, positions, segments, window, out, lse)


def _backward(block, axes, saved, cotangents):
    q, k, v, positions, segments, window, out, lse = saved
    delta = local.score_offset(out, *cotangents)

    def station(hops, carry, arrived, leaving):
        kv, dkv, dq = carry
        # What came with these keys arrives while this rank's share is computed.
        ahead, arriving = _hop(kv, leaving), _hop(dkv, arrived)
        where = _keys_of(_source(axes, hops), positions, segments)
        more, *share = local.partial_gradient(
            block, q, *kv, *where, window, lse, delta, cotangents[0]
        )
        dkv = (arriving.astype(jnp.float32) + jnp.stack(share)).astype(k.dtype)
        return ahead, dkv, dq + more

    kv = jnp.stack([k, v])
    carry = kv, jnp.zeros_like(kv), jnp.zeros_like(q, dtype=jnp.float32)
    _, dkv, dq = _around(axes, station, carry)
    (inner, g), (outer, n) = _ring(axes)
    dk, dv = _hop(_hop(dkv, inner, n % g), outer)  # home
    return dq.astype(q.dtype), dk, dv, None, None, None


_attend.defvjp(_forward, _backward)


def _ring(axes):
    """(axis, size) of the inner ring, and of the outer one: (None, 1) where one is enough."""
    sizes = [(a, ranks((a,))) for a in axes if ranks((a,)) > 1]
    return (*sizes, (None, 1))[:2]


def _around(axes, station, carry):
    """Calls `station(hops, carry, arrived, leaving)` as the keys of each rank are here.

    `hops`: how many they have made along the inner axis and the outer one; `arrived` and `leaving`:
    the axis of their last hop and of their next, None at the first station and at the last.
    """
    (inner, g), (outer, n) = _ring(axes)

    def round_(o, carry, arrived, leaving):
        def at(i):
            return o * (g - 1) + i, o

        carry = station(at(0), carry, arrived, inner)
        carry = jax.lax.fori_loop(1, g - 1, lambda i, c: station(at(i), c, inner, inner), carry)
        return station(at(g - 1), carry, inner, leaving)

    if n == 1:
        return round_(0, carry, None, None)
    carry = round_(0, carry, None, outer)
    carry = jax.lax.fori_loop(1, n - 1, lambda o, c: round_(o, c, outer, outer), carry)
    return round_(n - 1, carry, outer, None)


@jax.named_scope("ring")
def _hop(x, axis, by: int = 1):
    """To the rank `by` places on along a mesh axis; None is no hop."""
    if axis is None:
        return x
    R = ranks((axis,))
    for step in hops(by, R):
        x = jax.lax.ppermute(x, axis, [(r, (r + step) % R) for r in range(R)])
    return x


def hops(by: int, R: int) -> list[int]:
    """The places of each hop that together go `by` places on in one ring of all R ranks: where
    that many at once would make several smaller rings, one by one, the shorter way round."""
    if by == 0:
        return []
    if math.gcd(by, R) == 1:
        return [by]
    return [1] * by if by <= R // 2 else [R - 1] * (R - by)


def _source(axes, hops):
    """Whose keys are here, counted over `axes` row by row."""
    made = dict(zip((a for a, _ in _ring(axes)), hops, strict=True))
    source = 0
    for a in axes:
        R = ranks((a,))
        source = source * R + (jax.lax.axis_index(a) - made.get(a, 0)) % R
    return source


def _keys_of(source, *pairs):
    return tuple(
        (queries, jax.lax.dynamic_index_in_dim(keys, source, keepdims=False))
        for queries, keys in pairs
    )


def _merge(a, b):
    """Results over different keys, weighted by their share of the whole. Where neither has any,
    the sum of two -1e30 in logarithms is -1e30 again."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = jnp.logaddexp(lse_a, lse_b)
    share_a, share_b = (jnp.exp(x - lse)[..., None] for x in (lse_a, lse_b))
    return share_a * out_a + share_b * out_b, lse
