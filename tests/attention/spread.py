"""Attention over rows that are spread over the mesh, as one function of whole rows."""

from functools import cache, partial
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
from batches import assert_close, normal, random_batch
from jax.sharding import PartitionSpec as P

from zayajax.attention import gather, local, ring, tree
from zayajax.layout import WORLD
from zayajax.mesh import make_mesh

B, S, K = 4, 64, 4  # whole: rows, tokens in each, head width
KINDS = {
    "gather": gather.attend,
    "ring": ring.attend,
    "tree by gather": tree.attend,
    "tree by sums": tree.attend,
}


class Problem(NamedTuple):
    """Whole rows in their own order; queries and keys have places of their own."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    positions: tuple  # of the queries, of the keys
    segments: tuple
    window: int
    d_out: jax.Array
    d_lse: jax.Array


def problem(seed=0, heads=(8, 2), left=False, window=2**31 - 1, dtype="float32", queries=None):
    """Random documents; `queries`: which of the tokens ask, all by default."""
    batch = random_batch(seed, B, S, vocab=9, left=left)
    queries = np.arange(S) if queries is None else np.asarray(queries)
    H, N = heads
    shapes = [(B, len(queries), H, K), (B, S, N, K), (B, S, N, K), (B, len(queries), H, K)]
    q, k, v, d_out = (normal(seed + i, s, dtype) for i, s in enumerate(shapes))
    d_lse = normal(seed + 9, (B, len(queries), H))
    pairs = ((batch[n][:, queries], batch[n]) for n in ("positions", "segments"))
    return Problem(q, k, v, *pairs, np.int32(window), d_out, d_lse)


def with_gradients(attend, p: Problem):
    """(out, lse), (dq, dk, dv)"""

    def run(q, k, v):
        return attend(q, k, v, p.positions, p.segments, p.window)

    results, back = jax.vjp(run, p.q, p.k, p.v)
    return results, back((p.d_out, p.d_lse))


whole = jax.jit(partial(with_gradients, partial(local.attend, block=16)))


def zigzag(R: int):
    """The order in which the tokens of a row lie on R ranks: chunks r and 2R - 1 - r on rank r."""
    chunks = np.arange(S).reshape(2 * R, -1)
    return np.concatenate([chunks[[r, 2 * R - 1 - r]].reshape(-1) for r in range(R)])


def of_all_ranks(x, axes):
    for axis in reversed(axes):
        x = jax.lax.all_gather(x, axis)
    return x.reshape(-1, *x.shape[len(axes) :])


def specs(kind, axes):
    """(inputs, outputs) of `with_gradients`; the axes that do not split the row split the batch."""
    batch = tuple(a for a in WORLD if a not in axes) or None
    keys = P(batch, axes)
    queries = P(batch) if kind.startswith("tree") else keys
    inputs = Problem(queries, keys, keys, (queries, keys), (queries, keys), P(), queries, queries)
    return inputs, ((queries, queries), (queries, keys, keys))


def per_rank(kind, axes, p: Problem):
    """What each rank computes."""
    if not kind.startswith("tree"):
        pairs = ((q, of_all_ranks(k, axes)) for q, k in (p.positions, p.segments))
        p = p._replace(**dict(zip(("positions", "segments"), pairs, strict=True)))
    return with_gradients(partial(KINDS[kind], axes=axes, block=8), p)


@cache
def program(kind, mesh_shape, axes):
    inputs, outputs = specs(kind, axes)
    mesh = make_mesh(*mesh_shape)
    run = partial(per_rank, kind, axes)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(inputs,), out_specs=outputs))


def merging(kind):
    """The size of a message by which `tree` chooses, set so that it merges as `kind` says."""
    return mock.patch.object(tree, "ONE_MESSAGE_BYTES", 0 if kind == "tree by sums" else 2**60)


def spread(kind, mesh_shape, axes, p: Problem):
    """As `whole`, on a mesh: rows are dealt to the ranks, and put together again."""
    sizes = dict(zip(WORLD, mesh_shape, strict=True))
    R = int(np.prod([sizes[a] for a in axes]))
    order = zigzag(R)
    if kind.startswith("tree"):  # keys lie as they like, and queries are not dealt at all
        keys, queries = order[::-1], slice(None)
    else:
        keys = queries = order

    def dealt(pair):
        return pair[0][:, queries], pair[1][:, keys]

    dealt = Problem(
        *(p.q[:, queries], p.k[:, keys], p.v[:, keys]),
        *(dealt(p.positions), dealt(p.segments), p.window),
        *(p.d_out[:, queries], p.d_lse[:, queries]),
    )
    with merging(kind):
        found = jax.block_until_ready(program(kind, mesh_shape, axes)(dealt))

    def back(x, order):
        x, out = np.asarray(x), np.zeros(x.shape, x.dtype)
        out[:, order] = x
        return out

    (out, lse), (dq, dk, dv) = found
    out, lse, dq = (back(x, queries) for x in (out, lse, dq))
    return (out, lse), (dq, back(dk, keys), back(dv, keys))


def close(got, want, tol):
    """Queries that see nothing are told by their -1e30, exactly, and then left out of the sizes."""
    (out, lse), grads = got
    (want_out, want_lse), want_grads = want
    blind = np.asarray(want_lse) == np.float32(local.NOTHING)
    assert np.array_equal(np.asarray(lse) == np.float32(local.NOTHING), blind)
    assert not np.asarray(out)[blind].any() and not np.asarray(grads[0])[blind].any()
    lse, want_lse = (np.where(blind, 0, x) for x in (lse, want_lse))
    assert_close((out, lse, grads), (want_out, want_lse, want_grads), tol)
