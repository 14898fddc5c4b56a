"""`simpletuner configure`, answered by key, through a pipe, and in a real terminal."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pexpect
import pytest
from _pytest.mark import ParameterSet
from PIL import Image
from typer.testing import CliRunner

from simpletuner.annexes.configure import verdict
from simpletuner.annexes.configure.answers import ConfigAnswers, example_datasets
from simpletuner.annexes.configure.questions import QUESTIONS
from simpletuner.annexes.configure.settings import SETTINGS
from simpletuner.annexes.draft import Draft
from simpletuner.annexes.questions.dialogue import Dialogue
from simpletuner.annexes.questions.interview import ask
from simpletuner.cli.app import app, main
from simpletuner.config.schema import all_groups, all_options
from simpletuner.config.sections import SECTIONS
from simpletuner.data.clip_writer import write_mp4
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import Task
from tests.tools.clips import write_clip
from tests.tools.processes import PATIENCE
from tests.tools.workspace import Workspace

FILE = Path("config/config.json")
LAST = "name a setting to change"
KEYS = {question.text: question.key for question in QUESTIONS}


class Person:
    """Answers prompts by key; presses Enter if there is no answer left.

    `start` answers whether to begin from the file, `doubt` whether to keep a doubtful answer,
    `file` the last question.
    """

    def __init__(self, **answers: str | list[str]) -> None:
        self.answers = {
            key: [value] if isinstance(value, str) else list(value)
            for key, value in answers.items()
        }
        self.asked: list[str] = []
        self.prompts: list[str] = []

    def __call__(self, prompt: str = "") -> str:
        self.prompts.append(prompt)
        key = self._key(prompt)
        self.asked.append(key)
        answers = self.answers.get(key)
        return answers.pop(0) if answers else ""

    def _key(self, prompt: str) -> str:
        for words, name in (
            ("Start from it", "start"),
            ("Leave it out", "mend"),
            ("  Leave out ", "others"),
            ("Keep it?", "doubt"),
            ("  Apply ", "remedy"),
            (LAST, "file"),
        ):
            if words in prompt:
                return name
        return next(key for text, key in KEYS.items() if prompt.strip().startswith(text))


Answer = Callable[..., dict[str, Any]]
Configure = Callable[..., tuple[int, Person]]
CLIPS: dict[object, bytes] = {}  # that plans were made for


def write_once(path: Path, frames: list[Image.Image], rate: float) -> None:
    """In place of `write_mp4`: one of a kind of grey clips is encoded, the others are copies."""
    kind = frames[0].size, len(frames), rate
    if kind not in CLIPS:
        write_mp4(path, frames, rate)
        CLIPS[kind] = path.read_bytes()
    path.write_bytes(CLIPS[kind])


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Run the wizard in an empty folder with a person who answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(verdict, "write_mp4", write_once)

    def run(*arguments: str, **answers: str | list[str]) -> tuple[int, Person]:
        person = Person(**answers)
        monkeypatch.setattr("builtins.input", person)
        return main(["configure", *arguments]), person

    return run


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Asks one question about a new config and returns the settings.

    `doubt` is the answer to whether a doubtful value is kept.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))

    def run(key: str, *lines: str, doubt: str = "", **values: Any) -> dict[str, Any]:
        answers = ConfigAnswers(Draft(FILE))
        answers.draft.change(values)
        question = next(question for question in QUESTIONS if question.key == key)
        replies = iter(lines)
        monkeypatch.setattr(
            "builtins.input", lambda prompt: doubt if "Keep it?" in prompt else next(replies)
        )
        ask(question, answers, Dialogue())
        assert next(replies, None) is None, "everything was asked for"
        return answers.draft.values

    return run


@dataclass(frozen=True)
class Session:
    """What a session was asked, what it showed, and what it wrote."""

    asked: list[str]
    shown: str
    text: str
    files: list[str]

    @property
    def values(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.text)
        return content


@pytest.fixture(scope="module")
def by_enter(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A session in an empty folder in which every question is answered with Enter."""
    folder = tmp_path_factory.mktemp("by_enter")
    person = Person()
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.chdir(folder)
        patch.setenv("NETRC", str(folder / "none"))
        patch.delenv("WANDB_API_KEY", raising=False)
        patch.setattr("builtins.input", person)
        assert main(["configure"]) == 0
    files = sorted(path.name for path in (folder / "config").iterdir())
    return Session(
        person.asked, shown.getvalue(), (folder / FILE).read_text(encoding="utf-8"), files
    )


def thorough(answer: str) -> ParameterSet:
    """A case that repeats a promise."""
    return pytest.param(answer, marks=pytest.mark.thorough)


def written(file: Path = FILE) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def put(values: Any, file: Path = FILE) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values), encoding="utf-8")


def test_enter_everywhere_writes_known_keys_only(by_enter: Session) -> None:
    values = by_enter.values

    assert set(values) <= set(all_options())
    assert values["model_family"] == "kandinsky5-image"
    assert values["model_flavour"] == "t2i-lite-sft"
    assert (values["max_train_steps"], values["num_train_epochs"]) == (1000, 0)
    assert values["learning_rate"] == 1e-4
    assert values["data_backend_config"] == "config/multidatabackend.json"
    assert values["offload"] == "auto"
    assert by_enter.files == ["config.json"]


@pytest.mark.parametrize(
    ("recipe", "values"),
    [
        ("subject", {"max_train_steps": 1600, "checkpoint_step_interval": 200, "offload": "auto"}),
        (
            "3",
            {
                "model_family": "kandinsky5-image",
                "max_train_steps": 1000,
                "checkpoint_step_interval": 125,
            },
        ),
        ("motion", {"model_family": "kandinsky5-video", "lora_rank": 32}),
        ("edit", {"model_flavour": "i2i-lite-sft", "num_eval_images": 2}),
    ],
)
def test_the_recipe_of_start_is_proposed(
    answer: Answer, recipe: str, values: dict[str, Any]
) -> None:
    proposed = answer("recipe", recipe)

    assert proposed.items() >= values.items()
    assert "zkt" in proposed.get("validation_prompt", "zkt")


def test_clips_of_the_shown_dataset_file_are_as_long_as_previews(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    configure(model_family="sanavideo", file="y")

    assert '"num_frames": 81,' in capsys.readouterr().out
    assert not Path("config/multidatabackend.json").exists(), "for a folder that does not exist"


# A folder of files
# --------------------------------------------------------------------------------------------------


def put_pictures(folder: Path, count: int, *, captions: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (600, 500), (number, 0, 0)).save(folder / f"{number}.png")
        if number < captions:
            (folder / f"{number}.txt").write_text("it stands there", encoding="utf-8")


def datasets(file: str = "config/multidatabackend.json") -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(Path(file).read_text(encoding="utf-8"))
    return content


def test_a_named_folder_gets_its_dataset_file_and_the_settings_of_start(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    put_pictures(Path("my cat"), 3, captions=0)

    _, person = configure(
        folder="'my cat'", trigger="zkt, a grey cat", model="kandinsky5-image", file="y"
    )

    trained, _ = datasets()
    assert trained["instance_data_dir"] == "my cat"
    assert (trained["caption_strategy"], trained["instance_prompt"]) == (
        "instanceprompt",
        "zkt, a grey cat",
    )
    assert trained["resolution"] == 448
    values = written()
    assert (values["max_train_steps"], values["offload"], values["output_dir"]) == (
        600,
        "auto",
        "output/my-cat",
    )
    assert values["preservation_prompt"] == "a grey cat"
    assert values["data_backend_config"] == "config/multidatabackend.json"
    assert not {"recipe", "model_family"} & {*person.asked}
    printed = capsys.readouterr().out
    assert "my cat: 3 pictures, 600x500, none captioned" in printed
    assert (
        "Trained at 448x448 pixels: too many of the pictures are smaller than 1024x1024.\n"
        in printed
    )
    assert main(["plan", "--device-memory=80"]) == 0
    assert "3 of 3 pictures used" in capsys.readouterr().out


def test_models_are_offered_with_whether_they_fit_the_gpu(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    write_clip(Path("datasets/videos/a.mp4"), seconds=2.0, size=(64, 48))

    configure(device="16", model="sanavideo", file="y")

    shown = capsys.readouterr().out
    assert "Folder of your pictures or clips" not in shown
    assert "datasets/videos: 1 clip, 64x48, 2.0 s" in shown, "the usual folder is proposed"
    assert re.search(r"\* 1  \S+ +fits, about ", shown)
    assert "Write the dataset file" not in shown
    assert (written()["model_family"], written()["validation_num_video_frames"]) == (
        "sanavideo",
        29,
    )
    assert datasets()[0]["video"]["num_frames"] == 29


def test_an_existing_dataset_file_is_kept(configure: Configure) -> None:
    put_pictures(Path("datasets/my_images"), 1, captions=1)
    put([], Path("config/multidatabackend.json"))

    _, person = configure(file="y")

    assert datasets() == []
    assert "folder" not in person.asked
    assert FILE.exists()


def test_a_dataset_file_named_later_is_kept(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    put_pictures(Path("datasets/my_images"), 1, captions=1)
    put([], Path("config/mine.json"))

    configure(data_backend_config="config/mine.json", file="y")

    assert datasets("config/mine.json") == []
    assert "Written: config/config.json\n" in capsys.readouterr().out


def test_a_tiny_model_is_named_as_packaged_and_trains_at_its_own_size(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    put_pictures(Path("datasets/my_images"), 4, captions=4)
    configure(model="demo", file="y")

    assert written()["pretrained_model_name_or_path"] == "config/examples/demo/checkpoint"
    assert datasets()[0]["resolution"] == 96
    assert "Train:  simpletuner train\n" in capsys.readouterr().out
    assert main(["plan"]) == 0


def test_another_answer_about_the_files_renews_proposals(configure: Configure) -> None:
    put_pictures(Path("datasets/my_images"), 1, captions=1)
    configure(purpose=["subject", "style"], trigger=["back", "qxz"], model="kandinsky5-image")

    assert (written()["max_train_steps"], written()["lora_rank"]) == (1000, 32)
    assert written()["validation_prompt"].endswith("in the style of qxz")


def test_a_wrong_folder_is_refused_with_the_reason(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    Path("empty").mkdir()
    Path("a.png").touch()
    _, person = configure(folder=["nowhere", "empty", "a.png", "-"])

    printed = capsys.readouterr().out

    assert "nowhere is not a folder." in printed
    assert "empty contains no pictures and no clips." in printed
    assert "a.png is a file; name the folder that it is in." in printed
    assert person.asked.count("folder") == 4
    assert "recipe" in person.asked


def test_a_config_that_measures_no_loss_gets_no_held_out_files(configure: Configure) -> None:
    put({"model_type": "lora", "model_family": "kandinsky5-image", "max_train_steps": 50})
    put_pictures(Path("datasets/my_images"), 16, captions=16)

    _, person = configure(file="y")

    assert "hold_out" not in datasets()[0]
    assert "model" not in person.asked
    assert written()["max_train_steps"] == 50, "the settings of the file stay"


def test_missing_captions_are_listed_as_a_next_step(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    put_pictures(Path("datasets/my_images"), 3, captions=1)
    configure("config/cat/config.json")

    printed = capsys.readouterr().out

    assert "No caption for 2 of 3 files: write them before training." in printed
    assert "1. Write the missing captions:  simpletuner caption env=cat\n" in printed
    assert "Training will refuse this" not in printed
    assert datasets("config/cat/multidatabackend.json")[0]["caption_strategy"] == "textfile"


def test_a_model_for_other_files_is_refused_with_the_folder(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    put_pictures(Path("datasets/my_images"), 1, captions=1)
    configure(file=["model_family"], model_family="sanavideo")

    printed = capsys.readouterr().out

    assert (
        "model_family: sanavideo learns from clips, and datasets/my_images holds pictures."
        in printed
    )
    assert not FILE.exists()


def test_a_second_backup_keeps_the_first(configure: Configure) -> None:
    put({"model_type": "lora", "model_family": "kandinsky5-image", "seed": 1})
    first = FILE.read_bytes()
    configure(file="y")

    configure(seed="2", file="y")

    assert Path("config/config.json.bak").read_bytes() == first
    assert Path("config/config.json-2.bak").exists()


# The conversation
# --------------------------------------------------------------------------------------------------


def test_questions_come_in_order(by_enter: Session) -> None:
    order = [question.key for question in QUESTIONS]
    asked = [key for key in by_enter.asked if key in order]
    assert asked == [key for key in order if key in asked]
    assert asked[:3] == ["folder", "device", "recipe"]
    assert asked[3:7] == ["model_family", "model_flavour", "model_type", "output_dir"]

    steps = [setting.section for setting in SETTINGS]
    assert steps == sorted(steps, key=SECTIONS.index), (
        "a step of the wizard is a section of the page"
    )


def test_every_question_is_about_one_key() -> None:
    assert {setting.key for setting in SETTINGS} <= set(all_options())
    assert len(KEYS) == len(QUESTIONS)
    assert all(question.help({"a": ""}) for question in QUESTIONS)


def test_the_file_is_grouped_like_the_schema(by_enter: Session) -> None:
    assert "--" not in by_enter.text

    blocks = [
        re.findall(r'^  "(\w+)":', block, re.MULTILINE) for block in by_enter.text.split("\n\n")
    ]
    groups = [
        [key for key in group.model_fields if key in by_enter.values] for group in all_groups()
    ]
    assert blocks == [group for group in groups if group]


def test_defaults_writes_the_same_file_without_questions(
    configure: Configure, by_enter: Session, capsys: pytest.CaptureFixture
) -> None:
    code, person = configure("--defaults")
    assert code == 0
    assert person.prompts == []
    assert FILE.read_text(encoding="utf-8") == by_enter.text

    printed = capsys.readouterr().out
    assert "Next steps" in printed
    # Without a GPU, training would be refused here.
    assert "3. Train, on a machine with a GPU:  simpletuner train" in printed


def test_another_file_is_written_into_its_new_folder(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    code, _ = configure("config/cat/config.json")

    assert code == 0
    assert (
        written(Path("config/cat/config.json"))["data_backend_config"]
        == "config/cat/multidatabackend.json"
    )
    assert "simpletuner train env=cat --dry-run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "keys"), [("yes", {"group_offload_use_stream": True}), ("no", {})]
)
def test_group_offload_turns_on_its_stream(
    configure: Configure, answer: str, keys: dict[str, Any]
) -> None:
    configure(offload="manual", enable_group_offload=answer)

    assert written()["enable_group_offload"] is (answer == "yes")
    assert {
        key: value for key, value in written().items() if key.startswith("group_offload_")
    } == keys


def test_keys_that_auto_chooses_are_not_asked(configure: Configure, by_enter: Session) -> None:
    chosen_by_auto = {"enable_group_offload", "group_offload_use_stream", "gradient_checkpointing"}
    assert not chosen_by_auto & {*by_enter.asked, *by_enter.values}

    configure(file=["offload"], offload=["manual", "auto"], enable_group_offload="yes")
    assert not chosen_by_auto & {*written()}, (
        "answers that auto would have to leave alone are taken back"
    )


def test_full_training_asks_nothing_about_lora(configure: Configure) -> None:
    _, person = configure(model_type="full", file="y")

    assert "lora_rank" not in person.asked
    assert written()["learning_rate"] == 5e-5
    assert "lora_rank" not in written()


def test_alpha_is_written_only_if_it_differs_from_the_rank(answer: Answer) -> None:
    assert "lora_alpha" not in answer("lora_alpha", "", lora_rank=8)
    assert answer("lora_alpha", "4", lora_rank=8)["lora_alpha"] == 4


def test_token_routes_are_asked_only_where_supported(configure: Configure, answer: Answer) -> None:
    routes = '{"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}'
    assert answer("tread_config", routes)["tread_config"]["routes"][0]["end_layer_idx"] == -2

    [route] = answer("tread_config", "half")["tread_config"]["routes"]
    assert (route["selection_ratio"], route["start_layer_idx"], route["end_layer_idx"]) == (
        0.5,
        2,
        -2,
    )

    _, person = configure(model_family="sanavideo")
    assert "tread_config" not in person.asked


def test_epochs_may_replace_steps(configure: Configure) -> None:
    configure(max_train_steps="0", num_train_epochs=["0", "7"])
    assert (written()["max_train_steps"], written()["num_train_epochs"]) == (0, 7)


def test_steps_replace_the_epochs_of_the_file(configure: Configure) -> None:
    put({"model_type": "lora", "model_family": "kandinsky5-image", "num_train_epochs": 5})
    configure(max_train_steps="200")

    assert (written()["max_train_steps"], written()["num_train_epochs"]) == (200, 0)


@pytest.mark.parametrize(
    ("key", "bad", "good", "reason"),
    [
        ("learning_rate", "much", "1e-5", "is not a number"),
        ("learning_rate", "-1", "1e-5", "must be > 0"),
        ("train_batch_size", "1.5", "2", "is not a whole number"),
        ("train_batch_size", "0", "2", "must be ≥ 1"),
        ("lr_scheduler", "cosin", "cosine", "Did you mean 'cosine'?"),
        ("model_flavour", "i2i-lite-stf", "i2i-lite-sft", "Did you mean 'i2i-lite-sft'?"),
        ("model_type", "lroa", "lora", "Did you mean 'lora'?"),
        ("use_ema", "maybe", "yes", "is not true or false"),
        ("seed", "-2", "7", "must be ≥ -1"),
        ("user_prompt_library", "nowhere.json", "-", "does not exist"),
        ("validation_guidance", "0.5", "4", "must be ≥ 1"),
        ("output_dir", "config.env/x", "out", "is a file"),
        ("data_backend_config", "config/config.json", "config/data.json", "choose another"),
        (
            "data_backend_config",
            "folder",
            "config/data.json",
            "such as config/multidatabackend.json",
        ),
        ("data_backend_config", "new/", "config/data.json", "is a folder"),
        ("validation_resolution", "1000x1000", "1008x1008", "992x992 is rendered"),
        ("validation_resolution", "big", "512x512", "is not a size"),
        ("validation_resolution", "64", "512x512", "smaller than 128"),
        ("report_to", "wand", "none", "Did you mean 'wandb'?"),
        ("tread_config", '{"routes": []}', "-", "at least one entry"),
    ],
)
def test_a_wrong_answer_is_asked_again_with_the_reason(
    answer: Answer, capsys: pytest.CaptureFixture, key: str, bad: str, good: str, reason: str
) -> None:
    Path("config.env").touch()
    Path("folder").mkdir()

    values = answer(key, bad, good)

    assert reason in capsys.readouterr().out
    expected = None if good == "-" else good
    assert str(values.get(key)).lower() in (str(expected).lower(), "true", "1e-05", "4.0")


def test_consequences_of_a_wrong_answer_are_not_reported(
    answer: Answer, capsys: pytest.CaptureFixture
) -> None:
    answer("max_train_steps", "1,000", "1000")
    printed = capsys.readouterr().out

    assert "'1,000' is not a whole number." in printed
    assert "are both 0" not in printed


def test_prompts_fit_a_line(configure: Configure) -> None:
    _, person = configure(model_family="kandinsky5-video")
    assert max(map(len, person.prompts)) < 120


def test_enter_takes_the_corrected_size(answer: Answer) -> None:
    values = answer("validation_resolution", "1000x700, 512x512", "")
    assert values["validation_resolution"] == "992x704,512x512"


def test_a_wrong_clip_length_offers_both_neighbours(
    answer: Answer, capsys: pytest.CaptureFixture
) -> None:
    values = answer(
        "validation_num_video_frames", "48", "-4", "45", model_family="kandinsky5-video"
    )
    assert "48 is not 4k+1; the nearest are 45 and 49." in capsys.readouterr().out
    assert values["validation_num_video_frames"] == 45

    values = answer("validation_num_video_frames", "62", "", model_family="kandinsky5-video")
    assert values["validation_num_video_frames"] == 65, "Enter takes the longer one"


def test_questions_of_a_video_model_speak_of_clips(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    configure(model_family="sanavideo")
    shown = capsys.readouterr().out

    assert "where your clips are" in shown
    assert '"instance_data_dir": "datasets/videos"' in shown


def test_enter_takes_the_nearest_spelling(answer: Answer) -> None:
    assert answer("model_flavour", "t2i-lite-pretrian", "")["model_flavour"] == "t2i-lite-pretrain"


def test_choices_may_be_numbers_or_capitals(answer: Answer) -> None:
    assert answer("model_flavour", "3")["model_flavour"] == "i2i-lite-sft"
    assert answer("lr_scheduler", "COSINE")["lr_scheduler"] == "cosine"


def test_a_question_mark_shows_the_help_of_the_key(
    answer: Answer, capsys: pytest.CaptureFixture
) -> None:
    assert answer("lora_rank", "?", "4")["lora_rank"] == 4

    answer("optimizer", "?", "")
    shown = capsys.readouterr().out
    assert all_options()["lora_rank"].help in shown
    assert "integer ≥ 1" in shown
    assert all(name in shown for name in all_options()["optimizer"].choices)


def test_unprintable_answers_are_asked_again(answer: Answer) -> None:
    values = answer("validation_prompt", "\x1b[D", "\udcff", "बिल्ली का चित्र 猫")
    assert values["validation_prompt"] == "बिल्ली का चित्र 猫"


@pytest.mark.parametrize(
    ("key", "doubtful", "sure", "reason"),
    [
        ("lr_warmup_steps", "1000", "100", "the learning rate never reaches its value"),
        ("validation_guidance", "7.5", "5.0", "oversaturates pictures"),
        ("report_to", "wandb", "none", "wandb is not logged in"),
    ],
)
def test_a_doubtful_answer_needs_confirmation(
    answer: Answer, capsys: pytest.CaptureFixture, key: str, doubtful: str, sure: str, reason: str
) -> None:
    steps = {"max_train_steps": 1000, "num_train_epochs": 0}

    assert str(answer(key, doubtful, sure, **steps)[key]) == sure
    assert reason in capsys.readouterr().out
    assert str(answer(key, doubtful, doubt="y", **steps)[key]) == doubtful


def test_adamw_bf16_is_refused_without_bf16(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    put({"model_type": "lora", "model_family": "kandinsky5-image", "mixed_precision": "no"})
    _, person = configure(optimizer="adamw_bf16")

    assert "needs mixed_precision bf16" in capsys.readouterr().out
    assert "[adamw]" in next(
        prompt for prompt in person.prompts if prompt.strip().startswith("Optimizer")
    )
    assert written()["optimizer"] == "adamw"


def test_wandb_without_a_login_explains_what_it_needs(by_enter: Session) -> None:
    assert "wandb.ai; log in first: wandb login" in by_enter.shown
    assert by_enter.values["report_to"] == "none"
    assert "tracker_run_name" not in by_enter.values


def test_wandb_with_a_login_is_offered(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    configure(report_to="wandb", tracker_run_name="first")

    assert "wandb.ai\n" in capsys.readouterr().out
    assert (written()["report_to"], written()["tracker_run_name"]) == ("wandb", "first")


def test_keys_that_are_not_asked_are_kept(configure: Configure) -> None:
    before = {
        "--model_type": "lora",
        "model_family": "Kandinsky5_Image",
        "lora_dropout": 0.1,
        "pretrained_model_name_or_path": "{env:HOME}/model",
        "checkpointing_steps": 50,
        "output_dir": "out",
        "modelspec_comment": ["एक", "两"],
    }
    put(before)
    content = FILE.read_bytes()

    _, person = configure(train_batch_size="2", file="y")
    assert "start" in person.asked

    values = written()
    assert values["lora_dropout"] == 0.1
    assert values["pretrained_model_name_or_path"] == "{env:HOME}/model"
    assert values["checkpoint_step_interval"] == 50
    assert values["modelspec_comment"] == ["एक", "两"]
    assert (values["train_batch_size"], values["output_dir"]) == (2, "out")
    assert "checkpointing_steps" not in values
    assert Path("config/config.json.bak").read_bytes() == content


def test_another_family_drops_keys_of_the_old_one(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    routes = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}
    old = {
        "model_type": "lora",
        "model_family": "kandinsky5-image",
        "model_flavour": "t2i-lite-pretrain",
    }
    put({**old, "tread_config": routes, "lora_rank": 8})

    _, person = configure(model_family=["sanavideo", "sanavideo"], others=["n", "y"])

    assert person.asked.count("others") == 2
    assert (
        "model_flavour: 't2i-lite-pretrain' belongs to kandinsky5-image" in capsys.readouterr().out
    )
    assert (written()["model_family"], written()["model_flavour"]) == ("sanavideo", "2b-480p")
    assert "tread_config" not in written()
    assert written()["lora_rank"] == 8


def test_an_existing_file_may_be_started_afresh(configure: Configure) -> None:
    put({"model_type": "full", "model_family": "kandinsky5-image", "lora_dropout": 0.1})
    configure(start="n")

    assert written()["model_type"] == "lora"
    assert "lora_dropout" not in written()


def test_a_final_no_writes_nothing(configure: Configure) -> None:
    put({"model_type": "lora", "model_family": "kandinsky5-image"})
    before = FILE.read_bytes()

    code, _ = configure(train_batch_size="2", file="n")

    assert code == 0
    assert FILE.read_bytes() == before
    assert [path.name for path in FILE.parent.iterdir()] == ["config.json"]


def test_keys_that_training_refuses_can_be_left_out(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    put(
        {
            "model_type": "lora",
            "model_family": "stable-diffusion",
            "lora_rnak": 8,
            "seed": "x",
            "num_processes": 3,
            "num_machines": 2,
        }
    )
    configure(file="y")

    shown = capsys.readouterr().out

    assert "Did you mean 'lora_rank'?" in shown
    assert "cannot be shared equally" in shown
    assert not {"lora_rnak", "num_processes"} & set(written())
    assert (written()["seed"], written()["model_family"]) == (42, "kandinsky5-image")


def test_a_key_that_the_file_has_twice_is_shown_with_both_values(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    FILE.parent.mkdir()
    FILE.write_text(
        '{"model_type": "lora", "model_family": "kandinsky5-image", "seed": 1, "seed": 2}'
    )

    assert configure("--defaults")[0] == 0

    assert "contains 'seed' twice: 1 and 2" in capsys.readouterr().out
    assert written()["seed"] == 2


def test_an_empty_spelling_of_a_key_does_not_unset_another(configure: Configure) -> None:
    put(
        {
            "model_type": "lora",
            "model_family": "kandinsky5-image",
            "lora_dropout": 0.1,
            "--lora_dropout": None,
        }
    )

    assert configure("--defaults")[0] == 0

    assert written()["lora_dropout"] == 0.1


def test_defaults_list_the_keys_they_leave_out(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    put({"model_type": "lora", "model_family": "kandinsky5-image", "lora_rnak": 8})

    assert configure("--defaults")[0] == 0
    assert "Left out: lora_rnak" in capsys.readouterr().out


def test_keys_that_training_refuses_can_be_kept(configure: Configure) -> None:
    put({"model_type": "lora", "model_family": "kandinsky5-image", "lora_rnak": 8})
    configure(mend="n")

    assert written()["lora_rnak"] == 8


def test_a_setting_can_be_changed_at_the_end(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    configure(file=["learning rate", "learning_rate"], learning_rate=["1e-3", "1e-4"])

    assert written()["learning_rate"] == 1e-4
    assert "learning_rate?" in capsys.readouterr().out


def test_the_model_type_can_be_changed_at_the_end(configure: Configure) -> None:
    configure(file=["model_type", "y"], model_type=["lora", "full"], lora_rank="32")
    assert "lora_rank" not in written()
    assert written()["learning_rate"] == 5e-5

    FILE.unlink()
    configure(file=["model_type", "y"], model_type=["lora", "full"], learning_rate="3e-5")
    assert written()["learning_rate"] == 3e-5


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda: put({}, Path("config/config.json/x")), "is a folder"),
        (lambda: Path("config").touch(), "cannot be written"),
        (lambda: (Path("config").mkdir(), FILE.write_text("{'a'")), "line 1"),
    ],
)
def test_an_unusable_file_is_reported(
    configure: Configure, capsys: pytest.CaptureFixture, prepare: Callable[[], object], message: str
) -> None:
    prepare()
    code, _ = configure()

    assert code == 2
    assert message in capsys.readouterr().err


def test_a_toml_file_is_refused(configure: Configure, capsys: pytest.CaptureFixture) -> None:
    assert configure("config/config.toml")[0] == 2
    assert "writes JSON" in capsys.readouterr().err


def test_the_name_of_a_configuration_is_not_a_file(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    put({}, Path("config/my cat/config.json"))
    for name in ("env=my cat", "my cat"):
        assert configure(name)[0] == 2
        command = "simpletuner configure 'config/my cat/config.json'"
        assert capsys.readouterr().err == f"error: {name!r} is not a file: write {command}\n"


# Through a pipe
# --------------------------------------------------------------------------------------------------


def test_answers_may_come_from_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["configure"], input="\n\n\n\n\n\noutput/cat\n" + "\n" * 60)

    assert result.exit_code == 0, result.output
    assert written()["output_dir"] == "output/cat"
    assert "Next steps" in result.output
    assert "\x1b" not in result.output


@pytest.mark.parametrize("lines", [0, 1, 12])
def test_input_that_ends_early_writes_nothing(
    lines: int,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = workspace.path("config/config.json").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" * lines))
    assert workspace.run("configure") == 2

    printed = capsys.readouterr().err
    assert (
        "The input ended before the last question. Nothing was written. --defaults takes "
        "every default." in printed
    )
    assert workspace.path("config/config.json").read_bytes() == before
    assert not workspace.path("config/config.json.bak").exists()


# In a terminal
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pexpect.spawn:
    monkeypatch.setenv("TERM", "xterm-256color")
    child = pexpect.spawn(
        sys.executable,
        ["-m", "simpletuner", "configure"],
        cwd=str(tmp_path),
        encoding="utf-8",
        timeout=PATIENCE,
        dimensions=(40, 100),
    )
    for question in ("Folder of your pictures", "GPU to estimate for", "Start from a recipe"):
        child.expect(question)
        child.sendline("")
    yield child
    child.close(force=True)


@pytest.mark.slow(3)
def test_questions_work_in_a_terminal(terminal: pexpect.spawn, tmp_path: Path) -> None:
    terminal.expect(r"Model \[kandinsky5-image\]")
    terminal.sendline("?")
    terminal.expect("kandinsky5-image makes pictures")
    terminal.expect(r"Model \[kandinsky5-image\]")
    terminal.sendline("")
    terminal.expect("Version of the model")
    terminal.sendline("t2i-lite-pretrian")
    terminal.expect("Did you mean 't2i-lite-pretrain'")
    terminal.expect(r"Version of the model \[t2i-lite-pretrain\]")
    terminal.sendline("")
    terminal.expect("What to train")
    terminal.sendline("")
    terminal.expect("Output folder")
    terminal.sendline("output/कुत्ता")
    prompt = re.compile(r"(?<!\x1b)\[[^]\r\n]*\]: ")
    terminal.expect(prompt)
    while LAST not in terminal.before:
        terminal.sendline("")
        terminal.expect(prompt)
    terminal.sendline("")
    terminal.expect("Written: config/config.json")
    terminal.expect("Also write config/multidatabackend.json, for pictures in datasets/my_images")
    terminal.sendline("")
    terminal.expect("1. Put your pictures into datasets/my_images")
    terminal.expect(pexpect.EOF)

    terminal.close()
    assert terminal.exitstatus == 0

    [pictures, _] = json.loads(
        (tmp_path / "config/multidatabackend.json").read_text(encoding="utf-8")
    )
    assert pictures["instance_data_dir"] == "datasets/my_images"

    values = written(tmp_path / FILE)
    assert (values["output_dir"], values["model_flavour"]) == ("output/कुत्ता", "t2i-lite-pretrain")


@pytest.mark.slow(1)
def test_ctrl_c_writes_nothing(terminal: pexpect.spawn, tmp_path: Path) -> None:
    terminal.expect(r"Model \[kandinsky5-image\]")
    terminal.sendline("")
    # All of the prompt: before it is whole, the line is not edited yet.
    terminal.expect(r"Version of the model \[[^]]*\]: ")
    # A signal that comes just before readline waits is seen with the next key only.
    while terminal.sendcontrol("c") and terminal.expect(
        ["Interrupted", pexpect.TIMEOUT], timeout=30
    ):
        pass
    terminal.expect(pexpect.EOF)

    terminal.close()

    assert terminal.exitstatus == 130
    assert not (tmp_path / "config").exists()


# Answers that lead nowhere
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer", ["y", "{", "back", *(thorough(word) for word in ("n", "nonsense", "-", "0", "?"))]
)
def test_the_same_answer_to_everything_ends(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    asked = 0

    def reply(prompt: str) -> str:
        nonlocal asked
        asked += 1
        assert asked < 1000, prompt
        return answer

    monkeypatch.setattr("builtins.input", reply)

    assert main(["configure"]) in (0, 2)


def test_no_leaves_an_optional_setting_out(configure: Configure) -> None:
    configure(
        validation_prompt="n",
        user_prompt_library="no",
        tread_config="none",
        report_to="no",
        validation_seed="n",
    )

    assert not {
        "validation_prompt",
        "user_prompt_library",
        "tread_config",
        "validation_seed",
    } & set(written())
    assert written()["report_to"] == "none"


def test_a_wrong_answer_keeps_the_default(configure: Configure) -> None:
    _, person = configure(model_family=["no", "xyz"], lr_scheduler="xyz")
    prompts = [
        prompt for prompt in person.prompts if prompt.strip().startswith(("Model [", "Schedule of"))
    ]

    assert all(
        "[kandinsky5-image]" in prompt or "[constant_with_warmup]" in prompt for prompt in prompts
    )
    assert written()["model_family"] == "kandinsky5-image"


def test_advice_on_frames_of_i2v_can_be_followed(
    answer: Answer, capsys: pytest.CaptureFixture
) -> None:
    model = {"model_family": "kandinsky5-video", "model_flavour": "i2v-lite-5s"}
    for typed in ("14", "13"):
        values = answer("validation_num_video_frames", typed, "", **model)
        assert "NaN below 17 frames" in capsys.readouterr().out
        assert values["validation_num_video_frames"] == 17, "Enter takes what was advised"


def test_every_flavour_is_listed_with_its_purpose(
    answer: Answer, capsys: pytest.CaptureFixture
) -> None:
    for family, spec in FAMILIES.items():
        answer("model_flavour", "", model_family=family)
        shown = capsys.readouterr().out
        for flavour in spec.flavours:
            [line] = [
                line for line in shown.splitlines() if re.match(rf"[ *]+\d+  {flavour.name} ", line)
            ]
            assert len(line.split()) > 4


def test_back_returns_to_the_question_before(configure: Configure) -> None:
    _, person = configure(folder=["back"], output_dir=["wrong", "right"], seed=["back", ""])
    assert person.asked[:2] == ["folder", "folder"]

    seed = person.asked.index("seed")
    assert person.asked[seed - 1 : seed + 3] == ["output_dir", "seed", "output_dir", "seed"]
    assert written()["output_dir"] == "right"


def test_a_key_named_at_the_end_is_asked_again(configure: Configure) -> None:
    _, person = configure(
        file=["lora_rank", "max_train_steps"], lora_rank=["16", "8"], max_train_steps=["10", "0"]
    )
    end = person.asked.index("file")

    assert person.asked[end:] == [
        "file",
        "lora_rank",
        "file",
        "max_train_steps",
        "num_train_epochs",
        "file",
    ]
    assert written()["lora_rank"] == 8


def test_the_plan_uses_the_named_memory(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    """Group offload is no default for Pro; the plan asks for it where the card is too small."""
    answers = {
        "model_family": "kandinsky5-video",
        "model_flavour": "t2v-pro-sft-5s-hd",
        "offload": "manual",
    }
    _, person = configure(**answers, device="24", remedy="n")

    shown = capsys.readouterr().out
    assert "On a GPU with 24 GiB" in shown
    assert "does not fit" in shown
    assert "This would fit: " in shown
    assert person.prompts[-1].endswith("[y/N]: "), "what training refuses is not written by Enter"
    assert not FILE.exists()

    _, person = configure(**answers, device="24")
    shown = capsys.readouterr().out
    assert person.prompts[-1].endswith("[Y/n]: ")
    assert "Follows from your answers: " in shown
    assert "As before: " not in shown
    assert "device" not in written()
    assert written()["enable_group_offload"] is True


def test_the_gpu_of_the_estimate_can_be_changed(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    configure(device=["h10", "80 GB", "rtx 4090"], file=["device", ""])
    shown = capsys.readouterr().out

    assert "'h10' is not a known card. Did you mean " in shown
    assert "On a GPU with 80 GiB (85.9 GB) this fits" in shown
    assert "On RTX 4090 with 24 GiB" in shown


def test_without_data_no_total_time_is_estimated(
    configure: Configure, capsys: pytest.CaptureFixture
) -> None:
    configure(max_train_steps="0", num_train_epochs="2", device="80")
    assert re.search(
        r"about [\d.]+ \w+ a step, for samples of the usual size", capsys.readouterr().out
    )


def test_problems_of_the_plan_are_shown_before_writing(
    configure: Configure, t2i_checkpoint: Path, capsys: pytest.CaptureFixture
) -> None:
    put(
        [
            {"id": "a", "instance_data_dir": "nowhere"},
            {"id": "t", "dataset_type": "text_embeds", "default": True},
        ],
        Path("config/multidatabackend.json"),
    )
    configure()

    assert "Training will refuse this: instance_data_dir" in capsys.readouterr().out


# What is written, trained
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["lora", "full"])
def test_written_configs_plan_without_a_warning(
    configure: Configure, t2i_checkpoint: Path, capsys: pytest.CaptureFixture, model_type: str
) -> None:
    put(
        {
            "pretrained_model_name_or_path": str(t2i_checkpoint),
            "model_type": "lora",
            "model_family": "kandinsky5-image",
        }
    )
    configure(model_type=model_type, validation_prompt="a cat", lr_warmup_steps="10")
    _put_data("t2i")

    capsys.readouterr()
    assert main(["train", "--dry-run"]) == 0

    captured = capsys.readouterr()
    assert not re.search(r"\bwarning", captured.out + captured.err, re.IGNORECASE)


def test_the_shown_dataset_file_plans_for_pairs(
    configure: Configure, i2i_checkpoint: Path, capsys: pytest.CaptureFixture
) -> None:
    put(
        {
            "pretrained_model_name_or_path": str(i2i_checkpoint),
            "model_type": "lora",
            "model_family": "kandinsky5-image",
        }
    )
    configure(model_flavour="i2i-lite-sft")

    _put_data("i2i")
    assert main(["train", "--dry-run"]) == 0

    captured = capsys.readouterr()
    assert not re.search(r"\bwarning", captured.out + captured.err, re.IGNORECASE)


@pytest.mark.slow
def test_written_configs_train(configure: Configure, t2i_checkpoint: Path) -> None:
    put(
        {
            "pretrained_model_name_or_path": str(t2i_checkpoint),
            "model_type": "lora",
            "model_family": "kandinsky5-image",
        }
    )
    configure(
        max_train_steps="2",
        output_dir="out",
        validation_resolution="128x128",
        validation_num_inference_steps="2",
    )

    _put_data("t2i")

    assert main(["train", "torch_num_threads=1"]) == 0
    assert Path("out/pytorch_lora_weights.safetensors").is_file()


def _put_data(task: Task) -> None:
    """The dataset file that the next steps show, at a size for tests, and its pictures."""
    entries = example_datasets(
        Draft(FILE, {"model_family": "kandinsky5-image", "model_flavour": f"{task}-lite-sft"})
    )
    workspace = Workspace(Path())
    for entry in entries:
        if "instance_data_dir" in entry:
            workspace.add_pictures(entry["instance_data_dir"], 4)
            entry["resolution"] = 64
    workspace.write_datasets(entries)


def test_a_new_file_has_the_warm_up_of_the_guides_and_a_prompt(configure: Configure) -> None:
    code, _ = configure()

    written = json.loads(FILE.read_text())
    assert code == 0
    assert written["lr_warmup_steps"] == 50
    assert written["validation_prompt"] == "a photo of my subject on a beach"
    assert written["offload"] == "auto"


def test_short_run_is_warmed_up_for_a_tenth_of_it(configure: Configure) -> None:
    configure(max_train_steps="100")

    assert json.loads(FILE.read_text())["lr_warmup_steps"] == 10


def test_time_on_the_cpu_is_not_estimated_without_files(
    configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    configure()

    shown = capsys.readouterr().out
    assert "There is no GPU here." in shown
    assert "On the CPU this takes" not in shown
