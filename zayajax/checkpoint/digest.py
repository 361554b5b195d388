"""A number for the bits of each array, the same on any mesh: did what was saved come back?

    digest(x) = sum over elements of bits(x[i]) * w(i)   mod 2^32,   w(i) odd, from the global index

Integer sums are exact in any order, so that each device adds up its own shard and no device waits
for another. An odd w has an inverse mod 2^32: a change of any one element, so of any one bit,
always changes the sum; other changes stay hidden with a chance of about 2^-32. This is against bit
flips, lost files and shards in the wrong place, not against somebody who means to deceive.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from zayajax.checkpoint.tree import numbers

GOLDEN = 0x9E3779B9  # 2^32 / golden ratio, odd: parts the dimensions (Knuth, TAOCP 3, 6.4)


def partial_digests(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """Sums over each device's own shards, `[devices, 2, arrays]` uint32: counting of equal shards
    the first, and counting each. One program without any collective. All arrays are on one mesh,
    or on one device."""
    mesh, specs = _places(arrays)
    return _program(mesh, specs)(tuple(arrays.values()))


def local_digests(names: Iterable[str], partial: jax.Array) -> dict[str, int]:
    """{name: sum over the shards of this process}; over all processes they add up to the digests
    mod 2^32."""
    return _local(names, partial, 0)


def total(parts: list[dict[str, int]]) -> dict[str, int]:
    """The sums over all processes."""
    return {name: sum(part[name] for part in parts) % 2**32 for name in parts[0]}


def compared(arrays: Mapping[str, jax.Array], saved: Mapping[str, int]) -> tuple[dict, dict]:
    """What is found in this process and what has to come out in all, each {name: sum}. Every copy
    of an array counts: a single wrong one is seen."""
    mesh, specs = _places(arrays)
    found = _local(arrays, partial_digests(arrays), 1)
    copies = [math.prod(mesh.shape[a] for a in _unused(mesh, spec)) for spec in specs]
    want = {n: saved[n] * c % 2**32 for n, c in zip(arrays, copies, strict=True)}
    return found, want


def differing(want: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    return [name for name in want if want[name] != found.get(name)]


def _local(names, partial: jax.Array, row: int) -> dict[str, int]:
    rows = [np.asarray(shard.data)[:, row] for shard in partial.addressable_shards]
    sums = np.concatenate(rows).sum(0, dtype=np.uint32)
    return dict(zip(names, sums.tolist(), strict=True))


def _places(arrays: Mapping[str, Any]) -> tuple[Mesh, tuple[P, ...]]:
    shardings = [x.sharding for x in arrays.values()]
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    if len(meshes) == 1 and all(isinstance(s, NamedSharding) for s in shardings):
        return meshes.pop(), tuple(_plain(s.spec) for s in shardings)
    devices = set().union(*(s.device_set for s in shardings))
    if len(devices) > 1:
        raise ValueError("arrays of one checkpoint have to be on one mesh, or on one device")
    return Mesh(np.array(list(devices)), ("device",)), (P(),) * len(shardings)


def _plain(spec: P) -> P:
    """One spelling for one sharding, so that one program serves what is saved and restored."""
    axes = list(spec)
    while axes and axes[-1] in (None, ()):
        axes.pop()
    return P(*axes)


@functools.cache
def _program(mesh: Mesh, specs: tuple[P, ...]):
    def digests(arrays):
        sums = [_digest(x, spec) for x, spec in zip(arrays, specs, strict=True)]
        first = [_is_first(mesh, spec) * x for x, spec in zip(sums, specs, strict=True)]
        return jnp.stack([jnp.stack(first), jnp.stack(sums)])[None]

    out = P(mesh.axis_names)
    mapped = jax.shard_map(digests, mesh=mesh, in_specs=(specs,), out_specs=out, check_vma=False)
    return jax.jit(mapped)


def _digest(x, spec: P):
    """Of one device's shard. A typed key and its data have the same."""
    x = numbers(x)
    weights = _weights(x.shape, [_axes(entry) for entry in spec])
    bits = _bits(x)
    if bits.ndim > weights.ndim:  # an element of several words
        weights = weights[..., None] + _mix(lax.iota(jnp.uint32, bits.shape[-1]))
    return jnp.sum(bits * (_mix(weights) | 1), dtype=jnp.uint32)


def _is_first(mesh: Mesh, spec: P):
    """1 on one of the devices that hold the same shard, 0 on the others."""
    first = [lax.axis_index(axis) == 0 for axis in _unused(mesh, spec)]
    return functools.reduce(jnp.logical_and, first, jnp.bool_(True)).astype(jnp.uint32)


def _unused(mesh: Mesh, spec: P) -> list[str]:
    used = {axis for entry in spec for axis in _axes(entry)}
    return [axis for axis in mesh.axis_names if axis not in used]


def _axes(entry) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _weights(shape: tuple[int, ...], axes: list[tuple[str, ...]]):
    """From the global index of each element, dimension by dimension: an array may have more than
    2^32 elements, a dimension may not."""
    weights = jnp.full((1,) * len(shape), len(shape), jnp.uint32)
    for dim, size in enumerate(shape):
        split = axes[dim] if dim < len(axes) else ()
        start = lax.axis_index(split).astype(jnp.uint32) * size if split else 0
        index = lax.iota(jnp.uint32, size) + jnp.uint32(start)
        part = _mix(index + jnp.uint32(GOLDEN * (dim + 1) % 2**32)) * jnp.uint32(GOLDEN)
        weights = weights + part.reshape([size if d == dim else 1 for d in range(len(shape))])
    return weights


def _mix(x):
    """Spreads each bit over the word; each of the three can be undone, so no two become one."""
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x2C1B3C6D)
    return x ^ (x >> 13)


def _bits(x):
    """uint32; with one more dimension where an element is wider."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    word = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(x, word).astype(jnp.uint32)
