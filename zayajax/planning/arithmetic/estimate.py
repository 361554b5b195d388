"""The memory of a training step on one GPU, by arithmetic.

What `audit` reads from the traced program is written here as sums with a name for each term: the
arrays that a step keeps, and those that are there at its fullest moments. Like there, elementwise
chains count as fused, and the branch of the exchange that is never taken counts as taken: its room
is in the compiled program.

Shape letters: D embed, H query heads, N key-value heads, J = H + N, K head width, F expert hidden,
R router width, V vocabulary, L layers, T tokens of this GPU in a micro-batch, t tokens of a chunk
of logits; c bytes of the compute dtype.
"""

import dataclasses

from zayajax.attention import local
from zayajax.model.head import CHUNK_LOGITS
from zayajax.optim import table
from zayajax.planning.arithmetic.inventory import Parameter, itemsize
from zayajax.planning.arithmetic.share import Share, share
from zayajax.planning.arithmetic.traffic import muon_stack
from zayajax.settings import Config


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, by kind, as `audit` counts them."""

    weights: float  # at rest
    moments: float
    gathered: float  # copies that the model computes with; of zero 3, one layer's too
    gradients: float  # of one micro-batch, and the float32 sum over several
    activations: float  # what a micro-batch keeps and makes beside these, and the batch
    optimizer: float  # of scattered gradients and their update, once the rest is gone
    fullest: str  # the moment of the step that has most

    @property
    def total(self) -> float:
        """The most at once."""
        passes = self.gathered + self.gradients + self.activations
        return self.weights + self.moments + max(passes, self.optimizer)

    def kinds(self) -> dict[str, float]:
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: v for k, v in found.items() if k != "fullest"} | {"total": self.total}


@dataclasses.dataclass
class _Sums:
    """Bytes of all parameters together."""

    weights: float = 0
    moments: float = 0
    copies: float = 0  # of whole weights, in the compute dtype
    table: float = 0  # of the copies, those of embedding and head
    head: float = 0  # of these, what the head computes with
    layer: float = 0  # copies of one layer inside the loop (zero 3)
    own: float = 0  # the gradient as the backward pass makes it
    own_table: float = 0  # of that, the embedding's and the head's
    of_layers: float = 0  # of that, the layers'
    summed: float = 0  # the gradient in float32
    rounding: float = 0  # the most as its parts become what travels, one by one
    in_turn: float = 0  # a layer's weights
    experts: float = 0  # of these, its experts', as many as their gradient


def memory(
    config: Config,
    found: list[Parameter],
    at: Share | None = None,
    expert_kernel: str = "ragged",
) -> Memory:
    """Of a step; the arguments are those of `roofline.parts`."""
    at, train = at or share(config), config.train
    sums = _sums(config, found)
    several = train.micro_batches > 1
    batch = 5 * 4 * at.tokens * train.micro_batches  # tokens, targets, segments, places, weights
    moments = _moments_of_backward(config, at, sums, expert_kernel)
    name = max(moments, key=moments.get)
    gradients = sums.own + several * sums.summed
    gathered = sums.copies + sums.layer
    optimizer = max(_scattered(config, found), _updated(config, found)) + batch
    backward = moments[name] + batch
    return Memory(
        weights=sums.weights,
        moments=sums.moments,
        gathered=gathered,
        gradients=gradients,
        activations=backward - gathered - gradients,
        optimizer=optimizer,
        fullest=name if backward > optimizer else "the update",
    )


def _sums(config: Config, found: list[Parameter]) -> _Sums:
    train, optim, L = config.train, config.optim, config.model.layers
    state, sums = itemsize(optim.state_dtype), _Sums(moments=24)  # a count, the guard
    travels = itemsize(train.reduce_dtype)
    done, rounded = 0, []  # bytes as they travel, and as they are made
    for p in found:
        stored, used = p.bytes(train.param_dtype), p.bytes(train.compute_dtype)
        sums.weights += stored * p.local
        if p.group == table.BALANCE:
            sums.moments += 2 * 4 * p.local
        elif p.group == table.MATRICES and optim.matrices == "muon":
            sums.moments += state * p.local * (optim.momentum > 0)
        else:
            sums.moments += 2 * state * p.local
        numbers, own = (p.local, stored) if p.in_layer else (p.whole, used)
        sums.summed += 4 * numbers
        sums.own += own * numbers
        if p.path in ("embed", "head"):
            sums.own_table += own * numbers
            done += 4 * numbers  # in float32 from the start
        elif p.in_layer:  # at rest already: no message waits for its float32
            done += own * numbers
        else:
            rounded.append((travels * numbers, own * numbers * (own != travels)))
        if p.path.startswith("layers."):
            sums.of_layers += own * numbers
            sums.in_turn += used * p.whole / L
            sums.experts += used * p.whole / L * p.path.startswith("layers.experts.")
        if p.in_layer:
            sums.layer += used * p.whole / L
        elif p.is_copied(train.param_dtype, train.compute_dtype):
            sums.copies += used * p.whole
            sums.table += used * p.whole * (p.path in ("embed", "head"))
            head = "embed" if config.model.tied_head else "head"
            sums.head += used * p.whole * (p.path == head)
    waiting = sum(own for _, own in rounded)
    for whole, own in rounded:  # one by one, in their order
        done += whole
        sums.rounding = max(sums.rounding, done + waiting)
        waiting -= own
    return sums


def _moments_of_backward(
    config: Config, at: Share, sums: _Sums, expert_kernel: str
) -> dict[str, float]:
    """Bytes beside weights and moments when forward and backward pass can be fullest."""
    m, train, T = config.model, config.train, at.tokens
    c, several = itemsize(train.compute_dtype), train.micro_batches > 1
    table_grad, t = 4 * m.vocab * m.hidden, min(T, max(1, CHUNK_LOGITS // m.vocab))
    # Through all micro-batches the copies and the sums stay; a single one needs no sum, and drops
    # the copy of the embedding once the tokens are looked up, that of the head after the loss, and
    # those of the layers after their loop.
    always = several * (sums.copies + sums.summed)
    base = always or sums.copies - sums.table + sums.head
    after_loss = always or sums.copies - sums.table
    kept = m.layers * kept_per_token(config, at) * T
    stream, tokens_in = 4 * m.hidden * T, c * m.hidden * T
    # The table's gradient so far, and with the chunk's logits as its factor this chunk's: twice,
    # unless there is one chunk.
    so_far = table_grad * (T > t)
    logits = so_far + c * m.vocab * t + max(table_grad, 4 * m.vocab * t)
    loss = base + kept + stream + tokens_in + logits
    turn = after_loss + kept + sums.of_layers + sums.in_turn + table_grad + stream + tokens_in
    return {
        "the loss": loss,
        "a layer's experts, backward": turn
        + _again_per_token(config, at) * T
        + experts_rows(config, at, expert_kernel)
        + sums.experts,
        "a layer's attention, backward": turn + _attention_at_work(config, at),
        # The head's stays in float32 until the embedding's is there.
        "the embedding's gradient": always + sums.own - sums.own_table + 2 * table_grad,
        "the gradients as they travel": 0 if several else sums.rounding,
    }


def kept_per_token(config: Config, at: Share) -> float:
    """Bytes a token that a layer keeps of the forward pass."""
    m, c, remat = config.model, itemsize(config.train.compute_dtype), config.train.remat
    D, H, N, K, R = m.hidden, m.heads, m.kv_heads, m.head_dim, m.router_hidden
    stream, state = 4 * D, 4 * R  # float32: what every layer starts from
    if remat == "full":
        return stream + state
    attention, moe = c * H * K + 4 * H, c * D + 8  # and the log-sum-exp; places of the exchange
    if remat == "names":
        return stream + state + attention + moe
    J, C, wide = H + N, m.experts + 1, c < 4
    # Two norms (input, normed, scaled) and two merges (both sides, before and after the bias), the
    # compute dtype's copies beside the float32 ones; which tokens skip.
    streams = (9 * 4 + 2 * c if wide else 11 * 4) * D + D * (m.skip == "identity")
    # Each tap of the depthwise convolution in float32, the taps of the grouped one side by side.
    convolved = 4 * m.cca_time0 * J * K * _halo(config, at) + c * m.cca_time1 * J * K
    lengths = 4 * (H + 2 * N) * K + 3 * 4 * J
    queries = c * H * K
    keys = 2 * c * N * K * _gathered_ranks(config, at)
    router = 8 * 4 * R + 4 * C + 8 * 4 + 4
    return streams + convolved + lengths + queries + keys + router + attention + moe


def _halo(config: Config, at: Share) -> float:
    """Positions of a chunk and its halo, to those of the chunk."""
    return 1 + at.chunks * config.model.halo / (at.tokens / at.rows)


def _gathered_ranks(config: Config, at: Share) -> int:
    return at.ranks if config.mesh.attention == "gather" else 1


def _again_per_token(config: Config, at: Share) -> float:
    """Bytes a token in one layer's backward pass as the experts' gradients are computed, with what
    was not kept of the layer made again."""
    m, c, remat = config.model, itemsize(config.train.compute_dtype), config.train.remat
    D, H, N, K, R = m.hidden, m.heads, m.kv_heads, m.head_dim, m.router_hidden
    experts = 3 * c * D  # their output, its gradient, and that of their input
    if remat == "none":
        return experts
    # Two norms' and the output projection's results; the router's input in float32.
    streams = 2 * c * D + (4 * D if c < 4 else 0)
    convolved = (4 + c * m.cca_time1 + c * _halo(config, at)) * (H + N) * K
    heads = (4 + 3 * c) * H * K + (4 + 2 * c) * N * K
    keys = 2 * c * N * K * (_gathered_ranks(config, at) - 1)
    attention = c * H * K if remat == "full" else 0
    return experts + streams + convolved + heads + keys + attention + 6 * 4 * R


def _attention_at_work(config: Config, at: Share) -> float:
    """Bytes of one layer's backward pass as the gradients of attention are computed."""
    m, c, T = config.model, itemsize(config.train.compute_dtype), at.tokens
    D, H, N, K = m.hidden, m.heads, m.kv_heads, m.head_dim
    positions = T // at.rows
    length = positions * _gathered_ranks(config, at)
    block = local.default_block(length)
    keys = -(-length // block) * block * at.rows
    # Keys and values in blocks, their gradients in float32, and of one block both again; scores
    # and weights of a block of queries, with the gradients of both.
    whole = (2 * c + 2 * 4) * N * K * keys
    one = 2 * 4 * N * K * block * at.rows + 2 * 4 * H * min(block, positions) * block * at.rows
    mine = (4 + c) * D + (4 + 3 * c) * H * K
    if config.train.remat != "none":
        mine += (4 + c * m.cca_time1 + c) * (H + N) * K + 4 * H * K
    return whole + one + mine * T


def experts_rows(config: Config, at: Share, expert_kernel: str = "ragged") -> float:
    """Bytes of the experts' gradients at their fullest, with room for the worst case of the
    exchange: the compiled program has that branch, whatever the routing."""
    D, F, c = config.model.hidden, config.model.expert_hidden, itemsize(config.train.compute_dtype)
    rows, E = at.group * at.rooms[-1] * c, at.experts
    # Gate and up, their gradients, what comes of both, and the rows that came in; or, as the rows'
    # gradient is put in order, that twice and what it was made of.
    row = max(5 * F + D, 3 * F + (4 if E > 1 else 3) * D)
    # As the last weights' gradient is made: that of gate and up, and the rows.
    last = 2 * F + D
    if E > 1 and expert_kernel == "ragged":
        # XLA copies what is ragged for every expert, with zeros for the others' rows: of a weight's
        # gradient both sides, of a product of rows those, twice.
        last *= 1 + E
        row = max(row, E * (F + D) + 3 * F + 2 * D, 2 * E * 2 * F + 2 * F + D)
    if at.group > 1:
        return rows * max(row, last)
    # One capacity, no conditional: the weights' gradients are made one after the other, and the
    # last is there when the rows' are mostly gone.
    gate_up, down = (n * D * F * E * c for n in (2, 1))
    return max(rows * row - gate_up, rows * last - down)


def _scattered(config: Config, found: list[Parameter]) -> float:
    """Bytes as gradients are scattered, one by one: those that wait, what is left of the others,
    and the one that arrives."""
    gpus, travels = config.mesh.gpus, itemsize(config.train.reduce_dtype)
    # Sums of micro-batches are float32, and rounded one by one; a single one's are what travels.
    summed = 4 if config.train.micro_batches > 1 else travels
    waiting = sum(_at_rest(config, p) if p.in_layer else summed * p.whole for p in found)
    most, first = waiting, dict.fromkeys((p.path for p in found), summed)
    for axis, n in (("gpu", gpus), ("node", config.mesh.nodes)):
        together: dict[tuple, float] = {}
        for p in found:
            if p.in_layer:
                continue
            if axis in p.gathered:
                part = p.whole / (1 if axis == "gpu" else gpus if "gpu" in p.gathered else 1)
                was = first[p.path]
                rounded = travels * part * (was != travels)
                most = max(most, waiting + rounded + travels * part / n)
                waiting += travels * part / n - was * part
                first[p.path] = travels
            if axis in p.repeated:
                numbers = p.local if axis == "node" else p.whole
                together[p.stored_over] = together.get(p.stored_over, 0) + travels * numbers
        # What is whole on all is copied into one message.
        most = max(most, waiting + max(together.values(), default=0))
    return most


def _updated(config: Config, found: list[Parameter]) -> float:
    """Bytes of the update: gradients in float32, and Muon's largest stack of matrices."""
    stacks: dict[tuple, float] = {}
    for p in found:
        if p.group == table.MATRICES and config.optim.matrices == "muon":
            _, *shape = muon_stack(p, config.mesh)
            stacks[tuple(shape)] = stacks.get(tuple(shape), 0) + 2 * p.local
    return sum(_at_rest(config, p) for p in found) + max(stacks.values(), default=0)


def _at_rest(config: Config, p: Parameter) -> float:
    """Bytes of a scattered gradient: float32, but for one that the loop over layers has scattered,
    which is as the weight until micro-batches are summed."""
    single = p.in_layer and config.train.micro_batches == 1
    return p.local * (p.bytes(config.train.param_dtype) if single else 4)
