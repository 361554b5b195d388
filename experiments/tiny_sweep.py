"""How configs/tiny.toml was chosen: the same million bytes under other settings, one table.

    python experiments/tiny_sweep.py [--out runs/sweep] [--gpus 1]

Half a minute a row on a GPU; on two CPU cores, four. Results: experiments/README.md.
"""

import argparse
from pathlib import Path

import numpy as np

import zayajax
from zayajax.training.metrics import read_metrics

TINY = Path(__file__).parent.parent / "configs" / "tiny.toml"
FIXED = {"train.sample_tokens": "0", "train.eval_every": "1000000", "checkpoint.every": "1000000"}
GRID = [
    {},
    {"optim.learning_rate": "1e-3"},
    {"optim.learning_rate": "4e-3"},
    {"optim.learning_rate": "8e-3"},
    {"optim.balance_rate": "3e-3"},
    {"optim.balance_rate": "1e-2"},
    {"optim.warmup": "20"},
    {"optim.decay": "0.5"},
    {"optim.schedule": "cosine"},
    {"model.head_dim": "32"},
    {"model.layers": "4"},
    {"model.expert_hidden": "128"},
    {"train.batch": "16", "train.steps": "500", "optim.horizon": "500"},
    {"train.sequence": "256", "train.steps": "500", "optim.horizon": "500"},
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--gpus", default="8", help="mesh.gpus; 1 on a single GPU")
    args = parser.parse_args()
    print("| changed | held-out loss | max load, last 100 steps | router entropy |")
    print("|---|---|---|---|")
    for i, changed in enumerate(GRID):
        config = zayajax.load_config(TINY, {"mesh.gpus": args.gpus} | FIXED | changed)
        result = zayajax.train(config, args.out / f"{i:02}", fresh=True, show=False)
        lines = read_metrics(result.run_dir / "metrics.jsonl")
        last = [line for line in lines if line["kind"] == "train"][-100:]
        load = np.mean([line["max_expert_load"] for line in last])
        entropy = np.mean([line["router_entropy"] for line in last])
        name = ", ".join(f"`{k} = {v}`" for k, v in changed.items()) or "nothing"
        print(f"| {name} | {result.held_out_loss:.3f} | {load:.2f} | {entropy:.3f} |", flush=True)


if __name__ == "__main__":
    main()
