"""Muon on one device is optax's, and on any mesh it is what it is on one device."""

import dataclasses
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batches import assert_close, normal, random_model, small_config, small_model
from flax import nnx
from jax.sharding import NamedSharding
from optax.contrib import MuonDimensionNumbers

from zayajax import config, optim
from zayajax.mesh import abstract_mesh, by_path, make_mesh, stored_axes, stored_specs
from zayajax.model.zaya import Decoder
from zayajax.optim import muon, table
from zayajax.optim.schedule import learning_rate
from zayajax.planning.traced.memory import peak_bytes
from zayajax.planning.traced.trace import collectives
from zayajax.settings import ConfigError

STEPS = 3
# In a turn, terms of 3.4, 4.8 and 2.0 times a singular value cancel to 0.7 of it: rounding each to
# bfloat16 (2^-9) is an error of 10 / 0.7 times as much in the sum, 3 %, and turns before add to it.
ROUNDED = 0.06


def matrices_of(named):
    return {p: v for p, v in named.items() if table.rule(p).group == table.MATRICES}


@cache
def parameters(**changes):
    named = matrices_of(by_path(random_model(small_model(**changes))))
    return {path: v for path, v in named.items() if "v_" not in path}  # like k


def gradients(params, step: int):
    """Of sizes far apart; some matrices never have any, and none has in the first step."""
    grads = {}
    for i, (path, v) in enumerate(params.items()):
        x = normal(100 * step + i, v.shape) * 10.0 ** -(i % 5)
        x = x.at[0].set(0) if path.endswith("fc1") or step == 0 else x
        grads[path] = v.replace(x)
    return grads


def relative_error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def spread_out(shape, smallest: float = 0.1):
    """Matrices with singular values between `smallest` and 1, times 1e-3."""
    u, s, v = np.linalg.svd(normal(0, shape), full_matrices=False)
    return jnp.asarray(1e-3 * (u * np.linspace(1, smallest, s.shape[-1])) @ v, "float32")


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 40), (5, 40, 8), (1, 12, 1), (4, 1, 1)])
def test_newton_schulz_makes_matrices_nearly_orthogonal(shape):
    x = spread_out(shape)
    y = jax.jit(muon.orthogonalize)(x)
    values = np.linalg.svd(y, compute_uv=False)
    assert 0.65 < values.min() and values.max() < 1.25
    want = np.asarray(x, np.float64)
    want /= np.linalg.norm(want, axis=(1, 2), keepdims=True)
    for _ in range(5):
        gram = want @ want.mT
        want = 3.4445 * want - 4.7750 * gram @ want + 2.0315 * gram @ gram @ want
    # A norm of 1e-3 is 1e-5 more by EPS, and the smallest singular values grow 300 times: as they
    # are, not by so much. Then float32.
    assert_close(y, want, 1e-4)
    rounded = jax.jit(muon.orthogonalize)(x.astype("bfloat16"))
    assert rounded.dtype == jnp.bfloat16 and relative_error(rounded, y) < ROUNDED


def test_a_matrix_of_zeros_stays_one_and_does_not_touch_the_others():
    x = normal(0, (6, 8, 12), "bfloat16").at[jnp.array([1, 4])].set(0).at[2].multiply(1e-30)
    got = np.asarray(muon.orthogonalize(x), np.float32)
    assert np.isfinite(got).all() and not got[[1, 4]].any()
    alone = np.asarray(muon.orthogonalize(x[jnp.array([0, 3, 5])]), np.float32)
    np.testing.assert_array_equal(got[[0, 3, 5]], alone)


def test_large_matrices_are_worked_on_one_by_one():
    def work(*shape):
        return peak_bytes(jax.jit(muon.orthogonalize), jax.ShapeDtypeStruct(shape, "bfloat16"))

    # A loop of several turns has the result of one beside the stack of all: a single turn is none.
    assert work(2, 2048, 1024) == work(7, 2048, 1024) == work(1, 2048, 1024) + 2 * 2048 * 1024
    # Small ones together, as many as divide the stack: of 8 x 2^18 numbers 4 at once.
    assert work(8, 512, 512) == work(16, 512, 512) == work(4, 512, 512) + 2 * 4 * 512 * 512
    assert work(4, 512, 512) == pytest.approx(4 * work(1, 512, 512), rel=1e-4)


def dimension_numbers(path, v):
    """The same table in optax's terms."""
    sides = [len(side.split()) for side in table.matrix(path).split("|")]
    axes = range(v.ndim - sum(sides), v.ndim)
    return MuonDimensionNumbers(tuple(axes[: sides[0]]), tuple(axes[sides[0] :]))


@pytest.mark.parametrize("momentum", [0.95, 0.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_one_device_it_is_optax(momentum, dtype):
    params = parameters(heads=2, kv_heads=1, expert_hidden=12)
    cfg = small_config(optim__momentum=momentum, optim__weight_decay=0.3, optim__warmup=2).optim
    plain = {path: v[...] for path, v in params.items()}
    theirs = optax.contrib.muon(
        learning_rate(cfg),
        beta=momentum,
        weight_decay=cfg.weight_decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers={p: dimension_numbers(p, v) for p, v in params.items()},
    )
    ours = optim.build(cfg)
    if dtype == "float32":
        ours = optax.chain(
            muon.scale_by_muon(momentum, table.matrix, dtype=dtype),
            optax.add_decayed_weights(cfg.weight_decay),
            optax.scale_by_learning_rate(learning_rate(cfg)),
        )
    step, step_w = jax.jit(ours.update), jax.jit(theirs.update)
    state, state_w = ours.init(params), theirs.init(plain)
    for i in range(STEPS):
        grads = gradients(params, i)
        got, state = step(grads, state, params)
        want, state_w = step_w({p: g[...] for p, g in grads.items()}, state_w, plain)
        for path in params:
            error = relative_error(got[path][...], want[path])
            assert error < (ROUNDED if dtype == "bfloat16" else 1e-4), (i, path, error)


def on(mesh, cfg, params):
    """One update, (grads, state, params) to (params, state), and the first state, abstract."""
    tx = optim.build(cfg, stored_axes(params, mesh))
    state = jax.eval_shape(tx.init, params)
    update = partial(optim.apply, tx)
    if mesh is None:
        return jax.jit(update), state
    specs, state_specs = stored_specs(params, mesh), stored_specs(state, mesh)
    at, out = (specs, state_specs, specs), (specs, state_specs)
    return jax.jit(jax.shard_map(update, mesh=mesh, in_specs=at, out_specs=out)), state


@cache
def run(mesh_shape=None, shape=(), **changes):
    """Parameters and state after some steps, as they are stored."""
    params, mesh = parameters(**dict(shape)), mesh_shape and make_mesh(*mesh_shape)
    update, state = on(mesh, small_config(**changes).optim, params)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    for i in range(STEPS):
        params, state = jax.block_until_ready(update(gradients(params, i), state, params))
    return params, state


# Layers and experts that do not divide over the nodes; a router that is split over the GPUs of a
# node alone (12 over 4, not over 8), or not at all; wide, square and tall matrices.
UNEVEN = {
    (1, 1): dict(experts=5),
    (1, 8): dict(router_hidden=12),
    (2, 4): dict(experts=4, router_hidden=12, head_dim=4),
    (8, 1): dict(experts=5, layers=2, heads=2),
}
NO_MOMENTUM = (("optim__momentum", 0.0), ("optim__state_dtype", "bfloat16"))
HALF = (("optim__state_dtype", "bfloat16"),)
CASES = [(mesh_shape, ()) for mesh_shape in UNEVEN] + [((2, 4), NO_MOMENTUM), ((2, 4), HALF)]


@pytest.mark.parametrize(("mesh_shape", "changes"), CASES)
def test_the_mesh_does_not_matter(mesh_shape, changes):
    shape = tuple(UNEVEN[mesh_shape].items())
    got, want = (run(at, shape, **dict(changes)) for at in (mesh_shape, None))
    # The same products of the same numbers. But XLA may make a multiplication and a sum one, and
    # not on every mesh: rarely, a number is then rounded to another bfloat16, and the update of its
    # matrix is off by bfloat16's error. Nearly all numbers are the same to float32's.
    (params, state), (params_w, state_w) = got, want
    assert_close(state, state_w, 1e-6 if "state_dtype" not in str(changes) else 1e-2)
    start = parameters(**dict(shape))
    for path, v in params_w.items():
        new, new_w, old = (np.asarray(x[...], np.float64) for x in (params[path], v, start[path]))
        off = np.abs(new - new_w)
        assert np.mean(off <= 3e-7 * np.abs(new_w).max()) > 0.9, path
        assert np.linalg.norm(off) <= ROUNDED * np.linalg.norm(new_w - old), path


def test_momentum_lies_like_its_parameter_in_its_dtype_or_is_not_there():
    mesh = abstract_mesh(2, 4)
    for dtype in ("float32", "bfloat16"):
        cfg = small_config(optim__state_dtype=dtype).optim
        _, state = on(mesh, cfg, parameters())
        specs = by_path(stored_specs(state, mesh))
        arrays = by_path(state)
        for path, spec in by_path(stored_specs(parameters(), mesh)).items():
            (name,) = [name for name in arrays if name.endswith(f".momentum.{path}")]
            assert arrays[name].shape == parameters()[path].shape and arrays[name].dtype == dtype
            assert specs[name].get_value() == spec.get_value() and any(spec.get_value()), path
    _, state = on(mesh, small_config(optim__momentum=0.0).optim, parameters())
    assert all(x.shape == () for x in jax.tree.leaves(state))  # counts of steps


def test_a_matrix_split_on_a_side_of_several_dimensions_is_refused():
    for axes in [("embed", None, "router"), (None, "embed", None), (None, None, None)]:
        params = {"x": nnx.Param(jnp.ones((4, 2, 2)), axes=axes)}
        tx = muon.scale_by_muon(0.0, lambda path: "D | H K")
        with pytest.raises(ValueError, match=r"x: .* D \| H K"):
            tx.update(params, tx.init(params))


def test_momentum_is_a_fraction():
    for wrong in (-0.1, 1.0):
        with pytest.raises(ConfigError, match=r"optim\.momentum: must be in 0 \.\. 1 and below 1"):
            small_config(optim__momentum=wrong)


# The released shape, from the traced program.


@cache
def traced(nodes, **changes):
    """(update, its arguments, float32 bytes of this device's shard of the parameters)"""
    cfg, mesh = config.load("configs/zaya1_8b.toml"), abstract_mesh(nodes, 8)
    params = jax.eval_shape(partial(Decoder, cfg.model), jax.random.key(0))
    params = matrices_of(by_path(params))
    update, state = on(mesh, dataclasses.replace(cfg.optim, **changes), params)
    shard = 0
    for v, spec in zip(params.values(), stored_specs(params, mesh).values(), strict=True):
        shard += 4 * math.prod(NamedSharding(mesh, spec.get_value()).shard_shape(v.shape))
    return update, (params, state, params), shard


@pytest.mark.parametrize("nodes", [1, 128])
def test_what_travels_is_at_most_two_shards_each_way(nodes):
    update, args, shard = traced(nodes)
    found = collectives(update, *args)
    assert {(c.op, c.scope, c.dtype, c.in_loop) for c in found} == {
        ("all_to_all", "deal", "bfloat16", False)
    }
    spans = [c.span for c in found]
    # Inside the node: q with o; k with the router's first matrix; both values; fc1 with fc2; out.
    # Along the rail the first three of them, and the experts' two.
    assert spans.count("node") == 2 * 5 and spans.count("rail") == (2 * 5 if nodes > 1 else 0)
    sent = sum(c.bytes for c in found) / 2
    assert sent <= shard  # half of what is allowed: 80 matrices of a GPU on 128 nodes, in bfloat16
    assert sent >= (0.5 * shard if nodes > 1 else 0)
    once = {(c.span, c.bytes) for c in found}
    assert all(sum((c.span, c.bytes) == message for c in found) % 2 == 0 for message in once)


@pytest.mark.parametrize("nodes", [1, 128])
@pytest.mark.parametrize("changes", [{}, {"state_dtype": "bfloat16"}, {"momentum": 0.0}])
def test_memory_is_at_most_four_shards_and_the_work_on_one_matrix(nodes, changes):
    update, args, shard = traced(nodes, **changes)
    largest = jax.ShapeDtypeStruct((1, 2048, 4096), "bfloat16")
    one = peak_bytes(jax.jit(muon.orthogonalize), largest)
    assert one < 11 * 2 * largest.size  # a handful of arrays of a matrix
    assert peak_bytes(update, *args) <= 4 * shard + one
