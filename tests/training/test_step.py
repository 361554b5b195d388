"""What the step computes must not depend on where it runs; what it sends must be what is meant."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batches import arrays_in, assert_close, is_program, random_batch, random_model, small_config
from flax import nnx

from zayajax import optim
from zayajax.mesh import by_path, make_mesh
from zayajax.training.guard import init_guard
from zayajax.training.state import TrainState
from zayajax.training.step import build

B, S, STEPS = 16, 12, 3
CLIP = 0.05  # always at work, so that the mesh tests see it too
MESHES = [(1, 1), (1, 8), (2, 4), (8, 1)]
# float32 sums in another order, through three steps of Adam with eps 1e-3. Larger differences are
# wrong: a token that takes another expert is off by 1e-2.
TOL = 1e-4


def config(mesh_shape=None, **changes):
    nodes, gpus = mesh_shape or (1, 1)
    base = dict(mesh__nodes=nodes, mesh__gpus=gpus, optim__clip=CLIP, optim__warmup=2)
    # Of a gradient summed in another order, Muon makes another update where it rounds to bfloat16,
    # by up to 3 % (tests/optim/test_muon.py).
    base["optim__matrices"] = "adamw"
    return small_config(**base | changes)


def batch_of(seed=0):
    return random_batch(seed, B, S, 48)


@cache
def program(mesh_shape=None, **changes):
    cfg = config(mesh_shape, **changes)
    return cfg, build(cfg, mesh_shape and make_mesh(*mesh_shape))


def first_state(cfg, at):
    """As after some training, and the same on every mesh: `init` takes long to compile."""
    params = random_model(cfg.model, dtype=cfg.train.param_dtype)
    # The skip class is where it starts, but other classes are not even.
    bias = params.layers.router.balance_bias
    params.layers.router.balance_bias = bias.replace(bias[...].at[:, -1].set(-1.0))
    tx = optim.build(cfg.optim)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(tx.init, by_path(params))
    )
    state = TrainState(jnp.zeros((), jnp.int32), params, zeros, init_guard())
    shardings = jax.tree.map(lambda x: x.sharding, at.state) if at.batch_sharding else None
    return jax.device_put(state, shardings)


@cache
def run(mesh_shape=None, **changes):
    """(state, metrics) after each step, on the host."""
    cfg, at = program(mesh_shape, **changes)
    state, found = first_state(cfg, at), []
    for i in range(STEPS):
        batch = jax.device_put(batch_of(i), at.batch_sharding)
        state, metrics = jax.block_until_ready(at.train_step(state, batch))
        found.append(jax.device_get((state, metrics)))
    return found


def close_runs(got, want, tol=TOL):
    for (state, metrics), (state_w, metrics_w) in zip(got, want, strict=True):
        np.testing.assert_array_equal(metrics["counts_LC"], metrics_w["counts_LC"])
        # Another mesh has other capacities.
        metrics, metrics_w = (
            {k: x for k, x in m.items() if k != "rooms_LC"} for m in (metrics, metrics_w)
        )
        assert_close(metrics, metrics_w, tol)
        assert_close(by_path(state.params), by_path(state_w.params), tol)


@pytest.mark.parametrize(
    "mesh_shape", [pytest.param(m, marks=[pytest.mark.smoke] * (m == (2, 4))) for m in MESHES]
)
def test_the_mesh_does_not_matter(mesh_shape):
    close_runs(run(mesh_shape), run())
    losses = [float(metrics["loss"]) for _, metrics in run()]
    assert len(set(losses)) == STEPS and all(np.isfinite(losses))


@pytest.mark.smoke
def test_weights_gathered_in_the_loop_make_the_same_step():
    close_runs(run((2, 4), mesh__zero=3), run())


def test_micro_batches_do_not_change_the_step():
    close_runs(run(train__micro_batches=4), run())


@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_is_recomputed_does_not_change_the_step(remat):
    close_runs(run(train__remat=remat), run())


def test_one_compilation_and_a_donated_state():
    run((2, 4))
    cfg, at = program((2, 4))
    assert at.train_step._cache_size() == 1
    old = first_state(cfg, at)
    batch = jax.device_put(batch_of(), at.batch_sharding)
    state, _ = jax.block_until_ready(at.train_step(old, batch))
    assert at.train_step._cache_size() == 1 and state.step == 1
    large = [x for x in jax.tree.leaves((old.params, old.opt_state)) if x.size > 100]
    assert all(x.is_deleted() for x in large) and not batch["tokens"].is_deleted()
    # What comes out lies where what goes in lay.
    for new, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(at.state), strict=True):
        assert new.sharding.is_equivalent_to(wanted.sharding, new.ndim)
        assert (new.shape, new.dtype) == (wanted.shape, wanted.dtype)


def test_the_first_state_does_not_depend_on_the_mesh():
    states = []
    for mesh_shape in (None, (2, 4)):
        _, at = program(mesh_shape)
        states.append(jax.block_until_ready(at.init(jax.random.key(0))))
    # The same bits; XLA may still fuse `normal * scale` in another way.
    assert_close(by_path(states[1].params), by_path(states[0].params), 1e-6)
    skip_class = states[0].params.layers.router.balance_bias[..., -1]
    np.testing.assert_array_equal(skip_class, -1)
    for path, v in by_path(states[1].params).items():
        if v.size >= 1000 and "grouped" not in path:
            assert v[...].addressable_shards[0].data.size * 8 == v.size, path


@pytest.mark.parametrize("mesh_shape", [None, (2, 4)])
def test_clip_uses_the_global_norm(mesh_shape):
    """After one step the first moments are (1 - beta1) times the clipped gradient."""
    state, metrics = run(mesh_shape)[0]
    assert metrics["grad_norm"] > 2 * CLIP
    moments = [x for path, x in by_path(state.opt_state).items() if ".mu." in path]
    moments = [x for x in moments if not is_balance(x)]
    assert len(moments) == len(by_path(state.params)) - 1
    size = np.sqrt(sum(np.sum(np.square(x[...], dtype=np.float64)) for x in moments))
    np.testing.assert_allclose(size / 0.1, CLIP, rtol=1e-4)


def is_balance(v):
    return not isinstance(v, nnx.Param)


@pytest.mark.parametrize("padding", [False, True])
def test_a_batch_of_weight_0_moves_nothing_but_decay(padding):
    cfg, at = program((2, 4))
    batch = batch_of()
    batch["weights"][:] = 0
    if padding:
        batch["segments"][:] = batch["positions"][:] = 0
    before = jax.device_get(first_state(cfg, at).params)
    state, metrics = jax.block_until_ready(
        at.train_step(first_state(cfg, at), jax.device_put(batch, at.batch_sharding))
    )
    assert metrics["loss"] == metrics["grad_norm"] == metrics["weight"] == 0
    assert metrics["counts_LC"].sum() == cfg.model.layers * np.count_nonzero(batch["segments"])
    rate = cfg.optim.learning_rate / 2  # the first of two steps of warm-up
    moved = set()
    for (path, old), new in zip(
        by_path(before).items(), by_path(state.params).values(), strict=True
    ):
        old, new = np.asarray(old[...]), np.asarray(new[...])
        assert np.isfinite(new).all(), path
        decayed = old * (1 - rate * cfg.optim.weight_decay)
        if not np.array_equal(old, new) and "balance" not in path:
            np.testing.assert_allclose(new, decayed, rtol=1e-5, err_msg=path)
        moved |= set() if np.array_equal(old, new) else {path}
    # Tokens that are read balance the experts, even if nothing is learned from them.
    assert ("layers.router.balance_bias" in moved) != padding
    assert "layers.attn.q" in moved and "embed" not in moved and "norm_out" not in moved


@pytest.mark.parametrize("mesh_shape", [None, (2, 4)])
def test_the_balance_bias_follows_the_counts_of_the_global_batch(mesh_shape):
    cfg, at = program(mesh_shape)
    bias = np.asarray(first_state(cfg, at).params.layers.router.balance_bias[...])
    rule = optax.adam(1e-3, b1=0.9, b2=0.999)
    state = rule.init(bias)
    for i, (found, metrics) in enumerate(run(mesh_shape)):
        counts = metrics["counts_LC"]
        tokens = np.count_nonzero(batch_of(i)["segments"])
        assert counts.dtype == np.int32
        np.testing.assert_array_equal(counts.sum(1), tokens)
        routed = counts[:, :-1]
        excess = np.pad(routed / routed.sum(1, keepdims=True) - 1 / 8, ((0, 0), (0, 1)))
        update, state = rule.update(excess.astype(np.float32), state)
        bias = bias + update
        got = found.params.layers.router.balance_bias[...]
        np.testing.assert_allclose(got, bias, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(got[:, -1], -1)


def abstract_batch(B, S):
    return {k: jax.ShapeDtypeStruct((B, S), v.dtype) for k, v in random_batch(0, 1, 4, 4).items()}


def jaxpr_of(cfg):
    at = build(cfg)
    return at.train_step.trace(at.state, abstract_batch(B, S)).jaxpr.jaxpr


def test_types_of_the_state_are_those_of_the_config():
    def types(**changes):
        at = build(config(**changes))
        return at.state, at.train_step.trace(at.state, abstract_batch(B, S)).out_info[0]

    for state in types(train__param_dtype="bfloat16"):
        assert state.params.layers.attn.q.dtype == state.params.embed.dtype == jnp.bfloat16
        assert state.params.norm_out.dtype == state.params.layers.router.fc1.dtype == jnp.float32
        assert state.params.layers.router.balance_bias.dtype == jnp.float32
    for state in types(optim__state_dtype="bfloat16"):
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))
        half, full = (jnp.dtype(d) for d in ("bfloat16", "float32"))
        for path, v in by_path(state.opt_state).items():
            if path.endswith(("attn.q", "norm_out", "balance_bias")):
                assert v.dtype == (full if "balance" in path else half), path


def test_a_step_of_bfloat16_weights_and_moments_learns():
    half = dict(train__param_dtype="bfloat16", optim__state_dtype="bfloat16")
    found, want = (run(**c) for c in (half | {"train__compute_dtype": "bfloat16"}, {}))
    for (_, got), (_, metrics) in zip(found, want, strict=True):
        np.testing.assert_allclose(got["loss"], metrics["loss"], rtol=0.1)
    assert np.asarray(found[-1][0].params.embed[...]).dtype == jnp.bfloat16


def test_bfloat16_stays_out_of_the_residual_norms_logits_and_loss():
    cfg = config(train__compute_dtype="bfloat16")
    products, delicate = set(), {"exp", "log", "rsqrt", "erf", "erfc", "cumsum", "cos", "sin"}
    for _, dtype, eqn in arrays_in(jaxpr_of(cfg)):
        name = eqn.primitive.name
        if name in delicate:
            assert dtype != jnp.bfloat16, eqn
        if name == "dot_general":
            products.add((eqn.outvars[0].aval.shape, str(dtype)))
    logits = (B * S, cfg.model.vocab)
    assert (logits, "float32") in products and (logits, "bfloat16") not in products
    residual = [
        v.aval.dtype
        for eqn in equations(jaxpr_of(cfg))
        if eqn.primitive.name == "scan" and eqn.params["length"] == cfg.model.layers
        for v in eqn.outvars
        if v.aval.shape in {(B, S, cfg.model.hidden), (B, S, cfg.model.router_hidden)}
    ]
    assert len(residual) >= 4 and set(residual) == {jnp.dtype("float32")}


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
            if is_program(x):
                yield from equations(getattr(x, "jaxpr", x))


@pytest.mark.parametrize(
    ("mesh_shape", "layers", "layout"),
    [
        ((2, 1), 2, "pretrain"),
        ((1, 2), 1, "pretrain"),
        ((8, 1), 3, "pretrain"),
        ((1, 2), 1, "context"),
        ((2, 1), 2, "context-wide"),
    ],
)
def test_no_array_is_empty(mesh_shape, layers, layout):
    """jax 0.11 crashes as it partitions a program with an array of size 0 in it."""
    changes = dict(model__layers=layers, mesh__layout=layout, optim__matrices="muon")
    _, at = program(mesh_shape, **changes)
    traced = at.train_step.trace(at.state, abstract_batch(B, S)).jaxpr.jaxpr
    assert not [eqn for shape, _, eqn in arrays_in(traced) if 0 in shape]


def test_a_single_layer_learns():
    found = run((1, 2), model__layers=1, optim__matrices="muon")
    losses = [float(metrics["loss"]) for _, metrics in found]
    assert losses[-1] < losses[0]
