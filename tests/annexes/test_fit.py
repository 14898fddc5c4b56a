"""Whether a run fits, the smallest change that makes it fit, and what `offload: auto` chooses."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.fitting import ready
from simpletuner.annexes.fitting.fit import HEADROOM, STREAMED, check_fit, choose, smallest_change
from simpletuner.budget.budget import (
    GPU_CONVOLUTIONS,
    Budget,
    check_decoding,
    free_batch,
    with_faster_previews,
    with_strips,
)
from simpletuner.budget.device import DEVICE_OVERHEAD, FRAGMENTS, HOST_BASE, Device, rates_of
from simpletuner.budget.phases import LOADING, PREVIEWS
from simpletuner.budget.step_cost import FLOAT32_SHARE
from simpletuner.budget.workload import Bucket, Parts, Workload, kernels_on
from simpletuner.config.load import Layer, resolve
from simpletuner.config.schema import RunConfig
from simpletuner.data.schedule import Origin
from simpletuner.errors import Problems
from simpletuner.models.cost import Kernels
from simpletuner.models.kandinsky5.cost import VIDEO_COST
from simpletuner.models.registry import FAMILIES
from simpletuner.models.source import ModelSource
from simpletuner.models.vae_cost import VaeLoad
from simpletuner.planning.plans import Length, Plan
from tests.tools.reports import found_by

STREAMING = "enable_group_offload true, group_offload_use_stream true"
LITE = Bucket(768, 512, 61, 1, 1.0, 256)
PICTURE = Bucket(1024, 1024, 1, 4, 1.0, 256)
LEANEST = {
    "enable_group_offload": True,
    "group_offload_use_stream": True,
    "offload_block_inputs": True,
    "base_model_precision": "int8-quanto",
}


def config(family: str, **settings: Any) -> RunConfig:
    values = {"model_type": "lora", "model_family": family, "speed": "reference", **settings}
    problems = Problems()
    resolved = resolve([Layer("config.json", list(values.items()))], problems)
    assert not problems, problems
    return resolved


def gpu(gigabytes: float, host: float | None = None) -> Device:
    return Device("NVIDIA H100", gigabytes * 1e9, host, True, rates_of("NVIDIA H100"), "")


def budget(
    device: Device,
    bucket: Bucket = LITE,
    flavour: str = "t2v-lite-sft-5s",
    encodes_text: bool = False,
    **settings: Any,
) -> Budget:
    """Training alone, every cache filled, unless captions are missing."""
    family = {"t2i": "kandinsky5-image", "t2v": "kandinsky5-video", "2b-": "sanavideo"}[flavour[:3]]
    workload = Workload([bucket], [], encodes_text, [], 0.0)
    spec = FAMILIES[family]
    resolved = config(family, **settings)
    source = ModelSource.from_settings(spec, spec.flavour(flavour), resolved.flat)
    plan = Plan(
        config=resolved,
        spec=spec,
        flavour=spec.flavour(flavour),
        source=source,
        prompts=[],
        sizes=[],
        pictures=(),
        seed=0,
        warnings=[],
        datasets=[],
        text_caches=[],
        purpose="train",
        dataset_file=Path("multidatabackend.json"),
        lora_targets=[],
        resume=None,
        same_data=True,
        origin=Origin(),
        length=Length(0, 0, 0),
    )
    return Budget(plan, parts(family, flavour), workload, device)


@cache
def parts(family: str, flavour: str) -> Parts:
    """Those of a published checkpoint on a GPU, which remember what was computed of them."""
    spec = FAMILIES[family]
    cost = spec.cost
    targets = list(spec.lora_targets)
    transformer = cost.of_flavour(flavour, Kernels(tile_lists=True))
    return Parts(spec, transformer, targets, cost.vae, cost.text_parameters, ())


def complaint(*arguments: Any, **settings: Any) -> str:
    (problem,) = found_by(check_fit, budget(*arguments, **settings))
    return str(problem)


def test_run_that_fits_reports_no_problem() -> None:
    assert found_by(check_fit, budget(gpu(12))) == []
    assert found_by(check_fit, budget(Device("?", None, None, True, rates_of(""), ""))) == [], (
        "unknown memory is no limit"
    )


def test_shortage_names_the_phase_its_need_and_the_remedy() -> None:
    message = complaint(gpu(8))

    assert message.startswith("memory: training at 768x512@61 needs 10.")
    assert "where 7.2 GB can be used" in message
    assert "This would fit: enable_group_offload true, group_offload_use_stream true." in message


@pytest.mark.parametrize(
    ("gigabytes", "settings", "changes"),
    [
        (
            24,
            {"gradient_checkpointing": False},
            ["gradient_checkpointing true, gradient_checkpointing_interval 1"],
        ),
        (8, {}, [STREAMING]),
        (5, {}, [STREAMING, "offload_block_inputs true"]),
        (
            3.9,
            {},
            [
                STREAMING,
                "offload_block_inputs true",
                "num_frames 33 instead of 61",
            ],
        ),
    ],
)
def test_smallest_change_makes_the_run_fit(
    gigabytes: float, settings: dict[str, Any], changes: list[str]
) -> None:
    before = budget(gpu(gigabytes), **settings)
    assert [str(change) for change in smallest_change(before)] == changes


def test_batch_size_is_reduced_before_picture_size() -> None:
    before = budget(gpu(3.5), PICTURE, "t2i-lite-sft", **LEANEST)
    assert [str(change) for change in smallest_change(before)] == ["train_batch_size 2"]


def test_hopeless_shortage_names_what_is_short() -> None:
    streamed = {"group_offload_text_encoder": True, "text_encoder_1_precision": "int8-quanto"}
    message = complaint(gpu(1), encodes_text=True, **streamed)

    assert message.startswith("memory: encoding captions needs 2.8 GB on the device")
    assert "(2 more phases do not fit)" in message
    assert "No setting makes it fit." in message


def test_shortage_is_only_a_warning_with_i_know_what_i_am_doing() -> None:
    (problem,) = found_by(check_fit, budget(gpu(8), i_know_what_i_am_doing=True))
    assert not problem.fatal


def test_host_memory_must_hold_weights_that_pass_through_it() -> None:
    """A few blocks at a time; all of them where the adapter is computed from them."""
    assert "host memory" in complaint(gpu(80, host=1.4e9))
    assert found_by(check_fit, budget(gpu(80, host=2e9))) == []
    assert "host memory" in complaint(gpu(80, host=4e9), use_dora=True)
    assert found_by(check_fit, budget(gpu(80, host=8e9), use_dora=True)) == []


PRO = "t2v-pro-sft-5s-hd"
CLIP = Bucket(1024, 512, 25, 1, 1.0, 256)  # of the example


def card(host: float, **settings: Any) -> Budget:
    """Pro on a card of 24 GiB."""
    device = Device(
        "NVIDIA GeForce RTX 4090", 24 * 2**30, host, True, rates_of("NVIDIA GeForce RTX 4090"), ""
    )
    return budget(device, CLIP, PRO, encodes_text=True, **settings)


def test_pro_in_8_bits_fits_32_gb_of_host_memory() -> None:
    """No phase takes more than the packed weights, those outside the blocks, and 2 GB."""
    chosen = card(32e9, base_model_precision="int8-quanto", enable_group_offload=True)
    assert found_by(check_fit, chosen) == []

    packed = chosen.model.streamed_bytes
    loading = next(phase for phase in chosen.phases if phase.name == LOADING)
    assert packed + HOST_BASE < loading.on_host(chosen.device) < packed + HOST_BASE + 2e9

    auto = choose(card(20e9, offload="auto"))  # what stays on the card is no longer in host memory
    assert auto.config.precision.base_model_precision == "int8-quanto"
    assert found_by(check_fit, auto) == []


@pytest.mark.parametrize(
    ("host", "settings"), [(32e9, {}), (20e9, {"base_model_precision": "int8-quanto"})]
)
def test_too_little_host_memory_suggests_offload_to_disk(
    host: float, settings: dict[str, Any]
) -> None:
    before = card(host, enable_group_offload=True, **settings)
    assert before.config.offload.group_offload_to_disk_path is None, (
        "only the user says where there is room"
    )

    (problem,) = found_by(check_fit, before)
    assert "loading the transformer needs" in str(problem)
    assert f"of host memory, this machine has {host / 1e9:.1f} GB" in str(problem)
    assert "This would fit: group_offload_to_disk_path with a folder on a fast disk." in str(
        problem
    )
    assert before.under({"group_offload_to_disk_path": "waiting"}, "test").fits


def test_shortage_without_a_gpu_counts_host_memory() -> None:
    machine = Device("CPU", 11e9, 11e9, False, rates_of(""), "")
    message = complaint(machine)

    assert "this machine has 11.0 GB and no GPU" in message
    assert "--device-memory 24" in message


def test_auto_disables_checkpointing_on_a_large_device() -> None:
    chosen = choose(budget(gpu(141)))

    assert chosen.config.precision.gradient_checkpointing is False
    assert not chosen.config.is_explicit("gradient_checkpointing")


def test_auto_checkpoints_no_more_than_it_must() -> None:
    seconds = []

    for gigabytes in (12, 50, 141):
        chosen = choose(budget(gpu(gigabytes)))
        assert not chosen.shortages(headroom=HEADROOM)
        seconds.append(chosen.steps[0].cost.seconds)

    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[1] > seconds[2]


@pytest.mark.parametrize("gigabytes", [24, 50])
def test_auto_keeps_as_many_activations_as_fit(gigabytes: float) -> None:
    chosen = choose(budget(gpu(gigabytes)))
    key = "gradient_checkpointing_kept_blocks"

    kept = chosen.config.precision.gradient_checkpointing_kept_blocks
    assert 0 < kept < 34
    assert f"activations of {kept} of 34 blocks" in chosen.decisions[0]
    assert chosen.under({key: kept + 1}, "test").shortages(headroom=HEADROOM)

    user_settings = {"gradient_checkpointing": True, key: 34}
    changes = [str(change) for change in smallest_change(budget(gpu(gigabytes), **user_settings))]
    assert changes == [f"gradient_checkpointing true, gradient_checkpointing_interval 1, {key} 0"]


@pytest.mark.parametrize(
    ("family", "is_gpu", "settings", "compiled"),
    [
        ("kandinsky5-video", True, {"dynamo_backend": "inductor"}, True),
        ("kandinsky5-video", False, {"dynamo_backend": "inductor"}, True),
        ("kandinsky5-video", True, {"dynamo_backend": "inductor", "speed": "reference"}, False),
        ("kandinsky5-video", True, {"dynamo_backend": "aot_eager"}, False),
        ("kandinsky5-video", True, {"dynamo_backend": "no"}, False),
        ("sanavideo", True, {"dynamo_backend": "inductor"}, True),
        ("sanavideo", False, {"dynamo_backend": "inductor"}, False),
        ("sanavideo", True, {"dynamo_backend": "inductor", "speed": "reference"}, False),
    ],
)
def test_compiled_kernels_are_estimated_only_where_measured(
    family: str, is_gpu: bool, settings: dict[str, Any], compiled: bool
) -> None:
    chosen = config(family, **{"speed": "auto", **settings})
    device = "cuda" if is_gpu else "cpu"

    kernels = kernels_on(chosen, FAMILIES[family], device)

    assert kernels == Kernels(compiled, is_gpu)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_card_for_another_machine_is_assumed_to_compile(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simpletuner.budget.device.torch_uses_gpus", lambda: not elsewhere)
    monkeypatch.setattr("simpletuner.config.speed.has_compiler", lambda: False)
    lite = config("kandinsky5-video", speed="auto"), FAMILIES["kandinsky5-video"]

    assert kernels_on(*lite, "cuda").compiled is elsewhere
    assert not kernels_on(*lite, "cpu").compiled


def test_all_compiled_blocks_of_sana_are_kept_on_80_gb() -> None:
    """Of diffusers' code, compiled, there was room for half of them."""
    before = budget(gpu(80), SANA, "2b-480p", speed="auto")
    sana = parts("sanavideo", "2b-480p")
    compiled = sana.cost.of_flavour("2b-480p", Kernels(compiled=True))

    chosen = choose(replace(before, parts=replace(sana, transformer=compiled)))

    assert not chosen.config.precision.gradient_checkpointing


def test_auto_keeps_as_many_blocks_resident_as_fit() -> None:
    chosen = choose(budget(gpu(9)))
    offload = chosen.config.offload
    assert offload.enable_group_offload
    assert not offload.offload_block_inputs
    assert 0 < offload.group_offload_resident_blocks < 32

    more = {"group_offload_resident_blocks": offload.group_offload_resident_blocks + 1}
    assert chosen.under(more, "test").shortages(headroom=HEADROOM)
    assert [decision.partition(":")[2] for decision in chosen.decisions] == [
        f" blocks are streamed, to fit {(gpu(9).usable or 0) / 1e9:.1f} GB",
        f" {offload.group_offload_resident_blocks} of 34 blocks stay resident",
    ]


def test_auto_keeps_the_blocks_that_fit_with_modulation_in_bf16() -> None:
    narrow = budget(gpu(9), speed="auto")
    unknown = replace(narrow.parts.transformer, modulation=frozenset())
    wide = replace(narrow, parts=replace(narrow.parts, transformer=unknown))

    chosen = choose(narrow)
    fewer = choose(wide).config.offload.group_offload_resident_blocks

    resident = chosen.config.offload.group_offload_resident_blocks
    assert resident > fewer > 0
    assert not chosen.shortages(headroom=HEADROOM)
    more = {"group_offload_resident_blocks": resident + 1}
    assert chosen.under(more, "test").shortages(headroom=HEADROOM)


def test_auto_quantises_to_8_bits_last() -> None:
    small = gpu(6)
    as_is = choose(budget(small))
    assert as_is.config.offload.offload_block_inputs
    assert as_is.config.precision.base_model_precision == "no_change"

    lean = choose(budget(gpu(3.5)))
    assert lean.config.precision.base_model_precision == "int8-quanto"


SANA = Bucket(832, 480, 81, 1, 1.0, 300)
RELEASED = (
    "optimizer_release_gradients true: each gradient is freed as soon as its weight is updated"
)


@pytest.mark.parametrize(
    ("flavour", "bucket", "gigabytes", "optimizer"),
    [
        ("t2v-lite-sft-5s", LITE, 24, None),
        ("t2v-lite-sft-5s", LITE, 16, None),
        ("2b-480p", SANA, 24, None),
        ("t2v-lite-sft-5s", LITE, 16, "ao-adamw8bit"),
        ("2b-480p", SANA, 24, "ao-adamw8bit"),
        ("t2i-lite-sft", replace(PICTURE, batch=1), 48, "ao-adamw8bit"),
    ],
)
def test_auto_fits_full_fine_tunes_on_small_cards(
    flavour: str, bucket: Bucket, gigabytes: int, optimizer: str | None
) -> None:
    """Labels are in 2^30 bytes; a moving average is in the 32 GB of the host, which for Image are
    64.
    """
    settings = {"model_type": "full", "speed": "auto", "use_ema": True, "ema_cpu_only": True}
    settings |= {"optimizer": optimizer} if optimizer else {}
    host = 64 if bucket.frames == 1 else 32
    plain = budget(gpu(gigabytes * 2**30 / 1e9, host * 2**30), bucket, flavour, **settings)

    chosen = choose(plain)
    assert not chosen.shortages(headroom=HEADROOM)
    assert chosen.config.optimizer.optimizer == optimizer

    if optimizer is None:
        assert chosen.decisions[0] == RELEASED
        assert not plain.fits
        assert smallest_change(plain)


def test_auto_changes_the_optimizer_last_and_never_the_users() -> None:
    """On a host that has no room for its state."""
    small = gpu(18, host=10e9)
    chosen = choose(budget(small, model_type="full"))
    assert not chosen.shortages(headroom=HEADROOM)
    assert chosen.config.optimizer.optimizer == "ao-adamw8bit"
    assert chosen.decisions[0].startswith(
        "optimizer ao-adamw8bit: without state in 8 bits the run does not fit"
    )

    for user_settings in ({"optimizer": "optimi-adamw"}, {"optimizer_release_gradients": False}):
        optimizer = choose(
            budget(small, model_type="full", **user_settings)
        ).config.optimizer.model_dump()
        assert optimizer | user_settings == optimizer
    accumulated = choose(budget(small, model_type="full", gradient_accumulation_steps=2))
    assert not accumulated.config.optimizer.optimizer_release_gradients
    assert not choose(
        budget(gpu(250), model_type="full")
    ).config.optimizer.optimizer_release_gradients


def test_auto_slows_no_step_for_previews_that_cannot_fit() -> None:
    training = budget(gpu(12))
    clip = Bucket(1024, 1024, 241, 1, 1.0, 256)
    rendering = with_previews(training, clip)
    without_previews = choose(training)

    with_previews_chosen = choose(rendering)

    assert found_by(check_fit, with_previews_chosen), "the previews are too large for every choice"
    assert (with_previews_chosen.config, with_previews_chosen.decisions) == (
        without_previews.config,
        without_previews.decisions,
    )
    assert with_previews_chosen.config.precision.base_model_precision == "no_change"


def test_auto_keeps_every_setting_of_the_user() -> None:
    user_settings = {
        "gradient_checkpointing": True,
        "enable_group_offload": False,
        "base_model_precision": "bf16",
    }
    for gigabytes in (4, 141):
        chosen = choose(budget(gpu(gigabytes), **user_settings))
        assert {key: chosen.config.flat[key] for key in user_settings} == user_settings


def test_nothing_is_offloaded_under_cuda_graphs() -> None:
    recorded = budget(gpu(8), dynamo_mode="reduce-overhead", dynamo_backend="inductor")

    chosen = choose(recorded).config.offload

    assert not chosen.enable_group_offload
    assert not chosen.offload_block_inputs
    assert choose(budget(gpu(8))).config.offload.enable_group_offload
    for change in smallest_change(recorded) or []:
        assert not change.values.keys() & {"enable_group_offload", "offload_block_inputs"}


def test_streaming_slows_short_steps_only() -> None:
    """The compute of a clip hides the copies of its blocks, that of a small picture does not."""

    def step_of(bucket: Bucket, flavour: str, **settings: Any) -> Any:
        return budget(gpu(80), bucket, flavour, **settings).steps[0].cost

    for bucket, flavour in ((PICTURE, "t2i-lite-sft"), (LITE, "t2v-lite-sft-5s")):
        streamed = step_of(bucket, flavour, **STREAMED)
        assert streamed.copying > 0
        assert streamed.seconds == step_of(bucket, flavour).seconds

    small_picture = Bucket(512, 512, 1, 1, 1.0, 256)
    streamed = step_of(small_picture, "t2i-lite-sft", **STREAMED)
    assert streamed.seconds == streamed.copying

    # Without a stream, copying and computing take turns.
    waiting = step_of(small_picture, "t2i-lite-sft", enable_group_offload=True)
    resident = step_of(small_picture, "t2i-lite-sft")
    assert waiting.seconds == pytest.approx(resident.seconds + waiting.copying)


def test_without_a_gpu_nothing_is_streamed() -> None:
    machine = Device("CPU", 9e9, 9e9, False, rates_of(""), "")

    for settings in choose(budget(machine)).config, budget(machine).config:
        assert not settings.offload.enable_group_offload
    assert "group_offload" not in complaint(machine)


def test_previews_need_transformer_and_vae_unless_model_cpu_offload() -> None:
    peaks = []
    for takes_turns in (False, True):
        run = with_previews(budget(gpu(80), enable_model_cpu_offload=takes_turns))
        peaks.append(device_bytes(run, PREVIEWS))
    weights = 4.573e9  # of the transformer, which leaves the device while the VAE decodes

    assert peaks[0] - peaks[1] == pytest.approx(weights, rel=0.01)
    assert peaks[0] > 20e9, "the VAE of HunyuanVideo decodes 17 frames at a time"


def test_evaluation_needs_memory_without_gradients() -> None:
    training = budget(gpu(80))
    measuring = replace(training, workload=replace(training.workload, evaluated=[LITE]))

    training_peak = max(phase.device for phase in training.phases)
    assert device_bytes(measuring, "measuring the evaluation loss") < training_peak

    # A sweep trains nothing, and holds a LoRA of 1 GB through all of its phases.
    sweep = replace(training, parts=replace(training.parts, trains=False, lora_bytes=10**9))
    sweep_of_losses = replace(sweep, workload=Workload([], [], False, [], 0.0, evaluated=[LITE]))
    activations = sweep_of_losses.model.sampling_bytes(sweep_of_losses.parts.load(LITE))
    sweep_peak = device_bytes(sweep_of_losses, "measuring the evaluation loss")
    assert sweep_peak == sweep_of_losses.model.frozen_bytes + activations + 1e9
    assert replace(sweep_of_losses, device=gpu(30)).fits
    assert not replace(sweep_of_losses, device=gpu(2)).fits


def test_auto_changes_nothing_that_fits() -> None:
    """With checkpointing set by the user there is nothing left to choose: attention is not computed
    twice.
    """
    chosen = choose(budget(gpu(80), speed="auto", gradient_checkpointing=True))

    assert chosen.config.speed.speed_keep_attention is None
    assert chosen.decisions == [
        "nothing to change: the blocks are checkpointed, and everything stays on the device"
    ]


def test_auto_streams_before_recomputing_attention() -> None:
    """Copies hide behind the compute of a clip; a second self-attention does not."""
    chosen = choose(budget(gpu(13), speed="auto"))
    assert not chosen.shortages(headroom=HEADROOM)
    assert chosen.config.offload.enable_group_offload
    assert chosen.config.speed.speed_keep_attention is None

    twice = budget(gpu(13), speed="auto", speed_keep_attention=False)
    assert not twice.shortages(headroom=HEADROOM), "it would have fitted, too"
    assert chosen.step_seconds < 0.9 * twice.step_seconds


def test_auto_offloads_inputs_alone_where_weights_cannot_stream() -> None:
    settings = {
        "model_type": "full",
        "gradient_checkpointing": True,
        "optimizer_release_gradients": False,
    }
    settings |= {"optimizer": "adamw_bf16"}
    long = replace(LITE, frames=241)
    assert budget(gpu(50), long, **settings).shortages(headroom=HEADROOM)

    chosen = choose(budget(gpu(50), long, **settings))
    assert not chosen.shortages(headroom=HEADROOM)
    assert chosen.decisions[0].startswith(
        "offload_block_inputs true: the blocks are checkpointed, and their inputs are kept"
    )


def test_auto_streams_a_text_encoder_that_does_not_fit() -> None:
    chosen = choose(budget(gpu(16), encodes_text=True))
    assert chosen.fits
    assert "group_offload_text_encoder true: encoding captions needs 17.3 GB" in chosen.decisions[0]
    assert not choose(budget(gpu(24), encodes_text=True)).config.offload.group_offload_text_encoder

    set_by_user = choose(budget(gpu(16), encodes_text=True, group_offload_text_encoder=False))
    assert not set_by_user.config.offload.group_offload_text_encoder


def encoding(device: Device, load: VaeLoad, flavour: str, **settings: Any) -> Budget:
    """Training on small pictures that the VAE has to encode first at full size."""
    before = budget(device, Bucket(256, 256, 1, 1, 1.0, 256), flavour, **settings)
    return replace(before, workload=replace(before.workload, encoded=[load]))


def test_smaller_vae_batch_is_suggested_for_large_pictures() -> None:
    pictures = VaeLoad(8, 1, 2048, 2048)

    before = encoding(gpu(18), pictures, "t2i-lite-sft", vae_batch_size=4)

    assert [str(change) for change in smallest_change(before)] == ["vae_batch_size 1"]
    assert encoding(gpu(18), pictures, "t2i-lite-sft").fits


def test_latents_are_encoded_before_training_where_both_do_not_fit() -> None:
    before = budget(gpu(80))
    later = replace(before.workload, encoded_in_training=[VaeLoad(1, 61, 768, 512)])
    apart = replace(before, workload=later)
    peak = max(phase.device for phase in before.phases)

    beside = max(phase.device for phase in apart.phases) - peak
    assert beside > 5e9

    tight = replace(apart, device=gpu((peak + beside / 2) / 0.9e9))
    (change,) = smallest_change(tight)
    assert str(change).startswith("latents encoded before training, without vae_cache_ondemand")


@pytest.mark.parametrize(
    ("gigabytes", "change"), [(10, "vae_enable_patch_conv true"), (7, "vae_enable_tiling true")]
)
def test_vae_is_sliced_or_tiled_before_samples_shrink(gigabytes: float, change: str) -> None:
    before = encoding(gpu(gigabytes), VaeLoad(1, 61, 768, 512), "t2v-lite-sft-5s")
    assert [str(step) for step in smallest_change(before)] == [change]


def test_auto_tiles_the_vae_on_a_small_card() -> None:
    before = with_previews(encoding(gpu(8), VaeLoad(1, 61, 768, 512), "t2v-lite-sft-5s"))
    chosen = choose(before)
    assert chosen.fits
    assert any(
        "vae_enable_tiling true" in decision and "seams" in decision
        for decision in chosen.decisions
    )

    refused = choose(before.under({"vae_enable_tiling": False}, "config.json"))
    assert not refused.config.caching.vae_enable_tiling, "what the user set is left alone"
    assert not refused.fits


def with_previews(before: Budget, preview: Bucket = LITE) -> Budget:
    guidance = before.config.validation.validation_guidance or 1
    preview = replace(preview, share=1.0, guided=guidance > 1)
    return replace(before, workload=replace(before.workload, previews=[preview]))


@pytest.mark.parametrize(
    ("gigabytes", "how"), [(6, "tiles"), (9, "strips"), (16, "strips"), (40, "whole")]
)
def test_auto_decodes_previews_in_the_first_way_that_fits_beside_training(
    gigabytes: float, how: str
) -> None:
    training = budget(gpu(gigabytes))
    chosen = choose(with_previews(training))
    assert chosen.config.validation.validation_decoding == how
    assert chosen.fits
    assert chosen.step_seconds == choose(training).step_seconds, "previews slow no step down"
    assert not chosen.config.caching.vae_enable_tiling
    assert how == "whole" or any(
        f"previews are decoded in {how}" in decision for decision in chosen.decisions
    )

    set_by_user = choose(with_previews(budget(gpu(gigabytes), validation_decoding="whole")))
    assert set_by_user.config.validation.validation_decoding == "whole", (
        "what the user set is left alone"
    )


def test_sampling_streams_blocks_before_tiling_the_vae() -> None:
    before = budget(gpu(8))

    chosen = choose(replace(before, workload=Workload([], [], False, [LITE], 0.0)))

    assert chosen.fits
    assert chosen.config.offload.enable_group_offload
    assert chosen.config.validation.validation_decoding == "strips"


def test_tiled_previews_need_no_more_memory_than_training() -> None:
    for settings in ({}, STREAMED, {**STREAMED, "offload_block_inputs": True}):
        run = with_previews(budget(gpu(80), validation_decoding="tiles", **settings))

        assert device_bytes(run, PREVIEWS) <= device_bytes(run, "training")


def test_smallest_change_for_previews_is_their_decoding() -> None:
    before = with_previews(budget(gpu(14)))
    assert [str(change) for change in smallest_change(before)] == ["validation_decoding strips"]


def test_cudnn_workspace_is_counted_for_whole_clips_on_a_gpu() -> None:
    before = with_previews(budget(gpu(80)))
    on_gpu = replace(before.parts, on_gpu=True)

    def rendering(parts: Parts, how: str, preview: Bucket = LITE) -> float:
        run = with_previews(before, preview).under({"validation_decoding": how}, "test")
        return device_bytes(replace(run, parts=parts), PREVIEWS)

    decoding = 2 * VIDEO_COST.vae.decode(VaeLoad(1, 61, 768, 512))

    more = rendering(on_gpu, "whole") - rendering(before.parts, "whole")
    assert more == pytest.approx(0.3 * decoding)
    assert 0.2 * 15e9 < more < 0.4 * 16e9
    assert rendering(on_gpu, "strips") == rendering(before.parts, "strips")

    picture = replace(LITE, frames=1)
    assert rendering(on_gpu, "whole", picture) == rendering(before.parts, "whole", picture)


@pytest.mark.parametrize(
    ("size", "how"),
    [
        ((768, 512), "whole"),
        ((960, 544), "whole"),
        ((1024, 512), "strips"),
        ((1024, 1024), "strips"),
    ],
)
def test_large_clips_are_decoded_in_strips_unless_set(size: tuple[int, int], how: str) -> None:
    preview = replace(LITE, width=size[0], height=size[1])

    unset = with_previews(budget(gpu(80)), preview)
    set_by_user = with_previews(budget(gpu(80), validation_decoding="whole"), preview)
    of_pictures = with_previews(budget(gpu(80), PICTURE, "t2i-lite-sft"), PICTURE)

    assert decoding_of(unset) == how
    assert decoding_of(set_by_user) == "whole"

    warnings = found_by(check_decoding, set_by_user)
    assert [problem.fatal for problem in warnings] == ([False] if how == "strips" else [])
    assert found_by(check_decoding, of_pictures) == []


def test_previews_are_decoded_in_strips_where_only_strips_fit() -> None:
    """A card of 24 GB has room for the packaged examples, with or without what cuDNN may take."""
    roomy = with_previews(budget(gpu(40)))
    tight = with_previews(budget(gpu(14)))
    too_small = with_previews(budget(gpu(4)))
    automatic = with_previews(budget(gpu(14), offload="auto"))
    set_by_user = with_previews(budget(gpu(14), validation_decoding="whole"))

    assert decoding_of(roomy) == "whole"
    assert decoding_of(tight) == "strips"
    assert decoding_of(too_small) == "whole", "strips do not fit either"
    assert decoding_of(automatic) == "whole", "auto first tries to free memory for training"
    assert decoding_of(set_by_user) == "whole"


def test_guidance_is_batched_where_previews_have_room() -> None:
    streamed: dict[str, Any] = {
        "speed": "auto",
        "enable_group_offload": True,
        "validation_decoding": "tiles",
        "validation_guidance": 5.0,
    }
    sequential = with_previews(budget(gpu(80), **streamed))

    batched = with_faster_previews(sequential)
    assert batched.config.validation.validation_batched_guidance
    assert batched.fits

    needed = device_bytes(batched, PREVIEWS)
    assert needed > device_bytes(sequential, PREVIEWS)
    assert batched.preview_seconds <= sequential.preview_seconds

    # No room to spare, forbidden by the user, and forbidden by the reference speed.
    not_batched: tuple[tuple[float, dict[str, Any]], ...] = (
        (needed / 1e9, {}),
        (80, {"validation_batched_guidance": False}),
        (80, {"speed": "reference"}),
    )
    for gigabytes, settings in not_batched:
        tight = with_previews(budget(gpu(gigabytes), **{**streamed, **settings}))
        assert not with_faster_previews(tight).config.validation.validation_batched_guidance
    sana = with_faster_previews(with_previews(budget(gpu(80), flavour="2b-480p")))
    assert sana.config.validation.validation_batched_guidance is None, "its pipeline always does so"


def test_previews_stay_as_they_are_where_the_memory_of_the_device_is_unknown() -> None:
    unknown = replace(gpu(80), memory=None)
    previews = with_previews(budget(unknown, speed="auto", validation_guidance=5.0))

    assert with_faster_previews(previews) is previews


@pytest.mark.parametrize(
    ("flavour", "share"),
    [("t2v-lite-sft-5s", GPU_CONVOLUTIONS), ("2b-480p", GPU_CONVOLUTIONS * FLOAT32_SHARE)],
)
def test_previews_take_as_long_as_sampling_and_decoding(flavour: str, share: float) -> None:
    """The VAE of Sana Video decodes in float32."""
    run = with_previews(budget(gpu(80), flavour=flavour, num_validation_images=2))
    vae = run.parts.vae
    sampling = replace(run, parts=replace(run.parts, vae=replace(vae, flops={}))).preview_seconds

    flops = vae.decode_flops(VaeLoad(1, LITE.frames, LITE.width, LITE.height))

    assert run.preview_seconds - sampling == pytest.approx(
        2 * flops / (share * run.device.rates.matmul)
    )
    assert 0 < flops / run.device.rates.matmul < sampling


def test_vae_stays_loaded_and_decodes_in_background_where_both_fit() -> None:
    def chosen(
        gigabytes: float, flavour: str = "t2v-lite-sft-5s", **settings: Any
    ) -> tuple[object, object]:
        run = with_previews(
            budget(gpu(gigabytes), flavour=flavour, validation_decoding="tiles", **settings)
        )
        config = with_faster_previews(run).config
        return config.caching.keep_vae_loaded, config.validation.validation_decode_in_background

    assert chosen(80) == (True, True)
    assert chosen(80, "2b-480p") == (True, None), (
        "its VAE computes in float32, which is a setting of the process"
    )
    assert chosen(80, mixed_precision="no") == (True, None)
    assert chosen(80, enable_model_cpu_offload=True) == (None, None)
    assert chosen(80, keep_vae_loaded=False, validation_decode_in_background=False) == (
        False,
        False,
    )

    plain = with_previews(budget(gpu(80), validation_decoding="tiles"))
    kept = plain.under({"keep_vae_loaded": True}, "test")
    both = kept.under({"validation_decode_in_background": True}, "test")
    assert training_bytes(plain) < training_bytes(kept) < training_bytes(both)

    # Over all cards the VAE stays before it decodes in the background, never the other way round.
    assert {chosen(gigabytes) for gigabytes in range(8, 48, 1)} == {
        (None, None),
        (True, None),
        (True, True),
    }


def test_a_preview_is_sampled_while_the_one_before_is_decoded_in_the_background() -> None:
    plain = with_previews(budget(gpu(80), validation_decoding="tiles"))
    background = plain.under({"validation_decode_in_background": True}, "test")
    added = training_bytes(background) - training_bytes(plain)  # the VAE and what decoding takes
    vae, _ = plain.parts.encoder_bytes(plain.config)
    larger = device_bytes(plain, "rendering previews")
    both = device_bytes(background, "rendering previews")

    assert both > larger
    assert both <= larger + added - vae


def decoding_of(run: Budget) -> str:
    return with_strips(run).config.validation.validation_decoding


def device_bytes(run: Budget, phase_name: str) -> float:
    """Peak memory on the device in the first phase whose name begins so."""
    return next(phase.device for phase in run.phases if phase.name.startswith(phase_name))


def training_bytes(run: Budget) -> float:
    """Peak memory on the device while training."""
    return max(phase.device for phase in run.phases if phase.trains)


def test_streaming_and_moving_all_weights_exclude_each_other() -> None:
    before = budget(gpu(8), enable_model_cpu_offload=True)
    assert not choose(before).config.offload.enable_group_offload

    (change,) = smallest_change(before)
    assert change.values == {**STREAMED, "enable_model_cpu_offload": False}


SMALL = Bucket(256, 256, 1, 1, 1.0, 64)


def small(gigabytes: float = 80, **settings: Any) -> Budget:
    """Small pictures on a fast card, whose kernels take less time than launching them."""
    return budget(
        gpu(gigabytes, 1e12), SMALL, "t2i-lite-sft", **{"gradient_checkpointing": True, **settings}
    )


def with_batch(before: Budget, count: int) -> Budget:
    """The same small pictures, `count` a step."""
    buckets = [replace(SMALL, batch=count)]
    return replace(before, workload=replace(before.workload, buckets=buckets))


def test_larger_batch_is_proposed_where_launches_limit_the_gpu() -> None:
    before = small()
    batch = free_batch(before, math.inf)
    assert batch is not None
    assert batch > 1

    proposed = with_batch(before, batch)
    one_more = with_batch(before, batch + 1)
    assert proposed.step_seconds == before.step_seconds
    assert one_more.step_seconds > before.step_seconds
    assert free_batch(proposed, math.inf) is None

    large_pictures = budget(gpu(80, 1e12), PICTURE, "t2i-lite-sft")
    assert free_batch(large_pictures, math.inf) is None, "computing takes longer than launching"

    cuda_graph = small(dynamo_mode="reduce-overhead")
    assert free_batch(cuda_graph, math.inf) is None, "a CUDA graph needs no launches"

    assert free_batch(before, batch / 2) == batch // 2, "an epoch has no more samples"
    assert free_batch(before, 1.5) is None


def test_a_proposal_carries_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "steps_per_epoch", lambda plan: math.inf)
    before = small()
    chosen = ready._with_offload_chosen(before)

    [(line, settings)] = chosen.proposals.items()

    assert line == chosen.decisions[-1]
    assert settings == {"train_batch_size": free_batch(before, math.inf)}


def test_a_proposed_batch_fits() -> None:
    roomy = small()
    # A card that has 2 % more than the run needs, overhead and fragments included.
    needed = (roomy.peaks[0] * 1.02 + DEVICE_OVERHEAD) / (1 - FRAGMENTS)
    tight = replace(roomy, device=gpu(needed / 1e9, host=1e12))
    assert tight.fits

    batch_of_roomy = free_batch(roomy, math.inf) or 1
    batch_of_tight = free_batch(tight, math.inf) or 1

    assert batch_of_tight < batch_of_roomy
