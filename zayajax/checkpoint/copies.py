"""A copy of a state that the next step is going to overwrite.

On the devices where they have the room: memory to memory, and a thread takes it to the host later.
Else on the host, which the step has to wait for.
"""

import functools
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from zayajax.checkpoint.tree import like_numbers, numbers

HOST = "pinned_host"


def on_devices(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Started, not waited for; typed keys become their data. No result shares memory with an
    argument, so that the arguments may be donated at once."""
    names = tuple(arrays)
    shardings = tuple(like_numbers(x).sharding for x in arrays.values())
    copies = _program(shardings)(tuple(arrays.values()))
    return dict(zip(names, copies, strict=True))


@functools.cache
def _program(shardings):
    def copied(arrays):
        return tuple(jnp.copy(numbers(x)) for x in arrays)

    return jax.jit(copied, out_shardings=shardings)


def on_host(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The same in the hosts' memory, when it returns."""
    plain = {name: numbers(x) for name, x in arrays.items()}
    shardings = {name: x.sharding.with_memory_kind(HOST) for name, x in plain.items()}
    return jax.block_until_ready(jax.device_put(plain, shardings))


def there_is_room(arrays: Mapping[str, jax.Array]) -> bool:
    """Whether each device of this process can hold its shards once more, judged by the most that it
    has ever held."""
    needed = {}
    for x in arrays.values():
        for shard in numbers(x).addressable_shards:
            needed[shard.device] = needed.get(shard.device, 0) + shard.data.nbytes
    unknown = 0
    for device, size in needed.items():
        memory = device.memory_stats()
        if not memory or "bytes_limit" not in memory:
            unknown += size
        elif memory["bytes_limit"] - memory["peak_bytes_in_use"] < size:
            return False
    return unknown <= _available()


def _available() -> int:
    """Bytes of this host that can be had without swapping (proc(5), MemAvailable): the memory of
    devices that keep no count, such as a CPU's."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
