"""Host batches onto the devices of this process."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding


class Feed:
    """Which rows of a global batch `[B, S]` this process holds, and how they reach its devices."""

    def __init__(self, sharding: NamedSharding, batch: int, sequence: int):
        self.sharding, self.shape = sharding, (batch, sequence)
        places = sharding.addressable_devices_indices_map(self.shape).values()
        rows = [range(batch)[rows] for rows, _ in places]
        self.rows = np.unique(np.concatenate([np.asarray(r) for r in rows]))
        self._at = {row: i for i, row in enumerate(self.rows.tolist())}

    def put(self, local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """`local` holds `self.rows` of the batch, in that order; the result is global."""

        def one(x):
            def shard(index):
                rows = [self._at[r] for r in range(self.shape[0])[index[0]]]
                return x[rows][:, index[1]]

            return jax.make_array_from_callback(self.shape, self.sharding, shard)

        return {name: one(x) for name, x in local.items()}
