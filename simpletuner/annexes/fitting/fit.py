"""What makes a run fit into memory: the advice of the error, and the choice of `offload: auto`.

Both walk one ordered list (`possible_changes`): changes that only cost time come first, changes of
results last.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from simpletuner.budget.budget import DECODING, Budget
from simpletuner.budget.device import gigabytes
from simpletuner.budget.phases import PREVIEWS
from simpletuner.budget.workload import Workload
from simpletuner.config.optimizers import may_change
from simpletuner.config.schema import CHOSEN, PLAIN_PRECISIONS, RunConfig
from simpletuner.config.speed import graph_key, keeps_attention, uses_own_arithmetic
from simpletuner.config.types import as_user_text
from simpletuner.errors import Problem, Problems, counted
from simpletuner.planning.checks import check_conflicts
from simpletuner.planning.environment import check_launch, check_offload, may_shard
from simpletuner.planning.plans import SamplePlan

HEADROOM = 0.05  # share of memory that auto leaves free, for other programs and estimation errors
# Groups of settings that make one change; the first key decides, see `Change`.
STREAMED = {"enable_group_offload": True, "group_offload_use_stream": True}
RELEASED = {"optimizer_release_gradients": True}
STATE_ON_HOST = {**RELEASED, "offload_optimizer_state": True}
LOW_BIT = {"optimizer": "ao-adamw8bit"}
DISK = "group_offload_to_disk_path"
KEPT = "gradient_checkpointing_kept_blocks"
# Ways to decode previews in less memory, and what they change.
DECODINGS = {"strips": "only their rounding", "tiles": "pixels slightly at the seams"}

# Rendering is fitted into memory like a run.
AnyBudget = Budget[SamplePlan]


@dataclass(frozen=True)
class Change:
    """A change that lowers peak memory.

    Attributes:
        values: config keys and their new values; the first key makes the change, the others
            accompany it.
        role: when auto makes the change: if it is the fastest way to fit (`time`), if a phase
            before training does not fit (`encoding`), if nothing else helps (`last`), or never
            (`user`).
        reason: the explanation that auto reports; for the role `encoding`, the side effect.
        words: description for messages; by default the keys and values.
        apply: effect on the workload, if any.
    """

    values: Mapping[str, Any]
    role: Literal["time", "encoding", "last", "user"] = "user"
    reason: str = ""
    words: str = ""
    apply: Callable[[Workload], Workload] = lambda workload: workload

    def __str__(self) -> str:
        if self.words:
            return self.words
        return ", ".join(f"{key} {as_user_text(value)}" for key, value in self.values.items())

    def of(self, budget: AnyBudget) -> AnyBudget:
        """The budget after this change."""
        return replace(budget.under(self.values, CHOSEN), workload=self.apply(budget.workload))

    def new_values(self, budget: AnyBudget) -> dict[str, Any]:
        """The values that differ from the settings of a budget."""
        flat = budget.config.flat
        return {key: value for key, value in self.values.items() if flat[key] != value}


def _after(budget: AnyBudget, changes: Sequence[Change]) -> AnyBudget:
    for change in changes:
        budget = change.of(budget)
    return budget


def check_fit(budget: AnyBudget, report: Problems) -> None:
    """Report a phase that does not fit, with the smallest change that helps.

    With `i_know_what_i_am_doing`, the problem is a warning.
    """
    shortages = [text for _, text in budget.shortages()]
    if not shortages:
        return
    changes = smallest_change(budget)
    if changes:
        advice = f"This would fit: {'; '.join(map(str, changes))}."
    else:
        _, remaining = _after(budget, list(possible_changes(budget))).shortages()[0]
        # If the shortage is unchanged, no change affects that phase.
        advice = "No setting makes it fit."
        if remaining != shortages[0]:
            advice = f"Even with every setting that helps, {remaining}."
    if not budget.device.is_gpu:
        advice += " To plan for a GPU elsewhere, run simpletuner plan with --device-memory 24."
    if budget.guess:
        advice += f" {budget.guess}."
    is_fatal = not budget.config.run.i_know_what_i_am_doing
    if is_fatal:
        advice += " To run anyway, set i_know_what_i_am_doing."
    message = shortages[0]
    if len(shortages) > 1:
        phases = counted(len(shortages) - 1, "more phase does", "more phases do")
        message += f" ({phases} not fit)"
    report.append(Problem("memory", f"{message}. {advice}", is_fatal, _settings_of(changes)))


def _settings_of(changes: Sequence[Change]) -> dict[str, Any]:
    """The changes as settings; empty if a change is not a setting, such as shorter clips."""
    settings: dict[str, Any] = {}
    for change in changes:
        if not change.values:
            return {}
        settings.update(change.values)
    return settings


def smallest_change(budget: AnyBudget) -> list[Change]:
    """A minimal set of changes that fits, mildest first; empty if nothing fits.

    Changes are added until everything fits; then unnecessary ones are removed.
    """
    taken: list[Change] = []
    for change in possible_changes(budget):
        taken.append(change)
        if _after(budget, taken).fits:
            break
    else:
        return []
    # The last change made it fit, so it is needed.
    for change in taken[:-1]:
        without = [kept for kept in taken if kept is not change]
        if _after(budget, without).fits:
            taken = without
    return taken


def possible_changes(budget: AnyBudget) -> Iterator[Change]:
    """Changes that this configuration does not have yet, mildest first."""
    config = budget.config
    workload = budget.workload
    room = _room(budget)
    yield from _step_changes(budget)
    yield from _phase_changes(budget)
    is_quantised = config.precision.base_model_precision not in PLAIN_PRECISIONS
    if config.model.model_type == "lora" and not is_quantised:
        reason = f"in 16 bits the run does not fit {room}"
        yield Change({"base_model_precision": "int8-quanto"}, "last", reason)
    if may_change(config, LOW_BIT):
        yield Change(LOW_BIT, "last", f"without state in 8 bits the run does not fit {room}")
    if config.precision.text_encoder_1_precision in PLAIN_PRECISIONS:
        yield Change({"text_encoder_1_precision": "int8-quanto"})
    yield from _shared_tokens(budget)
    batch = max((bucket.batch for bucket in workload.buckets), default=1)
    while batch > 1:
        batch //= 2
        yield Change({"train_batch_size": batch}, apply=partial(Workload.with_batch, batch=batch))
    yield from _smaller_samples(budget)
    if workload.previews and workload.buckets:
        yield Change({"validation_disable": True}, apply=_without_previews)


def _without_previews(workload: Workload) -> Workload:
    return replace(workload, previews=[])


def _step_changes(budget: AnyBudget) -> Iterator[Change]:
    """Changes to training that do not change results."""
    config = budget.config
    room = _room(budget)
    kept = config.precision.gradient_checkpointing_kept_blocks
    if budget.workload.encoded_in_training:
        words = "latents encoded before training, without vae_cache_ondemand and vae_cache_disable"
        yield Change({}, words=words, apply=Workload.encoded_ahead)
    if may_change(config, RELEASED):
        yield Change(RELEASED, "time", "each gradient is freed as soon as its weight is updated")
    if keeps_attention(config.speed):
        reason = f"attention is recomputed, to fit {room}"
        yield Change({"speed_keep_attention": False}, "time", reason)
    if not config.precision.checkpoints_all:
        every_block = {"gradient_checkpointing": True, "gradient_checkpointing_interval": 1}
        if kept:
            every_block[KEPT] = 0
        yield Change(every_block)
    if config.caching.vae_batch_size > 1:
        yield Change({"vae_batch_size": 1})
    if budget.device.has_own_memory:
        yield from _offload_changes(budget)


def _offload_changes(budget: AnyBudget) -> Iterator[Change]:
    """Changes that move weights and state off a GPU."""
    config = budget.config
    offload = config.offload
    room = _room(budget)
    if config.model.model_type == "full":
        yield from _sharding(budget)
    if _may_stream(budget):
        if offload.enable_model_cpu_offload:  # which excludes streaming
            yield Change({**STREAMED, "enable_model_cpu_offload": False})
        else:
            yield Change(STREAMED, "time", f"blocks are streamed, to fit {room}")
    if may_change(config, STATE_ON_HOST):
        reason = "state is on the device only while its weight is updated"
        yield Change(STATE_ON_HOST, "time", reason)
    if _may_move(budget) and not offload.offload_block_inputs:
        reason = "the blocks are checkpointed, and their inputs are kept in host memory"
        yield Change({"offload_block_inputs": True}, "time", reason)


def _phase_changes(budget: AnyBudget) -> Iterator[Change]:
    """Changes to loading and to the phases before and after training."""
    offload = budget.config.offload
    caching = budget.config.caching
    if budget.device.has_own_memory and not offload.group_offload_text_encoder:
        yield Change({"group_offload_text_encoder": True}, "encoding")
    streams = budget.device.has_own_memory and offload.enable_group_offload
    if offload.group_offload_to_disk_path is None and (streams or _may_stream(budget)):
        # The estimate is the same for every folder; the message leaves the choice to the user.
        yield Change({DISK: "offloaded"}, words=f"{DISK} with a folder on a fast disk")
    if budget.parts.spec.slices_convolutions and not caching.vae_enable_patch_conv:
        yield Change({"vae_enable_patch_conv": True}, "encoding")
    yield from _decodings(budget)
    if not caching.vae_enable_tiling:
        side_effect = "; latents change at the tiles' seams"
        yield Change({"vae_enable_tiling": True}, "encoding", side_effect)


def _decodings(budget: AnyBudget) -> Iterator[Change]:
    """Changes that decode previews in less memory."""
    ways = ["whole", "tiles"]
    if budget.parts.spec.decodes_in_strips:
        ways = ["whole", "strips", "tiles"]
    current = budget.config.validation.validation_decoding
    if current not in ways or not budget.workload.previews:
        return
    leaner = ways[ways.index(current) + 1 :]
    for way in leaner:
        reason = (
            f"previews are decoded in {way} to fit {_room(budget)}, which changes {DECODINGS[way]}"
        )
        yield Change({DECODING: way}, "time", reason)


def _may_move(budget: AnyBudget) -> bool:
    """Whether tensors can leave the device during a step."""
    # CUDA graphs need fixed addresses.
    return budget.device.has_own_memory and graph_key(budget.config.launch) is None


def _may_stream(budget: AnyBudget) -> bool:
    """Whether blocks could be streamed but are not: their weights must be frozen and unsharded."""
    config = budget.config
    if config.offload.enable_group_offload or config.launch.fsdp_enable:
        return False
    return _may_move(budget) and config.model.model_type == "lora"


def _shared_tokens(budget: AnyBudget) -> Iterator[Change]:
    """Split the tokens of a sample among as many processes as heads and machines allow.

    Steps then have fewer samples.
    """
    config = budget.config
    if budget.parts.spec.heads is None or not uses_own_arithmetic(config.speed):
        return
    cost = budget.parts.transformer
    heads = cost.hidden // cost.head
    size = math.gcd(config.launch.local_processes, heads)
    if size <= config.launch.sequence_parallel_size:
        return
    change = Change(
        {"sequence_parallel_size": size},
        words=f"sequence_parallel_size {size}, with fewer samples a step",
    )
    report = Problems()
    check_conflicts(change.of(budget).config, report)
    if not report.are_fatal:
        yield change


def _smaller_samples(budget: AnyBudget) -> Iterator[Change]:
    """Shorter clips, then smaller pictures, described by keys of datasets."""
    workload = budget.workload
    spec = budget.parts.spec
    samples = workload.buckets or workload.previews  # previews if nothing is trained
    longest = max((bucket.frames for bucket in samples), default=1)
    if longest > 1:
        halve = partial(Workload.scaled, spec=spec, frames=0.5)
        halved = halve(workload)
        frames = max(bucket.frames for bucket in halved.buckets or halved.previews)
        yield Change({}, words=f"num_frames {frames} instead of {longest}", apply=halve)
    for share in (0.75, 0.5):
        words = f"a resolution {share:g} times as large"
        yield Change({}, words=words, apply=partial(Workload.scaled, spec=spec, sides=share))


def _sharding(budget: AnyBudget) -> list[Change]:
    """FSDP2, if it is allowed and the user has not set it."""
    config = budget.config
    if not may_shard(config) or config.launch.fsdp_enable or config.is_explicit("fsdp_enable"):
        return []
    reason = f"each process keeps a share of the weights, to fit {_room(budget)}"
    return [Change({"fsdp_enable": True}, reason=reason)]


def _room(budget: AnyBudget) -> str:
    """What a run must fit, for messages: the usable memory, else the name of the device."""
    device = budget.device
    return device.name if device.usable is None else gigabytes(device.usable)


def choose(budget: AnyBudget) -> AnyBudget:
    """The choice of `offload: auto`: the fastest settings that fit with `HEADROOM`.

    Tries every selection of the changes that only cost time, with as many blocks as fit kept on the
    device or not recomputed. Changes of results come last. Keys that the user set are kept. If
    nothing fits, the settings with the lowest peak are returned, and `check_fit` reports the
    shortage.
    """
    # Phases before training come first: changes for them do not slow down steps.
    for change in _open_changes(budget, "encoding"):
        budget = _with_if_it_helps(budget, change)
    # As configured, then sharded, then with one last resort. The first start that can be made to
    # fit wins.
    sharded = _sharding(budget)
    starts = [budget]
    for change in [*sharded, *_open_changes(budget, "last")]:
        starts.append(_with_changes(budget, [change]))
    leanest = [_after(start, _open_changes(start, "time")) for start in starts]
    # A phase that no start can be made to fit, such as previews that are too large, must not slow
    # down the steps: changes for it would be made in vain.
    hopeless = frozenset.intersection(*[_phases_that_lack_memory(lean) for lean in leanest])
    for start in starts:
        fastest = _fastest(start, hopeless)
        if fastest is None:
            continue
        if sharded and start is budget:
            return _with_reason_for_ddp(fastest)
        return fastest
    # Nothing fits: take the lowest peak, so that `check_fit` reports the smallest shortage.
    peaks = []
    for lean in leanest:
        on_device, _ = lean.peaks
        peaks.append(on_device)
    start = starts[peaks.index(min(peaks))]
    return _with_changes(start, _time_changes(start, hopeless))


def _open_changes(budget: AnyBudget, role: str) -> list[Change]:
    """The changes of a role that override no key set by the user."""
    is_explicit = budget.config.is_explicit
    changes = []
    for change in possible_changes(budget):
        if change.role != role:
            continue
        values = change.new_values(budget)
        # The first key makes the change; the others only accompany it, and may stay as the user set
        # them.
        deciding_key = next(iter(values))
        if not is_explicit(deciding_key):
            unset = {key: value for key, value in values.items() if not is_explicit(key)}
            changes.append(replace(change, values=unset))
    return changes


def _time_changes(budget: AnyBudget, hopeless: frozenset[str]) -> list[Change]:
    """Changes that only cost time, without ways of decoding previews that cannot fit anyway."""
    changes = _open_changes(budget, "time")
    if PREVIEWS in hopeless:
        changes = [change for change in changes if DECODING not in change.values]
    return changes


def _phases_that_lack_memory(budget: AnyBudget) -> frozenset[str]:
    """The phases before and after training that do not fit."""
    shortages = budget.shortages(headroom=HEADROOM)
    return frozenset(phase.name for phase, _ in shortages if not phase.trains)


def _with_if_it_helps(budget: AnyBudget, change: Change) -> AnyBudget:
    """The budget with a change, if that helps a phase before training that does not fit."""
    after = change.of(budget)
    for phase, phase_after in zip(budget.phases, after.phases, strict=True):
        if phase.trains or phase.name == PREVIEWS:
            continue
        shortage = phase.shortage(budget.device, headroom=HEADROOM)
        if shortage and phase_after.device < phase.device:
            decision = f"{change}: {shortage}{change.reason}"
            return replace(after, decisions=[*budget.decisions, decision])
    return budget


def _with_changes(budget: AnyBudget, changes: Sequence[Change]) -> AnyBudget:
    """The budget after changes, with their reasons as decisions."""
    for change in changes:
        # Only what is new, for the text of the decision.
        new = replace(change, values=change.new_values(budget))
        decisions = [*budget.decisions, f"{new}: {change.reason}"]
        budget = replace(change.of(budget), decisions=decisions)
    return budget


def _with_reason_for_ddp(chosen: AnyBudget) -> AnyBudget:
    """Add the reason why weights are not sharded, although they could be."""
    is_lora = chosen.config.model.model_type == "lora"
    more = ", while FSDP2 would gather the whole model in every pass" if is_lora else ""
    reason = f"DDP: it fits every process, which sends {gigabytes(chosen.sent.total)} a step{more}"
    return replace(chosen, decisions=[reason, *chosen.decisions])


def _fastest(start: AnyBudget, hopeless: frozenset[str]) -> AnyBudget | None:
    """The budget with the fastest selection of changes that fits; None if none fits."""
    fitting: list[list[Change]] = []
    for selected in _selections(_time_changes(start, hopeless)):
        level = _best_level(_after(start, selected), selected, hopeless)
        if level is not None:
            fitting.append([*selected, *level])
    if not fitting:
        return None
    # `min` returns the first of equals, and selections are ordered mildest first.
    fastest = min(fitting, key=lambda changes: _after(start, changes).step_seconds)
    if fastest:
        return _with_changes(start, fastest)
    blocks = "the blocks are checkpointed, and " if start.workload.buckets else ""
    reason = f"{blocks}everything stays on the device"
    return _with_changes(start, [Change({}, words="nothing to change", reason=reason)])


def _selections(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Every selection of the changes, mildest first."""
    for number in range(1 << len(changes)):
        # A bit of the number for each change; the mildest has the lowest.
        selected = [change for place, change in enumerate(changes) if number >> place & 1]
        omitted = [change for change in changes if change not in selected]
        # STATE_ON_HOST includes RELEASED: without it, it would repeat the selection of both.
        if not any(_includes(selected, change) for change in omitted):
            yield selected


def _includes(selected: Sequence[Change], change: Change) -> bool:
    """Whether a selected change has all the values of another change."""
    return any(change.values.items() <= larger.values.items() for larger in selected)


def _best_level(
    budget: AnyBudget, selected: Sequence[Change], hopeless: frozenset[str]
) -> list[Change] | None:
    """The fastest level of `_levels` that fits; None if none does."""

    def fits(level: Sequence[Change], *, on_host: bool = False) -> bool:
        after = _after(budget, level)
        device = after.device if on_host else replace(after.device, host_memory=None)
        phases = [phase for phase in after.phases if phase.name not in hopeless]
        return all(phase.shortage(device, headroom=HEADROOM) is None for phase in phases)

    keys: set[str] = set()
    for change in selected:
        keys |= change.values.keys()
    levels = _levels(budget, keys)
    # Levels are sorted by device memory: those that fit come first, and the last of them is the
    # fastest.
    count = bisect_left(levels, True, key=lambda level: not fits(level))
    if count == 0:
        return None
    best = levels[count - 1]
    # Host memory is checked only now: what stays on the device does not take any.
    return best if fits(best, on_host=True) else None


def _levels(budget: AnyBudget, keys: set[str]) -> list[list[Change]]:
    """What may stay on the device beside the changes of some keys, in order of device memory."""
    config = budget.config
    blocks = len(budget.parts.transformer.blocks)
    levels: list[list[Change]] = [[]]
    residents = "group_offload_resident_blocks"
    checkpointing = "gradient_checkpointing"
    if "enable_group_offload" in keys and not config.is_explicit(residents):
        # All blocks resident would mean no streaming, which is another selection.
        for count in range(1, blocks):
            reason = f"{count} of {blocks} blocks stay resident"
            levels.append([Change({residents: count}, reason=reason)])
    user_set = [checkpointing, f"{checkpointing}_interval", KEPT]
    is_open = not any(config.is_explicit(key) for key in user_set)
    # Memory that these changes save at the cost of time is not spent on activations.
    saving = keys & {"enable_group_offload", "speed_keep_attention", "offload_block_inputs"}
    if is_open and not saving and budget.workload.buckets:
        for count in range(1, blocks):
            reason = f"the activations of {count} of {blocks} blocks fit, the others are recomputed"
            levels.append([Change({KEPT: count}, reason=reason)])
        reason = "all activations fit, so none are recomputed"
        levels.append([Change({checkpointing: False}, reason=reason)])
    return levels


# Every process has whole weights: on its device, or streamed from the copy in the machine's host
# memory.
REPLICATED: Mapping[str, Mapping[str, Any]] = {
    "DDP": {"fsdp_enable": False, "enable_group_offload": False},
    "DDP, streamed": {"fsdp_enable": False, **STREAMED},
}


def check_sharded_lora(budget: AnyBudget, report: Problems) -> None:
    """Warn about FSDP2 for a LoRA that would fit with DDP."""
    config = budget.config
    if config.model.model_type != "lora" or not config.launch.is_sharded or not budget.steps:
        return
    for name, values in REPLICATED.items():
        if values["enable_group_offload"] and not budget.device.has_own_memory:
            continue
        replicated = budget.under(values, CHOSEN)
        if replicated.fits and _is_allowed(replicated.config):
            report.warn(
                "fsdp_enable",
                f"{name} fits too, and each process sends {gigabytes(replicated.sent.total)} a "
                f"step instead of {gigabytes(budget.sent.total)}: to train a LoRA, FSDP2 gathers "
                "the whole model in every pass.",
                remedy=values,
            )
            return


def _is_allowed(config: RunConfig) -> bool:
    """Whether no setting excludes another one."""
    report = Problems()
    check_conflicts(config, report)
    check_launch(config, report)
    check_offload(config, report)
    return not report.are_fatal
