"""What saving costs is measured on what is really saved, in the right units, and said when not."""

import json
import shutil

import jax
import pytest

from zayajax import cli
from zayajax.bench import checkpoint as bench
from zayajax.errors import UserError

KEYS = {
    *("way", "bytes", "call_seconds", "call_quartiles", "blocked_seconds", "blocked_quartiles"),
    *("seconds", "seconds_quartiles", "bytes_per_second", "host_bytes"),
}


def test_each_way_is_measured(tmp_path):
    table = bench.measure("1MiB", tmp_path, repeats=2)
    assert [row["way"] for row in table.rows] == list(bench.WAYS)
    for row in table.rows:
        assert set(row) == KEYS and row["bytes"] == 2**20
        low, high = row["seconds_quartiles"]
        assert 0 < low <= row["seconds"] <= high
        assert row["bytes_per_second"] * row["seconds"] == pytest.approx(row["bytes"])
        if row["way"] == bench.DISK:
            assert row["call_seconds"] is row["blocked_seconds"] is None
        else:
            assert 0 < row["call_seconds"] <= row["seconds"]
            assert 0 <= row["blocked_seconds"] <= row["seconds"]
    assert json.loads(json.dumps(list(table.rows))) == list(table.rows)
    assert jax.__version__ in repr(table) and "8 devices (cpu)" in repr(table)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", bench.WAYS)
def test_all_bytes_are_on_disk(way, tmp_path):
    state = bench._state(2**20)
    state, _, blocked, seconds, _ = bench._one(bench.WAYS[way], state, tmp_path / "x", None)
    sizes = [p.stat().st_size for p in (tmp_path / "x").rglob("*") if p.is_file()]
    assert 2**20 <= sum(sizes) < 1.2 * 2**20  # names, shapes and digests come on top
    assert blocked < seconds


def test_what_cannot_be_measured_is_said(tmp_path, monkeypatch, capsys):
    for words, reason in (
        (["--bytes", "much"], "--bytes much: is no number of bytes"),
        (["--bytes", "1MiB", "--folder", str(tmp_path / "absent")], "is no folder to write to"),
    ):
        assert cli.main(["bench", "checkpoint", *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and reason in error
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    with pytest.raises(UserError, match=r"977 KiB are free, and 3 MiB are needed"):
        bench.measure("1MiB", tmp_path)
