"""What `offload: auto` chooses: the fastest settings by the estimate that fit a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from simpletuner.config.load import RunConfig
from simpletuner.config.schema import is_built
from simpletuner.config.speed import graph_key, keeps_attention
from simpletuner.memory.device import Device
from simpletuner.plan.budget import Budget, estimate, fits, gigabytes, shortage
from simpletuner.plan.fit import STREAMED, Built, Change, phases_after, written
from simpletuner.plan.workload import Choice

HEADROOM = 0.05  # that auto leaves free: a driver, a browser, an estimate that is a little off
# Every n-th block checkpointed, from the fastest to the leanest; None is none of them.
DEPTHS = (None, 8, 4, 3, 2)
OWN_KEYS = (
    "gradient_checkpointing", "gradient_checkpointing_interval", "speed_keep_attention", "enable_group_offload",
    "group_offload_use_stream", "group_offload_resident_blocks", "offload_block_inputs", "base_model_precision",
)  # fmt: skip
Way = tuple[Change, str]  # with its reason


def choose(budget: Budget, built: Built = is_built) -> Budget:
    """What `offload: auto` makes of a budget: the fastest settings that fit with some room to spare.

    Only keys that the user left unset are touched. When nothing fits, the leanest settings are returned, and
    `check_fit` says what is missing.
    """
    budget = _with_encoders(budget, built)
    ladders = [list(ladder) for ladder in _ladders(budget, built)]
    leanest = _in_8_bits(budget, built, ladders[-1][-1])
    beyond = _beyond(budget, leanest)
    fitting = [way for ladder in ladders if (way := _first_that_fits(ladder, budget, beyond)) is not None]
    if fitting:  # the earlier one, where two are equally fast
        return min((_with(budget, *way) for way in fitting), key=lambda chosen: chosen.step_seconds)
    return _with(budget, *leanest)


def _beyond(budget: Budget, leanest: Way) -> frozenset[str]:
    """Phases beside the steps that lack room whatever is chosen here: no reason to make the steps slower.

    `check_fit` says what would help them, tiles of the VAE for instance.
    """
    phases = phases_after((budget.config, budget.workload), [leanest[0]], budget)
    lacking = [phase for phase in phases if shortage(phase, budget.device, headroom=HEADROOM)]
    return frozenset(phase.name for phase in lacking if not phase.trains)


def _first_that_fits(ladder: Sequence[Way], budget: Budget, beyond: frozenset[str]) -> Way | None:
    start: Choice = budget.config, budget.workload
    for change, reason in ladder:
        phases = [phase for phase in phases_after(start, [change], budget) if phase.name not in beyond]
        if fits(phases, budget.device, headroom=HEADROOM):
            return change, reason
    return None


def _with_encoders(budget: Budget, built: Built) -> Budget:
    """What text encoders and VAE need before training; each is chosen only where its own phase lacks room."""
    lacking = {phase.name: shortage(phase, budget.device, headroom=HEADROOM) for phase in budget.phases}
    encoders: dict[str, dict[str, Any]] = {
        "captions": {"group_offload_text_encoder": True},
        budget.parts.spec.samples: {"vae_batch_size": 1},
    }
    for subject, values in encoders.items() if budget.device.is_gpu else ():
        config, reason = budget.config, lacking.get(f"encoding {subject}")
        free = all(not config.is_explicit(key) and built(key) for key in values)
        if reason and free and values.items() - config.flat().items():
            budget = _with(budget, Change(values), reason)
    return budget


def _with(budget: Budget, change: Change, reason: str) -> Budget:
    config, workload = change.of((budget.config, budget.workload))
    fitted = estimate(config, budget.parts, workload, budget.device, budget.missing)
    chosen = [f"{key} {written(value)}" for key, value in change.values.items()]
    decision = f"{', '.join(chosen) or 'nothing to change'}: {reason}"
    return replace(fitted, decisions=[*budget.decisions, decision])


def _ladders(budget: Budget, built: Built) -> Iterator[Iterable[Way]]:
    """Ladders of settings; on each, one step further down is slower and leaner."""
    config = budget.config
    free = {key: not config.is_explicit(key) and built(key) for key in OWN_KEYS}
    if graph_key(config.launch) is not None:
        free |= {"enable_group_offload": False, "offload_block_inputs": False}
    if free["gradient_checkpointing"] and free["gradient_checkpointing_interval"]:
        yield _depths()
    kinds: list[tuple[dict[str, Any], str]] = [({}, "")]  # unset, every block is checkpointed
    if free["speed_keep_attention"] and keeps_attention(config.speed):
        kinds.append(({"speed_keep_attention": False}, ", attention is computed twice"))
    streams = _may_stream(config) and free["enable_group_offload"] and budget.device.is_gpu
    streamed = {key: value for key, value in STREAMED.items() if free[key]}
    for on_host in (False, True) if free["offload_block_inputs"] and budget.device.is_gpu else (False,):
        yield [_resident(values, on_host=on_host, twice=twice) for values, twice in kinds]
        for values, twice in kinds if streams else ():
            yield _streamed(budget, {**values, **streamed}, free, on_host=on_host, twice=twice)


def _in_8_bits(budget: Budget, built: Built, leanest: Way) -> Way:
    """The last resort, where it may be taken."""
    key, config = "base_model_precision", budget.config
    if config.is_explicit(key) or not built(key) or config.model.model_type != "lora":
        return leanest
    lean = Change({**leanest[0].values, key: "int8-quanto"})
    return lean, f"in 16 bits the run does not fit {_room(budget.device)}"


def _may_stream(config: RunConfig) -> bool:
    """Only frozen weights stream, and not where previews move all of them."""
    return config.model.model_type == "lora" and not config.offload.enable_model_cpu_offload


def _depths() -> Iterator[Way]:
    """As few checkpointed blocks as possible: nothing is computed twice that memory can hold."""
    for depth in DEPTHS:
        if depth is None:
            yield Change({"gradient_checkpointing": False}), "memory holds every activation, so none is computed twice"
        else:
            values = {"gradient_checkpointing": True, "gradient_checkpointing_interval": depth}
            yield Change(values), f"memory holds the activations of all but every {depth}th block"


def _resident(values: Mapping[str, Any], *, on_host: bool, twice: str) -> Way:
    """All weights on the device, every block checkpointed."""
    where = "their inputs wait in host memory" if on_host else "everything stays on the device"
    inputs = {"offload_block_inputs": True} if on_host else {}
    return Change({**values, **inputs}), f"the blocks are checkpointed{twice}, and {where}"


def _streamed(
    budget: Budget, plain: Mapping[str, Any], free: Mapping[str, bool], *, on_host: bool, twice: str
) -> Iterator[Way]:
    """Blocks through slots, with as many residents as fit."""
    blocks = len(budget.parts.transformer.blocks)
    for count in range(blocks - 1, -1, -1) if free["group_offload_resident_blocks"] else [None]:
        values = dict(plain)
        if count is not None:
            values["group_offload_resident_blocks"] = count
        if on_host:
            values["offload_block_inputs"] = True
        where = " and their inputs wait in host memory" if on_host else ""
        stay = f", {count} of {blocks} stay" if count else ""
        yield Change(values), f"blocks are streamed{stay}{where}{twice}, to fit {_room(budget.device)}"


def _room(device: Device) -> str:
    return device.name if device.usable is None else gigabytes(device.usable)
