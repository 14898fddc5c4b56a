"""Finds settings that fit: the smallest change for an error message, and the choice of `offload: auto`.

Changes that only cost time are tried first, those that change results last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from simpletuner.annexes.fitting.ways import STREAMED
from simpletuner.budget.budget import PREVIEWS, Budget, PhasePeak, estimate, find_phases, fits, gigabytes, shortage
from simpletuner.budget.device import Device
from simpletuner.budget.workload import Choice, Workload
from simpletuner.config.load import RunConfig
from simpletuner.config.optimizers import may_change
from simpletuner.config.schema import CHOSEN, PLAIN_PRECISIONS
from simpletuner.config.speed import graph_key, keeps_attention
from simpletuner.errors import Problem
from simpletuner.models.spec import FamilySpec
from simpletuner.plan.launch import may_shard


@dataclass(frozen=True)
class Change:
    """A change that lowers peak memory.

    Attributes:
        values: config keys and their new values.
        words: how messages describe it; by default the keys and values.
        apply: its effect on the workload, if any.
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


def check_fit(budget: Budget) -> Iterator[Problem]:
    """The phase that does not fit, and the smallest change that helps; a warning with `i_know_what_i_am_doing`."""
    device, fatal = budget.device, not budget.config.run.i_know_what_i_am_doing
    lacking = [text for phase in budget.phases if (text := shortage(phase, device)) is not None]
    if not lacking:
        return
    changes = smallest_change(budget)
    fitting = f"This would fit: {'; '.join(map(str, changes))}."
    advice = fitting if changes else _no_help(budget, lacking[0])
    if not device.is_gpu:
        advice += " To plan for a GPU elsewhere: simpletuner plan --device-memory 24."
    others = len(lacking) - 1
    more = f" ({others} more phase{'s lack' if others > 1 else ' lacks'} room)" if others else ""
    message = f"{lacking[0]}{more}. {advice}"
    if fatal:
        message += " To run anyway, set i_know_what_i_am_doing."
    yield Problem("memory", message, fatal=fatal)


def _no_help(budget: Budget, told: str) -> str:
    """Advice if no combination of changes suffices: what is still lacking with all of them, unless already reported."""
    changes = list(possible_changes(budget))
    phases = phases_after((budget.config, budget.workload), changes, budget)
    rest = next(text for phase in phases if (text := shortage(phase, budget.device)) is not None)
    return "No setting makes it fit." if rest == told else f"Even with every setting that helps, {rest}."


def smallest_change(budget: Budget) -> list[Change]:
    """The changes, in the order of `possible_changes`, that are needed together; empty if all of them do not suffice.

    Changes are added until everything fits; then those that turn out to be unnecessary are removed.
    """
    start: Choice = budget.config, budget.workload
    taken: list[Change] = []
    for change in possible_changes(budget):
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


def phases_after(choice: Choice, changes: Sequence[Change], budget: Budget) -> list[PhasePeak]:
    """Peaks of the phases with some changes applied."""
    for change in changes:
        choice = change.of(choice)
    config, workload = choice
    return list(find_phases(config, budget.parts, workload, budget.parts.setup(config)))


def possible_changes(budget: Budget) -> Iterator[Change]:
    """Changes that this configuration does not have yet, the mildest first."""
    config, workload = budget.config, budget.workload
    yield from _lossless_changes(budget)
    if config.model.model_type == "lora" and config.precision.base_model_precision in PLAIN_PRECISIONS:
        yield Change({"base_model_precision": "int8-quanto"})
    if may_change(config, LOW_BIT):
        yield Change(LOW_BIT)
    if config.precision.text_encoder_1_precision in PLAIN_PRECISIONS:
        yield Change({"text_encoder_1_precision": "int8-quanto"})
    batch = max((bucket.batch for bucket in workload.buckets), default=1)
    while batch > 1:
        batch //= 2
        yield Change({"train_batch_size": batch}, apply=partial(Workload.with_batch, batch=batch))
    yield from _smaller_samples(workload, budget.parts.spec)
    if workload.previews and workload.buckets:
        yield Change({"validation_disable": True}, apply=lambda before: replace(before, previews=[]))


def _smaller_samples(workload: Workload, spec: FamilySpec) -> Iterator[Change]:
    """Shorter clips, then smaller pictures, described by dataset keys; of previews if nothing is trained."""
    longest = max((bucket.frames for bucket in workload.buckets or workload.previews), default=1)
    if longest > 1:
        halve = partial(Workload.scaled, spec=spec, frames=0.5)
        halved = halve(workload)
        frames = max(bucket.frames for bucket in halved.buckets or halved.previews)
        yield Change({}, f"num_frames {frames} instead of {longest}", halve)
    for share in (0.75, 0.5):
        words = f"a resolution {share:g} times as large"
        yield Change({}, words, partial(Workload.scaled, spec=spec, sides=share))


def _lossless_changes(budget: Budget) -> Iterator[Change]:
    """Changes that leave results equal, except for tiling the VAE."""
    config = budget.config
    precision, caching = config.precision, config.caching
    if budget.workload.encoded_in_training:
        words = "latents encoded before training, without vae_cache_ondemand and vae_cache_disable"
        yield Change({}, words, Workload.encoded_ahead)
    if may_change(config, RELEASED):
        yield Change(RELEASED)
    if keeps_attention(config.speed):
        yield Change({"speed_keep_attention": False})
    if not precision.checkpoints_all:
        kept = {"gradient_checkpointing_kept_blocks": 0} if precision.gradient_checkpointing_kept_blocks else {}
        yield Change({"gradient_checkpointing": True, "gradient_checkpointing_interval": 1, **kept})
    if caching.vae_batch_size > 1:
        yield Change({"vae_batch_size": 1})
    if budget.device.is_gpu:
        yield from _offload_changes(config)
    if budget.parts.spec.slices_convolutions and not caching.vae_enable_patch_conv:
        yield Change({"vae_enable_patch_conv": True})
    yield from (Change({"validation_decoding": how}) for how in _decodings(budget))
    if not caching.vae_enable_tiling:
        yield Change({"vae_enable_tiling": True})


DISK = "group_offload_to_disk_path"


def _offload_changes(config: RunConfig) -> Iterator[Change]:
    """Changes that move data from the device to host memory."""
    offload, may_move = config.offload, graph_key(config.launch) is None
    streams = offload.enable_group_offload
    if _may_be_sharded(config) and config.model.model_type == "full":
        yield Change({"fsdp_enable": True})
    if config.model.model_type == "lora" and may_move and not streams and not config.launch.fsdp_enable:
        # enable_model_cpu_offload excludes streaming.
        yield Change({**STREAMED, **({"enable_model_cpu_offload": False} if offload.enable_model_cpu_offload else {})})
    if may_change(config, STATE_ON_HOST):
        yield Change(STATE_ON_HOST)
    if may_move and not offload.offload_block_inputs:
        yield Change({"offload_block_inputs": True})
    if not offload.group_offload_text_encoder:
        yield Change({"group_offload_text_encoder": True})
    if config.offload.group_offload_to_disk_path is None and (streams or (may_move and _may_stream(config))):
        yield Change({DISK: "offloaded"}, f"{DISK} with a folder on a fast disk")


RELEASED = {"optimizer_release_gradients": True}
STATE_ON_HOST = {**RELEASED, "offload_optimizer_state": True}
LOW_BIT = {"optimizer": "ao-adamw8bit"}
HEADROOM = 0.05  # share of memory that auto leaves free, for other programs and errors of the estimate
# Keys that auto may set, if the user has not.
OWN_KEYS = (
    "gradient_checkpointing", "gradient_checkpointing_interval", "gradient_checkpointing_kept_blocks",
    "speed_keep_attention", "enable_group_offload", "group_offload_use_stream", "group_offload_resident_blocks",
    "offload_block_inputs", "base_model_precision",
)  # fmt: skip
DECODINGS = {"strips": "only their rounding", "tiles": "pixels slightly at the seams"}  # and what each changes
Candidate = tuple[Change, str]  # a change and its reason


def choose(budget: Budget) -> Budget:
    """The choice of `offload: auto`: the fastest settings that fit with `HEADROOM`.

    Only keys that the user left unset are changed. If nothing fits, the leanest settings are returned, and `check_fit`
    reports what is lacking.
    """
    budget = _with_encoders(budget)
    chosen = _over_processes(budget) if _may_be_sharded(budget.config) else None
    if chosen is not None:
        return chosen
    found: list[Budget] = []
    for start in _updates(budget):
        if found and start.config.optimizer.optimizer != budget.config.optimizer.optimizer:
            break  # 8 bits change results
        fastest, leanest = _search(start, in_8_bits=True)
        found += [fastest] if fastest else []
    return min(found, key=lambda chosen: chosen.step_seconds, default=leanest)


def _updates(budget: Budget) -> list[Budget]:
    """Ways to update the weights of a full fine-tune, those with other results last; a LoRA has one."""
    released = _updated(budget, RELEASED, "each gradient is freed as soon as its weight is updated")
    low = _updated(released, LOW_BIT, f"without state in 8 bits the run does not fit {_room(budget.device)}")
    ways = [budget]
    for one in (released, low) if low is not released else (released,):
        reason = "state is on the device only while its weight is updated"
        ways += [one, *([_updated(one, STATE_ON_HOST, reason)] if budget.device.is_gpu else [])]
    return [way for place, way in enumerate(ways) if not any(way is each for each in ways[:place])]


def _updated(budget: Budget, values: Mapping[str, Any], reason: str) -> Budget:
    """The budget with the values that differ from the present ones, if they are allowed and not set by the user."""
    flat = budget.config.flat()
    new = {key: value for key, value in values.items() if flat[key] != value}
    may = may_change(budget.config, new) and not any(map(budget.config.is_explicit, new))
    return _with(budget, Change(new), reason) if may else budget


def _over_processes(budget: Budget) -> Budget | None:
    """The fastest settings in which DDP fits, else those of FSDP2; None if a LoRA fits in neither way."""
    fastest, _ = _search(budget, in_8_bits=False)
    if fastest is not None:
        return _with_reason_for_ddp(fastest)
    reason = f"each process keeps a share of the weights, to fit {_room(budget.device)}"
    fastest, leanest = _search(_with(budget, Change({"fsdp_enable": True}), reason), in_8_bits=False)
    return fastest or (leanest if budget.config.model.model_type == "full" else None)


def _with_reason_for_ddp(chosen: Budget) -> Budget:
    """Say why several processes do not share the weights, where they could."""
    is_lora = chosen.config.model.model_type == "lora"
    more = ", while FSDP2 would gather the whole model again and again" if is_lora else ""
    reason = f"DDP: each process has room for it and sends {gigabytes(chosen.sent.total)} a step{more}"
    return replace(chosen, decisions=[reason, *chosen.decisions])


def _may_be_sharded(config: RunConfig) -> bool:
    """Whether FSDP2 is allowed, and not set by the user."""
    return may_shard(config) and not config.launch.fsdp_enable and not config.is_explicit("fsdp_enable")


def _search(budget: Budget, *, in_8_bits: bool) -> tuple[Budget | None, Budget]:
    """The fastest settings that fit, if any, and the leanest ones.

    Args:
        in_8_bits: an int8 base model may be the leanest.
    """
    ladders = [list(ladder) for ladder in _ladders(budget)]
    choices = [ladders]
    if in_8_bits:
        choices.append([[_in_8_bits(budget, each) for each in ladder] for ladder in ladders])
    leanest = choices[-1][-1][-1]
    budget = _with_tiles(budget, leanest)
    beyond = _beyond(budget, leanest)
    ways = [way for way in _with_decodings(budget) if PREVIEWS not in _beyond(way, leanest)]
    if ways:
        beyond -= {PREVIEWS}
    found = [(way, each) for way in ways or [budget] if (each := _fastest(choices, way, beyond)) is not None]
    fitting = [_with(way, *each) for way, each in found]  # of equally fast ones, previews that change least
    fastest = min(fitting, key=lambda each: each.step_seconds, default=None)
    return fastest, _with(ways[0] if ways else budget, *leanest)


def _fastest(
    choices: Iterable[Iterable[Sequence[Candidate]]], budget: Budget, beyond: frozenset[str]
) -> Candidate | None:
    """The fastest candidate that fits, from the first choice that has one; of two equally fast ones, the first."""
    for ladders in choices:
        found = [_first_that_fits(ladder, budget, beyond) for ladder in ladders]
        if fitting := [candidate for candidate in found if candidate is not None]:
            return min(fitting, key=lambda each: _with(budget, *each).step_seconds)
    return None


def _with_decodings(budget: Budget) -> Iterator[Budget]:
    """The budget, and with the other ways of decoding previews if the user has not set one."""
    yield budget
    for how in () if budget.config.is_explicit("validation_decoding") else _decodings(budget):
        reason = f"previews are decoded in {how} to fit {_room(budget.device)}, which changes {DECODINGS[how]}"
        yield _with(budget, Change({"validation_decoding": how}), reason)


def _decodings(budget: Budget) -> list[str]:
    """Ways of decoding previews in less memory, the mildest first."""
    ways = ["whole", *(how for how in DECODINGS if how == "tiles" or budget.parts.spec.decodes_in_strips)]
    now = budget.config.validation.validation_decoding
    return ways[ways.index(now) + 1 :] if now in ways and budget.workload.previews else []


def _beyond(budget: Budget, leanest: Candidate) -> frozenset[str]:
    """Phases other than training that do not fit even with the leanest settings: they must not slow down the steps."""
    phases = phases_after((budget.config, budget.workload), [leanest[0]], budget)
    lacking = [phase for phase in phases if shortage(phase, budget.device, headroom=HEADROOM)]
    return frozenset(phase.name for phase in lacking if not phase.trains)


def _with_tiles(budget: Budget, leanest: Candidate) -> Budget:
    """Enable VAE tiling if encoding would not fit otherwise."""
    key, lacking = "vae_enable_tiling", _beyond(budget, leanest) - {PREVIEWS}
    if not lacking or budget.config.is_explicit(key) or budget.config.caching.vae_enable_tiling:
        return budget
    reason = f"{' and '.join(sorted(lacking))} would not fit {_room(budget.device)}; latents change at the tiles' seams"
    tiled = _with(budget, Change({key: True}), reason)
    return tiled if _beyond(tiled, leanest) - {PREVIEWS} < lacking else budget


def _first_that_fits(ladder: Sequence[Candidate], budget: Budget, beyond: frozenset[str]) -> Candidate | None:
    start: Choice = budget.config, budget.workload
    for change, reason in ladder:
        phases = [phase for phase in phases_after(start, [change], budget) if phase.name not in beyond]
        if fits(phases, budget.device, headroom=HEADROOM):
            return change, reason
    return None


def _with_encoders(budget: Budget) -> Budget:
    """Stream text encoders and slice the VAE, each if its own phase does not fit."""
    keys = [("captions", "group_offload_text_encoder")]
    if budget.parts.spec.slices_convolutions:
        keys.append((budget.parts.spec.media_noun, "vae_enable_patch_conv"))
    for subject, key in keys if budget.device.is_gpu else ():
        reason = _shortages(budget).get(f"encoding {subject}")
        if reason and not budget.config.is_explicit(key):
            budget = _with(budget, Change({key: True}), reason)
    return budget


def _shortages(budget: Budget) -> dict[str, str | None]:
    """The shortage of each phase, by name."""
    return {phase.name: shortage(phase, budget.device, headroom=HEADROOM) for phase in budget.phases}


def _with(budget: Budget, change: Change, reason: str) -> Budget:
    config, workload = change.of((budget.config, budget.workload))
    fitted = estimate(config, budget.parts, workload, budget.device, budget.listing)
    chosen = [f"{key} {written(value)}" for key, value in change.values.items()]
    decision = f"{', '.join(chosen) or 'nothing to change'}: {reason}"
    return replace(fitted, decisions=[*budget.decisions, decision])


def _ladders(budget: Budget) -> Iterator[Iterable[Candidate]]:
    """Lists of settings, each ordered from fast to lean."""
    config = budget.config
    free = {key: not config.is_explicit(key) for key in OWN_KEYS}
    if graph_key(config.launch) is not None:
        free |= {"enable_group_offload": False, "offload_block_inputs": False}
    if all(free[key] for key in OWN_KEYS[:3]) and budget.workload.buckets:
        yield _depths(len(budget.parts.transformer.blocks))
    kinds: list[tuple[dict[str, Any], str]] = [({}, "")]  # by default every block is checkpointed
    if free["speed_keep_attention"] and keeps_attention(config.speed):
        kinds.append(({"speed_keep_attention": False}, ", attention is recomputed"))
    streams = _may_stream(config) and free["enable_group_offload"] and budget.device.is_gpu
    streamed = {key: value for key, value in STREAMED.items() if free[key]}
    if not budget.workload.buckets:  # nothing is trained
        yield [(Change({}), "everything stays on the device")]
        yield from [_streamed(budget, streamed, free, on_host=False, twice="")] if streams else []
        return
    for on_host in (False, True) if free["offload_block_inputs"] and budget.device.is_gpu else (False,):
        yield [_resident(values, on_host=on_host, twice=twice) for values, twice in kinds]
        for values, twice in kinds if streams else ():
            yield _streamed(budget, {**values, **streamed}, free, on_host=on_host, twice=twice)


def _in_8_bits(budget: Budget, candidate: Candidate) -> Candidate:
    """The last resort: an int8 base model, if the user has not set its precision."""
    key, config = "base_model_precision", budget.config
    if config.is_explicit(key) or config.model.model_type != "lora" or config.launch.fsdp_enable:
        return candidate
    lean = Change({**candidate[0].values, key: "int8-quanto"})
    return lean, f"in 16 bits the run does not fit {_room(budget.device)}"


def _may_stream(config: RunConfig) -> bool:
    """Whether streaming is possible: only for frozen whole weights, and not with `enable_model_cpu_offload`."""
    others = config.offload.enable_model_cpu_offload or config.launch.fsdp_enable
    return config.model.model_type == "lora" and not others


def _depths(blocks: int) -> Iterator[Candidate]:
    """Checkpoint as few blocks as memory allows."""
    yield Change({"gradient_checkpointing": False}), "memory holds all activations, so none is recomputed"
    for kept in range(blocks - 1, 0, -1):
        values = {"gradient_checkpointing": True, "gradient_checkpointing_kept_blocks": kept}
        yield Change(values), f"memory holds the activations of {kept} of {blocks} blocks, the others are recomputed"


def _resident(values: Mapping[str, Any], *, on_host: bool, twice: str) -> Candidate:
    """Keep all weights on the device, and checkpoint every block."""
    where = "their inputs are kept in host memory" if on_host else "everything stays on the device"
    inputs = {"offload_block_inputs": True} if on_host else {}
    return Change({**values, **inputs}), f"the blocks are checkpointed{twice}, and {where}"


def _streamed(
    budget: Budget, plain: Mapping[str, Any], free: Mapping[str, bool], *, on_host: bool, twice: str
) -> Iterator[Candidate]:
    """Stream blocks, keeping as many resident as fit."""
    blocks = len(budget.parts.transformer.blocks)
    for count in range(blocks - 1, -1, -1) if free["group_offload_resident_blocks"] else [None]:
        values = dict(plain)
        if count is not None:
            values["group_offload_resident_blocks"] = count
        if on_host:
            values["offload_block_inputs"] = True
        where = " and their inputs are kept in host memory" if on_host else ""
        stay = f", {count} of {blocks} stay resident" if count else ""
        yield Change(values), f"blocks are streamed{stay}{where}{twice}, to fit {_room(budget.device)}"


def _room(device: Device) -> str:
    return device.name if device.usable is None else gigabytes(device.usable)
