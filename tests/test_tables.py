"""A table says the same as text, as Markdown and as HTML, and its rows are plain values."""

import json

import pytest

from zayajax.tables import Column, Table, duration, rate, size

TABLE = Table(
    "what <it> is",
    [Column("op", "operation", left=True), Column("bytes", "size", size), Column("s", "time")],
    [{"op": "gather", "bytes": 2048, "s": 0.5}, {"op": "a & b", "bytes": None, "s": 12}],
    ["Read | from the program."],
)


def test_words_stand_left_and_numbers_right():
    title, head, rule, first, second, note = repr(TABLE).splitlines()
    assert title == "what <it> is" and note == "Read | from the program."
    assert head == "operation   size  time"
    assert rule == "---------  -----  ----"
    assert first == "gather     2 KiB   0.5"
    assert second == "a & b               12"


def test_markdown_and_html_have_the_same_cells():
    head, rule, *lines = TABLE.markdown().splitlines()
    assert [c.strip() for c in head.strip("|").split("|")] == ["operation", "size", "time"]
    assert rule == "| --- | --: | --: |"
    assert [[c.strip() for c in line.strip("|").split("|")] for line in lines] == TABLE.cells()
    page = TABLE._repr_html_()
    assert "what &lt;it&gt; is" in page and "a &amp; b" in page and page.count("<tr>") == 3


def test_a_table_without_rows_has_a_head():
    empty = Table("none", TABLE.columns, [])
    assert repr(empty).splitlines()[1] == "operation  size  time"
    assert empty.markdown().count("\n") == 1


def test_rows_are_for_programs():
    assert json.loads(json.dumps(list(TABLE.rows))) == list(TABLE.rows)


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (2**30, "1 GiB"),
        (1.5 * 2**50, "1.54e+03 TiB"),
    ],
)
def test_sizes(value, text):
    assert size(value) == text


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (1.5, "1.5 s"), (0.00025, "250 us"), (0.9996, "1 s"), (2e-9, "0.002 us")],
)
def test_durations(value, text):
    assert duration(value) == text


def test_rates():
    assert rate(45.7e9) == "45.7 GB/s"
