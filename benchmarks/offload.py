"""A training step with the transformer's frozen weights streaming, against the same step with all of them resident."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.models import SIZES, clock_of, make_batch
from benchmarks.models import make_config as config_of
from benchmarks.step import RATE, ours
from benchmarks.timing import Ratio, arguments, compare, interleave, show

# What is offloaded, beside the resident step.
VARIANTS = {
    "streamed": {"enable_group_offload": True, "group_offload_use_stream": True},
    "pairs": {"enable_group_offload": True, "group_offload_use_stream": True, "group_offload_blocks_per_group": 2},
    "streamed, inputs on the host": {
        "enable_group_offload": True, "group_offload_use_stream": True, "offload_block_inputs": True,
    },
}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, SIZES)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="samples per step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bar = 1.05 if options.device == "cpu" else 1.03
    base = {
        "mixed_precision": "no" if options.device == "cpu" else "bf16",
        "gradient_checkpointing": True,
        "learning_rate": RATE,
    }
    variants: dict[str, dict[str, Any]] = {"resident": {}, **VARIANTS}
    ratios: list[Ratio] = []
    for count in options.batches:
        batch = make_batch(options.size, count)
        configs = {name: config_of(options.size, **base, **more) for name, more in variants.items()}
        steps = {name: ours(options.size, options.device, config, batch) for name, config in configs.items()}
        seconds = interleave(steps, options.rounds, clock_of(options.device))
        ratios += [
            compare(f"{name} / resident, batch {count}", seconds, name, "resident", bar if name == "streamed" else None)
            for name in VARIANTS
        ]
        del steps
    show(f"Offloaded step, {options.size} model on {options.device}", ratios, options)


if __name__ == "__main__":
    main()
