"""A new run on a folder: config, dataset file and prompts, from a few answers and a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from simpletuner.annexes.start.intervals import checkpoint_interval, preview_interval
from simpletuner.annexes.start.media_folder import EXCLUDED, MediaFolder
from simpletuner.annexes.start.recipe import DEMOS, RECIPES, Recipe, read_example
from simpletuner.annexes.start.sizes import Fit
from simpletuner.annexes.start.trigger import name_from
from simpletuner.atomic import write_json
from simpletuner.config.device import HERE, AskedDevice
from simpletuner.config.schema import render_config
from simpletuner.config.sources import DATASET_FILE
from simpletuner.data.buckets import PixelGrid
from simpletuner.errors import UserError
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import FamilySpec
from simpletuner.planning.prompts import SMALLEST_SIDE

# With fewer files, all are trained: they are worth more in training.
ENOUGH_FILES = 16
# Otherwise one file in eight is held out, up to four. A run evaluates each of them eight times, at
# eight noise levels, which takes about as long as twenty steps.
HELD_OUT_SHARE = 8
MOST_HELD_OUT = 4  # the default of num_eval_images
# Sampling steps of a round of two previews, per training step, with which previews take a fifth of
# the run, a quarter of the training time. A training step is about 3 forward passes; a sampling
# step of both previews is 4, with guidance.
SAMPLING_STEPS = 3 / 4 / 4
EVAL_TIMESTEPS = 8
# Prefixes of keys that concern only the files of an example.
KEYS_OF_EXAMPLES = ("preservation_", "tracker_run_name")
# Keys that name a file beside the config.
FILES = {"data_backend_config": DATASET_FILE, "user_prompt_library": "user_prompt_library.json"}


@dataclass(frozen=True)
class NewRun:
    """The user's answers, and the resulting config.

    Attributes:
        trigger: a word for the learned concept, optionally followed by a comma and its class.
        example: the packaged example of the model.
        captions: every file has a caption, or will get one.
        writes_captions: files without a caption get one before training.
        settings: keys from the command line.
        root: the working folder of the run.
        device: the device that the plan is asked about.
        most_frames: of a trained clip; 0 for those that the example's model is trained with.
        measures_loss: the evaluation loss is measured, so of many files some are held out.
    """

    name: str
    media: MediaFolder
    purpose: str
    trigger: str
    example: str
    captions: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    root: Path = Path()
    device: AskedDevice = HERE
    most_frames: int = 0
    measures_loss: bool = True
    writes_captions: bool = False

    @property
    def folder(self) -> Path:
        return Path("config") / self.name

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.purpose]

    @property
    def spec(self) -> FamilySpec:
        return FAMILIES[read_example(self.example)["model_family"]]

    @property
    def is_demo(self) -> bool:
        """Whether the model is tiny, and needs few steps."""
        return self.example in DEMOS.values()

    @property
    def phrase(self) -> str:
        return self.recipe.phrase.format(trigger=self.trigger)

    @cached_property
    def captioned_as(self) -> str:
        """The words for the learned concept that most captions already contain; else empty."""
        captions = self.media.parts[0].captions
        for words in (self.phrase, self.trigger, self.trigger.partition(",")[0]):
            if words and captions.mention(words):
                return words
        return ""

    @cached_property
    def parts(self) -> list[NewRun]:
        """A run for each concept, or else this run.

        The trigger is for the concept with most files.
        """
        triggers = [self.trigger, *(concept.words for concept in self.media.concepts[1:])]
        parts = zip(self.media.parts, triggers, strict=True)
        return [replace(self, media=media, trigger=trigger) for media, trigger in parts]

    @cached_property
    def entry(self) -> dict[str, Any]:
        """The dataset entry of the example, for these files."""
        entry: dict[str, Any] = dict(read_example(self.example, DATASET_FILE)[0])
        if self.is_demo:  # its entry is for its packaged files
            del entry["minimum_image_size"]
            entry["id"] = f"my-{self.media.noun}"
        return entry

    @property
    def longest(self) -> int:
        """The most frames of a trained clip."""
        usual: int = read_example(self.example).get("validation_num_video_frames", 1)
        return self.most_frames or usual

    @cached_property
    def fit(self) -> Fit:
        """The size and length of the trained files."""
        fit = self.media.fit(self.entry, self.spec, self.longest)
        if "resolution" in self.settings:
            # At the user's resolution, no file is left out for its size.
            return replace(fit, resolution=fit.usual_resolution, small=())
        return fit

    @property
    def resolution(self) -> int:
        """The trained resolution: the user's, or else that of the files."""
        resolution = self.settings.get("resolution")
        return resolution if isinstance(resolution, int) else self.fit.resolution

    @property
    def usable(self) -> int:
        """The number of files that are trained or held out."""
        return self.media.usable - len(self.fit.left_out)

    @property
    def held_out(self) -> int:
        """The number of files to hold out; their loss shows which checkpoint generalises best."""
        files = self.parts[0].usable
        if files < ENOUGH_FILES or not self.measures_loss:
            return 0
        measured: int = self.recipe.settings.get("num_eval_images", MOST_HELD_OUT)
        return min(files // HELD_OUT_SHARE, measured)

    @property
    def steps(self) -> int:
        """The length of the run."""
        steps = self.recipe.steps(self.usable - self.held_out)
        if self.is_demo:
            return min(steps, read_example(self.example)["max_train_steps"])
        return steps

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        example = read_example(self.example)
        config = {
            key: value for key, value in example.items() if not key.startswith(KEYS_OF_EXAMPLES)
        }
        config["output_dir"] = f"output/{self.name}"
        for key, file in FILES.items():
            config[key] = (self.folder / file).as_posix()
        config |= self.recipe.values(self.steps, self.trigger)
        steps = self.settings.get("max_train_steps")
        if isinstance(steps, int) and steps > 0:
            config["max_train_steps"] = steps
            config["checkpoint_step_interval"] = checkpoint_interval(steps)
        config |= self._previews(config)
        config |= self._preservation()
        if self.trigger and self.phrase:
            # In the header of every weight file, where one looks for the words later.
            config["model_card_trigger"] = [self.captioned_as or self.phrase]
        if self.held_out:
            config["eval_steps_interval"] = config["checkpoint_step_interval"]
            config["eval_timesteps"] = EVAL_TIMESTEPS
        if self.media.holds_clips:
            config["validation_num_video_frames"] = self.fit.frames
        return {**config, **self.settings}

    def _preservation(self) -> dict[str, Any]:
        """Keys that preserve the subject's class without regularisation pictures.

        The class follows a comma, as in `zkt, a grey cat`.
        """
        _trigger, _, subject_class = self.phrase.partition(", ")
        if self.purpose != "subject" or not subject_class:
            return {}
        return {
            "preservation_weight": 1.0,
            "preservation_trigger": self.captioned_as or self.phrase,
            "preservation_prompt": subject_class,
        }

    def _previews(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The size and the interval of previews, which take about a fifth of the run.

        Previews of pictures have as many pixels as are trained. Those of clips keep the example's
        size, which may decide how positions are scaled.

        Args:
            config: with the size in the example.
        """
        steps = config["max_train_steps"]
        size = config["validation_resolution"]
        resolution = {**self.settings, **self.datasets()[0]}["resolution"]
        # Trained pixels relative to those of a preview: a larger sample makes a training step as
        # much slower. The user's resolution may be invalid, which is reported later.
        relative_pixels = 1.0
        if isinstance(resolution, int) and resolution >= SMALLEST_SIDE:
            usual = read_example(self.example, DATASET_FILE)[0]["resolution"]
            relative_pixels = (resolution / usual) ** 2
        if relative_pixels != 1 and not self.media.holds_clips:
            width, height = map(int, size.split("x"))
            grid = PixelGrid(resolution, "pixel_area", self.spec.size_multiple)
            size = str(grid.size(width / height))
            relative_pixels = 1.0
        # Edits are rendered for several source pictures.
        inputs = config["num_eval_images"] if self.media.sources else 1
        sampling_steps = inputs * config["validation_num_inference_steps"]
        rounds = SAMPLING_STEPS * steps * relative_pixels / sampling_steps
        interval = preview_interval(steps, config["checkpoint_step_interval"], rounds)
        return {"validation_resolution": size, "validation_step_interval": interval}

    def datasets(self) -> list[dict[str, Any]]:
        """The content of the dataset file."""
        trained = self.media.fitted(self.entry, self.spec, self.longest)
        entries = [part.entry_from(trained) for part in self.parts]
        if self.held_out:
            entries[0]["hold_out"] = self.held_out
        for number, concept in enumerate(self.media.concepts):
            entries[number]["repeats"] = concept.repeats - 1
        if len(entries) > 1:
            for number, entry in enumerate(entries, start=1):
                entry["id"] = f"{entry['id']}-{number}"
                entry.pop("cache_dir_vae", None)  # a folder of one dataset only
        # Keys of the dataset would override the same keys of the command line.
        overridden = {*self.settings}
        if "resolution" in self.settings:
            overridden.add("minimum_image_size")
        for entry in entries:
            for key in overridden & entry.keys():
                del entry[key]
        return entries + self._further_entries()

    def _further_entries(self) -> list[dict[str, Any]]:
        """The entries that follow those of the trained files: source pictures, and captions."""
        _, *further = read_example(self.example, DATASET_FILE)
        # Not the regularisation clips of the demo.
        further = [entry for entry in further if not entry.get("is_regularisation_data")]
        if self.media.sources:
            further[0]["instance_data_dir"] = self._relative(self.media.sources)
        return further

    def entry_from(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The entry for these files: with their folder, and the keys for their captions."""
        keys: dict[str, Any] = {"instance_data_dir": self._relative(self.media.folder)}
        if (self.media.folder / EXCLUDED).is_file():
            keys["exclude_files"] = EXCLUDED
        return {**entry, **keys, **self._captions()}

    def _captions(self) -> dict[str, Any]:
        """The keys that read the captions, and put the learned words into them."""
        # Whether the files, or most files of a concept, have captions or will get some.
        has_captions = self.captions or len(self.media.captioned) > len(self.media.uncaptioned)
        if self.phrase and not has_captions:
            return {"caption_strategy": "instanceprompt", "instance_prompt": self.phrase}
        keys = self.media.captions.keys
        if not self.phrase or self.captioned_as:
            return keys
        return {**keys, "instance_prompt": f"{self.phrase},", "prepend_instance_prompt": True}

    def _relative(self, folder: Path) -> str:
        """A path for the dataset file, relative to the working folder if it is inside."""
        if folder.is_relative_to(self.root):
            folder = folder.relative_to(self.root)
        return folder.as_posix()

    def write(self, folder: Path) -> None:
        """Write config, dataset file and prompts into an existing folder."""
        (folder / "config.json").write_text(render_config(self.config()), encoding="utf-8")
        write_json(folder / FILES["data_backend_config"], self.datasets())
        write_json(folder / FILES["user_prompt_library"], self._prompts())

    def differences(self) -> list[str]:
        """Keys of the config, and names of the other files, that differ from those on disk."""
        folder = self.root / self.folder
        before = _content(folder / "config.json")
        after: object = json.loads(render_config(self.config()))
        changed = []
        if isinstance(before, dict) and isinstance(after, dict):
            keys = [*after, *(key for key in before if key not in after)]
            changed += [key for key in keys if before.get(key) != after.get(key)]
        elif before != after:
            changed.append("config.json")
        if _content(folder / FILES["data_backend_config"]) != self.datasets():
            changed.append(FILES["data_backend_config"])
        if _content(folder / FILES["user_prompt_library"]) != self._prompts():
            changed.append(FILES["user_prompt_library"])
        return changed

    def _prompts(self) -> dict[str, str]:
        """The content of the prompt library."""
        return {"unrelated": self.recipe.unrelated_prompt}

    def save(self) -> None:
        """Create the folder of the run's config, all or nothing; existing files are never replaced.

        Raises:
            UserError: the folder cannot be written, or exists.
        """
        final = self.root / self.folder
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".start-", dir=final.parent) as hidden:
                # Not the temporary folder itself, whose permissions exclude other users.
                unfinished = Path(hidden, self.name)
                unfinished.mkdir()
                self.write(unfinished)
                unfinished.rename(final)  # fails if a file or a folder with files has the name
        except OSError as error:
            advice = ""
            if isinstance(error, PermissionError):
                advice = f" Make {final.parent} writable, or start in another folder."
            raise UserError(f"{self.folder} cannot be written: {error.strerror}.{advice}") from None


def holds_run(folder: Path) -> bool:
    """Whether a folder has the files of a config that `start` writes."""
    return all((folder / file).is_file() for file in ("config.json", *FILES.values()))


def _content(path: Path) -> object:
    """The content of a JSON file; None if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def run_name(folder: Path) -> str:
    """The name of a run, from the name of its folder."""
    return name_from(folder.resolve().name) or "my-lora"
