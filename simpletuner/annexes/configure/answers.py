"""The answers about a config: its settings, and the folder of its files if the user names one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.annexes.draft import Draft
from simpletuner.annexes.start.answers import RunAnswers
from simpletuner.annexes.start.media_folder import MediaFolder, read_media_folder
from simpletuner.annexes.start.new_run import FILES, NewRun, run_name
from simpletuner.annexes.start.recipe import DEMOS, MODELS, RECIPES, TRIGGER, read_example
from simpletuner.config.device import HERE, AskedDevice
from simpletuner.config.sources import DATASET_FILE
from simpletuner.data.discovery import Scan

# The choice of no recipe.
NO_RECIPE = "none"
# Number of files that a recipe's steps are for, if no folder is named.
USUAL_FILES = 20


class ConfigAnswers:
    """The answers about a config.

    Attributes:
        folder: the folder of the files, as the user names it; None if none is named.
        run: the answers about its files.
        recipe: a purpose, if no folder is named.
        device: the GPU to estimate for.

    Args:
        draft: the settings of the file, or none.
        offers_demo: without a GPU, offer a tiny model that trains on a CPU.
    """

    def __init__(self, draft: Draft, *, offers_demo: bool = True) -> None:
        self.file = draft.file
        self.is_loaded = bool(draft.loaded)
        self.offers_demo = offers_demo
        self.folder: Path | None = None
        self.run: RunAnswers | None = None
        self.recipe = NO_RECIPE
        self.device: AskedDevice = HERE
        self._draft = draft
        self._is_outdated = False

    @property
    def draft(self) -> Draft:
        """The settings; an answer about the files resets them to the values of the recipe."""
        if self._is_outdated:
            self._draft = self._proposed()
            self._is_outdated = False
        return self._draft

    @property
    def dataset_path(self) -> Path:
        return Path(self.draft.dataset_file).expanduser()

    @property
    def chooses_model(self) -> bool:
        """Whether the model is chosen for the files of the folder; a loaded file has a model."""
        return self.run is not None and not self.is_loaded

    def name_folder(self, folder: Path | None) -> None:
        """Take the files of a folder, or of none.

        Raises:
            UserError: the folder holds neither pictures nor clips.
        """
        if folder == self.folder:
            return
        self.folder = folder
        self.run = None
        if folder is not None:
            media = read_media_folder(folder)
            self.run = RunAnswers(
                self._name(folder), media, {}, device=self.device, offers_demo=self.offers_demo
            )
        self.propose()

    def _name(self, folder: Path) -> str:
        """The name of the run: of its config's folder, as in `config/cat/config.json`."""
        config_folder = self.file.parent
        if config_folder.parent == Path("config"):
            return config_folder.name
        return run_name(folder)

    def choose_recipe(self, purpose: str) -> None:
        """Propose the values of a recipe, or the usual defaults."""
        self.recipe = purpose
        self.propose()

    def set_asked_device(self, device: AskedDevice) -> None:
        """Estimate for a device."""
        self.device = device
        if self.run is not None:
            self.run.device = device

    def propose(self) -> None:
        """Reset the settings to the values of the recipe once they are read.

        A loaded file keeps its settings.
        """
        self._is_outdated = not self.is_loaded

    def _proposed(self) -> Draft:
        """The settings of a run on the folder, or else of the recipe."""
        draft = Draft(self.file)
        if self.run is not None:
            config = self.run.run(self.run.model).config()
            draft.change({key: value for key, value in config.items() if key not in FILES})
        elif self.recipe != NO_RECIPE:
            recipe = RECIPES[self.recipe]
            example = read_example(recipe.example)
            values = recipe.values(recipe.steps(USUAL_FILES), TRIGGER)
            draft.change({"model_family": example["model_family"], **values})
            if example["model_flavour"] != draft.spec.flavours[0].name:  # the flavour for edits
                draft.change({"model_flavour": example["model_flavour"]})
        return draft

    def new_run(self) -> NewRun | None:
        """The run on the files of the folder with the model of the settings.

        None without a folder, or if the model is for other files.
        """
        if self.run is None:
            return None
        example = self._example(self.run)
        if example is None:
            return None
        settings = self.draft.values
        kept = {key: settings[key] for key in ("resolution",) if key in settings}
        return NewRun(
            name=self.run.name,
            media=self.run.media,
            purpose=self.run.purpose,
            trigger=self.run.trigger,
            example=example,
            # Missing ones of several are written before training.
            captions=bool(self.run.media.captioned) and not self.run.media.concepts,
            settings=kept,
            device=self.device,
            most_frames=self.draft.config.validation.validation_num_video_frames or 0,
            measures_loss="eval_steps_interval" in settings,
        )

    def _example(self, run: RunAnswers) -> str | None:
        """The packaged example for these files whose model is nearest to that of the settings."""
        examples = [*MODELS[run.media.kind]]
        if run.media.kind in DEMOS:
            examples.append(DEMOS[run.media.kind])
        return nearest_example(examples, self.draft.values, self.draft)

    def datasets(self) -> list[dict[str, Any]]:
        """The content of the dataset file: for the folder, or else a packaged example's."""
        run = self.new_run()
        return example_datasets(self.draft) if run is None else run.datasets()


def nearest_example(examples: list[str], values: Mapping[str, Any], draft: Draft) -> str | None:
    """The first example with the same checkpoint and flavour, else the first of the family.

    None if there is none.
    """
    same_family = None
    for example in examples:
        config = read_example(example)
        if config["model_family"] != draft.spec.name:
            continue
        checkpoint = config.get("pretrained_model_name_or_path")
        is_same_checkpoint = checkpoint == values.get("pretrained_model_name_or_path")
        if is_same_checkpoint and config["model_flavour"] == draft.judgement.flavour.name:
            return example
        same_family = same_family or example
    return same_family


def usual_example(draft: Draft) -> str:
    """The packaged example of the family, for the task of the flavour."""
    examples = [*MODELS["pictures"], *MODELS["clips"]]
    if draft.judgement.flavour.task == "i2i":
        examples = [*MODELS["pairs"]]
    return next(name for name in examples if name.startswith(draft.spec.name))


def example_datasets(draft: Draft) -> list[dict[str, Any]]:
    """The content of an initial dataset file: an example's, with clips as long as previews."""
    trained, *further = read_example(usual_example(draft), DATASET_FILE)
    no_files_yet = MediaFolder(Path(trained["instance_data_dir"]), Scan())
    longest = draft.config.validation.validation_num_video_frames or 1
    return [no_files_yet.fitted(trained, draft.spec, longest), *further]
