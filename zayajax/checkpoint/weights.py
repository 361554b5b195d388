"""A model's weights alone, in and out."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
from flax import nnx

from zayajax.checkpoint import digest, files
from zayajax.checkpoint.agreement import PATIENCE, Agreement, Failed
from zayajax.checkpoint.files import FOLDER, RECORD, reason
from zayajax.checkpoint.tree import from_arrays, require_same, shapes, to_arrays
from zayajax.config import model_config
from zayajax.errors import UserError
from zayajax.model.zaya import Decoder
from zayajax.settings import ModelConfig


def save_weights(path: Path, model: nnx.Module, config: ModelConfig):
    """A model alone, as a checkpoint without moments, in a new folder."""
    path = Path(path).resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path}: is there already and not empty; name a new folder")
    arrays = to_arrays(model)
    folder = path / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    files.write_arrays(folder, arrays)
    files.join_arrays(folder)
    digests = digest.local_digests(arrays, digest.partial_digests(arrays))
    record = {"config": {"model": dataclasses.asdict(config)}, "weights": shapes(arrays)}
    files.write_record(path, record | {"digests": {"weights": digests}})


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
    try:
        arrays = files.read_arrays(path / "weights", to_arrays(like))
    except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
        raise _damaged(path, reason(error)) from None
    _require_bits(path, record, arrays)
    return from_arrays(like, arrays), config


def read_config(path: Path) -> ModelConfig:
    """The shape of the model that `read_weights` would read."""
    return model_config(_found(path)[1]["config"]["model"])


def _require_bits(path: Path, record: Mapping, arrays: Mapping):
    if "digests" not in record:  # format 1 kept none
        return
    found, want = digest.compared(arrays, record["digests"]["weights"])
    if not all(x.is_fully_addressable for x in arrays.values()):  # other processes have the rest
        try:
            found = Agreement(PATIENCE).agree(found, digest.total)
        except Failed as error:
            raise UserError(f"{path}: is not read ({error})") from None
    if wrong := digest.differing(want, found):
        raise _damaged(path, f"other bits than were saved in {wrong[0]}")


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path}: is damaged ({why}); an older one of the run can be named instead")


def _found(path: Path) -> tuple[Path, dict]:
    """The checkpoint that a path means, and its record."""
    path = Path(path).resolve()
    if (path / FOLDER).is_dir():
        steps = files.steps(path / FOLDER)
        if not steps:
            raise UserError(f"{path / FOLDER}: has no complete checkpoint yet")
        path = path / FOLDER / str(steps[-1])
    if not (path / RECORD).is_dir():
        raise UserError(f"{path}: is neither a run's folder nor a checkpoint")
    try:
        return path, files.read_record(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({reason(error)})") from None


def _with_dtypes(like, dtypes: Mapping[str, str]):
    named = {
        n: jax.ShapeDtypeStruct(x.shape, dtypes.get(n, x.dtype)) for n, x in to_arrays(like).items()
    }
    return from_arrays(like, named)
