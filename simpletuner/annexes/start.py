"""From a folder of pictures or clips to the files of a run: at most three questions, and a recipe for the purpose.

What a recipe knows stands in `examples/recipes/PURPOSE.json`, what a model needs in the example of that model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from simpletuner.annexes.fitting.ready import weigh_plan
from simpletuner.annexes.fitting.show import duration
from simpletuner.annexes.wizard.session import render_config
from simpletuner.annexes.wizard.talk import Talk
from simpletuner.atomic import build_folder, write_json
from simpletuner.budget.device import find_device
from simpletuner.config.sources import EXAMPLES, Arguments
from simpletuner.data.clips import CLIP_SUFFIXES, ClipFacts, fitting_frames, probe_clip
from simpletuner.data.discovery import Scan, pair_key, scan
from simpletuner.data.files import MediaError
from simpletuner.errors import ConfigError, Problems, UserError, did_you_mean
from simpletuner.models.registry import FAMILIES

# The example whose settings each model starts from; the one that suits most people comes first.
PICTURES = ("kandinsky5-image-lora",)
EDITS = ("kandinsky5-image-edit-lora",)
CLIPS = ("kandinsky5-video-lite-lora", "sanavideo-lora", "kandinsky5-video-pro-lora")
# Names of two folders with the pictures of edits.
PAIRS = (("before", "after"), ("source", "target"), ("input", "output"))
CHECKPOINTS = 8  # to choose from at the end; see docs/CHOOSING.md
FILES = {"data_backend_config": "multidatabackend.json", "user_prompt_library": "user_prompt_library.json"}
TRIGGER = "zkt"  # no word, and a single token in no language
CLIPS_LOOKED_AT = 200  # for their lengths; a folder may hold thousands
SHORT_ONES = 10  # of a hundred clips, so many may be shorter than what is trained


@dataclass(frozen=True)
class Recipe:
    """What a purpose asks of a run.

    Attributes:
        title: the purpose in a few words.
        phrase: how captions and prompts name what is learned; `{trigger}` stands for the user's words.
        prompt, unrelated_prompt: of previews with `{phrase}`, and of what should stay as it was.
        steps_per_file, fewest_steps, most_steps: the length of the run.
        settings: further keys of config.json.
    """

    title: str
    phrase: str
    prompt: str
    unrelated_prompt: str
    steps_per_file: int
    fewest_steps: int
    most_steps: int
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, purpose: str) -> Recipe:
        path = EXAMPLES / "recipes" / f"{purpose}.json"
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def steps(self, files: int) -> int:
        """The length of a run on so many files, in whole hundreds."""
        return min(self.most_steps, max(self.fewest_steps, round(files * self.steps_per_file, -2)))


@dataclass(frozen=True)
class Material:
    """What a folder holds.

    Attributes:
        folder: of what is trained.
        files: pictures or clips, and their caption files.
        holds_clips: they are clips.
        sources: the folder of the pictures that edits start from.
    """

    folder: Path
    files: Scan
    holds_clips: bool = False
    sources: Path | None = None

    @classmethod
    def of(cls, folder: Path) -> Material:
        """Look at a folder.

        Raises:
            UserError: it holds nothing to train on, or pictures beside clips.
        """
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder.")
        if pair := _pair(folder):
            return cls(pair[1], scan(pair[1]), sources=pair[0])
        pictures, clips = scan(folder), scan(folder, CLIP_SUFFIXES)
        if pictures.files and clips.files:
            counts = f"pictures ({len(pictures.files)}) and clips ({len(clips.files)})"
            raise UserError(f"{folder} holds {counts}; give each a folder of its own, and start with one of them.")
        if not pictures.files and not clips.files:
            config = folder / "config.json"
            hint = f" It has a config: simpletuner train --config {config}." if config.is_file() else ""
            raise UserError(f"{folder} holds no pictures and no clips.{hint}")
        return cls(folder, clips or pictures, True) if clips.files else cls(folder, pictures)

    @property
    def noun(self) -> str:
        return "clips" if self.holds_clips else "pictures"

    @property
    def models(self) -> Sequence[str]:
        """Examples of models that can learn from it."""
        return CLIPS if self.holds_clips else EDITS if self.sources else PICTURES

    @property
    def purposes(self) -> Sequence[str]:
        """What it may be for, the likeliest first."""
        if self.sources:
            return ("edit",)
        return ("motion", "subject", "style") if self.holds_clips else ("subject", "style")

    @cached_property
    def uncaptioned(self) -> list[str]:
        return [name for name in self.files.files if pair_key(name) not in self.files.captions]

    @cached_property
    def clips(self) -> list[ClipFacts]:
        """The facts of readable clips; the plan tells what is wrong with the others."""
        facts = []
        for name in self.files.files[:CLIPS_LOOKED_AT]:
            with suppress(MediaError):
                facts.append(probe_clip(self.folder / name))
        return facts

    def frames(self, rate: float, stride: int, longest: int) -> int:
        """How many frames to train, so that few clips are too short."""
        lengths = sorted(clip.frames_at(rate) for clip in self.clips) or [longest]
        return fitting_frames(min(longest, lengths[len(lengths) * SHORT_ONES // 100]), stride)

    def describe(self) -> str:
        """One line."""
        texts = len(self.files.files) - len(self.uncaptioned)
        sources = f", each with a picture in {self.sources.name}" if self.sources else ""
        return f"{self.noun}: {len(self.files.files)}{sources}; with a caption: {texts}"


def _pair(folder: Path) -> tuple[Path, Path] | None:
    """The folders of the pictures before and after an edit, if these are below the folder."""
    inner = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()}
    return next(((inner[before], inner[after]) for before, after in PAIRS if before in inner and after in inner), None)


@dataclass(frozen=True)
class Start:
    """The answers, and the files that follow from them.

    Attributes:
        trigger: a word for what is learned; what it is may follow after a comma.
        example: of the model.
        captions: every file will have a caption of its own.
        settings: keys given on the command line.
    """

    name: str
    material: Material
    purpose: str
    trigger: str
    example: str
    captions: bool
    settings: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        return Path("config") / self.name

    @cached_property
    def recipe(self) -> Recipe:
        return Recipe.of(self.purpose)

    @property
    def phrase(self) -> str:
        return self.recipe.phrase.format(trigger=self.trigger)

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        config, recipe = _example(self.example), self.recipe
        steps = recipe.steps(len(self.material.files.files))
        config.pop("validation_step_interval")
        config |= {
            "output_dir": f"output/{self.name}",
            **{key: (self.folder / file).as_posix() for key, file in FILES.items()},
            "max_train_steps": steps,
            "checkpoint_step_interval": steps // CHECKPOINTS,
            "checkpoints_total_limit": CHECKPOINTS,
            "offload": "auto",
            "validation_prompt": recipe.prompt.format(phrase=self.phrase) or config["validation_prompt"],
            **recipe.settings,
        }
        word, _, what = self.phrase.partition(", ")
        if self.purpose == "subject" and what:
            # The class of the subject stays as it was, without further pictures.
            config |= {
                "preservation_weight": 1.0,
                "preservation_trigger": f"{word}, {what}",
                "preservation_prompt": what,
            }
        if self.material.holds_clips:
            config["validation_num_video_frames"] = self._frames(config)
        return config | self.settings

    def _frames(self, config: Mapping[str, Any]) -> int:
        spec = FAMILIES[config["model_family"]]
        return self.material.frames(spec.frame_rate or 1, spec.frame_stride, config["validation_num_video_frames"])

    def datasets(self) -> list[dict[str, Any]]:
        """The content of the dataset file."""
        trained, *others = _example(self.example, "multidatabackend.json")
        trained["instance_data_dir"] = self.material.folder.as_posix()
        if self.phrase and not self.captions:
            trained |= {"caption_strategy": "instanceprompt", "instance_prompt": self.phrase}
        elif self.phrase:
            trained |= {"instance_prompt": f"{self.phrase},", "prepend_instance_prompt": True}
        if "video" in trained:
            frames = self._frames(_example(self.example))
            trained["video"] |= {"num_frames": frames, "min_frames": frames}
        if self.material.sources:
            others[0]["instance_data_dir"] = self.material.sources.as_posix()
        return [trained, *others]

    def write(self, folder: Path) -> None:
        """Write config, dataset file and prompts into a folder that exists."""
        (folder / "config.json").write_text(render_config(self.config()), encoding="utf-8")
        write_json(folder / "multidatabackend.json", self.datasets())
        write_json(folder / "user_prompt_library.json", {"unrelated": self.recipe.unrelated_prompt})

    def save(self) -> None:
        """Create the folder of the run's config, whole or not at all.

        Raises:
            UserError: it cannot be written.
        """
        try:
            with build_folder(self.folder) as unfinished:
                self.write(unfinished)
        except OSError as error:
            raise UserError(f"{self.folder} cannot be written: {error.strerror}.") from None

    def verdict(self) -> tuple[bool, str]:
        """Whether it fits this machine, and how long it takes, in a few words."""
        if not find_device().is_gpu:
            return True, "no GPU here"
        problems = Problems()
        # Captions that are still to be written are no reason against a model.
        judged = replace(self, captions=not self.material.uncaptioned)
        with TemporaryDirectory() as name, suppress(ConfigError):
            judged.write(Path(name))
            files: list[tuple[str, object]] = [(key, f"{name}/{file}") for key, file in FILES.items()]
            arguments = Arguments(files, {"config_path": f"{name}/config.json"}, problems=problems)
            plan, budget = weigh_plan(arguments)
            fits = not any(problem.where == "memory" for problem in problems)
            time = duration(budget.step_seconds * plan.length.total_steps)
            return fits, f"fits, about {time} without previews" if fits else "does not fit this GPU"
        return False, "cannot be planned"


def _example(name: str, file: str = "config.json") -> Any:
    return json.loads((EXAMPLES / name / file).read_text(encoding="utf-8"))


def ask(
    folder: Path, talk: Talk, given: Mapping[str, str | None], settings: Sequence[tuple[str, object]], *, captions: bool
) -> Start:
    """Ask what the files and the command line leave open.

    Args:
        given: `purpose`, `trigger`, `model` and `name` from the command line.
        captions: captions will be written for files that have none.

    Raises:
        UserError: the folder or an answer cannot be used.
    """
    material = Material.of(folder)
    name = _free_name(given["name"] or re.sub(r"[^\w.-]+", "-", folder.resolve().name).strip("-.") or "my-lora")
    _check_captions(material, captions=captions)
    talk.tell(f"{folder}: {material.describe()}")
    purposes = {purpose: Recipe.of(purpose).title for purpose in material.purposes}
    purpose = _choose(talk, "What should be learned?", purposes, given["purpose"], "--purpose")
    trigger = given["trigger"]
    if trigger is None and purpose != "edit":
        what = f"A word for it that the model does not know, and what it is, as in: {TRIGGER}, a grey cat"
        trigger = talk.read_line(f"{what} [{TRIGGER}]: ") or TRIGGER
    captioned = captions or not material.uncaptioned
    # As JSON has them: 500 and not "500".
    values = {key: value if (read := _as_json(value)) is None else read for key, value in settings}

    def start(example: str) -> Start:
        return Start(name, material, purpose, trigger or "", example, captioned, values)

    return start(_choose_model(talk, material.models, given["model"], start))


def _free_name(name: str) -> str:
    if re.search(r"[/\\\x00-\x1f]", name):
        raise UserError(f"--name {name!r} is not the name of a folder.")
    target = Path("config") / name
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already: go on with `simpletuner train env={name}`, or give --name.")
    return name


def _as_json(value: object) -> Any:
    with suppress(ValueError):
        return json.loads(value) if isinstance(value, str) else None
    return None


def _check_captions(material: Material, *, captions: bool) -> None:
    missing, files = len(material.uncaptioned), len(material.files.files)
    if captions or not missing or (missing == files and not material.sources):
        return
    raise UserError(
        f"{missing} of {files} files have no caption ({material.uncaptioned[0]} is the first). --caption writes them "
        "with the model's own Qwen2.5-VL, or put a .txt file of the same name beside each."
    )


def _choose_model(talk: Talk, models: Sequence[str], given: str | None, start: Any) -> str:
    """The example of the model: what fits comes first, in the order of the list."""
    verdicts = {model: start(model).verdict() for model in models} if len(models) > 1 and given is None else {}
    ordered = sorted(models, key=lambda model: not verdicts.get(model, (True, ""))[0])
    choices = {model.removesuffix("-lora"): verdicts.get(model, (True, ""))[1] for model in ordered}
    return f"{_choose(talk, 'Which model?', choices, given, '--model')}-lora"


def _choose(talk: Talk, text: str, choices: Mapping[str, str], given: str | None, option: str) -> str:
    """The given choice, the only one, or the answer to a question; the first is the default."""
    names = list(choices)
    if given is not None and given not in names:
        raise UserError(f"{option} {given!r} is not one of: {', '.join(names)}.{did_you_mean(given, names)}")
    if given is not None or len(names) == 1:
        return given or names[0]
    talk.say(text)
    for line in _numbered(choices):
        talk.say(line)
    for _ in range(3):
        answer = talk.read_line(f"  [{names[0]}]: ").lower()
        chosen = dict(zip(map(str, range(1, len(names) + 1)), names, strict=True)).get(answer, answer) or names[0]
        if chosen in names:
            return chosen
        talk.refuse(f"{answer!r} is not one of: {', '.join(names)}.{did_you_mean(answer, names)}")
    return names[0]


def _numbered(choices: Mapping[str, str]) -> Iterator[str]:
    width = max(map(len, choices))
    for number, (name, note) in enumerate(choices.items(), start=1):
        yield f"  {number}  {name:<{width}}  {note}".rstrip()
