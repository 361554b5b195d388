"""The memory that a step takes on each GPU, by kind.

Weights and moments are exact, and so are gathered copies and gradients: their shapes follow from
the state and the mesh. Activations are what the traced program's temporaries (`memory`) take beside
them while a micro-batch is computed: an estimate from below, since XLA's heap has gaps. Beside XLA
for CPU (jax 0.10.2, eleven small float32 steps on 8 emulated devices) `total` was 0.76 to 0.98 of
arguments and temporaries.
"""

import dataclasses
import math

import jax

from zayajax.layout import Layout
from zayajax.machine import Machine
from zayajax.mesh import is_param, places
from zayajax.planning.traced.memory import timeline
from zayajax.planning.traced.program import Line
from zayajax.settings import Config

# Of the HBM, what a step may take by this estimate. XLA for GPUs took 3 to 7 GB more in twelve
# compiled steps (tests/planning/compiled_for_gpu.json); libraries of collectives take some as well.
USABLE = 0.8
KINDS = {
    "weights": "as stored, split over all GPUs",
    "moments": "of the optimizer, stored likewise",
    "gathered": "weights as the model computes with them",
    "gradients": "sums over micro-batches, and those of one micro-batch",
    "activations": "what a micro-batch keeps and makes beside these",
    "optimizer": "gradients to their shards, and the update, when all but the state is gone",
}


@dataclasses.dataclass(frozen=True)
class Peaks:
    """The most that temporaries take in each part of a training step, bytes."""

    backward: int  # gather, forward and backward passes
    scatter: int  # gradients to their shards
    update: int  # norm and optimizer


def peaks(program: Line) -> Peaks:
    """Of a training step. Any other program is all forward and backward pass."""
    taken = timeline(program)

    def first(scope: str, default: int) -> int:
        found = (i for i, op in enumerate(program.ops) if scope in op.around.path.split("/"))
        return next(found, default)

    norm = first("norm", len(taken))
    scatter = min(first("scatter", norm), norm)
    parts = taken[:scatter], taken[scatter:norm], taken[norm:]
    return Peaks(*(max(part, default=0) for part in parts))


def fits(total: float, machine: Machine) -> bool:
    return total <= USABLE * machine.hbm


def on_device(tree) -> int:
    """Bytes of an abstract tree with shardings on one device."""
    leaves = jax.tree.leaves(tree)
    shapes = (x.shape if x.sharding is None else x.sharding.shard_shape(x.shape) for x in leaves)
    return sum(math.prod(s) * x.dtype.itemsize for s, x in zip(shapes, leaves, strict=True))


@dataclasses.dataclass(frozen=True)
class Usable:
    """The weights that a device computes with."""

    gathered: int  # bytes of the copies that are made of stored shards; of zero 3, one layer's too
    numbers: int  # of the gradient of one device, before it is scattered
    own: int  # bytes of that gradient as the backward pass makes it


def usable(params, config: Config, mesh, layout: Layout) -> Usable:
    """From the abstract parameters with their shardings."""
    where = places(params, mesh, layout, config.mesh.zero)
    compute = jax.numpy.dtype(config.train.compute_dtype)
    gathered = layer = numbers = own = 0
    leaves = (jax.tree.leaves(t, is_leaf=is_param) for t in (params, where))
    for v, place in zip(*leaves, strict=True):
        place = place.get_value()
        value = v.get_value()
        stored = math.prod(value.sharding.shard_shape(value.shape))
        parts = math.prod(mesh.shape[a] for _, axes in place.gathered for a in axes)
        whole = stored * parts
        dtype = value.dtype if v.get_metadata().get("keep") else compute
        copied = parts > 1 or dtype != value.dtype
        if place.in_layer:
            layer += whole // v.shape[0] * dtype.itemsize
            numbers, own = numbers + stored, own + stored * value.dtype.itemsize
        else:
            gathered += whole * dtype.itemsize if copied else 0
            numbers, own = numbers + whole, own + whole * dtype.itemsize
    return Usable(gathered + layer, numbers, own)


def footprint(state, batch, config: Config, mesh, layout: Layout, program: Line) -> dict:
    """Bytes on one device by kind, what they come to at once, and of which part of the step.

    Args:
      state: abstract, with shardings. All of it stays on the device, evaluation or not.
      batch: what the step takes beside it, likewise.
      program: the step's.

    The kinds do not add up to `total`: the optimizer works when gathered copies and activations
    are gone. `total` is weights, moments and the batch, and the larger of `phases`.
    """
    weights = on_device(state.params)
    moments = on_device((state.step, state.opt_state, state.guard))
    use, most = usable(state.params, config, mesh, layout), peaks(program)
    gradients = 0
    if most.update:
        # A loop of one turn is none: nothing is summed, and the gradients are those of the turn.
        gradients = use.own + (4 * use.numbers if config.train.micro_batches > 1 else 0)
    phases = dataclasses.asdict(most)
    inputs = on_device(batch)
    return {
        "weights": weights,
        "moments": moments,
        "gathered": use.gathered,
        "gradients": gradients,
        "activations": most.backward - use.gathered - gradients + inputs,
        "optimizer": max(most.scatter, most.update),
        "phases": phases,
        "total": weights + moments + inputs + max(phases.values()),
    }
