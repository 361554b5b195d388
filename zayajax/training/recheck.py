"""Silent faults of a device: the same rows by two replicas must have the same loss.

A replica is what computes a loss from rows and its own copies of the weights: a node where there
are several, else a device of the node. Replica r computes the loss of its own rows, and that of the
rows of replica r + 1; so the rows of each are computed twice, and a replica that is wrong is in two
of these pairs. It costs two forward passes of one row a device, no gradients.

What it sees: wrong arithmetic, and copies that should be equal and are not (vectors, and whatever
else is whole on every device). What it does not: a wrong shard, which reaches all replicas alike;
and, between the devices of one node, experts, for both computations visit the same ones.

Shape letters: R replicas, B rows of this device, S positions of this device.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from zayajax.layout import GPU, LAYOUTS, NODE
from zayajax.mesh import total
from zayajax.settings import MeshConfig

# How far apart two losses of the same rows may lie, relative to their size, by compute dtype: as
# far as float32 sums in another order, or one rounding to bfloat16, whose epsilon is 2^-7. Between
# nodes both are the same program on the same rows; between the devices of a node an expert has its
# rows in another order. On CPU both were equal bit for bit (320 comparisons, on four meshes and in
# both dtypes); on a GPU that is not promised.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-8}


def replica_axis(mesh: MeshConfig) -> str | None:
    """The mesh axis along which replicas lie; None where there are no two."""
    batch = LAYOUTS[mesh.layout].batch
    for axis in (NODE, GPU):
        if axis in batch and mesh.ranks((axis,)) > 1:
            return axis
    return None


def why_not(mesh: MeshConfig) -> str | None:
    """A sentence where there is nothing to compare, else None."""
    if replica_axis(mesh) is not None:
        return None
    what = f"{mesh.nodes} x {mesh.gpus} devices in layout {mesh.layout!r}"
    return f"faults.recheck_every has no effect: {what} compute each row together, once"


def pair_losses(loss: Callable, batch: dict, axis: str):
    """Inside the `shard_map`: [R, 2], of replica r's own first row a device, and of the rows of
    replica r + 1; sums over the devices of a replica, the same on every device.

    Args:
      loss: rows -> the weighted sum of losses on this device.
      batch: arrays [B, S].
      axis: `replica_axis`.
    """
    R, r = jax.lax.axis_size(axis), jax.lax.axis_index(axis)

    @jax.named_scope("recheck")
    def both(x_BS):
        # Whole rows of small numbers: gathered from all, which is a collective, and one taken.
        all_R1S = jax.lax.all_gather(x_BS[:1], axis)
        return jnp.stack([x_BS[:1], all_R1S[(r + 1) % R]])

    # A loop, so that both are computed by the same instructions.
    _, losses_2 = jax.lax.scan(lambda _, rows: (None, loss(rows)), None, jax.tree.map(both, batch))
    with jax.named_scope("recheck"):
        return total(jnp.where(jnp.arange(R)[:, None] == r, losses_2, 0), (GPU, NODE))


def find_suspects(losses_R2, tolerance: float) -> list[int]:
    """Replicas that must have computed wrong, from `pair_losses`; none of a healthy machine.

    A replica whose both pairs disagree is wrong. Of a pair that disagrees alone, either may be, and
    both are named; so are both of two replicas, which make one pair twice.
    """
    losses_R2 = np.asarray(losses_R2, np.float64)
    R = len(losses_R2)
    # Of the rows of each: by itself, and by the replica before it.
    own_R, again_R = losses_R2[:, 0], np.roll(losses_R2[:, 1], 1)
    differ_R = ~np.isclose(own_R, again_R, rtol=tolerance, atol=0, equal_nan=True)
    both = {r for r in range(R) if differ_R[r] and differ_R[(r + 1) % R]}
    for r in np.flatnonzero(differ_R).tolist():
        if not both & {r, (r - 1) % R}:
            both |= {r, (r - 1) % R}
    return sorted(both)
