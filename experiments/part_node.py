"""What a group of part of a node costs on point-to-point links: 2, 4 or 8 of its eight GPUs.

    python experiments/part_node.py [--tokens 16384] [--json]

The package only offers whole nodes; this script makes its own mesh to show why. Messages are read
from the traced programs at the sizes of ZAYA1-8B, results are checked on small arrays. Modelled
times are bytes over rates, without latency. Times of emulated devices mean nothing and are not
taken; on GPUs, groups that fit are timed as well. What it prints: experiments/README.md.

Shape letters: T tokens of a GPU, D embed, E experts of a GPU, R ranks of a group, C slots a rank
pair. A group has n GPUs.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from zayajax import exchange
from zayajax.config import load
from zayajax.layout import GPU, STORED, Layout
from zayajax.machine import MI300X
from zayajax.mesh import Place, emulate, gather, map_params
from zayajax.model.cca import CCA
from zayajax.model.experts import Experts
from zayajax.planning.audit import OPS
from zayajax.planning.fabric import carried
from zayajax.planning.traced.trace import Collective, collectives
from zayajax.settings import ModelConfig

AXES = ("rest", "part")
PART = ("part",)
NODE = 8
GROUPS = (2, 4, 8)
OPERATIONS = ("exchange", "weight gather", "experts, forward and backward")
# What a link reaches of long messages; behind a switch, each of the seven.
LINK = MI300X.inside.rate

CONFIGS = Path(__file__).parent.parent / "configs"
SMALL = dict(heads=4, kv_heads=2, head_dim=8, experts=16, expert_hidden=8, router_hidden=8)


def mesh_of(n: int, devices=None):
    """A node cut into groups of n; without devices, one to trace with."""
    shape = ((NODE if devices is None else len(devices)) // n, n)
    kinds = (AxisType.Auto,) * 2
    if devices is None:
        return AbstractMesh(shape, AXES, axis_types=kinds)
    return Mesh(np.reshape(devices, shape), AXES, axis_types=kinds)


def mapped(fn, mesh, in_specs):
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=P(AXES)))


def routed(mesh, buckets=exchange.BUCKETS):
    """(x `[8 T, D]`, choice `[8 T]`, gain `[R E]`) -> x times its expert's gain, `[8 T, D]`.

    The least an expert can do: its tokens must reach it and come back. Always the smallest of the
    capacities, which holds any routing that is close to even; what does not fit would come out 0.
    """

    def run(x_TD, choice_T, gain_E):
        rooms = exchange.capacities(x_TD.shape[0], exchange.ranks(PART), buckets)
        plan = exchange.route(choice_T, gain_E.shape[0], PART, rooms)
        x_RCD = exchange.send(x_TD, plan, rooms[0], PART)
        place_RC, sizes_E = exchange.by_expert(plan, rooms[0])
        expert_RC = jnp.searchsorted(jnp.cumsum(sizes_E), place_RC, side="right")
        gain_RC = gain_E.at[expert_RC].get(mode="fill", fill_value=0)
        return exchange.give_back(x_RCD * gain_RC[..., None].astype(x_RCD.dtype), plan, PART)

    return mapped(run, mesh, (P(AXES), P(AXES), P(PART)))


def on_part(weights, *, gathered: bool):
    """Specs and places of weights that the package would store over a node, over a group."""

    def axes(v):
        return [PART if GPU in STORED.get(name, ()) else None for name in v.axes]

    def place(v):
        dims = tuple((d - v.ndim, PART) for d, a in enumerate(axes(v)) if a and gathered)
        return v.replace(Place(gathered=dims, repeated=("rest",)))

    return map_params(lambda v: v.replace(P(*axes(v))), weights), map_params(place, weights)


def gathered_attention(mesh, cfg: ModelConfig, dtype):
    """Attention weights at rest -> whole in `dtype`, once for each device `[8, ...]`."""
    specs, where = on_part(weights_of(CCA, cfg), gathered=True)

    def run(weights):
        return jax.tree.map(lambda x: x[None], gather(weights, where, dtype))

    return mapped(run, mesh, (specs,))


def experts_and_gradients(mesh, cfg: ModelConfig):
    """(experts, x, choice) -> gradients: the whole of what a layer's experts send in a step."""
    specs, where = on_part(weights_of(Experts, cfg), gathered=False)

    def run(weights, x_TD, choice_T):
        used, layout = gather(weights, where, "bfloat16"), Layout(batch=AXES, expert=PART)
        y_TD, back = jax.vjp(lambda w, x: w(x, choice_T, layout)[0], used, x_TD)
        return jax.tree.map(lambda g: g[None], back(y_TD))

    return mapped(run, mesh, (specs, P(AXES), P(AXES)))


def weights_of(module, cfg: ModelConfig):
    return jax.eval_shape(partial(module, cfg), jax.random.key(0))


def cost(found: list[Collective], n: int) -> dict:
    """What one GPU of a group of n sends, and how long that takes: bytes and seconds.

    `message` is the whole array that it scatters or ends up with, its own n-th included.
    """
    # The smallest capacity is the first branch: the one that runs when the routing is near even.
    found = [c for c in found if not any(c.branch)]
    on_link, on_port = (
        sum(carried(m, OPS[c.op], c.bytes, "partial", n) * c.times for c in found)
        for m in (MI300X, MI300X.switched())
    )
    return {
        "n": n,
        "message": sum(c.bytes * c.times for c in found),
        "on_link": on_link,
        "links": n - 1,
        "point_to_point": on_link / LINK,
        "switch": on_port / LINK,
    }


def modelled(cfg: ModelConfig, T: int, groups=GROUPS) -> dict[str, list[dict]]:
    """Rows for each operation, one a group size; `penalty` is the time over the whole node's."""
    shape = jax.ShapeDtypeStruct
    x, choice = shape((NODE * T, cfg.hidden), "bfloat16"), shape((NODE * T,), "int32")
    gain = shape((cfg.experts,), "float32")
    rows = {name: [] for name in OPERATIONS}
    for n in groups:
        mesh = mesh_of(n)
        programs = {
            OPERATIONS[0]: (routed(mesh), x, choice, gain),
            OPERATIONS[1]: (gathered_attention(mesh, cfg, "bfloat16"), weights_of(CCA, cfg)),
            OPERATIONS[2]: (experts_and_gradients(mesh, cfg), weights_of(Experts, cfg), x, choice),
        }
        for name, program in programs.items():
            rows[name].append(cost(collectives(*program), n))
    for of_one in rows.values():
        for row in of_one:
            for fabric in ("point_to_point", "switch"):
                row[f"{fabric}_penalty"] = row[fabric] / of_one[-1][fabric]
    return rows


def degrees(cfg: ModelConfig, T: int, rows: list[dict]) -> list[dict]:
    """The same tokens and experts at each expert degree; times are of all layers of a step."""
    weights = jax.tree.leaves(weights_of(Experts, cfg))
    bytes_all = 2 * sum(w.size for w in weights)  # bfloat16
    return [
        {
            "n": row["n"],
            "experts": cfg.experts // row["n"],
            "weights": bytes_all // row["n"],
            "rows": row["n"] * T // cfg.experts,
            "point_to_point": cfg.layers * row["point_to_point"],
            "switch": cfg.layers * row["switch"],
        }
        for row in rows
    ]


def even_choice(devices: int, T: int, experts: int, seed: int = 0):
    """Experts of all tokens: from each GPU the same number to each, shuffled."""
    each = np.tile(np.arange(T, dtype=np.int32) % experts, (devices, 1))
    return np.random.default_rng(seed).permuted(each, axis=1).reshape(-1)


def check(n: int, devices, T: int = 64):
    """Both operations over groups of n move every number to its place, bit for bit."""
    cfg = ModelConfig(vocab=8, layers=1, hidden=16, **SMALL)
    rng, mesh = np.random.default_rng(n), mesh_of(n, devices)

    def normal(shape):
        return rng.normal(size=shape).astype(np.float32)

    x, gain = normal((len(devices) * T, cfg.hidden)), normal(cfg.experts)
    choice = even_choice(len(devices), T, cfg.experts)
    got = jax.block_until_ready(routed(mesh)(x, choice, gain))
    np.testing.assert_array_equal(got, x * gain[choice][:, None])

    weights = jax.tree.map(lambda v: normal(v.shape), weights_of(CCA, cfg))
    copies = jax.block_until_ready(gathered_attention(mesh, cfg, "float32")(weights))
    for copy, whole in zip(jax.tree.leaves(copies), jax.tree.leaves(weights), strict=True):
        np.testing.assert_array_equal(copy, np.broadcast_to(whole, copy.shape))


def measured(cfg: ModelConfig, T: int, devices, groups, repeats: int = 30) -> list[dict]:
    """Seconds of each operation on real GPUs: the median, the 10th and the 90th percentile.

    The exchange includes what a GPU does by itself: planning, sorting into slots and back.
    """
    rows = []
    for n in groups:
        mesh = mesh_of(n, devices)

        def filled(shape, dtype, spec, mesh=mesh):
            value = partial(jnp.ones, shape, dtype)
            return jax.jit(value, out_shardings=NamedSharding(mesh, spec))()

        weights = map_params(
            lambda v, spec: v.replace(filled(v.shape, v.dtype, spec.get_value())),
            weights_of(CCA, cfg),
            on_part(weights_of(CCA, cfg), gathered=True)[0],
        )
        x = filled((len(devices) * T, cfg.hidden), "bfloat16", P(AXES))
        gain = filled((cfg.experts,), "float32", P(PART))
        choice = even_choice(len(devices), T, cfg.experts)
        choice = jax.device_put(choice, NamedSharding(mesh, P(AXES)))
        for name, fn, args in (
            (OPERATIONS[0], routed(mesh), (x, choice, gain)),
            (OPERATIONS[1], gathered_attention(mesh, cfg, "bfloat16"), (weights,)),
        ):
            for _ in range(3):  # compiles, and sets up the links
                jax.block_until_ready(fn(*args))
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                jax.block_until_ready(fn(*args))
                times.append(time.perf_counter() - start)
            low, median, high = np.percentile(times, (10, 50, 90)).tolist()
            rows.append({"operation": name, "n": n, "median": median, "p10": low, "p90": high})
    return rows


def table(header: str, rows) -> str:
    """A Markdown table; `header` has its columns split by `|`."""
    columns = [c.strip() for c in header.split("|")]
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def show(result: dict) -> str:
    """The tables in experiments/README.md."""

    def of(name, r):
        sizes = f"{r['message'] / 1e6:.1f}", f"{r['on_link'] / 1e6:.1f}"
        times = (
            f"{1e3 * r[fabric]:.3f} ({r[fabric + '_penalty']:.2f}x)"
            for fabric in ("point_to_point", "switch")
        )
        return name, r["n"], *sizes, f"{r['links']} of {NODE - 1}", *times

    operations = [of(name, r) for name in OPERATIONS for r in result["operations"][name]]
    degree = [
        (
            r["n"],
            r["experts"],
            f"{r['weights'] / 1e6:.0f}",
            f"{r['rows']:,}",
            f"{1e3 * r['point_to_point']:.0f}",
            f"{1e3 * r['switch']:.0f}",
        )
        for r in result["degrees"]
    ]
    parts = [
        table(
            "operation | GPUs in a group | message, MB | on each link, MB | links in use | "
            "point-to-point, ms | behind a switch, ms",
            operations,
        ),
        table(
            "expert degree | experts a GPU | their weights in a layer, MB | tokens an expert | "
            "all layers' exchanges, point-to-point, ms | behind a switch, ms",
            degree,
        ),
    ]
    if result["measured"]:
        ms = [
            (r["operation"], r["n"], *(f"{1e3 * r[key]:.3f}" for key in ("median", "p10", "p90")))
            for r in result["measured"]
        ]
        header = "operation | GPUs in a group | median, ms | 10 % | 90 %"
        parts.append(
            f"Measured on {result['device']}, jax {result['jax']}:\n\n" + table(header, ms)
        )
    return "\n\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384, help="of one GPU (4 rows of 4096)")
    parser.add_argument("--json", action="store_true", help="one object, in bytes and seconds")
    args = parser.parse_args()
    emulate(NODE)
    devices = jax.devices()[:NODE]
    groups = [n for n in GROUPS if len(devices) % n == 0]
    for n in groups:
        check(n, devices)
    cfg = load(CONFIGS / "zaya1_8b.toml").model
    rows = modelled(cfg, args.tokens)
    result = {
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "jax": jax.__version__,
        "tokens": args.tokens,
        "operations": rows,
        "degrees": degrees(cfg, args.tokens, rows[OPERATIONS[2]]),
        "measured": [],
    }
    if jax.default_backend() != "cpu":
        result["measured"] = measured(cfg, args.tokens, devices, groups)
    print(json.dumps(result, indent=1) if args.json else show(result))


if __name__ == "__main__":
    main()
