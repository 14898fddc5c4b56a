"""Durations, sizes and amounts as text for users."""

from __future__ import annotations


def clock_text(seconds: float) -> str:
    """`7.2 s`, `45 s`, `4:05` or `2:00:09`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 59.5:  # rounds to less than a minute
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def pace_text(seconds: float) -> str:
    """`1.92 s/step`, or `0.038 s/step` for fast steps."""
    return f"{seconds:.2f} s/step" if seconds >= 0.1 else f"{seconds:.3f} s/step"


def size_text(count: int) -> str:
    """Bytes in the largest power-of-1000 unit that gives a number of at least 1: `11.4 GB`."""
    power = min(4, (len(str(count)) - 1) // 3)
    size = count / 1000**power
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    if power == 0 or size >= 100:  # three digits are enough
        return f"{size:.0f} {unit}"
    return f"{size:.1f} {unit}"


def duration_text(seconds: float) -> str:
    """An estimated duration as text, with at most two digits."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    # Up to 100 of a unit: "90 min" is more precise than "2 h".
    for unit, size, end in (("s", 1, 100), ("min", 60, 6000), ("h", 3600, 360_000)):
        if seconds < end:
            return f"{seconds / size:.0f} {unit}"
    days = seconds / 86400
    return f"{days:.0f} days" if days < 1000 else f"{days / 365.25:.0f} years"


def about_text(seconds: float) -> str:
    """An estimated duration in words: `20 s`, `1 minute`, `1.5 hours`, `3 days`."""
    amount, unit = about_amount(seconds)
    return f"{amount} {unit}" if amount != "1" else f"1 {unit.removesuffix('s') or unit}"


def about_amount(seconds: float) -> tuple[str, str]:
    """An estimated duration as a number and its unit: `s`, `minutes`, `hours` or `days`."""
    if seconds < 12:
        return f"{max(1, round(seconds))}", "s"
    if seconds < 57:
        return f"{5 * round(seconds / 5)}", "s"
    if seconds < 90 * 60:
        return f"{max(1, round(seconds / 60))}", "minutes"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.2g}", "hours"
    return f"{seconds / 86400:.0f}", "days"


def amount_text(count: int, unit: str) -> str:
    """`1,204 captions`; without a unit only the number, or `done` for 0."""
    if not unit:
        return f"{count:,}" if count else "done"
    return f"{count:,} {unit.removesuffix('s') if count == 1 else unit}"
