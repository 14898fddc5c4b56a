"""Makes the config of a run from a folder of pictures or clips and a recipe for its purpose.

Recipes are `examples/recipes/PURPOSE.json`. A model's settings come from its packaged example.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unicodedata import category

from simpletuner.annexes.figures import duration
from simpletuner.annexes.fitting.ready import needs_consent, ready_plan
from simpletuner.annexes.start.captions import LOOKED_AT, MOST_NAMED, FolderCaptions
from simpletuner.annexes.start.concepts import Concept, find_concepts, together
from simpletuner.annexes.start.sizes import Fit, fit_length, fit_size, rounded_size
from simpletuner.atomic import write_json
from simpletuner.budget.budget import Budget
from simpletuner.budget.device import find_device
from simpletuner.config.device import HERE, AskedDevice
from simpletuner.config.schema import render_config
from simpletuner.config.sources import EXAMPLES, Arguments, configured
from simpletuner.config.values import similar_path
from simpletuner.data.buckets import PixelGrid
from simpletuner.data.clips import CLIP_SUFFIXES, ClipFacts, probe_clip
from simpletuner.data.discovery import Scan, is_readable, scan
from simpletuner.data.file_names import UNREAD
from simpletuner.data.files import MediaError
from simpletuner.data.pictures import PICTURE_SUFFIXES, probe
from simpletuner.data.sample import ADVICE
from simpletuner.errors import ConfigError, UserError, counted, shorten
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import FamilySpec
from simpletuner.planning.prompts import SMALLEST_SIDE

T = TypeVar("T")
# Packaged examples that provide the settings of models; the first suits most users.
PICTURES: tuple[str, ...] = ("kandinsky5-image-lora",)
EDITS = ("kandinsky5-image-edit-lora",)
# Tiny models that train in minutes on a CPU and draw simple shapes; by whether they learn clips.
DEMOS = {True: "demo-video", False: "demo"}
CLIPS = ("kandinsky5-video-lite-lora", "sanavideo-lora", "kandinsky5-video-pro-lora")
# Purposes, with the example of the usual model.
PURPOSES = {"subject": PICTURES[0], "style": PICTURES[0], "motion": CLIPS[0], "edit": EDITS[0]}
# Names of the folders with pictures before and after an edit.
PAIRS = (("before", "after"), ("source", "target"), ("input", "output"))


@dataclass(frozen=True)
class Material:
    """The training files in a folder.

    Attributes:
        folder: the folder of the trained files.
        files: pictures or clips, and their caption files.
        holds_clips: the files are clips.
        sources: the folder of source pictures, for edits.
        others: files of the less frequent kind (clips or pictures), which are not trained.
        concepts: folders named as kohya's scripts expect, those with most files first.
        taken: sentences about what was taken from their names.
    """

    folder: Path
    files: Scan
    holds_clips: bool = False
    sources: Path | None = None
    others: Sequence[str] = ()
    concepts: Sequence[Concept] = ()
    taken: Sequence[str] = ()

    @classmethod
    def of(cls, folder: Path) -> Material:
        """The pictures or the clips in a folder, whichever are more.

        Raises:
            UserError: the folder contains neither.
        """
        if folder.is_file():
            raise UserError(f"{folder} is a file; start takes a folder of pictures or clips.")
        if not is_readable(folder):
            wrong = "cannot be read." if folder.is_dir() else f"is not a folder.{similar_path(folder, '*/')}"
            raise UserError(f"{folder} {wrong}")
        pair = _pair(folder)
        if pair is not None:
            before, after = pair
            edited = scan(after)
            if not edited.files:
                raise UserError(f"{after} contains no pictures.")
            return cls(after, edited, sources=before)
        pictures = scan(folder)
        clips = scan(folder, CLIP_SUFFIXES)
        if not pictures.files and not clips.files:
            config = folder / "config.json"
            hint = f" It has a config: simpletuner train --config {config}." if config.is_file() else ""
            raise UserError(" ".join([f"{folder} contains no pictures and no clips.{hint}", *_unread(pictures)]))
        if len(clips.files) > len(pictures.files):
            return cls(folder, clips, holds_clips=True, others=pictures.files)._divided()
        return cls(folder, pictures, others=clips.files)._divided()

    def _divided(self) -> Material:
        """The files of the concepts, if there are any."""
        concepts, notes = find_concepts(self.folder, self.files)
        if not concepts:
            return self
        return replace(self, files=together(self.files, concepts), concepts=concepts, taken=notes)

    def of_concept(self, concept: Concept) -> Material:
        """The files of a concept alone."""
        return replace(self, folder=self.folder / concept.folder, files=concept.inner, concepts=(), taken=())

    @cached_property
    def parts(self) -> list[Material]:
        """The files of each concept, or else all files."""
        return [self.of_concept(concept) for concept in self.concepts] or [self]

    @property
    def words(self) -> str:
        """The words of the concept with most files; empty without concepts."""
        return self.concepts[0].words if self.concepts else ""

    @classmethod
    def of_entry(cls, entry: Mapping[str, Any]) -> Material:
        """The files in the folder of a dataset entry; none if the folder does not exist yet."""
        folder, holds_clips = Path(entry["instance_data_dir"]), "video" in entry
        wanted = CLIP_SUFFIXES if holds_clips else PICTURE_SUFFIXES
        return cls(folder, scan(folder, wanted) if is_readable(folder) else Scan(), holds_clips)

    @property
    def noun(self) -> str:
        return "clips" if self.holds_clips else "pictures"

    @cached_property
    def models(self) -> dict[str, str]:
        """Models that can learn from it, with their examples."""
        examples = CLIPS if self.holds_clips else PICTURES
        if self.sources:
            examples = EDITS
        if self.tiny:
            examples = (*examples, self.tiny)
        return {example.removesuffix("-lora"): example for example in examples}

    @cached_property
    def tiny(self) -> str:
        """Without a GPU, a tiny model that can learn from it, to try everything with; else empty."""
        return "" if self.sources or find_device().is_gpu else DEMOS[self.holds_clips]

    @property
    def purposes(self) -> Sequence[str]:
        """Possible purposes, likeliest first."""
        if self.sources:
            return ("edit",)
        return ("motion", "subject", "style") if self.holds_clips else ("subject", "style")

    @cached_property
    def captions(self) -> FolderCaptions:
        """The captions in the folder."""
        return FolderCaptions(self.folder, self.files)

    @cached_property
    def captioned(self) -> list[str]:
        return [name for name in self.files.files if self.captions.has(name)]

    @cached_property
    def uncaptioned(self) -> list[str]:
        names = (name for name in self.files.files if not self.captions.has(name))
        # Unusable files need none; of those that were not opened, broken links.
        return [name for name in names if name not in self.unusable and (self.folder / name).is_file()]

    @cached_property
    def unusable(self) -> set[str]:
        """Those of the first `LOOKED_AT` files that cannot be read, or whose caption file cannot."""
        unusable: set[str] = set()
        for name in self.files.files[:LOOKED_AT]:
            has_unreadable_caption = self.captions.has(name) and not self.captions.is_readable(name)
            if name not in self.named_sizes or has_unreadable_caption:
                unusable.add(name)
        return unusable

    def _read(self, names: Iterable[str], read: Callable[[Path], T]) -> dict[str, T]:
        """Read the first `LOOKED_AT` files, by name; unreadable files are skipped, since the plan reports them."""
        contents = {}
        for name in islice(dict.fromkeys(names), LOOKED_AT):
            with suppress(MediaError):
                contents[name] = read(self.folder / name)
        return contents

    @cached_property
    def _clips(self) -> dict[str, ClipFacts]:
        return self._read(self.files.files, probe_clip) if self.holds_clips else {}

    @cached_property
    def _pictures(self) -> dict[str, tuple[int, int]]:
        return {} if self.holds_clips else self._read(self.files.files, probe)

    @cached_property
    def clips(self) -> list[ClipFacts]:
        """The facts of clips; empty for pictures."""
        return [*self._clips.values()]

    @cached_property
    def named_sizes(self) -> dict[str, tuple[int, int]]:
        """Width and height by file."""
        clips = {name: (clip.width, clip.height) for name, clip in self._clips.items()}
        return {**self._pictures, **clips}

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Width and height of the files, smallest first."""
        return sorted(self.named_sizes.values(), key=math.prod)

    @property
    def usable(self) -> int:
        """The number of trainable files: all except unreadable ones among the first `LOOKED_AT`."""
        return len(self.files.files) - len(self.unusable)

    def fit(self, entry: Mapping[str, Any], spec: FamilySpec, longest: int) -> Fit:
        """The size and length that suit these files.

        Args:
            entry: the dataset entry of the model's example.
            longest: maximum number of frames.
        """
        square, wanted = entry.get("crop_aspect") == "square", entry["resolution"]
        edges = {name: min(size) if square else math.isqrt(math.prod(size)) for name, size in self.named_sizes.items()}
        resolution, small = fit_size(edges, wanted)
        smallest = rounded_size(min(edges.values(), default=wanted))
        fit = Fit(self.noun, len(edges), resolution, wanted, small, smallest=smallest)
        if "video" not in entry:
            return fit
        lengths = {name: clip.frames_at(spec.frame_rate or 1) for name, clip in self._clips.items()}
        frames, short = fit_length(lengths, longest, spec.frame_stride)
        return replace(fit, frames=frames, wanted_frames=longest, short=short)

    def fitted(self, entry: Mapping[str, Any], spec: FamilySpec, longest: int) -> dict[str, Any]:
        """A dataset entry with a resolution and a length that suit these files.

        Args:
            longest: maximum number of frames.
        """
        fit = self.fit(entry, spec, longest)
        fitted = {**entry, "resolution": fit.resolution}
        if fit.minimum_size:
            fitted["minimum_image_size"] = fit.minimum_size
        if "video" in entry:
            fitted["video"] = {**entry["video"], "num_frames": fit.frames, "min_frames": fit.frames}
        return fitted

    def describe(self) -> str:
        """A one-line description."""
        sources = f", each with a picture in {self.sources.name}" if self.sources else ""
        sizes = " to ".join(dict.fromkeys(f"{width}x{height}" for width, height in (*self.sizes[:1], *self.sizes[-1:])))
        seconds = sorted(clip.seconds for clip in self.clips) if self.holds_clips else []
        lengths = " to ".join(dict.fromkeys(f"{each:.1f}" for each in (*seconds[:1], *seconds[-1:])))
        facts = [f"{len(self.files.files)}{sources}", sizes, lengths and f"{lengths} s"]
        unusable = f"; not usable: {shorten(sorted(self.unusable), MOST_NAMED)}" if self.unusable else ""
        return f"{self.noun}: {', '.join(filter(None, facts))}; with a caption: {len(self.captioned)}{unusable}"

    def notes(self) -> list[str]:
        """Sentences about files that are not trained, and about captions."""
        notes = []
        if self.others:
            others = "pictures" if self.holds_clips else "clips"
            advice = f"A run learns from pictures or from clips: to train {others}, put them into a separate folder."
            notes.append(f"Not trained, {others}: {shorten(self.others, MOST_NAMED)}. {advice}")
        captions = [note for part in self.parts for note in part.captions.notes()]
        return [*notes, *self.taken, *_unread(self.files), *captions]


def _unread(files: Scan) -> Iterator[str]:
    """A sentence about pictures and clips in formats that are not read."""
    names = [name for name, (reason, _) in files.ignored.items() if reason == UNREAD]
    if names:
        count = counted(len(names), "file")
        yield f"Not read: {count} in other formats ({shorten(names, MOST_NAMED)}). {ADVICE[UNREAD]}"


def _pair(folder: Path) -> tuple[Path, Path] | None:
    """The folders before and after an edit, if the folder contains such a pair."""
    inner = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()}
    return next(((inner[before], inner[after]) for before, after in PAIRS if before in inner and after in inner), None)


TRIGGER = "zkt"  # not a word in any language, and not a single token
# With at least this many files, an eighth is held out, up to four; fewer files are worth more in training. Each is
# evaluated at eight noise levels and eight times, which takes about as long as twenty steps.
ENOUGH_FILES, HELD_OUT_SHARE, MOST_HELD_OUT = 16, 8, 4  # the last is the default of num_eval_images
CHECKPOINTS, FEWEST_CHECKPOINTS = 8, 4  # to choose from at the end; see docs/CHOOSING.md
ROUNDED = 200  # whose multiples can be divided by the number of checkpoints
# Sampling steps of two previews for each training step. Guided, they are four forward passes, a training step is about
# three: with so many, previews take a fifth of the run.
SAMPLING_STEPS = 3 / 4 / 4
OF_EXAMPLES = ("preservation_", "tracker_run_name")  # prefixes of keys that concern the example's files
FILES = {"data_backend_config": "multidatabackend.json", "user_prompt_library": "user_prompt_library.json"}


@dataclass(frozen=True)
class Recipe:
    """The settings for a purpose.

    Attributes:
        title: the purpose in a few words.
        phrase: the words for the learned concept in captions and prompts; `{trigger}` stands for the user's words.
        prompt, unrelated_prompt: preview prompts: one with `{phrase}`, and one for content that should not change.
        steps_per_file, fewest_steps, most_steps: determine the length of the run.
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
        """The number of steps for this many files, rounded up so that the checkpoints' interval divides it."""
        steps = -(-files * self.steps_per_file // ROUNDED) * ROUNDED
        return min(self.most_steps, max(self.fewest_steps, steps))

    def values(self, steps: int, trigger: str) -> dict[str, Any]:
        """The keys of config.json; without a preview prompt if the recipe has none."""
        phrase = self.phrase.format(trigger=trigger)
        # What follows a comma is an apposition, which ends with one.
        prompt = self.prompt.format(phrase=f"{phrase}," if "," in phrase else phrase).removesuffix(",")
        return {
            "max_train_steps": steps,
            "checkpoint_step_interval": checkpoint_interval(steps),
            "checkpoints_total_limit": CHECKPOINTS,
            "offload": "auto",
            **({"validation_prompt": prompt} if prompt else {}),
            **self.settings,
        }


@dataclass(frozen=True)
class Start:
    """The user's answers, and the resulting config.

    Attributes:
        trigger: a word for the learned concept, optionally followed by a comma and its class.
        example: the packaged example of the model.
        captions: every file has a caption, or will get one.
        settings: keys from the command line.
        root: the working folder of the run.
        device: the device that the plan is asked about.
    """

    name: str
    material: Material
    purpose: str
    trigger: str
    example: str
    captions: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    root: Path = Path()
    device: AskedDevice = HERE

    @property
    def folder(self) -> Path:
        return Path("config") / self.name

    @cached_property
    def recipe(self) -> Recipe:
        return Recipe.of(self.purpose)

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
        """The words for the learned concept that most captions already contain; empty if they contain none."""
        captions = self.material.parts[0].captions
        for words in (self.phrase, self.trigger, self.trigger.partition(",")[0]):
            if words and captions.mention(words):
                return words
        return ""

    @cached_property
    def parts(self) -> list[Start]:
        """A run for each concept, or else this run; the trigger is for the concept with most files."""
        triggers = [self.trigger, *(concept.words for concept in self.material.concepts[1:])]
        parts = zip(self.material.parts, triggers, strict=True)
        return [replace(self, material=part, trigger=trigger) for part, trigger in parts]

    @cached_property
    def entry(self) -> dict[str, Any]:
        """The dataset entry of the example, for these files."""
        entry: dict[str, Any] = dict(read_example(self.example, "multidatabackend.json")[0])
        if self.is_demo:  # its entry is for its packaged files
            del entry["minimum_image_size"]
            entry["id"] = f"my-{self.material.noun}"
        return entry

    @property
    def longest(self) -> int:
        """The number of frames that the model is trained with."""
        frames: int = read_example(self.example).get("validation_num_video_frames", 1)
        return frames

    @cached_property
    def fit(self) -> Fit:
        """The size and length of the trained files; with the user's resolution, no file is left out for its size."""
        fit = self.material.fit(self.entry, self.spec, self.longest)
        if "resolution" in self.settings:
            return replace(fit, resolution=fit.wanted, small=())
        return fit

    @property
    def usable(self) -> int:
        """The number of files that are trained or held out."""
        return self.material.usable - len(self.fit.left_out)

    @property
    def held_out(self) -> int:
        """The number of files to hold out; their loss shows which checkpoint generalises best."""
        files = self.parts[0].usable
        if files < ENOUGH_FILES:
            return 0
        measured: int = self.recipe.settings.get("num_eval_images", MOST_HELD_OUT)
        return min(files // HELD_OUT_SHARE, measured)

    @property
    def steps(self) -> int:
        """The length of the run."""
        steps = self.recipe.steps(self.usable - self.held_out)
        return min(steps, read_example(self.example)["max_train_steps"]) if self.is_demo else steps

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        example = read_example(self.example)
        steps = self.settings.get("max_train_steps")
        config: dict[str, Any] = {
            **{key: value for key, value in example.items() if not key.startswith(OF_EXAMPLES)},
            "output_dir": f"output/{self.name}",
            **{key: (self.folder / file).as_posix() for key, file in FILES.items()},
            **self.recipe.values(self.steps, self.trigger),
        }
        if isinstance(steps, int) and steps > 0:
            config |= {"max_train_steps": steps, "checkpoint_step_interval": checkpoint_interval(steps)}
        config |= self._previews(config)
        what = self.phrase.partition(", ")[2]
        if self.purpose == "subject" and what:
            # Preserves the subject's class without regularisation pictures.
            trigger = self.captioned_as or self.phrase
            config |= {"preservation_weight": 1.0, "preservation_trigger": trigger, "preservation_prompt": what}
        if self.held_out:
            config |= {"eval_steps_interval": config["checkpoint_step_interval"], "eval_timesteps": 8}
        if self.material.holds_clips:
            config["validation_num_video_frames"] = self.fit.frames
        return {**config, **self.settings}

    def datasets(self) -> list[dict[str, Any]]:
        """The content of the dataset file."""
        _, *further = read_example(self.example, "multidatabackend.json")
        further = [entry for entry in further if not entry.get("is_regularisation_data")]  # the demo's clips
        trained = self.material.fitted(self.entry, self.spec, self.longest)
        entries = [part._trained(trained) for part in self.parts]
        entries[0] |= {"hold_out": self.held_out} if self.held_out else {}
        for number, (entry, concept) in enumerate(zip(entries, self.material.concepts, strict=False), start=1):
            entry["repeats"] = concept.repeats - 1
            if len(entries) > 1:
                entry["id"] = f"{entry['id']}-{number}"
                entry.pop("cache_dir_vae", None)  # each needs a folder of its own
        if self.material.sources:
            further[0]["instance_data_dir"] = self._written(self.material.sources)
        # Keys of the dataset would override the same keys of the command line.
        overridden = {*self.settings}
        if "resolution" in self.settings:
            overridden.add("minimum_image_size")
        for entry in entries:
            for key in overridden & entry.keys():
                del entry[key]
        return entries + further

    def _trained(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The entry with the folder and the captions of this material."""
        return {**entry, "instance_data_dir": self._written(self.material.folder), **self._captions()}

    def _previews(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The size and the interval of previews: each has its checkpoint, and all take about a fifth of the run.

        Pictures get as many pixels as are trained. Clips keep the example's, which may decide how positions are scaled.

        Args:
            config: with the example's size.
        """
        steps = config["max_train_steps"]
        size = config["validation_resolution"]
        resolution = {**self.settings, **self.datasets()[0]}["resolution"]
        pixels = 1.0  # that are trained, as a share of the example's; unknown if the user's resolution is no number
        if isinstance(resolution, int) and resolution >= SMALLEST_SIDE:
            pixels = (resolution / read_example(self.example, "multidatabackend.json")[0]["resolution"]) ** 2
        if pixels != 1 and not self.material.holds_clips:
            width, height = map(int, size.split("x"))
            size = "{}x{}".format(*PixelGrid(resolution, "pixel_area", self.spec.size_multiple).size(width / height))
            pixels = 1.0
        inputs = config["num_eval_images"] if self.material.sources else 1
        rounds = SAMPLING_STEPS * steps * pixels / (inputs * config["validation_num_inference_steps"])
        interval = preview_interval(steps, config["checkpoint_step_interval"], rounds)
        return {"validation_resolution": size, "validation_step_interval": interval}

    @property
    def _has_captions(self) -> bool:
        """Whether the files, or most files of a concept, have captions or will get some."""
        return self.captions or len(self.material.captioned) > len(self.material.uncaptioned)

    def _captions(self) -> dict[str, Any]:
        """Dataset keys that put the words for the learned concept into captions."""
        if self.phrase and not self._has_captions:
            return {"caption_strategy": "instanceprompt", "instance_prompt": self.phrase}
        keys = self.material.captions.keys
        is_named = not self.phrase or self.captioned_as
        return keys if is_named else {**keys, "instance_prompt": f"{self.phrase},", "prepend_instance_prompt": True}

    def _written(self, folder: Path) -> str:
        return (folder.relative_to(self.root) if folder.is_relative_to(self.root) else folder).as_posix()

    def write(self, folder: Path) -> None:
        """Write config, dataset file and prompts into an existing folder."""
        (folder / "config.json").write_text(render_config(self.config()), encoding="utf-8")
        write_json(folder / "multidatabackend.json", self.datasets())
        write_json(folder / "user_prompt_library.json", {"unrelated": self.recipe.unrelated_prompt})

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
                (unfinished := Path(hidden, self.name)).mkdir()
                self.write(unfinished)
                unfinished.rename(final)  # fails if a file or a folder with files has the name
        except OSError as error:
            is_denied = isinstance(error, PermissionError)
            advice = f" Make {final.parent} writable, or start in another folder." if is_denied else ""
            raise UserError(f"{self.folder} cannot be written: {error.strerror}.{advice}") from None

    def ready(self) -> Budget:
        """The plan with its estimate; nothing is written.

        Raises:
            ConfigError: with all problems at once, including a run that does not fit.
        """
        # Missing captions, which will be written, are no reason against a model.
        judged = replace(self, captions=not self.material.uncaptioned)
        with TemporaryDirectory() as name:
            judged.write(Path(name))
            files: list[tuple[str, object]] = [(key, f"{name}/{file}") for key, file in FILES.items()]
            return ready_plan(Arguments(files, base=configured(judged.config()), device=self.device))

    def verdict(self) -> tuple[bool, str]:
        """Whether the run suits this machine, and how long it takes, in a few words."""
        if self.is_demo:
            return True, "tiny: minutes on a CPU, no download; it draws simple shapes, to try everything with"
        try:
            budget = self.ready()
        except ConfigError as error:
            is_large = any(problem.where == "memory" for problem in error.problems)
            return False, "does not fit this machine" if is_large else "cannot be planned"
        time = duration(budget.step_seconds * budget.plan.length.total_steps)
        if not budget.device.is_gpu:
            return not needs_consent(budget), f"no GPU here: about {time} on the CPU, without previews"
        return True, f"fits, about {time} without previews"


def preview_interval(steps: int, saving: int, rounds: float) -> int:
    """Steps between previews: those of one or more checkpoints, with the last interval at the end of the run.

    Args:
        saving: steps between checkpoints.
        rounds: the most rounds of previews, the first of which is that of the untrained model.
    """
    count = -(-steps // saving)
    for skipped in range(1, count):
        if count % skipped == 0 and 1 + count / skipped <= rounds:
            return skipped * saving
    return steps


def checkpoint_interval(steps: int) -> int:
    """Steps between checkpoints, so that the last interval ends with the run, if its length can be divided so."""
    for count in range(CHECKPOINTS, FEWEST_CHECKPOINTS - 1, -1):
        if steps % count == 0:
            return steps // count
    # Rounded up, so that none is saved just before the last one.
    return -(-steps // CHECKPOINTS)


def writes_captions(example: str) -> bool:
    """Whether the model of an example can write captions; tiny ones cannot."""
    return example not in DEMOS.values() and bool(FAMILIES[read_example(example)["model_family"]].words.captioner)


def run_name(folder: Path) -> str:
    """The name of a run, from the name of its folder."""
    # Letters, digits, and vowel signs of scripts such as Devanagari, which \w does not match.
    kept = (char if char in "_.-" or category(char)[0] in "LMN" else " " for char in folder.resolve().name)
    return "-".join("".join(kept).split()).strip("-.") or "my-lora"


def read_example(name: str, file: str = "config.json") -> Any:
    """The content of a file of a packaged example."""
    return json.loads((EXAMPLES / name / file).read_text(encoding="utf-8"))
