"""How much memory a traced program's intermediate arrays need at once, without a device.

Arrays live from the equation that makes them to the last one that reads them, in program order.
That is a bound to compare programs by, not XLA's own plan: the compiler fuses elementwise chains,
reuses buffers in place, and may start an equation early.
"""

import math

import jax
from jax.extend.core import Literal

from zayajax.planning.trace import is_program

# Another name for the same bytes.
VIEWS = {"reshape", "squeeze", "expand_dims", "pvary", "pcast", "stop_gradient"}
# Its arrays are in the registers and caches of a kernel.
KERNELS = {"pallas_call"}


def peak_bytes(fn, *args, **kwargs) -> int:
    """The most that a jitted function's temporaries take at once, when called with these (abstract)
    arguments; those and the results are not counted. Inside `jax.shard_map`: on each device."""
    return _peak(fn.trace(*args, **kwargs).jaxpr.jaxpr)


def _peak(jaxpr) -> int:
    """Of the temporaries alone: what goes in and what comes out is the program's around it."""
    owner, last = {}, {}
    for i, eqn in enumerate(jaxpr.eqns):
        if _is_view(eqn):
            (source,) = _variables(eqn.invars) or eqn.outvars
            owner[eqn.outvars[0]] = owner.get(source, source)
        last |= {owner.get(v, v): i for v in _variables(eqn.invars)}
    outside = {owner.get(v, v) for v in _variables(jaxpr.outvars)}
    outside |= {*jaxpr.invars, *jaxpr.constvars}
    live, now, most = set(), 0, 0
    for i, eqn in enumerate(jaxpr.eqns):
        made = {owner.get(v, v) for v in eqn.outvars} - outside - live
        live, now = live | made, now + sum(map(_bytes, made))
        most = max(most, now + _inside(eqn))
        ended = {owner.get(v, v) for v in _variables(eqn.invars)} | made
        ended = {v for v in ended & live if last.get(v, i) <= i}
        live, now = live - ended, now - sum(map(_bytes, ended))
    return most


def _inside(eqn) -> int:
    """What an equation takes beside its operands and results: the programs that it runs."""
    if eqn.primitive.name in KERNELS:
        return 0
    most = 0
    for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
        if is_program(x):
            program = getattr(x, "jaxpr", x)
            turn = []  # one turn of a loop has its slices and its own results
            if eqn.primitive.name == "scan":
                pairs = zip(eqn.invars, program.invars, strict=True)
                turn = [v for whole, v in pairs if whole.aval.shape != v.aval.shape]
            if eqn.primitive.name in ("scan", "while"):
                turn = turn + program.outvars
            most = max(most, _peak(program) + sum(map(_bytes, turn)))
    return most


def _is_view(eqn) -> bool:
    if eqn.primitive.name == "broadcast_in_dim":  # x[:, None]
        return bool(_variables(eqn.invars)) and _bytes(eqn.invars[0]) == _bytes(eqn.outvars[0])
    return eqn.primitive.name in VIEWS and len(eqn.outvars) == 1


def _variables(atoms) -> list:
    return [v for v in atoms if not isinstance(v, Literal)]


def _bytes(v) -> int:
    shape, dtype = getattr(v.aval, "shape", None), getattr(v.aval, "dtype", None)
    return 0 if shape is None or dtype is None else math.prod(shape) * dtype.itemsize
