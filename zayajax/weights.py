"""Models from wherever they are: a run, a checkpoint, or a folder that transformers saved."""

from pathlib import Path

import jax

from zayajax import checkpoint, config as configs, hf
from zayajax.errors import UserError
from zayajax.model.zaya import Decoder
from zayajax.settings import ModelConfig

# Beside the weights in a folder made by `from_hf`: what came with them and is not ours to change.
COMPANIONS = "hf"


def is_hf(path: Path) -> bool:
    return (Path(path) / "config.json").is_file()


def read(path, like: Decoder | None = None, skip: str = "identity") -> Decoder:
    """The model at `path`, of whichever kind. `skip`: for transformers' folders, which name none.

    `like`: an abstract model with dtypes and shardings, which must be the same model (UserError,
    naming what differs); by default it comes to one device in the dtypes it is stored in.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: there is nothing there to read weights from")
    if not is_hf(path):
        return checkpoint.read_weights(path, like)[0]
    if like is None:
        return hf.load(path, hf.dtype(path), skip)
    sharding = like.embed.get_value().sharding
    mesh = sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else None
    arrays = checkpoint.to_arrays(hf.load(path, like.embed.dtype.name, mesh=mesh))
    live = checkpoint.shapes(checkpoint.to_arrays(like))
    checkpoint.require_same(checkpoint.shapes(arrays), live, path)
    return checkpoint.from_arrays(like, arrays)


def config_of(path) -> ModelConfig:
    """The shape of the model at `path`, without its weights."""
    return hf.config(path) if is_hf(path) else checkpoint.read_config(Path(path))


def from_hf(source, destination, skip: str = "identity") -> str:
    """A checkpoint of our own from transformers' folder, with all that travels along; a summary."""
    source, destination = Path(source), Path(destination)
    model = hf.load(source, hf.dtype(source), skip)
    checkpoint.save_weights(destination, model, model.cfg)
    hf.keep_companions(source, destination / COMPANIONS)
    return f"{destination}: {_size(model):,} numbers, start from them with --init-from"


def to_hf(source, destination, layout: str = "native") -> str:
    """transformers' folder from a run or a checkpoint; a summary."""
    source, destination = Path(source), Path(destination)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination}: is there already and not empty; name a new folder")
    model, companions = read(source), source if is_hf(source) else source / COMPANIONS
    if not companions.is_dir():
        companions = tokenizer_folder(source)
    hf.save(model, destination, layout, source=companions)
    return f"{destination}: {_size(model):,} numbers in the {layout} layout"


def _size(model: Decoder) -> int:
    return sum(x.size for x in jax.tree.leaves(model))


def tokenizer_of(path) -> str:
    """The `data.tokenizer` that belongs to a model: 'bytes' or a path."""
    path = Path(path)
    for folder in (path, path / COMPANIONS):
        if (folder / "tokenizer.json").is_file():
            return str(folder / "tokenizer.json")
    run = path.parents[1] if path.parent.name == checkpoint.FOLDER else path
    if (run / "config.toml").is_file():
        return configs.load(run / "config.toml").data.tokenizer
    raise UserError(f"{path}: has no tokenizer with it; name one with --tokenizer")


def tokenizer_folder(path) -> Path | None:
    """The folder of a run's tokenizer, whose files an export takes along; None if it has none."""
    try:
        name = Path(tokenizer_of(path))
    except UserError:
        return None
    if not name.exists():  # "bytes", or moved away
        return None
    return name if name.is_dir() else name.parent
