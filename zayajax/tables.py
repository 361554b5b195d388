"""Tables that can be read as text, in a notebook, in Markdown, and by programs."""

import dataclasses
import html
import textwrap
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Column:
    """One column: `key` of the row, what stands above it, and how a value is written."""

    key: str
    title: str
    write: Callable[[Any], str] = str
    left: bool = False  # words to the left, numbers to the right


@dataclasses.dataclass(frozen=True, repr=False)
class Table:
    """Rows of plain values. `rows` is what `--json` gives; columns say what a reader sees of it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[dict]
    notes: Sequence[str] = ()

    def cells(self) -> list[list[str]]:
        return [
            ["" if row.get(c.key) is None else c.write(row[c.key]) for c in self.columns]
            for row in self.rows
        ]

    def __repr__(self) -> str:
        head, cells = [c.title for c in self.columns], self.cells()
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]

        def line(words):
            put = (
                word.ljust(n) if c.left else word.rjust(n)
                for word, n, c in zip(words, widths, self.columns, strict=True)
            )
            return "  ".join(put).rstrip()

        rule = "  ".join("-" * n for n in widths)
        return "\n".join([self.title, line(head), rule, *map(line, cells), *self.notes])

    def wrapped(self, width: int = 112) -> str:
        """As text, the notes in lines of at most `width`."""
        bare = repr(dataclasses.replace(self, notes=()))
        return "\n".join([bare, *(textwrap.fill(note, width) for note in self.notes)])

    def markdown(self) -> str:
        rows = [[c.title for c in self.columns], ["---" if c.left else "--:" for c in self.columns]]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows + self.cells())

    def _repr_html_(self) -> str:
        def row(words, tag):
            at = ("left" if c.left else "right" for c in self.columns)
            put = (
                f'<{tag} style="text-align:{side}">{html.escape(word)}</{tag}>'
                for word, side in zip(words, at, strict=True)
            )
            return f"<tr>{''.join(put)}</tr>"

        body = "".join(row(cells, "td") for cells in self.cells())
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        head = row([c.title for c in self.columns], "th")
        return f"<table><caption>{html.escape(self.title)}</caption>{head}{body}</table>{notes}"


def size(n: float) -> str:
    """Bytes, in binary units of three digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1000 or unit == "TiB":
            return f"{n:.3g} {unit}"
        n /= 1024


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us" if seconds else "0"


def rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e9:.4g} GB/s"
