"""The collectives on activations. Over no axes each of them stays on the device.

Shape letters: T tokens of this device, D embed, R ranks, C slots a rank pair, E experts of one
rank.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp

# Room for what one rank may send to another, as a multiple of the even share T/R. The worst case,
# R times the share, always stands behind these, so that no token is ever dropped.
BUCKETS = (1.25, 2.0, 4.0)


@jax.named_scope("exchange")
def all_to_all(x_RT, axes: tuple[str, ...]):
    """Entry r goes to rank r; entry r of the result came from rank r. Its own transpose."""
    return jax.lax.all_to_all(x_RT, axes, 0, 0, tiled=True) if ranks(axes) > 1 else x_RT


def all_gather(x, axes: tuple[str, ...]):
    """Entry r of the result is x of rank r. One message an axis, over the last axis first."""
    for axis in reversed(axes):
        x = jax.lax.all_gather(x, axis) if ranks((axis,)) > 1 else x[None]
    return x.reshape(ranks(axes), *x.shape[len(axes) :])


def ranks(axes: tuple[str, ...]) -> int:
    """How many devices share the work along these mesh axes."""
    return jax.lax.axis_size(axes) if axes else 1


def capacities(T: int, R: int, buckets=BUCKETS) -> tuple[int, ...]:
    """Slots from one rank to another, ascending; the last holds all T tokens of a rank."""
    return tuple(sorted({min(T, math.ceil(b * T / R)) for b in buckets if b < R} | {T}))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
    """Where each token of this device goes, and what arrives: the same for every capacity."""

    rank_T: jax.Array  # R: stays, no expert at all
    place_T: jax.Array  # its place among what goes to that rank, ordered by expert
    sent_R: jax.Array  # rows that this rank sends to rank r
    received_RE: jax.Array  # rows that rank r sends to expert e of this rank
    bucket: jax.Array  # index into `capacities`, the same on all ranks of the group


@jax.named_scope("route")
def route(choice_T, E: int, axes: tuple[str, ...], rooms: tuple[int, ...]) -> Route:
    """Plans the exchange. `choice_T` counts the experts of all ranks; R*E: stays at home.

    A counting sort: cumulative sums over T x R*E small integers cost less than a sort on a GPU.
    """
    R = ranks(axes)
    goes_TE = (choice_T[:, None] == jnp.arange(R * E)).astype(jnp.int32)
    before_TE = jnp.cumsum(goes_TE, axis=0) - goes_TE
    sent_RE = goes_TE.sum(0).reshape(R, E)
    start_RE = jnp.cumsum(sent_RE, axis=1) - sent_RE  # of expert e among what goes to rank r
    place_T = jnp.sum(goes_TE * (before_TE + start_RE.reshape(-1)), axis=1)
    sent_R = sent_RE.sum(1)
    need = sent_R.max()
    with jax.named_scope("bucket"):
        need = jax.lax.pmax(need, axes) if R > 1 else need
    bucket = sum(((need > room).astype(jnp.int32) for room in rooms[:-1]), jnp.zeros_like(need))
    return Route(choice_T // E, place_T, sent_R, all_to_all(sent_RE, axes), bucket)


def send(x_TD, plan: Route, room: int, axes: tuple[str, ...], how: str = "even"):
    """Tokens to the ranks of their experts: `[R, C, D]`, empty slots zero."""
    R, (T, D) = plan.received_RE.shape[0], x_TD.shape
    slots = jnp.zeros_like(x_TD, shape=(R * room, D))
    slots = slots.at[_slot(plan, room, T)].set(x_TD, mode="drop", unique_indices=True)
    sizes = plan.sent_R, plan.received_RE.sum(1)
    return WAYS[how](slots.reshape(R, room, D), *sizes, axes)


def give_back(y_RCD, plan: Route, axes: tuple[str, ...], how: str = "even"):
    """The inverse of `send`: results to their tokens; a token that stayed gets zero."""
    R, room, D = y_RCD.shape
    sizes = plan.received_RE.sum(1), plan.sent_R
    y = WAYS[how](y_RCD, *sizes, axes).reshape(R * room, D)
    at = _slot(plan, room, plan.rank_T.shape[0])
    return y.at[at].get(mode="fill", fill_value=0, unique_indices=True)


def _even(slots_RCD, sent_R, received_R, axes):
    return all_to_all(slots_RCD, axes)


@jax.named_scope("exchange")
def _ragged(slots_RCD, sent_R, received_R, axes, move):
    """The same slots, of which only the rows in use travel; the others come out as zeros."""
    (R, room, D), (axis,) = slots_RCD.shape, axes or (None,)
    if ranks(axes) == 1:
        return slots_RCD
    rows = slots_RCD.reshape(R * room, D)
    # Rank r's rows lie from r * room on here, and on it those of this rank from its own number on.
    starts = jnp.arange(R, dtype=jnp.int32) * room
    there = jnp.zeros_like(starts) + jax.lax.axis_index(axis).astype(jnp.int32) * room
    out = move(rows, jnp.zeros_like(rows), starts, sent_R, there, received_R, axis_name=axis)
    return out.reshape(R, room, D)


def emulated(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name: str
):
    """`jax.lax.ragged_all_to_all`, one slice a rank, out of all-gathers.

    Where a rank is to receive another number of rows than is sent to it, all it has from there is
    NaN: the real one writes past the slice, or waits.
    """
    me, row = jax.lax.axis_index(axis_name), jnp.arange(output.shape[0])
    operands = jax.lax.all_gather(operand, axis_name)
    plans = jnp.stack([input_offsets, send_sizes, output_offsets])
    starts, sizes, places = jnp.moveaxis(jax.lax.all_gather(plans, axis_name)[:, :, me], 1, 0)
    for r in range(operands.shape[0]):
        here = (row >= places[r]) & (row < places[r] + sizes[r])
        rows = operands[r].at[row - places[r] + starts[r]].get(mode="clip")
        rows = jnp.where(sizes[r] == recv_sizes[r], rows, jnp.nan)
        output = jnp.where(here[:, None], rows, output)
    return output


# How slots travel. On two H200s the ragged one took 27 times as long as the even one. XLA for CPU
# lowers the ragged one and cannot compile it.
WAYS = {
    "even": _even,
    "ragged": partial(_ragged, move=jax.lax.ragged_all_to_all),
    "emulated": partial(_ragged, move=emulated),
}


def by_expert(plan: Route, room: int):
    """Place of each received slot when rows are ordered by expert: `[R, C]`, with rows per expert.

    Empty slots get places past the last row.
    """
    received_RE = plan.received_RE
    R, E = received_RE.shape
    c_C = jnp.arange(room)
    end_RE = jnp.cumsum(received_RE, axis=1)
    expert_RC = jnp.sum(c_C[:, None] >= end_RE[:, None, :], axis=-1)  # E: empty
    sizes_E = received_RE.sum(0)
    first_E = jnp.cumsum(sizes_E) - sizes_E
    earlier_RE = jnp.cumsum(received_RE, axis=0) - received_RE
    base_RE = first_E + earlier_RE - (end_RE - received_RE)
    base_RC = jnp.take_along_axis(base_RE, jnp.minimum(expert_RC, E - 1), axis=1)
    empty_RC = R * room + jnp.arange(R * room).reshape(R, room)
    return jnp.where(expert_RC < E, base_RC + c_C, empty_RC), sizes_E


def _slot(plan: Route, room: int, T: int):
    """Slot of each token in `[R * room]`; past the end for those that stay, each its own."""
    R = plan.received_RE.shape[0]
    stays_T = R * room + jnp.arange(T)
    return jnp.where(plan.rank_T < R, plan.rank_T * room + plan.place_T, stays_T)
