"""SIGKILL of a random process at a random moment, again and again: nobody can tell afterwards."""

import os
import random
import signal
import time

import processes
import pytest

pytestmark = pytest.mark.faults

# One node of four GPUs, two or four processes: the mesh is the same for both.
GPUS, STEPS = 4, 48
SETTINGS = dict(
    mesh__gpus=GPUS,
    train__steps=STEPS,
    optim__horizon=STEPS,
    train__eval_every=12,
    train__eval_batches=2,
    train__sample_tokens=0,
    checkpoint__every=8,
    checkpoint__minutes=0.03,  # temporary ones between, too
)
KILLS = {2: 32, 4: 20}
A_RUN = 4  # kills


@pytest.fixture(scope="module", params=KILLS)
def whole(request, tmp_path_factory):
    """(processes, config, arrays, numbers) of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    config = processes.write_config(folder, **SETTINGS)
    with processes.launch(config, folder / "run", request.param, GPUS) as run:
        assert run.wait() == 0, run.text()[-3000:]
    return request.param, config, processes.arrays(run.run_dir), processes.numbers(run.run_dir)


class Killer:
    """Kills processes of one run, at moments drawn by `rng`."""

    def __init__(self, rng: random.Random, run: processes.Launched, count: int):
        self.rng, self.run, self.count = rng, run, count
        self.dead: set[int] = set()
        self.kills = []  # (moment, complete checkpoints then, resumptions said before)

    def attempt(self) -> dict[int, int] | None:
        """The processes of an attempt that nobody has touched yet."""

        def all_new():
            workers = self.run.workers()
            new = len(workers) == self.count and not self.dead & set(workers.values())
            return workers if new else None

        return self.run.until(all_new)

    def moment(self, workers) -> str | None:
        """Waits for it; None where the run is over first."""
        moment = self.rng.choice(["start", "steps", "steps", "saving", "saving", "saved"])
        start = processes.last_step(self.run.run_dir)
        if moment == "start":
            until = time.monotonic() + self.rng.uniform(0, 12)
            happened = self.run.until(lambda: time.monotonic() > until)
        elif moment == "steps":
            goal = self.rng.randint(1, 16)
            # Metrics are cut back when an attempt resumes: the file shrinks, and grows again.
            happened = self.run.until(
                lambda: start != (now := processes.last_step(self.run.run_dir)) and now >= goal
            )
        else:
            happened = self.run.until(lambda: processes.saving(self.run.run_dir))
            if happened and moment == "saved":
                happened = self.run.until(lambda: not processes.saving(self.run.run_dir))
        time.sleep(self.rng.uniform(0, 0.3))
        return moment if happened else None

    def kill(self) -> bool:
        workers = self.attempt()
        moment = workers and self.moment(workers)
        if not moment:
            return False
        complete = processes.complete(self.run.run_dir)
        said = len(processes.resumed_at(self.run.text()))
        victim = workers[self.rng.randrange(self.count)]
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:  # ended by itself
            return False
        self.dead |= set(workers.values())
        self.kills.append((moment, complete, said))
        return True


def test_every_kill_resumes_to_the_same_bytes(whole, tmp_path, outcome):
    count, config, arrays, numbers = whole
    rng, kills, moments = random.Random(count), 0, {}
    while kills < KILLS[count]:
        run_dir = tmp_path / f"run{kills}"
        with processes.launch(
            config, run_dir, count, GPUS, launching=("--restarts", 2 * A_RUN)
        ) as run:
            killer = Killer(rng, run, count)
            while len(killer.kills) < A_RUN and killer.kill():
                pass
            assert run.wait() == 0, run.text()[-3000:]
        resumed = processes.resumed_at(run.text())
        for moment, complete, said in killer.kills:
            moments[moment] = moments.get(moment, 0) + 1
            newest = complete[-1] if complete else 0
            for step in resumed[said:]:
                assert step >= newest, (moment, complete, resumed)
        assert processes.arrays(run_dir) == arrays, killer.kills
        assert processes.numbers(run_dir) == numbers, killer.kills
        kills += len(killer.kills)
        assert killer.kills, "the run was over before it could be killed"
    when = ", ".join(f"{moment}: {n}" for moment, n in sorted(moments.items()))
    outcome(
        f"SIGKILL of one of {count} processes ({when})",
        "up again from the last complete checkpoint; parameters, moments and metrics bit for bit",
        kills,
    )
