"""The wizard's questions, in their order, with defaults and choices that depend on other answers or on this machine.

All else about a setting comes from the option schema and the family: help, choices, defaults, limits, what it requires.
The steps are the sections of the web page (`config/sections.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import get_token

from simpletuner.config.optimizers import optimizer_name
from simpletuner.config.option import Option
from simpletuner.config.publishing import PACKAGES, why_missing
from simpletuner.config.schema import DEFAULT_LEARNING_RATES, all_options
from simpletuner.config.sections import CHOICES, Section, section_of
from simpletuner.config.techniques import ROUTES
from simpletuner.errors import Problem, did_you_mean, nearest
from simpletuner.models.registry import FAMILIES
from simpletuner.plan.draft import Draft

# Similarity (difflib's ratio) from which an answer counts as a misspelled choice, which is then proposed.
MISSPELLED = 0.75
# The schema's default, one epoch, is too short for most datasets.
STEPS = 1000


@dataclass(frozen=True)
class Question:
    """One setting to ask for.

    Attributes:
        key: the setting.
        text: the question in a few words.
        when: whether it makes sense with the answers so far, if the setting has an effect with them.
        propose: a default if the file does not have the key; without it, the value that training would use.
        names: choices with a remark each; without it, those of the schema.
        is_open: answers other than `names` are allowed.
        implied: further settings that an answer decides; None removes one.
        follows: the default depends on another setting, so the key is written only if it differs.
        alternatives: (value, draft) -> better values for one that does not fit.
        meanings: values that words stand for.
    """

    key: str
    text: str
    when: Callable[[Draft], bool] = lambda draft: True
    propose: Callable[[Draft], Any] | None = None
    names: Callable[[Draft], Mapping[str, str]] | None = None
    is_open: bool = False
    implied: Callable[[Any], dict[str, Any]] = lambda value: {}
    follows: bool = False
    alternatives: Callable[[str, Draft], list[str]] = lambda value, draft: []
    meanings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def option(self) -> Option:
        return all_options()[self.key]

    @property
    def section(self) -> Section:
        """The step that asks it: where the page shows the setting."""
        return section_of()[self.key]

    def applies(self, draft: Draft) -> bool:
        """Whether to ask: the setting has an effect with the answers so far, and nothing excludes it."""
        settings = draft.config.flat
        excluded = any(rule.holds(settings) for rule in self.option.excludes)
        return self.key not in draft.judgement.without_effect and not excluded and self.when(draft)

    def default(self, draft: Draft) -> Any:
        """The value that Enter takes."""
        if self.key not in draft.values and self.propose is not None:
            return self.propose(draft)
        return draft.effective(self.key)

    def choices(self, draft: Draft) -> Mapping[str, str]:
        """Allowed words with a remark each; empty if any answer is allowed."""
        return self.names(draft) if self.names else dict.fromkeys(self.option.choices, "")

    def refusals(self, value: Any, draft: Draft) -> list[Problem]:
        """Why an answer cannot be used, apart from the checks of training."""
        choices = self.choices(draft)
        if choices and not self.is_open and value is not None and value not in choices:
            message = f"{value!r} is not one of: {', '.join(choices)}.{did_you_mean(str(value), choices)}"
            return [Problem(self.key, message)]
        if value is None and self.option.required:
            return [Problem(self.key, "is required.")]
        if better := self.alternatives(str(value), draft) if value is not None else []:
            are = "nearest are" if len(better) > 1 else "nearest is"
            return [Problem(self.key, f"{value} does not fit the model; the {are} {' and '.join(better)}.")]
        return []

    def suggestion(self, answer: str, draft: Draft) -> str | None:
        """What to propose after an invalid answer; None if it was spelled right and is wrong for another reason."""
        better, choices = self.alternatives(answer, draft), self.choices(draft)
        if better or answer in choices:
            return better[-1] if better else None
        return nearest(answer, choices, cutoff=MISSPELLED)

    def changes(self, value: Any, draft: Draft) -> dict[str, Any]:
        """The settings that an answer decides."""
        if self.follows and self.key not in draft.values and value == self.default(draft):
            return {}
        return {self.key: value, **self.implied(value)}


def usable_trackers(draft: Draft) -> Mapping[str, str]:
    """Trackers that are installed and logged in, and wandb in any case."""
    ready = "" if why_missing("wandb") is None else "; log in first: wandb login"
    names = [name for name in PACKAGES if name != "wandb" and why_missing(name) is None]
    listed = {"none": "nowhere; the HTML report is always written", "wandb": f"wandb.ai{ready}"}
    return {**listed, **dict.fromkeys(names, "")}


SIZES = re.compile(r"\d{1,6}(x\d{1,6})?(,\d{1,6}(x\d{1,6})?)*")


def nearest_sizes(value: str, draft: Draft) -> list[str]:
    """The next smaller and larger sizes that the model can render; empty if the value is fine or not a size."""
    multiple = draft.spec.size_multiple
    sizes = ",".join(part.strip().lower() for part in value.split(",") if part.strip())
    if not SIZES.fullmatch(sizes) or all(int(side) % multiple == 0 for side in re.findall(r"\d+", sizes)):
        return []

    def rounded(added: int) -> str:
        return re.sub(r"\d+", lambda side: str(max(multiple, (int(side[0]) + added) // multiple * multiple)), sizes)

    return [rounded(0), rounded(multiple - 1)]


LONGEST_CLIP = 10_000  # frames; more is certainly a typing error
SEARCHED = 6  # lengths that are tried in each direction


def nearest_lengths(value: str, draft: Draft) -> list[str]:
    """The next shorter and longer lengths that the flavour can render; empty if the value is fine or not a number.

    They fill whole latent frames and pass the flavour's own checks: an i2v flavour has a minimum length.
    """
    stride, key = draft.spec.frame_stride, "validation_num_video_frames"

    def suits(length: int) -> bool:
        return length > 0 and not any(problem.fatal for problem in draft.weigh(key, {key: length}))

    frames = int(value) if re.fullmatch(r"\d{1,6}", value.strip()) else 0
    if not 1 <= frames <= LONGEST_CLIP or ((frames - 1) % stride == 0 and suits(frames)):
        return []
    below = (frames - 1) // stride * stride + 1
    shorter = filter(suits, (below - stride * step for step in range(SEARCHED)))
    longer = filter(suits, (below + stride * step for step in range(1, SEARCHED)))
    return [str(length) for length in (next(shorter, None), next(longer, None)) if length is not None]


def _by_hand(draft: Draft) -> bool:
    return draft.config.offload.offload == "manual"  # a key that is set is one that auto leaves alone


def _is_tracked(draft: Draft) -> bool:
    return draft.config.tracking.report_to not in ("none", "simpletuner")


def _optimizer(draft: Draft) -> str:
    return optimizer_name(draft.config.optimizer, draft.config.precision.mixed_precision)


def _prompt_library(draft: Draft) -> str | None:
    """The file of the usual name next to the config, if it exists."""
    path = draft.file.parent / "user_prompt_library.json"
    return path.as_posix() if path.is_file() else None


def _other_length(steps: Any) -> dict[str, Any]:
    """Steps and epochs exclude each other: with steps the epochs become 0, without steps such a 0 is removed."""
    # An answer may still be text.
    return {"num_train_epochs": 0} if str(steps or 0) != "0" else {"num_train_epochs": None}


# In the order of the page's sections.
QUESTIONS = (
    Question("model_family", "Model", names=lambda draft: {n: spec.title for n, spec in FAMILIES.items()}),
    Question(
        "model_flavour",
        "Version of the model",
        propose=lambda draft: draft.spec.flavours[0].name,
        names=lambda draft: {flavour.name: flavour.about for flavour in draft.spec.flavours},
    ),
    Question(
        "model_type",
        "What to train",
        names=lambda draft: CHOICES["model_type"],
        implied=lambda value: {"lora_rank": None} if value == "full" else {},
    ),
    Question("output_dir", "Output folder"),
    Question("seed", "Seed of the run (the same seed repeats it)", propose=lambda draft: 42),
    Question(
        "max_train_steps",
        "Training steps (0: count epochs instead)",
        # A file that counts epochs goes on counting them.
        propose=lambda draft: 0 if draft.values.get("num_train_epochs") else STEPS,
        implied=_other_length,
    ),
    Question(
        "num_train_epochs",
        "Epochs (passes over the dataset)",
        when=lambda draft: not draft.config.schedule.max_train_steps,
        propose=lambda draft: 1,
    ),
    Question("train_batch_size", "Batch size"),
    Question("gradient_accumulation_steps", "Gradient accumulation steps"),
    Question("plan_device_memory_gb", "GPU memory in GB, for the estimate at the end"),
    Question("offload", "Settings that save memory: who chooses them", names=lambda draft: CHOICES["offload"]),
    Question(
        "enable_group_offload",
        "Keep the model in host memory and stream it to the GPU block by block (group offload)?",
        when=_by_hand,
        implied=lambda value: {"group_offload_use_stream": True if value else None},
    ),
    Question(
        "base_model_precision", "Precision of the model", when=lambda draft: draft.config.model.model_type == "lora"
    ),
    Question("text_encoder_1_precision", "Precision of the text encoder"),
    Question(
        "gradient_checkpointing",
        "Save memory by recomputing activations (gradient checkpointing, slower)?",
        when=_by_hand,
    ),
    Question("lora_rank", "LoRA rank (higher learns more and takes more memory)"),
    Question(
        "lora_alpha",
        "LoRA alpha (strength of the LoRA)",
        propose=lambda draft: float(draft.config.lora.lora_rank),
        follows=True,
    ),
    Question("optimizer", "Optimizer", propose=_optimizer),
    Question(
        "learning_rate", "Learning rate", propose=lambda draft: DEFAULT_LEARNING_RATES[draft.config.model.model_type]
    ),
    Question("lr_scheduler", "Schedule of the learning rate"),
    Question("lr_warmup_steps", "Warm-up steps"),
    Question("crepa_enabled", "CREPA (steadier video)?", when=lambda draft: draft.spec.media == "video"),
    Question(
        "flow_schedule_shift",
        "Flow shift (above 1 favours composition, below 1 detail)",
        when=lambda draft: "flow_schedule_shift" in draft.spec.defaults,
        follows=True,
    ),
    Question(
        "tread_config",
        "Tokens that skip the middle of the model (TREAD: faster steps, previews as always)",
        when=lambda draft: draft.spec.token_blocks is not None,
        names=lambda draft: CHOICES["tread_config"],
        is_open=True,
        meanings=ROUTES,
    ),
    Question("use_ema", "Keep a running average of the weights (EMA)?"),
    Question("ema_validation", "Previews with EMA"),
    Question("data_backend_config", "Dataset file", propose=lambda draft: draft.dataset_file),
    Question("validation_prompt", "Prompt for previews (none: only the empty prompt is rendered)"),
    Question("user_prompt_library", "File with more prompts", propose=_prompt_library),
    Question("validation_resolution", "Preview size, width x height", alternatives=nearest_sizes),
    Question("validation_num_video_frames", "Preview length in frames", alternatives=nearest_lengths),
    Question("framerate", "Frames per second"),
    Question("validation_guidance", "Guidance scale (how closely previews follow the prompt)"),
    Question("validation_num_inference_steps", "Sampling steps"),
    Question("validation_step_interval", "Render previews every N training steps; N"),
    Question("validation_seed", "Preview seed"),
    Question("push_to_hub", "Upload the result to the Hugging Face hub?", when=lambda draft: get_token() is not None),
    Question("hub_model_id", "Name on the hub"),
    Question("model_card_private", "Private?"),
    Question("report_to", "Send curves to", names=usable_trackers, is_open=True),
    Question("tracker_project_name", "Project name there", when=_is_tracked),
    Question("tracker_run_name", "Run name there", when=_is_tracked),
    Question("checkpoint_step_interval", "Save a checkpoint every N steps; N"),
    Question("checkpoints_total_limit", "Checkpoints to keep (0: all)"),
)


def stale_keys(draft: Draft, changes: Mapping[str, Any]) -> list[str]:
    """Keys whose questions no longer apply with these changes, and what a yes to them implied. The review drops them.

    Keys of the loaded file are kept, and epochs of 0, which a number of steps implies.
    """
    after, stale = draft.after(changes), []
    for question in QUESTIONS:
        value = draft.values.get(question.key)
        # False equals 0 in Python.
        is_kept = question.key in draft.loaded or (value == 0 and value is not False)
        if question.key in draft.values and not is_kept and not question.applies(after):
            stale += [question.key, *(question.implied(True) if value is True else ())]
    return stale
