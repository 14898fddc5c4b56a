"""Making a run fit: the smallest change that would.

Changes are tried in an order: those that cost nothing but memory's use first, those that change numbers last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from simpletuner.config.load import CHOSEN, RunConfig
from simpletuner.config.schema import PLAIN_PRECISIONS, is_built
from simpletuner.config.speed import graph_key, keeps_attention
from simpletuner.errors import Problem
from simpletuner.models.spec import FamilySpec
from simpletuner.plan.budget import Budget, Phase, find_phases, fits, shortage
from simpletuner.plan.workload import Choice, Workload

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
        return self.words or ", ".join(f"{key} {written(value)}" for key, value in self.values.items())

    def of(self, choice: Choice) -> Choice:
        config, workload = choice
        return config.with_values(self.values, CHOSEN), self.apply(workload)


def written(value: Any) -> str:
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
    others = len(lacking) - 1
    more = f" ({others} more phase{'s lack' if others > 1 else ' lacks'} room)" if others else ""
    message = f"{lacking[0]}{more}. {advice}"
    yield Problem("memory", message if not fatal else f"{message} i_know_what_i_am_doing goes on anyway.", fatal=fatal)


def _no_help(budget: Budget, told: str, built: Built) -> str:
    """What is still missing when everything possible has been changed, where that is another thing than was told."""
    changes = list(possible_changes(budget, built))
    phases = phases_after((budget.config, budget.workload), changes, budget)
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
    return fits(phases_after(choice, changes, budget), budget.device)


def phases_after(choice: Choice, changes: Sequence[Change], budget: Budget) -> list[Phase]:
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
    offload, may_move = config.offload, graph_key(config.launch) is None
    streams = offload.enable_group_offload or not built("enable_group_offload")
    if config.model.model_type == "lora" and may_move and not streams:
        # The two exclude each other.
        yield Change({**STREAMED, **({"enable_model_cpu_offload": False} if offload.enable_model_cpu_offload else {})})
    if may_move and not offload.offload_block_inputs:
        yield from _if_built(built, "offload_block_inputs", True)
    if not offload.group_offload_text_encoder:
        yield from _if_built(built, "group_offload_text_encoder", True)


def _if_built(built: Built, key: str, value: Any) -> Iterator[Change]:
    if built(key):
        yield Change({key: value})
