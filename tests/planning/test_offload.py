"""What offloading excludes and needs is reported before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.load import Layer, resolve
from simpletuner.errors import Problems
from simpletuner.planning.checks import check_config

REQUIRED = {"model_type": "lora", "model_family": "kandinsky5-image"}


def problems_of(**settings: Any) -> tuple[list[str], list[str]]:
    """Errors and warnings."""
    config = resolve([Layer("config.json", list({**REQUIRED, **settings}.items()))], Problems())
    problems = check_config(config)
    return [str(problem) for problem in problems if problem.fatal], [
        str(problem) for problem in problems if not problem.fatal
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "enable_group_offload": True,
            "group_offload_use_stream": True,
            "group_offload_blocks_per_group": 2,
        },
        {"enable_group_offload": True, "gradient_checkpointing": False},
        {"enable_group_offload": True, "base_model_precision": "int8-quanto"},
        {
            "enable_group_offload": True,
            "group_offload_resident_blocks": 5,
            "offload_block_inputs": True,
        },
        {"group_offload_text_encoder": True, "group_offload_use_stream": True},
        {"group_offload_text_encoder": True, "group_offload_vae": True, "model_type": "full"},
        {"enable_model_cpu_offload": True},
        {
            "enable_group_offload": True,
            "base_model_precision": "int8-quanto",
            "gradient_checkpointing": False,
        },
    ],
)
def test_valid_offload_settings_are_accepted(settings: dict[str, Any]) -> None:
    assert problems_of(**settings) == ([], [])


@pytest.mark.parametrize("moving", ["enable_group_offload", "offload_block_inputs"])
@pytest.mark.parametrize(
    "graphs",
    [
        {"dynamo_mode": "reduce-overhead"},
        {"dynamo_mode": "max-autotune"},
        {"dynamo_backend": "cudagraphs"},
    ],
)
def test_cuda_graphs_with_offloading_are_refused(moving: str, graphs: dict[str, str]) -> None:
    settings = {moving: True, "gradient_checkpointing": True}
    ((key, value),) = graphs.items()
    (error,), _ = problems_of(**settings, **graphs)

    assert error.startswith(f"{key}: {value!r} cannot be combined with {moving}: ")
    assert not problems_of(gradient_checkpointing=True, **graphs)[0]
    assert not problems_of(**settings, dynamo_mode="max-autotune-no-cudagraphs")[0]
    assert not problems_of(**settings, dynamo_mode="reduce-overhead", dynamo_backend="no")[0]


def test_streaming_single_layers_is_refused() -> None:
    errors, (warning,) = problems_of(group_offload_type="leaf_level", enable_group_offload=True)
    assert (errors, warning[:51]) == ([], "group_offload_type: 'leaf_level' is treated as bloc")


def test_offload_to_disk_warns_about_its_cost_or_reports_why_not(tmp_path: Path) -> None:
    settings = {
        "enable_group_offload": True,
        "group_offload_to_disk_path": str(tmp_path / "new" / "folder"),
    }
    errors, (warning,) = problems_of(**settings)
    assert errors == []
    assert "reads the offloaded weights twice from this disk" in warning
    assert not (tmp_path / "new").exists(), "a plan writes nothing"
    (tmp_path / "file").write_text("")
    (error,), _ = problems_of(
        **{**settings, "group_offload_to_disk_path": str(tmp_path / "file" / "folder")}
    )
    assert error.startswith("group_offload_to_disk_path: ")
    assert "is a file" in error


def test_folder_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    errors, _ = problems_of(
        enable_group_offload=True, group_offload_to_disk_path=str(tmp_path / "new")
    )
    assert any(
        error.startswith("group_offload_to_disk_path") and "cannot be written to" in error
        for error in errors
    )
