"""All time is somewhere, once, whatever kills a run; and a full disk does not stop one."""

import errno
import json
import os
import time

import pytest
from hypothesis import given, settings, strategies as st

from zayajax.errors import UserError
from zayajax.report.goodput import KINDS, add_up, goodput
from zayajax.training.ledger import FILE, PHASES, Ledger, process_start, read


class Clock:
    """Seconds since 1970, moved by hand."""

    def __init__(self, now=1.7e9):
        self.now = now

    def __call__(self):
        return self.now


def start(folder, clock, ago=0.0, **options):
    return Ledger(folder, clock=clock, started=clock.now - ago, **options)


def lines(folder):
    found, damaged = read((folder / FILE).read_bytes())
    assert not damaged
    return found


def spent(folder):
    return {what: s for what, s in goodput(folder).seconds.items() if s}


def near(**seconds):
    return {what: pytest.approx(s, abs=1e-5) for what, s in seconds.items()}


def work(ledger, clock, what, seconds, step=None):
    with ledger.phase(what):
        clock.now += seconds
    if step is not None:
        ledger.finished(step)


def test_an_attempt_by_hand(tmp_path):
    clock = Clock()
    with start(tmp_path, clock, ago=2) as ledger:
        clock.now += 3  # nothing entered yet
        ledger.resumed(0)
        work(ledger, clock, "compile", 5, step=1)
        for step in range(2, 12):
            work(ledger, clock, "data", 0.5)
            work(ledger, clock, "step", 2, step)
            clock.now += 0.25
        with ledger.phase("eval"):
            clock.now += 1
            with ledger.phase("data"):  # the outer one pauses
                clock.now += 4
            clock.now += 1
        work(ledger, clock, "save", 7)
    want = near(startup=5, compile=5, step=20, data=9, other=2.5, eval=2, save=7)
    assert spent(tmp_path) == want
    found = goodput(tmp_path)
    assert found.percent == pytest.approx(100 * 20 / 50.5) and found.attempts == 1
    assert "39.6 %" in found.sentence and "eval" in repr(found) and "<table" in found._repr_html_()
    assert json.loads(json.dumps(found.to_json()))["wall"] == pytest.approx(50.5)


def test_steps_are_written_now_and_then_and_others_at_once(tmp_path):
    clock = Clock()
    ledger = start(tmp_path, clock, every=10)
    before = len(lines(tmp_path))
    for step in range(1, 5):
        work(ledger, clock, "step", 2, step)
    assert len(lines(tmp_path)) == before
    work(ledger, clock, "step", 2, 5)
    (line,) = lines(tmp_path)[before:]
    assert line["what"] == "step" and line["seconds"] == pytest.approx(10) and line["steps"] == 5
    work(ledger, clock, "save", 1)
    assert [x["what"] for x in lines(tmp_path)[before + 1 :]] == ["save"]


def test_what_was_done_again_is_lost(tmp_path):
    """Killed after step 30, of which 10 to 30 took 40 s; restored at 25."""
    clock = Clock()
    ledger = start(tmp_path, clock)
    ledger.resumed(0)
    for step in range(1, 11):
        work(ledger, clock, "step", 1, step)
    work(ledger, clock, "save", 1)
    for step in range(11, 31):
        work(ledger, clock, "step", 2, step)
    work(ledger, clock, "eval", 1)
    clock.now += 100  # dead
    with start(tmp_path, clock, ago=10) as ledger:
        ledger.resumed(25)
        for step in range(26, 31):
            work(ledger, clock, "step", 2, step)
    found = goodput(tmp_path)
    assert spent(tmp_path) == near(
        startup=10, step=10 + 30 + 10, lost=10, save=1, eval=1, restart=90
    )
    assert found.attempts == 2 and found.steps_lost == 5 and found.rollbacks == 0
    assert found.wall == pytest.approx(50 + 2 + 100 + 10)


def test_going_back_within_an_attempt(tmp_path):
    clock = Clock()
    with start(tmp_path, clock) as ledger:
        for step in range(1, 21):
            work(ledger, clock, "step", 1, step)
        ledger.rolled_back(8)
        for step in range(9, 11):
            work(ledger, clock, "step", 1, step)
    found = goodput(tmp_path)
    assert (found.steps_lost, found.rollbacks) == (12, 1)
    assert spent(tmp_path) == near(step=10, lost=12)
    assert "12 steps were lost" in found.sentence and "1 time" in found.sentence


EVENT = st.one_of(
    st.tuples(st.sampled_from(PHASES), st.floats(0, 100), st.integers(0, 3)),
    st.tuples(st.just("nested"), st.floats(0, 100), st.integers(0, 3)),
    st.tuples(st.just("idle"), st.floats(0, 100), st.just(0)),
    st.tuples(st.just("back"), st.just(0.0), st.integers(0, 50)),
    st.tuples(st.just("clock"), st.floats(-50, 0), st.just(0)),
)


@given(
    st.lists(st.tuples(st.lists(EVENT, max_size=12), st.booleans(), st.floats(0, 50))), st.data()
)
@settings(max_examples=100, deadline=None)
def test_whatever_happens_the_kinds_sum_to_the_wall_time(tmp_path_factory, attempts, data):
    folder, clock = tmp_path_factory.mktemp("run"), Clock()
    first, step = None, 0
    for events, killed, ago in attempts:
        ago = min(ago, clock.now - 1.7e9) if first is not None else ago
        ledger = start(folder, clock, ago=ago, every=data.draw(st.sampled_from([0.0, 10.0])))
        first = clock.now - ago if first is None else first
        step = data.draw(st.integers(0, step))
        ledger.resumed(step)
        for what, seconds, n in events:
            if what == "back":
                step = min(step, n)
                ledger.rolled_back(step)
            elif what == "clock":
                clock.now += seconds
            elif what == "nested":
                with ledger.phase("eval"), ledger.phase("data"):
                    clock.now += seconds
            elif what == "idle":
                clock.now += seconds
            else:
                work(ledger, clock, what, seconds)
                for _ in range(n):
                    step += 1
                    ledger.finished(step)
        if not killed:
            ledger.close()
        else:
            with (folder / FILE).open("ab") as file:  # torn as it was written
                file.write(b'{"attempt": 1, "wha'[: data.draw(st.integers(0, 19))])
        clock.now += data.draw(st.floats(0, 30))
    if first is None:
        return
    found = goodput(folder)
    written, _ = read((folder / FILE).read_bytes())
    assert found.damaged == 0 and found.attempts == len(attempts)
    assert set(found.seconds) == set(KINDS) and all(s >= 0 for s in found.seconds.values())
    assert 0 <= found.percent <= 100
    steady = all(kind != "clock" for events, *_ in attempts for kind, *_ in events)
    if steady and overlap_free(written):
        wall = max(x["time"] for x in written) - first
        # Times near 1.7e9 have a resolution of 2.4e-7 s.
        assert found.wall == pytest.approx(wall, abs=1e-4, rel=1e-9)


def overlap_free(written):
    """No attempt says it started before the last line of the one before."""
    starts = {x["attempt"]: x["time"] for x in written if x["what"] == "attempt"}
    ends = {}
    for x in written:
        ends[x["attempt"]] = max(ends.get(x["attempt"], 0), x["time"])
    return all(starts[n] >= ends[n - 1] for n in starts if n > 1)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damage_in_the_middle_is_counted_and_no_time_goes_missing(tmp_path_factory, data):
    folder, clock = tmp_path_factory.mktemp("run"), Clock()
    with start(folder, clock, ago=3, every=0) as ledger:
        for step in range(1, 6):
            work(ledger, clock, "step", 2, step)
            work(ledger, clock, "eval", 1)
    whole = (folder / FILE).read_bytes().splitlines(keepends=True)
    i = data.draw(st.integers(1, len(whole) - 2))
    damage = st.binary(max_size=20).filter(lambda b: b.strip() and b"\n" not in b)
    whole[i] = data.draw(damage) + b"\n"
    (folder / FILE).write_bytes(b"".join(whole))
    found = goodput(folder)
    assert found.damaged == 1 and "1 line " in found.sentence
    assert found.wall == pytest.approx(3 + 15, abs=1e-5)
    with start(folder, clock) as ledger:  # goes on, with the next number
        pass
    assert goodput(folder).attempts == 2


def test_the_last_line_may_be_torn_or_lack_its_end(tmp_path):
    clock = Clock()
    with start(tmp_path, clock, ago=1) as ledger:
        work(ledger, clock, "eval", 1)
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-1])
    assert spent(tmp_path) == near(startup=1, eval=1)
    (tmp_path / FILE).write_bytes(whole[:-20])
    assert spent(tmp_path) == near(startup=1) and goodput(tmp_path).damaged == 0
    start(tmp_path, clock).close()
    assert goodput(tmp_path).damaged == 0 and goodput(tmp_path).attempts == 2


def test_an_exception_leaves_its_phases(tmp_path):
    clock = Clock()
    ledger = start(tmp_path, clock)
    with pytest.raises(KeyError), ledger.phase("eval"), ledger.phase("data"):
        clock.now += 2
        raise KeyError
    clock.now += 5
    ledger.close()
    assert spent(tmp_path) == near(data=2, other=5)
    with pytest.raises(ValueError, match="startup"), ledger.phase("lunch"):
        pass


def test_a_full_disk_is_said_once_and_nothing_is_lost_when_there_is_room_again(
    tmp_path, monkeypatch
):
    clock, said = Clock(), []
    ledger = start(tmp_path, clock, say=said.append)
    lines = ledger._lines
    real = lines._file

    class Full:
        fileno = real.fileno

        def write(self, raw):  # what fits is written
            return real.write(raw[:10])

    lines._file = Full()
    for _ in range(3):
        work(ledger, clock, "eval", 1)
    work(ledger, clock, "step", 4, 1)
    ledger.rolled_back(0)
    assert len(said) == 1 and os.strerror(errno.ENOSPC) in said[0] and FILE in said[0]
    lines._file = real
    work(ledger, clock, "save", 1)
    ledger.close()
    assert spent(tmp_path) == near(eval=3, lost=4, save=1)
    assert goodput(tmp_path).damaged == 0


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / "run").write_text("a file, no folder")
    clock, said = Clock(), []
    with start(tmp_path / "run", clock, say=said.append) as ledger:
        work(ledger, clock, "eval", 1)
        ledger.resumed(3)
    assert len(said) == 1
    with pytest.raises(UserError, match="goodput"):
        goodput(tmp_path / "run")


def test_other_processes_write_nothing(tmp_path):
    with Ledger(tmp_path / "run", enabled=False) as ledger:
        with ledger.phase("step"):
            ledger.finished(1)
        ledger.resumed(1)
        ledger.rolled_back(0)
    assert not (tmp_path / "run").exists()


def test_the_process_started_before_now():
    now = time.time()
    assert now - 86400 < process_start(now) < now
    # Ticks of 10 ms, by two clocks.
    assert process_start(now + 5) == pytest.approx(process_start(now) + 5, abs=1)


def test_nothing_is_no_goodput():
    assert add_up([]).percent == 0 and add_up([]).wall == 0
