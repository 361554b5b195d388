"""JAX itself: flags and platforms, and whether it starts, sees the devices, and computes right.

It starts in a process of its own, with a limit: XLA ends the process at a flag that it does not
know, and a broken driver can keep it for ever.
"""

import difflib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from zayajax.errors import UserError
from zayajax.launch import flags
from zayajax.launch.doctor import gpus
from zayajax.launch.doctor.view import OK, UNSEEN, WARNING, WRONG, Finding, Ran, View
from zayajax.launch.flags import CPU, CUDA, PLATFORMS, ROCM
from zayajax.tables import duration

AREA = "JAX"
LIMIT = 60.0  # seconds, an assumption; two busy cores took 3
# Small whole numbers: 256 products of at most 3 * 3 are exact in TF32, and in bfloat16 with float32
# sums, so that anything but equality is wrong.
PROGRAM = """
import json, time
began = time.monotonic()
def say(**what):
    print(json.dumps(what | {"seconds": time.monotonic() - began}), flush=True)
import jax
say(stage="import", jax=jax.__version__)
devices = jax.local_devices()
kinds = sorted({d.device_kind for d in devices})
say(stage="devices", platform=devices[0].platform, count=len(devices), kinds=kinds)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(devices), ("device",))
split, whole = NamedSharding(mesh, P("device")), NamedSharding(mesh, P())
a, b = np.random.default_rng(0).integers(0, 4, (2, len(devices), 256, 256)).astype(np.float32)
placed = [jax.device_put(x, split) for x in (a, b)]
product = jax.jit(lambda a, b: a @ b, out_shardings=split)(*placed)
wrong = [s.device.id for s in product.addressable_shards
         if not np.array_equal(np.asarray(s.data), (a @ b)[s.index])]
say(stage="product", wrong=wrong)
total = jax.jit(lambda a: a.sum(0), out_shardings=whole)(placed[0])
wrong = [s.device.id for s in total.addressable_shards
         if not np.array_equal(np.asarray(s.data), a.sum(0))]
say(stage="sum", wrong=wrong)
"""
STAGES = {
    "import": "import jax",
    "devices": "find the devices",
    "product": "compute a product on each device",
    "sum": "add up over the devices",
}


def check(view: View, gpu: str | None) -> Iterator[Finding]:
    problem = _platforms(view)
    if problem is not None:
        yield problem
        return
    try:
        platform = flags.platform(view.environ, plugins=view.plugins, root=view.root)
    except UserError as error:
        yield Finding(AREA, "JAX_PLATFORMS", WRONG, str(error), "unset JAX_PLATFORMS")
        return
    environ = dict(view.environ)
    try:
        kind = flags.architecture(view.root)
        prepared = flags.prepare(environ, platform=platform, kind=kind)
    except UserError as error:
        found, mend = str(error).partition(";")[0], "unset XLA_FLAGS"
        # Masks that contradict each other are reported with the GPUs.
        if found.startswith("XLA_FLAGS"):
            yield Finding(AREA, "XLA_FLAGS", WRONG, found, mend)
        yield Finding(AREA, "start", UNSEEN, "first mend what is wrong above")
        return
    # A run may be at work here: take none of its GPUs' memory before it is needed.
    environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # -P: no file here that is called as a library is in its way, as with the command itself.
    ran = view.run([sys.executable, "-P", "-c", PROGRAM], environ, LIMIT)
    said = _said(ran.out)
    yield from _flags(view, prepared, ran)
    yield from _progress(view, ran, said, gpu, platform)


def _platforms(view: View) -> Finding | None:
    asked = [w.strip() for w in view.environ.get("JAX_PLATFORMS", "").split(",") if w.strip()]
    for name in asked:
        if name not in (*PLATFORMS, "gpu"):
            near = difflib.get_close_matches(name, PLATFORMS, 1)
            mend = f"export JAX_PLATFORMS={near[0]}" if near else "unset JAX_PLATFORMS"
            found = f"JAX_PLATFORMS={','.join(asked)}: zayajax runs on {', '.join(PLATFORMS)}"
            return Finding(AREA, "JAX_PLATFORMS", WRONG, found, mend)
        kinds = (ROCM, CUDA) if name == "gpu" else (name,)
        if name != CPU and not any(kind in p for kind in kinds for p in view.plugins):
            found = f"JAX_PLATFORMS={','.join(asked)}, and JAX has no plugin for {name}"
            mend = f"pip install -e '.[{name}]'" if name != "gpu" else "unset JAX_PLATFORMS"
            return Finding(AREA, "JAX_PLATFORMS", WRONG, found, mend)
    return None


def _said(text: str) -> dict[str, dict]:
    found = {}
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:  # a library's own words
            continue
        if isinstance(said, dict) and said.get("stage") in STAGES:
            found[said["stage"]] = said
    return found


def _flags(view: View, prepared: flags.Prepared, ran: Ran) -> Iterator[Finding]:
    name, theirs = "XLA_FLAGS", view.environ.get("XLA_FLAGS", "")
    if unknown := re.search(r"Unknown flags? in XLA_FLAGS: (.*)", ran.err):
        words = unknown[1].split()
        given = [w.partition("=")[0].lstrip("-") for w in words]
        known = known_flags(view)
        near = [next(iter(difflib.get_close_matches(g, known, 1)), None) for g in given]
        found = f"XLA does not know --{given[0]}"
        if near[0]:
            found += f"; the nearest that it knows is --{near[0]}"
        if len(given) > 1:
            found += f"; nor {', '.join(f'--{g}' for g in given[1:])}"
        yield Finding(AREA, name, WRONG, found, _mended(theirs, words, near))
        return
    if bad := re.search(r"Couldn't interpret value (.*) for flag (\w+)", ran.err):
        found = f"{bad[1]} is no value for --{bad[2]}"
        yield Finding(AREA, name, WRONG, found, _mended(theirs, [f"--{bad[2]}={bad[1]}"], [None]))
        return
    instead = [row["name"] for row in prepared.rows if row["whose"] == flags.INSTEAD]
    if instead:
        found = f"yours instead of zayajax's: {', '.join(instead)}"
        yield Finding(AREA, name, WARNING, found, f"unset {' '.join(_variables(instead))}")
    else:
        yours = [row["name"] for row in prepared.rows if row["whose"] == flags.YOURS]
        found = f"zayajax's own, and {', '.join(yours)}" if yours else "zayajax's own alone"
        yield Finding(AREA, name, OK, found)


def _variables(names: list[str]) -> list[str]:
    return list(dict.fromkeys("XLA_FLAGS" if n.startswith("--") else n for n in names))


def _mended(theirs: str, words: list[str], near: list[str | None]) -> str:
    """The user's XLA_FLAGS with what is wrong put right, or left out."""
    if not theirs.startswith("-"):
        return "unset XLA_FLAGS"  # a file's name
    for word, better in zip(words, near, strict=True):
        _, equals, value = word.partition("=")
        theirs = theirs.replace(word, f"--{better}{equals}{value}" if better else "", 1)
    theirs = " ".join(theirs.split())
    return f"export XLA_FLAGS={shlex.quote(theirs)}" if theirs else "unset XLA_FLAGS"


def known_flags(view: View) -> list[str]:
    """Names in jaxlib's library that are flags of XLA by their form."""
    folder = next((p.folder for p in view.packages if p.name == "jaxlib"), None)
    found: set[bytes] = set()
    for library in Path(folder or "/nonexistent").glob("jaxlib/libjax_common.so"):
        found |= set(re.findall(rb"\0(xla_[a-z0-9_]+)(?=\0)", library.read_bytes()))
    return sorted(name.decode() for name in found)


def _progress(view: View, ran: Ran, said, gpu, platform) -> Iterator[Finding]:
    reached = [s for s in STAGES if s in said]
    devices = said.get("devices")
    if devices is not None:
        yield from _devices(view, devices, gpu, platform)
    for stage, what in (("product", "product"), ("sum", "sum over devices")):
        if stage not in said:
            break
        if stage == "sum" and devices["count"] == 1:
            yield Finding(AREA, what, UNSEEN, "there is one device")
            continue
        if wrong := said[stage]["wrong"]:
            found = f"wrong on device {', '.join(map(str, wrong))}"
            mend = _check_hardware(platform)
            yield Finding(AREA, what, WRONG, found, mend)
        else:
            found = (
                f"exact on {devices['count']}, {duration(said[stage]['seconds'])} after the start"
            )
            yield Finding(AREA, what, OK, found)
    if len(reached) == len(STAGES):
        stage, failed = "sum", "did all this, and then did not end"
        if ran.status == 0:
            return
    else:
        stage = next(s for s in STAGES if s not in said)
        failed = f"did not {STAGES[stage]}"
    if ran.status is None:
        found = f"{failed} within {LIMIT:g} s, and was ended"
    else:
        how = f"signal {-ran.status}" if ran.status < 0 else f"status {ran.status}"
        found = f"{failed} as it should ({how}): {_last(ran.err)}"
    yield Finding(AREA, "start", WRONG, found, _closer_look(stage, platform))


def _last(text: str) -> str:
    """What a failure said last that is to be read: an exception or a fatal line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = [line for line in lines if re.match(r"F\d{4} |[\w.]*(Error|Exception)\b", line)]
    return (fatal or lines or ["it said nothing"])[-1][:200]


def _closer_look(stage: str, platform: str) -> str:
    debug = {ROCM: "AMD_LOG_LEVEL=3 NCCL_DEBUG=INFO ", CUDA: "NCCL_DEBUG=INFO "}.get(platform, "")
    if stage == "import":
        return 'python -c "import jax"'
    if stage == "sum" and platform != CPU:
        return f"{debug}zayajax bench collectives"
    return f'{debug}python -c "import jax; print(jax.devices())"'


def _check_hardware(platform: str) -> str:
    return {ROCM: "sudo rvs -c gst_single.conf", CUDA: "dcgmi diag -r 3"}.get(
        platform, "memtester 1G 1"
    )


def _devices(view: View, devices, gpu, platform) -> Iterator[Finding]:
    got = f"{devices['count']} x {', '.join(devices['kinds'])}"
    asked = view.environ.get("JAX_PLATFORMS", "")
    if devices["platform"] == CPU and gpu is not None:
        if asked.startswith(CPU):
            found = f"{got}, by JAX_PLATFORMS={asked}, and there are {gpu.upper()} GPUs"
            yield Finding(AREA, "devices", WARNING, found, "unset JAX_PLATFORMS")
            return
        found = f"JAX computes on the CPU, and there are {gpu.upper()} GPUs"
        masks = gpus.masks(view, gpu)
        mend = f'JAX_PLATFORMS={gpu} python -c "import jax; jax.devices()"  # says why'
        if not any(gpu in plugin for plugin in view.plugins):
            mend = f"pip install -e '.[{gpu}]'"
        elif masks.verdict == WRONG:
            mend = masks.mend
        yield Finding(AREA, "devices", WRONG, found, mend)
        return
    count = gpus.expected(view, platform) if platform != CPU else 0
    if count and devices["count"] < count:
        found = f"{got}, and the driver shows {count}"
        hidden = gpus.masked(view.environ, platform)
        mend = f"unset {' '.join(hidden)}" if hidden else _check_driver(platform)
        yield Finding(AREA, "devices", WRONG, found, mend)
        return
    yield Finding(AREA, "devices", OK, f"{got}, {duration(devices['seconds'])} after the start")


def _check_driver(platform: str) -> str:
    return "rocminfo | grep gfx" if platform == ROCM else "nvidia-smi -L"
