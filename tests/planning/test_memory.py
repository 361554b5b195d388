"""Peaks that can be counted by hand, through every kind of program."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from zayajax.mesh import WORLD
from zayajax.planning.memory import peak_bytes

N = 1000
X = jax.ShapeDtypeStruct((N,), "float32")
ARRAY = 4 * N


def arrays(fn, *args) -> float:
    """The peak in arrays of X's size; scalars are rounded away."""
    return round(peak_bytes(jax.jit(fn), *(args or (X,))) / ARRAY, 1)


def test_arguments_and_results_are_not_counted():
    assert arrays(lambda x: x + 1) == 0
    assert arrays(lambda x: (x + 1, x * 2, x)) == 0
    assert arrays(lambda x: 2 * (x + 1)) == 1


def test_an_array_lives_until_it_is_last_read():
    def chain(x):
        for _ in range(5):
            x = jnp.sin(x)
        return x

    def kept(x):
        y = jnp.sin(x)
        return y * chain(y)

    def all_kept(x):
        ys = [jnp.sin(x) for _ in range(5)]
        return sum(ys[1:], ys[0])

    assert arrays(chain) == 2  # one is read while the next is made
    assert arrays(kept) == 3
    assert arrays(all_kept) == 6  # five, and their first sum
    assert arrays(lambda x: (jnp.sin(x), x)[1]) == 1  # never read: for a moment


def test_types_and_shapes_count():
    assert arrays(lambda x: x.astype("bfloat16").astype("float32")) == 0.5
    assert arrays(lambda x: jnp.outer(x, x).sum()) == N
    assert arrays(lambda x: jnp.broadcast_to(x[:, None], (N, 3)).sum()) == 3


def test_a_view_is_no_new_array():
    assert arrays(lambda x: jnp.sin(x.reshape(2, -1)[:, None]).reshape(-1)) == 0
    # A view of a temporary keeps it alive.
    assert arrays(lambda x: jnp.sin(jnp.sin(x).reshape(2, -1))) == 1


def test_a_loop_has_the_arrays_of_one_turn():
    def body(x, _):
        return jnp.sin(jnp.sin(x)), None

    # The turn's own result, beside the carry that is the loop's; inside, one more.
    assert arrays(lambda x: jax.lax.scan(body, x, length=9)[0]) == 2
    assert arrays(lambda x: jax.lax.fori_loop(0, 9, lambda _, x: jnp.sin(jnp.sin(x)), x)) == 2
    xs = jax.ShapeDtypeStruct((7, N), "float32")
    # One slice of what goes in and one of what comes out; not seven.
    assert arrays(lambda xs: jax.lax.map(lambda x: jnp.sin(jnp.sin(x)), xs), xs) == 3


def test_of_the_branches_only_the_largest():
    branches = [lambda x: x, lambda x: jnp.sin(jnp.sin(x)), lambda x: jnp.outer(x, x).sum(0)]
    assert arrays(lambda x: jax.lax.switch(jnp.int32(x[0]), branches, x)) == N


def own_gradient(fn):
    fn = jax.custom_vjp(fn)
    fn.defvjp(lambda x: (fn(x), x), lambda x, d: (d,))
    return fn


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, own_gradient])
def test_through_wrappers(wrap):
    inner = wrap(lambda x: jnp.sin(jnp.sin(x) + 1))
    assert arrays(inner) == 2
    assert arrays(lambda x: 1 + inner(x)) == 3  # with the result, which is now a temporary


def test_inside_a_shard_map_each_device_counts_its_own():
    mesh = AbstractMesh((5, 2), WORLD, axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(
        lambda x: jnp.sin(jnp.sin(x)), mesh=mesh, in_specs=P(WORLD), out_specs=P(WORLD)
    )
    assert arrays(mapped) == 0.1


def test_what_the_backward_pass_keeps():
    def loss(x, policy):
        layer = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), policy=policy)
        return jax.lax.scan(lambda x, _: (layer(x), None), x, length=50)[0].sum()

    policies = jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.everything_saveable
    again, kept = (arrays(jax.grad(partial(loss, policy=p))) for p in policies)
    assert 50 <= again <= 60 and 100 <= kept <= 160
