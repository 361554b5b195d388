from zayajax.optim.build import apply, build

__all__ = ["apply", "build"]
