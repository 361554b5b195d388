"""The folder of a run: what may be there before it starts, and what it is cleared of."""

import contextlib
import errno
import fcntl
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from zayajax.checkpoint import FOLDER as CHECKPOINTS
from zayajax.config import to_toml
from zayajax.errors import UserError
from zayajax.settings import Config
from zayajax.training import heartbeats, ledger, metrics

CONFIG, SAMPLES, REPORT, DATA = "config.toml", "samples.txt", "report.html", "data"
# All that a run writes; `clear` removes these and nothing else. The tokenised text stays.
OWN = (CONFIG, metrics.FILE, SAMPLES, REPORT, CHECKPOINTS, "tensorboard", ledger.FILE)
LOCK = ".lock"
MARK = "# Every setting of this run, written by zayajax.\n"


def has_run(folder: Path) -> bool:
    """Metrics, or a checkpoint, complete or not: other files may be anybody's."""
    checkpoints = folder / CHECKPOINTS
    steps = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return (folder / metrics.FILE).exists() or any(p.name[:1].isdigit() for p in steps)


def check(folder: Path, *, resume: bool, fresh: bool, init_from: Path | None = None) -> None:
    """UserError where the folder cannot take this run. Changes nothing but to make the folder."""
    if resume and fresh:
        raise UserError("--resume and --fresh contradict each other; name one")
    if init_from and not init_from.exists():
        raise UserError(f"{init_from}: there is nothing to start from (--init-from)")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name another folder with --run-dir")
    if has_run(folder) and not (resume or fresh):
        raise UserError(
            f"{folder}: has a run in it; continue it with --resume, or delete it with --fresh"
        )
    if fresh and init_from and init_from.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{init_from}: --fresh would delete it; name another --run-dir")
    config = folder / CONFIG
    if config.exists() and not (config.is_file() and config.read_text().startswith(MARK)):
        raise UserError(f"{config}: was not written by a run; name another folder with --run-dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror})") from None


@contextlib.contextmanager
def taken(folder: Path) -> Iterator[None]:
    """Inside, no other run writes to the folder: a second one is a UserError that names the first.

    The system gives the lock back with the process, however that ends. It needs a file system that
    has locks; on one that has none, nobody is kept out.
    """
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "unknown"
            raise UserError(
                f"{folder}: another run is writing there ({who}); stop it, or name another folder "
                "with --run-dir"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def discard(folder: Path, *, made: bool) -> None:
    """Takes away a folder that this run has made, if it came to nothing."""
    nothing = {LOCK, heartbeats.FOLDER, ledger.FILE}
    if made and folder.is_dir() and {path.name for path in folder.iterdir()} <= nothing:
        shutil.rmtree(folder)


def clear(folder: Path) -> None:
    """Deletes the run in a folder, if there is one."""
    if not has_run(folder):
        return
    for path in map(folder.__truediv__, OWN):
        if path.is_dir():  # perhaps a link to a larger disk: what is in it goes, the folder stays
            for child in path.iterdir():
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        else:
            path.unlink(missing_ok=True)


def write_config(folder: Path, config: Config) -> None:
    """Whole or not at all: of a run whose disk was full it is what `--resume` looks at."""
    new = folder / f".{CONFIG}.new"
    new.write_text(MARK + to_toml(config))
    new.replace(folder / CONFIG)
