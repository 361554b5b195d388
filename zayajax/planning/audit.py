"""Every collective of a step, read from its traced program, and the memory that it takes.

Nothing runs: the program that `training.step.build` makes is traced on an abstract mesh of as many
nodes as are asked for, in seconds, on a machine without a GPU.
"""

import dataclasses
import html
from collections.abc import Sequence
from functools import partial

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from matplotlib.figure import Figure

from zayajax.errors import UserError
from zayajax.layout import WORLD
from zayajax.machine import MI300X, Machine
from zayajax.mesh import abstract_mesh
from zayajax.planning import fabric, presented
from zayajax.planning.traced.compiled import emulated_mesh, offences
from zayajax.planning.traced.footprint import fits, footprint
from zayajax.planning.traced.overlap import hidden
from zayajax.planning.traced.program import Line, line
from zayajax.planning.traced.trace import Collective, sent, weights_in_loops
from zayajax.settings import Config
from zayajax.tables import Table
from zayajax.training.feed import requests_shape
from zayajax.training.run import PROMPT
from zayajax.training.step import REQUESTS, Program, build, layout_of

STEPS = ("train", "eval", "decode")
# What JAX's collectives are on the fabric.
OPS = {
    "psum": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "ppermute": "permute",
    "pbroadcast": "broadcast",
    "pbroadcast_dynamic": "broadcast",
}


@dataclasses.dataclass(frozen=True, repr=False)
class Audit:
    """What a step sends and holds. `print` it, or show it in a notebook."""

    title: str
    collectives: Table  # a row an equation, in program order; `rows` is what --json gives
    memory: Table
    footprint: dict  # of `memory`, as --json gives it
    verdict: str  # "ok", or what is wrong, and where
    machine: Machine

    @property
    def ok(self) -> bool:
        return self.verdict == "ok"

    def to_json(self) -> dict:
        return {
            "collectives": list(self.collectives.rows),
            "memory": self.footprint,
            "verdict": self.verdict,
        }

    def tables(self) -> list[Table]:
        """To be read: collectives by scope, their sums by span, and memory."""
        rows, machine = self.collectives.rows, self.machine
        return [presented.by_scope(rows, machine), presented.by_span(rows, machine), self.memory]

    def __repr__(self) -> str:
        return "\n\n".join([self.title, *map(repr, self.tables()), f"verdict: {self.verdict}"])

    def _repr_html_(self) -> str:
        tables = "".join(table._repr_html_() for table in self.tables())
        return (
            f"<p>{html.escape(self.title)}</p>{tables}<p>verdict: {html.escape(self.verdict)}</p>"
        )

    def plot(self) -> Figure:
        """Seconds of a step by scope and span: what may be hidden, and what may not."""
        return presented.bars(self.collectives.rows, self.title)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step on an abstract mesh."""

    config: Config
    program: Program
    args: tuple  # abstract, with shardings
    traced: jax.stages.Traced
    line: Line


def trace_step(config: Config, mesh, step: str = "train") -> Traced:
    """Traces the step that a run calls. `mesh`: abstract, or of devices."""
    program = build(config, mesh)
    args = arguments(config, program, mesh, step)
    fn = {"train": "train_step", "eval": "eval_step", "decode": "next_logits"}[step]
    traced = getattr(program, fn).trace(*args)
    return Traced(config, program, args, traced, line(traced.jaxpr))


def arguments(config: Config, program: Program, mesh, step: str) -> tuple:
    """Abstract, with shardings. `decode`: as a run writes its samples, one text a device, or, in a
    run that writes none, as long as a row of its training."""
    train = config.train
    if step == "decode":
        length = _text_length(config)
        at = NamedSharding(mesh, P(WORLD))
        ints = jax.ShapeDtypeStruct((config.mesh.devices, length), "int32", sharding=at)
        last = jax.ShapeDtypeStruct((config.mesh.devices,), "int32", sharding=at)
        return program.state.params, ints, ints, last
    shape, at = (train.batch, train.sequence), program.batch_sharding
    dtypes = dict.fromkeys(("tokens", "targets", "segments", "positions"), "int32")
    dtypes |= {"weights": "float32"}
    batch = {k: jax.ShapeDtypeStruct(shape, d, sharding=at) for k, d in dtypes.items()}
    if at is not None:
        batch[REQUESTS] = jax.ShapeDtypeStruct(requests_shape(at), "int32", sharding=at)
    return (program.state if step == "train" else program.state.params), batch


def _text_length(config: Config) -> int:
    new = config.train.sample_tokens
    return PROMPT + new if new else config.train.sequence


def audit(
    config: Config, machine: Machine = MI300X, *, step: str = "train", compile: bool = False
) -> Audit:
    """Lists the collectives of one step of `config` on nodes of `machine`, and its memory.

    Args:
      config: for as many nodes as its mesh names; `planning.scale.at_scale` changes that.
      machine: by whose rates times are modelled.
      step: "train"; "eval", one batch of held-out text; "decode", one token of each sample.
      compile: also compiles it for as many emulated devices, and looks for collectives that XLA
        added. Only before JAX has started.

    Raises UserError for another step, or a mesh whose nodes are not this machine's.
    """
    if step not in STEPS:
        raise UserError(f"step {step!r}: must be one of {', '.join(STEPS)}")
    machine.check(config.mesh.gpus)
    # Before anything else uses JAX.
    emulated = emulated_mesh(config.mesh.nodes, config.mesh.gpus) if compile else None
    mesh = abstract_mesh(config.mesh.nodes, config.mesh.gpus)
    found = trace_step(config, mesh, step)
    listed = [c for c in sent(found.line) if c.group > 1]  # a group of one sends nothing
    behind = hidden(found.line, listed, partial(modelled, machine), machine)
    rows = [_row(c, machine, s) for c, s in zip(listed, behind, strict=True)]
    memory = _memory(found, mesh, machine, step)
    wrong = _offences(listed, config)
    if compile:
        wrong += _compiled_offences(config, emulated, step)
    return Audit(
        title=_title(config, machine, step),
        collectives=presented.listed(rows),
        memory=presented.memory(memory, machine),
        footprint=memory,
        verdict="; ".join(dict.fromkeys(wrong)) or "ok",
        machine=machine,
    )


def _title(config: Config, machine: Machine, step: str) -> str:
    m, t = config.mesh, config.train
    gpus = f"{m.nodes} x {m.gpus} {machine.name}"
    return (
        f"{step} step on {gpus}, layout {m.layout}, zero {m.zero}, {t.batch} x {t.sequence} tokens"
    )


def modelled(machine: Machine, c: Collective) -> float:
    """Seconds of one, alone on the fabric."""
    return fabric.seconds(machine, OPS[c.op], c.bytes, c.span, c.group)


def _row(c: Collective, machine: Machine, behind: float) -> dict:
    return {
        "op": OPS[c.op],
        "scope": c.scope,
        "dtype": c.dtype,
        "span": c.span,
        "group_size": c.group,
        "bytes": c.bytes,
        "count": c.times if c.even else 0,
        "seconds": modelled(machine, c),
        "seconds_switched": modelled(machine.switched(), c),
        "hidden": behind,
        "axes": list(c.axes),
        "in_loop": c.in_loop,
        "path": c.path,
        "if_skewed": None if c.even else c.times,
    }


def _offences(listed: Sequence[Collective], config: Config) -> list[str]:
    wrong = [
        f"{_named(c)}: its groups are part of a node or rail" for c in listed if c.span == "partial"
    ]
    if config.mesh.zero == 1:
        wrong += [
            f"{_named(c)}: on weights or gradients inside a loop, under zero 1"
            for c in weights_in_loops(listed)
        ]
    return wrong


def _compiled_offences(config: Config, mesh: Mesh, step: str) -> list[str]:
    # Traced for these devices: where XLA for CPU lacks an operation, it is another program.
    found = trace_step(config, mesh, step)
    text = found.traced.lower().compile().as_text()
    return offences(text, list(sent(found.line)), *mesh.devices.shape)


def _named(c: Collective) -> str:
    return f"{c.path or 'outside all scopes'}: {OPS[c.op]} ({c.span})"


def _memory(found: Traced, mesh, machine: Machine, step: str) -> dict:
    config, program = found.config, found.program
    layout = layout_of(config.mesh, mesh)
    if step == "decode":
        layout = dataclasses.replace(layout, batch=WORLD, sequence=())

    def of(config, line):
        return footprint(program.state, found.args[1:], config, mesh, layout, line)

    memory = of(config, found.line)
    if step == "train":
        by_remat = {}
        for remat in ("none", "names", "full"):
            if remat == "none" and config.mesh.zero == 3:
                continue  # refused: it would keep every layer's gathered weights
            train = dataclasses.replace(config.train, remat=remat)
            other = dataclasses.replace(config, train=train)
            same = remat == config.train.remat
            program_line = found.line if same else trace_step(other, mesh).line
            by_remat[remat] = of(other, program_line)["activations"]
        memory["activations_by_remat"] = by_remat
    return memory | {"hbm": int(machine.hbm), "fits": fits(memory["total"], machine)}
