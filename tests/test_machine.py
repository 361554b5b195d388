"""What is known about machines agrees with itself."""

import pytest

from zayajax.machine import MACHINES, machine, peak_flops


@pytest.mark.parametrize("found", MACHINES, ids=lambda m: m.name)
def test_a_group_gets_the_links_it_has(found):
    shares = [found.bandwidth(n) for n in range(1, found.gpus + 1)]
    assert shares[0] == 0
    if found.point_to_point:
        # A GPU has one link to each of the others.
        assert shares == [pytest.approx(n * found.link) for n in range(found.gpus)]
    else:
        assert set(shares[1:]) == {found.link}
    assert found.source


def test_the_figures_of_the_design():
    mi300x = machine("AMD Instinct MI300X OAM")
    assert [mi300x.bandwidth(n) for n in (2, 4, 8)] == [64, 192, 448]
    assert "(4 - 1) x 64 = 192 of the node's 448 GB/s" in mi300x.share(4)


def test_a_machine_is_found_by_the_name_of_its_devices():
    assert peak_flops("NVIDIA H200") == 989e12
    assert machine("NVIDIA H100 80GB HBM3").name == "H100"
    assert machine("cpu") is None and peak_flops("cpu") is None
    for known in MACHINES:
        assert machine(f"Maker {known.name}") is known
