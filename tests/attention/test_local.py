from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import arrays_in, assert_close, normal, random_batch

from zayajax.attention.local import NOTHING, attend


def dense(q_BSHK, k_BUNK, v_BUNK, positions, segments, window=None):
    """The oracle: every score at once, in float32."""
    G = q_BSHK.shape[2] // k_BUNK.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q_BSHK, k_BUNK, v_BUNK))
    k, v = (jnp.repeat(x, G, axis=2) for x in (k, v))
    apart = positions[0][:, :, None] - positions[1][:, None]
    seen = (segments[0][:, :, None] == segments[1][:, None]) & (segments[1][:, None] > 0)
    seen = (seen & (apart >= 0) & (apart < (window or 10**9)))[:, None]
    a_BHSU = jnp.einsum("bshk,buhk->bhsu", q, k) * q.shape[-1] ** -0.5
    p_BHSU = jnp.where(seen, jax.nn.softmax(jnp.where(seen, a_BHSU, NOTHING)), 0)
    lse_BHS = jax.nn.logsumexp(a_BHSU, axis=-1, where=seen)
    lse_BHS = jnp.where(seen.any(-1), lse_BHS, NOTHING)
    return jnp.einsum("bhsu,buhk->bshk", p_BHSU, v), jnp.moveaxis(lse_BHS, 1, 2)


def problem(S, H, N, *, B=2, K=8, left=False, dtype="float32", seed=0):
    batch = random_batch(seed, B, S, vocab=9, left=left)
    q, k, v = (normal(seed + i, (B, S, n, K), dtype) for i, n in enumerate((H, N, N)))
    positions, segments = (jnp.asarray(batch[n]) for n in ("positions", "segments"))
    return (q, k, v), (positions,) * 2, (segments,) * 2


@cache
def with_gradients(fn):
    """Output, and the gradients of a function of both results, where something is visible."""

    def run(qkv, *where):
        def scalar(qkv):
            out, lse = fn(*qkv, *where)
            lse_seen = jnp.where(lse > NOTHING / 2, lse, 0)
            return _mixed(out) + _mixed(lse_seen), (out, lse)

        grads, results = jax.grad(scalar, has_aux=True)(qkv)
        return *results, *grads

    return jax.jit(run)


def _mixed(x):
    return jnp.sum(x * jnp.cos(1.7 * jnp.arange(x.size)).reshape(x.shape))


@cache
def blocked(block, window=None):
    return partial(attend, block=block, window=window)


@cache
def oracle(window=None):
    return partial(dense, window=window)


@pytest.mark.parametrize(
    "S, H, N, block, window, left",
    [
        pytest.param(24, 4, 2, 8, None, False, marks=pytest.mark.smoke),
        (23, 4, 1, 8, None, True),
        (23, 3, 3, 7, 4, False),
        (17, 6, 2, 5, 1, True),
        (16, 2, 1, 512, 3, False),
        (1, 2, 2, 4, None, False),
    ],
)
def test_equals_the_dense_oracle_with_gradients(S, H, N, block, window, left):
    args = problem(S, H, N, left=left, seed=S + H)
    got = with_gradients(blocked(block, window))(*args)
    assert_close(got, with_gradients(oracle(window))(*args), 2e-5)


def test_bfloat16_is_rounded_not_wrong():
    args = problem(40, 4, 2, dtype="bfloat16")
    got = with_gradients(blocked(8))(*args)
    assert [x.dtype for x in got] == ["bfloat16", "float32"] + ["bfloat16"] * 3
    want = with_gradients(oracle())(*args)
    assert_close(got[1], want[1], 1e-5)  # the scores themselves are in float32
    assert_close(got, want, 2e-2)  # probabilities and results rounded to 8 bits


def test_the_window_may_be_traced():
    qkv, *where = problem(23, 2, 1)
    run = jax.jit(lambda window: attend(*qkv, *where, window, block=8))
    for window in (2, 5, np.iinfo(np.int32).max):
        assert_close(run(jnp.int32(window)), dense(*qkv, *where, window))


@pytest.mark.parametrize("queries", [slice(-1, None), slice(3, 9), slice(0, 20, 3)])
def test_queries_are_any_part_of_the_tokens(queries):
    (q, k, v), positions, segments = problem(20, 4, 2, left=True)
    args = (q[:, queries], k, v), *((x[0][:, queries], x[1]) for x in (positions, segments))
    got = with_gradients(blocked(6))(*args)
    assert_close(got, with_gradients(oracle())(*args))


def test_a_query_that_sees_nothing_is_zero_and_passes_nothing_back():
    """Its own tokens are padding, or the keys of its document are elsewhere."""
    qkv, positions, (queries, keys) = problem(20, 4, 2, left=True)
    keys = jnp.where(keys == 1, 0, keys)
    blind = np.asarray((queries == 0) | (queries == 1))
    assert blind.any() and not blind.all()
    out, lse, dq, dk, dv = with_gradients(blocked(6))(qkv, positions, (queries, keys))
    assert not np.asarray(out)[blind].any() and not np.asarray(dq)[blind].any()
    assert np.all(np.asarray(lse)[blind] == np.float32(NOTHING))
    assert np.all(np.asarray(lse)[~blind] > -100)
    unseen = np.asarray(keys) == 0
    assert not np.asarray(dk)[unseen].any() and not np.asarray(dv)[unseen].any()
    # Cotangents at such queries change nothing either, and nothing overflows.
    every = jax.grad(lambda q: attend(q, *qkv[1:], positions, (queries, keys))[1].sum())(qkv[0])
    assert np.isfinite(every).all() and not np.asarray(every)[blind].any()


def merged(q, k, v, positions, segments):
    """Attention over two halves of the keys, put together by (out, lse)."""
    parts, half = [], k.shape[1] // 2 + 1
    for part in (slice(None, half), slice(half, None)):
        where = ((x[0], x[1][:, part]) for x in (positions, segments))
        parts.append(attend(q, k[:, part], v[:, part], *where, block=6))
    (out_a, lse_a), (out_b, lse_b) = parts
    lse = jnp.logaddexp(lse_a, lse_b)
    share_a, share_b = (jnp.exp(x - lse)[..., None] for x in (lse_a, lse_b))
    return share_a * out_a + share_b * out_b, lse


@pytest.mark.parametrize("left", [False, True])
def test_two_halves_of_the_keys_merge_to_the_whole_with_gradients(left):
    args = problem(20, 4, 2, left=left, seed=3)
    got, want = (with_gradients(f)(*args) for f in (merged, oracle()))
    seen = np.asarray(want[1]) > NOTHING / 2
    assert_close((got[0], np.where(seen, got[1], NOTHING), *got[2:]), want)
    assert seen.any() and not seen.all()


def test_huge_scores_do_not_overflow():
    (q, k, v), *where = problem(16, 2, 1)
    got = with_gradients(blocked(4))((q * 300, k * 300, v), *where)
    assert all(np.isfinite(x).all() for x in got)
    assert_close(got[:2], dense(q * 300, k * 300, v, *where), 1e-4)


def test_no_array_is_as_long_as_the_sequence_twice():
    S, block = 96, 16
    args = problem(S, 4, 2)
    for fn, expected in ((blocked(block), False), (oracle(), True)):
        shapes = [s for s, *_ in arrays_in(with_gradients(fn).trace(*args).jaxpr.jaxpr)]
        assert any(sum(n >= S for n in s) > 1 for s in shapes) == expected
        # Nor in pieces: the largest is a whole input or a block of scores.
        largest = max(int(np.prod(s)) for s in shapes)
        assert (largest >= 2 * 4 * S * S) == expected
