"""Adapter keys: kind, size and published LoRA, and further LoRAs in previews. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from simpletuner.config.option import Group, common, option, when
from simpletuner.config.values import Flag, Integer, Json, Number, PathText, Text, parse_json_text, parse_list
from simpletuner.errors import Problem

# Options of adapters with a rank, and of adapters that are converted to a published LoRA.
ranked = partial(option, requires=when(lora_type=("standard", "lokr", "loha")))
converted = partial(option, requires=when(lora_type=("lokr", "loha", "lycoris")))
standard = partial(option, requires=when(lora_type="standard", fatal=True))


class LoraConfig(Group):
    """LoRA"""

    requires = when(model_type="lora", because="model_type full trains every weight and no LoRA")

    lora_rank: Integer = ranked(16, ge=1, common=True)
    """Rank of the update matrices. For lokr, half the larger factor or more trains that factor in full."""
    lora_alpha: Number | None = ranked(None, gt=0, le=1e6, default_note="the rank", common=True)
    """Scale is alpha / rank."""
    lora_dropout: Number = common(
        0.0, ge=0, lt=1, requires=when(lora_type="standard", because="LyCORIS has its own", fatal=True)
    )
    """Dropout before the update."""
    lora_init_type: Literal["default", "gaussian", "loftq", "olora", "pissa"] = standard(
        "default",
        aliases=("lora_initialisation_style",),
        refused={"loftq": "is not supported: it replaces the base with a quantised one; use default"},
    )
    """default and gaussian leave the model unchanged at step 0; other values change the base, which must be fp32."""
    lora_type: Literal["standard", "lokr", "loha", "lycoris"] = common("standard")
    """Kind of adapter: a LoRA, a Kronecker (lokr) or Hadamard product (loha), or the algorithm in lycoris_config. Every
    kind is also published as a LoRA, see docs/ADAPTERS.md."""
    lokr_factor: Integer = option(
        -1, ge=-1, requires=when(lora_type="lokr"), refused={0: "is no size of a matrix; it must be -1, or 1 and more"}
    )
    """lokr: size of the smaller factor, a divisor of the layers' widths; -1: near their square root."""
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
    """LoRA+: learning rate of the B matrices as a multiple of that of the A matrices; 16 is typical."""
    peft_lora_target_modules: Json | None = ranked(None, default_note="the family's attention projections")
    """Layers that get a LoRA: a JSON list of names, the path of such a list, or `all-linear`."""
    slider_lora_target: Flag = ranked(False, excludes=when("peft_lora_target_modules", because="both choose layers"))
    """For sliders: train only the self-attention of the visual blocks, not the text layers."""
    use_dora: Flag = option(
        False,
        requires=when(lora_type="standard", because="LyCORIS has dora_wd", fatal=True),
        excludes=when(lora_init_type=("olora", "pissa"), because="the saved difference has no DoRA form"),
    )
    """Decompose weights into magnitude and direction (DoRA)."""
    lora_format: Literal["diffusers", "comfyui"] = option("diffusers")
    """Key names in saved files: diffusers' or ComfyUI's (Kandinsky 5 only). `init_lora` reads both."""
    init_lora: PathText | None = common(
        None,
        requires=(
            when(model_type="lora", because="model_type full trains every weight and no LoRA", fatal=True),
            when(lora_type="standard", because="it is a LoRA; resume others from a checkpoint", fatal=True),
        ),
    )
    """LoRA to start from: a file, a folder, or `repo[:file]` on the hub; Kandinsky's official LoRAs work too."""
    init_lora_step: Integer = option(0, ge=0, requires=when("init_lora"))
    """Step number of that LoRA."""

    @property
    def starts_from_base(self) -> bool:
        """Whether the adapter before step 1 is computed from the base weights."""
        # DoRA starts from the norms of the base weights, olora and pissa from their factorisations.
        computed = self.use_dora or self.lora_init_type not in ("default", "gaussian")
        return computed or self.lora_type == "lycoris"  # its file may request it

    @property
    def kind(self) -> str:
        """The name of the kind of adapter."""
        return {"standard": "LoRA", "lokr": "LoKr", "loha": "LoHa", "lycoris": "LyCORIS"}[self.lora_type]

    @property
    def alpha(self) -> float:
        """lora_alpha, or its default."""
        return self.lora_alpha or float(self.lora_rank)


of_adapter = partial(option, requires=when("validation_adapter_path"))
Strength = Annotated[Number, Field(gt=0, le=100)]


def parse_runs(value: object) -> object:
    """The list of runs, also from `{"runs": [...]}`; a bare path is a run with that LoRA."""
    value = parse_json_text(value)
    if isinstance(value, dict) and value.keys() == {"runs"}:
        value = value["runs"]
    return [{"path": each} if isinstance(each, str) else each for each in value] if isinstance(value, list) else value


class Adapter(Group):
    """A LoRA of a run; its strength defaults to that of the run."""

    path: PathText
    strength: Strength | None = None
    adapter_name: Text | None = None


class AdapterEntry(Group):
    """A run: previews with one or several LoRAs."""

    label: Text | None = None
    path: PathText | None = None
    paths: Annotated[list[PathText], BeforeValidator(parse_list)] | None = None
    adapters: list[Adapter] | None = None
    strength: Strength = 1.0

    @property
    def loras(self) -> list[tuple[str, float]]:
        """The LoRAs of the run and their strengths."""
        plain = [*(self.paths or []), *([self.path] if self.path else [])]
        named = [(each.path, each.strength or self.strength) for each in self.adapters or []]
        return [*((path, self.strength) for path in plain), *named]

    @property
    def title(self) -> str:
        """The label, else the names of the LoRAs."""
        names = [each.adapter_name for each in self.adapters or [] if each.adapter_name]
        # `repo:file` and `folder/file.safetensors` are named after the file.
        return self.label or "_".join(names or [Path(path.rpartition(":")[2] or path).stem for path, _ in self.loras])


class ValidationAdapterConfig(Group):
    """Validation adapters"""

    validation_adapter_path: PathText | None = common(None)
    """A LoRA for previews, on top of the model in training: a file, a folder, or `repo[:file]` on the hub."""
    validation_adapter_name: Text | None = of_adapter(None, default_note="the name of the file")
    """Name of the LoRA in preview file names."""
    validation_adapter_strength: Number = of_adapter(1.0, gt=0, le=100)
    """Strength of the LoRA."""
    validation_adapter_mode: Literal["adapter_only", "comparison", "none"] = option(
        "comparison", requires=when("validation_adapter_path", "validation_adapter_config")
    )
    """comparison also renders without further LoRAs; adapter_only does not, unless validation_adapter_config lists
    runs; none ignores all further LoRAs."""
    validation_adapter_config: Annotated[list[AdapterEntry], BeforeValidator(parse_runs)] | None = option(
        None, form="JSON"
    )
    """A list of further preview runs: a path, or an object with `path`, `paths` or `adapters` (a list of objects with
    `path` and `strength`), `strength` and `label`."""

    @property
    def entries(self) -> list[AdapterEntry]:
        """The runs with further LoRAs."""
        if self.validation_adapter_mode == "none":
            return []
        name, path = self.validation_adapter_name, self.validation_adapter_path
        single = [AdapterEntry(label=name, path=path, strength=self.validation_adapter_strength)] if path else []
        return [*single, *(self.validation_adapter_config or [])]

    @property
    def renders_without(self) -> bool:
        """Whether previews are also rendered without further LoRAs."""
        listed = self.validation_adapter_config is not None
        return not self.entries or self.validation_adapter_mode == "comparison" or listed


def check_listed(config: ValidationAdapterConfig) -> Iterator[Problem]:
    """Report runs without a LoRA."""
    for index, entry in enumerate(config.validation_adapter_config or []):
        if not entry.loras:
            yield Problem(f"validation_adapter_config[{index}]", "names no LoRA; give it path, paths or adapters.")
