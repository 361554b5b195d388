"""The one table: on which mesh axes everything lives, at rest and in each layout.

Two axes, always both: `node` and `gpu`. `gpu` is the whole node, because on point-to-point links a
group of n GPUs has n-1 links of bandwidth each. Parallelisms fold onto these two axes: experts,
sequence and batch may all use `gpu`, and none gets an axis of its own.
"""

import dataclasses

NODE, GPU = WORLD = ("node", "gpu")

# Where what spans all GPUs is ordered, the GPU counts first and the node second: a gather crosses
# nodes first, with the small message, each GPU on its own rail, and then fills the node.
RAILS_FIRST = (GPU, NODE)

# logical axis of a parameter -> mesh axes on which it is stored, outermost first. An axis that is
# not listed is whole on every device. A dimension takes as many of its mesh axes as divide it, from
# the left: the 128 channels of a head can be split over 8 GPUs, but not over 1,024.
STORED = {
    "embed": RAILS_FIRST,
    "channel": RAILS_FIRST,  # inner channels of the grouped convolution
    "router": RAILS_FIRST,  # inner width of the router
    "expert": (GPU,),  # tokens travel to their expert inside the node; experts do not move
    "expert_embed": (NODE,),  # the rest of an expert is split along the rail
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the mesh axes split during computation, and how what is split comes together."""

    batch: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()  # of queries and keys, zigzag: see `zayajax.sequence`
    keys: tuple[str, ...] = ()  # of the keys alone, while each device has all queries
    expert: tuple[str, ...] = ()
    attention: str = "gather"  # how queries meet the keys of a split sequence: gather, ring
    exchange: str = "even"  # how tokens travel: `zayajax.exchange.WAYS`

    @property
    def tokens(self) -> tuple[str, ...]:
        """Axes that split the tokens, hence those over which gradients and metrics are summed."""
        return self.batch + self.sequence

    @property
    def travel(self) -> tuple[str, ...]:
        """Axes over which tokens go to their experts, and their results come back."""
        return tuple(a for a in self.expert if a in self.tokens)

    @property
    def summed(self) -> tuple[str, ...]:
        """Axes whose devices have the same tokens and different experts: their results add up."""
        return tuple(a for a in self.expert if a not in self.tokens)

    @property
    def axes(self) -> tuple[str, ...]:
        """All that are in use, none of them for LOCAL."""
        return tuple(a for a in WORLD if a in self.tokens + self.keys + self.expert)


LOCAL = Layout()
LAYOUTS = {
    "pretrain": Layout(batch=WORLD, expert=(GPU,)),
    "context": Layout(batch=(NODE,), sequence=(GPU,), expert=(GPU,)),
    "context-wide": Layout(sequence=RAILS_FIRST, expert=(GPU,)),
    "decode": Layout(keys=RAILS_FIRST, expert=(GPU,)),
}
PRETRAIN = LAYOUTS["pretrain"]
TRAINED = ("pretrain", "context", "context-wide")  # the names of those that a run can have
