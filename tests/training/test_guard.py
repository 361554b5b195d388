"""A bad step changes nothing, bit for bit, on any mesh; a good one is never taken for bad."""

import dataclasses
import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import random_batch, random_model, small_config
from hypothesis import given, settings, strategies as st

from zayajax.mesh import make_mesh
from zayajax.training import guard as guards
from zayajax.training.guard import WARM_UP, Verdict, init_guard, judge
from zayajax.training.metrics import FILE, MetricsLog, read_metrics
from zayajax.training.state import TrainState
from zayajax.training.step import build

B, S, SPIKE = 16, 16, 4.0


@cache
def program(mesh_shape=None, **changes):
    nodes, gpus = mesh_shape or (1, 1)
    base = dict(mesh__nodes=nodes, mesh__gpus=gpus, train__sequence=S, optim__warmup=2)
    cfg = small_config(**base | dict(faults__spike=SPIKE, model__layers=2) | changes)
    return cfg, build(cfg, mesh_shape and make_mesh(*mesh_shape))


def trained(cfg, at, guard=None):
    """A state with moments and counts, as after some steps, where it lives."""
    params = random_model(cfg.model, dtype=cfg.train.param_dtype)
    rng = np.random.default_rng(1)

    def some(x):
        if x.dtype == jnp.int32:
            return jnp.full(x.shape, 3, x.dtype)
        return jnp.asarray(1e-3 * rng.random(x.shape), x.dtype)

    opt_state = jax.tree.map(some, at.state.opt_state)
    state = TrainState(jnp.asarray(3, jnp.int32), params, opt_state, guard or init_guard())
    if at.batch_sharding is None:
        return state
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, at.state))


def step(at, state, batch):
    """(state, metrics), on the host; the state that came in is kept."""
    batch = jax.device_put(batch, at.batch_sharding)
    return jax.device_get(at.train_step(jax.tree.map(jnp.copy, state), batch))


def same_bits(got, want):
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g), np.asarray(w)
        name = jax.tree_util.keystr(path)
        assert g.dtype == w.dtype and g.tobytes() == w.tobytes(), name


def frozen(state):
    """What a bad step must not change: all but counts of steps, which go on with the data."""
    leaves = jax.tree.leaves_with_path(jax.device_get(state.opt_state))
    named = {jax.tree_util.keystr(path): x for path, x in leaves}
    schedules = {p for p in named if is_schedule(p, state.opt_state)}
    assert schedules
    return jax.device_get(state.params), {p: x for p, x in named.items() if p not in schedules}


def is_schedule(path, opt_state):
    counts = jax.tree_util.tree_map_with_path(
        lambda p, x: [jax.tree_util.keystr((*p, jax.tree_util.GetAttrKey("count")))] * ours(x),
        opt_state,
        is_leaf=ours,
    )
    return path in jax.tree.leaves(counts)


def ours(x) -> bool:
    return type(x).__name__ == "ScaleByScheduleState"


def spoilt(seed: int, sequence: int, value: float):
    """A batch with `value` as the weight of one token, hence on one device."""
    batch, rng = random_batch(seed, B, sequence, 48), np.random.default_rng(seed)
    batch["weights"][tuple(rng.choice(np.argwhere(batch["weights"])))] = value
    return batch


# One compilation each: no mesh; a node; gradients in parts, weights gathered in the loop, all
# at rest in bfloat16; spread rows.
NODE = (1, 8), dict(optim__matrices="adamw", model__tied_head=False)
HALF = dict(optim__state_dtype="bfloat16", train__param_dtype="bfloat16")
CASES = [
    (None, {}),
    NODE,
    ((2, 4), HALF | dict(train__micro_batches=2, mesh__zero=3)),
    ((8, 1), dict(mesh__layout="context-wide", train__sequence=4 * S)),
]


@pytest.mark.parametrize(("mesh_shape", "changes"), CASES, ids=str)
def test_a_bad_step_changes_nothing_and_the_next_is_as_without_it(mesh_shape, changes):
    cfg, at = program(mesh_shape, **changes)
    sequence, old = cfg.train.sequence, trained(cfg, at)
    for seed, value in enumerate((math.nan, math.inf, -math.inf)):
        new, metrics = step(at, old, spoilt(seed, sequence, value))
        assert metrics["bad"] == Verdict.NOT_FINITE
        assert metrics["bad_in_row"] == metrics["skipped"] == seed + 1
        same_bits(frozen(new), frozen(old))
        assert new.step == old.step + 1
        old = dataclasses.replace(old, step=new.step, guard=new.guard, opt_state=new.opt_state)
        if at.batch_sharding is not None:
            old = jax.device_put(old, jax.tree.map(lambda x: x.sharding, at.state))
    # Of the same place in the data, a state that never met them.
    clean = trained(cfg, at)
    shifted = dataclasses.replace(old, guard=clean.guard, params=clean.params)
    good = random_batch(9, B, sequence, 48)
    after, metrics = step(at, old, good)
    want, _ = step(at, shifted, good)
    assert metrics["bad"] == 0 and metrics["bad_in_row"] == 0 and metrics["skipped"] == 3
    same_bits(frozen(after), frozen(want))
    assert not all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(old.params), strict=True)
    )


def test_a_gradient_that_is_not_finite_where_the_loss_is():
    """The norm of a gradient whose squares overflow float32 is infinite."""
    cfg, at = program(NODE[0], **NODE[1])
    huge = trained(cfg, at)
    huge.params.norm_out = huge.params.norm_out.replace(huge.params.norm_out[...] * 1e-25)
    huge.params.head = huge.params.head.replace(huge.params.head[...] * 1e25)
    batch = random_batch(0, B, S, 48)
    new, metrics = step(at, huge, batch)
    assert np.isfinite(metrics["loss"]) and not np.isfinite(metrics["grad_norm"])
    assert metrics["bad"] == Verdict.NOT_FINITE
    same_bits(frozen(new), frozen(huge))


@pytest.mark.parametrize(("mesh_shape", "changes"), CASES[:2], ids=str)
def test_a_spike_is_passed_over(mesh_shape, changes):
    cfg, at = program(mesh_shape, **changes)
    batch = random_batch(0, B, S, 48)
    _, metrics = step(at, trained(cfg, at), batch)
    loss, known = float(metrics["loss"]), init_guard()
    for below, bad in ((SPIKE * 0.9, Verdict.GOOD), (SPIKE * 1.1, Verdict.SPIKE)):
        guard = dataclasses.replace(
            known,
            mean=jnp.float32(loss - below * 0.1),
            variance=jnp.float32(0.01),
            seen=jnp.int32(WARM_UP),
        )
        old = trained(cfg, at, guard)
        new, metrics = step(at, old, batch)
        assert metrics["bad"] == bad and metrics["skipped"] == (bad > 0)
        if bad:
            same_bits(frozen(new), frozen(old))
            same_bits((new.guard.mean, new.guard.variance), (guard.mean, guard.variance))


def through(losses, spike=0.0, norms=None, weights=None):
    """(verdicts, the last guard), one loss after the other."""
    guard, found = init_guard(), []
    for i, loss in enumerate(losses):
        norm = jnp.float32(1 if norms is None else norms[i])
        weight = jnp.float32(1 if weights is None else weights[i])
        bad, guard = JUDGE(guard, jnp.float32(loss), norm, weight, spike)
        found.append(int(bad))
    return found, guard


JUDGE = jax.jit(judge, static_argnums=4)
LOSSES = st.lists(st.floats(0.015625, 100, width=32), min_size=1, max_size=WARM_UP)


@given(LOSSES)
@settings(max_examples=30, deadline=None)
def test_the_mean_is_that_of_all_good_losses_while_it_warms_up(losses):
    """Then exponential; what is bad or padding leaves no trace in either."""
    spoiled = [x for loss in losses for x in (loss, math.nan, 0.0)]
    weights = [1, 1, 0] * len(losses)
    found, guard = through(spoiled, weights=weights)
    assert found == [0, 1, 0] * len(losses)
    assert guard.seen == len(losses) and guard.skipped == len(losses)
    # Float32 sums of up to 32 numbers, of squares up to 1e4.
    np.testing.assert_allclose(guard.mean, np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(guard.variance, np.var(losses), rtol=1e-3, atol=1e-2)


@given(st.integers(0, 2**32 - 1), st.floats(2, 10))
@settings(max_examples=20, deadline=None)
def test_noise_is_good_and_what_sticks_out_is_not(seed, spike):
    rng = np.random.default_rng(seed)
    losses = 3 - 0.01 * np.arange(2 * WARM_UP) + 0.05 * rng.uniform(-1, 1, 2 * WARM_UP)
    found, guard = through(losses, spike=10.0)
    assert not any(found)
    deviation = float(np.sqrt(guard.variance))
    for factor, bad in ((0.99, Verdict.GOOD), (1.01, Verdict.SPIKE)):
        loss = guard.mean + factor * spike * deviation
        assert JUDGE(guard, jnp.float32(loss), jnp.float32(1), jnp.float32(1), spike)[0] == bad
    # What lies below is welcome.
    low = guard.mean - 100 * deviation
    assert JUDGE(guard, jnp.float32(low), jnp.float32(1), jnp.float32(1), spike)[0] == 0


def test_nothing_is_a_spike_before_the_warm_up_nor_where_none_is_asked_for():
    assert not any(through([2.0, 2.1] * (WARM_UP // 2 - 1) + [50.0], spike=3.0)[0])
    assert not any(through([2.0, 2.1] * WARM_UP + [50.0])[0])
    assert through([2.0, 2.1] * WARM_UP + [50.0], spike=3.0)[0][-1] == Verdict.SPIKE


def test_a_constant_loss_has_no_spikes_of_rounding():
    loss = np.float32(2.5)
    assert not any(through([loss] * 40 + [np.nextafter(loss, np.float32(3))], spike=2.0)[0])


def test_bad_steps_in_a_row_are_counted_from_the_last_good_one():
    losses = [1.0, math.nan, math.inf, 1.0, math.nan]
    _, guard = through(losses)
    assert (guard.bad_in_row, guard.skipped, guard.seen) == (1, 3, 2)
    assert through([1.0] * 3, norms=[1, math.inf, math.nan])[0] == [0, 1, 1]


@pytest.mark.parametrize(
    ("bad", "want"), [(0, None), (1, "not finite"), (2, "spike"), (np.int32(2), "spike")]
)
def test_the_line_of_a_bad_step_says_why(tmp_path, bad, want):
    said = guards.line({"bad": bad, "bad_in_row": np.int32(2), "skipped": 3, "loss": 1.0})
    assert said == ({"bad": want, "bad_in_row": 2, "skipped": 3} if want else {})
    with MetricsLog(tmp_path) as log:
        log.write({"step": 1, "kind": "eval", "loss": 2.0, "tokens": 8} | said)
    assert read_metrics(tmp_path / FILE)[0].get("bad") == want
