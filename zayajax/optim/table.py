"""Which parameter goes to which optimizer: one table, and its text at the start of a run.

Letters in the column of matrices: D embed, H query heads, N key-value heads, K head width, W half
of the values' channels, F expert hidden, G = 2F gate and up, R router width, C router classes.
"""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from zayajax.model.common import Balance
from zayajax.settings import OptimConfig

# Groups of parameters with one rule. MATRICES have the one that `optim.matrices` names.
MATRICES, ADAMW, ADAMW_DECAYED, BALANCE = "matrices", "adamw", "adamw_decayed", "balance"


class Rule(NamedTuple):
    paths: str  # of parameters; * is anything
    group: str
    matrix: str = ""  # the last dimensions as "rows | columns", as the model multiplies


# The first row that fits. A parameter that none fits is a mistake: a new one must be put here.
TABLE = (
    Rule("layers.attn.q", MATRICES, "D | H K"),
    Rule("layers.attn.k", MATRICES, "D | N K"),
    Rule("layers.attn.v_now", MATRICES, "D | W"),
    Rule("layers.attn.v_late", MATRICES, "D | W"),
    Rule("layers.attn.o", MATRICES, "H K | D"),
    Rule("layers.router.down", MATRICES, "D | R"),
    Rule("layers.router.fc1", MATRICES, "R | R"),
    Rule("layers.router.fc2", MATRICES, "R | R"),
    Rule("layers.router.out", MATRICES, "R | C"),
    Rule("layers.experts.gate_up", MATRICES, "D | G"),  # one matrix, as it is stored
    Rule("layers.experts.down", MATRICES, "F | D"),
    Rule("layers.attn.grouped", ADAMW_DECAYED),
    Rule("layers.attn.depthwise", ADAMW),
    Rule("embed", ADAMW),
    Rule("head", ADAMW),
    Rule("layers.router.balance_bias", BALANCE),
    Rule("*_bias", ADAMW),
    Rule("*_scale", ADAMW),
    Rule("layers.norm_*", ADAMW),
    Rule("layers.router.norm", ADAMW),
    Rule("norm_out", ADAMW),
    Rule("layers.attn.temp", ADAMW),
    Rule("gamma", ADAMW),
)


def rule(path: str) -> Rule:
    """The row of a parameter; ValueError where there is none."""
    for row in TABLE:
        if fnmatchcase(path, row.paths):
            return row
    raise ValueError(f"{path}: no row of optim.table.TABLE says how this parameter is optimized")


def matrix(path: str) -> str:
    """A parameter's last dimensions as "rows | columns"; "" where it is no matrix to Muon."""
    return rule(path).matrix


def groups(named: Mapping[str, object]) -> dict[str, str]:
    """{path: group}, of {path: parameter}; ValueError for one that has no row, or a wrong one."""
    for path, v in named.items():
        if isinstance(v, Balance) != (rule(path).group == BALANCE):
            raise ValueError(f"{path}: {type(v).__name__} under {rule(path)}")
    return {path: rule(path).group for path in named}


def describe(cfg: OptimConfig, named: Mapping[str, object]) -> str:
    """The table for these parameters (abstract will do): a line for each row that is used."""
    lines = [("parameters", "shape", "optimizer", "weight decay")]
    used = {path: rule(path) for path in named}
    for row in (row for row in TABLE if row in used.values()):
        found = {path: v.shape for path, v in named.items() if used[path] is row}
        name, shape = row.paths, " x ".join(map(str, next(iter(found.values()))))
        if row.matrix:
            M, m, n = stack_shape(row.matrix, *found.values())
            shape = f"{M} of {m} x {n}"
        elif len(found) > 1:
            name += f" ({len(found)})"
            shape = f"{sum(map(math.prod, found.values())):,} in all"
        optimizer = cfg.matrices if row.group == MATRICES else row.group.split("_")[0]
        decay = cfg.weight_decay if row.group in (MATRICES, ADAMW_DECAYED) else 0
        lines.append((name, shape, optimizer, f"{decay:g}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join(rows)


def stack_shape(matrix: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(matrices, rows, columns) of an array whose last dimensions are "rows | columns"."""
    rows, columns = (len(side.split()) for side in matrix.split("|"))
    sides = shape[-rows - columns : -columns], shape[-columns:]
    return math.prod(shape[: -rows - columns]), *map(math.prod, sides)
