"""Drawings of a plan, as matplotlib figures."""

from matplotlib.figure import Figure

from zayajax.planning.arithmetic.candidates import TERMS

COLOURS = dict(  # Okabe and Ito's, which tell apart for every eye
    zip(TERMS, ("#0072b2", "#d55e00", "#e69f00", "#56b4e9", "#009e73", "#cc79a7"), strict=False)
)

SHOWN = 2.5  # times the shortest step


def step(plan) -> Figure:
    """The parts of a step, for the fastest of each layout and ZeRO stage (by memory where none
    fits), and of each remat policy like the best."""
    rows = plan.shown().rows[::-1]
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(rows)), layout="constrained")
    ax = figure.subplots()
    names = [
        f"{r['layout']}, zero {r['zero']}, {r['remat']}, {r['micro_batches']} x {r['rows']}"
        + ("" if r["fits"] else " (does not fit)")
        for r in rows
    ]
    left = [0.0] * len(rows)
    for term, colour in COLOURS.items():
        width = [r[f"{term.replace(' ', '_')}_seconds"] for r in rows]
        ax.barh(names, width, left=left, color=colour, label=term)
        left = [a + b for a, b in zip(left, width, strict=True)]
    # What takes many times as long would flatten the rest: its bar runs out of the picture.
    shortest = min((r["step_seconds"] for r in rows), default=1)
    end = min(max(left, default=1), SHOWN * shortest)
    for i, r in enumerate(rows):
        took = f", {r['step_seconds']:.3g} s" if left[i] > end else ""
        ax.annotate(
            f"{r['tokens_per_second']:,.0f} tokens/s{took}",
            (min(left[i], end), i),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    ax.set_xlim(0, end)
    ax.set_xlabel("seconds a step, before what is hidden")
    ax.set_title(plan.shown().title, fontsize=10)
    ax.tick_params(axis="y", labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(
        frameon=False,
        fontsize=8,
        ncols=len(COLOURS),
        loc="upper center",
        bbox_to_anchor=(0.4, -0.12),
    )
    return figure


def attention(plan) -> Figure:
    """Ring against gather, forward, and against tree, in decoding, over the length of the row; the
    machine's own fabric in full lines, behind a switch in dashes."""
    rows = plan.attention.rows
    places = list(dict.fromkeys(r["where"] for r in rows)) or ["node"]
    figure = Figure(figsize=(9, 3.2 * len(places)), layout="constrained")
    grid = figure.subplots(len(places), 2, squeeze=False)
    for where, axes in zip(places, grid, strict=True):
        for kind, ax in zip(("forward", "decode"), axes, strict=True):
            of = [r for r in rows if r["where"] == where and r["step"] == kind]
            x = [r["tokens"] for r in of]
            other = of[0]["collective"] if of else "other"
            for key, colour, label in (
                ("ring", "#d55e00", "ring"),
                ("collective", "#0072b2", other),
            ):
                for suffix, style in (("", "-"), ("_switched", "--")):
                    if suffix and not plan.machine.point_to_point:
                        continue
                    y = [1e3 * r[f"{key}{suffix}_seconds"] for r in of]
                    name = label + (", behind a switch" if suffix else "")
                    ax.plot(x, y, style, color=colour, label=name, marker="o", ms=3)
            work = [1e3 * r["arithmetic_seconds"] for r in of]
            ax.plot(x, work, ":", color="#777777", label="a GPU's own work")
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.set_title(f"{kind}, over {where}", fontsize=10)
            ax.set_xlabel("tokens")
            ax.set_ylabel("milliseconds a layer")
            ax.spines[["top", "right"]].set_visible(False)
            ax.legend(frameon=False, fontsize=7)
    return figure
