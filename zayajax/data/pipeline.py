"""Packed rows by number, and batches of them, ready for the device.

B batch, S sequence. A row or batch is a dict: `tokens`, `targets`, `segments`, `positions` int32
and `weights` float32. Segment 0 is padding; the documents of a row are numbered from 1 and their
positions from 0. `targets[t]` is `tokens[t + 1]` and has weight 1 where both lie in one segment;
elsewhere target and weight are 0. A piece of a cut document is a segment of its own.

Row i of a run depends on the documents, S, the seed and i, and on nothing else: not on the number
of processes, nor on where reading began. So the state of the data is one integer.
"""

import bisect
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import grain
import numpy as np

from zayajax.data import packing
from zayajax.data.corpus import Documents
from zayajax.errors import UserError

Batch = dict[str, np.ndarray]

# The longest that len() can be: some 10**18 rows.
ENDLESS = 2**62


class Rows:
    """Endless rows of packed documents: epoch after epoch, each in an order of its own.

    `rows[i]`, i = 0, 1, ...: row i of the run, arrays [S]. Threads may read at once.

    How many rows an epoch has is known only from its packing index, so the first row of epoch e
    takes the indices of epochs 0 .. e. They are kept in the folder `cache`, if there is one, and
    the two used last in memory. An index takes about a second per million documents.
    """

    def __init__(self, documents: Documents, sequence: int, seed: int, cache: Path | None = None):
        """Raises UserError where no document has two tokens, so that there is nothing to learn."""
        if not len(documents) or documents.lengths.max() < 2:
            raise UserError(
                "data.corpus: the training split has no document of two or more tokens; add text "
                "or lower data.held_out"
            )
        self.documents, self.sequence, self.seed = documents, sequence, seed
        self.cache = None if cache is None else Path(cache)
        self._ends = [0]  # rows before epoch 0, 1, ...
        self._recent: dict[int, packing.PackingIndex] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, i: int) -> Batch:
        if i < 0:
            raise IndexError(f"rows are numbered from 0, not {i}")
        with self._lock:
            while self._ends[-1] <= i:
                self._ends.append(self._ends[-1] + len(self._index(len(self._ends) - 1)))
            epoch = bisect.bisect_right(self._ends, i) - 1
            index = self._index(epoch)
        return _row(self.documents, index, i - self._ends[epoch])

    def epoch(self, i: int) -> float:
        """Row i as a number of epochs: its whole part is the epoch that the row lies in."""
        self[i]
        epoch = bisect.bisect_right(self._ends, i) - 1
        first, end = self._ends[epoch : epoch + 2]
        return epoch + (i - first) / (end - first)

    def _index(self, epoch: int) -> packing.PackingIndex:
        """From memory, the cache, or made; the lock is held."""
        index = self._recent.pop(epoch, None) or self._kept(epoch)
        self._recent[epoch] = index
        while len(self._recent) > 2:
            del self._recent[next(iter(self._recent))]
        return index

    def _kept(self, epoch: int) -> packing.PackingIndex:
        arguments = (self.documents.lengths, self.sequence, self.seed, epoch)
        if self.cache is None:
            return packing.pack(*arguments)
        path = self.cache / (
            f"packing-{packing.VERSION}-{self.documents.fingerprint[:16]}"
            f"-{self.sequence}-{self.seed}-{epoch}.npy"
        )
        try:
            return packing.PackingIndex.load(path)
        except (OSError, ValueError):  # absent or damaged
            index = packing.pack(*arguments)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            index.save(path)
        except OSError as error:
            raise UserError(f"{path}: cannot write the packing index ({error.strerror})") from None
        return index


def batches(
    rows: Rows,
    start: int,
    batch: int,
    prefetch: int = 2,
    rows_of_batch: slice | Sequence[int] | np.ndarray | None = None,
    order: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Endless batches [B, S]: the first has rows `start` .. `start + batch - 1`, and so on.

    After n batches, `batches(rows, start + n * batch, batch)` goes on where this one stands.

    `rows_of_batch` chooses among the `batch` rows of each batch, by slice or by numbers, in that
    order: each process asks for the rows of its devices, reads no others, and counts `start` and
    `batch` in rows of all processes. `order` [S] says which place of a row each column of a batch
    is, where devices share rows (`zayajax.sequence.shard_order`).

    `prefetch` batches are read ahead in as many threads; 0 reads when asked. The threads end when
    the iterator is closed or forgotten.
    """
    if start < 0 or batch < 1 or prefetch < 0:
        raise ValueError(f"start {start}, batch {batch} or prefetch {prefetch} is too small")
    chosen = _chosen(batch, rows_of_batch)
    source = grain.MapDataset.source(_Chosen(rows, start, batch, chosen))
    dataset = source.batch(len(chosen), batch_fn=partial(_stack, order=order))
    options = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
    return _closing(iter(dataset.to_iter_dataset(options)))


def held_out_batches(
    documents: Documents,
    sequence: int,
    batch: int,
    count: int,
    seed: int,
    rows_of_batch: slice | Sequence[int] | np.ndarray | None = None,
    order: np.ndarray | None = None,
) -> list[Batch]:
    """At most `count` batches [B, S], the same at every call; each token is there at most once.

    Which rows is chosen by the seed. The last batch is filled up with padding, so that a split that
    is smaller than a batch gives one batch; an empty split gives none. `rows_of_batch` and `order`
    as in `batches`.
    """
    index = packing.pack(documents.lengths, sequence, seed, epoch=0)
    count = min(count, -(-len(index) // batch))
    chosen = _chosen(batch, rows_of_batch)

    def read(i: int) -> Batch:
        return _row(documents, index, i) if i < len(index) else _padding(sequence)

    return [_stack([read(b * batch + i) for i in chosen], order) for b in range(count)]


def _row(documents: Documents, index: packing.PackingIndex, row: int) -> Batch:
    """Row `row` of a packing, arrays [S]."""
    arrays = _padding(index.sequence)
    first, end = index.row_offsets[row : row + 2].tolist()
    pieces = (index.document[first:end], index.start[first:end], index.length[first:end])
    at = 0
    for segment, (document, start, length) in enumerate(zip(*pieces, strict=True), 1):
        here, pairs = slice(at, at + length), slice(at, at + length - 1)
        ids = documents.read(document, start, length)
        arrays["tokens"][here] = ids
        arrays["targets"][pairs] = ids[1:]
        arrays["segments"][here] = segment
        arrays["positions"][here] = np.arange(length)
        arrays["weights"][pairs] = 1
        at += length
    return arrays


def _padding(sequence: int) -> Batch:
    names = ("tokens", "targets", "segments", "positions")
    arrays = {name: np.zeros(sequence, np.int32) for name in names}
    return arrays | {"weights": np.zeros(sequence, np.float32)}


def _stack(rows: list[Batch], order: np.ndarray | None) -> Batch:
    # Targets, positions and segments were made in the order of the row, and travel with the tokens.
    columns = slice(None) if order is None else order
    return {name: np.stack([row[name][columns] for row in rows]) for name in rows[0]}


def _chosen(batch: int, rows_of_batch) -> np.ndarray:
    """Numbers of rows in 0 .. batch - 1; ValueError where there is none, IndexError outside."""
    chosen = np.arange(batch)[slice(None) if rows_of_batch is None else rows_of_batch]
    if chosen.ndim != 1 or not chosen.size:
        raise ValueError(f"{rows_of_batch} chooses no rows of a batch of {batch}")
    return chosen


class _Chosen:
    """The chosen rows of every batch from row `start` on, as one random-access source."""

    def __init__(self, rows: Rows, start: int, batch: int, chosen: np.ndarray):
        self.rows, self.start, self.batch, self.chosen = rows, start, batch, chosen

    def __len__(self) -> int:
        return (ENDLESS - self.start) // self.batch * len(self.chosen)

    def __getitem__(self, i: int) -> Batch:
        number, place = divmod(i, len(self.chosen))
        return self.rows[self.start + number * self.batch + int(self.chosen[place])]


def _closing(iterator: grain.DatasetIterator) -> Iterator[Batch]:
    try:
        yield from iterator
    finally:
        iterator.close()
