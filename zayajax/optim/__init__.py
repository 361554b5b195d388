from zayajax.optim.build import apply, build
from zayajax.optim.table import describe

__all__ = ["apply", "build", "describe"]
