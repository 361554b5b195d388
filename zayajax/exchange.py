"""The collectives on activations. Over no axes each of them stays on the device.

Shape letters: B batch, S sequence, T tokens of this device, D embed, R ranks, C slots a rank pair,
E experts of one rank.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

# Room for what one rank may send to another, as a multiple of the even share T/R. The worst case,
# R times the share, always stands behind these, so that no token is ever dropped.
BUCKETS = (1.25, 2.0, 4.0)


def shift(x_BSC, n: int):
    """Each position takes the value n places before it in its row; the first n take zero."""
    if n == 0:
        return x_BSC
    widths = ((0, 0), (n, 0)) + ((0, 0),) * (x_BSC.ndim - 2)
    return jnp.pad(x_BSC, widths)[:, : x_BSC.shape[1]]


@jax.named_scope("exchange")
def all_to_all(x_RT, axes: tuple[str, ...]):
    """Entry r goes to rank r; entry r of the result came from rank r. Its own transpose."""
    return jax.lax.all_to_all(x_RT, axes, 0, 0, tiled=True) if ranks(axes) > 1 else x_RT


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
    need = sent_RE.sum(1).max()
    with jax.named_scope("bucket"):
        need = jax.lax.pmax(need, axes) if R > 1 else need
    bucket = sum(((need > room).astype(jnp.int32) for room in rooms[:-1]), jnp.zeros_like(need))
    return Route(choice_T // E, place_T, all_to_all(sent_RE, axes), bucket)


def send(x_TD, plan: Route, room: int, axes: tuple[str, ...]):
    """Tokens to the ranks of their experts: `[R, C, D]`, empty slots zero."""
    R, (T, D) = plan.received_RE.shape[0], x_TD.shape
    slots = jnp.zeros_like(x_TD, shape=(R * room, D))
    slots = slots.at[_slot(plan, room, T)].set(x_TD, mode="drop", unique_indices=True)
    return all_to_all(slots.reshape(R, room, D), axes)


def give_back(y_RCD, plan: Route, axes: tuple[str, ...]):
    """The inverse of `send`: results to their tokens; a token that stayed gets zero."""
    R, room, D = y_RCD.shape
    y = all_to_all(y_RCD, axes).reshape(R * room, D)
    at = _slot(plan, room, plan.rank_T.shape[0])
    return y.at[at].get(mode="fill", fill_value=0, unique_indices=True)


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
