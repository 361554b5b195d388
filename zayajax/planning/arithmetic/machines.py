"""How much arithmetic a machine offers for each byte that it moves, and for a dollar."""

from zayajax.machine import MACHINES, Machine
from zayajax.tables import Column, Table, size

NOTES = (
    "FLOP/byte: peak dense bfloat16 over the peak bandwidth of HBM, of the GPU's links to its "
    "node, and of its NIC. A product with fewer operations a byte waits for the bytes.",
    "FLOP-bytes a dollar: peak FLOP/s times HBM bytes/s, over the price of an hour: what a step "
    "that needs both gets for the money. We found no published definition; this one is ours. Blank "
    "where no price is known.",
)


def table(machines=None) -> Table:
    """Of all machines with data sheets; an emulated CPU node is none."""
    found = machines or [m for m in MACHINES if m.name != "cpu"]
    columns = (
        Column("machine", "machine", left=True),
        Column("peak_flops", "peak TFLOP/s", lambda x: f"{x / 1e12:,.0f}"),
        Column("hbm_bytes", "HBM", size),
        Column("flop_per_hbm_byte", "FLOP/byte: HBM", "{:.0f}".format),
        Column("flop_per_fabric_byte", "links", "{:,.0f}".format),
        Column("flop_per_nic_byte", "NIC", "{:,.0f}".format),
        Column("price", "$ an hour", "{:.2f}".format),
        Column("flop_per_dollar", "EFLOP a $", lambda x: f"{x / 1e18:.2f}"),
        Column("flop_bytes_per_dollar", "FLOP-bytes a $", "{:.3g}".format),
    )
    return Table("arithmetic for each byte and dollar", columns, [_row(m) for m in found], NOTES)


def _row(m: Machine) -> dict:
    price = None if m.price is None else float(m.price)
    return {
        "machine": m.name,
        "peak_flops": float(m.peak_bf16),
        "hbm_bytes": float(m.hbm),
        "flop_per_hbm_byte": m.peak_bf16 / m.hbm_bandwidth,
        "flop_per_fabric_byte": m.peak_bf16 / m.bandwidth(m.gpus),
        "flop_per_nic_byte": m.peak_bf16 / m.nic,
        "price": price,
        "flop_per_dollar": price and m.peak_bf16 * 3600 / price,
        "flop_bytes_per_dollar": price and m.peak_bf16 * m.hbm_bandwidth / price,
    }
