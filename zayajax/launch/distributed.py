"""Joins the processes of a run, and lets one of them work for all."""

import json
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jaxlib

from zayajax import __version__
from zayajax.devices import LOCAL_RANKS, machine_id
from zayajax.errors import NotMet, UserError
from zayajax.launch import flags
from zayajax.launch.cluster import Cluster, Node, find, node_of, split_address
from zayajax.launch.rollcall import loopback_refused, roll_call

__all__ = ["Cluster", "Node", "as_first", "find", "join", "node_of", "together"]

T = TypeVar("T")


def join(
    cluster: Cluster,
    *,
    timeout: float | None = None,
    cpu_devices: int | None = None,
    facts: Mapping[str, str] | None = None,
    host: str | None = None,
) -> None:
    """Meets the other processes and starts JAX with them. Only before JAX has started.

    Args:
      timeout: seconds for all to come, and again for JAX to connect them [cluster.timeout].
      cpu_devices: emulated devices of this process, where it computes on a CPU.
      facts: what has to be the same in all processes beside versions, such as a hash of the config.
      host: stands for this host's name, as in `make_mesh`.

    Raises UserError, the same one in all processes that can be reached, where a rank is missing or
    there twice, versions or facts differ, or an address cannot be.
    """
    if cluster.processes == 1:
        return
    timeout = cluster.timeout if timeout is None else timeout
    if (cluster.hosts or 1) > 1 and split_address(cluster.coordinator)[0] in LOOPBACKS:
        raise UserError(loopback_refused(cluster.coordinator, cluster.hosts))
    if jax._src.xla_bridge.backends_are_initialized():
        raise UserError(
            "JAX already runs in this process, and can no longer join others; restart Python and "
            "train before any other use of JAX"
        )
    where = flags.platform(os.environ)
    name = host or platform.node() or "this host"
    masks = {v: os.environ[v] for v in flags.MASKS[where] if v in os.environ}
    rank = next((os.environ[v] for v in LOCAL_RANKS if v in os.environ), None)
    card = {"host": host or machine_id() or name, "name": name, "masks": masks, "local": rank}
    card |= {"space": _process_space()}
    met = roll_call(cluster, card | {"same": _same(facts or {})}, timeout)
    ids = None if where == flags.CPU else _local_devices(met["peers"], cluster.process, where)
    if where == flags.CPU:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if cpu_devices is not None:
            jax.config.update("jax_num_cpu_devices", cpu_devices)
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is the run's own
    _pass_proxies(cluster.coordinator)
    _initialize(cluster, ids, timeout)


def _initialize(cluster: Cluster, local_device_ids: list[int] | None, timeout: float) -> None:
    """JAX ends the process, with a stack trace, where it waits in vain for one that met us and then
    died. So it waits in a thread, for longer than we do."""
    failed: list[BaseException] = []

    def initialize():
        try:
            jax.distributed.initialize(
                cluster.coordinator,
                cluster.processes,
                cluster.process,
                local_device_ids=local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=math.ceil(2 * timeout + 60),
            )
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=initialize, name="jax.distributed", daemon=True)
    thread.start()
    thread.join(timeout)
    if failed and not isinstance(failed[0], RuntimeError):
        raise failed[0]
    if thread.is_alive() or failed:
        why = str(failed[0]).splitlines()[0] if failed else "another may have ended meanwhile"
        raise NotMet(
            f"process {cluster.process} met the others, but JAX did not connect them at "
            f"{cluster.coordinator} within {timeout:g} s ({why})"
        )


LOOPBACKS = ("localhost", "127.0.0.1", "::1")


def _process_space() -> str:
    # Pods on one host are as many hosts where it is about GPUs: each has its own.
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _same(facts: Mapping[str, str]) -> dict[str, str]:
    found = {"zayajax": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    return found | {"Python": platform.python_version()} | dict(facts)


def _local_devices(peers: list[dict], process: int, where: str) -> list[int] | None:
    """Which of the host's GPUs are this process's; None: all that it sees, because it is alone or
    its launcher has given each process its own."""
    space = next(card["space"] for card in peers if card["rank"] == process)
    peers = [card for card in peers if card["space"] == space]
    mine = next(i for i, card in enumerate(peers) if card["rank"] == process)
    if len(peers) == 1 or any(card["masks"] != peers[0]["masks"] for card in peers):
        return None
    named = [card["local"] for card in peers]
    if sorted(named, key=str) == sorted(map(str, range(len(peers)))):
        mine = int(named[mine])
    seen = flags.gpus(where, os.environ) or len(peers)
    share, rest = divmod(seen, len(peers))
    if not share:  # fewer than processes: each sees its own
        return None
    if rest:
        raise UserError(
            f"{len(peers)} processes on {peers[0]['name']} cannot share its {seen} GPUs evenly; "
            "use as many as there are GPUs, or one"
        )
    return list(range(mine * share, (mine + 1) * share))


def _pass_proxies(coordinator: str) -> None:
    """Keeps gRPC from asking a proxy for the coordinator: it would wait for an answer."""
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return
    given = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy", "")
    host, _ = split_address(coordinator)
    if host not in given.split(","):
        os.environ["no_grpc_proxy"] = ",".join(filter(None, [given, host]))
    jax.config.update("jax_check_proxy_envs", False)  # its warning of what is mended here


def as_first(value: T, *, timeout: float = 300.0) -> T:
    """Process 0's value, plain JSON, in all processes; alone, it is `value`. Once between
    two calls of `together`."""
    state = jax._src.distributed.global_state
    if state.client is None or state.num_processes == 1:
        return value
    key = f"zayajax/first/{_calls}"
    if state.process_id == 0:
        state.client.key_value_set(key, json.dumps(value))
    return json.loads(state.client.blocking_key_value_get(key, math.ceil(timeout * 1000)))


_calls = 0


def together(fn: Callable[[], T], what: str, *, timeout: float = 1800.0) -> T | None:
    """Process 0 runs `fn` and the others wait until it has; alone, it is `fn()`.

    All processes call it, in the same order. Process 0 gets what `fn` returns, the others None.

    Args:
      what: what `fn` does, to be read in "process 0 did not ... within T s".
      timeout: seconds that the others wait.

    Raises in all processes the UserError that `fn` raised; for any other error of it, RuntimeError
    in the others.
    """
    global _calls
    state = jax._src.distributed.global_state  # asking `jax` itself would start it
    client = state.client
    if client is None or state.num_processes == 1:
        return fn()
    _calls += 1
    key = f"zayajax/together/{_calls}"
    if state.process_id == 0:
        said = {}
        try:
            return fn()
        except UserError as error:
            said = {"mistake": str(error)}
            raise
        except BaseException as error:
            said = {"error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            client.key_value_set(key, json.dumps(said))
    began = time.monotonic()
    try:
        said = json.loads(client.blocking_key_value_get(key, math.ceil(timeout * 1000)))
    except RuntimeError as error:
        if time.monotonic() - began < timeout:  # the others' end, not ours to explain away
            raise
        raise UserError(f"process 0 did not {what} within {timeout:g} s") from error
    if "mistake" in said:
        raise UserError(said["mistake"])
    if "error" in said:
        raise RuntimeError(f"process 0 could not {what}: {said['error']}")
    return None
