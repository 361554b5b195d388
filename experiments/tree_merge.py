"""Tree attention's two merges, timed: one all-gather, or a maximum and a sum.

    python experiments/tree_merge.py [--json tree_merge.json] [--largest BYTES]

Over all devices there are (eight emulated ones on a CPU, where times mean nothing), by the bytes of
one rank's results. As in decoding, merges stand one behind the other in one program, and each needs
the result of the one before. Sets `zayajax.attention.tree.ONE_MESSAGE_BYTES`.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
from jax.sharding import PartitionSpec as P

from zayajax.attention import tree
from zayajax.layout import GPU, WORLD
from zayajax.mesh import emulate, make_mesh

K = 128  # head width
ROW = 4 * (K + 1)  # bytes of the result of one query head
MERGES = {"gather": tree.by_gather, "sums": tree.by_sums}
RUNS, WARM = 21, 3


def chain(merge, times: int, rows: int):
    """A jitted program of `times` merges, with its inputs on the devices."""
    mesh = make_mesh(1, jax.device_count())

    def run(out, lse):
        rank, R = jax.lax.axis_index(GPU), jax.lax.axis_size(GPU)

        def one(_, carry):
            # Unlike on every rank, or XLA turns a sum of equals into a product.
            out, lse = merge(carry[0] * (1 + 1e-3 * rank), carry[1] + 1e-3 * rank, GPU)
            return jax.lax.pcast((out, lse - jnp.log(R)), GPU, to="varying")

        return jax.lax.fori_loop(0, times, one, (out, lse))

    split = P(None, WORLD)
    run = jax.shard_map(run, mesh=mesh, in_specs=(split, split), out_specs=(split, split))
    key, place = jax.random.key(0), jax.NamedSharding(mesh, split)
    out = jax.random.normal(key, (1, mesh.size * rows, 1, K))
    lse = jax.random.normal(key, (1, mesh.size * rows, 1))
    return jax.jit(run), jax.device_put((out, lse), place)


def microseconds(merge, rows: int) -> tuple[float, list[float], tuple]:
    """Median of one merge, its quartiles, and what came out."""
    # Enough of them that starting the program does not count, few enough that nobody waits.
    times = max(4, min(200, (16 << 20) // (rows * ROW)))
    run, args = chain(merge, times, rows)
    taken = []
    for _ in range(WARM + RUNS):
        start = time.perf_counter()
        found = jax.block_until_ready(run(*args))
        taken.append((time.perf_counter() - start) / times * 1e6)
    low, middle, high = statistics.quantiles(taken[WARM:], n=4)
    return middle, [low, high], found


def agree(a, b):
    error = max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in zip(a, b, strict=True))
    if not error < 1e-3:  # hundreds of merges in a row, each rounded
        raise SystemExit(f"the two merges differ by {error}")


def cost(table, most: int) -> float:
    """Time over the best time, summed over all sizes, if one message is taken up to `most` bytes.

    Noise at one size moves this little; the first size at which the order turns, much.
    """
    names = ("gather_us" if line["bytes"] <= most else "sums_us" for line in table)
    return sum(
        line[name] / min(line["gather_us"], line["sums_us"])
        for name, line in zip(names, table, strict=True)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    parser.add_argument("--largest", type=int, help="bytes; by default 64 MiB, on a CPU 64 KiB")
    args = parser.parse_args()
    emulate(8)
    device = jax.devices()[0]
    largest = args.largest or (64 << 10 if device.platform == "cpu" else 64 << 20)
    machine = {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": device.client.platform_version.splitlines()[0],
    }
    print(", ".join(f"{k}: {v}" for k, v in machine.items()))
    print("\n| bytes of a rank | gather, us | quartiles | sums, us | quartiles |")
    print("|---|---|---|---|---|")
    table = []
    for rows in (2 << i for i in range(20)):
        if rows * ROW > largest * 1.01:
            break
        found = {name: microseconds(merge, rows) for name, merge in MERGES.items()}
        agree(found["gather"][2], found["sums"][2])
        line, cells = {"bytes": rows * ROW}, [str(rows * ROW)]
        for name, (median, quartiles, _) in found.items():
            line |= {f"{name}_us": median, f"{name}_quartiles_us": quartiles}
            cells += [f"{median:.1f}", "-".join(f"{x:.1f}" for x in quartiles)]
        table.append(line)
        print(f"| {' | '.join(cells)} |", flush=True)
    best = jax.device_count() * min(
        [0] + [line["bytes"] for line in table], key=partial(cost, table)
    )
    if device.platform != "cpu":  # where times mean something
        print(f"\nbest choice: one message up to {best} bytes of all ranks together")
    if args.json:
        result = {"machine": machine, "rows": table, "one_message_bytes": best}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
