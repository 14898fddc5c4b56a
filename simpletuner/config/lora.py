"""Adapter keys: kind, size and published LoRA."""

from __future__ import annotations

from functools import partial
from typing import Literal

from simpletuner.config.option import Group, common, option, when
from simpletuner.config.types import Flag, Integer, Json, Number, PathText

# Options of adapters with a rank, and of adapters that are converted to a published LoRA.
ranked = partial(option, requires=when(lora_type=("standard", "lokr", "loha")))
converted = partial(option, requires=when(lora_type=("lokr", "loha", "lycoris")))
standard = partial(option, requires=when(lora_type="standard", fatal=True))


class LoraConfig(Group):
    """LoRA"""

    requires = when(model_type="lora", because="model_type full trains every weight and no LoRA")

    lora_rank: Integer = ranked(16, ge=1, common=True)
    """How much the LoRA can hold. Higher learns finer detail, makes larger files and overfits
    sooner. For lokr, half the larger factor or more trains that factor in full.
    """
    lora_alpha: Number | None = ranked(None, gt=0, le=1e6, default_note="the rank", common=True)
    """The update is multiplied by alpha / rank: by 1 if both are equal."""
    lora_dropout: Number = common(
        0.0,
        ge=0,
        lt=1,
        requires=when(lora_type="standard", because="LyCORIS has its own", fatal=True),
    )
    """Share of the LoRA's inputs that is zeroed at random in each step, against overfitting."""
    lora_init_type: Literal["default", "gaussian", "loftq", "olora", "pissa"] = standard(
        "default",
        aliases=("lora_initialisation_style",),
        refused={
            "loftq": "is not supported: it replaces the base with a quantised one; use default"
        },
    )
    """default and gaussian leave the model unchanged at step 0; other values change the base, which
    must be fp32."""
    lora_type: Literal["standard", "lokr", "loha", "lycoris"] = common("standard")
    """Kind of adapter: a LoRA, a Kronecker (lokr) or Hadamard product (loha), or the algorithm in
    lycoris_config. Each also saves a LoRA: docs/ADAPTERS.md."""
    lokr_factor: Integer = option(
        -1,
        ge=-1,
        requires=when(lora_type="lokr"),
        refused={0: "is not a size; it must be -1 (automatic) or at least 1"},
    )
    """lokr: the smaller factor, a divisor of the layers' widths; -1: near their square root."""
    lycoris_config: PathText | None = option(None, requires=when(lora_type="lycoris"))
    """Settings file of LyCORIS, JSON with algo, multiplier, and linear_dim or full_matrix."""
    # Energy: the sum of the squared singular values of a layer's update.
    export_energy: Number = converted(0.99, gt=0, le=1)
    """Energy kept when another adapter is converted to a LoRA (limited by export_rank)."""
    export_rank: Integer = converted(64, ge=1)
    """Maximum rank of the converted LoRA."""
    lora_plus_ratio: Number | None = standard(
        None,
        ge=1,
        le=10_000,
        label="LoRA+ Ratio",
        excludes=(
            when(optimizer="muon", because="muon already has a second parameter group, for AdamW"),
            when(optimizer="prodigy", because="it finds one rate for all groups"),
        ),
    )
    """LoRA+: learning rate of the B matrices divided by that of the A matrices; 16 is typical."""
    peft_lora_target_modules: Json | None = ranked(
        None, default_note="the family's attention projections"
    )
    """Layers that get a LoRA: a JSON list of names, the path of such a list, or `all-linear`."""
    slider_lora_target: Flag = ranked(
        False, excludes=when("peft_lora_target_modules", because="both choose layers")
    )
    """For sliders: train only the self-attention of the visual blocks, not the text layers."""
    use_dora: Flag = option(
        False,
        requires=when(lora_type="standard", because="LyCORIS has dora_wd", fatal=True),
        excludes=when(
            lora_init_type=("olora", "pissa"), because="the saved difference has no DoRA form"
        ),
    )
    """Decompose weights into magnitude and direction (DoRA)."""
    lora_format: Literal["diffusers", "comfyui"] = option("diffusers")
    """Key names in saved files: diffusers' or ComfyUI's (Kandinsky 5). `init_lora` reads both."""
    init_lora: PathText | None = common(
        None,
        requires=(
            when(
                model_type="lora",
                because="model_type full trains every weight and no LoRA",
                fatal=True,
            ),
            when(
                lora_type="standard",
                because="it is a LoRA; resume others from a checkpoint",
                fatal=True,
            ),
        ),
    )
    """LoRA to start from: a file, a folder or `repo[:file]` on the hub, such as Kandinsky's own."""
    init_lora_step: Integer = option(0, ge=0, requires=when("init_lora"))
    """Steps that the LoRA of init_lora was trained for; they count as trained."""

    @property
    def starts_from_base(self) -> bool:
        """Whether the adapter before step 1 is computed from the base weights."""
        # DoRA starts from the norms of the base weights, olora and pissa from their factorisations.
        computed = self.use_dora or self.lora_init_type not in ("default", "gaussian")
        return computed or self.lora_type == "lycoris"  # its file may request it

    @property
    def kind(self) -> str:
        """The name of the kind of adapter."""
        return {"standard": "LoRA", "lokr": "LoKr", "loha": "LoHa", "lycoris": "LyCORIS"}[
            self.lora_type
        ]

    @property
    def alpha(self) -> float:
        """lora_alpha, or its default."""
        return self.lora_alpha or float(self.lora_rank)
