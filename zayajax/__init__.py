"""zayajax trains ZAYA-class mixture-of-experts language models in JAX on whole nodes of GPUs.

`zayajax.load_config(path)` reads a config file; `zayajax.train(config)`, `zayajax.audit(config)`
and `zayajax.plan(config)` do what the commands do; `zayajax.hf.load(path)` reads a model that
transformers saved.
"""

import importlib

__version__ = "0.1.0"

# Loaded when first used: the command line must set up devices before JAX starts.
_HOME = {
    "train": ("zayajax.training.loop", "train"),
    "load_config": ("zayajax.config", "load"),
    "audit": ("zayajax.planning.audit", "audit"),
    "plan": ("zayajax.planning.plan", "plan"),
    "at_scale": ("zayajax.planning.scale", "at_scale"),
    "UserError": ("zayajax.errors", "UserError"),
    "Decoder": ("zayajax.model.zaya", "Decoder"),
    "hf": ("zayajax.hf", None),
    "generate": ("zayajax.generate", None),
    "config": ("zayajax.config", None),
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'zayajax' has no attribute {name!r}")
    module, attribute = _HOME[name]
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found
