"""States to save: arrays of all kinds that a run has, sharded as a run's are, of random bits."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from zayajax.mesh import make_mesh

# name: (shape, dtype, where it is stored)
ARRAYS = {  # shards of experts have over 1 KiB: less lies in one block with all metadata
    "params.experts": ((8, 6, 64), "float32", P("gpu", None, "node")),
    "params.dense": ((48, 5), "bfloat16", P(("gpu", "node"))),
    "params.scale": ((7,), "float32", P()),
    "moments.experts": ((8, 6, 64), "float32", P("gpu", None, "node")),
    "counts": ((2, 9), "int32", P()),
    "step": ((), "int32", P()),
}
KEYS = {"rng": ((), "threefry2x32"), "keys": ((8,), "rbg")}


def values(seed: int) -> dict[str, np.ndarray]:
    """Random bits: NaNs, infinities and denormals too."""
    rng = np.random.default_rng(seed)

    def one(shape, dtype):
        size = int(np.prod(shape, dtype=int)) * jnp.dtype(dtype).itemsize
        return np.frombuffer(rng.bytes(size), jnp.dtype(dtype)).reshape(shape)

    found = {name: one(shape, dtype) for name, (shape, dtype, _) in ARRAYS.items()}
    for name, (shape, impl) in KEYS.items():
        words = jax.eval_shape(lambda impl=impl: jax.random.key_data(jax.random.key(0, impl=impl)))
        found[name] = one((*shape, *words.shape), "uint32")
    return found


def like(mesh_) -> dict[str, jax.ShapeDtypeStruct]:
    def abstract(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh_, spec))

    found = {name: abstract(shape, jnp.dtype(d), spec) for name, (shape, d, spec) in ARRAYS.items()}
    for name, (shape, impl) in KEYS.items():
        dtype = jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype
        found[name] = abstract(shape, dtype, P("gpu") if shape else P())
    return found


def state(mesh_, seed: int) -> dict[str, jax.Array]:
    want, found = values(seed), {}
    for name, x in like(mesh_).items():
        data = want[name]
        put = NamedSharding(mesh_, x.sharding.spec)
        array = jax.make_array_from_callback(data.shape, put, data.__getitem__)
        if name in KEYS:
            array = jax.random.wrap_key_data(array, impl=KEYS[name][1])
        found[name] = array
    return found


def assert_holds(found, mesh_, seed: int):
    """Every shard of this process has the bytes that belong there."""
    want, shardings = values(seed), like(mesh_)
    assert found.keys() == want.keys()
    for name, x in found.items():
        assert x.dtype == shardings[name].dtype, name
        assert x.sharding.is_equivalent_to(shardings[name].sharding, x.ndim), name
        x = jax.random.key_data(x) if name in KEYS else x
        for shard in x.addressable_shards:
            assert np.asarray(shard.data).tobytes() == want[name][shard.index].tobytes(), name


def mesh(shape: str):
    """ "2x4": nodes and GPUs."""
    return make_mesh(*map(int, shape.split("x")), "one host")


def save(saved, shape: str, step: int):
    assert saved.save(step, state(mesh(shape), step), {}) >= 0
    saved.wait()


def assert_restores(saved, shape: str, step: int, say=print):
    found, record = saved.restore(like(mesh(shape)), say=say)
    assert record["step"] == step and sorted(record["mesh"]) == ["gpu", "node"]
    assert_holds(found, mesh(shape), step)
