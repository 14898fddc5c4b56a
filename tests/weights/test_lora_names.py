"""LoRA files that hold something else than a LoRA are refused by their header, or when read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from simpletuner.config.lora import LoraConfig
from simpletuner.errors import UserError
from simpletuner.models.lora_checks import check_init_lora, check_lora_file
from simpletuner.training.lora_files import read_lora_file
from simpletuner.weights.lora_names import METADATA_KEY
from tests.tools.reports import found_by

A = "transformer.layer.lora_A.weight"
B = "transformer.layer.lora_B.weight"
ALPHA = "transformer.layer.alpha"
GOOD = {A: torch.ones(4, 8), B: torch.ones(8, 4)}


def complaints(path: Path) -> list[str]:
    """The problems of a file to start from, which are the same for one to render with."""
    config = LoraConfig(init_lora=str(path), lora_rank=4)
    layers = {"layer": (8, 8)}
    to_start = found_by(check_init_lora, config, layers, ["layer"], "kandinsky5-image")
    to_render = found_by(check_lora_file, "init_lora", path, layers, "kandinsky5-image")
    messages = [str(problem) for problem in to_start]
    assert messages == [str(problem) for problem in to_render]
    return messages


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            {A: torch.ones(4, 8, dtype=torch.int8)},
            "not floating point: transformer.layer.lora_A.weight (I8)",
        ),
        (
            {B: torch.ones(8, 4, dtype=torch.bool)},
            "not floating point: transformer.layer.lora_B.weight (BOOL)",
        ),
        ({A: torch.tensor(1.0)}, "whose A and B matrices do not match: layer (A [], B [8, 4])"),
        (
            {A: torch.ones(0, 8), B: torch.ones(8, 0)},
            "whose A and B matrices do not match: layer (A [0, 8], B [8, 0])",
        ),
        ({B: torch.ones(8, 3)}, "whose A and B matrices do not match: layer (A [4, 8], B [8, 3])"),
        (
            {ALPHA: torch.ones(2)},
            "whose A and B matrices do not match: layer (A [4, 8], B [8, 4], alpha [2])",
        ),
    ],
)
def test_matrices_that_cannot_be_multiplied_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    save_file(GOOD | tensors, tmp_path / "lora.safetensors")

    (complaint,) = complaints(tmp_path / "lora.safetensors")

    assert words in complaint


def test_a_layer_with_one_matrix_is_refused(tmp_path: Path) -> None:
    save_file({A: GOOD[A]}, tmp_path / "lora.safetensors")

    (complaint, *_) = complaints(tmp_path / "lora.safetensors")

    assert "whose A and B matrices do not match: layer (A [4, 8], B [])" in complaint


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    values = {
        A: torch.linspace(-2, 2, 32).view(4, 8).to(dtype),
        B: torch.linspace(0, 1, 32).view(8, 4).to(dtype),
    }
    path = tmp_path / "lora.safetensors"
    save_file({**values, ALPHA: torch.tensor(2.0)}, path)

    weights = read_lora_file(path, ["layer"])

    assert complaints(path) == []
    assert torch.equal(weights["layer.lora_A.weight"], values[A].float())
    # alpha / rank = 2 / 4
    assert torch.equal(weights["layer.lora_B.weight"], values[B].float() / 2)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.nan, torch.float8_e4m3fn),
        (torch.inf, torch.float8_e5m2),
        (torch.nan, torch.bfloat16),
        (torch.inf, None),
    ],
)
def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, value: float, dtype: torch.dtype | None
) -> None:
    matrix = torch.full((8, 4), value).to(dtype or torch.float32)
    save_file(GOOD | {B: matrix}, tmp_path / "lora.safetensors")

    with pytest.raises(UserError, match="holds NaN or infinite values in transformer"):
        read_lora_file(tmp_path / "lora.safetensors", ["layer"])


@pytest.mark.parametrize(
    "changes",
    [{"data_offsets": [-128, 0]}, {"data_offsets": None}, {"shape": [4, "8"]}, {"dtype": "F7"}],
)
def test_headers_that_do_not_fit_the_data_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    rewrite(tmp_path / "lora.safetensors", lambda header: header[A].update(changes))

    (complaint,) = complaints(tmp_path / "lora.safetensors")

    assert "is not a complete safetensors file" in complaint


SETTINGS_OF_OTHER_KINDS: list[dict[str, Any]] = [
    {"lora_alpha": "four"},
    {"lora_alpha": None},
    {"alpha_pattern": [1]},
    {"alpha_pattern": {"a": None}},
    {"alpha_pattern": {"(": 1}},
    {"alpha_pattern": {"a": 10**400}},
]
SETTINGS_AS_TEXT = ["{", "[]", '"a"', "1" * 5000, "[" * 50_000]
SETTINGS_AS_TEXT += [
    json.dumps({f"transformer.{key}": value for key, value in settings.items()})
    for settings in SETTINGS_OF_OTHER_KINDS
]


@pytest.mark.parametrize("metadata", [[], "text", {"trigger": 3}])
def test_metadata_that_is_not_a_table_of_texts_is_refused(tmp_path: Path, metadata: object) -> None:
    rewrite(tmp_path / "lora.safetensors", lambda header: header.update(__metadata__=metadata))

    (complaint,) = complaints(tmp_path / "lora.safetensors")

    assert "is not a complete safetensors file" in complaint


@pytest.mark.parametrize("text", SETTINGS_AS_TEXT)
def test_settings_that_cannot_be_read_are_refused(tmp_path: Path, text: str) -> None:
    metadata = {METADATA_KEY: text}
    rewrite(tmp_path / "lora.safetensors", lambda header: header.update(__metadata__=metadata))

    (complaint,) = complaints(tmp_path / "lora.safetensors")

    assert "settings of the adapter that cannot be read" in complaint


@pytest.mark.parametrize("metadata", [None, {}])
def test_a_lora_needs_no_metadata(tmp_path: Path, metadata: object) -> None:
    rewrite(tmp_path / "lora.safetensors", lambda header: header.update(__metadata__=metadata))

    assert complaints(tmp_path / "lora.safetensors") == []


def rewrite(path: Path, change: Any) -> None:
    """Write a good file whose header has been changed."""
    blob = save(GOOD)
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob[start:])
