from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batches import random_model, small_config, small_model
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from zayajax import optim
from zayajax.mesh import by_path
from zayajax.model.zaya import Decoder
from zayajax.optim import balance, table

L, E = 3, 4
COUNTS = arrays.arrays(np.int32, (L, E + 1), elements=st.integers(0, 2**28))


@given(COUNTS)
@settings(max_examples=50, deadline=None)
def test_the_excess_is_the_share_of_the_routed_less_the_even_share(counts):
    routed = counts[:, :E].astype(np.float64)
    total = routed.sum(1, keepdims=True)
    want = np.where(total > 0, routed / np.maximum(total, 1) - 1 / E, 0)
    got = np.asarray(balance.excess(jnp.asarray(counts), with_skip=False))
    np.testing.assert_allclose(got[:, :E], want, atol=2e-7)
    assert not got[:, E].any()
    total = counts.sum(1, keepdims=True, dtype=np.float64)
    want = np.where(total > 0, counts / np.maximum(total, 1) - 1 / (E + 1), 0)
    got = balance.excess(jnp.asarray(counts), with_skip=True)
    np.testing.assert_allclose(got, want, atol=2e-7)


def test_counts_that_bfloat16_would_confuse_keep_their_sign():
    """One token more than the even share, of 4 million."""
    counts = np.full((1, E + 1), 2**20, np.int32)
    counts[0, 1] += 1
    counts[0, 2] -= 1
    got = np.asarray(balance.excess(jnp.asarray(counts), with_skip=False))[0]
    assert got[1] > 0 > got[2] and got[0] == got[3] == 0


def test_the_bias_falls_where_there_is_too_much_and_rises_where_too_little():
    """AdamW, rate 1e-3, betas 0.9 and 0.999, no decay; the skip class stays."""
    cfg = small_config(optim__weight_decay=0.5).optim
    tx, rng = balance.transform(cfg), np.random.default_rng(0)
    bias = jnp.zeros((L, E + 1)).at[:, E].set(-1.0)
    state, want = tx.init(bias), np.zeros((L, E))
    m = v = np.zeros((L, E))
    for step in range(1, 8):
        counts = rng.integers(0, 100, (L, E + 1)).astype(np.int32)
        updates, state = tx.update(balance.excess(jnp.asarray(counts), False), state, bias)
        bias = optax.apply_updates(bias, updates)
        g = counts[:, :E] / counts[:, :E].sum(1, keepdims=True) - 1 / E
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        want = want - 1e-3 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        if step == 1:
            np.testing.assert_array_equal(np.sign(bias[:, :E]), -np.sign(g))
        np.testing.assert_allclose(bias[:, :E], want, rtol=1e-4, atol=1e-7)
        np.testing.assert_array_equal(bias[:, E], -1)


DECAYS = {"q", "k", "v_now", "v_late", "o", "grouped", "down", "fc1", "fc2", "out", "gate_up"}


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_only_matrices_decay(matrices):
    """With no gradient at all, what moves has decayed."""
    cfg = small_config(
        optim__matrices=matrices, optim__weight_decay=0.5, optim__learning_rate=0.1
    ).optim
    shape = dict(attention_bias=True, head_bias=True, tied_head=False)
    params, tx = random_model(small_model(**shape)), optim.build(cfg)
    zeros = jax.tree.map(jnp.zeros_like, params)
    update = jax.jit(lambda params: optim.apply(tx, zeros, tx.init(by_path(params)), params)[0])
    after = update(params)
    rate = 0.1 * (0.1 + 0.9 * (1 + np.cos(np.pi / cfg.horizon)) / 2)  # of the first step
    for path, v in by_path(params).items():
        decays = path.startswith("layers.") and path.split(".")[-1] in DECAYS
        want = v[...] * (1 - rate * 0.5) if decays else v[...]
        np.testing.assert_allclose(by_path(after)[path][...], want, rtol=1e-5, err_msg=path)
    assert {p.split(".")[-1] for p in by_path(params)} >= DECAYS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_are_kept_in_their_dtype_and_those_of_the_balance_in_float32(dtype):
    params = jax.eval_shape(partial(Decoder, small_model()), jax.random.key(0))
    tx = optim.build(small_config(optim__state_dtype=dtype).optim)
    state = by_path(jax.eval_shape(tx.init, by_path(params)))
    moments = {p: v.dtype for p, v in state.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    # Muon has one of a matrix, AdamW and the balance rule two of anything else.
    matrices = [g for g in table.groups(by_path(params)).values() if g == table.MATRICES]
    assert len(moments) == 2 * len(by_path(params)) - len(matrices)
    for path, found in moments.items():
        assert found == ("float32" if "balance_bias" in path else dtype), path
