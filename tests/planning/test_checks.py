"""Rules between keys: what excludes what, and what has no effect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.load import Layer, resolve
from simpletuner.config.schema import RunConfig
from simpletuner.errors import Problems
from simpletuner.models.registry import FAMILIES
from simpletuner.planning.build import find_family
from simpletuner.planning.checkpoint_folder import Checkpoint, Identity, Manifest
from simpletuner.planning.checks import check_config, check_flavour, check_total, worth_reporting
from simpletuner.planning.resume import decide_seed
from tests.tools.refusals import family_complaints
from tests.tools.reports import found_by

REQUIRED = {"model_type": "lora", "model_family": "kandinsky5-image"}


def problems(**settings: Any) -> tuple[list[str], list[str]]:
    """Errors and warnings of a config with these settings."""
    reported = check_config(make_config(**settings))
    errors = [str(problem) for problem in reported if problem.fatal]
    warnings = [str(problem) for problem in reported if not problem.fatal]
    return errors, warnings


def make_config(**settings: Any) -> RunConfig:
    return resolve([Layer("config.json", list({**REQUIRED, **settings}.items()))], Problems())


def test_plain_config_has_no_problem() -> None:
    assert problems() == ([], [])


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"max_train_steps": 5, "num_train_epochs": 1}, "num_train_epochs"),
        ({"max_train_steps": 0, "num_train_epochs": 0}, "num_train_epochs"),
        ({"num_train_epochs": 0}, "num_train_epochs"),
        ({"lr_scheduler": "cosine", "lr_end": 1e-4}, "lr_end"),
        ({"lr_scheduler": "linear", "learning_rate": 1e-6, "lr_end": 1e-6}, "lr_end"),
        ({"mixed_precision": "fp8"}, "mixed_precision"),
        ({"mixed_precision": "no", "optimizer": "adamw_bf16"}, "optimizer"),
        ({"lora_init_type": "loftq"}, "lora_init_type"),
        ({"lora_init_type": "pissa", "mixed_precision": "bf16"}, "lora_init_type"),
        ({"lora_init_type": "olora", "base_model_precision": "bf16"}, "lora_init_type"),
        ({"lora_plus_ratio": 16, "optimizer": "muon"}, "lora_plus_ratio"),
        ({"optimizer_beta1": 0.9}, "optimizer_beta1"),
        ({"optimizer_config": "betta1=0.5"}, "optimizer_config"),
        ({"report_to": "wand"}, "report_to"),
        ({"lora_type": "lokr", "lokr_factor": 0}, "lokr_factor"),
        ({"report_to": "none,wandb"}, "report_to"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, Any], where: str) -> None:
    errors, _ = problems(**settings)
    (error,) = errors

    assert error.startswith(f"{where}: ")
    assert not re.search(r"\w'[a-z]{2}", error), "a quoted value is followed by a space"


def test_two_kinds_of_offload_are_refused_in_one_sentence() -> None:
    errors, _ = problems(enable_group_offload=True, enable_model_cpu_offload=True)
    assert errors == [
        "enable_group_offload: cannot be combined with enable_model_cpu_offload: "
        "one streams the blocks, the other moves them all."
    ]


def test_full_fine_tune_of_a_quantised_model_is_refused() -> None:
    errors, _ = problems(model_type="full", base_model_precision="int8-quanto")
    assert any("use model_type lora" in error for error in errors)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"strict_epoch_limit": True, "ignore_final_epochs": True}, "strict_epoch_limit"),
        ({"flow_schedule_auto_shift": True, "flow_schedule_shift": 2}, "flow_schedule_auto_shift"),
        ({"caption_dropout_probability": 0}, "caption_dropout_probability"),
        ({"optimizer": "torch-sgd", "adam_beta1": 0.8}, "adam_beta1"),
    ],
)
def test_settings_without_effect_or_with_harm_are_warnings(
    settings: dict[str, Any], where: str
) -> None:
    errors, warnings = problems(**settings)
    assert errors == []
    (warning,) = warnings
    assert warning.startswith(f"{where}: ")


def test_lr_end_is_ignored_by_schedulers_that_do_not_decay() -> None:
    assert problems(lr_scheduler="constant", lr_end=1)[0] == []
    assert problems(lr_scheduler="sine", lr_end=1)[0] == []


@pytest.mark.parametrize(
    ("switch", "key"),
    [
        (
            {"scheduled_sampling_max_step_offset": 2, "scheduled_sampling_probability": 1},
            "scheduled_sampling_start_step",
        ),
        ({"use_ema": True}, "ema_warmup_steps"),
        ({"crepa_enabled": True}, "crepa_warmup_steps"),
        ({}, "validate_after_step"),
    ],
)
def test_settings_that_start_after_the_last_step_are_warnings(
    switch: dict[str, Any], key: str
) -> None:
    def keys_of_warnings(**settings: Any) -> list[str]:
        problems = found_by(check_total, make_config(**settings), 10)
        return [problem.where for problem in problems if not problem.fatal]

    assert keys_of_warnings(**switch, **{key: 10}) == [key]
    assert keys_of_warnings(**switch, **{key: 9}) == []
    assert keys_of_warnings(**{key: 10, "validation_disable": True}) == []


@pytest.mark.parametrize(
    ("key", "command", "message"),
    [
        (
            "post_checkpoint_script",
            "true {global_steps}",
            "{global_steps} is not a placeholder here and stays as it is. Did",
        ),
        (
            "post_checkpoint_script",
            "true {remote_checkpoint_path}",
            "{remote_checkpoint_path} is not a placeholder",
        ),
        (
            "post_checkpoint_script",
            "true {local_checkpoint_path} {global_step} {tracker_run_name} {}",
            "",
        ),
    ],
)
def test_placeholders_of_scripts_are_checked(key: str, command: str, message: str) -> None:
    errors, warnings = problems(**{key: command})
    assert errors == []
    assert [message in warning for warning in warnings] == ([True] if message else [])


@pytest.mark.parametrize(
    ("warmup", "total", "warned"), [(10, 10, True), (11, 10, True), (9, 10, False), (0, 0, False)]
)
def test_warm_up_as_long_as_the_run_is_a_warning(warmup: int, total: int, warned: bool) -> None:
    reported = found_by(check_total, make_config(lr_warmup_steps=warmup), total)
    assert bool(reported) == warned
    assert not any(problem.fatal for problem in reported)


@pytest.mark.parametrize(
    ("family", "fatal"),
    [("kandinsky5-image", [False]), ("kandinsky5-video", [True]), ("sanavideo", [])],
)
def test_temporal_roll_is_refused_where_the_vae_cannot_carry_convolutions(
    family: str, fatal: list[bool]
) -> None:
    key = "vae_enable_temporal_roll"
    config = make_config(model_family=family, **{key: True})
    reported = family_complaints(config, FAMILIES[family])

    assert [problem.fatal for problem in reported if problem.where == key] == fatal


@pytest.mark.parametrize("configured", [None, -1, 0])
def test_resumed_run_keeps_its_drawn_seed(
    configured: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simpletuner.planning.resume.time.time", lambda: 1234.5)
    monkeypatch.setattr("simpletuner.planning.resume.secrets.randbelow", lambda bound: 1234)
    identity = Identity(
        "kandinsky5-image", "t2i-lite-sft", "lora", 1, seed=77, datasets="", versions={}
    )
    manifest = Manifest(5, epoch=1, identity=identity, files={})
    earlier = Checkpoint(Path("checkpoint-5"), 5, rolling=False, manifest=manifest)

    assert decide_seed(configured, None) == 1234
    assert decide_seed(configured, earlier) == 77


@pytest.mark.parametrize(
    ("flavour", "repository", "steps"),
    [
        ("t2v-lite-nocfg-10s", "T2V-Lite-nocfg-10s", 50),
        ("t2v-lite-distilled16steps-5s", "T2V-Lite-distilled16steps-5s", 16),
        ("t2v-pro-distilled-5s-hd", "T2V-Pro-distilled-5s", 16),
        ("i2v-pro-distilled-5s", "I2V-Pro-distilled-5s", 16),
    ],
)
def test_distilled_flavours_are_previewed_with_their_own_sampling(
    flavour: str, repository: str, steps: int
) -> None:
    values = {"model_type": "lora", "model_family": "kandinsky5-video", "model_flavour": flavour}
    layer = Layer("test", list(values.items()))
    problems = Problems()
    spec = find_family([layer], problems)
    assert spec is not None
    chosen = spec.flavour(flavour)
    assert chosen.repository == f"kandinskylab/Kandinsky-5.0-{repository}-Diffusers"
    config = resolve([layer], problems, spec.defaults, spec.fixed)
    preview = config.validation
    assert (preview.validation_guidance, preview.validation_num_inference_steps) == (1.0, steps)
    (warning,) = worth_reporting(found_by(check_flavour, config, chosen), config)
    assert "distilled" in str(warning)
    assert not warning.fatal
    of_family = found_by(spec.checks.settings, config, chosen)
    assert not [problem for problem in of_family if problem.where == "validation_guidance"]
    assert not problems
