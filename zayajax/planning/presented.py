"""An audit to be read: its rows put together, as tables and a plot."""

from collections.abc import Iterable, Sequence

from matplotlib.figure import Figure

from zayajax.machine import Machine
from zayajax.planning.traced.footprint import KINDS, USABLE
from zayajax.tables import Column, Table, duration, size

FREE, HIDDEN = "#d55e00", "#0072b2"  # Okabe and Ito's palette, as in the report

WHERE = (
    Column("scope", "scope", left=True),
    Column("op", "operation", left=True),
    Column("dtype", "dtype", left=True),
    Column("span", "span", left=True),
    Column("group_size", "GPUs"),
)


def listed(rows: Sequence[dict]) -> Table:
    """A row an equation."""
    of_one = (
        Column("bytes", "bytes", size),
        Column("count", "times"),
        Column("seconds", "one", duration),
        Column("seconds_switched", "switched", duration),
        Column("hidden", "may hide", duration),
    )
    return Table("collectives, in program order", (*WHERE, *of_one), rows)


def by_scope(rows: Sequence[dict], machine: Machine) -> Table:
    """A row for all of one scope, operation, type and span, with what a step has of them."""
    keys = [c.key for c in WHERE]
    found = {}
    for row in rows:
        found.setdefault(tuple(row[k] for k in keys), []).append(row)
    put = []
    for key, same in found.items():
        runs = [row for row in same if row["count"] != 0]
        if runs:
            put.append(dict(zip(keys, key, strict=True)) | _sums(runs))
    columns = [*WHERE, Column("largest", "largest", size), *_of_a_step(machine)]
    notes = [f"modelled times on {machine.name}, one after the other", HIDES]
    if machine.point_to_point:
        notes.append("direct: a link to each GPU of the node; switched: the same links to a switch")
    return Table("collectives of a step", columns, put, notes + _skewed(rows))


HIDES = "may hide: a bound, behind computation that neither needs it nor is needed by it"


def by_span(rows: Sequence[dict], machine: Machine) -> Table:
    found = {}
    for row in rows:
        found.setdefault(row["span"], []).append(row)
    put = [{"span": span} | _sums(same) for span, same in found.items()]
    put.append({"span": "all"} | _sums(rows))
    columns = [Column("span", "span", left=True), *_of_a_step(machine)]
    return Table("sums of a step, routing even", columns, put)


def _of_a_step(machine: Machine) -> list[Column]:
    switched = [Column("seconds_switched", "switched", duration)] if machine.point_to_point else []
    own = "direct" if machine.point_to_point else "time"
    return [
        Column("count", "times"),
        Column("bytes", "bytes", size),
        Column("seconds", own, duration),
        *switched,
        Column("hidden", "may hide", duration),
    ]


def _sums(rows: Iterable[dict]) -> dict:
    """Of a step. In a `while`, whose turns are not known, once."""
    rows = [(row, 1 if row["count"] is None else row["count"]) for row in rows]
    sums = {
        "count": sum(n for _, n in rows),
        "largest": max((r["bytes"] for r, _ in rows), default=0),
    }
    for key in ("bytes", "seconds", "seconds_switched", "hidden"):
        sums[key] = sum(row[key] * n for row, n in rows)
    return sums


def _skewed(rows: Sequence[dict]) -> list[str]:
    """What stands in for what, where routing is not even."""
    sizes = sorted({row["bytes"] for row in rows if row["if_skewed"] is not None})
    if not sizes:
        return []
    return [
        "where routing is not even, messages of the expert exchange are larger, as far as needed: "
        + ", ".join(map(size, sizes))
    ]


def memory(footprint: dict, machine: Machine) -> Table:
    rows = [{"kind": kind, "bytes": footprint[kind], "what": what} for kind, what in KINDS.items()]
    rows.append({"kind": "total", "bytes": footprint["total"], "what": "the most at once"})
    notes = []
    if by_remat := footprint.get("activations_by_remat"):
        each = ", ".join(f"{name} {size(n)}" for name, n in by_remat.items())
        notes.append(f"activations by train.remat: {each}")
    notes.append(
        "an estimate from below: compiled for a GPU, twelve steps took 3 to 7 GB more; "
        f"so what fits takes at most {USABLE:.0%}"
    )
    hbm = f"{size(footprint['hbm'])} of {machine.name}"
    if footprint["fits"]:
        notes.append(f"fits the {hbm}: {footprint['total'] / footprint['hbm']:.0%}")
    else:
        over = footprint["total"] / footprint["hbm"]
        notes.append(f"WARNING: does not fit the {hbm}: {over:.2f} times as much")
    columns = Column("kind", "kind", left=True), Column("bytes", "bytes", size)
    return Table("memory of a GPU", (*columns, Column("what", "what", left=True)), rows, notes)


def bars(rows: Sequence[dict], title: str) -> Figure:
    """Seconds of a step by scope and span: what may be hidden, and what may not."""
    found = {}
    for row in rows:
        found.setdefault(f"{row['scope'] or 'none'}, {row['span']}", []).append(row)
    sums = {name: _sums(same) for name, same in found.items()}
    sums = dict(sorted(sums.items(), key=lambda item: item[1]["seconds"]))
    figure = Figure(figsize=(8, 1.2 + 0.3 * len(sums)), layout="constrained")
    ax = figure.add_subplot()
    behind = [1e3 * s["hidden"] for s in sums.values()]
    rest = [1e3 * (s["seconds"] - s["hidden"]) for s in sums.values()]
    ax.barh(list(sums), rest, color=FREE, label="cannot be hidden")
    ax.barh(list(sums), behind, left=rest, color=HIDDEN, label="dependencies allow to hide")
    ax.set_xlabel("milliseconds of a step, modelled")
    ax.set_title(title, fontsize=9)
    if sums:
        ax.legend(loc="lower right", frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return figure
