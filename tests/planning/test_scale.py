"""A config on other nodes keeps the tokens of a GPU, or says why it cannot."""

import dataclasses

import pytest
from batches import small_config

from zayajax.errors import UserError
from zayajax.planning.scale import at_scale

CONFIG = small_config(mesh__nodes=2, mesh__gpus=8, train__batch=32)


def test_each_gpu_keeps_its_tokens():
    assert at_scale(CONFIG) == CONFIG
    for nodes in (1, 2, 16, 128):
        scaled = at_scale(CONFIG, nodes)
        assert scaled.mesh.nodes == nodes
        assert scaled.train.batch == 2 * scaled.mesh.devices
        assert at_scale(scaled, 2) == CONFIG
    assert at_scale(CONFIG, 1, 1).train.batch == 2


def test_a_layout_may_be_another():
    config = small_config(mesh__nodes=2, mesh__gpus=8, train__batch=32, train__sequence=96)
    assert at_scale(config, 4, layout="context").mesh.layout == "context"


@pytest.mark.parametrize(
    "args, message",
    [
        (dict(nodes=0), "--nodes: must be positive, and is 0"),
        (dict(nodes=-3), "--nodes: must be positive, and is -3"),
        (dict(nodes=4, layout="context"), "on 4 nodes of 8 GPUs: train.sequence: 12 tokens"),
    ],
)
def test_what_is_no_config_is_said(args, message):
    with pytest.raises(UserError) as error:
        at_scale(CONFIG, **args)
    assert message in str(error.value)


def test_part_of_a_sequence_is_said():
    config = small_config(
        mesh__nodes=4,
        mesh__gpus=8,
        train__batch=32,
        mesh__layout="context-wide",
        train__sequence=192,
    )
    one = dataclasses.replace(config.train, batch=1)
    wider = dataclasses.replace(config, train=one)
    with pytest.raises(UserError, match=r"1 sequences on 32 GPUs are 0.25 on 8; .*--train.batch"):
        at_scale(wider, 1)
