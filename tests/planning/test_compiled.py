"""Compiled text must be read right, and what automatic sharding adds must be seen."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from zayajax.layout import GPU, NODE, WORLD
from zayajax.planning.traced.compiled import groups, offences
from zayajax.planning.traced.program import line
from zayajax.planning.traced.trace import sent

NODES, GPUS = 2, 4
IDS = np.arange(NODES * GPUS).reshape(NODES, GPUS)
BY = {"node": IDS, "rail": IDS.T, "world": IDS.reshape(1, -1)}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}", BY["node"]),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", BY["rail"]),
        ("replica_groups={}, to_apply=%add", BY["world"]),
        ("replica_groups=[2,4]<=[8], use_global", BY["node"]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", BY["rail"]),
        ("replica_groups=[4,2]<=[8]", IDS.reshape(4, 2)),
        ("replica_groups=mesh['node'=2,'gpu'=4] {'gpu'}, metadata={}", BY["node"]),
        ("replica_groups=mesh['node'=2,'gpu'=4] {'node'}", BY["rail"]),
        ("replica_groups=@mesh['node'=2,'gpu'=4] {'node','gpu'}", BY["world"]),
        ("replica_groups=mesh['node'=2,'gpu'=4] {'gpu':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['node'=2,'gpu'=4] {'gpu':(2)2}", IDS.reshape(4, 2)),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", BY["node"]),
        ("source_target_pairs={{0,1},{1,0}}, metadata={}", [[0, 1]]),
    ],
)
def test_groups_in_every_form(text, want):
    got = groups(f"%x = f32[8] all-reduce(%y), channel_id=1, {text}", NODES, GPUS)
    assert {frozenset(g) for g in got} == {
        frozenset(divmod(int(i), GPUS) for i in g) for g in np.asarray(want)
    }


def test_an_unknown_form_is_no_pass():
    with pytest.raises(ValueError, match="unknown form"):
        groups("%x = f32[8] all-reduce(%y), replica_groups=everyone", NODES, GPUS)


def mesh():
    devices = np.reshape(jax.devices()[: NODES * GPUS], (NODES, GPUS))
    return Mesh(devices, WORLD, axis_types=(AxisType.Auto,) * 2)


SPLIT, WHOLE = P(WORLD), P()


def found(fn, *specs, out=SPLIT, mapped=True):
    """Offences of a function of arrays `[16, 16]`, inside one `shard_map` or left to XLA."""
    specs = specs or (SPLIT,)
    if mapped:
        fn = jax.shard_map(fn, mesh=mesh(), in_specs=specs, out_specs=out, check_vma=False)
    at = partial(jax.tree.map, partial(NamedSharding, mesh()))
    jitted = jax.jit(fn, in_shardings=at(specs), out_shardings=at(out))
    traced = jitted.trace(*[jax.ShapeDtypeStruct((16, 16), "float32")] * len(specs))
    text = traced.lower().compile().as_text()
    return offences(text, list(sent(line(traced.jaxpr))), NODES, GPUS)


def test_what_is_written_is_no_offence():
    @jax.named_scope("outer")
    def fn(x):
        with jax.named_scope("inner"):
            y = jax.lax.all_gather(x.astype("bfloat16"), GPU, tiled=True)
            y = jax.lax.psum_scatter(y, GPU, tiled=True)
        for name in WORLD:
            y = y + jax.lax.psum(y, name) + jax.lax.pmax(2 * y, name)
        y = jax.lax.all_to_all(jnp.stack([y] * GPUS), GPU, 0, 0).sum(0)
        y = jax.lax.scan(lambda y, _: (jax.lax.psum(y, NODE) / 2, None), y, length=3)[0]
        return jax.lax.ppermute(y, GPU, [(i, (i + 1) % GPUS) for i in range(GPUS)])

    assert found(fn) == []


def test_several_sums_made_one_are_no_offence():
    def fn(x):
        return sum(jax.lax.psum(x[:1] * i, GPU) for i in range(1, 6)) + x

    assert found(fn) == []


def test_a_sum_that_xla_infers_is_named():
    (wrong,) = found(lambda x: x.sum(), out=WHOLE, mapped=False)
    assert "all-reduce (world)" in wrong and "reduce_sum" in wrong and "inferred" in wrong


def test_a_product_of_split_matrices_is_named():
    """The mistake of automatic sharding: the gradient of a weight, summed where it is made."""

    def grad(w, x):
        return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    (wrong,) = found(grad, WHOLE, SPLIT, out=WHOLE, mapped=False)
    assert "dot_general" in wrong and "inferred" in wrong


def test_what_moves_between_two_shardings_is_named():
    wrong = found(lambda x: x * 2, SPLIT, out=P((GPU, NODE)), mapped=False)
    assert wrong and all("inferred" in w for w in wrong)


def test_an_inferred_one_beside_written_ones_is_named():
    def fn(x):
        y = jax.shard_map(
            lambda x: jax.lax.psum(x, GPU), mesh=mesh(), in_specs=SPLIT, out_specs=P(NODE)
        )(x)
        return y.sum(0)

    wrong = found(fn, out=WHOLE, mapped=False)
    assert wrong and all("psum" not in w for w in wrong)


def test_a_group_of_part_of_a_node_is_named():
    (wrong,) = found(lambda x: jax.lax.psum(x, GPU, axis_index_groups=[[0, 1], [2, 3]]))
    assert "all-reduce (partial)" in wrong and "part of a node" in wrong
    pairs = [(0, 1), (1, 0), (2, 3), (3, 2)]
    (wrong,) = found(lambda x: jax.lax.ppermute(x, GPU, pairs))
    assert "collective-permute (partial)" in wrong


def test_the_same_operation_elsewhere_is_none_of_the_program():
    """A name is not enough: operation, span and scope have to be those of a traced one."""
    text = (
        "%a = f32[8] all-reduce(%b), replica_groups={{0,1,2,3},{4,5,6,7}}, "
        'metadata={op_name="jit(run)/shard_map/norm/psum"}'
    )

    @jax.named_scope("scatter")
    def fn(x):
        return jax.lax.psum(x, GPU)

    mapped = jax.shard_map(fn, mesh=mesh(), in_specs=SPLIT, out_specs=P(NODE), check_vma=False)
    traced = jax.jit(mapped).trace(jax.ShapeDtypeStruct((16, 16), "float32"))
    written = list(sent(line(traced.jaxpr)))
    assert offences(text.replace("norm", "scatter"), written, NODES, GPUS) == []
    for change in ("norm", "norm/all_gather", "scatter/pmax", "scatter/psum/dot_general"):
        (wrong,) = offences(text.replace("norm/psum", change), written, NODES, GPUS)
        assert "inferred" in wrong
    (wrong,) = offences(text.partition("metadata")[0], written, NODES, GPUS)
    assert "without a name" in wrong


def test_groups_of_one_send_nothing():
    text = "%a = f32[8] all-reduce(%b), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
    assert offences(text, [], NODES, GPUS) == []
