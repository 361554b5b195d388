"""Checkpoints: the whole state of a run, written in the background, and what restores it.

A checkpoint is complete or it does not count. Beside the arrays it holds a small JSON record: the
format, the kind, the position in the data, the config, the fingerprints of the text and of its
tokenizer, and the shape and a digest of every array. Restoring reads against the state of the live
mesh, never against the file's sharding.
"""

from zayajax.checkpoint.compatible import require_compatible
from zayajax.checkpoint.files import FOLDER
from zayajax.checkpoint.run import Checkpoints
from zayajax.checkpoint.tree import from_arrays, require_same, shapes, to_arrays
from zayajax.checkpoint.weights import read_config, read_weights, save_weights

__all__ = [
    "FOLDER",
    "Checkpoints",
    "from_arrays",
    "read_config",
    "read_weights",
    "require_compatible",
    "require_same",
    "save_weights",
    "shapes",
    "to_arrays",
]
