"""The scale of positions in Kandinsky 5 Video. Free of torch.

Positions in height and width are divided by a factor that belongs to the resolution a clip is sampled at. A wrong
one does not show in the training loss, nor in previews that share it.
"""

from __future__ import annotations

RopeScale = tuple[float, float, float]

STANDARD: RopeScale = (1.0, 2.0, 2.0)
HIGH: RopeScale = (1.0, 3.16, 3.16)
STANDARD_SIDES = (480, 854)  # pixels; diffusers' rule: both sides within


def parse_rope_scale(value: str) -> RopeScale | None:
    """Three numbers for time, height and width; None for auto.

    Raises:
        ValueError: it is neither.
    """
    if value.strip().lower() == "auto":
        return None
    numbers = [float(part) for part in value.strip("[]() ").split(",")]
    if len(numbers) != 3 or min(numbers) <= 0:
        raise ValueError(f"{value!r} is not auto or three numbers above 0")
    return numbers[0], numbers[1], numbers[2]


def rope_scale_of_size(size: tuple[int, int] | None, flavour: str) -> RopeScale:
    """The scale that the stock pipeline samples this size with; without a size, the one of the flavour."""
    if size is None:
        return HIGH if flavour.endswith("-hd") else STANDARD
    low, high = STANDARD_SIDES
    return STANDARD if all(low <= side <= high for side in size) else HIGH
