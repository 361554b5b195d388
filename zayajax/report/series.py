"""What a report knows of a run, read in one pass, in bounded memory but for some numbers a step.

Shape letters: L layers, E experts, C = E + 1 classes (the last skips), W columns of the heat map.
"""

import math
from collections.abc import Iterable

import numpy as np

from zayajax.training.metrics import TRAIN_KEYS

COLUMNS = 400  # of the heat map
SCALARS = (*(key for key in TRAIN_KEYS if key not in ("step", "kind")), "exchange_capacity")


class Run:
    """The lines of a run as columns: `train[key]` and `eval[key]` are float64, NaN where unknown.

    Of several lines of one step and kind, as a resumed run may have, the last counts.
    """

    def __init__(self, lines: Iterable[dict]):
        rows = {"train": {}, "eval": {}}
        self.load = LoadMap()
        for line in lines:
            if line["kind"] not in rows:
                continue
            values = [math.nan if (v := line.get(k)) is None else float(v) for k in SCALARS]
            rows[line["kind"]][line["step"]] = values
            if line.get("expert_load"):
                self.load.add(line["step"], line["expert_load"])
        self.train, self.eval = (_columns(rows[kind]) for kind in ("train", "eval"))


def _columns(rows: dict[int, list[float]]) -> dict[str, np.ndarray]:
    steps = sorted(rows)
    table = np.array([rows[s] for s in steps], dtype=np.float64).reshape(len(steps), len(SCALARS))
    return {"step": np.array(steps, dtype=np.int64)} | dict(zip(SCALARS, table.T, strict=True))


class LoadMap:
    """Expert loads averaged into at most COLUMNS columns of equally many steps, in one pass.

    When a step falls beyond the last column, columns are merged in pairs.
    """

    def __init__(self):
        self.steps_a_column = 1
        self.sum_WLC = self.count_W = None

    def add(self, step: int, shares_LC):
        shares_LC = np.asarray(shares_LC, dtype=np.float64)
        if self.sum_WLC is None:
            self.sum_WLC = np.zeros((COLUMNS, *shares_LC.shape))
            self.count_W = np.zeros(COLUMNS)
        # A batch without weight, or another model's line, has nothing to say here.
        if shares_LC.shape != self.sum_WLC.shape[1:] or not np.isfinite(shares_LC).all():
            return
        while step // self.steps_a_column >= COLUMNS:
            self.steps_a_column *= 2
            for x in (self.sum_WLC, self.count_W):
                x[: COLUMNS // 2] = x[0::2] + x[1::2]
                x[COLUMNS // 2 :] = 0
        self.sum_WLC[step // self.steps_a_column] += shares_LC
        self.count_W[step // self.steps_a_column] += 1

    def mean(self):
        """The steps of the columns' edges [W+1], and shares [W, L, C]; empty columns repeat the one
        before. None without a load."""
        if self.count_W is None or not self.count_W.any():
            return None
        used = np.flatnonzero(self.count_W)
        first, last = used[0], used[-1]
        column_W = np.arange(first, last + 1)
        source_W = used[np.searchsorted(used, column_W, side="right") - 1]
        mean_WLC = self.sum_WLC[source_W] / self.count_W[source_W][:, None, None]
        return np.arange(first, last + 2) * self.steps_a_column, mean_WLC
