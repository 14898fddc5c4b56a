"""How many graphs seven bucket shapes take, ours against `compile_repeated_blocks` of diffusers.

Graphs are counted, not timed, with a backend that compiles nothing; on a GPU each one more costs half a minute or more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.models import SHAPES, SIZES, make_batch, transformer_class
from benchmarks.timing import Ratio, arguments, show
from benchmarks.variants import OneBatch, Settings, Variant
from simpletuner.training.step import optimizer_step

BAR = 3
# Height and width in sixteenths of the side: what a dataset of many aspect ratios is sorted into.
BUCKETS = ((16, 16), (12, 20), (20, 12), (14, 18), (18, 14), (10, 24), (24, 10))
BACKEND = "aot_eager"


def main() -> None:
    parser = arguments(__doc__, SIZES, rounds=1)
    parser.set_defaults(size="tiny")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ours = graphs(options.size, options.device, {"dynamo_backend": BACKEND})
    ratios = [Ratio("graphs, ours", [ours], BAR)]
    if transformer_class(options.size)._repeated_blocks:
        stock = graphs(options.size, options.device, {"speed": "reference", "dynamo_backend": "no"}, repeated=True)
        ratios.append(
            Ratio("graphs, compile_repeated_blocks", [stock], note="8 is where torch gives up and runs eagerly")
        )
    show(f"Graphs over {len(BUCKETS)} bucket shapes, {options.size} model on {options.device}", ratios, options)


def graphs(size: str, device: str, settings: Settings, *, repeated: bool = False) -> int:
    """Graphs that a step at each shape makes.

    Args:
        repeated: let diffusers compile its blocks.
    """
    torch._dynamo.reset()
    counters.clear()
    variant = Variant(size, device, settings)
    model: Any = variant.assembly.transformer
    if repeated:
        model.compile_repeated_blocks(backend=BACKEND)
    frames, height, width = SHAPES[size].latents
    side = min(height, width)
    for step, (tall, wide) in enumerate(BUCKETS):
        latents = (frames, side * tall // 16 // 2 * 2, side * wide // 16 // 2 * 2)
        loader: Any = OneBatch(make_batch(size, 1, latents), device)
        optimizer_step(variant.assembly, loader, step)
    return int(counters["stats"]["unique_graphs"])


if __name__ == "__main__":
    main()
