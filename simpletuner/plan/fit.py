"""Making a run fit: the smallest change that would, and what `offload: auto` chooses.

Both walk through changes in an order: those that cost nothing but memory's use first, those that change numbers last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from simpletuner.config.load import CHOSEN, RunConfig
from simpletuner.config.schema import PLAIN_PRECISIONS, is_built
from simpletuner.config.speed import keeps_attention
from simpletuner.errors import Problem
from simpletuner.memory.device import Device
from simpletuner.models.spec import FamilySpec
from simpletuner.plan.budget import Budget, Phase, estimate, find_phases, fits, gigabytes, shortage
from simpletuner.plan.workload import Choice, Workload

HEADROOM = 0.05  # that auto leaves free: a driver, a browser, an estimate that is a little off
# Every n-th block checkpointed, from the fastest to the leanest; None is none of them.
DEPTHS = (None, 8, 4, 3, 2)
STREAMED = {"enable_group_offload": True, "group_offload_use_stream": True}
Built = Callable[[str], bool]


@dataclass(frozen=True)
class Change:
    """Something that takes memory off the device.

    Attributes:
        values: keys and what they are set to.
        words: how a person is told; by default the keys and their values.
        apply: what it does to a workload, where it is no key alone.
    """

    values: Mapping[str, Any]
    words: str = ""
    apply: Callable[[Workload], Workload] = lambda workload: workload

    def __str__(self) -> str:
        return self.words or ", ".join(f"{key} {_written(value)}" for key, value in self.values.items())

    def of(self, choice: Choice) -> Choice:
        config, workload = choice
        return config.with_values(self.values, CHOSEN), self.apply(workload)


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_fit(budget: Budget, built: Built = is_built) -> Iterator[Problem]:
    """What does not fit, and the smallest change that makes it; a warning where the user knows better."""
    device, fatal = budget.device, not budget.config.run.i_know_what_i_am_doing
    lacking = [text for phase in budget.phases if (text := shortage(phase, device)) is not None]
    if not lacking:
        return
    changes = smallest_change(budget, built)
    fitting = f"This would fit: {'; '.join(map(str, changes))}."
    advice = fitting if changes else _no_help(budget, lacking[0], built)
    if not device.is_gpu:
        advice += " To plan for a GPU elsewhere: simpletuner plan --device-memory 24."
    more = f" ({len(lacking) - 1} more)" if len(lacking) > 1 else ""
    message = f"{lacking[0]}{more}. {advice}"
    yield Problem("memory", message if not fatal else f"{message} i_know_what_i_am_doing goes on anyway.", fatal=fatal)


def _no_help(budget: Budget, told: str, built: Built) -> str:
    """What is still missing when everything possible has been changed, where that is another thing than was told."""
    changes = list(possible_changes(budget, built))
    phases = _phases((budget.config, budget.workload), changes, budget)
    rest = next(text for phase in phases if (text := shortage(phase, budget.device)) is not None)
    return "No setting makes it fit." if rest == told else f"With every setting that helps, {rest}."


def smallest_change(budget: Budget, built: Built = is_built) -> list[Change]:
    """The changes, in the order of `possible_changes`, that are needed together; empty when none suffice.

    They are taken up to the first that makes everything fit; those that turn out not to be needed are dropped again.
    """
    start: Choice = budget.config, budget.workload
    taken: list[Change] = []
    for change in possible_changes(budget, built):
        taken.append(change)
        if _fits(start, taken, budget):
            break
    else:
        return []
    for change in taken[:-1]:
        without = [each for each in taken if each is not change]
        if _fits(start, without, budget):
            taken = without
    return taken


def _fits(choice: Choice, changes: Sequence[Change], budget: Budget) -> bool:
    return fits(_phases(choice, changes, budget), budget.device)


def _phases(choice: Choice, changes: Sequence[Change], budget: Budget) -> list[Phase]:
    for change in changes:
        choice = change.of(choice)
    config, workload = choice
    return list(find_phases(config, budget.parts, workload, budget.parts.setup(config)))


def possible_changes(budget: Budget, built: Built) -> Iterator[Change]:
    """Changes that this configuration has not made yet, the gentlest first."""
    config, workload = budget.config, budget.workload
    yield from _lossless_changes(budget, built)
    if config.model.model_type == "lora" and config.precision.base_model_precision in PLAIN_PRECISIONS:
        yield from _if_built(built, "base_model_precision", "int8-quanto")
    if config.precision.text_encoder_1_precision in PLAIN_PRECISIONS:
        yield from _if_built(built, "text_encoder_1_precision", "int8-quanto")
    batch = max((bucket.batch for bucket in workload.buckets), default=1)
    while batch > 1:
        batch //= 2
        yield Change({"train_batch_size": batch}, apply=partial(Workload.with_batch, batch=batch))
    yield from _smaller_samples(workload, budget.parts.spec)
    if workload.previews:
        yield Change({"validation_disable": True}, apply=lambda before: replace(before, previews=[]))


def _smaller_samples(workload: Workload, spec: FamilySpec) -> Iterator[Change]:
    """Shorter clips, then smaller pictures, in the words of the dataset file."""
    longest = max((bucket.frames for bucket in workload.buckets), default=1)
    if longest > 1:
        halve = partial(Workload.scaled, spec=spec, frames=0.5)
        frames = max(bucket.frames for bucket in halve(workload).buckets)
        yield Change({}, f"num_frames {frames} instead of {longest}", halve)
    for share in (0.75, 0.5):
        words = f"a resolution {share:g} times as large"
        yield Change({}, words, partial(Workload.scaled, spec=spec, sides=share))


def _lossless_changes(budget: Budget, built: Built) -> Iterator[Change]:
    """Those that leave every number as it is (tiles of the VAE excepted)."""
    config = budget.config
    precision, caching = config.precision, config.caching
    if keeps_attention(config.speed):
        yield Change({"speed_keep_attention": False})
    if not precision.checkpoints_all:
        yield Change({"gradient_checkpointing": True, "gradient_checkpointing_interval": 1})
    if caching.vae_batch_size > 1:
        yield Change({"vae_batch_size": 1})
    if budget.device.is_gpu:
        yield from _offload_changes(config, built)
    if not caching.vae_enable_tiling:
        yield Change({"vae_enable_tiling": True})


def _offload_changes(config: RunConfig, built: Built) -> Iterator[Change]:
    """From the device into host memory."""
    offload = config.offload
    if config.model.model_type == "lora" and not offload.enable_group_offload and built("enable_group_offload"):
        yield Change(STREAMED)
    if not offload.offload_block_inputs:
        yield from _if_built(built, "offload_block_inputs", True)
    if not offload.group_offload_text_encoder:
        yield from _if_built(built, "group_offload_text_encoder", True)


def _if_built(built: Built, key: str, value: Any) -> Iterator[Change]:
    if built(key):
        yield Change({key: value})


def choose(budget: Budget, built: Built = is_built) -> Budget:
    """What `offload: auto` makes of a budget: the fastest settings that fit with some room to spare.

    Only keys that the user left unset are touched. When nothing fits, the leanest settings are returned, and
    `check_fit` says what is missing.
    """
    start: Choice = budget.config, budget.workload
    ways = list(_ways(budget, built))
    for change, reason in ways:
        if fits(_phases(start, [change], budget), budget.device, headroom=HEADROOM):
            return _with(budget, change, reason)
    return _with(budget, *ways[-1])


def _with(budget: Budget, change: Change, reason: str) -> Budget:
    config, workload = change.of((budget.config, budget.workload))
    fitted = estimate(config, budget.parts, workload, budget.device, budget.missing)
    decisions = [f"{key} {_written(value)}" for key, value in change.values.items()]
    return replace(fitted, decisions=[f"{', '.join(decisions) or 'nothing to change'}: {reason}"])


def _ways(budget: Budget, built: Built) -> Iterator[tuple[Change, str]]:
    """Settings from the fastest to the leanest, each with its reason."""
    config = budget.config
    free = {key: not config.is_explicit(key) and built(key) for key in OWN_KEYS}
    plain: dict[str, Any] = {}
    if free["gradient_checkpointing"] and free["gradient_checkpointing_interval"]:
        yield from _depths()
        plain = {"gradient_checkpointing": True, "gradient_checkpointing_interval": None}
    yield Change(plain), "the blocks are checkpointed, and everything stays on the device"
    if free["speed_keep_attention"] and keeps_attention(config.speed):
        plain["speed_keep_attention"] = False
        yield Change(plain), "attention is computed twice, which takes less memory"
    if config.model.model_type == "lora" and free["enable_group_offload"] and budget.device.is_gpu:
        streamed = {key: value for key, value in STREAMED.items() if free[key]}
        plain = {**plain, **streamed}
        yield from _streamed(budget, plain, free)
        if free["offload_block_inputs"]:
            plain["offload_block_inputs"] = True
    if free["base_model_precision"] and config.model.model_type == "lora":
        lean = {**plain, "base_model_precision": "int8-quanto"}
        yield Change(lean), f"in 16 bits the run does not fit {_room(budget.device)}"


OWN_KEYS = (
    "gradient_checkpointing", "gradient_checkpointing_interval", "speed_keep_attention", "enable_group_offload",
    "group_offload_use_stream", "group_offload_resident_blocks", "offload_block_inputs", "base_model_precision",
)  # fmt: skip


def _depths() -> Iterator[tuple[Change, str]]:
    """As few checkpointed blocks as possible: nothing is computed twice that memory can hold."""
    for depth in DEPTHS:
        if depth is None:
            yield Change({"gradient_checkpointing": False}), "memory holds every activation, so none is computed twice"
        else:
            values = {"gradient_checkpointing": True, "gradient_checkpointing_interval": depth}
            yield Change(values), f"memory holds the activations of all but every {depth}th block"


def _streamed(budget: Budget, plain: Mapping[str, Any], free: Mapping[str, bool]) -> Iterator[tuple[Change, str]]:
    """Blocks through slots, with as many residents as fit; then their inputs on the host, too."""
    blocks = len(budget.parts.transformer.blocks)
    residents = range(blocks - 1, -1, -1) if free["group_offload_resident_blocks"] else [None]
    for on_host in (False, True) if free["offload_block_inputs"] else (False,):
        for count in residents:
            values = dict(plain)
            if count is not None:
                values["group_offload_resident_blocks"] = count
            if on_host:
                values["offload_block_inputs"] = True
            where = " and their inputs wait in host memory" if on_host else ""
            stay = f", {count} of {blocks} stay" if count else ""
            yield Change(values), f"blocks are streamed{stay}{where}, to fit {_room(budget.device)}"


def _room(device: Device) -> str:
    return device.name if device.usable is None else gigabytes(device.usable)
