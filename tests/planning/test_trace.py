"""The audit must see what it is there to find: planted mistakes, through every kind of program."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from zayajax.layout import GPU, NODE, WORLD
from zayajax.planning.trace import Collective, collectives, weights_in_loops

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


def test_part_of_an_axis_is_not_a_node():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def fn(x):
        return jax.lax.psum(x, GPU, axis_index_groups=groups)

    (found,) = trace(fn, f32((1024,)), check_vma=False)
    assert found.span == "partial"


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
