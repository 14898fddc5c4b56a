"""What an adapter is: its kind, its size, and the LoRA that it is published as. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from simpletuner.config.option import Flag, Group, Integer, Json, Number, PathText, option
from simpletuner.errors import Problem

# Keys that some kinds do not have, with the kinds that do.
KEYS_OF_KINDS = {
    **dict.fromkeys(("lora_dropout", "lora_init_type", "use_dora", "lora_plus_ratio", "init_lora"), ("standard",)),
    **dict.fromkeys(
        ("lora_rank", "lora_alpha", "peft_lora_target_modules", "slider_lora_target"), ("standard", "lokr", "loha")
    ),
    **dict.fromkeys(("export_energy", "export_rank"), ("lokr", "loha", "lycoris")),
    "lokr_factor": ("lokr",),
    "lycoris_config": ("lycoris",),
}
# What to do instead, for those that are refused because the result would be another one.
INSTEAD = {
    "use_dora": "LyCORIS has dora_wd",
    "lora_dropout": "the LyCORIS file has dropout",
    "init_lora": "weights of another kind start as another model; resume from a checkpoint instead",
}
# These optimizers do not take another rate for some of the matrices.
ONE_RATE = {"muon": "its second group is AdamW's", "prodigy": "it finds one rate for all groups"}


class LoraConfig(Group):
    """LoRA"""

    lora_rank: Integer = option(
        16, "Rank of the update matrices. For lokr, a rank of half the larger factor or more trains it in full.", ge=1
    )
    lora_alpha: Number | None = option(None, "Scale is alpha / rank.", gt=0, default_note="the rank")
    lora_dropout: Number = option(0.0, "Dropout before the update.", ge=0, lt=1)
    lora_init_type: Literal["default", "gaussian", "loftq", "olora", "pissa"] = option(
        "default",
        "default and gaussian leave the model unchanged at step 0; the others change the base, which must be fp32.",
        aliases=("lora_initialisation_style",),
    )
    lora_type: Literal["standard", "lokr", "loha", "lycoris"] = option(
        "standard",
        "Kind of adapter: a LoRA, a Kronecker (lokr) or Hadamard product (loha), or what lycoris_config says. Each "
        "is also published as a LoRA, see docs/ADAPTERS.md.",
    )
    lokr_factor: Integer = option(
        -1, "lokr: size of the smaller factor, a divisor of the layers' widths; -1: near their square root.", ge=-1
    )
    lycoris_config: PathText | None = option(
        None, "Settings file of LyCORIS, JSON with algo, multiplier, and linear_dim or full_matrix."
    )
    export_energy: Number = option(
        0.99,
        "Energy kept when another adapter is converted to a LoRA (limited by export_rank).",
        gt=0,
        le=1,
    )
    export_rank: Integer = option(64, "Largest rank of that LoRA.", ge=1)
    lora_plus_ratio: Number | None = option(
        None, "LoRA+: learning rate of the B matrices as a multiple of that of the A matrices; 16 is typical.", ge=1
    )
    peft_lora_target_modules: Json | None = option(
        None,
        "Which layers get a LoRA: a JSON list of names, a file with one, or `all-linear`.",
        default_note="the family's attention projections",
    )
    slider_lora_target: Flag = option(
        False, "For sliders: self-attention of the visual blocks gets the LoRA, which leaves the text paths alone."
    )
    use_dora: Flag = option(False, "Decompose weights into magnitude and direction (DoRA).")
    lora_format: Literal["diffusers", "comfyui"] = option(
        "diffusers",
        "Key names in saved files: diffusers' or ComfyUI's (Kandinsky 5 only). `init_lora` reads both.",
    )
    init_lora: PathText | None = option(None, "File or folder of a LoRA to start from, also one of Kandinsky's own.")
    init_lora_step: Integer = option(0, "The step that LoRA counts as.", ge=0)

    @property
    def starts_from_base(self) -> bool:
        """Whether the adapter before step 1 is computed from the base weights."""
        computed = self.use_dora or self.lora_init_type not in ("default", "gaussian")
        return computed or self.lora_type == "lycoris"  # whose file may say so

    @property
    def kind(self) -> str:
        """The name of the kind of adapter."""
        return {"standard": "LoRA", "lokr": "LoKr", "loha": "LoHa", "lycoris": "LyCORIS"}[self.lora_type]

    @property
    def alpha(self) -> float:
        """lora_alpha, or its default."""
        return self.lora_alpha or float(self.lora_rank)


def check_kind(lora: LoraConfig, optimizer: str, is_explicit: Callable[[str], bool]) -> Iterator[Problem]:
    """Keys that do not belong to the chosen kind of adapter, and LoRA+ with optimizers that it does not fit."""
    for key, kinds in KEYS_OF_KINDS.items():
        if lora.lora_type not in kinds and is_explicit(key):
            fatal = kinds == ("standard",) and getattr(lora, key) != type(lora).model_fields[key].default
            hint = f"; {INSTEAD[key]}" if fatal and key in INSTEAD else ""
            message = f"has no effect: it belongs to lora_type {' and '.join(kinds)}, not {lora.lora_type}{hint}."
            yield Problem(key, message, fatal=fatal)
    if lora.lora_type == "lokr" and lora.lokr_factor == 0:
        yield Problem("lokr_factor", "0 is no size of a matrix; it must be -1, or 1 and more.")
    if lora.lora_plus_ratio is not None and optimizer in ONE_RATE:
        yield Problem("lora_plus_ratio", f"does not work with optimizer {optimizer}: {ONE_RATE[optimizer]}.")
