"""Attention on one device, over blocks: no array is ever S x U.

Shape letters: B batch, S queries, U keys, H query heads, N key-value heads, G = H/N, K head width;
q and u: one block of queries, of keys.

The backward pass is written out, so that it keeps only the output and the log-sum-exp, and so that
partial results over different keys can be merged, with gradients, by whoever calls.
"""

from functools import partial

import jax
import jax.numpy as jnp

# Finite: a query that sees nothing must make no NaN. Far below any score, far above -max float, so
# that differences of two of these stay finite.
NOTHING = -1e30

einsum32 = partial(jnp.einsum, preferred_element_type=jnp.float32)


def attend(q_BSHK, k_BUNK, v_BUNK, positions, segments, window=None, block: int | None = None):
    """Causal attention inside documents; query head h uses key-value head h // G.

    Args:
      positions: of the queries `[B, S]` and of the keys `[B, U]`, counted inside each document.
      segments: documents of the queries and of the keys, likewise; 0 is padding.
      window: keys a query sees, itself included (a whole number, may be traced); None: all.
      block: queries, and keys, at a time; by default a quarter of the keys, between 128 and 512:
        small enough to pass over what a causal mask hides, large enough to fill a product.

    Returns:
      out `[B, S, H, K]` in the dtype of q, and the log-sum-exp of its scores `[B, S, H]` in
      float32. A query that sees nothing gets 0 and -1e30.
    """
    (B, S, H, K), N = q_BSHK.shape, k_BUNK.shape[2]
    if window is None:
        window = jnp.iinfo(jnp.int32).max
    block = block or min(512, max(128, k_BUNK.shape[1] // 4))
    q_BSNGK = q_BSHK.reshape(B, S, N, H // N, K)
    window = jnp.asarray(window, jnp.int32)
    out, lse = _attend(block, q_BSNGK, k_BUNK, v_BUNK, positions, segments, window)
    return out.reshape(B, S, H, K), lse.reshape(B, S, H)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(block, q, k, v, positions, segments, window):
    return _forward(block, q, k, v, positions, segments, window)[0]


def _forward(block, q, k, v, positions, segments, window):
    queries = _blocks(block, q, positions[0], segments[0])
    keys = _blocks(block, k, v, positions[1], segments[1])
    scale = q.shape[-1] ** -0.5

    def query_block(_, queries):
        q, q_position, q_segment = queries

        def key_block(carry, keys):
            k, v, k_position, k_segment = keys
            visible = _visible(q_position, q_segment, k_position, k_segment, window)

            def step(carry):
                o_BNGqK, max_BNGq, sum_BNGq = carry
                a = einsum32("bqngk,bunk->bngqu", q, k) * scale
                a = jnp.where(visible[:, None, None], a, NOTHING)
                new_max = jnp.maximum(max_BNGq, a.max(-1))
                p = jnp.where(visible[:, None, None], jnp.exp(a - new_max[..., None]), 0)
                keep = jnp.exp(max_BNGq - new_max)
                o = einsum32("bngqu,bunk->bngqk", p.astype(v.dtype), v)
                return o_BNGqK * keep[..., None] + o, new_max, sum_BNGq * keep + p.sum(-1)

            return jax.lax.cond(visible.any(), step, lambda carry: carry, carry), None

        # zeros_like, not zeros: under shard_map the carry must vary over the mesh as q does.
        o = jnp.zeros_like(jnp.moveaxis(q, 1, 3), dtype=jnp.float32)
        carry = o, o[..., 0] + NOTHING, o[..., 0]
        (o, largest, total), _ = jax.lax.scan(key_block, carry, keys)
        seen = total > 0
        out = o / jnp.where(seen, total, 1)[..., None]
        lse = jnp.where(seen, largest + jnp.log(jnp.where(seen, total, 1)), NOTHING)
        return None, (jnp.moveaxis(out, 3, 1).astype(q.dtype), jnp.moveaxis(lse, 3, 1))

    _, (out, lse) = jax.lax.scan(query_block, None, queries)
    S = q.shape[1]
    out, lse = _join(out, S), _join(lse, S)
    return (out, lse), (q, k, v, positions, segments, window, out, lse)


def _backward(block, saved, cotangents):
    q, k, v, positions, segments, window, out, lse = saved
    d_out, d_lse = cotangents
    scale = q.shape[-1] ** -0.5
    # d score = p * (d p - delta); what the log-sum-exp passes back joins delta.
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1) - d_lse
    queries = _blocks(block, q, d_out, lse, delta, positions[0], segments[0])
    keys = _blocks(block, k, v, positions[1], segments[1])

    def key_block(dq_blocks, keys):
        k, v, k_position, k_segment = keys

        def query_block(carry, queries):
            (q, d_out, lse, delta, q_position, q_segment), dq = queries
            visible = _visible(q_position, q_segment, k_position, k_segment, window)

            def step(carry, dq):
                dk, dv = carry
                a = einsum32("bqngk,bunk->bngqu", q, k) * scale
                lse_BNGq1 = jnp.moveaxis(lse, 1, 3)[..., None]
                # Masked before exp: a padded query's lse would overflow it.
                a = jnp.where(visible[:, None, None], a - lse_BNGq1, NOTHING)
                p = jnp.exp(a)
                dp = einsum32("bqngk,bunk->bngqu", d_out, v)
                ds = p * (dp - jnp.moveaxis(delta, 1, 3)[..., None]) * scale
                p, ds = p.astype(q.dtype), ds.astype(q.dtype)
                dk += einsum32("bngqu,bqngk->bunk", ds, q)
                dv += einsum32("bngqu,bqngk->bunk", p, d_out)
                return (dk, dv), dq + einsum32("bngqu,bunk->bqngk", ds, k)

            return jax.lax.cond(visible.any(), step, lambda carry, dq: (carry, dq), carry, dq)

        zeros = jnp.zeros_like(k, dtype=jnp.float32), jnp.zeros_like(v, dtype=jnp.float32)
        (dk, dv), dq_blocks = jax.lax.scan(query_block, zeros, (queries, dq_blocks))
        return dq_blocks, (dk, dv)

    dq_blocks = jnp.zeros_like(queries[0], dtype=jnp.float32)
    dq_blocks, (dk, dv) = jax.lax.scan(key_block, dq_blocks, keys)
    dq = _join(dq_blocks, q.shape[1]).astype(q.dtype)
    dk, dv = (_join(x, k.shape[1]).astype(k.dtype) for x in (dk, dv))
    return dq, dk, dv, None, None, None


_attend.defvjp(_forward, _backward)


def _visible(q_position, q_segment, k_position, k_segment, window):
    """[B, q, u]: same document, not later, within the window, not padding."""
    apart = q_position[:, :, None] - k_position[:, None]
    same = (q_segment[:, :, None] == k_segment[:, None]) & (k_segment[:, None] > 0)
    return same & (apart >= 0) & (apart < window)


def _blocks(block, *arrays):
    """[B, S, ...] to [blocks, B, block, ...]; rows are filled up with zeros: padding."""
    size = min(block, arrays[0].shape[1])

    def one(x):
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    return tuple(map(one, arrays))


def _join(x, length: int):
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
