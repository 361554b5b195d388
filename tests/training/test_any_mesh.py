"""The mesh does not matter: loss, gradients and twenty steps are those of one device, in every
layout, however rows are packed and wherever tokens go."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import assert_close, random_batch, random_model, small_config
from hypothesis import HealthCheck, given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from zayajax import optim
from zayajax.layout import LAYOUTS
from zayajax.mesh import by_path, gather, make_mesh, places, stored_specs
from zayajax.model import head
from zayajax.sequence import shard_order
from zayajax.training.guard import init_guard
from zayajax.training.state import TrainState
from zayajax.training.step import build

B, S, V, STEPS = 8, 32, 48, 20
MESHES = [(1, 1), (1, 8), (2, 4), (4, 2), (8, 1)]
# Float32 sums in another order. A token that goes to another expert is off by 1e-2: none of these
# batches has one whose two best routes lie so close, since all counts of tokens are equal.
TOL = 1e-5


def config(shape, layout, **changes):
    nodes, gpus = shape
    base = dict(mesh__nodes=nodes, mesh__gpus=gpus, mesh__layout=layout, train__batch=B)
    # Unclipped, the first moments after one step are the gradients times 1 - beta1.
    base |= dict(train__sequence=S, optim__horizon=STEPS, optim__clip=1e9)
    # Muon rounds to bfloat16, and has its own tests on meshes.
    base |= dict(optim__matrices="adamw")
    # A rate at which rounding does not grow into another route.
    base |= dict(optim__learning_rate=1e-3, model__layers=2)
    return small_config(**base | changes)


@cache
def program(shape=None, layout="pretrain", **changes):
    cfg = config(shape or (1, 1), layout, **changes)
    return cfg, build(cfg, shape and make_mesh(*shape))


@cache
def first_params(skewed: bool):
    """As after some training: spread over the experts, or most tokens of a layer to one of them."""
    params = random_model(config((1, 1), "pretrain").model, seed=3)
    router = params.layers.router
    if skewed:  # the last hidden state of a router is mostly positive
        router.out = router.out.replace(router.out[...].at[:, :, 5].add(1.5))
        return params
    tokens, count = batch_of(False)["tokens"], jax.jit(lambda p, x: p.hidden(x)[1].counts_LC)
    for i in range(300):
        share_LE = count(params, tokens)[:, :-1] / tokens.size
        bias = router.balance_bias
        router.balance_bias = bias.replace(
            bias[...].at[:, :-1].add((1 / 8 - share_LE) / (2 + i / 10))
        )
    return params


def batch_of(packed: bool, seed=0):
    if packed:
        return random_batch(seed, B, S, V, longest=S // 2)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (B, S), dtype=np.int32)
    whole = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1)}
    whole |= {"segments": np.ones((B, S), np.int32)}
    whole |= {"positions": np.tile(np.arange(S, dtype=np.int32), (B, 1))}
    return whole | {"weights": np.ones((B, S), np.float32)}


def put(batch, cfg, at):
    if at.batch_sharding is None:
        return batch
    order = shard_order(S, cfg.mesh.ranks(LAYOUTS[cfg.mesh.layout].sequence))
    return jax.device_put({k: x[:, order] for k, x in batch.items()}, at.batch_sharding)


def first_state(cfg, at, params):
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), at.state.opt_state)
    state = TrainState(jnp.zeros((), jnp.int32), params, zeros, init_guard())
    shardings = jax.tree.map(lambda x: x.sharding, at.state) if at.batch_sharding else None
    return jax.device_put(jax.tree.map(jnp.copy, state), shardings)  # the step takes it over


def first_step(batch, params, **where):
    """(loss, counts, gradients up to a factor, how often each capacity was used)"""
    cfg, at = program(**where)
    state = first_state(cfg, at, params)
    state, metrics = jax.block_until_ready(at.train_step(state, put(batch, cfg, at)))
    state, metrics = jax.device_get((state, metrics))
    moments = {p: v[...] for p, v in by_path(state.opt_state).items() if ".mu." in p}
    return metrics, {p: v for p, v in moments.items() if "balance" not in p}


@cache
def alone(packed, skewed):
    return first_step(batch_of(packed), first_params(skewed))


# What only the scores of attention depend on.
OF_SCORES = ("attn.q", "attn.k", "temp", "depthwise", "depthwise_bias", "grouped", "grouped_bias")


def same(got, want, noise: float = 0.0):
    """Each gradient within TOL of its tensor's maximum; or, where only scores depend on it, within
    `noise` of the largest of all."""
    (metrics, grads), (metrics_w, grads_w) = got, want
    np.testing.assert_array_equal(metrics["counts_LC"], metrics_w["counts_LC"])
    np.testing.assert_allclose(metrics["loss"], metrics_w["loss"], rtol=TOL)
    noise *= max(np.abs(g).max() for g in grads_w.values())
    for path, want in grads_w.items():
        error, size = np.abs(grads[path] - want).max(), np.abs(want).max()
        least = noise if path.endswith(OF_SCORES) else 0
        assert error <= max(TOL * size, least), f"{path}: {error} of {size}"


@cache
def losses(shape=None, layout="pretrain", **where):
    cfg, at = program(shape, layout, **where)
    state, found = first_state(cfg, at, first_params(False)), []
    for i in range(STEPS):
        state, metrics = at.train_step(state, put(batch_of(i % 2 == 0, seed=i), cfg, at))
        found.append(float(metrics["loss"]))
    return found


CASES = [(shape, "pretrain") for shape in MESHES]
CASES += [(shape, "context") for shape in MESHES[1:]]
CASES += [(shape, "context-wide") for shape in MESHES[1:]]
OTHERS = [dict(mesh__attention="ring", mesh__zero=3), dict(mesh__exchange="ragged", mesh__zero=3)]


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_the_mesh_does_not_matter(shape, layout, zero):
    check(shape=shape, layout=layout, mesh__zero=zero)


@pytest.mark.parametrize("layout", ["context", "context-wide"])
@pytest.mark.parametrize("other", OTHERS, ids=["ring", "ragged"])
def test_the_way_does_not_matter(layout, other):
    check(shape=(2, 4), layout=layout, **other)


# Chunks of 4 tokens behind halos of 3, which is more than either convolution reaches.
OTHER_MODEL = dict(
    model__cca_time0=3,
    model__cca_time1=2,
    model__sliding_layers=(1,),
    model__sliding_window=5,
    model__attention_bias=True,
)


@pytest.mark.parametrize(
    ("shape", "layout", "remat"), [((2, 4), "context", "full"), ((2, 2), "context-wide", "none")]
)
def test_windows_far_taps_and_micro_batches_on_split_rows(shape, layout, remat):
    params = random_model(config((1, 1), "pretrain", **OTHER_MODEL).model, seed=7)
    ways = dict(train__micro_batches=2, train__remat=remat)
    want = first_step(batch_of(True), params, **OTHER_MODEL)
    same(
        first_step(batch_of(True), params, shape=shape, layout=layout, **OTHER_MODEL, **ways), want
    )


@pytest.mark.parametrize("layout", ["pretrain", "context"])
def test_twenty_steps_of_muon_too(layout):
    # A gradient summed in another order may be rounded to another bfloat16 before Newton-Schulz.
    muon = dict(optim__matrices="muon")
    np.testing.assert_allclose(losses((2, 4), layout, **muon), losses(**muon), rtol=1e-4)


def check(**where):
    for packed in (True, False):
        for skewed in (True, False):
            got = first_step(batch_of(packed), first_params(skewed), **where)
            same(got, alone(packed, skewed))
            assert len(got[1]) >= 30 and all(np.any(g) for g in got[1].values())
    np.testing.assert_allclose(losses(**where), losses(), rtol=TOL)
    assert len(set(losses())) == STEPS


def test_the_cases_are_what_they_say():
    for packed in (True, False):
        (even, _), (skewed, _) = alone(packed, False), alone(packed, True)
        load = [
            m["counts_LC"][:, :-1] / m["counts_LC"].sum(1, keepdims=True) for m in (even, skewed)
        ]
        assert load[0].max() < 3 / 8 and load[0].min() > 0, load[0]
        assert (load[1].max(1) > 5 / 8).all(), load[1]
    rooms = first_step(batch_of(True), first_params(True), shape=(1, 8))[0]["rooms_LC"]
    assert rooms[:, -1].sum() > 0 and rooms.sum() == 2 * 8


@given(st.integers(0, 2**32 - 1), st.integers(1, S), st.booleans())
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,  # a batch with a tie would be a failure that tells nothing
    suppress_health_check=[HealthCheck.too_slow],
)
def test_any_lengths_and_segments(seed, longest, left):
    batch = random_batch(seed, B, S, V, left=left, longest=longest)
    want = first_step(batch, first_params(False))
    # A document of one token has nothing to attend to: where every gradient of q and k should be 0,
    # it is what rounding left of a sum of hundreds of terms.
    noise = 16 * np.finfo(np.float32).eps if longest < 8 else 0
    for shape, layout in (((2, 4), "context"), ((4, 2), "context-wide")):
        same(first_step(batch, first_params(False), shape=shape, layout=layout), want, noise)


@pytest.mark.parametrize("shape", MESHES[1:])
def test_decoding_spreads_keys_and_sums_experts(shape):
    """All devices have all tokens; each answers for a share of the keys, and for its experts."""
    layout, params = LAYOUTS["decode"], first_params(False)
    mesh, batch = make_mesh(*shape), batch_of(True)
    where = places(params, mesh, layout)

    def logits(params, tokens, segments, positions):
        model = gather(params, where, "float32")
        x_BSD, routing = model.hidden(tokens, segments, positions, layout=layout)
        return head.logits(x_BSD, *model.head_weights())[None], routing.counts_LC[None]

    specs = stored_specs(params, mesh)
    # Each device's own result: that they are equal is part of the claim.
    fn = jax.shard_map(logits, mesh=mesh, in_specs=(specs, P(), P(), P()), out_specs=P(layout.keys))
    args = params, *(batch[n][:, : S - 3] for n in ("tokens", "segments", "positions"))
    got, counts = jax.block_until_ready(jax.jit(fn)(*args))
    x_BSD, routing = jax.jit(params.hidden)(*args[1:])
    want = head.logits(x_BSD, *params.head_weights())
    for device in range(8):
        np.testing.assert_array_equal(counts[device], routing.counts_LC)
        assert_close(got[device], want, TOL)


def test_optimizer_state_starts_as_the_optimizer_starts_it():
    """`first_state` fills it with zeros, to save compiling `init`."""
    cfg, _ = program()
    start = optim.build(cfg.optim).init(by_path(first_params(False)))
    assert not any(np.any(x) for x in jax.tree.leaves(start))
