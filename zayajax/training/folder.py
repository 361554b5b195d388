"""The folder of a run: what may be there before it starts, and what it is cleared of."""

import shutil
from pathlib import Path

from zayajax.checkpoint import FOLDER as CHECKPOINTS
from zayajax.config import Config, to_toml
from zayajax.errors import UserError
from zayajax.training import metrics

CONFIG, SAMPLES, REPORT, DATA = "config.toml", "samples.txt", "report.html", "data"
# All that a run writes; `--fresh` removes these and nothing else. The tokenised text stays.
OWN = (CONFIG, metrics.FILE, SAMPLES, REPORT, CHECKPOINTS, "tensorboard")


def has_run(folder: Path) -> bool:
    checkpoints = folder / CHECKPOINTS
    return (folder / metrics.FILE).exists() or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def prepare(folder: Path, *, resume: bool, fresh: bool) -> None:
    """Makes the folder ready; UserError where a run is in it and nobody said what to do with it."""
    if resume and fresh:
        raise UserError("--resume and --fresh contradict each other; name one")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name another folder with --run-dir")
    if has_run(folder) and not (resume or fresh):
        raise UserError(
            f"{folder}: has a run in it; continue it with --resume, or delete it with --fresh"
        )
    if fresh:
        for path in map(folder.__truediv__, OWN):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror})") from None


def write_config(folder: Path, config: Config) -> None:
    (folder / CONFIG).write_text(to_toml(config))
