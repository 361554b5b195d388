"""What XLA made of a step: is there a collective that the program does not have?

The step is compiled for as many emulated devices as the mesh has. XLA for CPU rewrites some of what
it is given (reduce-scatter to all-reduce, bfloat16 to float32, several sums to one): those keep the
name of their origin. One that automatic sharding inserts has the name of the product or reduction
that it was inserted for, or none.
"""

import math
import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from zayajax.errors import UserError
from zayajax.layout import WORLD
from zayajax.mesh import emulate
from zayajax.planning.traced.trace import Collective, base_name, components, span_of

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
KINDS += "|ragged-all-to-all"
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?\S+ = .*? ({KINDS})(?:-start)?\(")


def emulated_mesh(nodes: int, gpus: int) -> Mesh:
    """Of a CPU's devices. UserError where JAX has already started with fewer."""
    emulate(nodes * gpus)
    devices = jax.devices("cpu")[: nodes * gpus]
    if len(devices) < nodes * gpus:
        raise UserError(
            f"to compile for {nodes * gpus} devices needs as many emulated ones, and JAX already "
            f"runs with {len(devices)}; restart Python and audit before any other use of JAX"
        )
    return Mesh(np.reshape(devices, (nodes, gpus)), WORLD, axis_types=(AxisType.Auto,) * 2)


def offences(text: str, traced: Sequence[Collective], nodes: int, gpus: int) -> list[str]:
    """What is wrong with compiled text, a sentence each: collectives that are not traced, groups
    that are part of a node."""
    known = {(c.op, c.span, tuple(filter(None, c.path.split("/")))) for c in traced}
    wrong = []
    for line in text.splitlines():
        if not (match := _INSTRUCTION.match(line)):
            continue
        kind, name = match[1], re.search(r'op_name="([^"]*)"', line)
        words = re.findall(r"[^/():]+", name[1]) if name else []
        span = span_of(groups(line, nodes, gpus), nodes, gpus)
        where = f"{name[1] if name else 'an instruction without a name'}: {kind} ({span})"
        written = any(
            words[-1:] and base_name(words[-1]) == op and span == of and _in_order(path, words)
            for op, of, path in known
        )
        if span != "one" and not written:
            wrong.append(f"{where}: not in the traced program, inferred by XLA")
        elif span == "partial":
            wrong.append(f"{where}: its groups are part of a node or rail, compiled")
    return list(dict.fromkeys(wrong))


def _in_order(path: Sequence[str], words: Sequence[str]) -> bool:
    left = iter(words)
    return all(scope in left for scope in path)


def groups(line: str, nodes: int, gpus: int) -> list[list[tuple[int, int]]]:
    """The devices (node, gpu) that an instruction of compiled text brings together.

    Forms: `{{0,1},{2,3}}`; `[2,2]<=[4]` and `[2,2]<=[2,2]T(1,0)`, a count, cut up; axes of a mesh,
    `mesh['node'=2,'gpu'=2] {'gpu'}`, or part of one, `{'gpu':(1)2}`; `source_target_pairs`.
    """
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", line):
        found = components(re.findall(r"\{(\d+),(\d+)\}", pairs[1]))
    elif lists := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", line):
        found = [g.split(",") for g in re.findall(r"\{([\d,]+)\}", lists[1])]
        found = found or [range(nodes * gpus)]
    elif iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, counts = (tuple(map(int, iota[i].split(","))) for i in (1, 2))
        order = iota[3] and tuple(map(int, iota[3].split(",")))
        found = np.arange(math.prod(counts)).reshape(counts).transpose(order or None).reshape(shape)
    elif mesh := re.search(r"replica_groups=@?mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        found = _of_axes(mesh[1], mesh[2])
    else:
        raise ValueError(f"compiled text with groups in an unknown form: {line.strip()[:400]}")
    return [[divmod(int(i), gpus) for i in group] for group in found]


def _of_axes(mesh: str, axes: str) -> np.ndarray:
    """Groups over some axes, or parts of axes ('gpu':(2)4, between 2 major and the minor rest)."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    parts = {
        name: (int(major or 1), int(size or sizes[name]))
        for name, major, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)
    }
    shape, kept, grouped = [], [], []
    for name, size in sizes.items():
        major, part = parts.get(name, (1, 1))
        grouped.append(len(shape) + 1)
        kept += [len(shape), len(shape) + 2]
        shape += [major, part, size // major // part]
    ids = np.arange(math.prod(shape)).reshape(shape).transpose(kept + grouped)
    return ids.reshape(-1, math.prod(shape[d] for d in grouped))
