"""The wizard's questions in order, with defaults and choices that depend on other answers or on this machine.

Help, choices, defaults, limits and rules of a setting come from the option schema and the family. The steps are the
sections of the web page (`config/sections.toml`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub import get_token

from simpletuner.annexes.draft import Draft
from simpletuner.annexes.guide import about_flavour
from simpletuner.config.optimizers import optimizer_name
from simpletuner.config.option import Option
from simpletuner.config.schema import LEARNING_RATES, all_options
from simpletuner.config.sections import CHOICES, Section, section_of
from simpletuner.config.trackers import PACKAGES, why_missing
from simpletuner.models.registry import FAMILIES

# The schema's default, one epoch, is too short for most datasets.
STEPS = 1000


@dataclass(frozen=True)
class Question:
    """A question about one setting.

    Attributes:
        key: the setting.
        text: the question in a few words.
        when: a condition on the answers so far, in addition to the rules of the schema.
        propose: returns the default if the file lacks the key; otherwise the value that training would use.
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
        """The section of the page that contains the setting; a step of the wizard."""
        return section_of()[self.key]

    def applies(self, draft: Draft) -> bool:
        """Whether to ask the question: with the answers so far, the setting has an effect and is not excluded."""
        excluded = any(rule.holds(draft.config.flat) for rule in self.option.excludes)
        return self.key not in draft.judgement.without_effect and not excluded and self.when(draft)

    def default(self, draft: Draft) -> Any:
        """The value for an empty answer."""
        if self.key not in draft.values and self.propose is not None:
            return self.propose(draft)
        return draft.effective(self.key)

    def choices(self, draft: Draft) -> Mapping[str, str]:
        """Allowed words with remarks; empty if any answer is allowed."""
        return self.names(draft) if self.names else CHOICES.get(self.key) or dict.fromkeys(self.option.choices, "")

    def changes(self, value: Any, draft: Draft) -> dict[str, Any]:
        """The settings that an answer determines."""
        if self.follows and self.key not in draft.values and value == self.default(draft):
            return {}
        return {self.key: value, **self.implied(value)}


def usable_trackers(draft: Draft) -> Mapping[str, str]:
    """Trackers that are installed and logged in; wandb is always listed."""
    ready = "" if why_missing("wandb") is None else "; log in first: wandb login"
    names = [name for name in PACKAGES if name != "wandb" and why_missing(name) is None]
    listed = {"none": "nowhere; the HTML report is always written", "wandb": f"wandb.ai{ready}"}
    return {**listed, **dict.fromkeys(names, "")}


def _by_hand(draft: Draft) -> bool:
    return draft.config.offload.offload == "manual"  # auto does not change keys that are set


def _is_tracked(draft: Draft) -> bool:
    return draft.config.tracking.report_to not in ("none", "simpletuner")


def _optimizer(draft: Draft) -> str:
    return optimizer_name(draft.config.optimizer, draft.config.precision.mixed_precision)


def _prompt_library(draft: Draft) -> str | None:
    """The prompt library next to the config, if it exists."""
    path = draft.file.parent / "user_prompt_library.json"
    return path.as_posix() if path.is_file() else None


def _other_length(steps: Any) -> dict[str, Any]:
    """Steps and epochs exclude each other: steps set the epochs to 0; without steps, this 0 is removed."""
    # The answer may not be converted to a number yet.
    return {"num_train_epochs": 0} if str(steps or 0) != "0" else {"num_train_epochs": None}


# In the order of the page's sections.
QUESTIONS = (
    Question("model_family", "Model", names=lambda draft: {n: spec.title for n, spec in FAMILIES.items()}),
    Question(
        "model_flavour",
        "Version of the model",
        propose=lambda draft: draft.spec.flavours[0].name,
        names=lambda draft: {flavour.name: about_flavour(flavour) for flavour in draft.spec.flavours},
    ),
    Question("model_type", "What to train", implied=lambda value: {"lora_rank": None} if value == "full" else {}),
    Question("output_dir", "Output folder"),
    Question("seed", "Seed of the run (the same seed repeats it)", propose=lambda draft: 42),
    Question(
        "max_train_steps",
        "Training steps (0: count epochs instead)",
        # A file with epochs keeps them.
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
    Question("offload", "Who chooses the settings that save memory"),
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
    Question("learning_rate", "Learning rate", propose=lambda draft: LEARNING_RATES[draft.config.model.model_type]),
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
    ),
    Question("use_ema", "Keep a running average of the weights (EMA)?"),
    Question("ema_validation", "Previews with EMA"),
    Question("data_backend_config", "Dataset file", propose=lambda draft: draft.dataset_file),
    Question("validation_prompt", "Prompt for previews (none: only the empty prompt is rendered)"),
    Question("user_prompt_library", "File with more prompts", propose=_prompt_library),
    Question("validation_resolution", "Preview size, width x height"),
    Question("validation_num_video_frames", "Preview length in frames"),
    Question("framerate", "Frames per second"),
    Question("validation_guidance", "Guidance scale (how closely previews follow the prompt)"),
    Question("validation_num_inference_steps", "Sampling steps"),
    Question("validation_step_interval", "Render previews every N training steps; N"),
    Question("validation_seed", "Preview seed"),
    Question("push_to_hub", "Upload the result to the Hugging Face hub?", when=lambda draft: get_token() is not None),
    Question("hub_model_id", "Name on the hub"),
    Question("model_card_private", "Private?"),
    Question("report_to", "Send curves to", names=usable_trackers),
    Question("tracker_project_name", "Project name there", when=_is_tracked),
    Question("tracker_run_name", "Run name there", when=_is_tracked),
    Question("checkpoint_step_interval", "Save a checkpoint every N steps; N"),
    Question("checkpoints_total_limit", "Checkpoints to keep (0: all)"),
)


def stale_keys(draft: Draft, changes: Mapping[str, Any]) -> list[str]:
    """Keys whose questions no longer apply after these changes, with the keys that they implied; the review drops them.

    Keys of the loaded file are not stale, nor are epochs of 0, which training steps imply.
    """
    after, stale = draft.after(changes), []
    for question in QUESTIONS:
        value = draft.values.get(question.key)
        # False equals 0 in Python.
        is_kept = question.key in draft.loaded or (value == 0 and value is not False)
        if question.key in draft.values and not is_kept and not question.applies(after):
            stale += [question.key, *(question.implied(True) if value is True else ())]
    return stale
