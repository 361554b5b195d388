"""A digest is of the bits and their places, not of the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import patterns
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

from zayajax.checkpoint.digest import compared, differing, local_digests, partial_digests, total


def digests(arrays):
    return total([local_digests(arrays, partial_digests(arrays))])


def test_the_mesh_does_not_matter():
    want = digests(patterns.state(patterns.mesh("1x1"), 3))
    for shape in ("1x8", "2x4", "8x1"):
        assert digests(patterns.state(patterns.mesh(shape), 3)) == want
    device = jax.devices()[5]  # and without any mesh
    alone = {
        n: jax.device_put(x, device) for n, x in patterns.state(patterns.mesh("1x8"), 3).items()
    }
    assert digests(alone) == want
    assert not set(want.values()) & set(digests(patterns.state(patterns.mesh("1x1"), 4)).values())


def test_parts_of_processes_add_up():
    arrays = patterns.state(patterns.mesh("2x4"), 0)
    sums = np.asarray(partial_digests(arrays))[:, 0].astype(np.uint64)
    parts = [dict(zip(arrays, row.tolist(), strict=True)) for row in sums]
    assert total(parts) == digests(arrays)


DTYPES = ("float32", "bfloat16", "float16", "int32", "uint32", "int8", "bool", "float8_e4m3fn")


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_is_seen(dtype):
    mesh = patterns.mesh("2x4")
    dtype = jnp.dtype(dtype)
    put = NamedSharding(mesh, P(("gpu", "node"), None))
    rng = np.random.default_rng(0)
    boolean = dtype.name == "bool"
    raw = rng.integers(0, 2 if boolean else 256, (16, 4 * dtype.itemsize), np.uint8)

    def of(raw):
        return digests({"x": jax.device_put(raw.view(dtype), put)})

    want, bits = of(raw), raw.size if boolean else 8 * raw.size
    for bit in rng.choice(bits, 24, replace=False):
        flipped = raw.copy()
        at, mask = (bit, 1) if boolean else (bit // 8, 1 << (bit % 8))
        flipped.flat[at] ^= mask
        assert differing(want, of(flipped)) == ["x"], bit
    assert of(raw) == want


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_places_matter(data):
    """Equal numbers elsewhere: two that change places, a transpose, a row that moves by one."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x = rng.integers(0, 2**32, (8, 8), dtype=np.uint32)
    i, j = data.draw(st.lists(st.integers(0, 63), min_size=2, max_size=2, unique=True))
    swapped = x.copy()
    swapped.flat[[i, j]] = swapped.flat[[j, i]]
    put = NamedSharding(patterns.mesh("1x8"), P("gpu"))
    found = {n: jax.device_put(a, put) for n, a in (("x", x), ("s", swapped), ("t", x.T))}
    found |= {"r": jax.device_put(np.roll(x, 1, 0), put)}
    assert len(set(digests(found).values())) == 4


def test_arrays_of_several_meshes_are_refused():
    x = np.zeros(8)
    two = {
        name: jax.device_put(x, NamedSharding(patterns.mesh(name), P("gpu")))
        for name in ("1x8", "2x4")
    }
    with pytest.raises(ValueError, match="on one mesh, or on one device"):
        partial_digests(two)


def test_a_wrong_copy_of_many_is_seen():
    arrays = patterns.state(patterns.mesh("2x4"), 0)
    saved = digests(arrays)
    found, want = compared(arrays, saved)
    assert differing(want, found) == []
    for name in ("params.scale", "counts", "params.experts"):
        x = arrays[name]
        shards = [np.array(s.data) for s in x.addressable_shards]
        shards[5].view(np.uint8).flat[1] ^= 16
        put = [
            jax.device_put(a, s.device) for a, s in zip(shards, x.addressable_shards, strict=True)
        ]
        spoilt = jax.make_array_from_single_device_arrays(x.shape, x.sharding, put)
        found, want = compared(arrays | {name: spoilt}, saved)
        assert differing(want, found) == [name]
