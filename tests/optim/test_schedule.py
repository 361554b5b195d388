import dataclasses

import numpy as np
import pytest
from batches import small_config
from hypothesis import given, settings, strategies as st

from zayajax.optim.schedule import learning_rate

PEAK = 3e-3


def rates(horizon, warmup, steps=None, **changes):
    changes = {f"optim__{k}": v for k, v in changes.items()}
    cfg = small_config(
        optim__learning_rate=PEAK, optim__horizon=horizon, optim__warmup=warmup, **changes
    )
    schedule = learning_rate(cfg.optim)
    return np.array([float(schedule(i)) for i in range(steps or horizon)])


@given(
    st.integers(2, 40).flatmap(lambda h: st.tuples(st.just(h), st.integers(0, h - 1))),
    st.sampled_from(["cosine", "wsd"]),
    st.floats(0, 1),
    st.floats(0, 1),
)
@settings(max_examples=40, deadline=None)
def test_rises_to_the_peak_and_ends_at_the_final_rate(shape, schedule, decay, final):
    horizon, warmup = shape
    found = rates(horizon, warmup, schedule=schedule, decay=decay, final_rate=final)
    assert found[0] > 0 or (horizon == 1 and final == 0)
    np.testing.assert_allclose(
        found[:warmup], PEAK * np.arange(1, warmup + 1) / max(warmup, 1), rtol=1e-5
    )
    np.testing.assert_allclose(found[-1], final * PEAK, rtol=1e-4, atol=1e-6 * PEAK)
    assert np.all(np.diff(found[warmup:]) <= 1e-6 * PEAK) and found.max() <= PEAK * (1 + 1e-6)


def test_wsd_is_flat_until_the_last_part():
    found = rates(50, 5, schedule="wsd", decay=0.2, final_rate=0.0)
    np.testing.assert_allclose(found[4:40], PEAK, rtol=1e-6)
    np.testing.assert_allclose(np.diff(found[39:]), -PEAK / 10, rtol=1e-3)


def test_cosine_is_halfway_in_the_middle():
    found = rates(40, 0, schedule="cosine", final_rate=0.2)
    np.testing.assert_allclose(found[19], PEAK * 0.6, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_where_the_run_stops_does_not_matter(schedule):
    """Only `optim.horizon` sets the schedule; past it the rate stays."""
    cfg = small_config(optim__horizon=20, optim__schedule=schedule)
    longer = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=500))
    a, b = learning_rate(cfg.optim), learning_rate(longer.optim)
    assert [float(a(i)) for i in range(25)] == [float(b(i)) for i in range(25)]
    assert float(a(19)) == float(a(24))
