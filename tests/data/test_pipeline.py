import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from zayajax.data import packing
from zayajax.data.corpus import Documents
from zayajax.data.pipeline import Rows, batches, held_out_batches
from zayajax.errors import UserError

S = 16
NAMES = ["tokens", "targets", "segments", "positions", "weights"]


def documents(lengths) -> Documents:
    """Token t of document d is 100 * d + t + 1: each occurs once, and says where it is from."""
    return Documents.of([100 * d + 1 + np.arange(n) for d, n in enumerate(lengths)])


DOCUMENTS = documents(np.random.default_rng(0).integers(0, 60, 40))


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def take(iterator, n):
    taken = list(itertools.islice(iterator, n))
    iterator.close()
    return taken


def test_a_row_by_hand():
    rows = Rows(Documents.of([[7, 8, 9], [5, 6]]), 8, 0)
    expected = {
        "tokens": [7, 8, 9, 5, 6, 0, 0, 0],
        "targets": [8, 9, 0, 6, 0, 0, 0, 0],
        "segments": [1, 1, 1, 2, 2, 0, 0, 0],
        "positions": [0, 1, 2, 0, 1, 0, 0, 0],
        "weights": [1, 1, 0, 1, 0, 0, 0, 0],
    }
    assert list(rows[0]) == NAMES and {k: v.tolist() for k, v in rows[0].items()} == expected
    assert {v.dtype.name for k, v in rows[0].items() if k != "weights"} == {"int32"}
    assert rows[0]["weights"].dtype == np.float32


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(2, 20), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_rows_of_an_epoch(lengths, sequence, seed):
    lengths[0] += 2
    docs = documents(lengths)
    rows = Rows(docs, sequence, seed)
    count = len(packing.pack(docs.lengths, sequence, seed, 0))
    assert rows.epoch(0) == 0 and rows.epoch(count) == 1
    seen = []
    for i in range(count):
        row = rows[i]
        assert all(v.shape == (sequence,) for v in row.values())
        tokens, targets, segments, positions, weights = row.values()
        real = segments > 0
        seen += tokens[real].tolist()
        # Padding is all zero, and at the end; segments are 1, 2, ... without a gap.
        assert not any(v[~real].any() for v in row.values()) and np.all(np.diff(real * 1) <= 0)
        starts = np.flatnonzero(np.diff(segments, prepend=0) * real)
        assert segments[starts].tolist() == list(range(1, len(starts) + 1))
        assert np.all(positions[starts] == 0)
        inside = np.append((segments[1:] == segments[:-1]) & real[1:], False)
        assert np.array_equal(weights, inside.astype(np.float32))
        assert np.array_equal(targets, np.where(inside, np.roll(tokens, -1), 0))
        assert np.all(np.diff(positions)[inside[:-1]] == 1)
        # A pair is two neighbours of one document, never of two.
        assert np.all(targets[inside] == tokens[inside] + 1)
        assert np.all((targets[inside] - 1) // 100 == (tokens[inside] - 1) // 100)
    wanted = [100 * d + 1 + t for d, n in enumerate(lengths) if n >= 2 for t in range(n)]
    assert sorted(seen) == wanted


def test_epochs_differ_and_go_on():
    rows = Rows(DOCUMENTS, S, 0)
    counts = [len(packing.pack(DOCUMENTS.lengths, S, 0, e)) for e in range(4)]
    ends = np.cumsum([0, *counts])
    tokens = [
        np.sort(np.concatenate([rows[i]["tokens"] for i in range(*ends[e : e + 2])]))
        for e in range(4)
    ]
    for e in (1, 2, 3):
        assert np.array_equal(tokens[0][tokens[0] > 0], tokens[e][tokens[e] > 0])
        assert not same(rows[ends[e]], rows[0])
    assert len(rows._recent) <= 2
    assert same(rows[0], Rows(DOCUMENTS, S, 0)[0])  # back to an epoch that was let go
    assert not all(same(rows[i], Rows(DOCUMENTS, S, 1)[i]) for i in range(5))


@given(st.integers(0, 300), st.integers(1, 9), st.sampled_from([0, 1, 2, 5]))
@settings(max_examples=25, deadline=None)
def test_iteration_equals_random_access_from_any_row(start, batch, prefetch):
    rows = Rows(DOCUMENTS, S, 3)
    for n, got in enumerate(take(batches(Rows(DOCUMENTS, S, 3), start, batch, prefetch), 4)):
        assert list(got) == NAMES
        wanted = [rows[start + n * batch + i] for i in range(batch)]
        assert same(got, {k: np.stack([r[k] for r in wanted]) for k in NAMES})
        assert all(v.shape == (batch, S) for v in got.values())


def test_resume_from_any_batch():
    whole = take(batches(Rows(DOCUMENTS, S, 3), 5, 6), 40)
    for n in (1, 2, 17, 39):
        assert same(take(batches(Rows(DOCUMENTS, S, 3), 5 + 6 * n, 6), 1)[0], whole[n])


@given(st.permutations(range(8)), st.lists(st.integers(1, 7), max_size=3))
@settings(max_examples=15, deadline=None)
def test_parts_of_a_batch_make_the_whole(order, cuts):
    whole = take(batches(Rows(DOCUMENTS, S, 3), 50, 8), 5)
    chosen = [c for c in np.split(np.array(order), sorted(cuts)) if len(c)]
    parts = [take(batches(Rows(DOCUMENTS, S, 3), 50, 8, rows_of_batch=c), 5) for c in chosen]
    for n, batch in enumerate(whole):
        joined = {k: np.concatenate([p[n][k] for p in parts])[np.argsort(order)] for k in NAMES}
        assert same(joined, batch)
    half = take(batches(Rows(DOCUMENTS, S, 3), 50, 8, rows_of_batch=slice(4, None)), 1)[0]
    assert same(half, {k: v[4:] for k, v in whole[0].items()})


def test_columns_come_in_the_order_asked_for():
    """What belongs to a token stays with it: each target is still the token after it in its row."""
    order = np.random.default_rng(0).permutation(S)
    plain, dealt = (
        take(batches(Rows(DOCUMENTS, S, 3), 50, 8, order=o), 2)[1] for o in (None, order)
    )
    assert same(dealt, {k: v[:, order] for k, v in plain.items()})
    held_out = (held_out_batches(DOCUMENTS, S, 4, 2, 0, order=o)[0] for o in (None, order))
    assert same(
        *(b if i else {k: v[:, order] for k, v in b.items()} for i, b in enumerate(held_out))
    )


def test_a_process_reads_only_its_rows():
    class Counting(Rows):
        read = ()

        def __getitem__(self, i):
            self.read = (*self.read, i)
            return super().__getitem__(i)

    rows = Counting(DOCUMENTS, S, 0)
    take(batches(rows, 100, 8, prefetch=0, rows_of_batch=[1, 6]), 3)
    assert rows.read == (101, 106, 109, 114, 117, 122)


def test_cut_document_is_read_in_pieces():
    class Reading(Documents):
        def __getitem__(self, i):
            raise AssertionError("the whole document is read")

    ids = np.arange(1, 10_001)
    docs = Documents.of([ids])
    docs = Reading(docs.tokens, docs.starts, docs.lengths, docs.fingerprint, docs.read_names)
    rows = Rows(docs, 1000, 0)
    first = sorted(rows[i]["tokens"][0] for i in range(10))
    assert first == list(range(1, 10_001, 1000))
    assert all(rows[i]["weights"].sum() == 999 for i in range(10))


def test_index_is_kept_and_rebuilt_where_damaged(tmp_path, monkeypatch):
    expected = [Rows(DOCUMENTS, S, 0)[i] for i in (0, 200)]
    calls, inner = [], packing.pack
    monkeypatch.setattr(packing, "pack", lambda *a: (calls.append(a), inner(*a))[1])

    def read():
        rows = Rows(DOCUMENTS, S, 0, tmp_path / "cache")
        assert all(same(rows[i], e) for i, e in zip((0, 200), expected, strict=True))

    read()
    made, files = len(calls), list((tmp_path / "cache").iterdir())
    assert made == len(files) >= 3
    read()
    assert len(calls) == made
    files[0].write_bytes(files[0].read_bytes()[:-8])
    files[1].write_bytes(b"")
    files[2].unlink()
    read()
    assert len(calls) == made + 3
    # Other documents, seeds and lengths do not meet in the cache.
    for docs, sequence, seed in ((documents([9, 9]), S, 0), (DOCUMENTS, 8, 0), (DOCUMENTS, S, 1)):
        kept = Rows(docs, sequence, seed, tmp_path / "cache")
        assert same(kept[0], Rows(docs, sequence, seed)[0])


def test_unwritable_cache(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        Rows(DOCUMENTS, S, 0, tmp_path / "file")[0]
    iterator = batches(Rows(DOCUMENTS, S, 0, tmp_path / "file"), 0, 2)
    with pytest.raises(UserError, match="cannot write"):
        next(iterator)


def test_nothing_to_learn_from():
    for docs in (Documents.of([]), documents([0, 1, 1])):
        with pytest.raises(UserError, match="training split"):
            Rows(docs, S, 0)
        assert held_out_batches(docs, S, 4, 2, 0) == []


def test_wrong_arguments():
    rows = Rows(DOCUMENTS, S, 0)
    with pytest.raises(IndexError):
        rows[-1]
    for arguments in ((-1, 2), (0, 0), (0, 2, -1), (0, 2, 1, slice(2, 2))):
        with pytest.raises(ValueError):
            batches(rows, *arguments)
    with pytest.raises(IndexError):
        batches(rows, 0, 2, rows_of_batch=[2])


def test_threads_end_with_the_iterator():
    before = set(threading.enumerate())
    iterator = batches(Rows(DOCUMENTS, S, 0), 0, 4, prefetch=3)
    next(iterator)
    started = set(threading.enumerate()) - before
    assert started
    iterator.close()
    for thread in started:
        thread.join(timeout=5)
        assert not thread.is_alive()


def test_held_out_batches():
    rows = len(packing.pack(DOCUMENTS.lengths, S, 0, 0))
    few = held_out_batches(DOCUMENTS, S, 4, 3, 0)
    assert len(few) == 3 and all(b["tokens"].shape == (4, S) and list(b) == NAMES for b in few)
    everything = held_out_batches(DOCUMENTS, S, 4, 10**9, 0)
    assert len(everything) == -(-rows // 4)
    assert all(same(a, b) for a, b in zip(few, everything, strict=False))
    tokens = np.concatenate([b["tokens"][b["segments"] > 0] for b in everything])
    wanted = np.concatenate([DOCUMENTS[i] for i, n in enumerate(DOCUMENTS.lengths) if n >= 2])
    assert np.array_equal(np.sort(tokens), np.sort(wanted))
    (small,) = held_out_batches(documents([5]), S, 4, 3, 0)
    assert small["weights"].sum() == 4 and not small["segments"][1:].any()
    part = held_out_batches(DOCUMENTS, S, 4, 3, 0, rows_of_batch=slice(1, 3))
    assert all(same(p, {k: v[1:3] for k, v in b.items()}) for p, b in zip(part, few, strict=True))
    assert held_out_batches(DOCUMENTS, S, 4, 0, 0) == []
