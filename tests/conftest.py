"""One process stands for eight GPUs. Compiled programs are kept between runs of the suite."""

import importlib.metadata
import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
flags = [
    "--xla_force_host_platform_device_count=8",
    # Eight threads on two busy cores: the default limits, 20 s and 40 s, expect a core for each.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    # Tests compile much and compute little.
    "--xla_backend_optimization_level=0",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones stop at this flag
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(flags)

import jax  # noqa: E402

cache = Path(__file__).resolve().parent.parent / ".cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(cache))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
