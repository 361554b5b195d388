"""A device that computes wrong is named; a healthy machine is never accused."""

from functools import cache

import jax
import numpy as np
import pytest
from batches import random_batch, random_model, small_config
from hypothesis import given, settings, strategies as st

from zayajax.layout import LAYOUTS
from zayajax.mesh import by_path, make_mesh
from zayajax.sequence import shard_order
from zayajax.training.recheck import TOLERANCE, find_suspects, replica_axis, why_not
from zayajax.training.step import build

B, S = 16, 32
# Devices of one node; two nodes; four, of which each spreads its rows.
CASES = [((1, 8), "pretrain"), ((2, 4), "pretrain"), ((4, 2), "context")]
TOL = TOLERANCE["float32"]


def config(shape, layout, **changes):
    nodes, gpus = shape
    base = dict(mesh__nodes=nodes, mesh__gpus=gpus, mesh__layout=layout, train__sequence=S)
    return small_config(**base | dict(model__layers=2) | changes)


@cache
def program(shape, layout, **changes):
    cfg = config(shape, layout, **changes)
    return cfg, build(cfg, make_mesh(*shape))


def placed(cfg, at, model_seed=0, batch_seed=0):
    order = shard_order(S, cfg.mesh.ranks(LAYOUTS[cfg.mesh.layout].sequence))
    batch = {k: x[:, order] for k, x in random_batch(batch_seed, B, S, 48).items()}
    params = random_model(cfg.model, seed=model_seed)
    params = jax.device_put(params, jax.tree.map(lambda x: x.sharding, at.state.params))
    return params, jax.device_put(batch, at.batch_sharding)


def flipped(x, device: int, element: int, bit: int):
    """The replicated `x` with one bit of one copy changed."""
    copies = []
    for shard in sorted(x.addressable_shards, key=lambda s: s.device.id):
        data = np.array(shard.data)
        if shard.device.id == device:
            data.reshape(-1).view(np.uint32)[element] ^= np.uint32(1 << bit)
        copies.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, copies)


def replica_of(cfg, at, device: int) -> int:
    ((node, gpu),) = np.argwhere(np.vectorize(lambda d: d.id)(mesh_of(at).devices) == device)
    return int({"node": node, "gpu": gpu}[replica_axis(cfg.mesh)])


def mesh_of(at):
    return at.batch_sharding.mesh


@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_who_has_another_copy_of_a_vector_is_named(shape, layout):
    cfg, at = program(shape, layout)
    R = mesh_of(at).shape[replica_axis(cfg.mesh)]
    params, batch = placed(cfg, at)
    assert find_suspects(at.compare(params, batch), TOL) == []
    vectors = {p for p, v in by_path(params).items() if v[...].sharding.is_fully_replicated}
    scales = ("norm_out", "layers.norm_attn", "layers.norm_moe")
    assert vectors.issuperset(scales)
    for device, path in zip((0, 3, 7), scales, strict=True):
        where = by_path(params)
        healthy = where[path][...]
        where[path].set_value(flipped(healthy, device, element=5, bit=30))
        losses = at.compare(params, batch)
        where[path].set_value(healthy)
        # Of two, either may be wrong.
        want = [replica_of(cfg, at, device)] if R > 2 else [0, 1]
        assert find_suspects(losses, TOL) == want, (device, path, losses)


@given(st.integers(0, 2**32 - 1), st.integers(0, 7), st.integers(0, 15), st.integers(0, 31))
@settings(max_examples=25, deadline=None)
def test_a_random_flip_never_leads_to_others_alone(seed, device, element, bit):
    """It may be too small to matter; who is named then is among those of one pair with it."""
    cfg, at = program(*CASES[0])
    params, batch = placed(cfg, at, model_seed=seed % 5, batch_seed=seed)
    scale = by_path(params)["norm_out"]
    scale.set_value(flipped(scale[...], device, element, bit))
    found = find_suspects(at.compare(params, batch), TOL)
    wrong = replica_of(cfg, at, device)
    assert not found or wrong in found
    assert set(found) <= {(wrong - 1) % 8, wrong, (wrong + 1) % 8}


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.sampled_from(CASES))
@settings(max_examples=25, deadline=None)
def test_the_healthy_are_never_accused(model_seed, batch_seed, case):
    cfg, at = program(*case)
    losses = np.asarray(at.compare(*placed(cfg, at, model_seed, batch_seed)))
    assert losses.shape == (mesh_of(at).shape[replica_axis(cfg.mesh)], 2)
    assert find_suspects(losses, TOL) == []
    assert np.ptp(losses[:, 0]) > 0  # different rows


def test_layer_by_layer_and_in_half_precision_too():
    cfg, at = program((2, 4), "pretrain", mesh__zero=3, train__compute_dtype="bfloat16")
    for seed in range(3):
        losses = at.compare(*placed(cfg, at, seed, seed))
        assert find_suspects(losses, TOLERANCE["bfloat16"]) == []


def test_the_losses_are_those_of_an_evaluation():
    """Summed over replicas, of batches that have just one row a device."""
    cfg, at = program((1, 8), "pretrain", train__batch=8)
    params, _ = placed(cfg, at)
    batch = jax.device_put(random_batch(0, 8, S, 48), at.batch_sharding)
    losses = np.asarray(at.compare(params, batch))
    want = float(at.eval_step(params, batch)["loss"])
    # Float32 sums in another order.
    np.testing.assert_allclose(losses.sum(0), want, rtol=1e-5)


def pairs(R: int, wrong: dict[int, float], seed: int = 0):
    """What replicas report of which some are off by a factor."""
    rows = np.random.default_rng(seed).uniform(10, 100, R)
    off = np.array([wrong.get(r, 1.0) for r in range(R)])
    return np.stack([rows * off, np.roll(rows, -1) * off], axis=1)


@given(st.integers(3, 64), st.data())
@settings(max_examples=60, deadline=None)
def test_any_single_one_is_named_exactly(R, data):
    wrong = data.draw(st.integers(0, R - 1))
    factor = data.draw(st.sampled_from([1.001, 0.5, np.inf, np.nan]))
    assert find_suspects(pairs(R, {wrong: factor}), TOL) == [wrong]
    assert find_suspects(pairs(R, {wrong: 1 + TOL / 2}), TOL) == []


@given(st.integers(2, 16), st.data())
@settings(max_examples=60, deadline=None)
def test_all_that_are_wrong_are_among_the_named(R, data):
    wrong = data.draw(st.sets(st.integers(0, R - 1)))
    factors = {r: 1.1 + 0.1 * i for i, r in enumerate(sorted(wrong))}
    found = find_suspects(pairs(R, factors), TOL)
    assert wrong <= set(found) and bool(found) == bool(wrong)


def test_a_ring_of_mismatches_names_all_and_two_name_each_other():
    assert find_suspects([[1, 2], [3, 4], [5, 6]], TOL) == [0, 1, 2]
    assert find_suspects([[1, 2], [3, 1]], TOL) == [0, 1]
    # A single pair that disagrees: the rows of 2, by 2 and by 1.
    assert find_suspects([[1, 2], [2, 9], [3, 4], [4, 1]], TOL) == [1, 2]
    # All NaN is a model's fault, not a machine's.
    assert find_suspects(np.full((4, 2), np.nan), TOL) == []


@pytest.mark.parametrize(
    ("shape", "layout", "axis"),
    [
        ((1, 8), "pretrain", "gpu"),
        ((2, 4), "pretrain", "node"),
        ((8, 1), "context", "node"),
        ((1, 8), "context", None),
        ((2, 4), "context-wide", None),
        ((1, 1), "pretrain", None),
    ],
)
def test_where_there_are_no_replicas_a_sentence_says_so(shape, layout, axis):
    mesh = config(shape, layout).mesh
    assert replica_axis(mesh) == axis
    assert (why_not(mesh) is None) == (axis is not None)
    if axis is None:
        assert "recheck_every" in why_not(mesh) and layout in why_not(mesh)
    assert build(config((1, 1), "pretrain")).compare is None
