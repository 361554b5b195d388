"""Degrees of parallelism that other systems have a key for, and what stands for them here.

A degree inside a node is the whole node or 1, so there is none to set. Who writes one all the same
is told why, in GB/s, and what to write instead.
"""

import re

from zayajax.machine import MI300X

# Keys that name a degree: Megatron's expert_model_parallel_size, MaxText's
# ici_expert_parallelism, TorchTitan's expert_parallel_degree, the short
# ep or ep_size. A bare `experts` or `sequence` is a slip for another key.
LONG = r"experts?|context|sequence|seq|ulysses|ring|tensor|model|pipeline|data|fsdp|hsdp|replica"
SHORT = r"ep|cp|sp|tp|mp|pp|dp|ddp|fsdp|hsdp"
UNIT = r"(?:_(?:replicate|shard))?_(?:size|degree|world_size)"
KEY = re.compile(
    rf"(?P<where>ici_|dcn_)?(?:(?:use|enable|virtual)_)?"
    rf"(?:(?P<short>{SHORT})(?:{UNIT})?"
    rf"|(?P<long>{LONG})(?:(?:_[a-z]+)??_?parallel(?:ism)?(?:{UNIT})?|_degree))"
)

EXPERTS = 'the experts span mesh.gpus with mesh.layout = "pretrain", as in every layout'
SEQUENCE = (
    'mesh.layout = "context" splits the sequence over mesh.gpus, "context-wide" over all GPUs'
)
TENSOR = (
    "there is no tensor parallelism, because 2 key-value heads cannot be split over 8 GPUs; the "
    "experts and the stored weights are split over mesh.gpus instead"
)
PIPELINE = "there are no pipeline stages; mesh.zero = 3 gathers weights layer by layer instead"
DATA = (
    'with mesh.layout = "pretrain" batch and stored weights are split over all mesh.nodes x '
    "mesh.gpus"
)
INSTEAD = {
    **dict.fromkeys(("ep", "expert", "experts"), EXPERTS),
    **dict.fromkeys(("cp", "sp", "context", "sequence", "seq", "ulysses", "ring"), SEQUENCE),
    **dict.fromkeys(("tp", "mp", "tensor", "model"), TENSOR),
    **dict.fromkeys(("pp", "pipeline"), PIPELINE),
    **dict.fromkeys(("dp", "ddp", "fsdp", "hsdp", "data", "replica"), DATA),
}


def refusal(name: str, value: object) -> str | None:
    """Why the key `name` is no setting, if it is a degree of parallelism; else None.

    Args:
      name: the key without its section.
      value: what it was set to, as TOML or as text. Without a number, no figures are given.
    """
    match = KEY.fullmatch(name.lower().replace("-", "_"))
    if not match:
        return None
    instead = INSTEAD[match["short"] or match["long"]]
    number = re.fullmatch(r"\s*[\"']?(\d+)[\"']?\s*", str(value))
    degree, node = int(number[1]) if number else 0, MI300X.gpus
    if match["where"] == "dcn_":
        why = "is no setting: mesh.nodes is the number of nodes"
    elif 1 < degree < node:
        why = (
            f"is refused: {MI300X.share(degree)}, so a group inside a node is all of it or one GPU"
        )
    elif degree == node:
        why = (
            f"is no setting: {node} GPUs are the whole node, as every group is (mesh.gpus = {node})"
        )
    elif degree > node:
        why = f"is no setting: {degree} GPUs are more than a node, and groups are whole nodes"
    else:
        why = "is no setting: a group inside a node is all of it (mesh.gpus) or one GPU"
    return f"{why}; {instead}; leave the key out"
