"""What one GPU has of a micro-batch."""

import dataclasses
import math

from zayajax import exchange
from zayajax.layout import LAYOUTS
from zayajax.settings import Config


@dataclasses.dataclass(frozen=True)
class Share:
    """Sizes on one GPU, of one micro-batch."""

    rows: int  # sequences of which it has a part
    tokens: int  # of all of them
    chunks: int  # parts of a row that follow each other: 1, or 2 of a split row
    spread: tuple[str, ...]  # mesh axes over which a row is split, of more than one GPU
    ranks: int  # GPUs that share a row
    experts: int  # of one layer
    group: int  # GPUs over which tokens travel to their experts
    rooms: tuple[int, ...]  # tokens from a GPU to another, of the exchange's capacities

    @property
    def slots(self) -> int:
        """Rows that its experts compute, in the smallest capacity: that of even routing."""
        return self.group * self.rooms[0]


def share(config: Config) -> Share:
    mesh, train, layout = config.mesh, config.train, LAYOUTS[config.mesh.layout]
    spread = tuple(a for a in layout.sequence if mesh.ranks((a,)) > 1)
    ranks = mesh.ranks(spread)
    rows = train.batch // (train.micro_batches * mesh.ranks(layout.batch))
    tokens = rows * (train.sequence // ranks)
    return Share(
        rows=rows,
        tokens=tokens,
        chunks=1 if ranks == 1 else 2,
        spread=spread,
        ranks=ranks,
        experts=config.model.experts // mesh.gpus,
        group=mesh.gpus,
        rooms=exchange.capacities(tokens, mesh.gpus),
    )


def keys_seen(config: Config) -> float:
    """Keys that a query sees on average, summed over the layers, in rows of one document: half of
    the row, or what the window leaves of it."""
    S, W = config.train.sequence, config.model.sliding_window
    full = (S + 1) / 2
    # Query i, from 1, sees min(i, W).
    windowed = full if W >= S else W - W * (W - 1) / (2 * S)
    sliding = len(config.model.sliding_layers)
    return (config.model.layers - sliding) * full + sliding * windowed


def dealt(matrices: int, sizes: tuple[int, ...]) -> int:
    """Matrices that one GPU works on when a stack is dealt over these mesh axes, one by one."""
    for n in sizes:
        matrices = math.ceil(matrices / n)
    return matrices
