"""Configs and dataset files of other trainers, variables of config.env, and users' examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner.config import foreign_files
from simpletuner.config.datasets import read_datasets
from simpletuner.config.load import resolve
from simpletuner.config.sources import EXAMPLES, locate, read_config_file, read_env_layer
from simpletuner.errors import ConfigError, Problems

AI_TOOLKIT = "job: extension\nconfig:\n  name: star\n  process:\n    - type: sd_trainer\n"
KOHYA = (
    "[general]\nkeep_tokens = 1\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = "
    '"cats"\nnum_repeats = 10\n'
)
MUSUBI = '[general]\nresolution = [960, 544]\n[[datasets]]\nvideo_directory = "clips"\n'
DIFFUSION_PIPE = 'resolutions = [512]\n[[directory]]\npath = "pictures"\n'
REQUIRED = "MODEL_TYPE=lora\nMODEL_FAMILY=kandinsky5-image\n"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "train.yaml",
            AI_TOOLKIT,
            "is a YAML file of ai-toolkit; a config here is a JSON, TOML or .env file.",
        ),
        ("train.yml", "compute_environment: LOCAL_MACHINE\n", "is a YAML file of accelerate"),
        ("train.yaml", "model: x\n", "is a YAML file; a config here"),
        ("data.toml", KOHYA, "is a dataset file of kohya's sd-scripts, not a config"),
        ("data.toml", MUSUBI, "is a dataset file of musubi-tuner, not a config"),
        ("data.toml", DIFFUSION_PIPE, "is a dataset file of diffusion-pipe, not a config"),
    ],
)
def test_a_config_of_another_trainer_is_explained(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(ConfigError) as caught:
        read_config_file(tmp_path / name, Problems())

    (problem,) = caught.value.problems
    assert problem.message.startswith(words)
    has_its_keys = foreign_files.AI_TOOLKIT in problem.message
    assert has_its_keys == ("ai-toolkit" in words), "those of ai-toolkit for it alone"


def test_settings_of_ai_toolkit_are_translated(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(AI_TOOLKIT)

    with pytest.raises(
        ConfigError, match=r"train.steps is max_train_steps, train.lr is learning_rate"
    ):
        read_config_file(tmp_path / "train.yaml", Problems())


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "data.toml",
            KOHYA,
            "is a TOML file of kohya's sd-scripts; a dataset file here is a JSON list.",
        ),
        (
            "data.toml",
            MUSUBI,
            "is a TOML file of musubi-tuner; a dataset file here is a JSON list.",
        ),
        (
            "data.toml",
            "a = 1\n",
            "is a TOML file of another program; a dataset file here is a JSON list.",
        ),
        (
            "data.yaml",
            AI_TOOLKIT,
            "is a YAML file of ai-toolkit; a dataset file here is a JSON list.",
        ),
    ],
)
def test_a_dataset_file_of_another_trainer_is_explained(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    problems = Problems()
    (tmp_path / name).write_text(text)

    assert read_datasets(tmp_path / name, problems, placeholders={}) == []
    (problem,) = problems
    assert (problem.where, problem.fatal) == ("data_backend_config", True)
    assert words in problem.message


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (KOHYA, "For its folder: `simpletuner start cats`."),
        (MUSUBI, "For its folder: `simpletuner start clips`."),
        (DIFFUSION_PIPE, "For its folder: `simpletuner start pictures`."),
        (DIFFUSION_PIPE + '[[directory]]\npath = "more"\n', "Its folders: pictures, more."),
    ],
)
def test_the_folders_of_a_foreign_dataset_file_are_named(
    tmp_path: Path, text: str, advice: str
) -> None:
    problems = Problems()
    (tmp_path / "data.toml").write_text(text)

    read_datasets(tmp_path / "data.toml", problems, placeholders={})

    assert problems[0].message.endswith(advice)


def test_a_toml_config_of_this_program_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('model_type = "lora"\n')

    layer = read_config_file(tmp_path / "config.toml", Problems())

    assert layer.values == [("model_type", "lora")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "MODEL_NAME=someone/model",
            "is not a key here: pretrained_model_name_or_path is its name.",
        ),
        ("MAX_NUM_STEPS=100", "is not a key here: max_train_steps is its name."),
        ("USE_XFORMERS=true", "is not a key here: attention_mechanism chooses the kernel."),
        ("FLUX_GUIDANCE_VALUE=3.5", "is not a key here: it is for another family of models"),
        ("LORA_RNK=8", "is not a known key. Did you mean 'lora_rank'?"),
        ("LEARNING_RTE=1e-4", "is not a known key. Did you mean 'learning_rate'?"),
    ],
)
def test_variables_meant_as_settings_are_reported(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "config.env").write_text(f"{REQUIRED}export {line}\n")
    problems = Problems()

    resolve([read_env_layer(tmp_path / "config.env", problems)], problems)

    (problem,) = problems
    assert (problem.where, problem.fatal) == (line.partition("=")[0], True)
    assert words in problem.message


@pytest.mark.parametrize(
    "line",
    [
        "HF_HOME=/data/hf",
        "CUDA_VISIBLE_DEVICES=0",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "DATA=/data",
        "SIMPLETUNER_LOG_LEVEL=DEBUG",
        "CONFIG_TYPE=json",
        "TOKENIZERS_PARALLELISM=false",
        "FLUX_GUIDANCE_VALUE=1.0",
        "TRAINING_NUM_PROCESSES=1",
        "TRAINER_EXTRA_ARGS=",
    ],
)
def test_variables_of_the_shell_and_defaults_are_ignored(tmp_path: Path, line: str) -> None:
    (tmp_path / "config.env").write_text(f"{REQUIRED}export {line}\n")
    problems = Problems()

    resolve([read_env_layer(tmp_path / "config.env", problems)], problems)

    assert problems == []


def test_a_users_folder_of_examples_takes_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = locate({"env": "examples/demo"}, Problems())
    users_folder = Path("config/examples/demo")
    users_folder.mkdir(parents=True)
    (users_folder / "config.json").write_text("{}")

    located = locate({"env": "examples/demo"}, Problems())

    assert packaged.folder == EXAMPLES / "demo"
    assert located.folder == users_folder
