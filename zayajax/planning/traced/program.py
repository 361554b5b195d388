"""A traced program as straight lines: wrappers that do nothing at run time are opened.

One line is what a compiler may put in another order. Loops and conditionals stay single equations
of their line, with lines of their own inside; `jit`, rules for derivatives, rematerialisation,
`shard_map` and loops of one turn, which XLA removes, are opened in place.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import jax
from jax.extend.core import Literal

# Equations that are the program inside them: as many operands and results, in the same order.
WRAPPERS = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "shard_map"}
WRAPPERS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_TRANSFORMS = {"jvp", "transpose", "vmap", "remat", "rematted_computation", "checkpoint", "jit"}


@dataclasses.dataclass(frozen=True)
class Around:
    """What is known of an equation from the programs that it is in."""

    path: str = ""  # names of scopes, outermost first, joined by "/"
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of the mesh's axes
    times: int | None = 1  # turns of the loops, multiplied; None inside a `while`
    in_loop: bool = False
    branch: tuple[int, ...] = ()  # of each conditional, outermost first
    place: tuple[int, ...] = ()  # tells apart all lines of a program


class Value:
    """An array of one line, as one device has it."""

    __slots__ = ("aval", "bytes")

    def __init__(self, aval):
        self.see(aval)

    def see(self, aval):
        self.aval = aval
        shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
        known = shape is not None and dtype is not None
        self.bytes = math.prod(shape) * dtype.itemsize if known else 0


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One equation of a line."""

    eqn: jax.extend.core.JaxprEqn
    around: Around  # its own scopes are in the path
    ins: tuple[Value | None, ...]  # None: a number written in the program
    outs: tuple[Value, ...]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def values(self) -> list[Value]:
        return [v for v in self.ins if v is not None]


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    ops: list[Op]
    ins: list[Value]  # constants first
    outs: list[Value | None]


def line(jaxpr, around: Around = Around()) -> Line:
    """The equations of a program, wrappers opened."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    ins = [Value(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)]
    ops: list[Op] = []
    outs = _open(jaxpr, ins, around, ops)
    return Line(ops, ins, outs)


def _open(jaxpr, ins, around: Around, ops: list[Op]) -> list[Value | None]:
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), ins, strict=True))

    def read(atoms):
        return [None if isinstance(a, Literal) else known[a] for a in atoms]

    for eqn in jaxpr.eqns:
        here = dataclasses.replace(around, path=_path(around.path, eqn))
        operands = read(eqn.invars)
        if (inner := _opened(eqn)) is not None:
            program, change = inner
            constants = [Value(v.aval) for v in program.constvars]
            if eqn.primitive.name == "shard_map":  # the whole array outside is its shard here
                for v, shard in zip(operands, program.invars, strict=True):
                    if v is not None:
                        v.see(shard.aval)
            here = dataclasses.replace(here, **change)
            results = _open(program, constants + operands, here, ops)
        else:
            results = [Value(v.aval) for v in eqn.outvars]
            ops.append(Op(eqn, here, tuple(operands), tuple(results)))
        known |= dict(zip(eqn.outvars, results, strict=True))
    return read(jaxpr.outvars)


def _opened(eqn):
    """(program, what changes around it) of a wrapper, else None."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan" and params["length"] == 1:
        return params["jaxpr"].jaxpr, {"in_loop": True}
    if name not in WRAPPERS:
        return None
    (program,) = (
        getattr(params[key], "jaxpr", params[key])
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")
        if key in params
    )
    change = {"sizes": dict(params["mesh"].shape)} if name == "shard_map" else {}
    return program, change


def inside(op: Op, index: int) -> Iterator[Line]:
    """The lines of a loop or a conditional (each branch), of which op `index` of its line is."""
    name, params, around = op.name, op.eqn.params, op.around
    place = (*around.place, index)
    if name == "cond":
        for i, branch in enumerate(params["branches"]):
            change = {"branch": (*around.branch, i), "place": (*place, i)}
            yield line(branch, dataclasses.replace(around, **change))
        return
    change = {}
    if name == "scan":
        times = around.times and around.times * params["length"]
        change = {"in_loop": True, "times": times}
    elif name == "while":
        change = {"in_loop": True, "times": None}
    programs = jax.tree.leaves(list(params.values()), is_leaf=is_program)
    for i, program in enumerate(filter(is_program, programs)):
        yield line(program, dataclasses.replace(around, place=(*place, i), **change))


def is_program(x) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def _path(outer: str, eqn) -> str:
    """Inner programs restart the stack of names; transforms wrap it: transpose(jvp(moe))."""
    words = re.findall(r"[^/()]+", str(eqn.source_info.name_stack))
    names = [w for w in words if w not in _TRANSFORMS]
    return "/".join(filter(None, (outer, *names)))
