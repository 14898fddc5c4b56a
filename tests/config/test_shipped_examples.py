"""The files that people copy from config/: each loads, and together they train."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from simpletuner.cli.app import main
from simpletuner.config.load import resolve
from simpletuner.config.schema import all_options
from simpletuner.config.sources import read_json_layer
from simpletuner.data.captions import read_filters
from simpletuner.errors import Problems
from simpletuner.planning.prompt_library import read_library
from tests.tools.workspace import Workspace

SHIPPED = Path(__file__).parents[2] / "config"
NAMES = {
    "config.json",
    "multidatabackend.json",
    "user_prompt_library.json",
    "caption_filter_list.txt",
    "lycoris_config.json",
}


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, t2i_checkpoint: Path) -> Workspace:
    """`cp config/X.example config/X` for every X, with a model and the pictures of the dataset."""
    monkeypatch.chdir(tmp_path)
    workspace = Workspace(tmp_path)
    (tmp_path / "config").mkdir()
    for path in SHIPPED.glob("*.example"):
        shutil.copy(path, tmp_path / "config" / path.stem)
    workspace.add_pictures("datasets/my_images", 4)
    workspace.write_config(pretrained_model_name_or_path=str(t2i_checkpoint))
    return workspace


def test_files_named_in_guides_exist() -> None:
    assert {path.stem for path in SHIPPED.glob("*.example")} == NAMES


def test_every_key_of_the_config_is_known_and_in_the_order_of_the_schema() -> None:
    problems = Problems()
    layer = read_json_layer(SHIPPED / "config.json.example", problems)
    assert layer is not None

    keys = [key for key, _ in layer.values]
    assert keys == [key for key in all_options() if key in keys]

    resolve([layer], problems)
    assert problems == []


def test_the_prompt_library_and_the_filter_list_load() -> None:
    problems = Problems()
    assert len(read_library(SHIPPED / "user_prompt_library.json.example", problems)) == 4

    edit = read_filters(str(SHIPPED / "caption_filter_list.txt.example"), problems)
    assert problems == []
    assert edit is not None
    assert list(edit("a Watermarked picture , lorem ipsum in colour")) == ["a picture, in color"]


def test_the_lycoris_file_has_what_it_needs() -> None:
    content = json.loads((SHIPPED / "lycoris_config.json.example").read_text(encoding="utf-8"))

    assert {"algo", "multiplier"} < set(content)
    assert {"full_matrix", "linear_dim"} & set(content)


def test_copied_examples_plan_without_a_warning(
    copied: Workspace, capsys: pytest.CaptureFixture
) -> None:
    for path in copied.path("datasets/my_images").glob("*.png"):
        Image.new("RGB", (1536, 1024)).save(path, compress_level=1)
    assert main(["train", "--dry-run", "user_prompt_library=config/user_prompt_library.json"]) == 0

    captured = capsys.readouterr()
    assert not re.search(r"\bwarning", captured.out + captured.err, re.IGNORECASE)


@pytest.mark.slow
def test_copied_examples_train(copied: Workspace) -> None:
    data = json.loads(copied.path("config/multidatabackend.json").read_text(encoding="utf-8"))
    copied.write_datasets(
        [entry | ({"resolution": 64} if "resolution" in entry else {}) for entry in data]
    )

    settings = [
        "torch_num_threads=1",
        "max_train_steps=2",
        "lr_warmup_steps=0",
        "validation_resolution=128",
        "validation_num_inference_steps=2",
    ]

    assert main(["train", *settings]) == 0
    assert copied.path("output/my-lora/pytorch_lora_weights.safetensors").is_file()
