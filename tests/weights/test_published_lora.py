"""The strength of a LoRA: applied wherever it is stated, or refused by name; compared with peft."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from safetensors.torch import save_file
from torch import nn

from simpletuner.config.lora import LoraConfig
from simpletuner.errors import UserError
from simpletuner.models.lora_checks import check_init_lora, check_lora_file
from simpletuner.training.lora_files import read_lora_file
from simpletuner.weights.lora_names import METADATA_KEY
from simpletuner.weights.published_lora import FILES, REFUSED, find_lora, lora_file
from tests.tools.hub import repository_of_loras
from tests.tools.reports import found_by

RANK = 4
LAYERS = {"blocks.0.to_q": (8, 8), "blocks.1.to_q": (8, 8)}
WEIGHTS: dict[str, torch.Tensor] = {}
for layer in LAYERS:
    WEIGHTS[f"transformer.{layer}.lora_A.weight"] = torch.ones(RANK, 8)
    WEIGHTS[f"transformer.{layer}.lora_B.weight"] = torch.ones(8, RANK)
STRENGTHS: list[dict[str, Any]] = [
    {"lora_alpha": 16},
    {"lora_alpha": 16, "use_rslora": True},
    {"lora_alpha": 2, "use_rslora": True, "alpha_pattern": {"blocks.0.to_q": 12}},
    {},  # peft's own default
]


def write(
    path: Path, settings: dict[str, Any] | None = None, place: str = "header", **notes: str
) -> Path:
    """Write a LoRA whose settings are in its header, or in the file `place` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if settings is not None:
        settings = {"r": RANK, **settings}
        if place == "header":
            prefixed = {f"transformer.{key}": value for key, value in settings.items()}
            notes[METADATA_KEY] = json.dumps(prefixed)
        else:
            path.with_name(place).write_text(json.dumps(settings), encoding="utf-8")
    save_file(WEIGHTS, path, notes)
    return path


def scales_of_peft(settings: dict[str, Any]) -> dict[str, float]:
    """The factors on B A that peft computes for a model with the layers above."""
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.ModuleDict({"to_q": nn.Linear(8, 8)}) for _ in LAYERS)
    inject_adapter_in_model(PeftConfig(r=RANK, target_modules=["to_q"], **settings), model)
    return {layer: model.get_submodule(layer).scaling["default"] for layer in LAYERS}


def scales_in(path: Path) -> dict[str, float]:
    """The factors on B A, read from a file whose B is 1."""
    weights = read_lora_file(path, list(LAYERS))
    return {layer: float(weights[f"{layer}.lora_B.weight"][0, 0]) for layer in LAYERS}


def complaint(path: Path) -> str:
    """The one problem of a file to start from, which is the same for one to render with."""
    (to_render,) = found_by(check_lora_file, "init_lora", path, LAYERS, "kandinsky5-image")
    settings = LoraConfig(init_lora=str(path), lora_rank=RANK)
    (to_start,) = found_by(check_init_lora, settings, LAYERS, ["to_q"], "kandinsky5-image")
    assert to_start.fatal
    assert to_start.message == to_render.message
    return to_start.message


@pytest.mark.parametrize("place", ["header", "adapter_config.json", "config_lora.json"])
@pytest.mark.parametrize("settings", STRENGTHS, ids=str)
def test_the_strength_is_that_of_peft_wherever_it_is_stated(
    tmp_path: Path, settings: dict[str, Any], place: str
) -> None:
    path = write(tmp_path / "any name.safetensors", settings, place)

    assert scales_in(path) == pytest.approx(scales_of_peft(settings))


@pytest.mark.parametrize("name", [*FILES, "the only one.safetensors"])
def test_a_folder_stands_for_its_lora_with_the_settings_beside_it(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path / name, {"lora_alpha": 16}, "adapter_config.json")

    assert set(scales_in(tmp_path).values()) == {4.0}  # 16 / 4


def test_without_any_statement_the_matrices_act_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "lora.safetensors")

    assert set(scales_in(path).values()) == {1.0}


def test_the_header_wins_over_a_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "lora.safetensors", {"lora_alpha": 16}, "config_lora.json")
    write(tmp_path / "lora.safetensors", {"lora_alpha": 4})

    assert set(scales_in(tmp_path).values()) == {1.0}


def test_kohyas_header_states_the_alpha_of_a_file_without_alphas(tmp_path: Path) -> None:
    path = write(tmp_path / "lora.safetensors", ss_network_alpha="2")

    assert set(scales_in(path).values()) == {0.5}


@pytest.mark.parametrize("place", ["header", "adapter_config.json", "config_lora.json"])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"init_lora_weights": "pissa_niter_16"}, "changed by init_lora_weights 'pissa_niter_16'"),
        ({"peft_type": "LOHA"}, "is a LOHA"),
        ({"lora_bias": True}, "needs lora_bias"),
        ({"lora_alpha": "much"}, "settings of the adapter that cannot be read"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], words: str, place: str
) -> None:
    assert words in complaint(write(tmp_path / "lora.safetensors", settings, place))


def test_settings_of_another_lora_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "lora.safetensors", {"r": 32, "lora_alpha": 32}, "adapter_config.json")

    assert "has rank 4, and adapter_config.json beside it says 32" in complaint(path)


def test_two_settings_files_that_disagree_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "lora.safetensors", {"lora_alpha": 8}, "adapter_config.json")
    path = write(tmp_path / "lora.safetensors", {"lora_alpha": 16}, "config_lora.json")

    assert "which state different strengths" in complaint(path)


def test_alphas_and_rslora_contradict_each_other(tmp_path: Path) -> None:
    path = write(tmp_path / "lora.safetensors", {"use_rslora": True})
    notes = {METADATA_KEY: json.dumps({"transformer.r": RANK, "transformer.use_rslora": True})}
    save_file({**WEIGHTS, "transformer.blocks.0.to_q.alpha": torch.tensor(2.0)}, path, notes)

    assert "has an alpha for each layer" in complaint(path)


@pytest.mark.parametrize(
    ("magnitudes", "per_output"),
    [((8, 1), True), ((1, 8), False), ((8,), True), ((1, 8, 1, 1), False), ((4, 2), False)],
)
def test_a_dora_scale_per_input_is_refused(
    tmp_path: Path, magnitudes: tuple[int, ...], per_output: bool
) -> None:
    path = tmp_path / "lora.safetensors"
    save_file({**WEIGHTS, "transformer.blocks.0.to_q.dora_scale": torch.ones(magnitudes)}, path)

    problems = found_by(check_lora_file, "LoRA", path, LAYERS, "kandinsky5-image")

    is_refused = ["a magnitude per input" in str(problem) for problem in problems]
    assert is_refused == ([] if per_output else [True])


def test_a_bias_is_not_a_matrix(tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    save_file({**WEIGHTS, "transformer.blocks.0.to_q.lora_B.bias": torch.ones(8)}, path)

    assert "is not a plain LoRA: it holds transformer.blocks.0.to_q.lora_B.bias" in complaint(path)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            {"blocks.0.to_q": (8, 16), "blocks.1.to_q": (8, 8)},
            "has 8x16 features in the model and 8x8 in the file",
        ),
        ({"blocks.0.to_q": (8, 8)}, "1 of 2 layers in"),
    ],
)
def test_a_lora_to_start_from_must_fit_the_model(
    tmp_path: Path, layers: dict[str, tuple[int, int]], words: str
) -> None:
    settings = LoraConfig(init_lora=str(write(tmp_path / "lora.safetensors")), lora_rank=RANK)

    problems = found_by(check_init_lora, settings, layers, ["to_q"], "kandinsky5-image")

    (problem,) = [problem for problem in problems if problem.fatal]
    assert words in problem.message


def test_a_lora_of_another_family_is_refused(tmp_path: Path) -> None:
    notes = {"simpletuner.step": "3", "modelspec.architecture": "sanavideo/2b-480p/lora"}

    message = complaint(write(tmp_path / "lora.safetensors", None, **notes))

    assert message.endswith("was trained on sanavideo, not on kandinsky5-image.")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a repository on the hub."""
    return repository_of_loras(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", [*FILES, "camera.safetensors", "steps/last.safetensors"])
def test_a_lora_on_the_hub_comes_with_its_settings(hub: Path, name: str) -> None:
    write(hub / name, {"lora_alpha": 16}, "config_lora.json")
    location = f"someone/lora:{name}" if "/" in name else "someone/lora"

    location_on_the_hub = find_lora(location)
    path = find_lora(location, fetch=True)

    assert location_on_the_hub is None
    assert path is not None
    assert set(scales_in(path).values()) == {4.0}  # 16 / 4
    assert find_lora(location) == path


def test_a_repository_with_several_loras_is_refused_with_their_names(hub: Path) -> None:
    write(hub / "a.safetensors")
    write(hub / "b.safetensors")
    message = r"several LoRAs: a.safetensors, b.safetensors. Choose one with someone/lora:"

    with pytest.raises(UserError, match=message):
        find_lora("someone/lora", fetch=True)


def test_without_a_network_a_lora_on_the_hub_is_an_error_of_one_line(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ConnectError(Exception):
        """Of the client's library, and not an OSError."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectError("[Errno 111] Connection refused")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", refuse)
    message = r"'someone/lora' is not a file, and could not be downloaded: .* refused\."

    with pytest.raises(UserError, match=message):
        find_lora("someone/lora", fetch=True)


@pytest.mark.parametrize(
    "location", ["output/lora.safetensors", "lora.safetensors", "./folder/lora"]
)
def test_a_path_is_not_looked_for_on_the_hub(location: str) -> None:
    assert find_lora(location) == lora_file(Path(location))


def test_settings_that_change_what_matrices_mean_have_the_names_that_peft_gives_them() -> None:
    of_peft = {field.name for field in fields(PeftConfig)}

    assert set(REFUSED) <= of_peft
