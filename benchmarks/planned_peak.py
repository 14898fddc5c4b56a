"""The peak of a step against what `simpletuner plan` says of it before a weight is loaded.

On a GPU the allocator's own peak counts. On a CPU the profiler's list of allocations stands in for it, added to the
bytes of weights and optimizer state that are there before the step; streaming moves nothing there and is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import SHAPES, SIZES, cost_of, hollow_transformer, lora_targets, make_config
from benchmarks.timing import Ratio, arguments, show
from benchmarks.variants import COMMON, Settings, Variant, measure
from simpletuner.budget.estimate import step_memory
from simpletuner.budget.parts import Parts, kernels_on
from simpletuner.models.cost import BatchShape
from simpletuner.models.registry import FAMILIES

BAR = 1.10
KINDS: dict[str, Settings] = {
    "every block checkpointed": {"speed_keep_attention": False},
    "attention kept": {"speed_keep_attention": True},
    "no checkpointing": {"gradient_checkpointing": False},
}
RELEASED: Settings = {"model_type": "full", "optimizer_release_gradients": True}
ON_GPU: dict[str, Settings] = {
    "streamed": {"enable_group_offload": True, "group_offload_use_stream": True},
    "streamed, inputs on the host": {
        "enable_group_offload": True, "group_offload_use_stream": True, "offload_block_inputs": True,
    },
    "full, gradients released": RELEASED,
    "full, gradients released, state on the host": {**RELEASED, "offload_optimizer_state": True},
}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else None, SIZES, rounds=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = KINDS | (ON_GPU if options.device == "cuda" else {})
    ratios = []
    for name, settings in kinds.items():
        try:
            found = measured_peak(options.size, options.device, settings)
        except torch.cuda.OutOfMemoryError:
            print(f"{name}: out of memory")
            continue
        planned = planned_peak(options.size, options.device, settings)
        note = f"measured {found / 1e9:.3f} GB, planned {planned / 1e9:.3f} GB"
        ratios.append(Ratio(f"{name}: measured / planned", [found / planned], BAR, note))
    show(f"Peak of a step against the plan, {options.size} model on {options.device}", ratios, options)


def planned_peak(size: str, device: str, settings: Settings, latents: tuple[int, int, int] | None = None) -> float:
    """Bytes that the plan expects of a step with one sample."""
    shape = SHAPES[size]
    spec = FAMILIES[shape.family]
    precision = "no" if device == "cpu" else "bf16"
    config = make_config(size, **{"mixed_precision": precision, **COMMON, **settings})
    kernels = kernels_on(config, spec, is_gpu=device == "cuda")
    cost = cost_of(spec.cost, hollow_transformer(size), kernels)
    parts = Parts(spec, cost, lora_targets(size), {}, 0, 0, ())
    frames, height, width = latents or shape.latents
    load = BatchShape(1, frames, height // spec.patch_size, width // spec.patch_size, shape.caption)
    return step_memory(cost, parts.setup(config), load).total


def measured_peak(size: str, device: str, settings: Settings) -> float:
    """Bytes that a step with one sample takes at most."""
    if device == "cuda":
        return float(measure(size, device, settings, warm=2, steps=2).peak_bytes or 0)
    variant = Variant(size, device, settings)
    variant.step()
    return peak_of_step(variant, device)


def peak_of_step(variant: Variant, device: str) -> float:
    """Bytes that steps have taken at most on a GPU; on a CPU, those of one more step."""
    if device == "cuda":
        return float(torch.cuda.max_memory_allocated())
    before = _resident_bytes(variant)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        variant.step()
    events: Any = profiler.profiler.kineto_results.events()
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return float(before + peak)


def _resident_bytes(variant: Variant) -> int:
    """Weights, buffers and the optimizer's state; of what is sharded, this process's part."""
    model, optimizer = variant.assembly.transformer, variant.assembly.optimizer
    state = [each for values in optimizer.state.values() for each in values.values() if isinstance(each, torch.Tensor)]
    tensors = (*model.parameters(), *model.buffers(), *state)
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


if __name__ == "__main__":
    main()
