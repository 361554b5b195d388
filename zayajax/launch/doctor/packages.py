"""JAX, jaxlib and the plugins: whether what is installed fits together."""

import re
from collections.abc import Iterator

from zayajax.launch.doctor.view import OK, UNSEEN, WARNING, WRONG, Finding, View
from zayajax.launch.flags import CUDA, ROCM

AREA = "packages"
SUPPORTED = (0, 10), (0, 12)  # pyproject.toml
EXTRA = {ROCM: "rocm", CUDA: "cuda"}
# docs.jax.dev, installation: the NVIDIA driver that each plugin's CUDA needs at least.
DRIVERS = {"12": 525, "13": 580}


def check(view: View, gpu: str | None) -> Iterator[Finding]:
    """Of Python, and of ROCm or the NVIDIA driver where a plugin needs them.

    Args:
      gpu: the platform of the GPUs that are in this machine; None: there are none.
    """
    jax, jaxlib = view.versions("jax"), view.versions("jaxlib")
    install = _install(gpu)
    if not jax or not jaxlib:
        missing = " and ".join(n for n, v in (("jax", jax), ("jaxlib", jaxlib)) if not v)
        yield Finding(AREA, "jax", WRONG, f"{missing}: not installed", install)
        return
    yield from _twice(view)
    yield _jax(view, jax[0], jaxlib[0], install)
    plugins = [p for p in view.packages if re.fullmatch(r"jax-(rocm|cuda)\d+-plugin", p.name)]
    yield from _plugins(view, plugins, jaxlib[0], gpu)
    if gpu == ROCM and any("rocm" in p.name for p in plugins):
        yield _rocm(view, next(p.name for p in plugins if "rocm" in p.name))
    if gpu == CUDA and any("cuda" in p.name for p in plugins):
        yield from _cuda(view, next(p.name for p in plugins if "cuda" in p.name))


def _install(gpu: str | None) -> str:
    return f"pip install -e '.[{EXTRA[gpu]}]'" if gpu else "pip install -e ."


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _twice(view: View) -> Iterator[Finding]:
    for name in ("jax", "jaxlib"):
        copies = [p for p in view.packages if p.name == name]
        if len(copies) > 1:
            where = ", ".join(f"{p.version} in {p.folder}" for p in copies)
            yield Finding(
                AREA,
                f"one {name}",
                WRONG,
                f"{len(copies)} are installed ({where}); the first hides the others",
                f"pip uninstall -y {name} && pip install {name}=={copies[0].version}",
            )


def _jax(view: View, jax: str, jaxlib: str, install: str) -> Finding:
    low, high = SUPPORTED
    found = f"jax {jax}, jaxlib {jaxlib}, Python {view.python}"
    if not low <= _release(jax)[:2] <= high:
        found += f"; zayajax runs on jax {'.'.join(map(str, low))} to {'.'.join(map(str, high))}"
        return Finding(AREA, "jax", WRONG, found, install)
    # jax's own requirement: jaxlib no newer than jax, and of the same minor release.
    if _release(jaxlib) > _release(jax) or _release(jaxlib)[:2] != _release(jax)[:2]:
        found += ": these two do not go together"
        return Finding(AREA, "jax", WRONG, found, f"pip install jaxlib=={jax}")
    return Finding(AREA, "jax", OK, found)


def _plugins(view: View, plugins, jaxlib: str, gpu: str | None) -> Iterator[Finding]:
    if not plugins:
        if gpu is None:
            yield Finding(AREA, "plugin", UNSEEN, "no GPU here, and no plugin of JAX for one")
        elif view.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
            found = f"none for {gpu.upper()}, and JAX_PLATFORMS asks for the CPU"
            yield Finding(AREA, "plugin", UNSEEN, found)
        else:
            found = f"there are {gpu.upper()} GPUs, and JAX has no plugin for them"
            yield Finding(AREA, "plugin", WRONG, found, _install(gpu))
        return
    names = list(dict.fromkeys(p.name for p in plugins))
    if len(names) > 1:
        keep = next((n for n in reversed(names) if gpu and gpu in n), names[-1])
        others = [
            name
            for drop in names
            if drop != keep
            for name in (drop, drop.replace("plugin", "pjrt"))
            if view.versions(name)
        ]
        yield Finding(
            AREA,
            "one plugin",
            WRONG,
            f"{' and '.join(names)} are all installed; JAX starts each of them",
            f"pip uninstall -y {' '.join(others)}",
        )
    elif gpu and gpu not in names[0]:
        found = f"{names[0]} is installed, and the GPUs are {gpu.upper()}'s"
        drop = f"{names[0]} {names[0].replace('plugin', 'pjrt')}"
        mend = f"pip uninstall -y {drop} && {_install(gpu)}"
        yield Finding(AREA, "one plugin", WRONG, found, mend)
    for name in names:
        version, pjrt = view.versions(name)[0], name.replace("plugin", "pjrt")
        partner = next(iter(view.versions(pjrt)), None)
        found = f"{name} {version}, {pjrt} {partner or 'not installed'}, jaxlib {jaxlib}"
        together = partner is not None and _release(version) == _release(partner)
        if not together or _release(version)[:3] != _release(jaxlib)[:3]:
            # Of CUDA's, JAX says so and goes on without it; of ROCm's it checks nothing (jaxlib's
            # plugin_support.py), and what follows are crashes.
            mend = f"pip install {name}=={jaxlib} {pjrt}=={jaxlib}"
            if "rocm" in name:  # not released for each of jax's: the extra names those that are
                mend = _install(ROCM)
            yield Finding(AREA, name, WRONG, f"{found}: have to be one release", mend)
        else:
            yield Finding(AREA, name, OK, found)


def _rocm(view: View, plugin: str) -> Finding:
    """The plugin brings no ROCm (rocm.docs.amd.com, Install JAX): that is the system's, or pip's
    `rocm[libraries]`."""
    wanted = re.search(r"rocm(\d+)", plugin)[1]
    folder = view.environ.get("ROCM_PATH", "/opt/rocm")
    by_pip = next(iter(view.versions("rocm-sdk-core")), None)
    version = view.read(f"{folder}/.info/version") or by_pip
    if version is None:
        found = f"no ROCm in {folder} nor from pip, and {plugin} brings none"
        return Finding(AREA, "ROCm", WRONG, found, "sudo amdgpu-install --usecase=rocm")
    if version.split(".")[0] != wanted:
        found = f"ROCm {version}, and {plugin} is for ROCm {wanted}"
        mend = f"export ROCM_PATH=/opt/rocm-{wanted}  # where ROCm {wanted} is"
        return Finding(AREA, "ROCm", WRONG, found, mend)
    return Finding(AREA, "ROCm", OK, f"ROCm {version}")


def _cuda(view: View, plugin: str) -> Iterator[Finding]:
    wanted = re.search(r"cuda(\d+)", plugin)[1]
    text = view.read("proc/driver/nvidia/version") or ""
    driver = re.search(r"Kernel Module.*?\s(\d+)\.(\d[\d.]*)", text)
    least = DRIVERS.get(wanted)
    if driver is None or least is None:
        yield Finding(AREA, "NVIDIA driver", UNSEEN, "its version cannot be read here")
    elif int(driver[1]) < least:
        found = f"driver {driver[1]}.{driver[2]}, and CUDA {wanted} needs {least}"
        older = [c for c, n in DRIVERS.items() if n <= int(driver[1])]
        drop = f"{plugin} {plugin.replace('plugin', 'pjrt')}"
        mend = f"pip uninstall -y {drop} && pip install 'jax[cuda{older[-1] if older else wanted}]'"
        update = f"sudo apt install nvidia-driver-{least}"
        yield Finding(AREA, "NVIDIA driver", WRONG, found, mend if older else update)
    else:
        yield Finding(AREA, "NVIDIA driver", OK, f"driver {driver[1]}.{driver[2]}")
    # The well-known one: these come before pip's own, of another release.
    own = any(p.name.startswith("nvidia-") for p in view.packages)
    folders = [f for f in view.environ.get("LD_LIBRARY_PATH", "").split(":") if f]
    for folder in folders if own else []:
        kinds = ("libcudnn.so*", "libcublas.so*", "libnccl.so*")
        if libraries := [n for kind in kinds for n in view.names(folder, kind)]:
            found = f"LD_LIBRARY_PATH: {libraries[0]} of {folder} hides the one that pip installed"
            yield Finding(AREA, "CUDA libraries", WARNING, found, "unset LD_LIBRARY_PATH")
            break
