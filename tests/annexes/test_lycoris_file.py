"""A settings file of LyCORIS: which layers it chooses, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.adapters.kinds import check_lycoris, read_lycoris
from simpletuner.errors import Problems
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.models.sanavideo.spec import SANA_VIDEO
from simpletuner.models.spec import FamilySpec
from tests.tools.reports import found_by

# The file of the guides, word by word.
GUIDE: dict[str, Any] = {
    "algo": "lokr",
    "multiplier": 1.0,
    "full_matrix": True,
    "linear_dim": 10000,
    "linear_alpha": 1,
    "factor": 16,
    "apply_preset": {
        "target_module": ["Attention", "FeedForward"],
        "module_algo_map": {"Attention": {"factor": 16}, "FeedForward": {"factor": 8}},
    },
}
BLOCK = "visual_transformer_blocks.3"
QUERY = f"{BLOCK}.self_attention.to_query"
INNER = f"{BLOCK}.feed_forward.in_layer"
SHAPES = {
    QUERY: (64, 64),
    INNER: (256, 64),
    f"{BLOCK}.visual_modulation.out_layer": (576, 32),
    "out_layer": (8, 64),
}
SANA_SHAPES: dict[str, tuple[int, ...]] = {
    "transformer_blocks.0.attn1.to_q": (64, 64),
    "transformer_blocks.0.ff.conv_point": (64, 192, 1, 1),
    "transformer_blocks.0.ff.conv_depth": (384, 1, 3, 3),
}


def complaints(
    folder: Path, content: Any, spec: FamilySpec = KANDINSKY5_IMAGE, quantised: bool = False
) -> str:
    path = folder / "lycoris.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    problems = Problems()
    file = read_lycoris(str(path), spec, problems)
    if file is not None:
        shapes = SHAPES if spec is KANDINSKY5_IMAGE else SANA_SHAPES
        problems += found_by(check_lycoris, file, shapes, quantised=quantised)
    return "\n".join(str(problem) for problem in problems if problem.fatal)


def chosen(folder: Path, content: Any, spec: FamilySpec = KANDINSKY5_IMAGE) -> dict[str, Any]:
    assert complaints(folder, content, spec) == ""
    file = read_lycoris(str(folder / "lycoris.json"), spec, Problems())
    assert file is not None
    return file.layers(SHAPES if spec is KANDINSKY5_IMAGE else SANA_SHAPES)


def test_lycoris_file_of_the_guide_is_read(tmp_path: Path) -> None:
    layers = chosen(tmp_path, GUIDE)

    assert {name: layer["factor"] for name, layer in layers.items()} == {QUERY: 16, INNER: 8}
    assert {*chosen(tmp_path, GUIDE, SANA_VIDEO)} == {
        name for name in SANA_SHAPES if "depth" not in name
    }


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ({"target_module": ["Kandinsky5Attention"]}, [QUERY]),
        ({"target_module": ["Kandinsky5TransformerDecoderBlock"]}, [QUERY, INNER]),
        ({"target_module": [], "target_name": ["visual.*to_query"]}, [QUERY]),
        ({"target_module": [], "target_name": ["*in_layer"], "use_fnmatch": True}, [INNER]),
        ({"target_module": [], "name_algo_map": {INNER: {"factor": 4}}}, [INNER]),
        ({"exclude_name": [".*feed_forward"]}, [QUERY]),
        ({}, [QUERY, INNER]),
    ],
)
def test_lycoris_presets_choose_layers(
    tmp_path: Path, preset: dict[str, Any], expected: list[str]
) -> None:
    assert [*chosen(tmp_path, {**GUIDE, "apply_preset": preset})] == expected


def test_innermost_class_decides_the_lycoris_algorithm(tmp_path: Path) -> None:
    maps = {
        "Attention": {"factor": 4},
        "Kandinsky5TransformerDecoderBlock": {"factor": 2, "algo": "loha"},
    }

    layers = chosen(
        tmp_path, {**GUIDE, "apply_preset": {"target_module": [], "module_algo_map": maps}}
    )

    assert (layers[QUERY]["factor"], layers[QUERY]["algo"]) == (4, "lokr")
    assert (layers[INNER]["factor"], layers[INNER]["algo"]) == (2, "loha")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algo": "lokrr"}, "'lokrr' is not one of lora, locon, loha, lokr. Did you mean 'lokr'?"),
        ({"algo": "tlora"}, "need special pipelines"),
        ({"algo": "boft"}, "multiplies the weight"),
        ({"algo": None}, "algo is missing"),
        ({"multiplier": None}, "multiplier is missing"),
        ({"multiplier": "strong"}, "multiplier 'strong' is not a number"),
        ({"full_matrix": "yes"}, "full_matrix 'yes' is not true or false"),
        ({"factor": True}, "factor True is not a whole number"),
        ({"factor": 0}, "factor 0 is not a whole number from -1 to 1000000, but not 0"),
        ({"factor": 2.5}, "factor 2.5 is not a whole number"),
        ({"linear_dim": -3}, "linear_dim -3 is not a whole number from 0"),
        ({"multiplier": math.nan}, "multiplier nan is not a number from -1000 to 1000, but not 0"),
        ({"multiplier": 1e300}, "multiplier 1e+300 is not a number"),
        ({"linear_alpha": math.inf}, "linear_alpha inf is not a number"),
        ({"dropout": 1}, "dropout 1 is not a number from 0 to 0.999"),
        (
            {"apply_preset": {"module_algo_map": {"Attention": {"dim": -3}}}},
            "dim -3 is not a whole number from 1",
        ),
        ({"full_matrix": False, "linear_dim": None}, "linear_dim or full_matrix is missing"),
        ({"linear_dimm": 4}, "'linear_dimm' is not a key of LyCORIS. Did you mean 'linear_dim'?"),
        ({"train_norm": True}, "a LoRA cannot hold norms"),
        ({"module_dropout": 0.1}, "would not be repeated"),
        ({"dora_wd": True, "bypass_mode": True}, "cannot be combined"),
        ({"apply_preset": {"target_modul": []}}, "Did you mean 'target_module'?"),
        (
            {"apply_preset": {"target_module": ["Transformer2DModel"]}},
            "The classes are: Attention, FeedForward, Kandinsky5",
        ),
        (
            {"apply_preset": {"target_module": [], "target_name": ["nothing"]}},
            "matches no linear layer",
        ),
        ({"apply_preset": {"target_name": ["*.to_query"]}}, "is not a regular expression"),
        ({"apply_preset": {"target_module": "Attention"}}, "must be lists of names"),
        ({"apply_preset": {"module_algo_map": {"Attention": 4}}}, "must map names to settings"),
        (
            {"apply_preset": {"module_algo_map": {"Attention": {"algo": "full"}}}},
            "use model_type full",
        ),
    ],
)
def test_invalid_lycoris_file_is_refused_with_its_reason(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    content = {key: value for key, value in {**GUIDE, **change}.items() if value is not None}
    assert message in complaints(tmp_path, content)


def test_unreadable_lycoris_file_is_refused(tmp_path: Path) -> None:
    assert "not a JSON object" in complaints(tmp_path, [1])
    assert "not valid JSON" in complaints(tmp_path, "{")

    problems = Problems()
    assert read_lycoris(None, KANDINSKY5_IMAGE, problems) is None
    assert "is required" in str(problems[0])


@pytest.mark.parametrize("setting", [{"bypass_mode": False}, {"dora_wd": True}])
def test_a_quantised_base_needs_bypass_mode(tmp_path: Path, setting: dict[str, Any]) -> None:
    assert complaints(tmp_path, {**GUIDE, **setting}) == ""
    assert "needs bypass_mode true" in complaints(tmp_path, {**GUIDE, **setting}, quantised=True)
    assert complaints(tmp_path, GUIDE, quantised=True) == ""
