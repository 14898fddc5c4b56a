"""Keys that the user set and that cannot act in the run, and numbers that no run can mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.datasets import dataset_options
from simpletuner.config.schema import all_options
from tests.tools.refusals import complaint, complaints, warnings
from tests.tools.workspace import DATASETS, Workspace

Capture = pytest.CaptureFixture[str]
PREVIEWS = {"validation_disable": False}
HOOK = {"webhook_type": "discord", "webhook_url": "https://example.org/x"}
EVALUATED = {"eval_steps_interval": 2}
# (key, value without effect, settings beside it)
SETTINGS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("quantize_via", "accelerator", {}),
    ("tracker_project_name", "cats", {}),
    ("logging_dir", "curves", {}),
    ("webhook_images", "base64", {"webhook_config": HOOK}),
    ("lr_scale", True, {"train_batch_size": 1}),
    ("lr_scale_sqrt", True, {"train_batch_size": 1}),
    ("vae_enable_slicing", True, {}),
    ("revision", "main", {}),
    ("validation_using_datasets", True, PREVIEWS),
    ("eval_dataset_id", ["pictures"], PREVIEWS),
    ("num_eval_images", 2, PREVIEWS),
    ("validation_negative_prompt", "blurry", {"validation_guidance": 1}),
    ("validation_seed", 5, {"validation_randomize": True, **PREVIEWS}),
    ("seed_for_each_device", False, {}),
    ("grad_clip_method", "norm", {"max_grad_norm": 0}),
    ("data_backend_sampling", "uniform", {}),
    ("conditioning_multidataset_sampling", "combined", {}),
    ("disable_segmented_timestep_sampling", True, {"train_batch_size": 1}),
    ("allow_dataset_oversubscription", True, {}),
    ("retry_failed", True, {}),
    ("caption_strategy", "textfile", {}),
    ("eval_steps_interval", 2, {}),
    ("eval_epoch_interval", 2, {}),
    ("eval_timesteps", 5, EVALUATED),
    ("eval_dataset_pooling", True, EVALUATED),
    ("masked_loss_floor", 0.5, {}),
)


def plan_warnings(workspace: Workspace, capsys: Capture, settings: dict[str, Any]) -> list[str]:
    workspace.write_config(**settings)
    return [line.strip() for line in warnings(workspace, capsys).splitlines()]


@pytest.mark.parametrize(("key", "value", "beside"), SETTINGS, ids=[key for key, _, _ in SETTINGS])
def test_key_without_effect_is_a_warning(
    workspace: Workspace, capsys: Capture, key: str, value: Any, beside: dict[str, Any]
) -> None:
    warnings = plan_warnings(workspace, capsys, {**beside, key: value})

    assert [line for line in warnings if line.startswith(f"{key}: has no effect")]


# (key, value without effect, keys of the entry beside it)
ENTRIES: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("crop_style", "center", {}),
    ("crop_aspect", "preserve", {}),
    ("crop_aspect_buckets", [1.0], {"crop": True}),
    ("max_upscale_threshold", 0.2, {"crop": True}),
    ("vae_cache_clear_each_epoch", True, {"crop": True, "crop_style": "center"}),
    ("disable_multiline_split", True, {"caption_strategy": "filename"}),
    ("instance_prompt", "zkt", {}),
    ("parquet", {"path": "x.parquet"}, {}),
    ("target_downsample_size", 512, {}),
    ("allow_private_urls", True, {}),
    ("default", True, {}),
    ("source_dataset_id", "pictures", {}),
    ("caption_shuffle", {"count": 2}, {}),
    ("video", {"num_frames": 5}, {}),
)
EVALUATION = (
    ("repeats", 2),
    ("probability", 0.5),
    ("train_batch_size", 2),
    ("start_epoch", 2),
    ("start_step", 3),
    ("end_epoch", 3),
    ("end_step", 4),
    ("timestep_sampling_offset", 0.5),
    ("is_regularisation_data", True),
    ("slider_strength", 1),
)


@pytest.mark.parametrize(("key", "value", "beside"), ENTRIES, ids=[key for key, _, _ in ENTRIES])
def test_dataset_key_without_effect_is_a_warning(
    workspace: Workspace, capsys: Capture, key: str, value: Any, beside: dict[str, Any]
) -> None:
    workspace.write_datasets([{**DATASETS[0], **beside, key: value}, DATASETS[1]])

    warnings = plan_warnings(workspace, capsys, {})

    assert [line for line in warnings if line.startswith(f"pictures.{key}: has no effect")]


@pytest.mark.parametrize(("key", "value"), EVALUATION, ids=[key for key, _ in EVALUATION])
def test_training_key_on_evaluation_data_is_a_warning(
    workspace: Workspace, capsys: Capture, key: str, value: Any
) -> None:
    workspace.add_pictures("datasets/held", 2, seed=3)
    held = {
        **DATASETS[0],
        "id": "held",
        "dataset_type": "eval",
        "instance_data_dir": "datasets/held",
        "repeats": 0,
    }
    workspace.write_datasets([DATASETS[0], {**held, key: value}, DATASETS[1]])

    warnings = plan_warnings(workspace, capsys, EVALUATED)

    assert f"held.{key}: has no effect: the dataset is not trained." in warnings


def test_picture_key_on_a_text_cache_is_a_warning(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_datasets([DATASETS[0], {**DATASETS[1], "resolution": 512}])

    warnings = plan_warnings(workspace, capsys, {})

    assert warnings == [
        "text.resolution: has no effect: an entry of text_embeds only names a cache."
    ]


def test_dataset_keys_with_effect_are_not_reported(workspace: Workspace, capsys: Capture) -> None:
    acting = {
        "crop": True,
        "crop_aspect": "random",
        "crop_aspect_buckets": [1.0],
        "crop_style": "center",
        "repeats": 2,
        "max_upscale_threshold": 0.2,
        "vae_cache_clear_each_epoch": True,
        "disable_multiline_split": True,
        "instance_prompt": "zkt",
        "prepend_instance_prompt": True,
        "maximum_image_size": 512,
        "start_epoch": 1,
        "target_downsample_size": 256,
        "caption_shuffle": {"enable": True, "count": 2},
        "probability": 0.5,
        "timestep_sampling_offset": 0.5,
        "train_batch_size": 1,
    }
    workspace.write_datasets([{**DATASETS[0], **acting}, DATASETS[1]])

    warnings = plan_warnings(workspace, capsys, {})

    assert [line for line in warnings if "has no effect" in line] == []


def test_keys_with_effect_are_not_reported(workspace: Workspace, capsys: Capture) -> None:
    second = {
        **DATASETS[0],
        "id": "more",
        "instance_data_dir": "datasets/more",
        "caption_strategy": None,
        "hold_out": 2,
    }
    workspace.add_pictures("datasets/more", 6, seed=1)
    workspace.write_datasets(
        [{**DATASETS[0], "hold_out": 2}, {k: v for k, v in second.items() if v}, DATASETS[1]]
    )
    acting = {
        "base_model_precision": "int8-quanto",
        "quantize_via": "accelerator",
        "lr_scale": True,
        "vae_batch_size": 2,
        "vae_enable_slicing": True,
        "num_eval_images": 2,
        "validation_negative_prompt": "blurry",
        "data_backend_sampling": "uniform",
        "disable_segmented_timestep_sampling": True,
        "caption_strategy": "textfile",
        "eval_steps_interval": 2,
        "eval_timesteps": 5,
        "eval_dataset_pooling": True,
        "webhook_images": "base64",
        "webhook_config": {"webhook_type": "raw", "callback_url": "https://example.org/x"},
        "tracker_project_name": "cats",
    }

    warnings = plan_warnings(workspace, capsys, {**acting, **PREVIEWS})

    assert [line for line in warnings if "has no effect" in line] == []


def test_run_on_regularisation_data_alone_is_refused(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_datasets([{**DATASETS[0], "is_regularisation_data": True}, DATASETS[1]])

    assert complaint(workspace, capsys).startswith(
        "pictures.is_regularisation_data: is set on every dataset"
    )


@pytest.mark.parametrize("folder", ["/", "~", "//", "/."])
def test_output_folder_must_not_be_the_home_or_root_folder(
    workspace: Workspace, capsys: Capture, folder: str
) -> None:
    workspace.write_config(output_dir=folder)

    assert complaint(workspace, capsys).startswith(f"output_dir: {folder!r} is the ")


def test_every_number_has_limits() -> None:
    """The default limit of a billion is for counts of steps; other numbers set tighter limits."""
    free = {"seed", "validation_seed", "caption_shuffle.seed"}
    for name, option in {**all_options(), **dataset_options()}.items():
        if option.type_name == "number" and name not in free:
            assert option.limits.keys() & {"le", "lt"}, name
            assert option.limits.keys() & {"ge", "gt"}, name


@pytest.mark.parametrize(
    "setting", ["noise_offset=1e9", "tokenizer_max_length=3", "learning_rate=1e9"]
)
def test_implausible_numbers_are_refused(
    workspace: Workspace, capsys: Capture, setting: str
) -> None:
    assert "is out of range" in complaint(workspace, capsys, "plan", setting)


def test_unknown_keys_in_a_prompt_library_are_errors(
    workspace: Workspace, capsys: Capture, tmp_path: Path
) -> None:
    library = {"a": {"prompt": "a cat", "promt": 2}, "b": {"prompt": "a dog", "_note": "mine"}}
    workspace.path("library.json").write_text(json.dumps(library))
    workspace.write_config(user_prompt_library="library.json", **PREVIEWS)

    (problem,) = complaints(workspace, capsys)

    assert problem == (
        "user_prompt_library: library.json: 'promt' of 'a' is not a known key (prompt, seed, "
        "guidance, resolution, picture). Did you mean 'prompt'?"
    )


def test_user_without_a_home_folder_can_plan(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that runs under an arbitrary user id."""

    def no_such_user(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_such_user)

    assert workspace.run("plan") == 0
