"""Real processes that join, as tests start them."""

import contextlib
import json
import os
import socket
import subprocess
import sys

PROCESS = """
import json, os, sys
given = json.loads(sys.argv[1])
from zayajax.errors import UserError
from zayajax.launch import distributed as d
try:
    cluster = d.Cluster(given.pop("coordinator"), given.pop("processes"), given.pop("process"),
                        given.pop("hosts", None))
    body = given.pop("body", "")
    d.join(cluster, **given)
    import jax
    exec(body)
    print("joined", jax.process_index(), jax.process_count(), jax.device_count(), flush=True)
except UserError as error:
    print("said", error, flush=True)
    sys.stdout.flush()
    os._exit(2)
sys.stdout.flush()
"""
# The roll call alone, which needs no JAX.
CALL = """
import json, os, sys
given = json.loads(sys.argv[1])
from zayajax.errors import UserError
from zayajax.launch.cluster import Cluster
from zayajax.launch import rollcall
rollcall.LAST_WORD = 1.0  # they wait for process 0's deadline, and it runs on the same host
try:
    cluster = Cluster(given["coordinator"], given["processes"], given["process"])
    host = given.get("host", "here")
    card = {"host": host, "name": host, "same": given.get("facts", {})}
    met = rollcall.roll_call(cluster, card, given["timeout"])
    print("joined", met["hosts"], [card["rank"] for card in met["peers"]])
except UserError as error:
    print("said", error)
    sys.exit(2)
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def started(cards, env=None, code=CALL):
    """Processes of `code`, one for each of `cards`; killed at the end."""
    environ = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | (env or {})
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = []
    try:
        for card in cards:
            command = [sys.executable, "-c", code, json.dumps(card)]
            processes.append(subprocess.Popen(command, env=environ, **pipes))
        yield processes
    finally:
        for p in processes:
            p.kill()
            p.communicate()


def outcomes(processes, timeout=60):
    """[(status, what it printed that is ours, standard error)]"""
    found = []
    for p in processes:
        out, err = p.communicate(timeout=timeout)
        lines = [x for x in out.splitlines() if x.startswith(("said", "joined"))]
        found.append((p.returncode, "\n".join(lines), err))
    return found
