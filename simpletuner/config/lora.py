"""The adapter: its kind, its size, and its published LoRA. Free of torch."""

from __future__ import annotations

from functools import partial
from typing import Literal

from simpletuner.config.option import Group, common, option, when
from simpletuner.config.values import Flag, Integer, Json, Number, PathText

# The kinds of adapter with a rank, and the kinds that must be converted to a published LoRA.
ranked = partial(option, requires=when(lora_type=("standard", "lokr", "loha")))
converted = partial(option, requires=when(lora_type=("lokr", "loha", "lycoris")))
standard = partial(option, requires=when(lora_type="standard", fatal=True))


class LoraConfig(Group):
    """LoRA"""

    requires = when(model_type="lora", because="model_type full trains every weight and no LoRA")

    lora_rank: Integer = ranked(
        16,
        "Rank of the update matrices. For lokr, a rank of half the larger factor or more trains it in full.",
        ge=1,
        common=True,
    )
    lora_alpha: Number | None = ranked(None, "Scale is alpha / rank.", gt=0, default_note="the rank", common=True)
    lora_dropout: Number = common(
        0.0,
        "Dropout before the update.",
        ge=0,
        lt=1,
        requires=when(lora_type="standard", because="the LyCORIS file has dropout", fatal=True),
    )
    lora_init_type: Literal["default", "gaussian", "loftq", "olora", "pissa"] = standard(
        "default",
        "default and gaussian leave the model unchanged at step 0; the others change the base, which must be fp32.",
        aliases=("lora_initialisation_style",),
        refused={"loftq": "is not supported: it replaces the base with a quantised one; use default"},
    )
    lora_type: Literal["standard", "lokr", "loha", "lycoris"] = common(
        "standard",
        "Kind of adapter: a LoRA, a Kronecker (lokr) or Hadamard product (loha), or what lycoris_config says. Each "
        "is also published as a LoRA, see docs/ADAPTERS.md.",
    )
    lokr_factor: Integer = option(
        -1,
        "lokr: size of the smaller factor, a divisor of the layers' widths; -1: near their square root.",
        ge=-1,
        requires=when(lora_type="lokr"),
        refused={0: "is no size of a matrix; it must be -1, or 1 and more"},
    )
    lycoris_config: PathText | None = option(
        None,
        "Settings file of LyCORIS, JSON with algo, multiplier, and linear_dim or full_matrix.",
        requires=when(lora_type="lycoris"),
    )
    # Energy: the sum of the squared singular values of a layer's update.
    export_energy: Number = converted(
        0.99, "Energy kept when another adapter is converted to a LoRA (limited by export_rank).", gt=0, le=1
    )
    export_rank: Integer = converted(64, "Largest rank of that LoRA.", ge=1)
    lora_plus_ratio: Number | None = standard(
        None,
        "LoRA+: learning rate of the B matrices as a multiple of that of the A matrices; 16 is typical.",
        ge=1,
        label="LoRA+ Ratio",
        excludes=(
            when(optimizer="muon", because="its second group is AdamW's"),
            when(optimizer="prodigy", because="it finds one rate for all groups"),
        ),
    )
    peft_lora_target_modules: Json | None = ranked(
        None,
        "Layers that get a LoRA: a JSON list of names, a file with one, or `all-linear`.",
        default_note="the family's attention projections",
    )
    slider_lora_target: Flag = ranked(
        False,
        "For sliders: a LoRA on the self-attention of the visual blocks only, not on text paths.",
        excludes=when("peft_lora_target_modules", because="both choose layers"),
    )
    use_dora: Flag = option(
        False,
        "Decompose weights into magnitude and direction (DoRA).",
        requires=when(lora_type="standard", because="LyCORIS has dora_wd", fatal=True),
        excludes=when(lora_init_type=("olora", "pissa"), because="the saved difference has no DoRA form"),
    )
    lora_format: Literal["diffusers", "comfyui"] = option(
        "diffusers",
        "Key names in saved files: diffusers' or ComfyUI's (Kandinsky 5 only). `init_lora` reads both.",
    )
    init_lora: PathText | None = common(
        None,
        "File or folder of a LoRA to start from, also one of Kandinsky's own.",
        requires=(
            when(model_type="lora", because="model_type full trains every weight and no LoRA", fatal=True),
            when(
                lora_type="standard",
                because="weights of another kind start as another model; resume from a checkpoint instead",
                fatal=True,
            ),
        ),
    )
    init_lora_step: Integer = option(0, "Step number of that LoRA.", ge=0)

    @property
    def starts_from_base(self) -> bool:
        """Whether the adapter before step 1 is computed from the base weights."""
        # DoRA starts from the norms of the base weights, olora and pissa from their factors.
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
