"""Host batches onto the devices of this process."""

import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding

from zayajax.sequence import shard_order


class Feed:
    """Which rows of a global batch `[B, S]` this process holds, and how they reach its devices.

    `order` [S] is the place in its row of each column, None where every row is whole on a device.
    """

    def __init__(self, sharding: NamedSharding, batch: int, sequence: int):
        self.sharding, self.shape = sharding, (batch, sequence)
        axes = sharding.spec[1] or ()
        R = math.prod(sharding.mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes))
        self.order = shard_order(sequence, R) if R > 1 else None
        places = sharding.addressable_devices_indices_map(self.shape).values()
        rows = [range(batch)[rows] for rows, _ in places]
        self.rows = np.unique(np.concatenate([np.asarray(r) for r in rows]))
        self._at = {row: i for i, row in enumerate(self.rows.tolist())}

    def put(self, local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """`local` holds `self.rows` of the batch, in that order, its columns in `self.order`; the
        result is global."""

        def one(x):
            def shard(index):
                rows = [self._at[r] for r in range(self.shape[0])[index[0]]]
                return x[rows][:, index[1]]

            return jax.make_array_from_callback(self.shape, self.sharding, shard)

        return {name: one(x) for name, x in local.items()}
