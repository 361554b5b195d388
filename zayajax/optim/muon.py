"""Muon: momentum, made orthogonal by Newton-Schulz, on whole matrices that are dealt over the mesh.

Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon (the quintic iteration); Moonlight,
arXiv 2502.16982 (the size of the update); `optax.contrib.muon` (Nesterov and bias correction), of
which this is the distributed form.

Shape letters: M matrices of a stack, R rows, C columns, B blocks of rows, from one device each. The
rows are the side that a mesh splits at rest, so that some matrices lie here transposed.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from zayajax.mesh import is_param
from zayajax.optim.table import stack_shape

STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
EPS = 1e-8  # added to the norm: a matrix of zeros stays one
RMS = 0.2  # of an update: about AdamW's, so that both share a learning rate
TOGETHER = 2**20  # numbers in the matrices that are iterated at once


class MuonState(NamedTuple):
    count: jax.Array
    momentum: dict  # {path: parameter}, stored like the parameters


def scale_by_muon(
    momentum: float,
    matrix: Callable[[str], str],
    stored: Mapping[str, tuple] | None = None,
    state_dtype="float32",
    dtype="bfloat16",
) -> optax.GradientTransformationExtraArgs:
    """Gradients {path: parameter} to orthogonal ones times 0.2 sqrt(max(rows, columns)), float32.

    A gradient enters and leaves as this device stores it. Matrices that a mesh axis splits travel
    over it once each way, in `dtype`; experts stay on their GPU. Matrices that it does not split
    are worked on by all of its devices alike. `update` takes a boolean `skip`, with which momentum
    and count stay as they are, bit for bit.

    Args:
      momentum: decay of the average of gradients, with Nesterov's step; 0: no state at all.
      matrix: path -> its last dimensions as "rows | columns", as in `optim.table`.
      stored: path -> mesh axes of each dimension (`mesh.stored_axes`); None without a mesh.
      state_dtype: of the momentum at rest.
      dtype: of the inputs of each product; sums are float32.

    Raises ValueError, when traced, for a matrix whose sharded side is not a single dimension.
    """

    def init(params):
        if not momentum:
            return optax.EmptyState()
        zeros = {
            path: v.replace(jnp.zeros_like(v[...], dtype=state_dtype))
            for path, v in params.items()
            if is_param(v)
        }
        return MuonState(jnp.zeros((), jnp.int32), zeros)

    def update(grads, state, params=None, *, skip=False, **_):
        del params
        views, done = {}, dict(grads)
        for path, g in grads.items():
            if is_param(g):  # optax masks the parameters of other rules
                at_rest = ((),) * g.ndim if stored is None else stored[path]
                views[path] = _View.of(path, g, matrix(path), at_rest)

        def shape(path):
            return views[path].shape

        new, step = {}, None
        if momentum:
            count = jnp.where(skip, state.count, optax.safe_increment(state.count))
            step = partial(_nesterov, momentum, count.astype(jnp.float32), skip)
        # Stacks of one shape travel and are worked on together.
        for (*_, axes), paths in itertools.groupby(sorted(views, key=shape), shape):
            paths = list(paths)
            stack = []
            for path in paths:
                x = grads[path][...].astype(jnp.float32)
                if step:
                    old = state.momentum[path]
                    average, x = step(old[...].astype(jnp.float32), x)
                    new[path] = old.replace(average.astype(state_dtype))
                stack.append(views[path].stack(x.astype(dtype)))
            for path, x_MRC in zip(paths, _directions(stack, axes), strict=True):
                g = grads[path]
                done[path] = g.replace(views[path].unstack(x_MRC, g.shape))
        return done, MuonState(count, new) if momentum else state

    return optax.GradientTransformationExtraArgs(init, update)


def _directions(stack: list, axes: tuple[str, ...]) -> list:
    """The updates of arrays [M, R, C] whose whole matrices are of one shape, float32."""
    ends = list(itertools.accumulate(len(x) for x in stack))
    x_MRC = _deal(jnp.concatenate(stack) if len(stack) > 1 else stack[0], axes)
    size = RMS * max(x_MRC.shape[1:]) ** 0.5
    x_MRC = _give_back(orthogonalize(x_MRC), axes, ends[-1])
    return [x.astype(jnp.float32) * size for x in jnp.split(x_MRC, ends[:-1])]


def orthogonalize(x_MRC):
    """Newton-Schulz on each matrix: U V^T of its singular value decomposition, nearly: singular
    values come out between 0.7 and 1.2. Works in the dtype of `x_MRC`, with float32 sums."""
    M, R, C = x_MRC.shape
    # A few at a time where they are small; never more than one where it is large.
    n = max(n for n in range(1, M + 1) if M % n == 0 and n * R * C <= max(TOGETHER, R * C))
    return jax.lax.map(_newton_schulz, x_MRC.reshape(M // n, n, R, C)).reshape(M, R, C)


def _newton_schulz(x_MRC):
    dtype, tall = x_MRC.dtype, x_MRC.shape[1] > x_MRC.shape[2]
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None  # on a GPU, not TF32
    dot = partial(jnp.matmul, precision=exact, preferred_element_type=jnp.float32)

    a, b, c = COEFFICIENTS

    def iteration(_, x):
        gram = dot(x, x.mT)
        rounded = gram.astype(dtype)
        y = b * gram + c * dot(rounded, rounded)
        return (a * x.astype(jnp.float32) + dot(y.astype(dtype), x)).astype(dtype)

    x = x_MRC.mT if tall else x_MRC  # the product with itself on the smaller side
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2), keepdims=True))
    x = (x.astype(jnp.float32) / (norm + EPS)).astype(dtype)
    x = jax.lax.fori_loop(0, STEPS, iteration, x)
    return x.mT if tall else x


def _nesterov(decay: float, count, skip, average, g):
    """The new average, and the direction of the step, both corrected for the start at zero."""
    # The direction from what is kept, too: to read the old average again would be to copy it.
    average = jnp.where(skip, average, decay * average + (1 - decay) * g)
    weight, own = decay / (1 - decay ** (count + 1)), (1 - decay) / (1 - decay**count)
    return average, weight * average + own * g


class _View(NamedTuple):
    """How a parameter lies as a stack [M, R, C] of this device's rows."""

    rows: int  # of the matrix as the model has it, on this device
    columns: int
    flip: bool  # its columns are the side that a mesh splits
    axes: tuple[str, ...]  # mesh axes that do

    @classmethod
    def of(cls, path: str, v, matrix: str, stored: tuple):
        _, rows, columns = stack_shape(matrix, v.shape)
        sides = [len(side.split()) for side in matrix.split("|")]
        names = (None,) * (v.ndim - len(v.axes)) + tuple(v.axes)
        # By its name, not by what this mesh splits: the same orientation on every mesh.
        split = [d for d in range(v.ndim - sum(sides), v.ndim) if names[d]]
        flip = bool(split) and split[0] >= v.ndim - sides[1]
        if len(split) != 1 or sides[1 if flip else 0] != 1:
            raise ValueError(f"{path}: {names} as {matrix} has not one side, of one axis, to split")
        return cls(rows, columns, flip, tuple(stored[split[0]]))

    @property
    def shape(self):
        sides = (self.columns, self.rows) if self.flip else (self.rows, self.columns)
        return *sides, self.axes

    def stack(self, x):
        x_MRC = x.reshape(-1, self.rows, self.columns)
        return x_MRC.mT if self.flip else x_MRC

    def unstack(self, x_MRC, shape):
        return (x_MRC.mT if self.flip else x_MRC).reshape(shape)


@jax.named_scope("deal")
def _deal(x_MRC, axes: tuple[str, ...]):
    """Some rows of all matrices to all rows of some: [M, R, C] to [M / n, n R, C]."""
    x_MBRC = x_MRC[:, None]
    for axis in axes:
        n = jax.lax.axis_size(axis)
        if n > 1:
            M, B, R, C = x_MBRC.shape
            # Matrices of zeros fill an uneven stack up.
            x_MBRC = jnp.pad(x_MBRC, ((0, -M % n), (0, 0), (0, 0), (0, 0)))
            x_MBRC = jax.lax.all_to_all(x_MBRC, axis, 0, 2, tiled=True).reshape(-1, B * n, R, C)
    M, B, R, C = x_MBRC.shape
    return x_MBRC.reshape(M, B * R, C)


@jax.named_scope("deal")
def _give_back(x_MRC, axes: tuple[str, ...], count: int):
    """The inverse of `_deal`, of `count` matrices."""
    steps, n = [], 1
    for axis in axes:
        steps.append((axis, count))
        count, n = -(-count // jax.lax.axis_size(axis)), n * jax.lax.axis_size(axis)
    x_MBRC = x_MRC.reshape(x_MRC.shape[0], n, -1, x_MRC.shape[2])
    for axis, count in reversed(steps):
        n = jax.lax.axis_size(axis)
        if n > 1:
            M, B, R, C = x_MBRC.shape
            x_MBRC = x_MBRC.reshape(M, B // n, n * R, C)
            x_MBRC = jax.lax.all_to_all(x_MBRC, axis, 2, 0, tiled=True)[:count]
    return x_MBRC[:, 0]
