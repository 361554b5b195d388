"""A checkpoint on disk: arrays as Orbax writes them, and a JSON record. No process waits for
another here: that is `agreement`'s.

    STEP/weights, STEP/rest    arrays, each process its own shards, one format for any mesh
    STEP/record/metadata       what a checkpoint is of
    STEP.saving, STEP.old      on the way in and out: not complete, deleted at the next start
    damaged-STEP               set aside
"""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from zayajax.checkpoint.tree import from_numbers, like_numbers
from zayajax.errors import UserError

FORMAT = 2
FOLDER = "checkpoints"
RECORD = "record"
SAVING, OLD = ".saving", ".old"
# How far writing may run ahead of the disk, beside the shards that wait for it.
IN_FLIGHT = 10**9  # bytes


def _handler(arrays: Mapping[str, Any]) -> ocp.PyTreeCheckpointHandler:
    # Orbax refuses an array that is larger than what may be in flight.
    gb = (max([IN_FLIGHT, *map(_local_bytes, arrays.values())]) + 1) / 10**9
    return ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=gb,
        save_device_host_concurrent_gb=gb,
        restore_concurrent_gb=gb,
        use_compression=False,  # the bits of trained weights hardly repeat
    )


def _local_bytes(x) -> int:
    """Of all shards of this process."""
    shard = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return shard * len(x.sharding.addressable_devices)


def write_arrays(folder: Path, arrays: Mapping[str, Any]):
    """This process's shards, into a folder that is there; on disk when it returns."""
    if arrays:  # Orbax refuses none
        _handler(arrays).save(epath.Path(folder), args=ocp.args.PyTreeSave(dict(arrays)))


def join_arrays(folder: Path):
    """Makes one of what all processes have written; for one of them to call."""
    if any(folder.iterdir()):
        _handler({}).finalize(epath.Path(folder))


def read_arrays(folder: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """This process's shards of the arrays, in the shapes, dtypes and shardings of `like`."""
    if not like:
        return {}
    plain = {name: like_numbers(x) for name, x in like.items()}
    arguments = ocp.checkpoint_utils.construct_restore_args(plain)
    found = _handler(plain).restore(
        epath.Path(folder), args=ocp.args.PyTreeRestore(plain, restore_args=arguments)
    )
    return {name: from_numbers(x, found[name]) for name, x in like.items()}


def write_record(path: Path, record: Mapping[str, Any]):
    """Whole or not at all, also where there is one already."""
    folder = path / RECORD
    folder.mkdir(exist_ok=True)
    new = folder / "new"
    with open(new, "w") as file:
        json.dump({"format": FORMAT} | dict(record), file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / "metadata")
    sync(folder)


def read_record(path: Path) -> dict[str, Any]:
    """UserError where a newer zayajax wrote it; OSError or ValueError where it is damaged."""
    record = json.loads((path / RECORD / "metadata").read_text())
    if not isinstance(record, dict) or not isinstance(record.get("format"), int):
        raise ValueError("the record is not one")
    if record["format"] > FORMAT:
        raise UserError(
            f"{path}: written by a newer zayajax (checkpoint format {record['format']}, this one "
            f"reads up to {FORMAT})"
        )
    return record


def steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir())


def complete(unfinished: Path, path: Path):
    """From here on it counts, whatever happens."""
    for at, _, names in os.walk(unfinished):
        for name in names:
            sync(Path(at, name))
        sync(at)
    unfinished.rename(path)
    sync(path.parent)


def delete(path: Path):
    """At no moment is half of a checkpoint there under its name."""
    old = path.with_name(path.name + OLD)
    path.rename(old)
    # On a network's disk files that somebody reads stay until then: `clean` takes what is left.
    shutil.rmtree(old, ignore_errors=True)


def clean(folder: Path):
    """Deletes what a run left on the way in or out when it was killed."""
    for path in folder.iterdir():
        if re.fullmatch(rf"\d+({re.escape(SAVING)}|{re.escape(OLD)})", path.name):
            shutil.rmtree(path)


def sync(path):
    """TensorStore syncs what it writes, Orbax's small files and renames are nobody's."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reason(error: Exception) -> str:
    """The operating system's own words where it was the cause ("No space left on device")."""
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
