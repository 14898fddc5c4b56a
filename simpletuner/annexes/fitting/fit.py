"""The error of a run that does not fit into memory, with the smallest change that fits; and
`offload: auto`.

Both walk one ordered list (`possible_changes`): changes that only cost time come first, changes of
results last.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
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
STREAMED = {"enable_group_offload": True, "group_offload_use_stream": True}
RELEASED = {"optimizer_release_gradients": True}
STATE_ON_HOST = {**RELEASED, "offload_optimizer_state": True}
LOW_BIT = {"optimizer": "ao-adamw8bit"}
DISK = "group_offload_to_disk_path"
KEPT = "gradient_checkpointing_kept_blocks"
DECODINGS = {
    "strips": "only their rounding",
    "tiles": "pixels slightly at the seams",
}  # and their side effects

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
        return self.words or ", ".join(
            f"{key} {as_user_text(value)}" for key, value in self.values.items()
        )

    def of(self, budget: AnyBudget) -> AnyBudget:
        """The budget after this change."""
        return replace(budget.under(self.values, CHOSEN), workload=self.apply(budget.workload))


def _after(budget: AnyBudget, changes: Sequence[Change]) -> AnyBudget:
    return reduce(lambda before, change: change.of(before), changes, budget)


def check_fit(budget: AnyBudget, report: Problems) -> None:
    """Report a phase that does not fit, with the smallest change that helps.

    With `i_know_what_i_am_doing`, the problem is a warning.
    """
    lacking = [text for _, text in budget.shortages()]
    if not lacking:
        return
    if changes := smallest_change(budget):
        advice = f"This would fit: {'; '.join(map(str, changes))}."
    else:
        (_, rest), *_ = _after(budget, list(possible_changes(budget))).shortages()
        # If the shortage is unchanged, no change affects that phase.
        advice = (
            f"Even with every setting that helps, {rest}."
            if rest != lacking[0]
            else "No setting makes it fit."
        )
    if not budget.device.is_gpu:
        advice += " To plan for a GPU elsewhere, run simpletuner plan with --device-memory 24."
    if budget.guess:
        advice += f" {budget.guess}."
    fatal = not budget.config.run.i_know_what_i_am_doing
    if fatal:
        advice += " To run anyway, set i_know_what_i_am_doing."
    more = ""
    if len(lacking) > 1:
        phases = counted(len(lacking) - 1, "more phase does", "more phases do")
        more = f" ({phases} not fit)"
    report.append(Problem("memory", f"{lacking[0]}{more}. {advice}", fatal, _settings_of(changes)))


def _settings_of(changes: Sequence[Change]) -> dict[str, Any]:
    """The changes as settings; empty if a change is not a setting, such as shorter clips."""
    settings: dict[str, Any] = {}
    for change in changes:
        if not change.values:
            return {}
        settings.update(change.values)
    return settings


def smallest_change(budget: AnyBudget) -> list[Change]:
    """A minimal set of changes that fits, in the order of `possible_changes`; empty if nothing
    fits.

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
    if (
        config.model.model_type == "lora"
        and config.precision.base_model_precision in PLAIN_PRECISIONS
    ):
        yield Change(
            {"base_model_precision": "int8-quanto"},
            "last",
            f"in 16 bits the run does not fit {room}",
        )
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
        yield Change(
            {"validation_disable": True}, apply=lambda before: replace(before, previews=[])
        )


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
        yield Change(
            {"speed_keep_attention": False}, "time", f"attention is recomputed, to fit {room}"
        )
    if not config.precision.checkpoints_all:
        whole = {"gradient_checkpointing": True, "gradient_checkpointing_interval": 1}
        yield Change({**whole, **({KEPT: 0} if kept else {})})
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
        yield Change(
            STATE_ON_HOST, "time", "state is on the device only while its weight is updated"
        )
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
        yield Change(
            {"vae_enable_tiling": True}, "encoding", "; latents change at the tiles' seams"
        )


def _decodings(budget: AnyBudget) -> Iterator[Change]:
    """Changes that decode previews in less memory."""
    ways = (
        ["whole", "strips", "tiles"] if budget.parts.spec.decodes_in_strips else ["whole", "tiles"]
    )
    now = budget.config.validation.validation_decoding
    if now not in ways or not budget.workload.previews:
        return
    for how in ways[ways.index(now) + 1 :]:
        reason = (
            f"previews are decoded in {how} to fit {_room(budget)}, which changes {DECODINGS[how]}"
        )
        yield Change({DECODING: how}, "time", reason)


def _may_move(budget: AnyBudget) -> bool:
    """Whether tensors can leave the device during a step: to other memory, and no CUDA graph needs
    fixed addresses.
    """
    return budget.device.has_own_memory and graph_key(budget.config.launch) is None


def _may_stream(budget: AnyBudget) -> bool:
    """Whether blocks could be streamed but are not: their weights must be frozen and unsharded."""
    config = budget.config
    is_free = not (config.offload.enable_group_offload or config.launch.fsdp_enable)
    return _may_move(budget) and is_free and config.model.model_type == "lora"


def _shared_tokens(budget: AnyBudget) -> Iterator[Change]:
    """Share the tokens of a sample among as many processes as heads and machines allow; steps have
    fewer samples.
    """
    config = budget.config
    cost = budget.parts.transformer
    size = math.gcd(config.launch.local_processes, cost.hidden // cost.head)
    if (
        budget.parts.spec.heads is None
        or size <= config.launch.sequence_parallel_size
        or not uses_own_arithmetic(config.speed)
    ):
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
    """Shorter clips, then smaller pictures, described by dataset keys; for previews if nothing is
    trained.
    """
    workload = budget.workload
    spec = budget.parts.spec
    longest = max((bucket.frames for bucket in workload.buckets or workload.previews), default=1)
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
        budget = _eased(budget, change)
    sharded = _sharding(budget)
    # As configured, then sharded, then with one last resort; the first start that can be made to
    # fit wins.
    starts = [
        budget,
        *(_taken(budget, [change]) for change in (*sharded, *_open_changes(budget, "last"))),
    ]
    leanest = [_after(start, _open_changes(start, "time")) for start in starts]
    # Phases that cannot be made to fit must not slow down the steps.
    hopeless = frozenset.intersection(*map(_lacking, leanest))
    for start in starts:
        if (fastest := _fastest(start, hopeless)) is not None:
            return _with_reason_for_ddp(fastest) if sharded and start is budget else fastest
    # Nothing fits: take the lowest peak, so that `check_fit` reports the smallest shortage.
    peaks = [lean.peaks[0] for lean in leanest]
    lean = starts[peaks.index(min(peaks))]
    return _taken(lean, _time_changes(lean, hopeless))


def _open_changes(budget: AnyBudget, role: str) -> list[Change]:
    """The changes of a role that override no key set by the user."""
    flat = budget.config.flat
    is_explicit = budget.config.is_explicit
    changes = []
    for change in possible_changes(budget):
        if change.role != role:
            continue
        new = {key: value for key, value in change.values.items() if flat[key] != value}
        # The first key makes the change; the others only accompany it, and may stay as the user set
        # them.
        deciding_key, *_ = new
        if not is_explicit(deciding_key):
            changes.append(
                replace(change, values={key: new[key] for key in new if not is_explicit(key)})
            )
    return changes


def _time_changes(budget: AnyBudget, hopeless: frozenset[str]) -> list[Change]:
    """Changes that only cost time, without ways of decoding previews that cannot fit anyway."""
    changes = _open_changes(budget, "time")
    if PREVIEWS in hopeless:
        changes = [change for change in changes if DECODING not in change.values]
    return changes


def _lacking(budget: AnyBudget) -> frozenset[str]:
    """The phases before and after training that do not fit."""
    return frozenset(
        phase.name for phase, _ in budget.shortages(headroom=HEADROOM) if not phase.trains
    )


def _eased(budget: AnyBudget, change: Change) -> AnyBudget:
    """The budget with a change, if it helps a phase before training that does not fit; else the
    budget.
    """
    after = change.of(budget)
    for phase, smaller in zip(budget.phases, after.phases, strict=True):
        lack = phase.shortage(budget.device, headroom=HEADROOM)
        if lack and smaller.device < phase.device and not phase.trains and phase.name != PREVIEWS:
            return replace(after, decisions=[*budget.decisions, f"{change}: {lack}{change.reason}"])
    return budget


def _taken(budget: AnyBudget, changes: Sequence[Change]) -> AnyBudget:
    """The budget after changes, with their reasons as decisions."""
    for change in changes:
        flat = budget.config.flat
        new = replace(
            change,
            values={key: value for key, value in change.values.items() if flat[key] != value},
        )
        budget = replace(
            change.of(budget), decisions=[*budget.decisions, f"{new}: {change.reason}"]
        )
    return budget


def _with_reason_for_ddp(chosen: AnyBudget) -> AnyBudget:
    """Add the reason why weights are not sharded, although they could be."""
    is_lora = chosen.config.model.model_type == "lora"
    more = ", while FSDP2 would gather the whole model in every pass" if is_lora else ""
    reason = f"DDP: it fits every process, which sends {gigabytes(chosen.sent.total)} a step{more}"
    return replace(chosen, decisions=[reason, *chosen.decisions])


def _fastest(start: AnyBudget, hopeless: frozenset[str]) -> AnyBudget | None:
    """The budget with the fastest selection of changes that fits, mildest first among equals; None
    if none fits.
    """
    fitting: list[list[Change]] = []
    for selected in _selections(_time_changes(start, hopeless)):
        if (level := _best_level(_after(start, selected), selected, hopeless)) is not None:
            fitting.append([*selected, *level])
    if not fitting:
        return None
    blocks = "the blocks are checkpointed, and " if start.workload.buckets else ""
    nothing = Change(
        {}, words="nothing to change", reason=f"{blocks}everything stays on the device"
    )
    # `min` returns the first of equals, and selections are ordered mildest first.
    fastest = min(fitting, key=lambda changes: _after(start, changes).step_seconds)
    return _taken(start, fastest or [nothing])


def _selections(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Every selection of the changes, mildest first; a change that includes another is selected
    only with it.
    """
    for number in range(1 << len(changes)):
        selected = [change for place, change in enumerate(changes) if number >> place & 1]
        # STATE_ON_HOST includes RELEASED: alone, it would repeat the selection of both.
        rest = (change for change in changes if change not in selected)
        if not any(
            left.values.items() <= change.values.items() for left in rest for change in selected
        ):
            yield selected


def _best_level(
    budget: AnyBudget, selected: Sequence[Change], hopeless: frozenset[str]
) -> list[Change] | None:
    """The fastest level of `_levels` that fits; None if none does."""

    def fits(level: Sequence[Change], *, on_host: bool = False) -> bool:
        after = _after(budget, level)
        device = after.device if on_host else replace(after.device, host_memory=None)
        phases = (phase for phase in after.phases if phase.name not in hopeless)
        return all(phase.shortage(device, headroom=HEADROOM) is None for phase in phases)

    levels = _levels(budget, {key for change in selected for key in change.values})
    # Levels are sorted by device memory, so the ones that fit come first.
    count = bisect_left(levels, True, key=lambda level: not fits(level))
    best = levels[count - 1] if count else None
    # Host memory is checked only now: what stays on the device does not take any.
    return best if best is not None and fits(best, on_host=True) else None


def _levels(budget: AnyBudget, keys: set[str]) -> list[list[Change]]:
    """What may stay on the device with the selected changes of `keys`, in order of device
    memory.
    """
    config = budget.config
    blocks = len(budget.parts.transformer.blocks)
    levels: list[list[Change]] = [[]]
    residents = "group_offload_resident_blocks"
    checkpointing = "gradient_checkpointing"
    if "enable_group_offload" in keys and not config.is_explicit(residents):
        # All blocks resident would mean no streaming, which is another selection.
        for count in range(1, blocks):
            levels.append(
                [Change({residents: count}, reason=f"{count} of {blocks} blocks stay resident")]
            )
    is_free = not any(map(config.is_explicit, (checkpointing, f"{checkpointing}_interval", KEPT)))
    # Memory that these changes save at the cost of time is not spent on activations.
    moved = keys & {"enable_group_offload", "speed_keep_attention", "offload_block_inputs"}
    if is_free and not moved and budget.workload.buckets:
        for count in range(1, blocks):
            reason = f"the activations of {count} of {blocks} blocks fit, the others are recomputed"
            levels.append([Change({KEPT: count}, reason=reason)])
        levels.append(
            [Change({checkpointing: False}, reason="all activations fit, so none are recomputed")]
        )
    return levels


# Every process has whole weights: on its device, or streamed from the copy in the machine's host
# memory.
REPLICATED: Mapping[str, Mapping[str, Any]] = {
    "DDP": {"fsdp_enable": False, "enable_group_offload": False},
    "DDP, streamed": {"fsdp_enable": False, **STREAMED},
}


def check_sharded_lora(budget: AnyBudget, report: Problems) -> None:
    """Warn about FSDP2 for a LoRA that would fit with DDP."""
    if (
        not budget.config.launch.is_sharded
        or budget.config.model.model_type != "lora"
        or not budget.steps
    ):
        return
    for name, values in REPLICATED.items():
        if values["enable_group_offload"] and not budget.device.has_own_memory:
            continue
        replicated = budget.under(values, CHOSEN)
        if replicated.fits and _is_allowed(replicated.config):
            sent = (
                f"{gigabytes(replicated.sent.total)} a step instead of "
                f"{gigabytes(budget.sent.total)}"
            )
            why = "to train a LoRA, FSDP2 gathers the whole model in every pass"
            message = f"{name} fits too, and each process sends {sent}: {why}."
            report.warn("fsdp_enable", message, remedy=values)
            return


def _is_allowed(config: RunConfig) -> bool:
    """Whether no setting excludes another one."""
    report = Problems()
    check_conflicts(config, report)
    check_launch(config, report)
    check_offload(config, report)
    return not report.are_fatal
