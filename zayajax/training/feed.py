"""Host batches onto the devices of this process, and what processes ask of each other with them."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from zayajax.sequence import shard_order
from zayajax.training.step import REQUESTS


class Requests(NamedTuple):
    """What a process asks of all, with a batch; a step returns how many asked. Signals and clocks
    differ between processes, and what follows from them must not."""

    stop: int = 0  # save, and end
    save: int = 0
    failed: int = 0  # a checkpoint could not be written: all raise it together


class Feed:
    """Which rows of a global batch `[B, S]` this process holds, and how they reach its devices.

    `order` [S] is the place in its row of each column, None where every row is whole on a device.
    """

    def __init__(self, sharding: NamedSharding, batch: int, sequence: int):
        self.sharding, self.shape = sharding, (batch, sequence)
        R = _parts(sharding, 1)
        self.order = shard_order(sequence, R) if R > 1 else None
        places = sharding.addressable_devices_indices_map(self.shape).values()
        rows = [range(batch)[rows] for rows, _ in places]
        self.rows = np.unique(np.concatenate([np.asarray(r) for r in rows]))
        self._at = {row: i for i, row in enumerate(self.rows.tolist())}
        self._speaks = min(sharding.addressable_devices, key=lambda d: d.id)

    def put(
        self, local: Mapping[str, np.ndarray], requests: "Requests | None" = None
    ) -> dict[str, jax.Array]:
        """`local` holds `self.rows` of the batch, in that order, its columns in `self.order`; the
        result is global. `requests` are those of this process; all give some or none does."""

        def one(x):
            def shard(index):
                rows = [self._at[r] for r in range(self.shape[0])[index[0]]]
                return x[rows][:, index[1]]

            return jax.make_array_from_callback(self.shape, self.sharding, shard)

        batch = {name: one(x) for name, x in local.items()}
        return batch | ({} if requests is None else {REQUESTS: self._put(requests)})

    def _put(self, requests: "Requests") -> jax.Array:
        """Asked by one device of this process, so that sums count processes."""
        asked = np.asarray([requests], np.int32)
        shards = [
            jax.device_put(asked if d == self._speaks else np.zeros_like(asked), d)
            for d in sorted(self.sharding.addressable_devices, key=lambda d: d.id)
        ]
        return jax.make_array_from_single_device_arrays(
            requests_shape(self.sharding), self.sharding, shards
        )


def requests_shape(sharding: NamedSharding) -> tuple[int, int]:
    """Of the requests in a batch: sharded like its rows, [1, N] on each device."""
    return _parts(sharding, 0), _parts(sharding, 1) * len(Requests._fields)


def _parts(sharding: NamedSharding, dim: int) -> int:
    axes = (sharding.spec[dim] if dim < len(sharding.spec) else None) or ()
    return math.prod(sharding.mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes))
