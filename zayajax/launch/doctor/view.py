"""What the checks see of a machine, so that any broken one can be put in its place."""

import dataclasses
import errno
import fcntl
import importlib.metadata
import os
import platform
import pwd
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from zayajax.launch import flags

OK, WARNING, WRONG, UNSEEN = VERDICTS = ("ok", "warning", "wrong", "not looked at")


class Finding(NamedTuple):
    """One thing that was looked at.

    Args:
      name: what it is, of an `area`.
      found: what is there, in one clause.
      mend: the one line that mends it: of a shell, or a setting. Only where something is amiss.
    """

    area: str
    name: str
    verdict: str
    found: str
    mend: str | None = None


class Ran(NamedTuple):
    """How a program ended: its status, negative for a signal, None where it did not in time."""

    status: int | None
    out: str
    err: str


class Package(NamedTuple):
    name: str  # in lower case, with dashes
    version: str
    folder: str


class Room(NamedTuple):
    """Bytes of a file system, and how many more files it takes; None where it does not count."""

    total: int
    free: int
    files: int | None


@dataclasses.dataclass(frozen=True)
class View:
    """A machine, as an ordinary user's program sees it.

    Args:
      root: under which /dev, /proc, /sys and /opt are.
      packages: installed ones, in the order in which Python finds them; one may be there twice.
      plugins: JAX's, by name.
      cores: that this process may use.
      limits: soft limits of this process by name (memlock in bytes, nofile); None: no limit.
      address: this host's own for others, by its default route; None without one.
      run: a program with an environment, for at most so many seconds.
      resolve: the addresses of a name. Raises OSError.
      listen: tries to, at an address and port. Raises OSError.
      connect: tries to, for at most so many seconds. Raises OSError.
      may_use: whether this user may read and write a file.
      room: of the file system of a folder. Raises OSError.
      attempt: {"write" | "rename" | "lock": None, or why it fails} in a folder.
      clocks: seconds of the monotonic and of the wall clock.
    """

    environ: Mapping[str, str]
    root: Path
    python: str
    packages: Sequence[Package]
    plugins: frozenset[str]
    user: str
    host: str
    address: str | None
    cores: int
    limits: Mapping[str, int | None]
    run: Callable[[Sequence[str], Mapping[str, str], float], Ran]
    resolve: Callable[[str], list[str]]
    listen: Callable[[str, int], None]
    connect: Callable[[str, int, float], None]
    may_use: Callable[[Path], bool]
    room: Callable[[Path], Room]
    attempt: Callable[[Path], dict[str, str | None]]
    clocks: Callable[[], tuple[float, float]]

    def read(self, path: str) -> str | None:
        """A file's text, None where it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """A file's whole number, None where it has none."""
        text = self.read(path) or ""
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        return sorted(p.name for p in (self.root / folder.lstrip("/")).glob(pattern))

    def versions(self, name: str) -> list[str]:
        return [p.version for p in self.packages if p.name == name]


def here() -> View:
    """This machine."""
    return View(
        environ=os.environ,
        root=Path("/"),
        python=platform.python_version(),
        packages=_packages(),
        plugins=frozenset(flags.installed_plugins()),
        user=_user(),
        host=platform.node(),
        address=_address(),
        cores=len(os.sched_getaffinity(0)),
        limits={
            "memlock": _limit(resource.RLIMIT_MEMLOCK),
            "nofile": _limit(resource.RLIMIT_NOFILE),
        },
        run=run,
        resolve=_resolve,
        listen=_listen,
        connect=_connect,
        may_use=lambda path: os.access(path, os.R_OK | os.W_OK),
        room=_room,
        attempt=attempt,
        clocks=lambda: (time.monotonic(), time.time()),
    )


def run(command: Sequence[str], environ: Mapping[str, str], timeout: float) -> Ran:
    """With all that it starts it is killed when its time is up, and not waited for beyond that: a
    process inside a broken driver may not die."""
    # In memory: pipes would be held open by what it started, and the disk may be what is broken.
    with _file_in_memory() as out, _file_in_memory() as err:
        process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ran(status, *texts)


def _file_in_memory():
    return os.fdopen(os.memfd_create("zayajax-doctor"), "w+b")


def attempt(folder: Path) -> dict[str, str | None]:
    """Writes, renames and locks in a folder, and leaves nothing there."""
    found: dict[str, str | None] = {}

    def tried(name, action):
        try:
            action()
            found[name] = None
        except OSError as error:
            found[name] = error.strerror or str(error)

    try:
        place = Path(tempfile.mkdtemp(prefix=".zayajax-doctor-", dir=folder))
    except OSError as error:
        return {"write": error.strerror or str(error)}

    def write():
        with open(place / "file", "wb") as file:
            file.write(b"\0" * 65536)
            os.fsync(file.fileno())

    def rename():
        (place / "unfinished").mkdir()
        os.rename(place / "unfinished", place / "finished")

    def lock():
        with open(place / "file", "ab") as one, open(place / "file", "ab") as two:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            raise OSError(errno.ENOLCK, "two hold one lock")

    try:
        for name, action in (("write", write), ("rename", rename), ("lock", lock)):
            tried(name, action)
    finally:
        shutil.rmtree(place, ignore_errors=True)  # what could be made can be left on a full disk
    return found


def _packages() -> list[Package]:
    found, seen = [], set()
    for d in importlib.metadata.distributions():
        name, folder = d.metadata["Name"], os.path.realpath(d.locate_file(""))
        if name is None:  # what a broken installation left
            continue
        package = Package(re.sub(r"[-_.]+", "-", name).lower(), d.version, folder)
        if package not in seen:  # sys.path can name a folder twice
            seen.add(package)
            found.append(package)
    return found


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user need not have a name
        return str(os.getuid())


def _address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))  # sends nothing, only asks for the route (RFC 5737)
            return s.getsockname()[0]
        except OSError:
            return None


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _resolve(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # of labels that are empty or too long
        raise OSError(errno.EINVAL, "is no name of a host") from error
    return list(dict.fromkeys(address[0] for *_, address in found))


def _listen(address: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    socket.create_server((address, port), family=family).close()


def _connect(address: str, port: int, timeout: float) -> None:
    socket.create_connection((address, port), timeout).close()


def _room(folder: Path) -> Room:
    s = os.statvfs(folder)
    return Room(s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize, s.f_favail if s.f_files else None)
