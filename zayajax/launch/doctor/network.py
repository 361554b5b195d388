"""Names, the coordinator, proxies, and the interfaces that NCCL and RCCL are told to use."""

import errno
import ipaddress
import shlex
from collections.abc import Iterator

from zayajax.errors import UserError
from zayajax.launch import cluster
from zayajax.launch.doctor.view import OK, UNSEEN, WARNING, WRONG, Finding, View

AREA = "network"
REACH = 5.0  # seconds to reach a coordinator, as long as the roll call tries
# gRPC obeys the first that is set (grpc's environment_variables.md); it does not read upper case.
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
NO_PROXY = ("no_grpc_proxy", "no_proxy")
PORT_EXAMPLE = cluster.FIRST_PORT
# RoCE sends 4,096 bytes a packet, if the frame has room for them and its headers.
ROCE_MTU, FAST = 4200, 100_000  # bytes; Mb/s


def check(view: View, coordinator: str | None, gpu: str | None) -> Iterator[Finding]:
    """Of this host and, where it has GPUs, of its RDMA NICs.

    Args:
      coordinator: host:port, None: what the cluster's variables say.
    """
    yield _own_name(view, coordinator)
    hosts = None
    if coordinator is None:
        try:
            found = cluster.find(view.environ)
        except UserError as error:
            address = f"{view.address or 'ADDRESS'}:{PORT_EXAMPLE}"
            mend = f"--coordinator {address} --processes P --process I"
            yield Finding(AREA, "coordinator", WRONG, str(error), mend)
            found = None
        else:
            if found is None:
                why = "none is named (--coordinator HOST:PORT), and one process needs none"
                yield Finding(AREA, "coordinator", UNSEEN, why)
        coordinator, hosts = (found.coordinator, found.hosts) if found else (None, None)
    if coordinator is not None:
        yield from _coordinator(view, coordinator, hosts)
    yield from _proxies(view, coordinator)
    yield from _interfaces(view)
    if gpu is not None:
        yield from _rdma(view)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _own_name(view: View, coordinator: str | None) -> Finding:
    address = view.address or "127.0.0.1"
    line = f"echo '{address} {view.host}' | sudo tee -a /etc/hosts"
    try:
        found = view.resolve(view.host)
    except OSError:
        # Gloo, through which CPUs talk, looks its own host's name up.
        return Finding(AREA, "own name", WRONG, f"{view.host}: has no address", line)
    text = f"{view.host} is {', '.join(found)}"
    if any(map(_is_loopback, found)) and coordinator is None:
        text += " (/etc/hosts): no coordinator's name for other hosts"
        mend = f"--coordinator {view.address or 'ADDRESS'}:{PORT_EXAMPLE}"
        return Finding(AREA, "own name", WARNING, text, mend)
    return Finding(AREA, "own name", OK, text)


def _coordinator(view: View, coordinator: str, hosts: int | None) -> Iterator[Finding]:
    name = "coordinator"
    try:
        host, port = cluster.split_address(coordinator)
    except UserError as error:
        mend = f"--coordinator {view.address or 'ADDRESS'}:{PORT_EXAMPLE}"
        yield Finding(AREA, name, WRONG, str(error), mend)
        return
    own = f"--coordinator {view.address or 'ADDRESS'}:{port}"
    try:
        addresses = view.resolve(host)
    except OSError as error:
        found = f"{host}: has no address ({error.strerror or error})"
        yield Finding(AREA, name, WRONG, found, f"getent hosts {host}  # or name it as a number")
        return
    loopback = next(filter(_is_loopback, addresses), None)
    if loopback:
        found = f"{host} is {loopback}, this host's own loopback: others cannot reach it"
        verdict = WARNING if hosts is None or hosts == 1 else WRONG
        if hosts != 1:
            yield Finding(AREA, name, verdict, found, own)
    try:
        view.listen(addresses[0], port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            yield _reached(view, coordinator, addresses[0], port)
        else:
            found = f"port {port} of this host cannot be listened at ({error.strerror})"
            mend = f"ss -ltnp 'sport = :{port}'  # who has it"
            if error.errno == errno.EACCES:  # below 1,024 are the system's
                mend = f"--coordinator {coordinator.rpartition(':')[0]}:{PORT_EXAMPLE}"
            yield Finding(AREA, name, WRONG, found, mend)
        return
    yield Finding(AREA, name, OK, f"{coordinator} is of this host, and free")


def _reached(view: View, coordinator: str, address: str, port: int) -> Finding:
    name = "coordinator"
    try:
        view.connect(address, port, REACH)
    except ConnectionRefusedError:
        return Finding(AREA, name, OK, f"{coordinator} answers; nothing listens there yet")
    except OSError as error:
        found = f"{coordinator} ({address}) cannot be reached: {error.strerror or error}"
        return Finding(AREA, name, WRONG, found, f"ip route get {address}  # and its firewall")
    found = f"something listens at {coordinator} already; before a run starts nothing may"
    other = f"{coordinator.rpartition(':')[0]}:{PORT_EXAMPLE + (port == PORT_EXAMPLE)}"
    return Finding(AREA, name, WARNING, found, f"--coordinator {other}")


def _proxies(view: View, coordinator: str | None) -> Iterator[Finding]:
    proxy = next((v for v in PROXIES if view.environ.get(v)), None)
    if proxy is None:
        yield Finding(AREA, "proxies", OK, "no variable sends gRPC through one")
        return
    spared = next((view.environ[v] for v in NO_PROXY if view.environ.get(v)), "")
    if coordinator is None:
        yield Finding(AREA, "proxies", OK, f"{proxy} is set, and no coordinator is named")
        return
    host = coordinator.rpartition(":")[0].strip("[]")
    if _spared(host, spared):
        yield Finding(AREA, "proxies", OK, f"{proxy} is set, and spares {host}")
        return
    found = f"{proxy} takes gRPC's messages to {host}; `zayajax train` goes past it, others hang"
    mend = f"export no_proxy={shlex.quote(','.join(filter(None, [spared, host])))}"
    yield Finding(AREA, "proxies", WARNING, found, mend)


def _spared(host: str, listed: str) -> bool:
    """By its end, by range, or by "*", as gRPC reads no_proxy."""
    for word in filter(None, (w.strip() for w in listed.split(","))):
        if word == "*" or host.lower().endswith(word.lower().lstrip("*")):
            return True
        try:
            if "/" in word and ipaddress.ip_address(host) in ipaddress.ip_network(word, False):
                return True
        except ValueError:  # a name is in no range
            continue
    return False


def _interfaces(view: View) -> Iterator[Finding]:
    there = [n for n in view.names("sys/class/net") if n != "lo"]
    described = []
    for name in there:
        state, mtu = (view.read(f"sys/class/net/{name}/{key}") for key in ("operstate", "mtu"))
        if state != "down" and mtu:
            described.append(f"{name} (MTU {mtu})")
    rates = {n: view.number(f"sys/class/net/{n}/speed") or 0 for n in there}
    frames = {n: view.number(f"sys/class/net/{n}/mtu") or ROCE_MTU for n in there}
    slow = [n for n in there if rates[n] >= FAST and frames[n] < ROCE_MTU]
    if slow:
        found = f"MTU {frames[slow[0]]} of {_some(slow)}: too short for RoCE's 4,096 bytes a packet"
        mend = f"sudo ip link set {slow[0]} mtu 9000  # and on its switch"
        yield Finding(AREA, "interfaces", WARNING, found, mend)
    else:
        yield Finding(AREA, "interfaces", OK, ", ".join(described) or "none beside loopback")
    yield from _named(view, "NCCL_SOCKET_IFNAME", there, "sys/class/net")


def _named(view: View, variable: str, there: list[str], where: str) -> Iterator[Finding]:
    """Whether what NCCL is told to use exists. Names are beginnings, or after "=" whole; after "^"
    they are left out; a NIC's may end in ":port" (NCCL user guide, environment variables)."""
    value = view.environ.get(variable)
    if not value:
        return
    text, exclude, exact = value, value.startswith("^"), "=" in value[:2]
    words = [w.partition(":")[0] for w in text.lstrip("^=").split(",") if w.strip()]

    def matches(name, word):
        return name == word if exact else name.startswith(word)

    missing = [w for w in words if not any(matches(n, w) for n in there)]
    left = [n for n in there if any(matches(n, w) for w in words) != exclude]
    if there and missing and not exclude:
        found = f"{variable}={value}: there is no {missing[0]} in /{where}, but {_some(there)}"
    elif there and not left:
        found = f"{variable}={value}: leaves none of {_some(there)}"
    elif not there:
        found = f"{variable}={value}: /{where} has none"
    else:
        yield Finding(AREA, variable, OK, f"{value}: {_some(left)}")
        return
    kept = [w for w in words if w not in missing and not exclude]
    mend = (
        f"export {variable}={shlex.quote(','.join(kept or there))}"
        if there
        else f"unset {variable}"
    )
    yield Finding(AREA, variable, WRONG, found, mend)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _rdma(view: View) -> Iterator[Finding]:
    devices = view.names("sys/class/infiniband")
    yield from _named(view, "NCCL_IB_HCA", devices, "sys/class/infiniband")
    if not devices:
        yield Finding(AREA, "RDMA", UNSEEN, "no RDMA NIC, and one node needs none")
        return
    states = {d: view.read(f"sys/class/infiniband/{d}/ports/1/state") or "" for d in devices}
    down = [d for d, state in states.items() if "ACTIVE" not in state]
    if down:
        found = f"{len(down)} of {len(devices)} NICs are not active: {_some(down)}"
        yield Finding(
            AREA, "RDMA", WARNING, found, f"rdma link show {down[0]}/1  # cable and switch"
        )
    else:
        yield Finding(AREA, "RDMA", OK, f"{len(devices)} NICs, all active")
    for variable, cost in (
        ("NCCL_IB_DISABLE", "messages between nodes go through TCP"),
        ("NCCL_P2P_DISABLE", "messages inside the node go through the host's memory"),
    ):
        if view.environ.get(variable, "0") != "0":
            found = f"{variable}={view.environ[variable]}: {cost}"
            yield Finding(AREA, variable, WARNING, found, f"unset {variable}")
    if len(devices) > 1 and view.environ.get("NCCL_CROSS_NIC", "0") != "0":
        found = f"NCCL_CROSS_NIC={view.environ['NCCL_CROSS_NIC']}: traffic may leave its rail"
        yield Finding(AREA, "NCCL_CROSS_NIC", WARNING, found, "export NCCL_CROSS_NIC=0")
    yield from _gid(view, devices)


def _gid(view: View, devices: list[str]) -> Iterator[Finding]:
    variable = "NCCL_IB_GID_INDEX"
    value = view.environ.get(variable)
    if value is None:
        return
    gid = view.read(f"sys/class/infiniband/{devices[0]}/ports/1/gids/{value}")
    # Pollara's driver; facts of both indices: AMD's Primus.
    usual = "1" if any(d.startswith("ionic") for d in devices) else "3"
    if not gid or not gid.strip("0:"):
        found = f"{variable}={value}: {devices[0]} has no such address"
        yield Finding(AREA, variable, WRONG, found, f"export {variable}={usual}")
    elif value != usual:
        found = f"{variable}={value}, and {usual} is usual with {devices[0]}"
        yield Finding(AREA, variable, WARNING, found, f"export {variable}={usual}")
    else:
        yield Finding(AREA, variable, OK, f"{value}: {gid}")
