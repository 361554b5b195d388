"""What each way to run a config needs and takes on a machine, by arithmetic, in seconds.

Memory is the arithmetic of `estimate`, which agrees with what `audit` reads from the traced step;
time that of `roofline` (what a GPU computes) and `traffic` with `fabric` (what it sends).
"""

import dataclasses
import html
import textwrap

from zayajax.machine import MI300X, Machine
from zayajax.planning.arithmetic import attention, experts, machines, measured
from zayajax.planning.arithmetic.candidates import Candidate, candidates
from zayajax.planning.arithmetic.roofline import REACHED, REACHED_FLOAT32
from zayajax.planning.traced.footprint import USABLE
from zayajax.settings import Config
from zayajax.tables import Column, Table, duration, size

WIDTH = 112  # of the text
LIKE_BEST = 8  # ways shown beside the best of each layout


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """`print` it, or show it in a notebook; `to_json` has all of it."""

    config: Config
    machine: Machine
    candidates: list[Candidate]
    impossible: list[str]  # why there are no others, a sentence each
    layouts: Table  # a row for each candidate, the fastest that fits first
    experts: Table  # degrees 2, 4 and 8 of expert parallelism
    attention: Table  # ring, gather and tree, 4 k to 16 M tokens
    machines: Table  # arithmetic for each byte and dollar
    paper: Table  # ZAYA1's pretraining, predicted beside what it took
    measured: Table  # the package's own runs likewise

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits."""
        return next((c for c in self.candidates if c.fits), None)

    @property
    def own(self) -> Candidate | None:
        """As the config has it; None where that is no way of its own on this mesh."""
        return next(
            (c for c in self.candidates if _choices(c.config) == _choices(self.config)), None
        )

    @property
    def why(self) -> str:
        said, own, best = why(self.candidates, self.machine), self.own, self.best
        if own is None or own is best:
            return said
        part = (
            f" ({own.tokens_per_second / best.tokens_per_second:.0%} of the best)" if best else ""
        )
        return (
            f"{said} As the config has it: {own.name}. {own.tokens_per_second:,.0f} tokens/s a GPU"
            f"{part}, {size(own.memory.total)}{'' if own.fits else ', which does not fit'}."
        )

    def to_json(self) -> dict:
        tables = ("layouts", "experts", "attention", "machines", "paper", "measured")
        return {
            "machine": self.machine.name,
            "nodes": self.config.mesh.nodes,
            "gpus": self.config.mesh.gpus,
            "best": self.best and self.best.row(),
            "why": self.why,
            "impossible": self.impossible,
            "notes": list(NOTES),
            **{name: list(getattr(self, name).rows) for name in tables},
        }

    def plot(self, what: str = "step"):
        """A matplotlib Figure: "step", the parts of a step as bars; "attention", its curves."""
        from zayajax.planning import plan_plots

        return {"step": plan_plots.step, "attention": plan_plots.attention}[what](self)

    @property
    def _title(self) -> str:
        mesh, train = self.config.mesh, self.config.train
        return (
            f"{train.batch:,} x {train.sequence:,} tokens a step on {mesh.nodes} x {mesh.gpus} "
            f"{self.machine.name}"
        )

    def shown(self) -> Table:
        """The best of each layout and ZeRO stage, and the ways most like the best."""
        chosen: dict[tuple, Candidate] = {}
        for c in self.candidates:
            chosen.setdefault((c.config.mesh.layout, c.config.mesh.zero), c)
        picked = list(chosen.values())
        picked += [self.own] if self.own else []
        if self.best:
            mesh = self.best.config.mesh
            picked += [c for c in self.candidates if c.config.mesh == mesh][: LIKE_BEST + 1]
        rows = [c.row() for c in self.candidates if any(c is p for p in picked)]
        title = f"{len(rows)} of {len(self.candidates)} ways: {self._title}"
        # What is the same for all is not shown.
        same = {"fits": True, "hidden_seconds": 0}
        columns = [
            c
            for c in self.layouts.columns
            if c.key not in same or any(r[c.key] != same[c.key] for r in rows)
        ]
        return dataclasses.replace(self.layouts, title=title, rows=rows, columns=columns)

    def __repr__(self) -> str:
        parts = [self.shown(), self.why, *self.impossible, self.experts, self.attention]
        parts += [self.machines, self.paper, self.measured, *NOTES]
        return "\n\n".join(map(_wrapped, parts))

    def _repr_html_(self) -> str:
        tables = [self.shown(), self.experts, self.attention, self.machines, self.paper]
        words = "".join(f"<p>{html.escape(x)}</p>" for x in (self.why, *self.impossible))
        notes = "".join(f"<p>{html.escape(x)}</p>" for x in NOTES)
        first, *others = (t._repr_html_() for t in (*tables, self.measured))
        return first + words + "".join(others) + notes


NOTES = (
    "Time: parts of a step follow each other, each as long as its products at their rate or its "
    "bytes at the reached HBM bandwidth. Rates, as parts of what the machine's best products "
    "reach: "
    + "; ".join(f"{kind} {value:.0%} ({value.source})" for kind, value in REACHED.items())
    + f"; float32 {float(REACHED_FLOAT32):.0%} of the data sheet's peak ({REACHED_FLOAT32.source})."
    " That other machines reach the same parts is assumed. Elementwise passes are counted as if "
    "fused, routing as even. Nothing is hidden but a ring's hops.",
    "Memory: as `zayajax audit` has it, within 10 % for models of real size (toys in bfloat16 "
    "whose rows are split: within a third): arrays of the traced program with elementwise chains "
    "fused, an estimate from below. Compiled for a GPU, twelve steps took 3 to 7 GB more; so what "
    f"fits takes at most {USABLE:.0%} of the HBM.",
)


def plan(config: Config, machine: Machine = MI300X) -> Plan:
    """All ways to run `config`'s batch on its nodes of `machine`, and what decides among them.

    Raises UserError for a mesh whose nodes are not this machine's.
    """
    machine.check(config.mesh.gpus)
    found, impossible = candidates(config, machine)
    found.sort(key=lambda c: (not c.fits, -c.tokens_per_second if c.fits else c.memory.total))
    return Plan(
        config=config,
        machine=machine,
        candidates=found,
        impossible=impossible,
        layouts=_layouts(found, machine),
        experts=experts.table(config, machine),
        attention=attention.table(config, machine),
        machines=machines.table(),
        paper=measured.paper(),
        measured=measured.slices(),
    )


def _layouts(found: list[Candidate], machine: Machine) -> Table:
    columns = (
        Column("layout", "layout", left=True),
        Column("zero", "zero"),
        Column("remat", "remat", left=True),
        Column("split", "parts"),
        Column("total_bytes", "memory", size),
        Column("fits", "fits", lambda fits: "yes" if fits else "NO", left=True),
        Column("arithmetic_seconds", "compute", duration),
        Column("exchange_seconds", "experts", duration),
        Column("sequence_seconds", "keys", duration),
        Column("weights_seconds", "weights", duration),
        Column("optimizer_seconds", "update", duration),
        Column("hidden_seconds", "hidden", duration),
        Column("step_seconds", "step", duration),
        Column("tokens_per_second", "tok/s", "{:,.0f}".format),
        Column("mfu", "MFU", "{:.1%}".format),
    )
    title = f"ways to run it on {machine.name}"
    note = (
        "parts: micro-batches x rows of one. experts: tokens to them and back. keys: halos, keys "
        "and values of spread rows. weights: gathered, and gradients scattered. hidden: of what is "
        "sent. tok/s: of one GPU."
    )
    return Table(title, columns, [c.row() for c in found], [note])


def why(found: list[Candidate], machine: Machine) -> str:
    """Which of `found`, the fastest that fits first, is best, and which term decides."""
    best = found[0] if found and found[0].fits else None
    if best is None:
        if not found:
            return "There is no way to run it: see why below."
        least = found[0]
        kind, bytes_ = _largest(least)
        return (
            f"Nothing fits. The least memory is that of {least.name}: {size(least.memory.total)} "
            f"of {size(machine.hbm)}, of which {USABLE:.0%} are usable; {kind} are {size(bytes_)}."
        )
    terms = {k: v for k, v in best.timing.terms.items() if v > 0}
    (first, a), *others = sorted(terms.items(), key=lambda kv: -kv[1])
    said = (
        f"Best: {best.name}. {best.tokens_per_second:,.0f} tokens/s a GPU, MFU {best.mfu:.1%}, "
        f"{duration(best.timing.step)} a step, of which {TERM[first]} {a / best.timing.step:.0%}"
    )
    if others:
        said += f" and {TERM[others[0][0]]} {others[0][1] / best.timing.step:.0%}"
    said += f"; {size(best.memory.total)} of {size(machine.hbm)}, fullest in {best.memory.fullest}."
    return " ".join([said, *_against(best, found, machine)])


TERM = {
    "arithmetic": "arithmetic",
    "exchange": "the expert exchange",
    "sequence": "keys, values and halos",
    "weights in": "gathering weights",
    "weights out": "scattering gradients",
    "optimizer": "the optimizer",
}


def _against(best: Candidate, found: list[Candidate], machine: Machine):
    """What would be faster and does not fit; and what the next of each other choice loses by."""
    faster = [c for c in found if not c.fits and c.tokens_per_second > best.tokens_per_second]
    if faster:
        fastest = max(faster, key=lambda c: c.tokens_per_second)
        kind, bytes_ = _largest(fastest)
        gain = fastest.tokens_per_second / best.tokens_per_second - 1
        yield (
            f"Memory decides: {fastest.name} would be {gain:.0%} faster and needs "
            f"{size(fastest.memory.total)}, more than the {size(USABLE * machine.hbm)} that are "
            f"usable; {kind} are {size(bytes_)}."
        )
    for key, named in CHOICES.items():
        others = [c for c in found if c.fits and _same_but(best, c, key)]
        if others:
            other = others[0]
            more = other.timing.step - best.timing.step
            gaps = {
                k: v - best.timing.terms[k] for k, v in other.timing.terms.items() if k != "hidden"
            }
            term = max(gaps, key=gaps.get)
            most = gaps[term]
            for_ = (
                f"for {TERM[term]}"
                if abs(most - more) < 0.01 * more
                else (
                    f"{duration(most)} of it for {TERM[term]}"
                    if most < more
                    else f"{duration(most)} for {TERM[term]} and less elsewhere"
                )
            )
            yield f"{named} {_setting(other, key)} instead takes {duration(more)} more, {for_}."


CHOICES = {"layout": "Layout", "zero": "Zero", "remat": "Remat", "micro_batches": "Micro-batches"}


def _setting(c: Candidate, key: str):
    return _choices(c.config)[key]


def _choices(config: Config) -> dict:
    return {
        k: getattr(config.mesh if k in ("layout", "zero") else config.train, k) for k in CHOICES
    }


def _same_but(best: Candidate, other: Candidate, key: str) -> bool:
    """Whether only this choice differs; of another layout any micro-batches will do, and of another
    ZeRO stage any remat policy, since not all are the same for both."""
    free = {"layout": {"micro_batches"}, "zero": {"remat", "micro_batches"}}.get(key, set())
    same = (k for k in CHOICES if k != key and k not in free)
    return _setting(best, key) != _setting(other, key) and all(
        _setting(best, k) == _setting(other, k) for k in same
    )


def _largest(c: Candidate) -> tuple[str, float]:
    kinds = {k: v for k, v in c.memory.kinds().items() if k != "total"}
    return max(kinds.items(), key=lambda kv: kv[1])


def _wrapped(part) -> str:
    """Sentences in lines; tables as they are, but for their notes."""
    if isinstance(part, str):
        return textwrap.fill(part, WIDTH)
    return part.wrapped(WIDTH)
