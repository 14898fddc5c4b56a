"""The line that explains the speed: where the time of the steps went, and how much of the device it used."""

from __future__ import annotations

COMPUTE, WEIGHTS, DATA = "compute", "weights", "data"
WORDED = {COMPUTE: "compute", WEIGHTS: "waiting for weights", DATA: "waiting for data"}


def shares(seconds: float, data_seconds: float, weights_seconds: float | None = None) -> dict[str, float]:
    """What part of the time each of the three took; they add up to 1.

    Args:
        seconds: of one step or of many, the waits included.
        weights_seconds: None where no weights are streamed; they then have no share.
    """
    if seconds <= 0:
        return {}
    waits = {DATA: data_seconds} if weights_seconds is None else {WEIGHTS: weights_seconds, DATA: data_seconds}
    # A wait is measured on its own clock and may seem a hair longer than the step it is part of.
    parts = {name: min(1.0, wait / seconds) for name, wait in waits.items()}
    return {COMPUTE: max(0.0, 1.0 - sum(parts.values())), **parts}


def shares_text(parts: dict[str, float]) -> str:
    """`compute 96 %, waiting for weights 3 %, waiting for data 1 %`"""
    return ", ".join(f"{WORDED[name]} {share * 100:.0f} %" for name, share in parts.items())


def mfu_text(mfu: float) -> str:
    """`MFU 41 %`: model FLOP utilisation, the model's own arithmetic in units of the device's measured matmul rate."""
    return f"MFU {mfu * 100:.0f} %"
