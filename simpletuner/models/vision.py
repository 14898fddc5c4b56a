"""DINOv2 vision encoders by name, folder or hub id: location and cost."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from simpletuner.config.paths import home_path
from simpletuner.config.techniques.crepa import PATCH
from simpletuner.errors import Problems, did_you_mean
from simpletuner.weights.hub import OFFLINE
from simpletuner.weights.part import HUB_ID, Part

KINDS = ("dinov2", "dinov2_with_registers")
# Name, width and layers of DINOv2's sizes (Oquab et al., arXiv 2304.07193, table 17); each head is
# 64 wide.
SIZES = {
    "s": ("small", 384, 12),
    "b": ("base", 768, 12),
    "l": ("large", 1024, 24),
    "g": ("giant", 1536, 40),
}
ENCODERS = (
    "dinov2_vits14",
    "dinov2_vitb14",
    "dinov2_vitl14",
    "dinov2_vitg14",
    "dinov2_vits14_reg",
    "dinov2_vitb14_reg",
    "dinov2_vitl14_reg",
    "dinov2_vitg14_reg",
)
SPELLINGS = re.compile(r"dino_?v2[_-](?:vit)?([sblg])(?:14)?(_reg)?")


@dataclass(frozen=True)
class VisionEncoder:
    """The encoder that a key names.

    Attributes:
        otherwise: advice in messages about an alternative without an encoder.
    """

    name: str
    key: str
    otherwise: str = ""

    @cached_property
    def known(self) -> str | None:
        """The published model of that name, such as `dinov2_vitg14` for `dino_v2_g`.

        None for a folder or hub id.
        """
        if home_path(self.name).is_dir():
            return None
        match = SPELLINGS.fullmatch(self.name.strip().lower())
        if match is None:
            return None
        size, registers = match.groups(default="")
        return f"dinov2_vit{size}14{registers}"

    @cached_property
    def part(self) -> Part:
        """The encoder's folder or repository."""
        location = self.name
        if self.known is not None:
            registers = "-with-registers" if self.known.endswith("_reg") else ""
            size_name, _, _ = SIZES[_size_letter(self.known)]
            location = f"facebook/dinov2{registers}-{size_name}"
        return Part("vision encoder", self.key, location, "", None, None)

    @property
    def torch_hub_file(self) -> Path:
        """The path of torch hub's weight file, in torch hub's cache."""
        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "torch")
        home = Path(os.environ.get("TORCH_HOME", cache)).expanduser()
        # dinov2_vitg14_reg4_pretrain.pth
        stem = (self.known or "").replace("_reg", "_reg4")
        return home / "hub" / "checkpoints" / f"{stem}_pretrain.pth"

    def local(self) -> Path | None:
        """The encoder's folder or torch hub's file on this machine, or None."""
        folder = self.part.local_folder()
        if folder:
            return folder
        return self.torch_hub_file if self.torch_hub_file.is_file() else None

    def settings(self) -> dict[str, Any]:
        """The encoder's config.json, or the published model's if it is not on this machine."""
        config = self.part.read_config()
        if config is not None:
            return config
        name = self.known or ENCODERS[-1]  # the largest, for a model that is not known
        size = _size_letter(name)
        _, width, layers = SIZES[size]
        has_registers = self.known is not None and "_reg" in self.known
        return {
            "model_type": "dinov2_with_registers" if has_registers else "dinov2",
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 64,
            "image_size": 518,
            "patch_size": PATCH,
            "use_swiglu_ffn": size == "g",  # only the giant model has a SwiGLU feed-forward
        }

    @cached_property
    def width(self) -> int:
        """Width of the features; as published if the encoder is not on this machine.

        The first access decides, so a download in the meantime changes nothing.
        """
        return int(self.settings()["hidden_size"])

    @cached_property
    def parameters(self) -> int:
        """Approximate number of weights: twelve matrices of its width per layer."""
        return 12 * int(self.settings()["num_hidden_layers"]) * self.width**2

    def check(self, report: Problems) -> None:
        """Report a wrong or unusable name, and an encoder that cannot be downloaded."""
        from huggingface_hub import is_offline_mode

        location = self.part.location
        if self.local() is not None:
            self._check_kind(report)
        elif self.part.is_local or not HUB_ID.fullmatch(location):
            fault = f" ({self.part.fault()})" if home_path(location).is_dir() else ""
            report.error(
                self.key,
                f"{self.name!r} is neither one of {', '.join(ENCODERS)} nor a model folder{fault} "
                f"or hub id.{did_you_mean(self.name, ENCODERS)}",
            )
        elif is_offline_mode():
            self._report_offline(report)

    def _check_kind(self, report: Problems) -> None:
        """Report a model on this machine that is not a DINOv2 with patches of 14 px."""
        settings = self.settings()
        kind = settings.get("model_type")
        patch = settings.get("patch_size")
        if kind not in KINDS or patch != PATCH:
            report.error(
                self.key,
                f"{self.part.location!r} is a {kind!r} with patches of {patch} px, not a DINOv2 "
                f"with {PATCH}.",
            )

    def _report_offline(self, report: Problems) -> None:
        from huggingface_hub import constants

        places = f"neither in {constants.HF_HUB_CACHE!r} nor {str(self.torch_hub_file)!r}"
        message = f"{self.name!r} ({self.part.location}) is {places}, and {OFFLINE}."
        report.error(self.key, f"{message} {self.otherwise}".rstrip())


def _size_letter(name: str) -> str:
    """The letter after `vit`: `g` of dinov2_vitg14."""
    return name.removeprefix("dinov2_vit")[0]
