"""How much memory a traced program's intermediate arrays need at once, without a device.

Arrays live from the equation that makes them to the last one that reads them, in program order. As
in XLA, elementwise chains are fused (an array that only feeds others is never stored), what is
written over an operand that ends there takes its place (a loop's carry, a sum, a scatter), and
constants take nothing until they are read by something that needs them in memory. The compiler may
still start an equation early or late, and packs with gaps: an estimate from below.
"""

from collections.abc import Collection, Sequence

from zayajax.planning.traced.program import Line, Op, Value, inside, line
from zayajax.planning.traced.trace import mesh_axes

# Another name for the same bytes. Layout assignment makes transposes so, beside the products that
# read them.
VIEWS = {"reshape", "squeeze", "expand_dims", "pvary", "pcast", "stop_gradient", "name", "copy"}
VIEWS |= {"transpose", "optimization_barrier", "reduced_vary_cast"}
ELEMENTWISE = set(
    """abs add add_any and ceil clamp convert_element_type cos div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow
    reduce_precision rem round rsqrt select_n sign sin sqrt square sub tan tanh xor""".split()
)
# Read their operands number by number: their readers compute them on the way.
MOVES = {"broadcast_in_dim", "concatenate", "dynamic_slice", "iota", "pad", "rev", "slice", "split"}
MOVES |= {"stack"}
REDUCTIONS = {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or"}
REDUCTIONS |= {"reduce_prod", "reduce_sum"}
# The first operand is changed in place, where nobody else reads it later.
UPDATES = {"dynamic_update_slice", "scatter", "scatter-add", "scatter-mul", "scatter-max"}
# Its arrays are in the registers and caches of a kernel.
KERNELS = {"pallas_call"}


def peak_bytes(fn, *args, **kwargs) -> int:
    """The most that a jitted function's temporaries take at once, when called with these (abstract)
    arguments; those and the results are not counted. Inside `jax.shard_map`: on each device."""
    return max(timeline(line(fn.trace(*args, **kwargs).jaxpr)), default=0)


def timeline(program: Line, donated: Sequence[Value] = (), results: bool = False) -> list[int]:
    """Bytes of temporaries while each equation of a line runs.

    Args:
      donated: of what goes in, what may be written over after its last use.
      results: whether to count what comes out, which otherwise belongs to the program around it.
    """
    walk = _Walk(program, donated, results)
    return [walk.step(i, op) for i, op in enumerate(program.ops)]


def is_view(op: Op) -> bool:
    if axes := mesh_axes(op.eqn):  # a group of one moves nothing
        return all(op.around.sizes.get(a) == 1 for a in axes)
    if op.name == "broadcast_in_dim":  # x[:, None]
        return bool(op.values) and op.values[0].bytes == op.outs[0].bytes
    return op.name in VIEWS


def fused(program: Line, slices: Collection[Value] = ()) -> dict[Value, Op | None]:
    """Of the arrays that are never stored, since all that read them compute them, what makes each.

    Views too. `slices`: of what goes in, what is cut out of a larger array (by no equation: None).
    """
    readers: dict[Value, list[Op]] = {}
    for op in program.ops:
        for v in op.values:
            readers.setdefault(v, []).append(op)
    outs, absorb = set(program.outs), ELEMENTWISE | MOVES | REDUCTIONS

    def computed(v: Value) -> bool:
        return all(op.name in absorb for op in readers.get(v, ()))

    found: dict[Value, Op | None] = {v: None for v in slices if computed(v)}
    for op in program.ops:
        for v in op.outs:
            lazy = op.name in ELEMENTWISE | MOVES and v not in outs
            if is_view(op) or (lazy and (not op.values or computed(v))):
                found[v] = op
    return found


class _Walk:
    def __init__(self, program: Line, donated, results: bool, slices: Collection[Value] = ()):
        self.slices = slices  # of what goes in, those that are cut out where they are first read
        # What holds each array's numbers: arrays in memory; itself, unless it is a view or fused.
        self.held: dict[Value, tuple[Value, ...]] = {}
        for v, op in fused(program, slices).items():
            parts = (self.holders(x) for x in (op.values if op else ()))
            self.held[v] = tuple(dict.fromkeys(h for part in parts for h in part))
        self.last: dict[Value, int] = {}
        for i, op in enumerate(program.ops):
            if any(self.stored(v) for v in op.outs) or not op.outs:
                self.last |= {h: i for v in op.values for h in self.holders(v)}
        out = {h for v in program.outs if v is not None for h in self.holders(v)}
        self.uncounted = {*program.ins} - {*slices}
        if results:
            self.last |= dict.fromkeys(out, len(program.ops))
        else:
            self.uncounted |= out
        self.over = {*donated}  # may be written over, though it is not counted
        self.live: set[Value] = set()
        self.now = 0

    def holders(self, v: Value) -> tuple[Value, ...]:
        return self.held.get(v, (v,))

    def stored(self, v: Value) -> bool:
        return v not in self.held

    def step(self, i: int, op: Op) -> int:
        """Bytes while this equation runs; then forgets what ends here."""
        read = [h for v in op.values for h in self.holders(v)]
        for v in read:
            if v in self.slices:
                self.add(v)
        made = [v for v in op.outs if self.stored(v)]
        ending = [h for h in dict.fromkeys(read) if self.last.get(h) == i]
        for out, target in zip(made, _targets(op, made), strict=True):
            spare = [h for h in ending if h in self.live or h in self.over]
            if target is not None:
                spare = [h for h in spare if h in self.holders(target)]
            elif op.name not in ELEMENTWISE:
                spare = []
            place = next((h for h in spare if h.bytes >= out.bytes > 0), None)
            if place is None:
                self.add(out)
                continue
            ending.remove(place)
            if place in self.live:
                self.drop(place)
                self.add(out)
            else:  # the room is someone else's, and stays so
                self.over |= {out}
                self.over -= {place}
                self.uncounted |= {out}
        most = self.now + _extra(op, i)
        unread = [v for v in made if self.last.get(v, i) <= i]
        for v in (*ending, *unread):
            self.drop(v)
        return most

    def add(self, v: Value):
        if v not in self.live and v not in self.uncounted:
            self.live.add(v)
            self.now += v.bytes

    def drop(self, v: Value):
        if v in self.live:
            self.live.remove(v)
            self.now -= v.bytes


def _targets(op: Op, made: Sequence[Value]) -> list[Value | None]:
    """Of each result, the operand that it is written over if that ends here."""
    if op.name in UPDATES:
        return [op.ins[0] for _ in made]
    if op.name in ("scan", "while"):
        carried = dict(zip(op.outs, _carried(op), strict=False))
        return [carried.get(v) for v in made]
    return [None for _ in made]


def scan_parts(op: Op) -> tuple[int, int, int]:
    """How many constants, carries and stacked arrays go into a scan, in this order. By their ranks:
    what says so in its parameters differs between versions of JAX."""
    body = op.eqn.params["jaxpr"].jaxpr

    def same(outer, inner):
        pairs = zip(outer, inner, strict=True)
        return sum(v.aval.ndim == w.aval.ndim for v, w in pairs)

    carries = same(op.eqn.outvars, body.outvars)
    whole = same(op.eqn.invars, body.invars)
    return whole - carries, carries, len(op.ins) - whole


def _carried(op: Op) -> Sequence[Value | None]:
    """Where a loop's carry starts: of its results the first come from these."""
    if op.name == "scan":
        consts, carries, _ = scan_parts(op)
        return op.ins[consts : consts + carries]
    params = op.eqn.params
    return op.ins[params["cond_nconsts"] + params["body_nconsts"] :]


def _extra(op: Op, index: int) -> int:
    """What an equation takes beside its operands and results: the programs that it runs."""
    if op.name in KERNELS:
        return 0
    if op.name == "ragged_dot_general":
        return _masked(op)
    return max((_turn(op, inner) for inner in inside(op, index)), default=0)


def _masked(op: Op) -> int:
    """XLA makes one product over all groups of a ragged one: of what is ragged, a copy for each
    group with zeros for the others' rows; where rows stay, and groups are summed over, once more
    with the rows first (both live at the peak in buffer assignments of XLA for CPU, jax 0.10)."""
    dims, (left, right, *_) = op.eqn.params["ragged_dot_dimension_numbers"], op.eqn.invars
    (contracted, _), _ = dims.dot_dimension_numbers
    both = set(dims.lhs_ragged_dimensions) & set(contracted)
    groups = op.eqn.invars[2].aval.shape[-1]
    ragged = (left, right) if both else (left, left)
    return groups * sum(Value(v.aval).bytes for v in ragged) if groups > 1 else 0


def _turn(op: Op, inner: Line) -> int:
    """One turn of a loop has its slices and its own results, a branch neither."""
    if op.name not in ("scan", "while"):
        return max(timeline(inner), default=0)
    carries = len(_carried(op))
    if op.name == "while" and len(inner.outs) != carries:  # its condition
        return max(timeline(inner), default=0)
    last = len(inner.ins) - (scan_parts(op)[2] if op.name == "scan" else 0)
    first = last - carries
    walk = _Walk(inner, inner.ins[first:last], True, set(inner.ins[last:]))
    return max((walk.step(i, op) for i, op in enumerate(inner.ops)), default=0)
