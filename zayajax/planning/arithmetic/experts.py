"""Over how many GPUs of a node should the experts be? The degrees that the package does not offer,
beside the one that it does.

A degree of d puts E / d experts of each layer on a GPU, and P / d copies of all of them in a node
of P GPUs. Less travels nowhere for it: on point-to-point links a group of d has d - 1 links, so an
exchange puts T D c / d bytes on each of them, and the copies' gradients have to be summed as well.

Shape letters: E experts, D embed, F expert hidden, L layers, T tokens of a GPU, P GPUs of a node, d
degree; c bytes of the compute dtype.
"""

import dataclasses

from zayajax import exchange
from zayajax.machine import Machine
from zayajax.planning.arithmetic.candidates import Timing, timing
from zayajax.planning.arithmetic.estimate import memory
from zayajax.planning.arithmetic.inventory import Parameter, itemsize, parameters
from zayajax.planning.arithmetic.roofline import parts
from zayajax.planning.arithmetic.share import Share, share
from zayajax.planning.arithmetic.traffic import Message, messages
from zayajax.planning.traced.footprint import USABLE, fits
from zayajax.settings import Config
from zayajax.tables import Column, Table, duration, size

# Of each degree alike: XLA's expansion of ragged products, which grows with the experts of a GPU,
# would decide the comparison, and no kernel has it.
GROUPED = "grouped"
MOST_ROWS = 4096  # of a GPU at once, in the search for the largest micro-batch


def table(config: Config, machine: Machine) -> Table:
    """Degrees 2, 4, ... up to the node, on the machine's own fabric and behind a switch."""
    P, E = config.mesh.gpus, config.model.experts
    degrees = [d for d in range(2, P + 1) if P % d == 0 and E % d == 0]
    fabrics = [machine] + [machine.switched()] * machine.point_to_point
    rows = [_row(config, m, d) for m in fabrics for d in degrees]
    columns = (
        Column("fabric", "fabric", left=True),
        Column("degree", "degree"),
        Column("experts", "experts"),
        Column("expert_bytes", "weights", size),
        Column("gradient_bytes", "gradients", size),
        Column("room_bytes", "room left", size),
        Column("largest_rows", "rows"),
        Column("exchange_seconds", "exchange", duration),
        Column("copies_seconds", "copies", duration),
        Column("tokens_per_second_same", "tokens/s", "{:,.0f}".format),
        Column("tokens_per_second", "at most rows", "{:,.0f}".format),
    )
    title = f"experts over d of a node's {P} GPUs ({machine.name})"
    return Table(title, columns, rows, _notes(config, machine, rows, degrees))


def _notes(config: Config, machine: Machine, rows: list[dict], degrees: list[int]) -> list[str]:
    if not degrees:
        return ["One GPU a node: there is nothing to span."]
    tokens = share(one_batch(config, 1)).tokens
    notes = [
        "Weights and gradients: of a GPU's experts, as the model computes with them. Room left: of "
        f"{USABLE:.0%} of the HBM, at one row of {config.train.sequence:,} tokens. Rows: as many "
        f"as fit at once, up to {MOST_ROWS:,}; "
        "the room for the exchange's worst case, which grows with the degree, takes back what "
        f"fewer experts leave. Exchange: of one layer, forward and backward, {tokens:,} tokens. "
        "Copies: to gather their weights and sum their gradients, once a step. Tokens/s a GPU: one "
        "row a step, and as many as fit. Products of experts at the rate of a grouped kernel.",
    ]
    own, fabric = rows[: len(degrees)], "point-to-point" if machine.point_to_point else "switched"
    first, last = own[0], own[-1]
    if not last["largest_rows"]:
        notes.append(f"Not one row fits {machine.name}'s memory, even over the whole node.")
    elif not first["largest_rows"]:
        fitting = ", ".join(
            f"{r['largest_rows']} at degree {r['degree']}" for r in own if r["largest_rows"]
        )
        notes.append(
            f"{machine.name}: not one row fits at degree {first['degree']}, whose experts and "
            f"their gradients are {size(first['expert_bytes'] + first['gradient_bytes'])} a GPU; "
            f"{fitting}."
        )
    elif len(degrees) > 1:
        gain = last["tokens_per_second"] / first["tokens_per_second"] - 1
        notes.append(
            f"{machine.name}, {fabric}: degree {last['degree']} with {last['largest_rows']} rows "
            f"at once is {gain:+.0%} against degree {first['degree']} with "
            f"{first['largest_rows']}; an exchange takes "
            f"{last['exchange_seconds'] / first['exchange_seconds']:.2g} times as long, and the "
            f"copies of experts, whose sums took {duration(first['copies_seconds'])}, are gone."
        )
        behind = [r["tokens_per_second"] for r in rows if r["fabric"] == "switched"]
        apart = max(behind) / min(behind) - 1
        notes.append(
            "Behind a switch a group of any size has all links: with as many rows as fit, the "
            f"degrees are within {apart:.0%} of each other"
            + (
                ", by the rows that memory leaves and the sums over copies."
                if apart > 0.05
                else "."
            )
        )
    return notes


def _row(config: Config, machine: Machine, degree: int) -> dict:
    one = Degree.of(one_batch(config, 1), degree)
    largest = _largest(one, machine)
    best = one.at_rows(max(largest, 1))
    copied, gradients = one.expert_bytes()
    sent = one.sent()
    L = config.model.layers
    exchanged = sum(m.seconds(machine) for m in sent if m.part == "exchange") / L
    return {
        "fabric": "point-to-point" if machine.point_to_point else "switched",
        "degree": degree,
        "experts": one.at.experts,
        "expert_bytes": copied,
        "gradient_bytes": gradients,
        "room_bytes": USABLE * machine.hbm - one.total(),
        "largest_rows": largest,
        "exchange_seconds": exchanged,
        "copies_seconds": sum(m.seconds(machine) for m in one.copies()),
        "tokens_per_second_same": one.tokens_per_second(machine) if largest else None,
        "tokens_per_second": best.tokens_per_second(machine) if largest else None,
    }


def _largest(one: "Degree", machine: Machine) -> int:
    """Rows of a GPU at once that fit, by doubling and halving; 0 where not one does."""

    def enough(rows):
        return fits(one.at_rows(rows).total(), machine)

    if not enough(1):
        return 0
    low, high = 1, 2
    while high <= MOST_ROWS and enough(high):
        low, high = high, 2 * high
    if low == MOST_ROWS:
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


def one_batch(config: Config, rows: int) -> Config:
    """`rows` whole rows on each GPU, as one micro-batch."""
    layout = {"layout": "pretrain", "attention": "gather", "zero": 1}
    mesh = dataclasses.replace(config.mesh, **layout)
    train = dataclasses.replace(config.train, batch=rows * mesh.devices, micro_batches=1)
    return dataclasses.replace(config, mesh=mesh, train=train)


@dataclasses.dataclass(frozen=True)
class Degree:
    """A config with its experts over some of a node's GPUs."""

    config: Config
    found: list[Parameter]
    at: Share
    degree: int

    @classmethod
    def of(cls, config: Config, degree: int) -> "Degree":
        copies = config.mesh.gpus // degree

        def wider(p: Parameter) -> Parameter:
            if not p.path.startswith("layers.experts."):
                return p
            return dataclasses.replace(p, whole=p.whole * copies)

        at = share(config)
        rooms = exchange.capacities(at.tokens, degree)
        at = dataclasses.replace(at, experts=at.experts * copies, group=degree, rooms=rooms)
        return cls(config, [wider(p) for p in parameters(config)], at, degree)

    def at_rows(self, rows: int) -> "Degree":
        return Degree.of(one_batch(self.config, rows), self.degree)

    def total(self) -> float:
        return memory(self.config, self.found, self.at, GROUPED).total

    def expert_bytes(self) -> tuple[float, float]:
        """Of the copies that a GPU computes with, and of their gradients."""
        numbers = sum(p.whole for p in self.found if p.path.startswith("layers.experts."))
        c = itemsize(self.config.train.compute_dtype)
        return numbers * c, numbers * (c + 4 * (self.config.train.micro_batches > 1))

    def sent(self) -> list[Message]:
        return messages(self.config, self.found, self.at) + self.copies()

    def copies(self) -> list[Message]:
        """Each copy of an expert keeps a part of it at rest: gathered, and its gradient summed."""
        group = self.config.mesh.gpus // self.degree
        if group == 1:
            return []
        span = "node" if self.degree == 1 else "partial"
        train = self.config.train
        numbers = sum(p.whole for p in self.found if p.path.startswith("layers.experts."))
        gathered, summed = (
            numbers * itemsize(d) for d in (train.compute_dtype, train.reduce_dtype)
        )
        return [
            Message("weights in", "all_gather", gathered, span, group, 1),
            Message("weights out", "reduce_scatter", summed, span, group, 1),
        ]

    def timing(self, machine: Machine) -> Timing:
        made = parts(self.config, self.found, self.at, GROUPED)
        return timing(made, self.sent(), machine)

    def tokens_per_second(self, machine: Machine) -> float:
        return self.at.tokens / self.timing(machine).step
