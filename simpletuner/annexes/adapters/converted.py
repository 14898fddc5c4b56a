"""Adapters other than LoRA: trained in their native form, published in that form and as a LoRA.

The LoRA is the best low-rank approximation of each layer's update (Eckart and Young, 1936). Its
error, on the weights and on one forward pass, is measured and stored in its header.

LoKr (Yeh et al., arXiv:2309.14859) updates a weight by alpha / rank · W1 ⊗ W2, where W2 may itself
be a product of two matrices of the rank. LoHa (Hyeon-Woo et al., arXiv:2108.06098) updates it by
alpha / rank · (A1 B1) ∘ (A2 B2).

LyCORIS wraps the linear layers that a settings file selects. Its modules are children of these
layers, so they move, stream, train and are saved with the transformer. Where the result is the
same, they run in bypass mode, which applies the update to the layer's input. Without it, weight
plus update is rounded to the weight's dtype, which loses small updates.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoHaConfig, LoKrConfig, PeftConfig
from peft.tuners.lycoris_utils import LycorisLayer
from torch import Tensor, nn

from simpletuner.annexes.adapters.convert import names_of_product
from simpletuner.annexes.adapters.kinds import CONFIG_FILE, LycorisFile, read_lycoris
from simpletuner.atomic import write_json
from simpletuner.config.lora import LoraConfig
from simpletuner.diffusion.seeds import seeded
from simpletuner.errors import ConfigError, Problems
from simpletuner.models.cost import Adapters
from simpletuner.models.lora_layers import Targets, weights_of
from simpletuner.models.spec import FamilySpec
from simpletuner.planning.checkpoint_folder import ERRORS, describe_errors
from simpletuner.reporting.wording import size_text
from simpletuner.training.drafts import Draft
from simpletuner.training.lora import ADAPTER, inject, without_adapters
from simpletuner.training.lora_files import write_verified, write_weights
from simpletuner.training.lora_hooks import LoraHook
from simpletuner.training.lora_writing import fold_scale
from simpletuner.training.meter import weight_shapes
from simpletuner.training.trained import AdapterWeights, Publication
from simpletuner.weights.lora_names import (
    ARCHITECTURE,
    LORA_FILE,
    PREFIXES,
    file_settings,
    plain_settings,
)

# Oversampling of the randomised SVD: its last singular vectors are the least accurate.
SPARE = 16
# Settings of peft in the header of a LoKr or LoHa.
NATIVE_SETTINGS = ["r", "alpha", "target_modules", "decompose_factor"]
# Share of an adapter's effect; a conversion that loses more logs a warning.
MOST_LOST = 0.05
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConvertedLora:
    """A LoRA made of another adapter.

    Attributes:
        factors: A (rank, in, ...) and B (out, rank, ...) of each layer, scale included.
        error: |B A - update| / |update| over all layers.
        limited: because of export_rank, a layer keeps less than export_energy.
    """

    factors: Mapping[str, tuple[Tensor, Tensor]]
    error: float
    limited: bool

    @property
    def ranks(self) -> dict[str, int]:
        """The rank of each layer."""
        return {name: len(down) for name, (down, _) in self.factors.items()}

    @contextmanager
    def added(self, transformer: nn.Module) -> Iterator[None]:
        """Add this LoRA to the layers of a transformer within a context."""
        with ExitStack() as hooks:
            for name, (down, up) in self.factors.items():
                layer = transformer.get_submodule(name)
                handle = layer.register_forward_hook(LoraHook(down, up, 1.0))
                hooks.callback(handle.remove)
            yield


@dataclass
class ConvertedAdapter(AdapterWeights, ABC):
    """An adapter that is also published as a LoRA."""

    transformer: nn.Module
    config: LoraConfig

    @property
    def native_file(self) -> str:
        """The name of the file in the adapter's native form."""
        return f"{self.config.lora_type}_weights.safetensors"

    @property
    def native_use(self) -> str:
        """A note on how to use the native file."""
        return ""

    @property
    def adapters(self) -> Adapters:
        trained = {}
        for name, module in self.layers():
            trained[name] = sum(
                parameter.numel() for parameter in module.parameters() if parameter.requires_grad
            )
        return Adapters(0, frozenset(trained), trained)

    @abstractmethod
    def layers(self) -> Iterable[tuple[str, Any]]:
        """The name of every adapted layer, and the module with its trained parameters."""

    @abstractmethod
    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """The name of every adapted layer, and the update of its weight in float32."""

    @abstractmethod
    def native(self, note: Mapping[str, str]) -> Draft:
        """The weights in the adapter's native form; `note` is added to the header."""

    @abstractmethod
    def disabled(self) -> AbstractContextManager[None]:
        """See `Trained.disabled`."""

    def drafts(self, note: Mapping[str, str]) -> Generator[Draft]:
        yield self.native(note)
        if self.ema is not None:
            with self.ema.applied():
                averaged = self.native(note)
                yield replace(averaged, name=f"ema/{averaged.name}")
        yield self.exact_draft()

    def publish(self, output_dir: Path, publication: Publication) -> str:
        if self.ema is not None:
            with self.ema.applied():
                self._publish(output_dir / "ema", publication)
        lora, errors = self._publish(output_dir, publication)
        size = size_text((output_dir / LORA_FILE).stat().st_size)
        limit = ""
        if lora.limited:
            limit = f" export_rank {self.config.export_rank} limits it; a larger one is closer."
        return (
            f"Saved {output_dir / self.native_file}{self.native_use}, and as a LoRA of rank "
            f"{max(lora.ranks.values())} {output_dir / LORA_FILE} ({size}), which loads through "
            f"the stock pipeline. Its relative error is {describe_errors(errors)}.{limit}"
        )

    def _publish(
        self, folder: Path, publication: Publication
    ) -> tuple[ConvertedLora, dict[str, str]]:
        """Write the native file and the verified LoRA.

        Returns:
            The LoRA, and its errors for the header.
        """
        lora = self.convert(publication.dtype)
        # Measured before writing, since the errors go into the LoRA's header.
        forward, effect = self.prediction_errors(lora, publication.predict)
        if effect > MOST_LOST:
            logger.warning(
                "%s lacks %.0f %% of the adapter's effect; a larger export_rank or export_energy "
                "keeps more.",
                folder / LORA_FILE,
                100 * effect,
            )
        measured = zip(ERRORS, (lora.error, forward, effect), strict=True)
        errors = {key: f"{error:.2e}" for key, error in measured}

        architecture = publication.note.get(ARCHITECTURE, "").removesuffix("/lora")
        native_note = {ARCHITECTURE: f"{architecture}/{self.config.lora_type}"}
        self.native({**publication.note, **native_note}).write_into(folder)

        form = self.config.lora_format
        weights = {}
        for name, (down, up) in lora.factors.items():
            key = f"{PREFIXES[form]}{name}"
            weights[f"{key}.lora_A.weight"] = down.cpu().contiguous()
            weights[f"{key}.lora_B.weight"] = up.cpu().contiguous()
        header = {**file_settings(plain_settings(lora.ranks), form), **publication.note, **errors}
        write_verified(folder, weights, header, form, publication.adapter)
        return lora, errors

    @torch.no_grad()
    def convert(self, dtype: torch.dtype) -> ConvertedLora:
        """This adapter as a LoRA in a dtype; the error includes rounding."""
        energy = self.config.export_energy
        most_ranks = self.config.export_rank
        factors = {}
        # Sums of squares over all layers: of what the LoRA lacks, and of the updates.
        total_lost = 0.0
        total = 0.0
        limited = False
        for name, update in self.updates():
            exact_down, exact_up = low_rank(update, energy, most_ranks)
            down = exact_down.to(dtype)
            up = exact_up.to(dtype)
            factors[name] = (down, up)
            product = up.flatten(1).float() @ down.flatten(1).float()
            lost = float((product - update.flatten(1)).square().sum())
            size = float(update.square().sum())
            if len(down) == most_ranks and lost > (1 - energy) * size:
                limited = True
            total_lost += lost
            total += size
        error = (total_lost / total) ** 0.5 if total else 0.0
        return ConvertedLora(factors, error, limited)

    def prediction_errors(
        self, lora: ConvertedLora, predict: Callable[[], Tensor]
    ) -> tuple[float, float]:
        """The error of a prediction with the LoRA in place of the adapter.

        Returns:
            The error relative to the prediction, and relative to the adapter's effect on it.
        """
        with torch.compiler.set_stance("force_eager"):  # compiled code would ignore the hooks
            exact = predict()
            with self.disabled():
                base = predict()
                with lora.added(self.transformer):
                    converted = predict()
        lost = float((converted - exact).norm())
        effect = float((exact - base).norm())
        return lost / float(exact.norm()), lost / effect if effect else 0.0


@dataclass
class ProductAdapter(ConvertedAdapter):
    """A LoKr or LoHa of peft."""

    settings: PeftConfig

    def layers(self) -> Iterable[tuple[str, Any]]:
        for name, layer in self.transformer.named_modules():
            if isinstance(layer, LycorisLayer):
                yield name, layer

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self.layers():
            yield name, layer.get_delta_weight(ADAPTER).float()

    def native(self, note: Mapping[str, str]) -> Draft:
        form = self.config.lora_format
        trained = {}
        for name, parameter in self.parameters().items():
            trained[name.removesuffix(f".{ADAPTER}")] = parameter.detach()
        all_settings: dict[str, Any] = vars(self.settings)
        settings = {key: all_settings[key] for key in NATIVE_SETTINGS if key in all_settings}
        factor = 1.0
        if form == "comfyui":
            # ComfyUI does not read alpha from the header, so it is multiplied into the weights.
            factor = settings["alpha"] / settings["r"]
            settings["alpha"] = settings["r"]
        if isinstance(settings["target_modules"], set):
            settings["target_modules"] = sorted(settings["target_modules"])
        header = {**file_settings(settings, form), **note}
        weights = {}
        for name, (old, scale) in names_of_product(trained, form, factor).items():
            weights[name] = fold_scale(trained[old], scale)
        return Draft(self.native_file, partial(write_weights, header=header), weights)

    def disabled(self) -> AbstractContextManager[None]:
        return without_adapters(self.transformer)


def add_product(
    transformer: nn.Module,
    config: LoraConfig,
    targets: Targets,
    spec: FamilySpec,
    *,
    seed: int,
    dtype: torch.dtype,
) -> ProductAdapter:
    """Freeze the transformer, and add a LoKr or LoHa to its selected linear layers.

    See `AdapterKind.add`.
    """
    shared: Any = {"r": config.lora_rank, "alpha": config.alpha, "target_modules": targets}
    settings: PeftConfig
    if config.lora_type == "lokr":
        settings = LoKrConfig(**shared, decompose_factor=config.lokr_factor, init_weights="lycoris")
    else:
        settings = LoHaConfig(**shared)
    inject(transformer, settings, seed, dtype)
    for layer in transformer.modules():
        if isinstance(layer, LycorisLayer):
            stay_in_evaluation(layer)
    return ProductAdapter(transformer, config, settings)


def stay_in_evaluation(layer: Any) -> None:
    """Keep an adapter's layer in evaluation mode while the model trains.

    In training mode, peft draws a random number on the CPU in every call, even with a dropout of 0.
    This breaks compiled graphs, and skips the layer with probability 2^-24.
    """
    layer.eval()
    layer.train = lambda mode=True: layer


def low_rank(update: Tensor, energy: float, most: int) -> tuple[Tensor, Tensor]:
    """A (rank, in, ...) and B (out, rank, ...) with B A near an update.

    Args:
        update: (out, in) of a linear layer, (out, in, 1, 1) of a pointwise convolution.
        energy: minimum share of the sum of squares to keep.
        most: maximum rank; takes precedence over `energy`.
    """
    matrix = update.flatten(1)
    with seeded(0, [matrix.device]):  # the method is randomised
        left, sizes, right = torch.svd_lowrank(matrix, q=min(most + SPARE, *matrix.shape), niter=4)
    kept_energy = sizes.square().cumsum(0) / matrix.square().sum()
    # The fewest singular values that hold the energy.
    rank = min(int((kept_energy < energy).sum()) + 1, most, len(sizes))
    # Split evenly, so that A and B have the same norm.
    root = sizes[:rank].sqrt()
    down = root[:, None] * right[:, :rank].T
    up = left[:, :rank] * root
    kernel = [1] * (update.dim() - 2)  # of a pointwise convolution
    return down.reshape(rank, *update.shape[1:]), up.reshape(len(up), rank, *kernel)


# Settings that a LyCORIS module takes by the names in the file.
PASSED = (
    "bypass_mode",
    "factor",
    "full_matrix",
    "decompose_both",
    "unbalanced_factorization",
    "use_scalar",
)
MULTIPLIER = "simpletuner.multiplier"  # header entry, needed to use the file
CHILD = "lycoris"  # name of the module inside its layer


@dataclass
class LycorisAdapter(ConvertedAdapter):
    """LyCORIS modules inside a transformer, by layer."""

    file: LycorisFile
    modules: Mapping[str, Any]

    @property
    def native_use(self) -> str:
        return f" (for a multiplier of {self.file.content['multiplier']})"

    def layers(self) -> Iterable[tuple[str, Any]]:
        return self.modules.items()

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        for name, module in self.modules.items():
            yield name, update_of(module)

    def native(self, note: Mapping[str, str]) -> Draft:
        weights = {}
        for module in self.modules.values():
            for key, tensor in module.state_dict().items():
                weights[f"{module.lora_name}.{key}"] = tensor.detach()
        header = {**note, MULTIPLIER: str(self.file.content["multiplier"])}

        def write(path: Path, weights: Mapping[str, Tensor]) -> None:
            write_weights(path, weights, header)
            write_json(path.with_name(CONFIG_FILE), dict(self.file.content))

        return Draft(self.native_file, write, weights)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        # A multiplier of 0 is not enough: with dora_wd the weight would still be decomposed.
        for module in self.modules.values():
            module.org_module[0].forward = module.org_forward
        try:
            yield
        finally:
            for module in self.modules.values():
                module.org_module[0].forward = module.forward


def add_lycoris(
    transformer: nn.Module,
    config: LoraConfig,
    targets: Targets,
    spec: FamilySpec,
    *,
    seed: int,
    dtype: torch.dtype,
) -> LycorisAdapter:
    """Freeze the transformer, and add the modules that `lycoris_config` describes.

    See `AdapterKind.add`.

    Raises:
        ConfigError: the file cannot be read.
    """
    problems = Problems()
    file = read_lycoris(config.lycoris_config, spec, problems)
    if file is None:
        raise ConfigError(problems)
    logging.getLogger("LyCORIS").setLevel(logging.ERROR)
    transformer.requires_grad_(False)
    modules = {}
    # Modules draw their initial weights from the global generator, so in the order of the layers.
    with seeded(seed, {parameter.device for parameter in transformer.parameters()}):
        layers = file.layers(weights_of(weight_shapes(transformer)))
        for name, settings in layers.items():
            modules[name] = _wrap(transformer, name, file, settings)
    for module in modules.values():
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
    return LycorisAdapter(transformer, config, file, modules)


def _wrap(transformer: nn.Module, name: str, file: LycorisFile, settings: Mapping[str, Any]) -> Any:
    """Wrap the forward pass of a layer in a LyCORIS module."""
    from lycoris.wrapper import network_module_dict  # an extra

    layer = transformer.get_submodule(name)
    key = f"{file.preset.get('lora_prefix', 'lycoris')}_{name}".replace(".", "_")
    module = network_module_dict[settings["algo"]](
        key,
        layer,
        float(settings["multiplier"]),
        int(settings["dim"]),
        settings["alpha"],
        settings["dropout"],
        weight_decompose=settings["dora_wd"],
        wd_on_out=settings["wd_on_output"],
        **{name: settings[name] for name in PASSED},
    )
    module.apply_to()
    # `apply_to` only replaces `forward`. As a child, the module also moves and is saved with its
    # layer.
    layer.add_module(CHILD, module)
    return module


def update_of(module: Any) -> Tensor:
    """The update that a module adds to its layer's weight: its own response to unit vectors.

    Does not use the library's `get_diff_weight`: in version 4.1.3, LoKr's applies the scale twice.
    """
    original = module.org_forward
    width = module.shape[1]
    kernel = module.shape[2:]
    parameter = next(module.parameters())
    # A batch of unit vectors: the response to vector i is column i of the update.
    units = torch.eye(width, device=parameter.device).reshape(width, width, *kernel)
    # With zeros as the layer's output, only the update remains.
    module.org_forward = lambda inputs: inputs.new_zeros(())
    try:
        response: Tensor = module.eval().forward(units)
    finally:
        module.org_forward = original
    return response.float().transpose(0, 1)  # in out -> out in
