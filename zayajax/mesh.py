"""The machine as a mesh, and the collectives on weights and gradients.

All of these are written here and follow the annotation `nnx.Param(x, axes=(...))` and the table in
`zayajax.layout`. The functions run inside the one `jax.shard_map` of the step, or without a mesh:
under LOCAL all axes are empty, and nothing communicates.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec as P

from zayajax.devices import arrange, seats
from zayajax.errors import UserError
from zayajax.launch import flags
from zayajax.layout import GPU, NODE, STORED, WORLD, Layout


def emulate(devices: int) -> None:
    """Lets a CPU stand for `devices` GPUs. Only before JAX has started; no effect on a GPU.

    None either where several processes have joined, each with devices of its own.
    """
    if jax.distributed.is_initialized():
        return
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:  # JAX has started: what it started with has to do
        if jax.device_count() < devices:
            raise UserError(
                f"JAX already runs with {jax.device_count()} of the {devices} devices that the "
                "config asks for (mesh.nodes * mesh.gpus); restart Python and train before any "
                "other use of JAX"
            ) from None
        return
    if not flags.prepared(os.environ):
        flags.prepare(os.environ, platform=flags.CPU)


def make_mesh(nodes: int, gpus: int, host: str | None = None) -> Mesh:
    """Mesh of shape {node: nodes, gpu: gpus}: rows are hosts, columns are rails.

    `gpus` is the whole node or 1; on a CPU any. With several processes, each has to call it.
    `host` stands for this host's name: processes on one machine can so stand for several nodes.

    Raises UserError where the machine has no such mesh, or would leave most of its links idle.
    """
    devices = jax.devices()
    array = arrange(devices, seats(devices, host), nodes, gpus)
    return Mesh(array, WORLD, axis_types=(AxisType.Auto,) * 2)


def abstract_mesh(nodes: int, gpus: int) -> AbstractMesh:
    """A mesh of that shape without devices: enough to trace what would run on it."""
    return AbstractMesh((nodes, gpus), WORLD, axis_types=(AxisType.Auto,) * 2)


def is_param(x) -> bool:
    return isinstance(x, nnx.Variable)


def map_params(fn: Callable, tree, *rest, other: Callable = lambda x: x):
    """`jax.tree.map` over whole parameters; leaves that are none go through `other`."""

    def one(x, *more):
        return fn(x, *more) if is_param(x) else other(x)

    return jax.tree.map(one, tree, *rest, is_leaf=is_param)


def by_path(tree) -> dict[str, Any]:
    """A tree of parameters as {"layers.attn.q": parameter}, in tree order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_param)
    return {jax.tree_util.keystr(path, simple=True, separator="."): v for path, v in leaves}


def _stored_axes(v: nnx.Variable, sizes: Mapping[str, int]) -> tuple:
    """The mesh axes of each dimension at rest, () where it is whole. Needs the global shape."""
    # Stacked layers add leading dimensions that the annotation does not know: they stay whole.
    names = (None,) * (v.ndim - len(v.axes)) + tuple(v.axes)

    def axes(name, size):
        wanted = tuple(a for a in STORED.get(name, ()) if a in sizes)
        while wanted and size % math.prod(sizes[a] for a in wanted):
            wanted = wanted[:-1]
        return wanted

    return tuple(map(axes, names, v.shape))


def stored_axes(params, mesh: Mesh | None) -> dict[str, tuple]:
    """{path: the mesh axes of each dimension at rest}. Global shapes, abstract will do."""
    sizes = dict(mesh.shape) if mesh is not None else {}
    return {path: _stored_axes(v, sizes) for path, v in by_path(params).items()}


def _spec(v, sizes):
    return P(*(axes or None for axes in _stored_axes(v, sizes)))


def stored_specs(tree, mesh: Mesh):
    """The PartitionSpec of every leaf at rest: parameters and optimizer moments alike."""
    sizes = dict(mesh.shape)
    return map_params(lambda v: v.replace(_spec(v, sizes)), tree, other=lambda _: P())


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one parameter lives and how it becomes usable. Dimensions count from the end."""

    gathered: tuple[tuple[int, tuple[str, ...]], ...] = ()  # (dimension, mesh axes)
    split: tuple[str, ...] = ()  # axes that split it at rest
    repeated: tuple[str, ...] = ()  # token axes that repeat it: its gradient is summed over them
    in_layer: bool = False  # gathered inside the loop over layers (zero 3)


def places(params, mesh: Mesh | None, layout: Layout, zero: int = 1):
    """A tree of `Place`, one for each parameter; `params` has global shapes, abstract will do."""
    sizes = dict(mesh.shape) if mesh is not None else {}

    def place(path: str, v: nnx.Variable) -> Place:
        axes = _stored_axes(v, sizes)
        split = tuple(a for dim in axes for a in dim)
        repeated = tuple(a for a in layout.tokens if a not in split)
        names = (None,) * (v.ndim - len(v.axes)) + tuple(v.axes)
        gathered = tuple(
            (d - v.ndim, dim)
            for d, (name, dim) in enumerate(zip(names, axes, strict=True))
            if dim and layout.axes and not (name == "expert" and layout.expert)
        )
        in_layer = zero == 3 and path.startswith("layers.") and bool(gathered)
        return Place(gathered, split, repeated, in_layer)

    named = by_path(params)
    leaves = [v.replace(place(path, v)) for path, v in named.items()]
    structure = jax.tree.structure(params, is_leaf=is_param)
    return jax.tree.unflatten(structure, leaves)


@jax.named_scope("gather")
def gather(tree, where, dtype, *, in_layer: bool = False):
    """Stored shards to the weights that the model computes with, in the compute dtype.

    Takes the parameters whose `Place.in_layer` is the one asked for and leaves the others alone.
    Those annotated `keep=True` stay in the dtype in which they are stored.
    """

    def one(v, place):
        place = place.get_value()
        if place.in_layer != in_layer:
            return v
        x = v[...] if v.get_metadata().get("keep") else v[...].astype(dtype)
        for dim, axes in place.gathered:
            for axis in reversed(axes):  # one message a level: each spans a node or a rail
                x = jax.lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True)
        # A repeated value must become this device's own: the transpose of each use of a shared one
        # sums its gradient over the mesh, inside the loops.
        return v.replace(jax.lax.pcast(x, place.repeated, to="varying") if place.repeated else x)

    return map_params(one, tree, where)


@jax.named_scope("scatter")
def scatter(grads, where, dtype=jnp.float32, *, in_layer: bool = False):
    """The transpose of `gather`: gradients of each device to stored shards, in float32.

    They travel in `dtype`. First inside the node, then along the rail; whatever is whole on every
    device is summed together, in one message a level.
    """
    leaves, structure = jax.tree.flatten(grads, is_leaf=is_param)
    at = [p.get_value() for p in jax.tree.leaves(where, is_leaf=is_param)]
    here = [i for i, p in enumerate(at) if p.in_layer == in_layer]
    xs = {i: leaves[i][...].astype(dtype) for i in here}
    for axis in (GPU, NODE):
        for i in here:
            for dim, axes in at[i].gathered:
                if axis in axes:
                    dim = dim % xs[i].ndim
                    xs[i] = jax.lax.psum_scatter(xs[i], axis, scatter_dimension=dim, tiled=True)
        shared = [i for i in here if axis in at[i].repeated]
        for split in {at[i].split: None for i in shared}:
            together = {i: xs[i] for i in shared if at[i].split == split}
            xs |= _psum_together(together, axis)
    for i, x in xs.items():
        leaves[i] = leaves[i].replace(x.astype(jnp.float32))
    return jax.tree.unflatten(structure, leaves)


def _psum_together(arrays: dict, axis: str) -> dict:
    """Sums of many small arrays as one message: dozens of messages cost more than their bytes."""
    total = jax.lax.psum(jnp.concatenate([x.reshape(-1) for x in arrays.values()]), axis)
    ends = list(itertools.accumulate(x.size for x in arrays.values()))
    parts = jnp.split(total, ends[:-1])
    return {i: part.reshape(x.shape) for (i, x), part in zip(arrays.items(), parts, strict=True)}


def layer_gather(where, dtype, reduce_dtype) -> Callable:
    """`gather` for one layer inside the loop (zero 3), whose gradient is `scatter`."""

    @jax.custom_vjp
    def fetch(block):
        return gather(block, where, dtype, in_layer=True)

    def forward(block):
        return fetch(block), block

    def backward(block, grads):
        grads = scatter(grads, where, reduce_dtype, in_layer=True)
        return (map_params(lambda g, v: g.replace(g[...].astype(v[...].dtype)), grads, block),)

    fetch.defvjp(forward, backward)
    return fetch


@jax.named_scope("norm")
def global_norm(tree, where):
    """Norm of a stored tree: squares are summed over the axes that split a leaf, no others."""
    squares = {}
    leaves = (jax.tree.leaves(t, is_leaf=is_param) for t in (tree, where))
    for v, place in zip(*leaves, strict=True):
        split = place.get_value().split
        squares[split] = squares.get(split, 0) + jnp.sum(v[...].astype(jnp.float32) ** 2)
    return jnp.sqrt(sum(total(s, axes) for axes, s in squares.items()))


def total(x, axes: tuple[str, ...]):
    """Sum over mesh axes: inside the node, then along the rail."""
    for axis in sorted(axes, key=(GPU, NODE).index):
        x = jax.lax.psum(x, axis)
    return x
