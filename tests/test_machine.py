"""What is known about machines agrees with itself."""

import copy
import dataclasses
import pickle

import pytest

from zayajax.errors import UserError
from zayajax.machine import CPU, GPUS, MACHINES, Sourced, Wire, machine, named, peak_flops

every = pytest.mark.parametrize("found", MACHINES, ids=lambda m: m.name)


def numbers(x):
    """Each number of a machine with its name."""
    for field in dataclasses.fields(x):
        value = getattr(x, field.name)
        if isinstance(value, Wire):
            for name, number in numbers(value):
                yield f"{field.name}.{name}", number
        elif not isinstance(value, (str, bool, type(None))):
            yield field.name, value


@every
def test_a_group_gets_the_links_it_has(found):
    shares = [found.bandwidth(n) for n in range(1, found.gpus + 1)]
    assert shares[0] == 0
    if found.point_to_point:
        # A GPU has one link to each of the others.
        assert found.links == found.gpus - 1
        assert shares == [pytest.approx(n * found.link) for n in range(found.gpus)]
    else:
        assert set(shares[1:]) == {found.links * found.link}
    twin = found.switched()
    assert not twin.point_to_point
    assert twin.bandwidth(2) == twin.bandwidth(found.gpus) == found.bandwidth(found.gpus)


@every
def test_every_number_has_a_source_and_none_beats_its_data_sheet(found):
    for name, number in numbers(found):
        if name not in ("gpus", "links"):  # counted on the drawing of a node
            assert isinstance(number, Sourced) and number.source.strip(), name
        assert number > 0, name
    assert found.reached_bf16 <= found.peak_bf16
    assert found.hbm_reached <= found.hbm_bandwidth
    for wire, sheet in ((found.inside, found.link), (found.across, found.nic)):
        assert wire.short_rate <= wire.rate <= sheet
        assert wire.short_latency <= wire.latency


def test_the_figures_of_the_design():
    mi300x = machine("AMD Instinct MI300X OAM")
    assert [mi300x.bandwidth(n) for n in (2, 4, 8)] == [64e9, 192e9, 448e9]
    assert "(4 - 1) x 64 = 192 of the node's 448 GB/s" in mi300x.share(4)


def test_a_machine_is_found_by_the_name_of_its_devices():
    assert peak_flops("NVIDIA H200") == 989e12
    assert machine("NVIDIA H100 80GB HBM3").name == "H100"
    for known in GPUS:
        assert machine(f"Maker {known.name}") is known
        assert named(known.name.lower()) is known
    with pytest.raises(UserError, match="MI300X"):
        named("MI300")


def test_a_cpu_is_no_gpu():
    assert machine("cpu") is None and peak_flops("cpu") is None
    assert named("cpu") is CPU


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_number_keeps_its_source_but_arithmetic_does_not(duplicate):
    number = duplicate(Sourced(3.5, "somewhere"))
    assert number == 3.5 and number.source == "somewhere"
    assert type(2 * number) is float
