"""transformers' ZAYA checkpoints in and out, native and legacy."""

from zayajax.hf.compare import Check
from zayajax.hf.convert import check, config, dtype, keep_companions, load, save

__all__ = ["Check", "check", "config", "dtype", "keep_companions", "load", "save"]
