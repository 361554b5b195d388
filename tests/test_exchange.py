import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import assert_close, small_model
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from zayajax import exchange
from zayajax.layout import LOCAL, PRETRAIN, WORLD
from zayajax.mesh import gather, make_mesh, places, scatter, stored_specs
from zayajax.model.experts import Experts
from zayajax.planning.traced.trace import collectives

CFG = small_model(layers=1)
E, D = CFG.experts, CFG.hidden
DEVICES, T = 8, 16  # tokens a device
SKIP, TOKENS = E, DEVICES * T
MESHES = [(1, 8), (2, 4), (8, 1), (1, 1), None]
EVEN = np.arange(TOKENS) % E


def skewed(n):
    """n of the 16 tokens of each device to expert 3, the rest even over the others."""
    others = [e for e in range(E) if e != 3]
    device = [3] * n + [others[i % len(others)] for i in range(T - n)]
    return np.random.default_rng(n).permuted(np.tile(device, (DEVICES, 1)), axis=1).reshape(-1)


ROUTINGS = {
    "even": EVEN,
    "skewed": skewed(4),
    "half": skewed(8),
    "all to one expert": np.full(TOKENS, 5),
    "none to a rank": EVEN % 6,
    "all skip": np.full(TOKENS, SKIP),
    "random": np.random.default_rng(0).integers(0, E + 1, TOKENS),
    # The fullest pair decides for its node alone.
    "one device": np.concatenate([EVEN[:-T], np.full(T, 2)]),
}


@cache
def weights():
    rng = np.random.default_rng(0)
    experts = jax.eval_shape(partial(Experts, CFG), jax.random.key(0))

    def fill(v):
        return jnp.asarray(rng.normal(size=v.shape) * 0.3, jnp.float32)

    return jax.tree.map(fill, experts), fill(jnp.zeros((TOKENS, D))), fill(jnp.zeros((TOKENS, D)))


@cache
def program(mesh_shape, buckets, way="even"):
    """(experts, x, d_y, choice) -> y, gradients of x and of the experts, bucket of each device."""
    mesh, layout = (make_mesh(*mesh_shape), PRETRAIN) if mesh_shape else (None, LOCAL)
    layout = dataclasses.replace(layout, exchange=way)
    experts = weights()[0]
    where = places(experts, mesh, layout)

    def run(experts, x_TD, d_TD, choice_T):
        used = gather(experts, where, "float32")

        def apply(experts, x_TD):
            return experts(x_TD, choice_T, layout, buckets)

        y_TD, back, rooms_C = jax.vjp(apply, used, x_TD, has_aux=True)
        grads, d_x_TD = back(d_TD)
        bucket = jnp.argmax(rooms_C)[None] + jnp.zeros_like(choice_T, shape=1)
        return y_TD, d_x_TD, scatter(grads, where), bucket

    if mesh is None:
        return jax.jit(run)
    rows, specs = P(WORLD), stored_specs(experts, mesh)
    out_specs = (rows, rows, specs, rows)
    in_specs = (specs, rows, rows, rows)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def result(mesh_shape, choice, buckets=exchange.BUCKETS, way="even"):
    choice = jnp.asarray(choice, jnp.int32)
    return jax.block_until_ready(program(mesh_shape, buckets, way)(*weights(), choice))


@cache
def dense(routing):
    """The oracle: every expert on every token."""
    experts, x, d = weights()

    def run(experts, x):
        gate, up = jnp.split(jnp.einsum("td,edf->tef", x, experts.gate_up[...]), 2, axis=-1)
        every = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, experts.down[...])
        return jnp.einsum("te,ted->td", jax.nn.one_hot(ROUTINGS[routing], E), every)

    y, back = jax.vjp(run, experts, x)
    grads, d_x = back(d)
    return y, d_x, grads


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    "mesh_shape", [pytest.param(m, marks=[pytest.mark.smoke] * (m == (2, 4))) for m in MESHES]
)
def test_each_token_gets_its_expert_and_each_expert_its_gradient(mesh_shape, routing):
    y, d_x, grads, _ = result(mesh_shape, ROUTINGS[routing])
    assert_close((y, d_x, grads), dense(routing))
    skips = ROUTINGS[routing] == SKIP
    assert not np.asarray(y)[skips].any() and not np.asarray(d_x)[skips].any()


@pytest.mark.parametrize(
    "mesh_shape, wanted",
    [
        ((1, 8), {"even": 0, "skewed": 1, "half": 2, "all to one expert": 3, "all skip": 0}),
        ((2, 4), {"even": 0, "skewed": 1, "half": 2, "all to one expert": 2, "all skip": 0}),
        ((8, 1), {"even": 0, "all to one expert": 0}),
    ],
)
def test_the_smallest_capacity_that_holds_is_taken(mesh_shape, wanted):
    rooms = exchange.capacities(T, mesh_shape[1])
    assert set(wanted.values()) == set(range(len(rooms)))  # each branch has really run
    for routing, index in wanted.items():
        bucket = result(mesh_shape, ROUTINGS[routing])[-1]
        np.testing.assert_array_equal(bucket, index)
        per_rank = ROUTINGS[routing].reshape(DEVICES, T) // (E // mesh_shape[1])
        need = max(np.bincount(r[r < mesh_shape[1]], minlength=1).max() for r in per_rank)
        assert need <= rooms[index] and (index == 0 or need > rooms[index - 1])


def test_a_node_agrees_on_its_capacity_and_nodes_need_not():
    bucket = result((2, 4), ROUTINGS["one device"])[-1]
    np.testing.assert_array_equal(bucket, [0] * 4 + [2] * 4)


@pytest.mark.parametrize("routing", ["even", "half", "random", "one device"])
def test_any_capacity_equals_the_worst_case(routing):
    fast, plain = (result((2, 4), ROUTINGS[routing], b)[:3] for b in (exchange.BUCKETS, ()))
    assert_close(fast, plain, 1e-6)


@pytest.mark.parametrize("buckets", [exchange.BUCKETS, ()], ids=["buckets", "worst"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_ragged_blocks_carry_the_same(routing, buckets):
    even, ragged = (result((2, 4), ROUTINGS[routing], buckets, w) for w in ("even", "emulated"))
    for a, b in zip(jax.tree.leaves(even), jax.tree.leaves(ragged), strict=True):
        np.testing.assert_array_equal(a, b)


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_the_emulated_ragged_exchange_is_what_jax_says_of_the_real_one(data):
    """Against its documentation, in numpy: what rank s sends to rank d lands where s says."""
    R, rows = 4, 12
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=R * R, max_size=R * R))
    sent = np.asarray(sizes).reshape(R, R)  # [from, to]
    gaps = [data.draw(st.integers(0, 2)) for _ in range(2)]
    starts = np.cumsum(sent + gaps[0], axis=1) - sent - gaps[0]
    # Any order of the blocks where they arrive.
    order = np.asarray(data.draw(st.permutations(range(R))))
    arrive = np.zeros_like(sent)
    arrive[order] = np.cumsum(sent[order], axis=0) - sent[order]
    x = np.random.default_rng(0).normal(size=(R, rows + 3 * R, 2)).astype(np.float32)
    out = np.random.default_rng(1).normal(size=(R, 3 * R, 2)).astype(np.float32)
    want = out.copy()
    for s in range(R):
        for d in range(R):
            n, at, to = sent[s, d], starts[s, d], arrive[s, d]
            want[d, to : to + n] = x[s, at : at + n]
    plan = [np.asarray(p, np.int32) for p in (starts, sent, arrive, sent.T)]
    got = _emulate()(x, out, *plan)
    np.testing.assert_array_equal(got, want)
    # A receiver that expects another number of rows is a mistake that must be seen.
    if sent.any():
        plan[3] = plan[3] + 1
        assert np.isnan(_emulate()(x, out, *plan)).sum() == 2 * sent.sum()


@cache
def _emulate():
    def one(*args):
        return exchange.emulated(*(a[0] for a in args), axis_name="gpu")[None]

    mesh = make_mesh(1, 4)
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("gpu"), out_specs=P("gpu")))


def test_the_real_ragged_exchange_is_one_message_in_the_node():
    """On CPU it can be traced: its place in the program, and the types of its arguments."""
    mesh = AbstractMesh((16, 8), WORLD, axis_types=(AxisType.Auto,) * 2)

    def there_and_back(x_TD, choice_T):
        plan = exchange.route(choice_T, 2, ("gpu",), (40, 128))
        x_RCD = exchange.send(x_TD, plan, 40, ("gpu",), "ragged")
        return exchange.give_back(x_RCD, plan, ("gpu",), "ragged")

    rows = P(WORLD)
    fn = jax.shard_map(there_and_back, mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    x, choice = (
        jax.ShapeDtypeStruct((2**14, *s), d) for s, d in (((4,), "bfloat16"), ((), "int32"))
    )
    found = [c for c in collectives(jax.jit(fn), x, choice) if c.dtype == "bfloat16"]
    assert [(c.op, c.span, c.bytes) for c in found] == [
        ("ragged_all_to_all", "node", 8 * 40 * 4 * 2)
    ] * 2


few = settings(max_examples=100, deadline=None)


@given(
    st.integers(1, 5000),
    st.integers(1, 1024),
    st.lists(st.floats(0.01, 100), max_size=5).map(tuple),
)
@few
def test_capacities(T, R, buckets):
    rooms = exchange.capacities(T, R, buckets)
    assert list(rooms) == sorted(set(rooms)) and rooms[-1] == T and rooms[0] >= 1
    assert len(rooms) <= len(buckets) + 1
    for b in buckets:  # each bucket that is worth one is there, large enough and no larger
        if b < R:
            assert any(b * T / R <= r < b * T / R + 1 or r == T for r in rooms)
    assert exchange.capacities(T, 1) == exchange.capacities(T, R, ()) == (T,)


def test_routes_are_places_without_a_gap():
    """On one device: what goes to it is ordered by expert, in the order of the tokens."""
    choice = jnp.asarray(np.random.default_rng(1).integers(0, 5, 40), jnp.int32)  # 4: stays
    plan = exchange.route(choice, 4, (), (40,))
    goes = np.asarray(choice) < 4
    order = np.argsort(np.asarray(choice)[goes], kind="stable")
    np.testing.assert_array_equal(np.argsort(plan.place_T[goes]), order)
    assert sorted(plan.place_T[goes].tolist()) == list(range(goes.sum()))
    place, sizes = exchange.by_expert(plan, 40)
    np.testing.assert_array_equal(sizes, np.bincount(choice, minlength=5)[:4])
    assert sorted(place[0].tolist()) == sorted(set(place[0].tolist()))
    assert isinstance(weights()[0].down, nnx.Param)
