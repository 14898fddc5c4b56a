"""Formats durations and sizes for users."""

from __future__ import annotations


def clock(seconds: float) -> str:
    """`7.2 s`, `45 s`, `4:05` or `2:00:09`."""
    if seconds < 59.5:
        return f"{seconds:.{0 if seconds >= 10 else 1}f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def pace_text(seconds: float) -> str:
    """`1.92 s/step`, or `0.038 s/step` for fast steps."""
    return f"{seconds:.{2 if seconds >= 0.1 else 3}f} s/step"


def size_text(count: int) -> str:
    """Bytes in the largest power-of-1000 unit that gives a number of at least 1: `11.4 GB`."""
    power = min(4, (len(str(count)) - 1) // 3)
    size, unit = count / 1000**power, ("B", "kB", "MB", "GB", "TB")[power]
    return f"{size:.0f} {unit}" if size >= 100 or power == 0 else f"{size:.1f} {unit}"
