"""What a run writes down about itself: `metrics.jsonl`, and the same scalars for TensorBoard.

Shape letters: L layers, E experts, C = E + 1 classes, of which the last skips its expert.

JSON has no word for a number that is not finite. Such a value is written as null, and spelled out
beside it: `{"loss": null, "not_finite": {"loss": "nan"}}`. `read_metrics` puts it back, so null
alone always means "unknown".
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from zayajax.errors import UserError
from zayajax.training.board import Board
from zayajax.training.lines import Lines, to_stderr

FILE = "metrics.jsonl"
NOT_FINITE = "not_finite"
LINE_KEYS = ("step", "kind", "loss", "tokens")
TRAIN_KEYS = (
    *LINE_KEYS,
    "tokens_per_second",
    "mfu",
    "step_seconds",
    "learning_rate",
    "grad_norm",
    "router_entropy",
    "max_expert_load",
    "skip_fraction",
)
EVENTS = ("rollback", "recheck")
KEYS = {"train": TRAIN_KEYS, "eval": LINE_KEYS} | dict.fromkeys(EVENTS, ("step",))


def _among_experts(counts_LC):
    """Shares among the experts alone, [L', E]; a layer without a token in any is left out."""
    counts_LE = np.asarray(counts_LC, dtype=np.int64)[:, :-1]
    total_L1 = counts_LE.sum(axis=1, keepdims=True)
    used_L = total_L1[:, 0] > 0
    return counts_LE[used_L] / total_L1[used_L]


def router_entropy(counts_LC) -> float:
    """Mean over layers of H(load) / ln E over the E experts: 1 is even, 0 is one expert for all.

    `counts_LC` are the tokens of each class, int `[L, E+1]`. The skip class and the layers without
    a token in any expert are left out. 0 if that leaves no layer; a single expert is even.
    """
    used = [h for h in entropy_by_layer(counts_LC) if h is not None]
    return float(np.mean(used)) if used else 0.0


def entropy_by_layer(counts_LC) -> list[float | None]:
    """H(load) / ln E of each layer; None for one without a token in any expert."""
    counts_LE = np.asarray(counts_LC, dtype=np.int64)[:, :-1]
    E, total_L = counts_LE.shape[1], counts_LE.sum(axis=1)
    p_LE = counts_LE / np.maximum(total_L, 1)[:, None]
    # 0 ln 0 is 0. The absolute value only turns -0.0 into 0.0.
    p_ln_p_LE = p_LE * np.log(p_LE, where=p_LE > 0, out=np.zeros_like(p_LE))
    h_L = abs(p_ln_p_LE.sum(axis=1)) / math.log(E) if E > 1 else np.ones(len(p_LE))
    return [float(h) if n else None for h, n in zip(h_L, total_L, strict=True)]


def max_expert_load(counts_LC) -> float:
    """The largest share of an expert in any layer, times E: 1 is even, E is one expert for all.

    Shares are among the tokens that an expert has, the skip class left out; 0 without any.
    """
    p_LE = _among_experts(counts_LC)
    return float(p_LE.max() * p_LE.shape[1]) if p_LE.size else 0.0


def skip_fraction(counts_LC) -> float:
    """The part of all tokens, over all layers, that skip their expert; 0 without tokens."""
    counts_LC = np.asarray(counts_LC, dtype=np.int64)
    return float(counts_LC[:, -1].sum() / max(counts_LC.sum(), 1))


def expert_load(counts_LC) -> list[list[float]]:
    """Each class's share of its layer's tokens, `[L, E+1]` in 5 digits, the skip class last."""
    counts_LC = np.asarray(counts_LC, dtype=np.int64)
    return np.round(counts_LC / np.maximum(counts_LC.sum(axis=1, keepdims=True), 1), 5).tolist()


def load_metrics(counts_LC) -> dict:
    """All that a train line says about the experts, from int counts `[L, E+1]`."""
    return {
        "router_entropy": router_entropy(counts_LC),
        "entropy_by_layer": [h and round(h, 5) for h in entropy_by_layer(counts_LC)],
        "max_expert_load": max_expert_load(counts_LC),
        "skip_fraction": skip_fraction(counts_LC),
        "expert_load": expert_load(counts_LC),
    }


def exchange_metrics(rooms_LC, sizes_C) -> dict:
    """Which capacities the expert exchange ran with.

    `rooms_LC`: how often each was used, over layers, micro-batches and devices; `sizes_C` what each
    is as a multiple of the even share. `exchange_capacity` is their mean, the bytes sent over the
    fewest that an even routing could do with; `exchange_buckets` are the shares of the capacities.
    """
    uses_C = np.asarray(rooms_LC, dtype=np.int64).sum(axis=0)
    shares_C = uses_C / uses_C.sum()
    return {
        "exchange_capacity": float(shares_C @ np.asarray(sizes_C)),
        "exchange_buckets": np.round(shares_C, 5).tolist(),
    }


class MetricsLog:
    """Appends lines to a run's `metrics.jsonl` and mirrors the scalars to `tensorboard/`.

    `resume_step` None starts a new run, and a folder that has one is a UserError. An int continues
    it: lines after that step are cut off the file and hidden from TensorBoard, so is its evaluation
    where that is to come again (not `evaluated`), and a last line that a kill tore is dropped.
    Lines elsewhere that cannot be read are no reason not to go on: they are moved to
    `metrics.jsonl.damaged`, and `say` is told. Only process 0 writes: the others pass
    `enabled=False`. A disk that is full does not stop the run: see `Lines`.
    """

    def __init__(
        self,
        run_dir,
        resume_step: int | None = None,
        *,
        evaluated: bool = True,
        enabled: bool = True,
        say: Callable[[str], None] = to_stderr,
    ):
        self._file = self._board = None
        if not enabled:
            return
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / FILE
        if path.exists() and resume_step is not None:
            _cut(path, resume_step, say, again=("rollback",) if evaluated else ("rollback", "eval"))
        elif path.exists() and path.stat().st_size:
            raise UserError(f"{path}: the folder has a run in it; use --resume or --fresh")
        self._path, self._say, self._file = path, say, Lines(path, say)

        purge = None if resume_step is None else resume_step + 1
        folder = run_dir / "tensorboard"
        self._board = Board(
            folder,
            purge,
            lambda error: say(f"{folder}: no more for TensorBoard ({error.strerror}); going on"),
        )

    def write(self, line: Mapping):
        """One line, on its way to disk when this returns. A train line has TRAIN_KEYS, as often as
        is affordable `expert_load`, and of a bad step what `guard.line` says; an eval line has
        LINE_KEYS and anything else; an event (EVENTS) its step and anything else."""
        if self._file is None:
            return
        kind = line.get("kind")
        if kind not in KEYS:
            raise ValueError(f"kind must be one of {', '.join(KEYS)}, and is {kind!r}")
        if missing := [key for key in KEYS[kind] if key not in line]:
            raise ValueError(f"a line of kind {kind!r} lacks {', '.join(missing)}")
        line = {key: _plain(value) for key, value in line.items()}
        self._file.write(to_json(line) + "\n")
        for key, value in line.items():
            # Not-a-number would make tensorboardX warn at every step from then on.
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if key != "step" and number and math.isfinite(value):
                self._board.add(f"{kind}/{key}", value, line["step"])

    def sync(self):
        """What was written outlives the machine from here on."""
        if self._file is not None:
            self._file.sync()

    def cut(self, step: int):
        """Takes back the lines after `step`. TensorBoard keeps both, and draws the later ones."""
        if self._file is not None:
            self._file.close()
            _cut(self._path, step, self._say)
            self._file = Lines(self._path, self._say)

    def close(self):
        if self._file is not None:
            self._file.close()
            self._board.close()
            self._file = self._board = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def to_json(line: Mapping) -> str:
    """Strictly valid JSON; see the head of this file for numbers that are not finite."""
    clean, odd = {}, {}
    for key, value in line.items():
        clean[key], bad = _nulls(_plain(value))
        if bad:
            odd[key] = bad
    return json.dumps(clean | ({NOT_FINITE: odd} if odd else {}), allow_nan=False)


def iter_metrics(path, load_every: int = 1) -> Iterator[dict]:
    """The lines of a `metrics.jsonl`, one by one; `expert_load` is null but in every n-th of them.

    A last line that is not whole is left out: a kill tears it, and so does reading a run that is
    being written. Anywhere else it is a UserError with file and line.
    """
    for _, line in _lines(Path(path), load_every):
        yield line


def read_metrics(path) -> list[dict]:
    """All lines of a `metrics.jsonl`; see `iter_metrics`."""
    return list(iter_metrics(path))


def _plain(value):
    """NumPy and JAX arrays and scalars to Python's own numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _nulls(value):
    """The value with null for what is not finite, and how the first such number is spelled."""
    if isinstance(value, (list, tuple)):
        pairs = [_nulls(_plain(v)) for v in value]
        return [v for v, _ in pairs], next((bad for _, bad in pairs if bad), None)
    if isinstance(value, Mapping):
        pairs = {k: _nulls(_plain(v)) for k, v in value.items()}
        return {k: v for k, (v, _) in pairs.items()}, next(
            (b for _, b in pairs.values() if b), None
        )
    if isinstance(value, float) and not math.isfinite(value):
        return None, repr(value)
    return value, None


def _refuse(constant: str):
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _parse(raw: bytes) -> dict:
    line = _DECODER.decode(raw.decode())
    if not isinstance(line, dict) or type(line.get("step")) is not int or "kind" not in line:
        raise ValueError("it needs at least a step and a kind")
    for key, spelled in line.pop(NOT_FINITE, {}).items():
        if line[key] is None:
            line[key] = float(spelled)
    return line


def _without_load(raw: bytes) -> bytes:
    # The load is nine tenths of a large model's line, and reading it as numbers takes as much.
    start = raw.find(b'"expert_load": [[')
    end = raw.find(b"]]", start)
    return raw if min(start, end) < 0 else raw[:start] + b'"expert_load": null' + raw[end + 2 :]


def _lines(path: Path, load_every: int = 1, damaged: list | None = None) -> Iterator:
    """(raw, line) of each; others, but for a torn last one, go to `damaged` as (number, raw), or
    without it raise UserError."""
    torn = None
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            if torn:
                if damaged is None:
                    raise UserError(
                        f"{path}, line {torn[0]}: is not a line of metrics ({torn[2]}); "
                        "repair it or take it out"
                    )
                damaged.append(torn[:2])
                torn = None
            raw = raw.rstrip(b"\r\n")
            try:
                line = _parse(raw if number % load_every == 0 else _without_load(raw))
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                torn = number, raw, error
                continue
            yield raw, line


def _cut(path: Path, step: int, say: Callable[[str], None], again: Sequence[str] = ()):
    """Keeps the lines up to `step`, but for those of it whose kind will be written `again`. A kill
    in the middle of this leaves the old file."""
    part, aside = (path.with_name(path.name + end) for end in (".part", ".damaged"))
    damaged: list[tuple[int, bytes]] = []
    with part.open("wb") as file:
        for raw, line in _lines(path, damaged=damaged):
            if line["step"] < step or (line["step"] == step and line["kind"] not in again):
                file.write(raw + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if damaged:
        with aside.open("ab") as file:
            file.writelines(raw + b"\n" for _, raw in damaged)
        n, first = len(damaged), damaged[0][0]
        say(
            f"{path}: line {first} is not a line of metrics"
            + (f", nor {'is 1 other' if n == 2 else f'are {n - 1:,} others'}" if n > 1 else "")
            + f"; moved to {aside.name}"
        )
    os.replace(part, path)
