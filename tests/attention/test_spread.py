"""Keys on many devices: every kind equals `local.attend` over whole rows, gradients included."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from spread import KINDS, S, close, merging, problem, spread, whole, zigzag

from zayajax.attention import gather, local, ring, tree
from zayajax.layout import GPU, NODE
from zayajax.mesh import make_mesh

PLACES = {
    "a node": ((1, 8), (GPU,)),
    "inside each node": ((2, 4), (GPU,)),
    "along the rails": ((2, 4), (NODE,)),
    "over all": ((2, 4), (GPU, NODE)),
    "over all of one node": ((1, 8), (GPU, NODE)),
}
# float32 sums in another order, in tensors whose largest element counts as 1.
TOL = 1e-5


def case(name):
    """Hostile ones: whose keys a rank has, and who sees any."""
    p = problem(seed=len(name), left=name == "left", window=5 if name == "window" else 2**31 - 1)
    queries, keys = p.segments
    if name == "a rank of padding":  # of 8 the third, hence of 4 half of one
        keys = keys.copy()
        keys[:, zigzag(8).reshape(8, -1)[2]] = 0
    if name == "one rank has all":
        keys = np.where(np.isin(np.arange(S), zigzag(8).reshape(8, -1)[5]), keys, 0)
    if name == "all masked":
        keys = np.zeros_like(keys)
    if name == "a document without keys":
        keys = np.where(keys == 2, 0, keys)
    if name == "huge":
        p = p._replace(q=p.q * 30, k=p.k * 30)
    return p._replace(segments=(queries, keys))


CASES = ["right", "left", "window", "a rank of padding", "one rank has all", "all masked"]
CASES += ["a document without keys", "huge"]


@cache
def wanted(name):
    return jax.block_until_ready(whole(case(name)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=[pytest.mark.smoke] * (p == "over all")) for p in PLACES]
)
def test_equals_attention_over_whole_rows(kind, place):
    for name in CASES:
        got, want = spread(kind, *PLACES[place], case(name)), wanted(name)
        # Scores of thousands: rounded by 6e-8 of these, a probability is off by 3e-4 of itself.
        close(got, want, 1e-3 if name == "huge" else TOL)
        assert want[0][0].any() == (name != "all masked")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 99),
    left=st.booleans(),
    window=st.sampled_from([1, 2, 7, S, 2**31 - 1]),
    hidden=st.floats(0, 1),
)
def test_any_packing_any_window_any_padding(kind, seed, left, window, hidden):
    p = problem(seed, left=left, window=window)
    queries, keys = p.segments
    gone = np.random.default_rng(seed).random(keys.shape) < hidden
    p = p._replace(segments=(queries, np.where(gone, 0, keys)))
    close(spread(kind, *PLACES["over all"], p), whole(p), TOL)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_head_for_each_query_head(kind):
    p = problem(seed=1, heads=(4, 4))
    close(spread(kind, *PLACES["over all"], p), whole(p), TOL)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_rounded_not_wrong(kind):
    p = problem(seed=2, dtype="bfloat16")
    got = spread(kind, *PLACES["a node"], p)
    assert [x.dtype for x in jax.tree.leaves(got)] == ["bfloat16", "float32"] + ["bfloat16"] * 3
    wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype == "bfloat16" else x, p)
    want = whole(wide)
    close(got, want, 2e-2)  # probabilities, results and sums of gradients are rounded to 8 bits
    seen = np.asarray(want[0][1]) > local.NOTHING / 2
    np.testing.assert_allclose(got[0][1][seen], want[0][1][seen], atol=1e-5)  # scores are float32


@pytest.mark.parametrize("kind", ["tree by gather", "tree by sums"])
def test_one_query(kind):
    for token in (S - 1, 0, 20):
        p = problem(seed=3, left=token == S - 1, queries=[token])
        close(spread(kind, *PLACES["over all"], p), whole(p), TOL)


def test_over_no_axes_all_are_the_local_one():
    p = problem(seed=4)
    every = tuple((queries, keys[None]) for queries, keys in (p.positions, p.segments))
    args = p.q, p.k, p.v
    want = local.attend(*args, p.positions, p.segments, 9)
    for attend, pairs in [
        (gather.attend, every),
        (ring.attend, every),
        (tree.attend, (p.positions, p.segments)),
    ]:
        for x, y in zip(attend(*args, *pairs, 9, ()), want, strict=True):
            np.testing.assert_array_equal(x, y)


def test_both_merges_weigh_each_rank_by_its_share():
    """Against float64, with ranks that see nothing, and with shares far apart."""
    rng = np.random.default_rng(0)
    out = rng.normal(size=(8, 1, 6, 3, K := 5)).astype(np.float32)
    lse = (rng.normal(size=(8, 1, 6, 3)) * 30).astype(np.float32)
    lse[rng.random(lse.shape) < 0.4] = local.NOTHING
    lse[:, :, 4] = local.NOTHING
    lse[0, :, 5], lse[1:, :, 5] = -7, local.NOTHING
    out[lse == np.float32(local.NOTHING)] = 0
    mesh, split = make_mesh(1, 8), P(GPU)

    def run(out, lse):
        return [how(out[0], lse[0], GPU) for how in (tree.by_sums, tree.by_gather)]

    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(split, split), out_specs=P()))
    share = np.exp(lse.astype(np.float64) - lse.max(0))
    want_out = (out * share[..., None]).sum(0) / share.sum(0)[..., None]
    want_lse = np.where(
        lse.max(0) == np.float32(local.NOTHING), 0, lse.max(0) + np.log(share.sum(0))
    )
    for got_out, got_lse in jax.block_until_ready(run(out, lse)):
        np.testing.assert_allclose(got_out, want_out, atol=1e-6)  # 8 terms of order 1
        blind = np.asarray(got_lse) == np.float32(local.NOTHING)
        assert blind[:, 4].all() and blind.sum() == blind[:, 4].size
        # Relative: float32 holds 60 to 4e-6.
        np.testing.assert_allclose(np.where(blind, 0, got_lse), want_lse, rtol=1e-6, atol=1e-6)
    assert got_out.shape == (1, 6, 3, K)


def test_the_size_of_the_message_chooses_the_merge():
    def ops(S):
        x = jax.ShapeDtypeStruct((1, S, 2, 3), "float32")
        run = jax.shard_map(
            lambda x: tree.merge(x, x[..., 0], GPU)[0],
            mesh=make_mesh(1, 8),
            in_specs=P(None, GPU),
            out_specs=P(),
        )
        return str(jax.make_jaxpr(run)(x))

    tokens = tree.ONE_MESSAGE_BYTES // (4 * 2 * (3 + 1))  # on all ranks together
    assert "all_gather" in ops(tokens) and "pmax" not in ops(tokens)
    assert "all_gather" not in ops(tokens + 8) and "pmax" in ops(tokens + 8)


def test_a_query_typed_as_varying_gets_what_each_rank_contributes():
    """Summed over the ranks, that is the gradient of the shared query."""
    p = problem(seed=5)
    want = whole(p)[1][0]
    split = P(None, GPU)

    def run(q, k, v, positions, segments):
        q = jax.lax.pcast(q, GPU, to="varying")
        places = ((p.positions[0], positions), (p.segments[0], segments))
        _, back = jax.vjp(lambda q: tree.attend(q, k, v, *places, p.window, (GPU,)), q)
        return jax.lax.psum(back((p.d_out, p.d_lse))[0], GPU)

    run = jax.shard_map(run, mesh=make_mesh(1, 8), in_specs=(P(), *[split] * 4), out_specs=P())
    with merging("tree by sums"):
        got = jax.jit(run)(p.q, p.k, p.v, p.positions[1], p.segments[1])
    error = np.abs(np.asarray(got) - np.asarray(want)).max()
    assert error <= TOL * np.abs(np.asarray(want)).max()
    assert jnp.isfinite(got).all()
