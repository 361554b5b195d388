"""A tree as named arrays: names that outlive the classes behind them, and typed keys as numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

from zayajax.errors import UserError
from zayajax.mesh import is_param

PARAMS = "params."


def to_arrays(tree) -> dict[str, Any]:
    """A tree as {"params.layers.attn.q": array}."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_param):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        named[name] = leaf.get_value() if is_param(leaf) else leaf
    return named


def from_arrays(like, arrays: Mapping[str, Any]):
    """The inverse of `to_arrays`, in the structure of `like`."""

    def one(path, leaf):
        array = arrays[jax.tree_util.keystr(path, simple=True, separator=".")]
        return leaf.replace(array) if is_param(leaf) else array

    return jax.tree_util.tree_map_with_path(one, like, is_leaf=is_param)


def split(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{"weights": those of the model, under the names they have in it, "rest": all others}."""
    weights = {n.removeprefix(PARAMS): x for n, x in arrays.items() if n.startswith(PARAMS)}
    return {
        "weights": weights,
        "rest": {n: x for n, x in arrays.items() if not n.startswith(PARAMS)},
    }


def joined(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The inverse of `split`."""
    return {PARAMS + name: x for name, x in parts["weights"].items()} | parts["rest"]


def shapes(arrays: Mapping[str, Any]) -> dict[str, str]:
    """{name: "float32[8, 16]"}; a typed key's dtype names its implementation: "key<fry>[]"."""
    return {name: f"{x.dtype.name}{list(x.shape)}" for name, x in arrays.items()}


def require_same(saved: Mapping[str, str], live: Mapping[str, str], source: Path):
    """UserError naming the first arrays that differ between a checkpoint and the config."""
    if saved == live:
        return
    differing = [n for n in sorted({*saved, *live}) if saved.get(n) != live.get(n)]
    named = "; ".join(
        f"{n} is {saved.get(n, 'missing')} there and {live.get(n, 'not in this model')} here"
        for n in differing[:3]
    )
    more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
    raise UserError(f"{source}: is of another model: {named}{more}")


def is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def numbers(x):
    """A typed key's data, which can be written; any other array as it is."""
    return jax.random.key_data(x) if is_key(x) else x


def like_numbers(x) -> jax.ShapeDtypeStruct:
    """What `numbers` makes of such an array, with its sharding; without one, the default device."""
    sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    if not is_key(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    made = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
    if isinstance(sharding, NamedSharding):  # the words of a key are never split
        whole = [None] * (len(x.shape) - len(sharding.spec))
        sharding = NamedSharding(sharding.mesh, P(*sharding.spec, *whole, None))
    return jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=sharding)


def from_numbers(like, x):
    """The inverse of `numbers`: a typed key of the implementation of `like`."""
    if not is_key(like):
        return x
    found = []  # an abstract key does not say which it is, a traced one does
    abstract = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), abstract)
    return jax.random.wrap_key_data(x, impl=found[0])
