"""The questions about settings, in order; defaults and choices may depend on other answers.

Help, choices, defaults, limits and rules of a setting come from the option schema and the family.
The steps are the sections of the web page (`config/sections.toml`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import get_token

from simpletuner.annexes.configure.answers import ConfigAnswers, usual_example
from simpletuner.annexes.draft import Draft, key_of
from simpletuner.annexes.guide import about_flavour
from simpletuner.annexes.questions.question import Question
from simpletuner.annexes.start.recipe import read_example
from simpletuner.config.optimizers import optimizer_name
from simpletuner.config.option import Option
from simpletuner.config.schema import LEARNING_RATES, all_options
from simpletuner.config.sections import CHOICES, Section, section_of
from simpletuner.config.techniques.tread import ROUTES
from simpletuner.config.trackers import PACKAGES, why_missing
from simpletuner.errors import Problem
from simpletuner.models.registry import FAMILIES

# The schema's default, one epoch, is too short for most datasets.
STEPS = 1000
# As in the guides; of a short run, a tenth.
WARMUP_STEPS = 50


@dataclass(frozen=True)
class Setting(Question[ConfigAnswers]):
    """A question about one setting.

    Attributes:
        key: the setting.
        text: the question in a few words.
        when: a condition on the settings so far, in addition to the rules of the schema.
        propose: returns the default if the file lacks the key; otherwise the value that training
            would use.
        names: returns choices with remarks; by default the page's choices, or else the schema's.
        implied: returns further settings that an answer determines; None removes a setting.
        follows: the default depends on another setting, so the key is written only if it differs.
    """

    key: str
    text: str
    when: Callable[[Draft], bool] = lambda draft: True
    propose: Callable[[Draft], Any] | None = None
    names: Callable[[Draft], Mapping[str, str]] | None = None
    implied: Callable[[Any], dict[str, Any]] = lambda value: {}
    follows: bool = False

    @property
    def option(self) -> Option:
        return all_options()[self.key]

    @property
    def section(self) -> Section:
        """The section of the page that contains the setting; a step of the questions."""
        return section_of()[self.key]

    @property
    def title(self) -> str:
        return self.section.label

    @property
    def is_flag(self) -> bool:
        return self.option.is_flag

    @property
    def is_optional(self) -> bool:
        return not self.option.required

    @property
    def later(self) -> str:
        return f"; name {self.key} at the end to change it"

    def applies(self, answers: ConfigAnswers) -> bool:
        if self.key == "model_family" and answers.chooses_model:
            return False  # chosen with the question for a model
        return self.fits(answers.draft)

    def fits(self, draft: Draft) -> bool:
        """Whether the setting has an effect and is not excluded, with the settings so far."""
        if self.key in draft.judgement.without_effect:
            return False
        if any(rule.holds(draft.config.flat) for rule in self.option.excludes):
            return False
        return self.when(draft)

    def default(self, answers: ConfigAnswers) -> Any:
        return self.proposed(answers.draft)

    def proposed(self, draft: Draft) -> Any:
        """The value for an empty answer."""
        if self.key not in draft.values and self.propose is not None:
            return self.propose(draft)
        return draft.effective(self.key)

    def choices(self, answers: ConfigAnswers) -> Mapping[str, str]:
        if self.names is not None:
            return self.names(answers.draft)
        return CHOICES.get(self.key) or dict.fromkeys(self.option.choices, "")

    def help(self, choices: Mapping[str, str]) -> list[str]:
        allowed = ", ".join(choices)
        if not choices:
            allowed = " ".join(filter(None, (self.option.type_name, self.option.limit_text)))
        lines = [self.option.help, f"Allowed: {allowed}. Setting: {self.key}."]
        if self.option.default_note:
            lines.append(f"Default: {self.option.default_note.replace('`', '')}.")
        return lines

    def read(self, answer: str, choices: Mapping[str, str]) -> Any:
        value = super().read(answer, choices)
        if self.key == "tread_config" and value in ROUTES:
            return ROUTES[value]
        return value

    def word(self, value: Any) -> str:
        if value is None:
            # `?` shows the rest: a long line cannot be edited in some terminals.
            note = re.split("[;,]", self.option.default_note)[0].replace("`", "")
            return note or "none"
        for word, route in ROUTES.items():
            if route == value:
                return word
        return f"{value:g}" if isinstance(value, float) else str(value)

    def problems(self, value: Any, answers: ConfigAnswers) -> list[Problem]:
        """The problems of an answer; none for an unchanged value of the file.

        Problems of the file were shown when it was loaded.
        """
        draft = answers.draft
        if self.key in draft.loaded and value == draft.values.get(self.key):
            return []
        changes = self.changes(value, draft)
        removed = dict.fromkeys(stale_keys(draft, changes))
        return draft.weigh(self.key, {**removed, **changes})

    def conflicts(self, problems: Sequence[Problem], answers: ConfigAnswers) -> list[str]:
        keys = sorted({key_of(problem) for problem in problems if problem.fatal})
        for key in keys:
            if key == self.key or key not in answers.draft.values or all_options()[key].required:
                return []
        return keys

    def store(self, value: Any, answers: ConfigAnswers, without: Sequence[str] = ()) -> None:
        answers.draft.change({**self.changes(value, answers.draft), **dict.fromkeys(without)})

    def changes(self, value: Any, draft: Draft) -> dict[str, Any]:
        """The settings that an answer determines."""
        if self.follows and self.key not in draft.values and value == self.proposed(draft):
            return {}
        return {self.key: value, **self.implied(value)}


def usable_trackers(draft: Draft) -> Mapping[str, str]:
    """Trackers that are installed and logged in; wandb is always listed."""
    trackers = {"none": "nowhere; the HTML report is always written", "wandb": "wandb.ai"}
    if why_missing("wandb") is not None:
        trackers["wandb"] += "; log in first: wandb login"
    for name in PACKAGES:
        if name != "wandb" and why_missing(name) is None:
            trackers[name] = ""
    return trackers


def _saves_memory_by_hand(draft: Draft) -> bool:
    """Whether the user chooses the settings that save memory."""
    return draft.config.offload.offload == "manual"


def _offload(draft: Draft) -> str:
    """`auto`, as `simpletuner start` writes it; a file without the key keeps its value."""
    if draft.loaded:
        return str(draft.effective("offload"))
    return "auto"


def _warmup_steps(draft: Draft) -> int:
    """A warm-up as in the guides; a file without the key keeps its value."""
    if draft.loaded:
        return int(draft.effective("lr_warmup_steps") or 0)
    steps = draft.config.schedule.max_train_steps
    return min(WARMUP_STEPS, steps // 10) if steps else WARMUP_STEPS


def _preview_prompt(draft: Draft) -> str | None:
    """The prompt of the family's example; a file without one keeps none."""
    if draft.loaded:
        return None
    return str(read_example(usual_example(draft))["validation_prompt"])


def _is_tracked(draft: Draft) -> bool:
    """Whether curves are sent to a tracker."""
    return draft.config.tracking.report_to not in ("none", "simpletuner")


def _optimizer(draft: Draft) -> str:
    """The optimizer that training would choose for the precision."""
    return optimizer_name(draft.config.optimizer, draft.config.precision.mixed_precision)


def _prompt_library(draft: Draft) -> str | None:
    """The prompt library next to the config, if it exists."""
    path = draft.file.parent / "user_prompt_library.json"
    return path.as_posix() if path.is_file() else None


def _other_length(steps: Any) -> dict[str, Any]:
    """The epochs that a number of steps implies: 0, since they exclude each other.

    Without steps, this 0 is removed.
    """
    has_steps = str(steps or 0) != "0"  # the answer may still be a text
    return {"num_train_epochs": 0 if has_steps else None}


def _names_of_flavours(draft: Draft) -> dict[str, str]:
    """The flavours of the chosen family with remarks."""
    return {flavour.name: about_flavour(flavour) for flavour in draft.spec.flavours}


def _titles_of_families(draft: Draft) -> dict[str, str]:
    """The model families with their titles."""
    return {name: spec.title for name, spec in FAMILIES.items()}


# In the order of the page's sections.
SETTINGS: Sequence[Setting] = (
    Setting("model_family", "Model", names=_titles_of_families),
    Setting(
        "model_flavour",
        "Version of the model",
        propose=lambda draft: draft.spec.flavours[0].name,
        names=_names_of_flavours,
    ),
    Setting(
        "model_type",
        "What to train",
        implied=lambda value: {"lora_rank": None} if value == "full" else {},
    ),
    Setting("output_dir", "Output folder"),
    Setting("seed", "Seed of the run (the same seed repeats it)", propose=lambda draft: 42),
    Setting(
        "max_train_steps",
        "Training steps (0: count epochs instead)",
        # A file with epochs keeps them.
        propose=lambda draft: 0 if draft.values.get("num_train_epochs") else STEPS,
        implied=_other_length,
    ),
    Setting(
        "num_train_epochs",
        "Epochs (passes over the dataset)",
        when=lambda draft: not draft.config.schedule.max_train_steps,
        propose=lambda draft: 1,
    ),
    Setting("train_batch_size", "Batch size"),
    Setting("gradient_accumulation_steps", "Gradient accumulation steps"),
    Setting("offload", "Who chooses the settings that save memory", propose=_offload),
    Setting(
        "enable_group_offload",
        "Keep the model in host memory and stream it to the GPU block by block (group offload)?",
        when=_saves_memory_by_hand,
        implied=lambda value: {"group_offload_use_stream": True if value else None},
    ),
    Setting(
        "base_model_precision",
        "Precision of the model",
        when=lambda draft: draft.config.model.model_type == "lora",
    ),
    Setting("text_encoder_1_precision", "Precision of the text encoder"),
    Setting(
        "gradient_checkpointing",
        "Save memory by recomputing activations (gradient checkpointing, slower)?",
        when=_saves_memory_by_hand,
    ),
    Setting("lora_rank", "LoRA rank (higher learns more and takes more memory)"),
    Setting(
        "lora_alpha",
        "LoRA alpha (strength of the LoRA)",
        propose=lambda draft: float(draft.config.lora.lora_rank),
        follows=True,
    ),
    Setting("optimizer", "Optimizer", propose=_optimizer),
    Setting(
        "learning_rate",
        "Learning rate",
        propose=lambda draft: LEARNING_RATES[draft.config.model.model_type],
    ),
    Setting("lr_scheduler", "Schedule of the learning rate"),
    Setting("lr_warmup_steps", "Warm-up steps", propose=_warmup_steps),
    Setting(
        "crepa_enabled", "CREPA (steadier video)?", when=lambda draft: draft.spec.media == "video"
    ),
    Setting(
        "flow_schedule_shift",
        "Flow shift (above 1 favours composition, below 1 detail)",
        when=lambda draft: "flow_schedule_shift" in draft.spec.defaults,
        follows=True,
    ),
    Setting(
        "tread_config",
        "Tokens that skip the middle of the model (TREAD: faster steps, previews as always)",
        when=lambda draft: draft.spec.token_blocks is not None,
    ),
    Setting("use_ema", "Keep a running average of the weights (EMA)?"),
    Setting("ema_validation", "Previews with EMA"),
    Setting("data_backend_config", "Dataset file", propose=lambda draft: draft.dataset_file),
    Setting(
        "validation_prompt",
        "Prompt for previews (-: only the empty prompt is rendered)",
        propose=_preview_prompt,
    ),
    Setting("user_prompt_library", "File with more prompts", propose=_prompt_library),
    Setting("validation_resolution", "Preview size, width x height"),
    Setting("validation_num_video_frames", "Preview length in frames"),
    Setting("framerate", "Frames per second"),
    Setting("validation_guidance", "Guidance scale (how closely previews follow the prompt)"),
    Setting("validation_num_inference_steps", "Sampling steps"),
    Setting("validation_step_interval", "Render previews every N training steps; N"),
    Setting("validation_seed", "Preview seed"),
    Setting(
        "push_to_hub",
        "Upload the result to the Hugging Face hub?",
        when=lambda draft: get_token() is not None,
    ),
    Setting("hub_model_id", "Name on the hub"),
    Setting("model_card_private", "Private?"),
    Setting("report_to", "Send curves to", names=usable_trackers),
    Setting("tracker_project_name", "Project name there", when=_is_tracked),
    Setting("tracker_run_name", "Run name there", when=_is_tracked),
    Setting("checkpoint_step_interval", "Save a checkpoint every N steps; N"),
    Setting("checkpoints_total_limit", "Checkpoints to keep (0: all)"),
)


def stale_keys(draft: Draft, changes: Mapping[str, Any]) -> list[str]:
    """Keys whose questions no longer apply after these changes, and the keys that they implied.

    The review drops them. Keys of the loaded file are not stale, nor are epochs of 0, which
    training steps imply.
    """
    after = draft.after(changes)
    stale = []
    for question in SETTINGS:
        if question.key not in draft.values or question.key in draft.loaded or question.fits(after):
            continue
        value = draft.values[question.key]
        if value == 0 and value is not False:  # False equals 0 in Python
            continue
        stale.append(question.key)
        if value is True:
            stale += question.implied(True)
    return stale
