"""The parameters of a model by arithmetic: how many numbers a GPU keeps of each, and how many it
computes with.

Read from the shapes of `init` (nothing is traced) and from the one table of `zayajax.layout`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from zayajax.layout import LAYOUTS
from zayajax.mesh import abstract_mesh, by_path, places, stored_axes
from zayajax.model.zaya import Decoder
from zayajax.optim import table
from zayajax.settings import Config, ModelConfig


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter, all layers together."""

    path: str
    shape: tuple[int, ...]
    stored: tuple[tuple[str, ...], ...]  # mesh axes of each dimension at rest
    gathered: tuple[str, ...]  # mesh axes over which it comes together, outermost first
    repeated: tuple[str, ...]  # token axes over which its gradient is summed
    in_layer: bool  # gathered in the loop over layers (zero 3)
    keep: bool  # float32 wherever it is
    group: str  # of `optim.table`
    local: int  # numbers at rest on a GPU
    whole: int  # numbers that a GPU computes with

    @property
    def stored_over(self) -> tuple[str, ...]:
        """Mesh axes that split it at rest."""
        return tuple(a for dim in self.stored for a in dim)

    def bytes(self, dtype: str) -> int:
        """Of one number, where others have this dtype."""
        return 4 if self.keep else itemsize(dtype)

    def is_copied(self, stored: str, used: str) -> bool:
        """Whether what the GPU computes with is another array than what it keeps."""
        return bool(self.gathered) or self.bytes(stored) != self.bytes(used)


def itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


@functools.lru_cache(maxsize=8)
def _abstract(model: ModelConfig):
    return jax.eval_shape(functools.partial(Decoder, model), jax.random.key(0))


def parameters(config: Config) -> list[Parameter]:
    """Those of the model, on the mesh and in the layout and ZeRO stage that `config` names."""
    params = _abstract(config.model)
    mesh = abstract_mesh(config.mesh.nodes, config.mesh.gpus)
    sizes = dict(mesh.shape)
    at = by_path(places(params, mesh, LAYOUTS[config.mesh.layout], config.mesh.zero))
    stored, groups = stored_axes(params, mesh), table.groups(by_path(params))
    found = []
    for path, v in by_path(params).items():
        place = at[path].get_value()
        gathered = tuple(a for _, axes in place.gathered for a in axes if sizes[a] > 1)
        local = v.size // math.prod(sizes[a] for a in place.split)
        found.append(
            Parameter(
                path=path,
                shape=v.shape,
                stored=stored[path],
                gathered=gathered,
                repeated=place.repeated,
                in_layer=place.in_layer,
                keep=bool(v.get_metadata().get("keep")),
                group=groups[path],
                local=local,
                whole=local * math.prod(sizes[a] for a in gathered),
            )
        )
    return found
