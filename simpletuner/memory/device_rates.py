"""How fast this device is, as measured at the start of a run. Free of torch, so that a plan can read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from simpletuner.atomic import write_json

RATES_FILE = "device_rates.json"


@dataclass(frozen=True)
class DeviceRates:
    """What one device does.

    Attributes:
        device: its name.
        matmul_flops: floating-point operations per second in a large matrix product.
        host_to_device_bytes: bytes per second from page-locked memory; None where there is nothing to copy to.
        dtype: of the matrices, such as `bfloat16`.
    """

    device: str
    matmul_flops: float
    host_to_device_bytes: float | None = None
    dtype: str = ""


def read_rates(folder: Path) -> DeviceRates | None:
    """What an earlier session measured; None when there is no such file, or one that says something else."""
    try:
        content = json.loads((folder / RATES_FILE).read_text(encoding="utf-8"))
        rates = DeviceRates(**content)
    except (OSError, ValueError, TypeError):
        return None
    numbers = [rates.matmul_flops, *([] if rates.host_to_device_bytes is None else [rates.host_to_device_bytes])]
    return rates if all(isinstance(each, int | float) and each > 0 for each in numbers) else None


def write_rates(folder: Path, rates: DeviceRates) -> None:
    """Keep the measurement in an output folder.

    Raises:
        DiskFullError: there was no space.
    """
    write_json(folder / RATES_FILE, asdict(rates), durable=False)
