"""Checkpoints: the whole state of a run, written in the background by Orbax, and what restores it.

A checkpoint is complete or it does not count. Beside the arrays it holds a small JSON record: the
format, the position in the data, the config, the fingerprint of the corpus and the shape of every
array. Restoring reads against the state of the live mesh, never against the file's sharding.
"""

import dataclasses
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from zayajax.config import model_config, to_tree
from zayajax.errors import UserError
from zayajax.mesh import is_param
from zayajax.model.zaya import Decoder
from zayajax.settings import Config, ModelConfig

FORMAT = 1
FOLDER = "checkpoints"
PARAMS = "params."

# What a resumed run may not change: other numbers would come out, or none at all.
FIXED = (  # the text itself is compared by its fingerprint, wherever it lies
    "model.",
    "data.held_out",
    "data.text_field",
    "train.seed",
    "train.sequence",
    "train.param_dtype",
    "optim.matrices",
    "optim.momentum",
    "optim.state_dtype",
)


def to_arrays(tree) -> dict[str, Any]:
    """A tree as {"params.layers.attn.q": array}: names that outlive the classes behind them."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_param):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        named[name] = leaf.get_value() if is_param(leaf) else leaf
    return named


def from_arrays(like, arrays: Mapping[str, Any]):
    """The inverse of `to_arrays`, in the structure of `like`."""

    def one(path, leaf):
        array = arrays[jax.tree_util.keystr(path, simple=True, separator=".")]
        return leaf.replace(array) if is_param(leaf) else array

    return jax.tree_util.tree_map_with_path(one, like, is_leaf=is_param)


def shapes(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{x.dtype.name}{list(x.shape)}" for name, x in arrays.items()}


class Checkpoints:
    """The checkpoints of one run, `keep` newest ones.

    Saving copies the state to the host and returns; files are written behind the next steps. An
    error there is raised by the next call of any method, as a UserError that names the last good
    step.
    """

    def __init__(self, run_dir: Path, keep: int = 1):
        self.folder = Path(run_dir).resolve() / FOLDER
        # Orbax logs each error of its threads as it happens; here they are raised, once, in words.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        _hide_aftermath()
        try:
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=keep, cleanup_tmp_directories=True, create=True
                ),
                item_names=("weights", "rest", "record"),
            )
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be used ({error.strerror})") from None

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state, record: Mapping[str, Any]):
        """Starts saving; a checkpoint of this step that exists already is left alone."""
        self.check()
        if step in self._manager.all_steps():
            return
        weights, rest = _parts(to_arrays(state))
        self._require_room(sum(x.nbytes for x in [*weights.values(), *rest.values()]))
        record = {"step": step, **record, "weights": shapes(weights), "rest": shapes(rest)}
        items = ocp.args.Composite(
            weights=ocp.args.StandardSave(weights),
            rest=ocp.args.StandardSave(rest),
            record=ocp.args.JsonSave({"format": FORMAT} | record),
        )
        if not self._guarded(lambda: self._manager.save(step, args=items, force=True)):
            raise UserError(f"{self.folder}: Orbax refuses to save step {step}")

    def check(self):
        """Raises what went wrong in the background since the last call."""
        self._guarded(self._manager.check_for_errors)

    def wait(self):
        """Until all that was saved is on disk."""
        self._guarded(self._manager.wait_until_finished)
        self.check()

    def close(self):
        """Ends the background threads. What they failed at is raised, as by `wait`."""
        self._guarded(self._manager.close)

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
        its step can be saved again.
        """
        damaged = []
        for path in (self.folder / str(step) for step in reversed(self.steps())):
            try:
                found = _read(path, like, accept)
            except UserError:
                raise
            except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
                say(f"{path}: damaged, passed over ({_reason(error)})")
                damaged.append(path)
                continue
            for broken in damaged:
                broken.rename(broken.with_name(f"damaged-{broken.name}"))
            self._manager.reload()
            return found
        if damaged:
            raise UserError(
                f"{self.folder}: none of the checkpoints can be read; restore one from a copy, or "
                "start over with --fresh"
            )
        return None

    def _require_room(self, size: int):
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise UserError(
                f"{self.folder}: the disk is full, a checkpoint takes {size / 2**30:.2f} GiB and "
                f"{free / 2**30:.2f} GiB are free; {self._last_good()}"
            )

    def _guarded(self, call):
        try:
            return call()
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{self.folder}: a checkpoint could not be written ({_reason(error)}); "
                f"{self._last_good()}"
            ) from error

    def _last_good(self) -> str:
        self._manager.reload()
        steps = self.steps()
        return f"the last good one is of step {steps[-1]}" if steps else "there is no earlier one"


def _reason(error: Exception) -> str:
    """The operating system's own words where it was the cause ("No space left on device")."""
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _hide_aftermath():
    """After a failed write TensorStore's threads find the event loop closed that Orbax gave them,
    and each of hundreds prints a traceback that says nothing more."""
    before = sys.unraisablehook
    if getattr(before, "hides_aftermath", False):
        return

    def hook(event):
        if not (event.exc_type is RuntimeError and str(event.exc_value) == "Event loop is closed"):
            before(event)

    hook.hides_aftermath = True
    sys.unraisablehook = hook


def require_same(saved: Mapping[str, str], live: Mapping[str, str], source: Path):
    """UserError naming the first arrays that differ between a checkpoint and the config."""
    if saved == live:
        return
    differing = [n for n in sorted({*saved, *live}) if saved.get(n) != live.get(n)]
    named = "; ".join(
        f"{n} is {saved.get(n, 'missing')} there and {live.get(n, 'not in this model')} here"
        for n in differing[:3]
    )
    more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
    raise UserError(f"{source}: is of another model: {named}{more}")


def require_compatible(record: Mapping, config: Config, data: str, source: Path) -> list[str]:
    """UserError where a resumed run would not be the same run; returns other changes, in words."""
    saved, live = (_flat(c) for c in (record["config"], to_tree(config)))
    changes = [
        f"{k}: {saved.get(k)!r} -> {live.get(k)!r}"
        for k in sorted({*saved, *live})
        if saved.get(k) != live.get(k)
    ]
    fixed = [c for c in changes if c.startswith(FIXED)]
    if fixed:
        raise UserError(
            f"{source}: is of another run ({'; '.join(fixed)}); go on with its own "
            f"{source.parents[1] / 'config.toml'}, or start over with --fresh"
        )
    if record["data"] != data:
        raise UserError(
            f"{source}: the text has changed since (data.corpus or its tokenizer); restore it, or "
            "start a new phase in another folder with --init-from"
        )
    return changes


def save_weights(path: Path, model: nnx.Module, config: ModelConfig):
    """A model alone, as a checkpoint without moments, in a new folder."""
    path = Path(path).resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path}: is there already and not empty; name a new folder")
    arrays = to_arrays(model)
    record = {"format": FORMAT, "config": {"model": dataclasses.asdict(config)}}
    items = ocp.args.Composite(
        weights=ocp.args.StandardSave(arrays),
        record=ocp.args.JsonSave(record | {"weights": shapes(arrays)}),
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=items, force=True)


def read_weights(path: Path, like: nnx.Module | None = None) -> tuple[Decoder, ModelConfig]:
    """The weights of a run's newest checkpoint, of one checkpoint, or of `save_weights`'s folder.

    `like`: an abstract model with shardings, which must be the same model. By default the whole
    model comes to the default device, in the dtypes in which it was stored.
    """
    path, record = _found(path)
    config = model_config(record["config"]["model"])
    if like is None:
        like = jax.eval_shape(lambda: Decoder(config, jax.random.key(0)))
        dtypes = {name: text.partition("[")[0] for name, text in record["weights"].items()}
        like = _with_dtypes(like, dtypes)
    require_same(record["weights"], shapes(to_arrays(like)), path)
    items = ocp.args.Composite(weights=ocp.args.StandardRestore(_placed(to_arrays(like))))
    try:
        return from_arrays(like, _restore(path, items)["weights"]), config
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: is damaged ({_reason(error)}); an older one of the run can be named instead"
        ) from None


def read_config(path: Path) -> ModelConfig:
    """The shape of the model that `read_weights` would read."""
    return model_config(_found(path)[1]["config"]["model"])


def _found(path: Path) -> tuple[Path, dict]:
    """The checkpoint that a path means, and its record."""
    path = Path(path).resolve()
    if (path / FOLDER).is_dir():
        steps = [int(p.name) for p in (path / FOLDER).iterdir() if p.name.isdigit()]
        if not steps:
            raise UserError(f"{path / FOLDER}: has no complete checkpoint yet")
        path = path / FOLDER / str(max(steps))
    if not (path / "record").is_dir():
        raise UserError(f"{path}: is neither a run's folder nor a checkpoint")
    try:
        record = _record(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({_reason(error)})") from None
    return path, record


def _read(path: Path, like, accept: Callable):
    """(state, record) of one checkpoint."""
    record = _record(path)
    accept(record, path)
    weights, rest = _parts(to_arrays(like))
    require_same(record["weights"], shapes(weights), path)
    require_same(record["rest"], shapes(rest), path)
    items = ocp.args.Composite(
        weights=ocp.args.StandardRestore(_placed(weights)),
        rest=ocp.args.StandardRestore(_placed(rest)),
    )
    found = _restore(path, items)
    weights = {PARAMS + name: x for name, x in found["weights"].items()}
    return from_arrays(like, weights | found["rest"]), record


def _record(path: Path) -> dict:
    record = _restore(path, ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
    if record["format"] > FORMAT:
        raise UserError(
            f"{path}: written by a newer zayajax (checkpoint format {record['format']}, this one "
            f"reads up to {FORMAT})"
        )
    return record


def _restore(path: Path, items: ocp.args.Composite):
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, args=items)


def _parts(arrays: Mapping[str, Any]) -> tuple[dict, dict]:
    """The weights, under the names they have in a model of their own, and the rest."""
    weights = {n.removeprefix(PARAMS): x for n, x in arrays.items() if n.startswith(PARAMS)}
    return weights, {n: x for n, x in arrays.items() if not n.startswith(PARAMS)}


def _with_dtypes(like, dtypes: Mapping[str, str]):
    named = {
        n: jax.ShapeDtypeStruct(x.shape, dtypes.get(n, x.dtype)) for n, x in to_arrays(like).items()
    }
    return from_arrays(like, named)


def _flat(tree: Mapping) -> dict:
    plain = json.loads(json.dumps(tree))  # tuples and lists alike
    return {f"{s}.{k}": v for s, values in plain.items() for k, v in values.items()}


def _placed(arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Abstract arrays with a sharding each: without a mesh, the default device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def one(x):
        sharding = getattr(x, "sharding", None) or here
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return {name: one(x) for name, x in arrays.items()}
