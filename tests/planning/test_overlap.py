"""What may hide, in programs that can be counted by hand; and that it is a bound in random ones."""

import dataclasses
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from zayajax.layout import GPU, NODE, WORLD
from zayajax.machine import MI300X
from zayajax.planning.traced.overlap import hidden, share_out
from zayajax.planning.traced.program import line
from zayajax.planning.traced.trace import sent

MESH = AbstractMesh((4, 8), WORLD, axis_types=(AxisType.Auto,) * 2)
N = 256
SLOW = 1e11  # FLOP/s, so that products decide the time, not bytes
MACHINE = dataclasses.replace(MI300X, reached_bf16=SLOW)
PRODUCT = 2 * N**3 / SLOW  # seconds of one
SMALL = 1e-3  # of a product: elementwise work beside it


def behind(fn, *shapes, long=1e3):
    """(scope, products that hide it) of each collective, each `long` products long."""
    args = [jax.ShapeDtypeStruct(s, "float32") for s in shapes or [(N, N)]]
    specs = (P(),) * len(args)
    mapped = jax.shard_map(fn, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=False)
    program = line(jax.jit(mapped).trace(*args).jaxpr)
    found = list(sent(program))
    seconds = hidden(program, found, lambda c: long * PRODUCT, MACHINE)
    return [(c.scope, s / PRODUCT) for c, s in zip(found, seconds, strict=True)]


def total(x, axis=GPU, name="here"):
    with jax.named_scope(name):
        return jax.lax.psum(x, axis)


def products(x, n):
    for _ in range(n):
        x = x @ x
    return x


def near(got, want):
    assert [name for name, _ in got] == [name for name, _ in want]
    for (_, a), (_, b) in zip(got, want, strict=True):
        assert a == pytest.approx(b, abs=20 * SMALL)


def test_before_and_after_is_not_beside():
    near(behind(lambda x: products(total(products(x, 3)), 4)), [("here", 0)])


def test_what_does_not_need_it_hides_it():
    near(behind(lambda x: total(x) + products(x, 3)), [("here", 3)])
    # Nor more than it is long.
    near(behind(lambda x: total(x) + products(x, 3), long=2), [("here", 2)])
    # Through wrappers, that are no borders.
    inner = jax.jit(jax.checkpoint(partial(products, n=3)))
    near(behind(lambda x: total(x) + jax.jit(lambda x: inner(x) @ x)(x)), [("here", 4)])


def test_each_product_hides_its_own_length_once_on_each_wire():
    def fn(x):
        two = total(x, name="first") + total(2 * x, name="second")
        return two + total(3 * x, NODE, "rail") + products(x, 3)

    near(behind(fn), [("first", 3), ("second", 0), ("rail", 3)])
    near(behind(fn, long=2), [("first", 2), ("second", 1), ("rail", 2)])


def test_the_first_leaves_to_others_what_only_they_can_use():
    def fn(x):
        y = products(x, 2)  # beside both
        first = total(x, name="first")
        second = total(x, name="second")
        z = first @ first  # beside the second alone
        return y + z + second

    near(behind(fn, long=2), [("first", 2), ("second", 1)])
    near(behind(lambda x: fn(x) + products(x @ x, 0), long=2), [("first", 2), ("second", 2)])


def test_a_loop_is_one_piece_of_work_and_its_turn_a_line():
    def body(x, _):
        return total(x, name="inside") + products(x, 2), None

    def fn(x):
        y = jax.lax.scan(body, x, length=5)[0]
        return total(x, name="beside") + y

    # In each turn two products hide the inner one; nothing of them is left for the outer.
    near(behind(fn), [("inside", 2), ("beside", 0)])
    # A shorter one leaves a product and a half a turn.
    near(behind(fn, long=0.5), [("inside", 0.5), ("beside", 0.5)])

    def wide(x):
        with jax.named_scope("wide"):
            y = jax.lax.psum(x, GPU)
        return y + jax.lax.scan(lambda x, _: (products(x, 2), None), x, length=5)[0]

    near(behind(wide), [("wide", 10)])


def test_of_branches_the_longest_or_the_one_that_even_routing_takes():
    def fn(x, branches):
        return total(x) + jax.lax.switch(jnp.int32(x[0, 0]), branches, x)

    quiet = [partial(products, n=n) for n in (1, 4, 2)]
    near(behind(partial(fn, branches=quiet)), [("here", 4)])

    def exchange(n):
        # Of growing size, as an exchange's capacities.
        return lambda x: products(x, n) + total(jnp.tile(x, (n, 1)), name=f"e{n}")[:N] @ x

    sending = [exchange(n) for n in (1, 2, 3)]
    got = dict(behind(partial(fn, branches=sending)))
    # In a branch its own products; what it leaves is none, for the others are not independent.
    assert got.keys() == {"here", "e1", "e2", "e3"}
    for n in (1, 2, 3):
        assert got[f"e{n}"] == pytest.approx(n, abs=20 * SMALL)
    assert got["here"] == pytest.approx(1, abs=20 * SMALL)  # the last product of the smallest


def test_rooflines():
    """Bytes decide where there are few FLOPs; a fused chain reads and writes once."""
    size = (64 * N, N)

    def fn(x, big):
        chain = jnp.exp(jnp.sin(big) * 2 + 1)
        return total(x) + chain.sum()

    ((_, got),) = behind(fn, (N, N), size, long=1e9)
    read = 4 * math.prod(size) / MI300X.hbm_reached / PRODUCT
    assert read <= got < 1.01 * read + SMALL  # read once; the sum is one number


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_the_most_that_can_be_given(seed):
    """Beside a linear program's optimum, and by its own rules, in random cases."""
    from scipy.optimize import linprog

    rng = np.random.default_rng(seed)
    n, rooms = int(rng.integers(1, 6)), {}
    for mask in rng.choice(2**n, size=min(2**n, 6), replace=False):
        rooms[int(mask)] = float(rng.choice([0, rng.uniform(0, 3)]))
    needs = [float(rng.choice([0, rng.uniform(0, 3)])) for _ in range(n)]
    met = share_out(needs, rooms)
    assert all(0 <= m <= need + 1e-9 for m, need in zip(met, needs, strict=True))
    pairs = [(i, mask) for i, mask in itertools.product(range(n), rooms) if mask >> i & 1]
    most = 0.0
    if pairs:
        at_most = [[float(i == j) for i, _ in pairs] for j in range(n)]
        at_most += [[float(mask == room) for _, mask in pairs] for room in rooms]
        limits = needs + list(rooms.values())
        most = -linprog([-1.0] * len(pairs), A_ub=at_most, b_ub=limits).fun
    assert sum(met) == pytest.approx(most, abs=1e-6)
