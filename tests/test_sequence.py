from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from zayajax.layout import GPU, LAYOUTS, NODE
from zayajax.mesh import make_mesh
from zayajax.planning.traced.trace import collectives
from zayajax.sequence import round_robin, shard_order, shift, with_halo

few = settings(max_examples=100, deadline=None)
# (mesh, axes of the sequence)
SPLITS = [
    ((1, 8), (GPU,)),
    ((2, 4), (GPU,)),
    ((2, 4), (GPU, NODE)),
    ((4, 2), (GPU, NODE)),
    ((8, 1), (GPU, NODE)),
    ((8, 1), (GPU,)),
]
B, c, h = 2, 3, 2


@given(st.integers(1, 9), st.integers(1, 6))
@few
def test_shard_order_deals_chunks_so_that_causal_work_is_even(R, size):
    S = 2 * R * size if R > 1 else size
    order = shard_order(S, R)
    assert sorted(order) == list(range(S))
    if R > 1:
        chunks = order.reshape(R, 2, size)
        np.testing.assert_array_equal(chunks[:, 0, 0], size * np.arange(R))
        np.testing.assert_array_equal(chunks[:, 1, 0], size * (2 * R - 1 - np.arange(R)))
        assert (np.diff(chunks, axis=2) == 1).all()  # a chunk is in order
    # Keys that the queries of each rank see.
    assert len(set((order + 1).reshape(R, -1).sum(1))) == 1


@given(st.integers(0, 9), st.integers(1, 6), st.integers(1, 2))
@few
def test_shift_moves_and_fills_with_zero(n, S, axis):
    x = np.arange(1, S * S * 3 + 1).reshape(3, S, S)
    got = np.asarray(shift(jnp.asarray(x), n, axis))
    want = np.concatenate([np.zeros((3, n, S) if axis == 1 else (3, S, n), int), x], axis)
    np.testing.assert_array_equal(got, want[:, :S] if axis == 1 else want[:, :, :S])


@cache
def on_mesh(shape, axes, fn):
    mesh, row = make_mesh(*shape), P(None, axes)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=row, out_specs=row))


def both(axes):
    def fn(xs):
        x, y = with_halo(xs, h, axes)
        return x.reshape(B, -1, 2), y.reshape(B, -1)

    return fn


FNS = {axes: both(axes) for _, axes in SPLITS}


@pytest.mark.parametrize(("shape", "axes"), SPLITS)
def test_a_halo_is_what_stands_before_in_the_row(shape, axes):
    R = int(np.prod([dict(zip(("node", "gpu"), shape, strict=True))[a] for a in axes]))
    S = 2 * R * c
    x = np.random.default_rng(0).normal(size=(B, S, 2)).astype(np.float32)
    y = np.random.default_rng(1).integers(0, 99, (B, S)).astype(np.float32)
    order = shard_order(S, R)
    got_x, got_y = jax.block_until_ready(
        on_mesh(shape, axes, FNS[axes])((x[:, order], y[:, order]))
    )
    size = c if R > 1 else S
    for chunk, start in enumerate(order.reshape(-1, size)[:, 0]):
        at = slice(chunk * (h + size), (chunk + 1) * (h + size))
        for got, whole in ((got_x, x), (got_y, y)):
            before = np.zeros((B, h, *whole.shape[2:]), np.float32)
            want = np.concatenate([before, whole], axis=1)[:, start : start + h + size]
            np.testing.assert_array_equal(np.asarray(got)[:, at], want)


def test_a_halo_is_one_small_message_a_level():
    def found(axes):
        args = [
            jax.ShapeDtypeStruct((B, 16 * c, 2), "float32"),
            jax.ShapeDtypeStruct((B, 16 * c), "float32"),
        ]
        return collectives(on_mesh((2, 4), axes, FNS[axes]), args)

    (one,) = found((GPU,))
    assert (one.op, one.span, one.scope) == ("all_gather", "node", "halo")
    assert one.bytes == 4 * B * 2 * h * 3 * 4  # ranks, rows, chunks, positions, channels
    assert [c.span for c in found((GPU, NODE))] == ["rail", "node"]


@pytest.mark.parametrize(("shape", "axes"), SPLITS)
@pytest.mark.parametrize("S", [16, 13, 1])
def test_round_robin_deals_every_position_once(shape, axes, S):
    mesh = make_mesh(*shape)
    x = np.arange(1, B * S + 1, dtype=np.int32).reshape(B, S)
    fn = jax.jit(
        jax.shard_map(
            lambda x: round_robin(x, axes), mesh=mesh, in_specs=P(), out_specs=P(None, axes)
        )
    )
    R = int(np.prod([mesh.shape[a] for a in axes]))
    got = np.asarray(fn(x))
    parts = np.split(got, R, axis=1)
    assert len({p.shape for p in parts}) == 1
    for r, part in enumerate(parts):
        mine = x[:, r::R]
        np.testing.assert_array_equal(part[:, : mine.shape[1]], mine)
        assert not part[:, mine.shape[1] :].any()


def test_layouts_split_a_sequence_gpu_first():
    """Then the ranks of a gather over nodes, and after it over the node, are in order."""
    assert LAYOUTS["context-wide"].sequence == LAYOUTS["decode"].keys == (GPU, NODE)
