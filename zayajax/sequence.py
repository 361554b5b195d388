"""A row that is spread over devices: which positions each has, and what a chunk needs of the one
before it.

A row is cut into 2R chunks for R ranks, and rank r has chunks r and 2R-1-r: under a causal mask the
early chunk of a rank has little to do and its late one much, and all ranks have the same. Arrays
are in *shard order*: the chunks of rank 0, then those of rank 1, and so on. Where a row is whole it
is one chunk.

Shape letters: B rows, S positions of this device, C channels, R ranks, n chunks of this device
(2, or 1 where the row is whole), c positions of a chunk, h positions of a halo.
"""

import jax
import jax.numpy as jnp
import numpy as np

from zayajax.exchange import all_gather, ranks


def shard_order(length: int, R: int) -> np.ndarray:
    """Place in the row of each position in shard order; `length` must divide by 2R, if R > 1."""
    if R == 1:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * R, -1)
    early, late = np.arange(R), np.arange(2 * R)[::-1][:R]
    return chunks[np.stack([early, late], axis=1)].reshape(-1)


def shift(x, n: int, axis: int = 1):
    """Each position takes the value n places before it on that axis; the first n take zero."""
    if n == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = n, 0
    return jax.lax.slice_in_dim(jnp.pad(x, widths), 0, x.shape[axis], axis=axis)


@jax.named_scope("halo")
def with_halo(arrays, h: int, axes: tuple[str, ...]):
    """Chunks behind the last h positions of the chunk before each in the row: `[B, n, h + c, ...]`.

    Zeros stand before the row's first position. The tails of all chunks of all arrays, of which
    each rank needs two, are one small all-gather: on point-to-point links that takes no longer than
    to send each to its neighbour. Needs h <= c.
    """
    if (R := ranks(axes)) == 1:
        return [jnp.pad(x, ((0, 0), (h, 0)) + ((0, 0),) * (x.ndim - 2))[:, None] for x in arrays]
    chunks = [x.reshape(x.shape[0], 2, -1, *x.shape[2:]) for x in arrays]
    tails = [x[:, :, x.shape[2] - h :].reshape(*x.shape[:2], h, -1) for x in chunks]
    all_RBnhC = all_gather(jnp.concatenate(tails, axis=-1), axes)
    # In the order of the row: rank r has chunk r, and counted from the end chunk r again.
    row = jnp.concatenate([all_RBnhC[:, :, 0], all_RBnhC[::-1, :, 1]])
    r = jax.lax.axis_index(axes)
    early = jnp.where(r > 0, row[r - 1], 0)
    before_BnhC = jnp.stack([early, row[2 * R - 2 - r]], axis=1)
    ends = np.cumsum([x.shape[-1] for x in tails])[:-1]
    before = jnp.split(before_BnhC, ends, axis=-1)
    return [
        jnp.concatenate([b.reshape(*b.shape[:3], *x.shape[3:]), x], axis=2)
        for b, x in zip(before, chunks, strict=True)
    ]


def round_robin(x_BSC, axes: tuple[str, ...]):
    """Every R-th position, `[B, ceil(S / R), ...]`: the keys of this rank where all ranks have the
    whole row. What is missing at the end is zero."""
    R = ranks(axes)
    if R == 1:
        return x_BSC
    x = jnp.pad(x_BSC, ((0, 0), (0, -x_BSC.shape[1] % R)) + ((0, 0),) * (x_BSC.ndim - 2))
    x = x.reshape(x.shape[0], -1, R, *x.shape[2:])
    return jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(axes), 2, keepdims=False)
