"""The checkpoints of one run: saved behind its steps, kept or deleted, and restored."""

import dataclasses
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from zayajax.checkpoint import copies, digest, files
from zayajax.checkpoint.agreement import PATIENCE, Agreement, Failed, Lost
from zayajax.checkpoint.tree import (
    from_arrays,
    joined,
    require_same,
    shapes,
    split,
    to_arrays,
)
from zayajax.errors import NotMet, UserError

PARTS = ("weights", "rest")
PERMANENT, TEMPORARY = "permanent", "temporary"


@dataclasses.dataclass
class _Writing:
    """What the thread of one save does and leaves behind."""

    step: int
    kind: str
    thread: threading.Thread | None = None
    failed: str | None = None
    lost: bool = False  # because of other processes, not of the disk


class Checkpoints:
    """The checkpoints of one run in `run_dir`, which all its processes see.

    Saving copies the state, and returns; a thread writes the files behind the next steps. There are
    two kinds. The newest `keep` permanent ones are kept (0: all); of the temporary ones the newest,
    until a newer permanent one is complete. Nothing is deleted before what replaces it is on disk.

    An error of the writer in any process is raised in all by the next call of `save`, `check`,
    `wait` or `close`, as a UserError that names the last good step, NotMet where the others ended
    or say nothing. All processes make the same calls in the same order, but for `check` and
    `failed`.

    Args:
      patience: seconds that a process waits for the others, or for its own writing.
      on_devices: where states are copied; by default on the devices if all have the room.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int = 1,
        patience: float = PATIENCE,
        on_devices: bool | None = None,
    ):
        self.folder = Path(run_dir).resolve() / files.FOLDER
        self.keep, self.patience = keep, patience
        # Orbax logs each error of its threads as it happens; here they are raised, once, in words.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        _hide_aftermath()
        self._together = Agreement(patience)
        self._writing: _Writing | None = None
        self._on_devices = on_devices
        try:
            self._look(files.clean)
        except Failed as error:
            raise _mistake(error, f"{self.folder}: cannot be used ({error})") from None

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return sorted(self._kinds)

    def kind(self, step: int) -> str:
        """ "permanent" or "temporary"."""
        return self._kinds[step]

    @property
    def failed(self) -> bool:
        """Whether a writer has failed, and `check` would raise."""
        return self._writing is not None and self._writing.failed is not None

    def save(self, step: int, state, record: Mapping[str, Any], temporary: bool = False) -> float:
        """Starts saving; returns the seconds for which it blocked.

        One save is in flight at a time: the next waits for it. A checkpoint of this step that
        exists already is left alone, but a permanent one makes of a temporary one its like.

        Args:
          state: whatever tree of arrays, on one mesh; its buffers may be donated afterwards.
          record: plain JSON values, of what the checkpoint is and how to go on from it.
        """
        started = time.perf_counter()
        self.wait()
        kind = TEMPORARY if temporary else PERMANENT
        if self._kinds.get(step) == kind or (temporary and step in self._kinds):
            return time.perf_counter() - started
        if step in self._kinds:
            self._start(_Writing(step, kind), self._promote)
            return time.perf_counter() - started
        arrays = to_arrays(state)
        copy, sums = self._copy(arrays)
        record = {"step": step, "kind": kind, "time": time.time()} | dict(record) | _made_on(arrays)
        record |= {part: shapes(named) for part, named in split(arrays).items()}
        self._start(_Writing(step, kind), self._write, copy, sums, record)
        return time.perf_counter() - started

    def check(self):
        """Raises what went wrong in the background since the last call."""
        if not self.failed:
            return
        why, kind = self._writing.failed, NotMet if self._writing.lost else UserError
        self._writing = None
        steps = self.steps()
        good = f"the last good one is of step {steps[-1]}" if steps else "there is no earlier one"
        raise kind(f"{self.folder}: a checkpoint could not be written ({why}); {good}")

    def wait(self):
        """Until all that was saved is on disk."""
        if self._writing is not None and self._writing.thread is not None:
            # Two agreements, and the writing between them.
            self._writing.thread.join(5 * self.patience)
            if self._writing.thread.is_alive():
                self._writing.failed = f"not done within {5 * self.patience:.0f} s"
        self.check()
        self._writing = None

    def close(self):
        """Ends the background thread. What it failed at is raised, as by `wait`."""
        self.wait()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            self.close()
        except UserError:
            if kind is None:  # else what went wrong first is what counts
                raise

    def restore(self, like, accept: Callable = lambda record, path: None, say: Callable = print):
        """(state, record) of the newest checkpoint that can be read, or None where there is none.

        `like` is abstract, with the shardings of the live mesh. A checkpoint of another model is a
        UserError that names what differs, and `accept(record, path)` may raise for other reasons.
        A damaged one is passed over, `say` is told, and it is set aside under another name, so that
        its step can be saved again. All processes agree on which it is.
        """
        self.wait()
        damaged = []
        for step in reversed(self.steps()):
            path = self.folder / str(step)
            found, said = self._read(path, like, accept)
            try:
                wrong = self._together.agree(said, lambda said, path=path: _judged(said, path))
            except Failed as error:
                raise _mistake(error, f"{path}: is not restored ({error})") from None
            if "refused" in wrong:
                raise UserError(wrong["refused"])
            if wrong:
                say(f"{path}: damaged, passed over ({wrong['damaged']})")
                damaged.append(step)
                continue
            self._set_aside(damaged)
            return found
        if damaged:
            raise UserError(
                f"{self.folder}: none of the checkpoints can be read; restore one from a copy, or "
                "start over with --fresh"
            )
        return None

    def _look(self, first: Callable[[Path], None] = lambda folder: None):
        """What is in the folder, as the first process sees it after `first`."""

        def kinds(_):
            self.folder.mkdir(parents=True, exist_ok=True)
            first(self.folder)
            return [[step, _kind(self.folder / str(step))] for step in files.steps(self.folder)]

        self._kinds = dict(map(tuple, self._together.agree(None, kinds)))

    def _copy(self, arrays: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], Callable]:
        """What is written, and what computes its digests."""
        if self._on_devices is None:  # once: all run the same programs, and compile them together
            try:
                self._on_devices = self._together.agree(copies.there_is_room(arrays), all)
            except Failed as error:
                raise _mistake(error, f"{self.folder}: is not saved to ({error})") from None
        if not self._on_devices:
            sums = digest.partial_digests(arrays)  # of the state itself: a host computes slower
            return copies.on_host(arrays), lambda: sums
        copy = copies.on_devices(arrays)
        # Of the copy, behind the steps. Neither program has a collective: in flight beside a step
        # they keep no device waiting for another.
        return copy, partial(digest.partial_digests, copy)

    def _start(self, writing: _Writing, work: Callable, *args):
        def run():
            try:
                work(writing, *args)
            except Failed as error:
                writing.lost, writing.failed = isinstance(error, Lost), str(error)
            except BaseException as error:  # whatever it is, a run that cannot save has to know
                writing.failed = f"{type(error).__name__}: {files.reason(error)}"

        writing.thread = threading.Thread(target=run, name="zayajax-checkpoint", daemon=True)
        self._writing = writing
        writing.thread.start()

    def _write(self, writing: _Writing, copy: dict, sums: Callable, record: dict):
        path = self.folder / str(writing.step)
        unfinished = path.with_name(path.name + files.SAVING)
        size = sum(x.nbytes for x in copy.values())
        names = list(copy)

        def prepare(_):
            _require_room(self.folder, size)
            if unfinished.exists():
                shutil.rmtree(unfinished)
            for part in PARTS:
                (unfinished / part).mkdir(parents=True)

        def finish(said):
            if reasons := {p: s["failed"] for p, s in enumerate(said) if "failed" in s}:
                raise Failed(_by_process(reasons, len(said)))
            digests = split(digest.total([s["digests"] for s in said]))
            for part in PARTS:
                files.join_arrays(unfinished / part)
            files.write_record(unfinished, record | {"digests": digests})
            files.complete(unfinished, path)

        self._together.agree(None, prepare)
        try:
            for part, arrays in split(copy).items():
                files.write_arrays(unfinished / part, arrays)
            said = {"digests": digest.local_digests(names, sums())}
        except Exception as error:  # Orbax and TensorStore raise many kinds for a full disk
            said = {"failed": files.reason(error)}
        copy.clear()
        self._together.agree(said, lambda said: _or_remove(unfinished, finish, said))
        self._kinds[writing.step] = writing.kind
        self._retire()

    def _promote(self, writing: _Writing):
        path = self.folder / str(writing.step)

        def promote(_):
            files.write_record(path, files.read_record(path) | {"kind": writing.kind})

        self._together.agree(None, promote)
        self._kinds[writing.step] = writing.kind
        self._retire()

    def _retire(self):
        """Deletes what newer ones replace."""
        permanent, temporary = (
            sorted(s for s, k in self._kinds.items() if k == kind)
            for kind in (PERMANENT, TEMPORARY)
        )
        last = max(permanent, default=-1)
        old = permanent[: -self.keep] if self.keep else []
        old += [s for s in temporary if s < max(last, temporary[-1])]

        def delete(_):
            for step in old:
                files.delete(self.folder / str(step))

        if old:
            self._together.agree(None, delete)
        for step in old:
            del self._kinds[step]

    def _read(self, path: Path, like, accept: Callable) -> tuple[tuple | None, dict]:
        """(state, record), and what to say about it to the others. Waits for nobody."""
        try:
            record = files.read_record(path)
            if record["format"] < files.FORMAT:
                raise UserError(
                    f"{path}: has checkpoint format {record['format']}, and --resume reads "
                    f"{files.FORMAT}; start a new phase in another folder with --init-from"
                )
            accept(record, path)
            parts = split(to_arrays(like))
            for part in PARTS:
                require_same(record[part], shapes(parts[part]), path)
            found = joined({p: files.read_arrays(path / p, parts[p]) for p in PARTS})
            sums, want = digest.compared(found, joined(record["digests"]))
            return (from_arrays(like, found), record), {"sums": sums, "want": want}
        except UserError as error:
            return None, {"refused": str(error)}
        except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
            return None, {"damaged": files.reason(error)}

    def _set_aside(self, damaged: list[int]):
        def rename(_):
            for step in damaged:
                path = self.folder / str(step)
                aside = path.with_name(f"damaged-{step}")
                if aside.exists():
                    shutil.rmtree(aside)
                path.rename(aside)

        if damaged:
            try:
                self._together.agree(None, rename)
            except Failed as error:
                text = f"{self.folder}: what is damaged cannot be set aside ({error})"
                raise _mistake(error, text) from None
        for step in damaged:
            del self._kinds[step]


def _mistake(error: Failed, text: str) -> UserError:
    """Starting again changes nothing about a folder, but may about processes that are gone."""
    return (NotMet if isinstance(error, Lost) else UserError)(text)


def _or_remove(unfinished: Path, finish: Callable, said: list):
    """What was half written would only fill the disk."""
    try:
        return finish(said)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _judged(said: list[dict], path: Path) -> dict:
    """What is wrong with a checkpoint, from what each process found; {} where nothing is."""
    if refused := [s["refused"] for s in said if "refused" in s]:
        return {"refused": refused[0]}
    if damaged := {p: s["damaged"] for p, s in enumerate(said) if "damaged" in s}:
        return {"damaged": _by_process(damaged, len(said))}
    found = digest.total([s["sums"] for s in said])
    if wrong := digest.differing(said[0]["want"], found):
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return {"damaged": f"other bits than were saved, in {wrong[0]}{more}"}
    return {}


def _by_process(reasons: Mapping[int, str], processes: int) -> str:
    process, why = next(iter(reasons.items()))
    return why if processes == 1 else f"process {process}: {why}"


def _made_on(arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
    shardings = [x.sharding for x in arrays.values()]
    mesh = next((dict(s.mesh.shape) for s in shardings if isinstance(s, NamedSharding)), {})
    return {"mesh": mesh, "processes": jax.process_count()}


def _kind(path: Path) -> str:
    """A record that cannot be read is `restore`'s to judge; until then nothing replaces it."""
    try:
        return files.read_record(path).get("kind", PERMANENT)
    except (OSError, ValueError, UserError):
        return PERMANENT


def _require_room(folder: Path, size: int):
    free = shutil.disk_usage(folder).free
    if free < size:
        raise Failed(
            f"the disk is full, a checkpoint takes {size / 2**30:.2f} GiB and {free / 2**30:.2f} "
            "GiB are free"
        )


def _hide_aftermath():
    """After a failed write or read, what Orbax had begun beside it ends without its event loop, and
    each of hundreds of threads and coroutines prints a traceback that says nothing more."""
    before = sys.unraisablehook
    if getattr(before, "hides_aftermath", False):
        return

    def hook(event):
        closed = event.exc_type is RuntimeError and str(event.exc_value) == "Event loop is closed"
        code = getattr(event.object, "cr_code", None)
        if not closed and not (code and "orbax" in Path(code.co_filename).parts):
            before(event)

    hook.hides_aftermath = True
    sys.unraisablehook = hook
