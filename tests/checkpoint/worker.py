"""One of several real processes: does what the words on its command line say, one after another.

save:FOLDER:SHAPE:STEP      a state of seed STEP       restore:FOLDER:SHAPE:STEP   and compares
fail:FOLDER:SHAPE:STEP      the last process cannot write
silent:FOLDER:SHAPE:STEP    the last process writes for longer than the others wait
wrong:FOLDER:SHAPE:STEP     restores STEP; the last process reads a newer one wrong
"""

import sys
import time
from pathlib import Path

import jax

address, processes, process, devices, *words = sys.argv[1:]
processes, process = int(processes), int(process)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", int(devices))
jax.distributed.initialize(address, processes, process)

import patterns  # noqa: E402

from zayajax.checkpoint import Checkpoints, files  # noqa: E402
from zayajax.errors import UserError  # noqa: E402

write_arrays, read_arrays = files.write_arrays, files.read_arrays


def cannot(folder, arrays):
    raise OSError(28, "No space left on device")


def takes_long(folder, arrays):
    time.sleep(2.5)  # for weights, and for the rest


def wrong(folder, like):
    """One copy of an array of which each device has one."""
    found = read_arrays(folder, like)
    if "counts" in found and folder.parent.name != "1":
        found["counts"] = found["counts"] + 1
    return found


for word in words:
    what, folder, shape, step = word.split(":")
    step, last = int(step), process == processes - 1
    spoilt = {"fail": cannot, "silent": takes_long}.get(what)
    files.write_arrays = spoilt if spoilt and last else write_arrays
    files.read_arrays = wrong if what == "wrong" and last else read_arrays
    said = []
    with Checkpoints(Path(folder), keep=0, patience=2.0 if what == "silent" else 60.0) as saved:
        if what in ("restore", "wrong"):
            patterns.assert_restores(saved, shape, step, said.append)
        else:
            try:
                patterns.save(saved, shape, step)
            except UserError as error:
                said.append(str(error))
        print(f"{word}: {saved.steps()} {said}", flush=True)
