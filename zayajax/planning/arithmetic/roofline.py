"""The time of a step's arithmetic on one GPU: operations and bytes of each part, over what is
reached of such operations.

A part takes as long as its operations at their rate, or as its bytes at the memory's reached
bandwidth, whichever is longer; parts follow each other.

Shape letters: D embed, H query heads, N key-value heads, J = H + N, K head width, F expert hidden,
R router width, C router classes, V vocabulary, E experts of this GPU, T its tokens, L layers.
"""

import dataclasses

from zayajax.machine import Machine, Sourced
from zayajax.optim import muon, table
from zayajax.planning.arithmetic.inventory import Parameter, itemsize
from zayajax.planning.arithmetic.share import Share, dealt, keys_seen, share
from zayajax.planning.arithmetic.traffic import muon_stack
from zayajax.settings import Config

HERE = "measured on one H200, jax 0.11.2, November 2026"
BEST = 790e12  # FLOP/s, the best product seen there
# What a kind of product reaches, as a part of what the machine's best products reach
# (`Machine.reached_bf16`). Each is measured on an H200; that another machine's products keep the
# same part of their best is an assumption.
REACHED = {
    "dense": Sourced(458e12 / BEST, f"16,384 x 2048 x 4096, {HERE}"),
    # The head's products have 1.1e12 operations each, as this one has; those of a layer a quarter.
    "large": Sourced(645e12 / BEST, f"8192 x 8192 x 8192, {HERE}"),
    "attention": Sourced(39e12 / BEST, f"XLA, 4 x 4096, heads 8:2 of 128, causal, {HERE}"),
    # XLA makes `lax.ragged_dot` over E experts a dense product of E times the arithmetic: 49e12 of
    # use are 784e12 done with 16 experts, and 36e12 are 576e12.
    "ragged forward": Sourced(16 * 49e12 / BEST, f"lax.ragged_dot over 16 experts, {HERE}"),
    "ragged backward": Sourced(16 * 36e12 / BEST, f"lax.ragged_dot over 16 experts, {HERE}"),
    # What a grouped kernel would reach, without the expansion; not what the package compiles to.
    "grouped": Sourced(344e12 / BEST, f"an untuned Pallas kernel, {HERE}"),
}
# Of the peak of float32 products; the router's are such.
REACHED_FLOAT32 = Sourced(0.5, "assumed")

# How often a layer's forward arithmetic is done: once, and again in the backward pass where it was
# not kept; a gradient takes twice the forward pass.
AGAIN = {"none": 0, "names": 1, "full": 1}


@dataclasses.dataclass(frozen=True)
class Part:
    """Some arithmetic of a step on one GPU."""

    name: str
    kind: str  # of REACHED, or "float32", or "bytes": no products to speak of
    flops: float
    bytes: float  # of HBM, read and written

    def seconds(self, machine: Machine) -> float:
        moved = self.bytes / machine.hbm_reached
        return max(self.flops / rate(machine, self.kind), moved) if self.flops else moved


def rate(machine: Machine, kind: str) -> float:
    """FLOP/s that a kind of product reaches on a machine."""
    if kind == "float32":
        return machine.peak_float32 * REACHED_FLOAT32
    return machine.reached_bf16 * REACHED[kind]


def parts(
    config: Config,
    found: list[Parameter],
    at: Share | None = None,
    expert_kernel: str = "ragged",
) -> list[Part]:
    """All arithmetic of a step.

    Args:
      found: `inventory.parameters(config)`.
      at: `share(config)`, unless experts are elsewhere.
      expert_kernel: how the products of several experts are made: ragged, as XLA compiles them
        (each row times every expert of the GPU), or grouped, by a kernel.
    """
    at, A = at or share(config), config.train.micro_batches
    micro = [*_layers(config, at), *_experts(config, at, expert_kernel), *_head(config, at)]
    micro = [dataclasses.replace(p, flops=A * p.flops, bytes=A * p.bytes) for p in micro]
    if config.train.compute_dtype == "float32":  # which is no TF32: `model.common.precision`
        micro = [dataclasses.replace(p, kind="float32") for p in micro]
    return micro + _gradients(config, found) + _optimizer(config, found)


def _layers(config: Config, at: Share) -> list[Part]:
    """Of one micro-batch: all of the layers but the experts' products."""
    m, T, c = config.model, at.tokens, itemsize(config.train.compute_dtype)
    D, H, N, K, R = m.hidden, m.heads, m.kv_heads, m.head_dim, m.router_hidden
    J, t1, TL = H + N, m.cca_time1, T * m.layers
    again = AGAIN[config.train.remat]
    passes = 3 + again  # of products: forward, recomputed, and two for the gradients
    project = D * K * (J + N) + H * K * D
    grouped = t1 * J * K * K
    router = D * R + 2 * R * R + R * (m.experts + 1)
    attention = 2 * 2 * H * K * keys_seen(config) * T
    # Forward two products of queries with keys, backward five; the first two again where the
    # output is not kept.
    attended = attention * (1 + 2.5 + (config.train.remat == "full"))
    # Elementwise passes over [T, D]. Forward: two norms (float32 in, compute dtype out) and two
    # merges into the float32 residual stream (that, and the new part, in; the sum out). Backward
    # about twice as many. A fusion that XLA misses adds to it.
    stream = 2 * (4 + c) * D + 2 * (4 + c + 4) * D
    # Over [T, J K]: the depthwise taps in float32 and rounded, the taps side by side, the grouped
    # result, mean path and lengths in float32, rotated and rounded.
    heads = J * K * ((c + 4) + (4 + c) + t1 * (c + c) + (c + 4) + (4 + c + 4) + (4 + c))
    states = 6 * 4 * R * 2  # the router's [T, R] in float32, three times in and out, with gelu
    return [
        Part("projections", "dense", 2 * project * TL * passes, 2 * c * (D + J * K) * TL * passes),
        Part("convolutions", "dense", 2 * grouped * TL * passes, c * J * K * t1 * TL * passes),
        Part("attention", "attention", attended, c * 2 * (H + N) * K * TL),
        Part("router", "float32", 2 * router * TL * passes, (c * D + 4 * 3 * R) * TL * passes),
        Part("elementwise", "bytes", 0, (stream + heads + states) * TL * passes),
    ]


def _experts(config: Config, at: Share, kernel: str) -> list[Part]:
    """Of one micro-batch: products of the experts, and their tokens in and out of order."""
    m, c, L = config.model, itemsize(config.train.compute_dtype), config.model.layers
    D, F, E, rows = m.hidden, m.expert_hidden, at.experts, at.slots * config.model.layers
    gate_up, down = 2 * D * 2 * F, 2 * F * D
    # The backward pass makes the first product again, whatever is kept: `model.experts`.
    full = config.train.remat == "full"
    forward = (gate_up + down) * (1 + full)
    backward = gate_up + 2 * (gate_up + down)
    kinds, times = ("dense", "dense"), 1
    if E > 1:
        kinds = ("grouped", "grouped")
        if kernel == "ragged":
            kinds, times = ("ragged forward", "ragged backward"), E
    weights = 3 * D * F * E * c * L
    # Slots made and filled, sent on, put in order of experts if there are several, and back.
    orders = (5 + 2 * full) * D * c * (3 + 3 * (E > 1))
    between = (2 * F + F) * c * (3 + full)
    return [
        Part(
            "experts forward",
            kinds[0],
            forward * rows * times,
            weights * (1 + full) + 2 * D * c * rows,
        ),
        Part("experts backward", kinds[1], backward * rows * times, 3 * weights + 4 * D * c * rows),
        Part("experts' rows", "bytes", 0, (orders + between) * rows),
    ]


def _head(config: Config, at: Share) -> list[Part]:
    """Of one micro-batch: embedding, logits and loss. The backward pass makes the logits again."""
    m, T, c = config.model, at.tokens, itemsize(config.train.compute_dtype)
    products = 4 * 2 * m.hidden * m.vocab * T
    # float32 logits written and read twice (a maximum, a sum), in both passes; their gradient
    # written in the compute dtype and read by two products.
    softmax = m.vocab * T * (2 * 3 * 4 + 4 + 3 * c)
    rows = m.hidden * T * (2 * c + 3 * 4)
    return [
        Part("head", "large", products, 4 * m.hidden * m.vocab * c),
        Part("softmax", "bytes", 0, softmax),
        Part("embedding", "bytes", 0, rows),
    ]


def _gradients(config: Config, found: list[Parameter]) -> list[Part]:
    """Copies of the weights made, and gradients of micro-batches summed in float32."""
    train, made, summed = config.train, 0, 0
    for p in found:
        stored, used = p.bytes(train.param_dtype), p.bytes(train.compute_dtype)
        numbers = p.local if p.in_layer else p.whole
        if p.is_copied(train.param_dtype, train.compute_dtype) and not p.in_layer:
            made += p.local * stored + p.whole * used
        summed += numbers * (4 + used + 4)
    return [Part("gradients", "bytes", 0, made + train.micro_batches * summed)]


def _optimizer(config: Config, found: list[Parameter]) -> list[Part]:
    """Norm, clip, moments, update; Muon's iterations on the matrices dealt to this GPU."""
    state, stored = itemsize(config.optim.state_dtype), config.train.param_dtype
    moved = products = 0
    stacks: dict[tuple, int] = {}  # (rows, columns, mesh axes) -> matrices
    for p in found:
        # The norm reads the gradient, the clip reads and writes it.
        moved += p.local * (4 + 8)
        if p.group == table.MATRICES and config.optim.matrices == "muon":
            # Gradient and momentum in, momentum and a rounded direction out; the update in, the
            # weight in and out; and the stack that travels is copied twice each way.
            moved += p.local * (4 + 2 * state + 2 + 4 + 2 * p.bytes(stored) + 2 * 2 * 4)
            count, rows, columns, axes = muon_stack(p, config.mesh)
            key = rows, columns, axes
            stacks[key] = stacks.get(key, 0) + count
        else:  # gradient, weight and two moments in, the last three out
            moved += p.local * (4 + 2 * p.bytes(stored) + 4 * state)
    for (rows, columns, axes), count in stacks.items():
        m, n = sorted((rows, columns))
        one = 2 * m * m * n + 2 * m**3 + 2 * m * m * n  # x x^T, its square, and y x
        count = dealt(count, tuple(config.mesh.ranks((a,)) for a in axes))
        products += count * muon.STEPS * one
    return [
        Part("update", "bytes", 0, moved),
        Part("Newton-Schulz", "dense", products, 0),
    ]
