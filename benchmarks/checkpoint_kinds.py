"""What recomputing activations costs: every block, every second one, all but the attention's result."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.models import SIZES, clock_of
from benchmarks.timing import Ratio, arguments, compare, interleave, show
from benchmarks.variants import Settings, Variant, measure

KINDS: dict[str, Settings] = {
    "none": {"gradient_checkpointing": False},
    "every block": {"speed_keep_attention": False},
    "every second block": {"gradient_checkpointing_interval": 2, "speed_keep_attention": False},
    "all but attention": {"speed_keep_attention": True},
}
# Without it a real video model does not fit beside another one.
UNIT = "every block"


def main() -> None:
    parser = arguments(__doc__, SIZES)
    parser.add_argument("--steps", type=int, default=1, help="steps per round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ratios = on_gpu(options.size, options.rounds) if options.device == "cuda" else on_cpu(options)
    show(f"Activation checkpointing, {options.size} model on {options.device}, in units of {UNIT!r}", ratios, options)


def on_cpu(options: object) -> list[Ratio]:
    """Variants take turns."""
    size, steps, rounds = (vars(options)[name] for name in ("size", "steps", "rounds"))
    variants = {name: _repeat(Variant(size, "cpu", settings), steps) for name, settings in KINDS.items()}
    seconds = interleave(variants, rounds, clock_of("cpu"))
    return [compare(f"{name} / {UNIT}", seconds, name, UNIT) for name in KINDS if name != UNIT]


def on_gpu(size: str, rounds: int) -> list[Ratio]:
    """One after the other, so that each has the memory for itself; what does not fit is left out."""
    found = {}
    for name, settings in KINDS.items():
        try:
            found[name] = measure(size, "cuda", settings, steps=rounds)
        except torch.cuda.OutOfMemoryError:
            print(f"{name}: out of memory")
    unit = found[UNIT].seconds
    return [
        Ratio(
            f"{name} / {UNIT}",
            [report.seconds / unit for report in outcome.reports],
            note=f"peak {(outcome.peak_bytes or 0) / 2**30:.1f} GiB",
        )
        for name, outcome in found.items()
    ]


def _repeat(variant: Variant, times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            variant.step()

    return run


if __name__ == "__main__":
    main()
