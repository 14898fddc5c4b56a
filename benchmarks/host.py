"""Host time of a block, forward and backward: small pictures on a fast GPU wait for it.

    python -m benchmarks.host

The blocks are so small that launching takes longer than computing, on a GPU (`--device cuda`) and
on a CPU. The time of a block is the difference between two models of different depth.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from unittest import mock

from benchmarks.models import SHAPES, clock_of
from benchmarks.timing import Ratio, arguments, interleave, show
from benchmarks.variants import Settings, Variant

DEPTHS = (2, 10)
STEPS = 5  # a round
VARIANTS: dict[str, Settings] = {
    "stock": {"speed": "reference", "dynamo_backend": "no"},
    "fast": {"dynamo_backend": "no"},
    "compiled": {"dynamo_backend": "inductor"},
}
BAR = 1.2e-3  # seconds of a compiled block on a GPU machine's host


def build(settings: Settings, depth: int, device: str) -> Variant:
    """The tiny model with so many visual blocks, compiled and warm."""
    size = SHAPES["tiny"]
    deep = replace(size, settings={**size.settings, "num_visual_blocks": depth})
    with mock.patch.dict(SHAPES, {"tiny": deep}):
        variant = Variant("tiny", device, {"gradient_checkpointing": False, **settings})
    for _ in range(3):
        variant.step()
    return variant


def some_steps(variant: Variant) -> None:
    for _ in range(STEPS):
        variant.step()


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else None, ("tiny",), rounds=5)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    options = parser.parse_args()
    steps = {}
    for name in options.only:
        for depth in DEPTHS:
            variant = build(VARIANTS[name], depth, options.device)
            steps[f"{name} {depth}"] = partial(some_steps, variant)
    seconds = interleave(steps, options.rounds, clock_of(options.device))
    few, many = DEPTHS
    ratios = []
    for name in options.only:
        pairs = zip(seconds[f"{name} {many}"], seconds[f"{name} {few}"], strict=True)
        blocks = [(deep - shallow) / STEPS / (many - few) for deep, shallow in pairs]
        note = f"{statistics.median(blocks) * 1e3:.2f} ms a block"
        bar = 1.0 if name == "compiled" else None
        ratios.append(Ratio(name, [block / BAR for block in blocks], bar, note))
    show(f"Host time of a block in units of {BAR * 1e3:g} ms", ratios, options)


if __name__ == "__main__":
    main()
