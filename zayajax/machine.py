"""What is known about machines, as data with its source."""

# Dense bfloat16 FLOP/s by the vendors' data sheets; the first name found in the device's decides.
PEAK_BF16 = {
    "MI300X": 1307e12,
    "MI325X": 1307e12,
    "MI355X": 2517e12,
    "H100": 989e12,
    "H200": 989e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Of one device by the name that JAX gives it; None where it is not known."""
    return next((peak for name, peak in PEAK_BF16.items() if name in device_kind), None)
