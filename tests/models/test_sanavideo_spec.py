"""Sana Video's defaults, fixed and refused settings, its task, and checks of its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.datasets import DatasetConfig, VideoConfig
from simpletuner.config.load import Layer, resolve
from simpletuner.config.schema import RunConfig
from simpletuner.errors import Problem, Problems
from simpletuner.models.kandinsky5.spec import KANDINSKY5_VIDEO
from simpletuner.models.registry import FAMILIES
from simpletuner.models.sanavideo.spec import SANA_VIDEO, SIZES
from simpletuner.models.source import ModelSource
from simpletuner.planning.build import choose_task
from simpletuner.planning.checks import check_weights
from tests.tools.reports import found_by

FLAVOUR = SANA_VIDEO.flavours[0]


def resolve_sana(**settings: Any) -> tuple[RunConfig, dict[str, Problem]]:
    """The config of a run, and its problems by key."""
    problems = Problems()
    values = {"model_type": "lora", "model_family": "sanavideo", **settings}
    layers = [Layer("config.json", list(values.items()))]
    config = resolve(layers, problems, SANA_VIDEO.defaults, SANA_VIDEO.fixed)
    SANA_VIDEO.checks.settings(config, FLAVOUR, problems)
    return config, {problem.where: problem for problem in problems}


def test_sana_is_registered_with_480p_as_default() -> None:
    assert FAMILIES["sanavideo"] is SANA_VIDEO
    assert SANA_VIDEO.flavour(None).name == "2b-480p"
    assert (
        SANA_VIDEO.flavour("2b-480p").repository
        == "Efficient-Large-Model/SANA-Video_2B_480p_diffusers"
    )


def test_720p_has_its_own_grid() -> None:
    spec = SANA_VIDEO.for_flavour("2b-720p")
    assert spec.latent_size(1280, 704, 81) == (11, 22, 40)
    assert spec.tokens(11, 22, 40) == 11 * 22 * 40
    assert spec.defaults["validation_resolution"] == "1280x704"
    assert all(side % spec.size_multiple == 0 for size in spec.native_sizes[720] for side in size)
    assert SANA_VIDEO.for_flavour(None) == SANA_VIDEO
    published = SANA_VIDEO.cost.of_flavour("2b-720p").shapes

    assert published["patch_embedding.weight"] == (2240, 128, 1, 1, 1)


def test_sana_has_the_defaults_of_its_pipeline() -> None:
    config, problems = resolve_sana()

    assert not problems
    assert config.validation.validation_resolution == ((832, 480),)
    assert config.validation.validation_num_video_frames == 81
    assert config.caching.vae_dtype == "fp32"
    assert config.flow.flow_schedule_shift == 3.0
    assert not config.is_explicit("flow_schedule_shift")


def test_shift_options_are_ignored_with_a_warning() -> None:
    settings = {
        "flow_schedule_shift": 1.0,
        "flow_schedule_auto_shift": True,
        "flow_sigmoid_scale": 0.5,
        "flow_use_uniform_schedule": True,
        "flow_beta_schedule_alpha": 3,
    }
    config, problems = resolve_sana(**settings)

    assert set(problems) == set(settings)
    for problem in problems.values():
        assert "is ignored" in problem.message
        assert not problem.fatal
    assert {key: config.flat[key] for key in SANA_VIDEO.fixed} == SANA_VIDEO.fixed
    assert not any(config.is_explicit(key) for key in settings)


def test_the_fixed_value_itself_is_accepted_without_a_warning() -> None:
    fixed = {
        "flow_schedule_shift": "3",
        "flow_schedule_auto_shift": "false",
        "flow_sigmoid_scale": None,
    }

    _, problems = resolve_sana(**fixed)

    assert not problems


ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 0, "end_layer_idx": 1}


@pytest.mark.parametrize(
    ("settings", "key", "words", "fatal"),
    [
        ({"tread_config": {"routes": [ROUTE]}}, "tread_config", "convolution", True),
        ({"validation_num_video_frames": 85}, "validation_num_video_frames", "81", False),
        ({"vae_dtype": "bf16"}, "vae_dtype", "fp32", False),
        (
            {"sana_complex_human_instruction": 7},
            "sana_complex_human_instruction",
            "list of lines",
            True,
        ),
        (
            {"sana_complex_human_instruction": "gone.txt"},
            "sana_complex_human_instruction",
            "file",
            True,
        ),
    ],
)
def test_unusable_settings_are_reported_by_key(
    settings: dict[str, Any], key: str, words: str, fatal: bool
) -> None:
    _, problems = resolve_sana(**settings)

    assert words in problems[key].message
    assert problems[key].fatal is fatal


def test_sizes_are_on_the_grid() -> None:
    assert len(set(SIZES[480])) == 11
    assert not any(side % SANA_VIDEO.size_multiple for size in SIZES[480] for side in size)
    assert (832, 480) in SIZES[480]


class TestTask:
    """The same checkpoint serves two tasks; the datasets decide which."""

    def entry(self, is_i2v: bool | None, kind: Any = "video") -> DatasetConfig:
        return DatasetConfig(
            id=f"{kind}-{is_i2v}", dataset_type=kind, video=VideoConfig(is_i2v=is_i2v)
        )

    def test_the_task_is_t2v_unless_a_dataset_is_i2v(self) -> None:
        flavour, entries = choose_task(FLAVOUR, [self.entry(None), self.entry(None, "image")])

        assert flavour == FLAVOUR
        assert [entry.video.is_i2v for entry in entries] == [False, None]

    def test_one_i2v_dataset_makes_the_run_i2v(self) -> None:
        flavour, entries = choose_task(
            FLAVOUR, [self.entry(None), self.entry(True), self.entry(False)]
        )

        assert (flavour.task, flavour.name) == ("i2v", FLAVOUR.name)
        assert [entry.video.is_i2v for entry in entries] == [False, True, False]

    def test_a_flavour_with_one_task_ignores_the_datasets(self) -> None:
        flavour, entries = choose_task(
            KANDINSKY5_VIDEO.flavours[0], [self.entry(True), self.entry(None)]
        )

        assert flavour == KANDINSKY5_VIDEO.flavours[0]
        assert [entry.video.is_i2v for entry in entries] == [True, None]


class TestCheckpoint:
    """Parts that do not belong together are refused before anything is loaded."""

    def problems(self, checkpoint: Path, folder: Path, part: str, **changes: Any) -> list[Problem]:
        for source in checkpoint.iterdir():
            (folder / source.name).symlink_to(source)
        config = json.loads((checkpoint / part / "config.json").read_text()) | changes
        (folder / part).unlink()
        (folder / part).mkdir()
        for source in (checkpoint / part).iterdir():
            (folder / part / source.name).symlink_to(source)
        (folder / part / "config.json").unlink()
        (folder / part / "config.json").write_text(json.dumps(config))
        config_of_folder = resolve_sana(pretrained_model_name_or_path=str(folder))[0]
        damaged = ModelSource.from_settings(SANA_VIDEO, FLAVOUR, config_of_folder.flat)
        assert not found_by(damaged.check)
        return [
            *found_by(SANA_VIDEO.checks.checkpoint, FLAVOUR, damaged),
            *found_by(check_weights, SANA_VIDEO, FLAVOUR, damaged),
        ]

    def test_matching_parts_have_no_problem(self, sana_checkpoint: Path, tmp_path: Path) -> None:
        assert not self.problems(sana_checkpoint, tmp_path, "vae")

    @pytest.mark.parametrize(
        ("part", "changes", "words"),
        [
            (
                "transformer",
                {"_class_name": "SanaTransformer2DModel"},
                "has a 'SanaVideoTransformer3DModel'",
            ),
            ("transformer", {"in_channels": 32}, "16 channels, the transformer 32"),
            ("transformer", {"out_channels": 32}, "returns 32"),
            ("transformer", {"caption_channels": 2304}, "reads 2304"),
            ("vae", {"_class_name": "AutoencoderKLLTX2Video"}, "has a 'AutoencoderKLWan'"),
            ("vae", {"z_dim": 48}, "48 channels"),
            ("vae", {"latents_std": [1.0]}, "1 values of latents_std"),
            ("vae", {"latents_mean": None}, "0 values of latents_mean"),
        ],
    )
    def test_parts_that_do_not_fit_are_refused(
        self, sana_checkpoint: Path, tmp_path: Path, part: str, changes: dict[str, Any], words: str
    ) -> None:
        problems = self.problems(sana_checkpoint, tmp_path, part, **changes)

        errors = [problem.message for problem in problems if problem.fatal]
        assert any(words in error for error in errors), errors
