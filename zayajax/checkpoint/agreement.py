"""What the processes of a run tell each other about a checkpoint.

Through the coordination service, as text: not one device takes part, so that threads behind the
steps may use it. Each wait is bounded, and an error of one process is an error of all.
"""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

PATIENCE = 300.0  # seconds
_made = itertools.count()  # the same in all processes, which do the same


class Failed(Exception):
    """Why an agreement was not reached, in words: the same in all processes."""


class Lost(Failed):
    """A process has ended, or says nothing: the fault is not in what was to be agreed on."""


class Agreement:
    """Rounds in which every process says something and the first one decides.

    All processes take part in the same rounds, in the same order, one at a time.

    Args:
      patience: seconds that a process waits for the others in one round.
    """

    def __init__(self, patience: float):
        self.patience = patience
        self.process, self.processes = jax.process_index(), jax.process_count()
        self.lead = self.process == 0
        self._folder = f"zayajax/checkpoint/{next(_made)}"
        self._rounds = 0

    def agree(self, said: Any, decide: Callable[[list], Any]) -> Any:
        """What `decide` makes, in the first process, of what all said, in their order.

        What is said and decided are plain JSON values. Raises `Failed` in all processes where
        `decide` raises `Failed` or an OSError; `Lost` where a process says nothing for too long.
        """
        if self.processes == 1:
            try:
                return decide([said])
            except OSError as error:
                raise Failed(error.strerror or str(error)) from error
        self._rounds += 1
        round_ = f"{self._folder}/{self._rounds}"
        client = ocp.multihost.get_jax_distributed_client()
        client.key_value_set(f"{round_}/said/{self.process}", json.dumps([said]))
        if self.lead:
            client.key_value_set(f"{round_}/decided", json.dumps(self._decided(round_, decide)))
            # All have read the round before, else they would not have spoken in this one.
            client.key_value_delete(f"{self._folder}/{self._rounds - 1}/")
        # The first process may have waited for the last of the others nearly as long.
        answer = self._heard(f"{round_}/decided", 2 * self.patience)
        if answer is None:
            raise Lost(f"process 0 did not answer within {2 * self.patience:.0f} s")
        if "lost" in answer:
            raise Lost(answer["lost"])
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer["decided"]

    def _decided(self, round_: str, decide: Callable[[list], Any]) -> dict[str, Any]:
        until = time.monotonic() + self.patience
        said = [
            self._heard(f"{round_}/said/{p}", until - time.monotonic())
            for p in range(self.processes)
        ]
        if silent := [p for p, words in enumerate(said) if words is None]:
            some = ", ".join(map(str, silent[:8])) + ", ..." * (len(silent) > 8)
            return {"lost": f"not heard of within {self.patience:.0f} s: process {some}"}
        try:
            return {"decided": decide([words[0] for words in said])}
        except Failed as error:
            return {"failed": str(error)}
        except OSError as error:
            return {"failed": error.strerror or str(error)}

    def _heard(self, key: str, seconds: float) -> Any:
        client = ocp.multihost.get_jax_distributed_client()
        try:
            return json.loads(client.blocking_key_value_get(key, max(1, round(1000 * seconds))))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise Lost(f"the processes lost each other ({str(error).splitlines()[0]})") from error
