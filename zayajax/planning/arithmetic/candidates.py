"""Each way to run a config on a machine, with its memory and the time of its step."""

import dataclasses
from collections.abc import Iterator

from zayajax.layout import LAYOUTS, TRAINED
from zayajax.machine import Machine
from zayajax.model.flops import train_flops_per_token
from zayajax.planning.arithmetic.estimate import Memory, memory
from zayajax.planning.arithmetic.inventory import Parameter, parameters
from zayajax.planning.arithmetic.roofline import Part, parts
from zayajax.planning.arithmetic.share import share
from zayajax.planning.arithmetic.traffic import Message, by_part, messages
from zayajax.planning.traced.footprint import fits
from zayajax.settings import Config, ConfigError

# What the parts of a step are called together, in the order in which they are drawn.
OPTIMIZER = {"update", "Newton-Schulz"}
SEQUENCE = {"halo", "kv", "ring"}
TERMS = ("arithmetic", "exchange", "sequence", "weights in", "weights out", "optimizer", "hidden")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one step on one GPU."""

    arithmetic: dict[str, float]  # by part of the model, with sums of gradients
    optimizer: dict[str, float]  # norm, update, Newton-Schulz, and the deal of matrices
    sent: dict[str, float]  # exchange, halo, kv, ring, weights in, weights out
    hidden: float  # of what is sent, behind arithmetic

    @property
    def terms(self) -> dict[str, float]:
        """Of TERMS; what is hidden is negative, so that they add up to the step."""
        found = {
            "arithmetic": sum(self.arithmetic.values()),
            "exchange": self.sent.get("exchange", 0.0),
            "sequence": sum(self.sent.get(part, 0.0) for part in SEQUENCE),
            "weights in": self.sent.get("weights in", 0.0),
            "weights out": self.sent.get("weights out", 0.0),
            "optimizer": sum(self.optimizer.values()),
            "hidden": -self.hidden,
        }
        return {term: found[term] for term in TERMS}

    @property
    def step(self) -> float:
        return sum(self.terms.values())


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A config, and what it costs."""

    config: Config
    memory: Memory
    timing: Timing
    fits: bool
    tokens_per_second: float  # of one GPU
    mfu: float  # by the arithmetic of `model.flops`, at the machine's peak

    @property
    def name(self) -> str:
        mesh, train = self.config.mesh, self.config.train
        rows, A = share(self.config).rows, train.micro_batches
        of = f"{A} micro-batches" if A > 1 else "one micro-batch"
        of += f" of {rows} row{'s' * (rows > 1)} a {self._sharing}"
        return f"{mesh.layout}, zero {mesh.zero}, remat {train.remat}, {of}"

    @property
    def _sharing(self) -> str:
        axes = LAYOUTS[self.config.mesh.layout].sequence
        return {0: "GPU", 1: "node", 2: "cluster"}[len(axes)]

    def row(self) -> dict:
        mesh, train = self.config.mesh, self.config.train
        found = {
            "layout": mesh.layout,
            "zero": mesh.zero,
            "micro_batches": train.micro_batches,
            "rows": share(self.config).rows,
            "split": f"{train.micro_batches} x {share(self.config).rows}",
            "remat": train.remat,
        }
        kinds = {f"{k}_bytes": v for k, v in self.memory.kinds().items()}
        terms = {f"{k.replace(' ', '_')}_seconds": v for k, v in self.timing.terms.items()}
        found |= kinds | {"fits": self.fits} | terms
        return found | {
            "weights_seconds": terms["weights_in_seconds"] + terms["weights_out_seconds"],
            "step_seconds": self.timing.step,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
        }


def timing(made: list[Part], sent: list[Message], machine: Machine) -> Timing:
    seconds: dict[str, float] = {}
    for p in made:
        seconds[p.name] = seconds.get(p.name, 0.0) + p.seconds(machine)
    moved = by_part(sent, machine)
    optimizer = {k: v for k, v in seconds.items() if k in OPTIMIZER}
    if deal := moved.pop("deal", 0.0):
        optimizer["deal"] = deal
    arithmetic = {k: v for k, v in seconds.items() if k not in OPTIMIZER}
    return Timing(arithmetic, optimizer, moved, _hidden(arithmetic, moved))


def _hidden(arithmetic: dict[str, float], sent: dict[str, float]) -> float:
    """Seconds that a ring's hops spend behind the products that they are issued before, at most.

    Nothing else is counted as hidden. Tokens travel between two products that wait for them; with
    zero 1 the weights are gathered before the loops and scattered after them, which XLA does not
    open; with zero 3 a layer's are gathered in the turn that uses them.
    """
    return min(sent.get("ring", 0.0), arithmetic.get("attention", 0.0))


def evaluate(config: Config, machine: Machine, found: list[Parameter]) -> Candidate:
    """`found`: `inventory.parameters(config)`."""
    needs, took = memory(config, found), timing_of(config, machine, found)
    tokens = config.train.batch * config.train.sequence / config.mesh.devices
    flops = train_flops_per_token(config.model, config.train.sequence)
    rate = tokens / took.step
    return Candidate(
        config=config,
        memory=needs,
        timing=took,
        fits=fits(needs.total, machine),
        tokens_per_second=rate,
        mfu=rate * flops / machine.peak_bf16,
    )


def timing_of(config: Config, machine: Machine, found: list[Parameter]) -> Timing:
    return timing(parts(config, found), messages(config, found), machine)


def candidates(config: Config, machine: Machine) -> tuple[list[Candidate], list[str]]:
    """All ways to run `config`'s batch, and why the others are none, a sentence each."""
    found, impossible = [], []
    for layout in TRAINED:
        for zero in (1, 3):
            known = None
            for way in _ways(config, layout, zero):
                if isinstance(way, str):
                    impossible.append(way)
                    break
                known = known or parameters(way)
                found.append(evaluate(way, machine, known))
    return found, list(dict.fromkeys(impossible))


def _ways(config: Config, layout: str, zero: int) -> Iterator[Config | str]:
    """Micro-batches and remat policies of one layout and ZeRO stage; a sentence where none is."""
    splits = config.mesh.ranks(LAYOUTS[layout].sequence) > 1
    if LAYOUTS[layout].sequence and not splits:
        yield f"{layout}: on nodes of one GPU it splits no row"
        return
    if layout == "context-wide" and config.mesh.nodes == 1:
        yield "context-wide: on one node it is context"
        return
    attention = config.mesh.attention if splits else "gather"
    mesh = dataclasses.replace(config.mesh, layout=layout, zero=zero, attention=attention)
    rows, rest = divmod(config.train.batch, mesh.ranks(LAYOUTS[layout].batch))
    own = config.train.micro_batches
    for A in sorted({*_divisors(rows), *([own] if rows % own == 0 else [])}) if not rest else (1,):
        for remat in ("none", "names", "full"):
            if zero == 3 and remat == "none":
                continue  # refused: it would keep every layer's gathered weights
            train = dataclasses.replace(config.train, micro_batches=A, remat=remat)
            try:
                yield dataclasses.replace(config, mesh=mesh, train=train)
            except ConfigError as error:
                yield f"{layout}: {error}"
                return


def _divisors(rows: int) -> list[int]:
    """1, 2, 4, ... as far as they divide, and one row at a time."""
    found = [1]
    while rows % (2 * found[-1]) == 0:
        found.append(2 * found[-1])
    return sorted({*found, rows})
