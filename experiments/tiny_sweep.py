"""How configs/tiny.toml was chosen: one million bytes under many settings, a row of a table each.

    python experiments/tiny_sweep.py [first | muon] [--out runs/sweep] [--gpus 1]

Twenty seconds a row on a GPU; on two CPU cores, four minutes. Results: experiments/README.md.
"""

import argparse
from pathlib import Path

import numpy as np

import zayajax
from zayajax.training.metrics import read_metrics

TINY = Path(__file__).parent.parent / "configs" / "tiny.toml"
# The first guess, from which each row changes what it names.
START = {
    "optim.matrices": "adamw",
    "model.head_dim": "32",
    "optim.learning_rate": "4e-3",
    "optim.warmup": "20",
    "optim.balance_rate": "3e-3",
    "optim.horizon": "500",
    "train.steps": "500",
    "train.sequence": "256",
    "train.eval_batches": "16",
    "train.eval_every": "500",
    "train.sample_tokens": "0",
    "checkpoint.every": "500",
}
LOW = {"optim.learning_rate": "2e-3"}
GRID = [
    {},
    {"optim.balance_rate": "1e-3"},
    {"optim.balance_rate": "1e-2"},
    {"optim.balance_rate": "3e-2"},
    {"optim.learning_rate": "1e-3"},
    {"optim.learning_rate": "1.4e-3"},
    LOW,
    {"optim.learning_rate": "6e-3"},
    {"optim.learning_rate": "1e-2"},
    {"optim.weight_decay": "0.0"},
    {"optim.schedule": "cosine"},
    {"model.layers": "4"},
    {"model.expert_hidden": "512"},
    LOW | {"optim.balance_rate": "1e-3"},
    LOW | {"optim.warmup": "100"},
    LOW | {"optim.decay": "0.5"},
    LOW | {"optim.beta2": "0.99"},
    LOW | {"model.layers": "4"},
    LOW | {"model.expert_hidden": "128"},
    LOW | {"model.heads": "2", "model.kv_heads": "1", "model.head_dim": "64"},
    LOW | {"train.sequence": "128", "train.batch": "16"},
    LOW | {"train.sequence": "128", "train.steps": "1000", "optim.horizon": "1000"},
]


def of_batch(batch: int, sequence: int, warmup: int) -> dict[str, str]:
    """The same million bytes in batches of another shape."""
    steps = str(1_024_000 // (batch * sequence))
    keys = "train.steps", "optim.horizon", "train.eval_every", "checkpoint.every"
    shape = {"train.batch": str(batch), "train.sequence": str(sequence)}
    return shape | dict.fromkeys(keys, steps) | {"optim.warmup": str(warmup)}


# From configs/tiny.toml as it is.
MUON = [
    {"optim.matrices": "adamw"},
    {"optim.learning_rate": "1e-3"},
    LOW,
    {"optim.learning_rate": "4e-3"},
    of_batch(16, 128, 50),
    of_batch(16, 128, 50) | {"optim.learning_rate": "4e-3"},
    of_batch(8, 256, 50) | {"optim.learning_rate": "3e-3"},
    of_batch(32, 128, 25) | {"optim.learning_rate": "4e-3"},
    {"optim.balance_rate": "1e-3"},
    {"optim.balance_rate": "3e-3"},
]
LAST = {"train.eval_every": "1000", "train.sample_tokens": "0", "checkpoint.every": "1000"}
GRIDS = {"first": (START, GRID), "muon": (LAST, MUON)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("grid", choices=GRIDS, nargs="?", default="first")
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--gpus", default="8", help="mesh.gpus; 1 on a single GPU")
    args = parser.parse_args()
    start, grid = GRIDS[args.grid]
    print("| changed | held-out loss | max load, last 100 steps | router entropy |")
    print("|---|---|---|---|")
    for i, changed in enumerate(grid):
        config = zayajax.load_config(TINY, {"mesh.gpus": args.gpus} | start | changed)
        result = zayajax.train(config, args.out / f"{i:02}", fresh=True, show=False)
        lines = read_metrics(result.run_dir / "metrics.jsonl")
        last = [line for line in lines if line["kind"] == "train"][-100:]
        load = np.mean([line["max_expert_load"] for line in last])
        entropy = np.mean([line["router_entropy"] for line in last])
        name = ", ".join(f"`{k} = {v}`" for k, v in changed.items()) or "(nothing)"
        print(f"| {name} | {result.held_out_loss:.3f} | {load:.2f} | {entropy:.3f} |", flush=True)


if __name__ == "__main__":
    main()
