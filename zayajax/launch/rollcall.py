"""The roll call: who is there, before JAX starts.

Every process connects to the coordinator's address and says who it is, one line of JSON. Process 0
says at once how long it will wait, and when all are there, or it has waited enough, what came of
it: who is missing, or what differs. JAX by itself would wait, and name nobody.
"""

import contextlib
import json
import os
import platform
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from zayajax.errors import NotMet, UserError
from zayajax.launch.cluster import Cluster, split_address

LONGEST = 1 << 16  # bytes of a line; a caller's own is a few hundred
RETRY = 0.3  # seconds
# Process 0 gives up first and says why; others wait this much longer for its word, in seconds, and
# count from when it began: processes may start minutes apart.
LAST_WORD = 3.0
SENDING = 5.0  # seconds for a line that fits the socket's buffer


def roll_call(cluster: Cluster, card: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Meets the others; returns {"hosts": how many, "peers": cards on this host, by rank}.

    Args:
      card: what this process says of itself: `host` tells machines apart and `name` is what people
        call it; `same` is a dict of what all must agree on. The rank is added here.

    Raises the same UserError in every process, where process 0 could be reached.
    """
    card = card | {"zayajax": 1, "rank": cluster.process, "processes": cluster.processes}
    card |= {"pid": os.getpid()}
    deadline = time.monotonic() + timeout
    if cluster.process == 0:
        return _Desk(cluster, card, timeout, deadline).run()
    return _call(cluster, card, timeout, deadline)


class _Desk:
    """Process 0's side."""

    def __init__(self, cluster, card, timeout, deadline):
        self.cluster, self.timeout, self.deadline = cluster, timeout, deadline
        self.cards, self.sockets, self.left = {0: card}, {}, {}
        self.strays: set[str] = set()

    def run(self):
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(_listen(self.cluster))
            self.selector = stack.enter_context(selectors.DefaultSelector())
            self.selector.register(listener, selectors.EVENT_READ)
            stack.callback(lambda: [s.close() for s in self.sockets.values()])
            try:
                self._gather(listener)
                hosts = {c["host"] for c in self.cards.values()}
                self._check_address(len(hosts))
                self._check_same()
            except UserError as error:
                said = {"error": str(error), "again": isinstance(error, NotMet)}
                self._tell(lambda _: said)
                raise
            answers = {h: {"hosts": len(hosts), "peers": self._peers(h)} for h in hosts}
            self._tell(lambda card: answers[card["host"]])
            return answers[self.cards[0]["host"]]

    def _peers(self, host):
        return [c for _, c in sorted(self.cards.items()) if c["host"] == host]

    def _gather(self, listener):
        pending: dict[socket.socket, bytes] = {}
        try:
            while len(self.cards) < self.cluster.processes:
                left = self.deadline - time.monotonic()
                if left <= 0:
                    raise NotMet(self._missing())
                for key, _ in self.selector.select(min(left, 1.0)):
                    if key.fileobj is listener:
                        with contextlib.suppress(OSError):  # who called has hung up again
                            caller, _ = listener.accept()
                            caller.setblocking(False)
                            self.selector.register(caller, selectors.EVENT_READ)
                            pending[caller] = b""
                    else:
                        self._hear(key.fileobj, pending)
        finally:
            for caller in pending:
                caller.close()

    def _hear(self, caller, pending):
        try:
            data = caller.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        rank = next((r for r, s in self.sockets.items() if s is caller), None)
        if rank is not None:  # it has said all: this is its end
            self._drop(caller)
            del self.sockets[rank]
            self.left[rank] = self.cards.pop(rank)
            return
        line = pending.get(caller, b"") + data
        if data and b"\n" not in line and len(line) < LONGEST:
            pending[caller] = line
            return
        pending.pop(caller, None)
        card = _read(line)
        if card is None:
            with contextlib.suppress(OSError):
                self.strays.add(caller.getpeername()[0])
            self._drop(caller)
            return
        self._admit(caller, card)

    def _admit(self, caller, card):
        rank, total = card["rank"], self.cluster.processes
        there = self.cards.get(rank)
        if there is None:
            self.sockets[rank] = caller
            self.cards[rank] = card
            self.left.pop(rank, None)
            self._send(caller, {"left": max(0.0, self.deadline - time.monotonic())})
        else:
            self.sockets[-1] = caller  # it is told, too
        if card["processes"] != total:
            raise UserError(
                f"process 0 ({_who(self.cards[0])}) is one of {total} processes, and process "
                f"{rank} ({_who(card)}) one of {card['processes']}"
            )
        if there is not None:
            raise UserError(
                f"two processes say that they are process {rank}: {_who(there)} and {_who(card)}"
            )

    def _drop(self, caller):
        self.selector.unregister(caller)
        caller.close()

    def _missing(self) -> str:
        absent = sorted(set(range(self.cluster.processes)) - set(self.cards))
        present = "; ".join(
            f"{ranks([c['rank'] for c in self._peers(host)])} on {self._peers(host)[0]['name']}"
            for host in dict.fromkeys(c["host"] for _, c in sorted(self.cards.items()))
        )
        text = (
            f"{ranks(absent)} of {self.cluster.processes} did not join within {self.timeout:g} s "
            f"at {self.cluster.coordinator}; present: {present}"
        )
        if self.left:
            gone = ", ".join(f"{r} ({_who(c)})" for r, c in sorted(self.left.items()))
            text += f"; came and ended: {gone}"
        if self.strays:
            text += f"; something else called from {', '.join(sorted(self.strays))}"
        if is_loopback(self.cluster.coordinator):
            text += "; other hosts cannot reach that address, which is this host's own loopback"
        return text

    def _check_address(self, hosts: int):
        if hosts > 1 and is_loopback(self.cluster.coordinator):
            raise UserError(loopback_refused(self.cluster.coordinator, hosts))

    def _check_same(self):
        for key in self.cards[0]["same"]:
            who: dict[str, list[int]] = {}
            for rank, card in sorted(self.cards.items()):
                who.setdefault(str(card["same"].get(key)), []).append(rank)
            if len(who) > 1:
                parts = ", ".join(
                    f"{value} in {ranks(some)} ({self.cards[some[0]]['name']})"
                    for value, some in who.items()
                )
                raise UserError(f"the processes differ in {key}: {parts}; start all alike")

    def _tell(self, answer):
        for rank, caller in self.sockets.items():
            self._send(caller, answer(self.cards.get(rank, self.cards[0])))

    def _send(self, caller, words: dict):
        with contextlib.suppress(OSError):  # one that has ended is missed soon enough
            caller.settimeout(SENDING)
            caller.sendall(json.dumps({"zayajax": 1} | words).encode() + b"\n")


def _listen(cluster: Cluster) -> socket.socket:
    _, port = split_address(cluster.coordinator)
    v6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if v6 else socket.AF_INET
    try:  # on all addresses, as JAX's service after it
        return socket.create_server(
            ("", port), family=family, backlog=cluster.processes, dualstack_ipv6=v6
        )
    except OSError as error:
        raise NotMet(
            f"coordinator {cluster.coordinator}: process 0 cannot listen at port {port} of "
            f"{platform.node()} ({os.strerror(error.errno)}); end what has it, or name another port"
        ) from None


def _call(cluster: Cluster, card, timeout: float, deadline: float):
    host, port = split_address(cluster.coordinator)
    why = "nobody answered"
    while True:
        left = deadline + LAST_WORD - time.monotonic()
        if left <= 0:
            break
        try:
            with socket.create_connection((host, port), timeout=min(left, SENDING)) as desk:
                desk.sendall(json.dumps(card).encode() + b"\n")
                answer, why = _answer(desk, deadline + LAST_WORD)
            if answer is not None:
                if "error" in answer:
                    raise (NotMet if answer.get("again") else UserError)(answer["error"])
                return answer
        except OSError as error:
            why = error.strerror or str(error) or "no answer"
        time.sleep(min(RETRY, max(0.0, deadline + LAST_WORD - time.monotonic())))
    text = (
        f"process {cluster.process} did not reach process 0 at {cluster.coordinator} within "
        f"{timeout:g} s ({why})"
    )
    if is_loopback(cluster.coordinator):
        text += "; that is this host's own loopback address, and process 0 may be on another host"
    raise NotMet(text)


def _answer(desk: socket.socket, deadline: float) -> tuple[dict | None, str]:
    """What process 0 says in the end, or None and why it says nothing."""
    stranger = "what is there is no process 0 of zayajax"
    line = b""
    while (left := deadline - time.monotonic()) > 0:
        desk.settimeout(left)
        data = desk.recv(LONGEST)
        if not data:
            return None, stranger if line else "it hung up"
        line += data
        if not line.startswith(b'{"zayajax"'[: len(line)]):
            return None, stranger
        while b"\n" in line:
            first, _, line = line.partition(b"\n")
            try:
                said = json.loads(first)
            except ValueError:
                return None, stranger
            if "left" not in said:
                return said, ""
            if not isinstance(said["left"], int | float):
                return None, stranger
            deadline = time.monotonic() + said["left"] + LAST_WORD
    return None, "it did not answer"


def _read(line: bytes) -> dict | None:
    """A card, or None where this is none."""
    try:
        card = json.loads(line)
        rank, processes = card["rank"], card["processes"]
        whole = card["zayajax"] == 1 and isinstance(card["same"], Mapping)
        strings = isinstance(card["host"], str) and isinstance(card["name"], str)
        numbers = type(rank) is int and type(processes) is int and type(card["pid"]) is int
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    # One beyond our own count is of another run: its own count is wrong, and that is said.
    return card if whole and strings and numbers and 0 <= rank < processes else None


def _who(card) -> str:
    return f"{card['name']}, pid {card['pid']}"


def ranks(numbers: Sequence[int]) -> str:
    """Such as "ranks 3, 7-9"."""
    spans: list[list[int]] = []
    for n in sorted(numbers):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {text}"


def is_loopback(address: str) -> bool:
    """Whether the host of "host:port" is this host to itself: 127.x, ::1, or a name that is made
    one of these here, as Debian makes a host's own 127.0.1.1."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(ip[0].startswith("127.") or ip[0] == "::1" for *_, ip in found)


def loopback_refused(address: str, hosts: int) -> str:
    return (
        f"coordinator {address}: is a loopback address, and the processes are on {hosts} hosts; "
        "name the address by which other hosts reach this one (an entry such as 127.0.1.1 in "
        "/etc/hosts hides it)"
    )
