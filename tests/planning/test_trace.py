"""The audit must see what it is there to find: planted mistakes, through every kind of program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from zayajax.layout import GPU, NODE, WORLD
from zayajax.planning.traced.trace import Collective, collectives, components, weights_in_loops

MESH = AbstractMesh((128, 8), WORLD, axis_types=(AxisType.Auto,) * 2)
f32 = partial(jax.ShapeDtypeStruct, dtype="float32")


SPLIT = P(WORLD)


def trace(fn, *args, in_specs=None, out_specs=SPLIT, check_vma=True):
    in_specs = in_specs or (SPLIT,) * len(args)
    mapped = jax.shard_map(
        fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    return collectives(jax.jit(mapped), *args)


def rows(found: list[Collective]):
    return [(c.op, c.scope, c.span, c.dtype, c.bytes, c.times) for c in found]


@pytest.mark.smoke
def test_a_weight_gradient_in_a_loop_is_caught():
    """The mistake to catch: a weight shared by the mesh, whose every use sums its gradient."""

    def grad(w, x):
        return jax.grad(lambda w: jax.lax.scan(lambda x, _: (x @ w, None), x, length=3)[0].sum())(w)

    args, specs = (f32((4, 4)), f32((1024, 4))), (P(), P(WORLD))
    (found,) = weights_in_loops(trace(grad, *args, in_specs=specs, out_specs=P()))
    assert (found.op, found.span, found.times, found.bytes) == ("psum", "world", 3, 64)


def test_spans_sizes_and_scopes():
    def fn(x):
        with jax.named_scope("outer"):
            y = jax.lax.all_gather(x, GPU, tiled=True)
            with jax.named_scope("inner"):
                y = jax.lax.psum_scatter(y.astype("bfloat16"), GPU, tiled=True)
        y = jax.lax.all_to_all(jnp.stack([y] * 128), NODE, 0, 0)
        return x + jax.lax.pmax(y.sum(), WORLD) + jax.lax.axis_index(GPU)

    found = trace(fn, f32((1024 * 4,)))
    assert rows(found) == [
        ("all_gather", "outer", "node", "float32", 8 * 4 * 4, 1),
        ("reduce_scatter", "inner", "node", "bfloat16", 8 * 4 * 2, 1),
        ("all_to_all", "", "rail", "bfloat16", 128 * 4 * 2, 1),
        ("pmax", "", "world", "bfloat16", 2, 1),
    ]
    assert found[1].path == "outer/inner" and not any(c.in_loop for c in found)


def test_a_sum_of_several_arrays_counts_them_all():
    def fn(x, n):
        x, y, n = jax.lax.psum((x, x[:1], n), GPU)
        return x + y + n

    found = trace(fn, f32((1024 * 4,)), jax.ShapeDtypeStruct((1024 * 4,), "int32"))
    assert {c.dtype for c in found} == {"float32", "int32"}
    assert sum(c.bytes for c in found if c.dtype == "float32") == 4 * (4 + 1)
    assert sum(c.bytes for c in found if c.dtype == "int32") == 4 * 4


def whole(n):
    return [list(range(n))]


@pytest.mark.parametrize(
    ("axes", "groups", "span", "size"),
    [
        (GPU, [[0, 1, 2, 3], [4, 5, 6, 7]], "partial", 4),
        (GPU, [[0, 7], [1, 6], [2, 5], [3, 4]], "partial", 2),
        (GPU, whole(8), "node", 8),
        (NODE, [list(range(64)), list(range(64, 128))], "partial", 64),
        (NODE, whole(128), "rail", 128),
        # Over both axes: nodes, rails, all, two nodes together, halves of nodes.
        (WORLD, np.arange(1024).reshape(128, 8).tolist(), "node", 8),
        (WORLD, np.arange(1024).reshape(128, 8).T.tolist(), "rail", 128),
        (WORLD, whole(1024), "world", 1024),
        (WORLD, np.arange(1024).reshape(64, 16).tolist(), "partial", 16),
        (WORLD, np.arange(1024).reshape(256, 4).tolist(), "partial", 4),
        ((GPU, NODE), np.arange(1024).reshape(8, 128).tolist(), "rail", 128),
        ((GPU, NODE), np.arange(1024).reshape(8, 128).T.tolist(), "node", 8),
    ],
)
def test_groups_are_what_they_are(axes, groups, span, size):
    def fn(x):
        return jax.lax.psum(x, axes, axis_index_groups=groups)

    (found,) = trace(fn, f32((1024,)), check_vma=False)
    assert (found.span, found.group) == (span, size)


def shift(n, by=1):
    return [(i, (i + by) % n) for i in range(n)]


@pytest.mark.parametrize(
    ("axes", "pairs", "span", "size"),
    [
        (GPU, shift(8), "node", 8),
        (GPU, shift(8)[:-1], "node", 8),  # none goes round: all are tied together still
        (GPU, shift(8, 2), "partial", 4),
        (GPU, shift(8, 3), "node", 8),
        (GPU, [(0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4), (6, 7), (7, 6)], "partial", 2),
        (GPU, [(0, 1)], "partial", 2),
        (NODE, shift(128), "rail", 128),
        (NODE, shift(128, 64), "partial", 2),
        (WORLD, shift(1024, 8), "rail", 128),
        (WORLD, shift(1024), "world", 1024),
        (WORLD, [(i, i // 8 * 8 + (i + 1) % 8) for i in range(1024)], "node", 8),
        (GPU, [(i, i) for i in range(8)], "one", 1),
    ],
)
def test_permutes_by_their_pairs(axes, pairs, span, size):
    (found,) = trace(lambda x: jax.lax.ppermute(x, axes, pairs), f32((1024,)))
    assert (found.op, found.span, found.group) == ("ppermute", span, size)


def test_components_of_random_pairs():
    """Two are together where a walk along pairs, either way, leads from one to the other."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        n, k = int(rng.integers(2, 12)), int(rng.integers(1, 10))
        pairs = rng.integers(0, n, (k, 2)).tolist()
        near = np.eye(n, dtype=int)
        for a, b in pairs:
            near[a, b] = near[b, a] = 1
        walks = np.linalg.matrix_power(near, n) > 0
        found = components(pairs)
        used = {i for pair in pairs for i in pair}
        assert sorted(i for part in found for i in part) == sorted(used)
        for part in found:
            assert {*part} == {*np.flatnonzero(walks[part[0]])}


@pytest.mark.parametrize(
    ("shape", "spans"),
    [((1, 8), ["node", "one", "node"]), ((4, 1), ["one", "rail", "rail"]), ((1, 1), ["one"] * 3)],
)
def test_a_mesh_of_one_node_or_of_one_rail(shape, spans):
    mesh = AbstractMesh(shape, WORLD, axis_types=(AxisType.Auto,) * 2)

    def fn(x):
        return sum(jax.lax.psum(x, axes) for axes in (GPU, NODE, WORLD))

    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P(WORLD), out_specs=P(WORLD), check_vma=False)
    assert [c.span for c in collectives(jax.jit(mapped), f32((8,)))] == spans


def test_loops_multiply_and_a_while_has_no_known_length():
    def total(x, _=None):
        return jax.lax.psum(x, GPU) + 0 * x

    def inner(x, _):
        return total(x), None

    def outer(x, _):
        return jax.lax.scan(inner, x, length=5)[0], None

    def fn(x):
        x = jax.lax.scan(outer, total(x), length=7)[0]
        return jax.lax.while_loop(lambda x: jax.lax.pmax(x.sum(), WORLD) < 9, total, x)

    found = trace(fn, f32((1024,)))
    assert [(c.op, c.times, c.in_loop) for c in found] == [
        ("psum", 1, False),
        ("psum", 35, True),
        ("pmax", None, True),
        ("psum", None, True),
    ]


def test_every_branch_is_listed():
    branches = [
        lambda x: x,
        lambda x: jax.lax.psum(x, GPU) + 0 * x,
        lambda x: jax.lax.cond(
            x.sum() > 1, lambda x: jax.lax.psum(x, NODE) + 0 * x, lambda x: x, x
        ),
    ]

    def fn(x):
        return jax.lax.switch(jax.lax.axis_index(NODE), branches, x) * jax.lax.psum(x, NODE)

    found = [(c.span, c.branch) for c in trace(fn, f32((1024,)))]
    # The condition of an inner one tells 0 (false) from 1 (true).
    assert found == [("node", (1,)), ("rail", (2, 1)), ("rail", ())]


def test_of_branches_that_send_the_least_is_even_routing():
    def sending(n):
        return lambda x: jax.lax.psum(jnp.tile(x, n), GPU).sum() + 0 * x

    def fn(x):
        inner = jax.lax.switch(jnp.int32(x[0]), [sending(3), sending(2), lambda x: x], x)
        return jax.lax.cond(inner[0] > 0, lambda x: x, sending(5), x)

    found = trace(fn, f32((1024,)), check_vma=False)
    assert [(c.bytes, c.even) for c in found] == [(12, False), (8, True), (20, True)]


def test_of_branches_inside_branches_one_runs_and_loops_count():
    """A branch sends what its own likely branch does, and a loop in one all its turns."""

    def sending(n):
        return lambda x: jax.lax.psum(jnp.tile(x, n), GPU).sum() + 0 * x

    def choosing(x):
        return jax.lax.cond(x[0] > 1, sending(2), sending(3), x)

    def often(x):
        return jax.lax.scan(lambda x, _: (sending(1)(x), None), x, length=4)[0]

    def fn(x):
        return jax.lax.switch(jnp.int32(x[0]), [often, choosing], x)

    found = trace(fn, f32((1024,)), check_vma=False)
    # Of the inner condition 0 is false.
    assert [(c.bytes, c.even) for c in found] == [(4, False), (12, False), (8, True)]


@pytest.mark.parametrize("scope", ["exchange", "bucket", "halo", "kv", "ring"])
def test_a_sum_of_a_weights_gradient_is_caught_in_a_scope_of_activations(scope):
    def loss(w, x):
        def turn(x, _):
            with jax.named_scope(scope):
                return x @ w, None

        return jax.lax.scan(turn, x, length=3)[0].sum()

    grad = jax.grad(loss)
    args, specs = (f32((4, 4)), f32((1024, 4))), (P(), P(WORLD))
    (found,) = weights_in_loops(trace(grad, *args, in_specs=specs, out_specs=P()))
    assert (found.op, found.scope, found.times) == ("psum", scope, 3)


def test_through_every_wrapper():
    @jax.custom_vjp
    def own(x):
        return jax.lax.psum(x, GPU) + 0 * x

    own.defvjp(lambda x: (own(x), None), lambda _, d: (jax.lax.psum(d, NODE) + 0 * d,))

    @jax.custom_jvp
    def forward(x):
        return jax.lax.psum(x, GPU) + 0 * x

    forward.defjvp(lambda x, d: (forward(*x), jax.lax.psum(*d, NODE) + 0 * d[0]))

    def scoped(fn):
        return jax.named_scope("here")(fn)

    for fn, want in {
        own: {"node"},
        forward: {"node"},
        jax.jit(own): {"node"},
        jax.checkpoint(own): {"node"},
        jax.grad(lambda x: scoped(jax.checkpoint(own))(x).sum()): {"node", "rail"},
        jax.grad(lambda x: jax.jit(scoped(own))(x).sum()): {"node", "rail"},
        jax.vmap(own): {"node"},
    }.items():
        found = trace(fn, f32((1024,)))
        assert {c.span for c in found} == want
        assert {c.op for c in found} == {"psum"}


def test_a_transposed_scope_keeps_its_name():
    @jax.named_scope("gather")
    def gather(x):
        return jax.lax.all_gather(x, GPU, tiled=True)

    found = trace(jax.grad(lambda x: jnp.sum(gather(x) ** 2)), f32((1024 * 2,)))
    assert [(c.op, c.scope) for c in found] == [
        ("all_gather", "gather"),
        ("reduce_scatter", "gather"),
    ]
