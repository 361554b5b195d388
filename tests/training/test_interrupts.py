"""Real signals to real processes, the main thread in Python, asleep, or inside a long C call."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from zayajax.errors import Exit
from zayajax.training.interrupts import KEYBOARD, Interrupts

# Waits of a test for something that comes at once, on a machine that is busy with other tests.
SOON = 30.0

HEAD = """
import sys, time
from zayajax.training.interrupts import Interrupts, leave
def ready():
    print("ready", flush=True)
def c_call():
    # Seconds inside one call that runs no bytecode; hashlib gives up the GIL, as XLA does.
    import hashlib
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 100_000_000)
def wait(interrupts):
    while not interrupts.asked:
        time.sleep(0.01)
"""


class Script:
    """A Python script that prints "ready" when signals may come."""

    def __init__(self, body: str):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HEAD + body],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n", self.process.communicate()

    def send(self, number: int):
        self.process.send_signal(number)
        self.sent = time.monotonic()

    def ended(self, status: int) -> tuple[str, str]:
        """(stdout, stderr) after the end with this status."""
        try:
            self.process.wait(SOON)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.took = time.monotonic() - self.sent
        out, err = self.process.stdout.read(), self.process.stderr.read()
        assert self.process.returncode == status, (self.process.returncode, err)
        assert "Traceback" not in err
        return out, err


def test_before_the_first_step_it_leaves_at_once_even_inside_c():
    script = Script("with Interrupts(300):\n    ready()\n    c_call()\n")
    time.sleep(0.2)  # into the C call
    script.send(signal.SIGTERM)
    _, err = script.ended(Exit.STOPPED)
    assert err == "SIGTERM: nothing to save, leaving at once\n"
    assert script.took < 10  # the C call takes a minute


def test_after_the_first_step_the_loop_is_asked_and_what_it_prints_is_kept():
    script = Script(
        "with Interrupts(300) as i:\n"
        "    i.first_step()\n    ready()\n    wait(i)\n    print('saved')\n"
        "    i.done()\nsys.exit(i.status)\n"
    )
    script.send(signal.SIGTERM)
    out, err = script.ended(Exit.STOPPED)
    assert out == "saved\n"
    assert err == "SIGTERM: saving after this step, at most 300 s\n"


def test_it_is_noticed_inside_c_and_the_grace_ends_there():
    script = Script("with Interrupts(0.5) as i:\n    i.first_step()\n    ready()\n    c_call()\n")
    time.sleep(0.2)
    script.send(signal.SIGTERM)
    _, err = script.ended(Exit.STOPPED)
    first, second = err.splitlines()
    assert first == "SIGTERM: saving after this step, at most 0.5 s"
    assert second == "still not saved 0.5 s after the signal: leaving"
    assert 0.4 < script.took < 10


def test_a_storm_of_signals_is_one():
    script = Script(
        "with Interrupts(300) as i:\n    i.first_step()\n    ready()\n    wait(i)\n"
        "    time.sleep(0.5)\n    print('saved')\nsys.exit(i.status)\n"
    )
    for _ in range(200):
        script.process.send_signal(signal.SIGTERM)
    script.send(signal.SIGTERM)
    out, err = script.ended(Exit.STOPPED)
    assert (out, err.count("\n")) == ("saved\n", 1)


def test_once_all_is_saved_it_leaves_at_once():
    script = Script(
        "with Interrupts(300) as i:\n    i.first_step()\n    i.done()\n    ready()\n    c_call()\n"
    )
    script.send(signal.SIGTERM)
    assert "nothing to save" in script.ended(Exit.STOPPED)[1]


def test_ctrl_c_saves_and_a_second_one_leaves():
    body = "with Interrupts(300, keyboard=True) as i:\n    i.first_step()\n    ready()\n"
    script = Script(body + "    wait(i)\nsys.exit(i.status)\n")
    script.send(signal.SIGINT)
    assert "SIGINT: saving after this step" in script.ended(KEYBOARD)[1]
    script = Script(body + "    wait(i)\n    print('asked', flush=True)\n    c_call()\n")
    script.send(signal.SIGINT)
    assert script.process.stdout.readline() == "asked\n"
    script.send(signal.SIGINT)
    assert "SIGINT: again, leaving at once" in script.ended(KEYBOARD)[1]


def test_without_keyboard_ctrl_c_stays_pythons():
    script = Script(
        "try:\n    with Interrupts(300) as i:\n        ready()\n        time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('python', i.asked)\n"
    )
    script.send(signal.SIGINT)
    assert script.ended(0)[0] == "python False\n"


def test_who_says_it_may_block():
    """A terminal that no longer takes text does not keep the process beyond its grace."""
    script = Script(
        "with Interrupts(0.2, say=lambda text: time.sleep(600)) as i:\n"
        "    i.first_step()\n    ready()\n    time.sleep(600)\n"
    )
    script.send(signal.SIGTERM)
    script.ended(Exit.STOPPED)


def test_leaving_flushes_and_passes_over_what_others_would_wait_for():
    script = Script(
        "import atexit, threading\n"
        "atexit.register(time.sleep, 600)\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "ready()\nprint('last', end='')\nleave(82, 'a peer is gone')\n"
    )
    script.send(0)
    assert script.ended(82) == ("last", "a peer is gone\n")


def test_handlers_and_the_wakeup_fd_come_back_and_others_still_hear():
    read, write = os.pipe()
    os.set_blocking(write, False)
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    term, wakeup = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(write)
    try:
        with Interrupts(300) as interrupts:
            assert signal.getsignal(signal.SIGTERM) != term
            os.kill(os.getpid(), signal.SIGUSR1)
            assert os.read(read, 1) == bytes([signal.SIGUSR1])
        assert not interrupts.asked and interrupts.status == Exit.DONE
        assert signal.getsignal(signal.SIGTERM) == term and heard == [signal.SIGUSR1]
    finally:
        assert signal.set_wakeup_fd(wakeup) == write
        signal.signal(signal.SIGUSR1, before)
        os.close(read)
        os.close(write)


def test_on_another_thread_it_does_nothing():
    found = []

    def run():
        with Interrupts(300) as interrupts:
            interrupts.first_step()
            found.append((signal.getsignal(signal.SIGTERM), interrupts.asked))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(signal.getsignal(signal.SIGTERM), False)]


@pytest.mark.smoke
def test_a_compilation_by_xla_is_left_too():
    """XLA compiles for seconds inside one call."""
    script = Script(
        "import jax, jax.numpy as jnp\n"
        "def f(x):\n"
        "    for i in range(1500):\n"
        "        x = jnp.sin(jnp.dot(x, x) + i)\n"
        "    return x\n"
        "lowered = jax.jit(f).lower(jnp.ones((64, 64)))\n"
        "with Interrupts(300):\n    ready()\n    lowered.compile()\n    time.sleep(60)\n"
    )
    time.sleep(0.3)
    script.send(signal.SIGTERM)
    assert "nothing to save" in script.ended(Exit.STOPPED)[1]
    assert script.took < 15
