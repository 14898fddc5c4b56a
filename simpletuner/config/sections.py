"""The place of every option on the web page and in the wizard, in the order in which users meet them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from simpletuner.config.schema import sections


@dataclass(frozen=True)
class Section:
    """A part of a tab on the page, and a step of the wizard.

    Attributes:
        id: `tab/section`, also the anchor on the page.
        groups: sections of the reference page whose options are shown, in this order.
        keys: options shown first, instead of with their group.
    """

    id: str
    label: str
    groups: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def tab(self) -> str:
        return self.id.partition("/")[0]


DATASETS = "dataset/training_data"  # the section of the dataset file and its cards
LOSSES = ("Loss", "CREPA", "Scheduled sampling", "LayerSync", "Masked loss", "Preservation")
FOLDERS = ("logging_dir", "cache_dir", "cache_dir_text", "cache_dir_vae", "i_know_what_i_am_doing")
SECTIONS = (
    Section("basic/model", "Model", keys=("model_family", "model_flavour", "model_type")),
    Section("basic/run", "Run", ("Run and paths",)),
    Section("basic/schedule", "Schedule", ("Schedule",)),
    Section("hardware/memory", "Offload", ("Offload",)),
    Section("hardware/precision", "Precision and compute", ("Precision and compute", "Speed")),
    Section("hardware/accelerate", "Launch and compile", ("Launch and compile",)),
    Section("model/lora_config", "LoRA", ("LoRA",)),
    Section("model/checkpoint", "Checkpoint", ("Model",)),
    Section("model/text", "Text", ("Text", "Kandinsky 5", "Sana Video")),
    Section("training/optimizer", "Optimizer", ("Optimizer",)),
    Section("training/loss_functions", "Loss functions", LOSSES),
    Section("training/flow_matching", "Flow matching", ("Flow matching",)),
    Section("training/regularisation", "EMA and TREAD", ("EMA", "TREAD")),
    Section(DATASETS, "Datasets", keys=("data_backend_config",)),
    Section("dataset/defaults", "Defaults of all datasets", ("Dataset defaults",)),
    Section("dataset/caching", "Caching", ("Caching",)),
    Section("validation/validation", "Previews", ("Validation",)),
    Section("validation/validation_adapters", "Other LoRAs in previews", ("Validation adapters",)),
    Section("validation/evaluation", "Evaluation", ("Evaluation",)),
    Section("publishing/publishing_controls", "Publishing", ("Publishing",)),
    Section("publishing/tracking", "Tracking", ("Tracking",)),
    Section("publishing/webhooks", "Webhooks", ("Webhooks",)),
    Section("checkpoints/saving", "Saving", ("Checkpoints",)),
    Section("environment/paths", "Folders and safety", keys=FOLDERS),
    Section("environment/accepted", "Accepted without effect", ("Accepted without effect",)),
)
# Search terms and the keys they lead to, in `simpletuner help` and in the page's search.
EVERYDAY_WORDS = {
    words: keys.split()
    for words, keys in {
        "vram oom out of memory": "offload base_model_precision gradient_checkpointing train_batch_size resolution "
        "video.num_frames",
        "slow faster": "speed tread_config gradient_checkpointing_kept_blocks validation_step_interval",
        "too strong overfit overfitting burnt": "max_train_steps learning_rate lora_rank checkpoint_step_interval "
        "caption_dropout_probability",
        "too weak underfit": "max_train_steps learning_rate lora_rank validation_guidance",
        "forgets forgetting": "preservation_weight is_regularisation_data learning_rate max_train_steps",
        "blurry blur": "resolution max_upscale_threshold validation_num_inference_steps validation_guidance",
        "flicker flickering": "crepa_enabled video.num_frames video.frame_rate validation_num_inference_steps",
        "trigger word": "instance_prompt prepend_instance_prompt validation_prompt model_card_trigger",
        "lr": "learning_rate",
        "disk space": "checkpoints_total_limit compress_disk_cache disk_low_threshold vae_cache_disable",
    }.items()
}
# Explanations of choices, on the page and in the wizard.
CHOICES = {
    "model_type": {"lora": "a small file on top of the model", "full": "the whole model; needs far more memory"},
    "offload": {"manual": "you, with the options below", "auto": "the plan: the fastest settings that fit the card"},
    "tread_config": {
        "none": "every block sees every token",
        "quarter": "a quarter of the tokens skip it",
        "half": "half of them, the usual choice; routes of your own: JSON, see docs/TREAD.md",
    },
}
TABS = tuple(dict.fromkeys(section.tab for section in SECTIONS))


@functools.cache
def section_of() -> dict[str, Section]:
    """The section of every option, by key and in the order of the page."""
    grouped = sections()
    placed = {key: section for section in SECTIONS for key in section.keys}
    for section in SECTIONS:
        # A key that a section claims is not repeated with its group.
        names = (option.name for group in section.groups for option in grouped[group])
        placed |= {name: section for name in names if name not in placed}
    return {key: placed[key] for section in SECTIONS for key in placed if placed[key] is section}
