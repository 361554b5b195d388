"""Which piece of which document lies in which row: a pure function of lengths and seeds.

A piece is at most one row long; a row is the pieces that stand one after another in it.
"""

import dataclasses
import os
import secrets
from collections import defaultdict
from pathlib import Path

import numpy as np

# Part of the name under which an index is kept: raise it with every change of `pack`'s result.
VERSION = 1

# Pieces longer than this part of a row are placed longest first.
LONG = 1 / 8


@dataclasses.dataclass(frozen=True)
class PackingIndex:
    """The rows of one epoch; pieces `row_offsets[r] : row_offsets[r + 1]` are row r, in order."""

    sequence: int
    row_offsets: np.ndarray  # int64 [rows + 1]
    document: np.ndarray  # int64 [pieces]
    start: np.ndarray  # int64 [pieces], tokens from the document's first
    length: np.ndarray  # int64 [pieces], tokens, 1 .. sequence

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def fill(self) -> float:
        """Fraction of the tokens of all rows that are not padding; 1 where there is no row."""
        return float(self.length.sum() / (len(self) * self.sequence)) if len(self) else 1.0

    def save(self, path) -> None:
        """One .npy file, which is either absent or complete; the folder must exist."""
        path = Path(path)
        header = [self.sequence, len(self), len(self.document)]
        parts = (header, self.row_offsets, self.document, self.start, self.length)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temporary, "wb") as file:
                np.save(file, np.concatenate(parts, dtype=np.int64))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path) -> "PackingIndex":
        """Maps a saved file into memory; ValueError or OSError where it is not such a file."""
        try:
            flat = np.load(path, mmap_mode="r", allow_pickle=False)
        except EOFError:
            raise ValueError(f"{path} is empty") from None
        if flat.dtype != np.int64 or flat.ndim != 1 or len(flat) < 4:
            raise ValueError(f"{path} is not a packing index")
        sequence, rows, pieces = flat[:3].tolist()
        if len(flat) != 3 + rows + 1 + 3 * pieces or flat[3 + rows] != pieces:
            raise ValueError(f"{path} is not a whole packing index")
        flat = flat.view(np.ndarray)  # still mapped; slices of a memmap are slow objects
        row_offsets, rest = flat[3 : rows + 4], flat[rows + 4 :]
        return cls(sequence, row_offsets, *rest.reshape(3, pieces))


def pack(lengths: np.ndarray, sequence: int, seed: int, epoch: int) -> PackingIndex:
    """Packs documents of `lengths` tokens [documents] into rows of `sequence` tokens.

    The same arguments give the same index on every machine and numpy. Each document of at least 2
    tokens is there exactly once: whole, or, where it is longer than a row, in pieces of `sequence`
    tokens and a rest. A document of 1 token is left out: it has no pair of tokens to learn from.

    Best fit: a piece goes to the row with the least room that holds it, else to a new row. Pieces
    longer than an eighth of a row go first, longest first, since they decide how many rows there
    are; ties are broken by the epoch's shuffle. The rest follows in shuffled order: it fills gaps
    well in any order, and sorted, short documents would end up in rows of equal lengths, with the
    same neighbours in every epoch. The rows are shuffled at the end, so long and short documents
    are spread evenly over the epoch. O(n log n) for n pieces.
    """
    if sequence < 1:
        raise ValueError(f"a row has at least 1 token, not {sequence}")
    document, start, length = _pieces(np.asarray(lengths, np.int64), sequence)
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch]))
    order = _shuffled(len(length), bits)
    key = np.where(length > LONG * sequence, -length, 0)
    order = order[np.argsort(key[order], kind="stable")]
    row, rows = _best_fit(length[order], sequence)
    place = np.empty(rows, np.int64)
    place[_shuffled(rows, bits)] = np.arange(rows)
    row = place[row]
    order = order[np.argsort(row, kind="stable")]
    row_offsets = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))])
    return PackingIndex(
        sequence, row_offsets.astype(np.int64), document[order], start[order], length[order]
    )


def _shuffled(n: int, bits: np.random.BitGenerator) -> np.ndarray:
    """A permutation of n. numpy keeps raw bits stable over versions, its own shuffles not."""
    return np.argsort(bits.random_raw(n), kind="stable")


def _pieces(lengths: np.ndarray, sequence: int):
    """Document, start and length of each piece, in document order."""
    count = np.where(lengths >= 2, -(-lengths // sequence), 0)
    document = np.repeat(np.arange(len(lengths)), count)
    first = np.cumsum(count) - count
    start = (np.arange(len(document)) - first[document]) * sequence
    return document, start, np.minimum(sequence, lengths[document] - start)


def _best_fit(lengths: np.ndarray, sequence: int) -> tuple[np.ndarray, int]:
    """The row of each piece, in the order given, and the number of rows."""
    row = np.empty(len(lengths), np.int64)
    # Whole rows come first in the order, and need no search: most of a corpus of long documents.
    rows = int(np.argmin(lengths == sequence)) if np.any(lengths != sequence) else len(lengths)
    row[:rows] = np.arange(rows)
    rooms = _Rooms(sequence)
    placed = []
    for length in lengths[rows:].tolist():
        room = rooms.least(length)
        if room is None:
            chosen, room = rows, sequence
            rows += 1
        else:
            chosen = rooms.take(room)
        placed.append(chosen)
        if room > length:
            rooms.add(room - length, chosen)
    row[len(lengths) - len(placed) :] = placed
    return row, rows


class _Rooms:
    """Rows by the room they have left, 1 .. sequence - 1 tokens.

    Rooms that occur are bits in blocks of 1,024, and blocks that are not empty are bits of
    `blocks_used`, so that the least room for a piece is two look-ups at any length of a row.
    """

    BLOCK = 1024

    def __init__(self, sequence: int):
        self.rows = defaultdict(list)
        self.blocks = [0] * (sequence // self.BLOCK + 1)
        self.blocks_used = 0

    def least(self, length: int) -> int | None:
        """The smallest room of at least `length` tokens, if any row has one."""
        block, bit = divmod(length, self.BLOCK)
        if found := self.blocks[block] >> bit:
            return length + _lowest_bit(found)
        if later := self.blocks_used >> (block + 1):
            block += 1 + _lowest_bit(later)
            return block * self.BLOCK + _lowest_bit(self.blocks[block])
        return None

    def add(self, room: int, row: int):
        block, bit = divmod(room, self.BLOCK)
        self.rows[room].append(row)
        self.blocks[block] |= 1 << bit
        self.blocks_used |= 1 << block

    def take(self, room: int) -> int:
        """Removes a row that has this room."""
        row = self.rows[room].pop()
        if not self.rows[room]:
            block, bit = divmod(room, self.BLOCK)
            self.blocks[block] ^= 1 << bit
            if not self.blocks[block]:
                self.blocks_used ^= 1 << block
        return row


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
