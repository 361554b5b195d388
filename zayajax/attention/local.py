"""Attention on one device, over blocks: no array is ever S x U.

Shape letters: B batch, S queries, U keys, H query heads, N key-value heads, G = H/N, K head width;
q and u: one block of queries, of keys.

The backward pass is written out, so that it keeps only the output and the log-sum-exp. Both passes
also work on part of the keys: `partial_forward` and `partial_gradient` are what attention over many
devices is made of.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

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
    block = block or default_block(k_BUNK.shape[1])
    q, k, v, positions, segments = alike(q_BSHK, k_BUNK, v_BUNK, positions, segments)
    return _attend(block, q, k, v, positions, segments, limit(window))


def default_block(keys: int) -> int:
    return min(512, max(128, keys // 4))


def limit(window):
    """A window as a number, also where there is none."""
    return jnp.asarray(jnp.iinfo(jnp.int32).max if window is None else window, jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(block, q, k, v, positions, segments, window):
    return partial_forward(block, q.dtype, q, k, v, positions, segments, window)


def _forward(block, q, k, v, positions, segments, window):
    out, lse = named(*_attend(block, q, k, v, positions, segments, window))
    return (out, lse), (q, k, v, positions, segments, window, out, lse)


def _backward(block, saved, cotangents):
    *args, out, lse = saved
    delta = score_offset(out, *cotangents)
    grads = partial_gradient(block, *args, lse, delta, cotangents[0])
    grads = (g.astype(x.dtype) for g, x in zip(grads, args[:3], strict=True))
    return *grads, None, None, None


_attend.defvjp(_forward, _backward)


def named(out, lse):
    """For remat: a backward pass that finds both of these kept recomputes nothing of the forward.

    The name must be on the very arrays that the backward pass keeps.
    """
    return checkpoint_name(out, "attention"), checkpoint_name(lse, "attention")


def score_offset(out_BSHK, d_out_BSHK, d_lse_BSH):
    """delta of d score = p * (d p - delta), float32; what the log-sum-exp passes back joins it."""
    products = out_BSHK.astype(jnp.float32) * d_out_BSHK.astype(jnp.float32)
    return products.sum(-1) - d_lse_BSH


def alike(*trees):
    """The same values, all typed as varying over each mesh axis over which any of them varies.

    Carries of a scan and branches of a conditional must not change their type on the way.
    """
    leaves, structure = jax.tree.flatten(trees)
    varying = [jax.typeof(x).manual_axis_type.varying for x in leaves]
    every = frozenset().union(*varying)
    missing = [tuple(sorted(every - axes)) for axes in varying]
    leaves = [
        jax.lax.pcast(x, axes, to="varying") if axes else x
        for x, axes in zip(leaves, missing, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def partial_forward(block, dtype, q_BSHK, k_BUNK, v_BUNK, positions, segments, window):
    """`attend` without its gradient, over some of the keys; out in `dtype`."""
    (B, S, H, K), N = q_BSHK.shape, k_BUNK.shape[2]
    q, *keys, positions, segments = alike(q_BSHK, k_BUNK, v_BUNK, positions, segments)
    queries = _blocks(block, _grouped(q, N), positions[0], segments[0])
    keys = _blocks(block, *keys, positions[1], segments[1])
    scale = K**-0.5

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
        return None, (jnp.moveaxis(out, 3, 1).astype(dtype), jnp.moveaxis(lse, 3, 1))

    _, (out, lse) = jax.lax.scan(query_block, None, queries)
    return _join(out, S).reshape(B, S, H, K), _join(lse, S).reshape(B, S, H)


def partial_gradient(
    block, q_BSHK, k_BUNK, v_BUNK, positions, segments, window, lse_BSH, delta_BSH, d_out_BSHK
):
    """What some of the keys contribute to the gradients of q, k and v; float32.

    `lse_BSH` and `delta_BSH` (`score_offset`) belong to the output over all keys, as does the
    cotangent `d_out_BSHK`: contributions to dq just add up.
    """
    (B, S, H, K), N = q_BSHK.shape, k_BUNK.shape[2]
    scale = K**-0.5
    queries = q_BSHK, d_out_BSHK, lse_BSH, delta_BSH
    queries, k, v, positions, segments = alike(queries, k_BUNK, v_BUNK, positions, segments)
    queries = (_grouped(x, N) for x in queries)
    queries = _blocks(block, *queries, positions[0], segments[0])
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
    dq = _join(dq_blocks, S).reshape(B, S, H, K)
    return dq, *(_join(x, k_BUNK.shape[1]) for x in (dk, dv))


def _visible(q_position, q_segment, k_position, k_segment, window):
    """[B, q, u]: same document, not later, within the window, not padding."""
    apart = q_position[:, :, None] - k_position[:, None]
    same = (q_segment[:, :, None] == k_segment[:, None]) & (k_segment[:, None] > 0)
    return same & (apart >= 0) & (apart < window)


def _grouped(x, N: int):
    """Query heads under the key-value head that they use: `[B, S, N, G, ...]`."""
    return x.reshape(*x.shape[:2], N, -1, *x.shape[3:])


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
