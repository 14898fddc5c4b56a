"""LoRA: adds it to a transformer and writes it to a file.

Low-rank adaptation (Hu et al., arXiv:2106.09685) adds `scale · B(A(x))` to a frozen linear layer,
with scale = alpha / rank. In files (`lora_files`), the scale is folded into B and the metadata has
alpha = rank, so that every loader applies the trained strength, whether or not it reads the
metadata.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from simpletuner.config.lora import LoraConfig
from simpletuner.diffusion.seeds import seeded
from simpletuner.errors import UserError, shorten
from simpletuner.models.cost import Adapters
from simpletuner.models.lora_layers import Targets
from simpletuner.reporting.wording import size_text
from simpletuner.training import lora_files
from simpletuner.training.drafts import Draft
from simpletuner.training.ema import AnyTensor
from simpletuner.training.lora_writing import fold_scale
from simpletuner.training.trained import AdapterWeights, Publication
from simpletuner.weights.lora_names import (
    COMFYUI_MAGNITUDE,
    LORA_FILE,
    MAGNITUDE,
    PREFIXES,
    LoraForm,
    file_settings,
)

ADAPTER = "default"
# Inits that move part of the base weight into the adapter. Files hold the difference, since users
# have the plain base.
BASE_CHANGING_INITS = ("olora", "pissa")


@dataclass
class LoraAdapter(AdapterWeights):
    """The LoRA inside a transformer.

    Attributes:
        transformer: the model that contains it.
        settings: peft's config: rank, alpha and more.
        initial: the adapter at step 0 for inits that change the base; empty otherwise.
        form: key names in written files.
    """

    transformer: nn.Module
    settings: PeftLoraConfig
    initial: dict[str, Tensor] = field(default_factory=dict)
    form: LoraForm = "diffusers"

    @property
    def scale(self) -> float:
        """The factor on B A."""
        return float(self.settings.lora_alpha) / self.settings.r

    @property
    def adapters(self) -> Adapters:
        layers = [
            name
            for name, module in self.transformer.named_modules()
            if isinstance(module, BaseTunerLayer)
        ]
        return Adapters(self.settings.r, frozenset(layers))

    def drafts(self, note: Mapping[str, str]) -> Generator[Draft]:
        files = {LORA_FILE: self.state_dict()}
        if self.ema is not None:
            files[f"ema/{LORA_FILE}"] = plain_names(self.ema.average)
        write = partial(lora_files.write_weights, header=self.header(note))
        for name, weights in files.items():
            yield Draft(name, write, self.file_weights(weights))
        yield self.exact_draft()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """A context without the effect of training.

        Inits that change the base use their initial LoRA instead of none, which restores the model.
        """
        if not self.initial:
            with without_adapters(self.transformer):
                yield
            return
        trained = self.state_dict()
        self.load_state_dict(self.initial)
        try:
            yield
        finally:
            self.load_state_dict(trained)

    def publish(self, output_dir: Path, publication: Publication) -> str:
        if self.ema is not None:
            self._publish(output_dir / "ema", publication, plain_names(self.ema.average))
        path, checked = self._publish(output_dir, publication, self.state_dict())
        result = "load through the stock pipeline as they were trained"
        if self.form == "comfyui":
            result = "are what was trained, under the names that ComfyUI looks for"
        error = rounding_error(self, publication.dtype)
        if error > EXACT:
            result += f", which rounds them to {publication.dtype}: {error:.1e} of their effect"
        size = size_text(path.stat().st_size)
        return f"Saved {path} ({size}); all {checked} tensors {result}."

    def _publish(
        self, folder: Path, publication: Publication, weights: Mapping[str, Tensor]
    ) -> tuple[Path, int]:
        """Write a file, verify it, then move it into place.

        Returns:
            its path and the number of its tensors.
        """
        tensors = self.file_weights(weights)
        header = self.header(publication.note)
        path = lora_files.write_verified(folder, tensors, header, self.form, publication.adapter)
        return path, len(tensors)

    def state_dict(self) -> dict[str, Tensor]:
        """`<module>.lora_A.weight` and `lora_B.weight` as trained, on the CPU."""
        # Cloned: on a CPU, `cpu` returns the parameter itself, which training changes.
        weights = plain_names(self.parameters()).items()
        return {name: weight.detach().cpu().clone().contiguous() for name, weight in weights}

    def load_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Restore weights from `state_dict`.

        Raises:
            UserError: a key is missing, unknown or of another shape.
        """
        trained = plain_names(self.parameters())
        expected_shapes = {(name, parameter.shape) for name, parameter in trained.items()}
        shapes = {(name, tensor.shape) for name, tensor in weights.items()}
        wrong = sorted({name for name, _ in expected_shapes ^ shapes})
        if wrong:
            raise UserError(f"The LoRA weights do not fit this model: {shorten(wrong)}.")
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(weights[name])

    def file_weights(self, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The weights as in a file: scale folded into B, prefixed, contiguous.

        Args:
            weights: in the form of `state_dict`, such as the moving average; by default the trained
                weights.
        """
        source = dict(weights or self.state_dict())
        written = {}
        for name, tensor in source.items():
            if ".lora_B." in name:
                tensor = fold_scale(tensor, self.scale)
            if self.initial and (".lora_A." in name or ".lora_B." in name):
                tensor = self._with_initial(name, tensor)
            elif self.form == "comfyui" and name.endswith(MAGNITUDE):
                module = name.removesuffix(MAGNITUDE)
                base, update = self.layer(module, source)
                tensor = lora_files.comfyui_magnitude(tensor, base, update)
                name = module + COMFYUI_MAGNITUDE
            written[PREFIXES[self.form] + name] = tensor.contiguous()
        return written

    def header(self, note: Mapping[str, str]) -> dict[str, str]:
        """The header of a file of these weights, with additional entries."""
        # `_with_initial` doubles the rank. The scale is already folded into B, so alpha is the
        # rank.
        rank = self.settings.r * (2 if self.initial else 1)
        targets = self.settings.target_modules
        settings = {
            "r": rank,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "use_dora": self.settings.use_dora,
            # Sorted, since peft stores a set, whose order would change the file's bytes between
            # runs.
            "target_modules": targets if isinstance(targets, str) else sorted(targets),
        }
        return {**file_settings(settings, self.form), **note}

    def layer(self, module: str, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The base weight of a layer, and its update by weights in the form of `state_dict`.

        Returns:
            two tensors (out, in).
        """
        layer: Any = self.transformer.get_submodule(module)
        base = dequantize_module_weight(layer.get_base_layer())
        down = weights[f"{module}.lora_A.weight"].float()
        up = weights[f"{module}.lora_B.weight"].float()
        return base, self.scale * (up @ down)

    def _with_initial(self, name: str, tensor: Tensor) -> Tensor:
        """The trained minus the initial adapter, as one adapter of twice the rank.

        [B, -B0] [A; A0] = B A - B0 A0, where B has its scale already.
        """
        initial = self.initial[name].to(tensor)
        if ".lora_A." in name:
            return torch.cat([tensor, initial], dim=0)
        return torch.cat([tensor, -self.scale * initial], dim=1)


def add_lora(
    transformer: nn.Module, config: LoraConfig, targets: Targets, *, seed: int, dtype: torch.dtype
) -> LoraAdapter:
    """Freeze the transformer and add a LoRA to the selected linear layers.

    Args:
        transformer: a diffusers model.
        targets: see `models.lora_keys`.
        seed: seed of the initial weights.
        dtype: dtype of the trained weights.
    """
    init: bool | str = True if config.lora_init_type == "default" else config.lora_init_type
    settings = PeftLoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or config.lora_rank,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        init_lora_weights=init,
        use_dora=config.use_dora,
    )
    inject(transformer, settings, seed, dtype)
    adapter = LoraAdapter(transformer, settings, form=config.lora_format)
    if config.lora_init_type in BASE_CHANGING_INITS:
        adapter.initial = adapter.state_dict()
    return adapter


def inject(transformer: nn.Module, settings: PeftConfig, seed: int, dtype: torch.dtype) -> None:
    """Freeze a diffusers model and add a peft adapter to it."""
    model: Any = transformer.requires_grad_(False)
    # peft draws the initial weights from the global generator.
    with seeded(seed, {parameter.device for parameter in transformer.parameters()}):
        model.add_adapter(settings, adapter_name=ADAPTER)
    for parameter in transformer.parameters():
        if parameter.requires_grad:  # peft derives the dtype from the base weights
            parameter.data = parameter.data.to(dtype)


@contextmanager
def without_adapters(transformer: nn.Module) -> Iterator[None]:
    """A context in which peft adapters are disabled."""
    model: Any = transformer
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def start_from(adapter: LoraAdapter, path: Path) -> None:
    """Start from the weights of a LoRA file (`init_lora`), already checked by the plan.

    Raises:
        UserError: no key of the file fits.
    """
    weights = lora_files.read_lora_file(path, lora_files.layer_names(adapter.transformer))
    start = _as_trained(adapter, weights)
    initial = adapter.state_dict()
    # A file may have fewer layers; the remaining layers start as in a new LoRA.
    for name, tensor in initial.items():
        if name in start:
            initial[name] = start[name].to(tensor)
    adapter.load_state_dict(initial)


def _as_trained(adapter: LoraAdapter, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file's weights in an adapter's form: without the scale, and magnitudes as in peft."""
    start = {}
    magnitudes = {}  # in ComfyUI's form, by module
    for name, weight in weights.items():
        if name.endswith(COMFYUI_MAGNITUDE):
            magnitudes[name.removesuffix(COMFYUI_MAGNITUDE)] = weight
        elif ".lora_B." in name:
            start[name] = weight / adapter.scale
        else:
            start[name] = weight
    for module, magnitude in magnitudes.items():
        base, update = adapter.layer(module, start)
        start[module + MAGNITUDE] = lora_files.trained_magnitude(magnitude, base, update)
    return start


# A relative difference below this is float32 rounding.
EXACT = 1e-6


def rounding_error(adapter: LoraAdapter, dtype: torch.dtype) -> float:
    """The largest relative error of an update B A in a pipeline of this dtype, over all modules."""
    # With an initial adapter, the file holds the difference of two products, which has no pairs to
    # compare.
    if adapter.initial:
        return 0.0
    trained = adapter.state_dict()
    saved = adapter.file_weights()
    prefix = PREFIXES[adapter.form]
    worst = 0.0
    for down_name in trained:
        if ".lora_A." not in down_name:
            continue
        up_name = down_name.replace(".lora_A.", ".lora_B.")
        # In float64, whose rounding is far below `EXACT`.
        down = trained[down_name].flatten(1).double()
        up = trained[up_name].flatten(1).double()
        exact = adapter.scale * (up @ down)
        rounded_down = saved[prefix + down_name].flatten(1).to(dtype).double()
        rounded_up = saved[prefix + up_name].flatten(1).to(dtype).double()
        error = rounded_up @ rounded_down - exact
        # B is 0 until the first update, and so is the norm.
        norm = exact.norm().clamp_min(torch.finfo(torch.double).tiny)
        worst = max(worst, float(error.norm() / norm))
    return worst


def plain_names(weights: Mapping[str, AnyTensor]) -> dict[str, AnyTensor]:
    """Parameters by their names in `LoraAdapter.state_dict`, without the adapter's name."""
    plain = {}
    for name, tensor in weights.items():
        short = name.replace(f".{ADAPTER}.", ".")
        plain[short.replace(f"{MAGNITUDE}.weight", MAGNITUDE)] = tensor
    return plain
