"""Who takes part in a run: from options, from our launcher, or from the cluster's own.

Ports of clusters are a function of the job, above 61,439: Linux gives out none there by itself
(ip_local_port_range ends at 60,999).
"""

import dataclasses
import itertools
import re
import socket
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from zayajax.errors import UserError

COORDINATOR, PROCESSES, PROCESS = "ZAYAJAX_COORDINATOR", "ZAYAJAX_PROCESSES", "ZAYAJAX_PROCESS"
NODES = "ZAYAJAX_NODES"
FIRST_PORT, PORTS = 61440, 4096


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run, as one of them sees them.

    Args:
      coordinator: host:port, on the host of process 0.
      processes: how many there are.
      process: this one's rank.
      hosts: on how many hosts; None where nothing says so before they meet.
      source: who said all this.
      timeout: seconds in which all have to come.
    """

    coordinator: str
    processes: int
    process: int
    hosts: int | None = None
    source: str = "options"
    timeout: float = 300.0

    def __post_init__(self):
        split_address(self.coordinator)
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"--join-timeout: {self.timeout:g} is no time to wait, in seconds")
        if self.processes < 1:
            raise UserError(f"{self.source}: {self.processes} processes; there is at least one")
        if not 0 <= self.process < self.processes:
            raise UserError(
                f"{self.source}: process {self.process} is none of {self.processes}, which are "
                f"numbered 0 to {self.processes - 1}"
            )


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"; UserError where it is neither."""
    host, colon, port = address.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (colon and host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(
            f"coordinator {address!r}: has to be HOST:PORT, the port 1 to 65535 ([HOST]:PORT for "
            "a numeric IPv6 host)"
        )
    try:
        host.encode("idna")  # as sockets do
    except UnicodeError:
        raise UserError(f"coordinator {address!r}: {host!r} is no name of a host") from None
    return host, int(port)


class Part(NamedTuple):
    """What one source says; None where it says nothing."""

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    hosts: int | None = None


def find(
    environ: Mapping[str, str],
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: float = 300.0,
) -> Cluster | None:
    """The cluster that this process is of; None where it is alone.

    Options come first, then ZAYAJAX_COORDINATOR, ZAYAJAX_PROCESSES and ZAYAJAX_PROCESS, then Open
    MPI, Slurm and Kubernetes, as far as they speak of several processes: what a launcher's
    allocation holds counts for nothing without its step.

    Raises UserError where they do not say all of it, or what cannot be.
    """
    options = Part(coordinator, processes, process)
    ours = Part(
        environ.get(COORDINATOR),
        _number(environ, PROCESSES),
        _number(environ, PROCESS),
        _number(environ, NODES),
    )
    asked = any(x is not None for x in (*options, *ours[:3]))
    if options.processes == 1 or (options.processes is None and ours.processes == 1):
        return None
    name, launcher = next(
        ((name, part) for name, of in LAUNCHERS.items() if (part := of(environ))), ("", Part())
    )
    if not asked and (launcher.processes or 1) == 1:
        return None
    sources = {"options": options, "ZAYAJAX_ variables": ours, name: launcher}
    values = {
        key: next((v for part in sources.values() if (v := getattr(part, key)) is not None), None)
        for key in Part._fields
    }
    said_by = [n for n, part in sources.items() if any(x is not None for x in part[:3])]
    source = " and ".join(n for n in said_by if n)
    missing = [option for key, option in OPTIONS.items() if values[key] is None]
    if missing:
        raise UserError(
            f"{source}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; "
            "name --coordinator HOST:PORT, --processes and --process, or none of them"
        )
    return Cluster(**values, source=source, timeout=timeout)


OPTIONS = {
    "coordinator": f"the coordinator (--coordinator, {COORDINATOR})",
    "processes": f"the number of processes (--processes, {PROCESSES})",
    "process": f"this process's number (--process, {PROCESS})",
}


class Node(NamedTuple):
    """A node's place among those of a job: its number, how many there are, and the coordinator as
    host:port, None for a node alone."""

    node: int
    nodes: int
    coordinator: str | None


def node_of(environ: Mapping[str, str]) -> Node:
    """Of the node on which one task of Slurm, Open MPI or Kubernetes runs as its only one."""
    if "SLURM_STEP_NUM_NODES" in environ:
        nodes, node = _number(environ, "SLURM_STEP_NUM_NODES"), _number(environ, "SLURM_NODEID")
        tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
        if nodes > 1:
            if node is None or tasks != nodes:
                raise UserError(
                    f"Slurm runs {tasks} tasks on {nodes} nodes; `zayajax launch` is one task a "
                    "node (srun --ntasks-per-node=1)"
                )
            return Node(node, nodes, _slurm(environ).coordinator)
    part = _kubernetes(environ)
    nodes = _number(environ, NODES)
    if part and nodes and nodes > 1:
        return Node(part.process, nodes, environ.get(COORDINATOR) or part.coordinator)
    return Node(0, 1, None)


def _number(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"{variable}: {text!r} is no number")
    return int(text)


def port_of(job: str) -> int:
    # Jobs are numbered in turn, so that those of one time have different ports.
    number = int(job) if job.isascii() and job.isdecimal() else zlib.crc32(job.encode())
    return FIRST_PORT + number % PORTS


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _slurm(environ: Mapping[str, str]) -> Part | None:
    """Of a job step. Without one, in a batch script or a shell of `salloc`, SLURM_NTASKS is what a
    step could have (srun's manual, output environment variables)."""
    tasks, rank = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_PROCID")
    if tasks is None or rank is None:
        return None
    hosts = expand_hosts(
        environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    )
    # Steps of one job may run side by side.
    job, step = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0")
    port = port_of(str(int(job) + 509 * int(step)) if job.isdecimal() and step.isdecimal() else job)
    return Part(_address(hosts[0], port), tasks, rank, len(hosts))


def expand_hosts(text: str) -> list[str]:
    """Hosts of a Slurm node list, such as "n[001-003,7],gpu5": n001, n002, n003, n7, gpu5."""

    def malformed():
        return UserError(f"Slurm's node list {text!r} cannot be read; name --coordinator")

    # A comma inside brackets separates numbers, outside hosts.
    if set("[]") & set(re.sub(r"\[[^\[\]]*\]", "", text)):
        raise malformed()
    found = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        parts = []
        for literal, numbers in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", word):
            parts.append([literal] if literal else [])
            for span in [] if literal else numbers.split(","):
                ends = re.fullmatch(r"(\d+)(?:-(\d+))?", span)
                if not ends or int(ends[2] or ends[1]) < int(ends[1]):
                    raise malformed()
                first, last = ends[1], ends[2] or ends[1]
                parts[-1] += [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
        found += map("".join, itertools.product(*parts))
    if not found:
        raise malformed()
    return found


def _open_mpi(environ: Mapping[str, str]) -> Part | None:
    """Of `mpirun`. Its first process is mostly on the host where it was started, which is known as
    the start of a PMIx name space, or as ORTE's address; inside Slurm, on the first host."""
    size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    rank = _number(environ, "OMPI_COMM_WORLD_RANK")
    rank = _number(environ, "PMIX_RANK") if rank is None else rank
    if size is None or rank is None:
        return None
    here = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    space, uri = environ.get("PMIX_NAMESPACE", ""), environ.get("OMPI_MCA_orte_hnp_uri", "")
    port = port_of(space or uri.partition(".")[0] or environ.get("SLURM_JOB_ID", "0"))
    started = re.fullmatch(r"prterun-(.+)-\d+@\d+", space)
    address = re.search(r"tcp://([0-9.]+)", uri)
    if here == size:
        host = "127.0.0.1"
    elif nodes := environ.get("SLURM_JOB_NODELIST"):
        host = expand_hosts(nodes)[0]
    else:
        host = (started or address or [None, None])[1]
    return Part(host and _address(host, port), size, rank, 1 if here == size else None)


def _kubernetes(environ: Mapping[str, str]) -> Part | None:
    """Of an indexed job. How many pods there are, Kubernetes does not tell them; many indexed jobs
    are of pods that have nothing to do with each other."""
    index = _number(environ, "JOB_COMPLETION_INDEX")
    if index is None:
        return None
    # A pod is called JOB-INDEX, and its full name is POD.SERVICE.NAMESPACE.svc...
    pod, _, service = socket.getfqdn(environ.get("HOSTNAME", "")).partition(".")
    first = re.sub(rf"-{index}$", "-0", pod)
    job = pod.removesuffix(f"-{index}")
    coordinator = f"{first}.{service}:{port_of(job)}" if service and job != pod else None
    return Part(coordinator, None, index)


LAUNCHERS = {"Open MPI": _open_mpi, "Slurm": _slurm, "Kubernetes": _kubernetes}
