"""LyCORIS: its modules around the linear layers that a settings file chooses.

The modules live inside the layers, so that they move, stream, train and are saved with the transformer. Where it
computes the same, they run in bypass mode: the update is applied to the layer's input, while rebuilding rounds weight
plus update to the weight's dtype, in which small updates vanish.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lycoris.wrapper import network_module_dict
from torch import Tensor, nn

from simpletuner.annexes.adapters.converted import ConvertedAdapter
from simpletuner.annexes.adapters.kinds import CONFIG_FILE, LycorisFile, read_lycoris
from simpletuner.atomic import write_json
from simpletuner.config.lora import LoraConfig
from simpletuner.diffusion.seeds import seeded
from simpletuner.errors import ConfigError, Problems
from simpletuner.models.lora_keys import Targets, weights_of
from simpletuner.models.spec import FamilySpec
from simpletuner.training.lora_files import write_weights
from simpletuner.training.meter import weight_shapes
from simpletuner.training.trained import Draft

PASSED = ("bypass_mode", "factor", "full_matrix", "decompose_both", "unbalanced_factorization", "use_scalar")
MULTIPLIER = "simpletuner.multiplier"  # header entry: the file is of no use without it
CHILD = "lycoris"  # name of the module inside its layer


@dataclass
class LycorisAdapter(ConvertedAdapter):
    """The modules of LyCORIS inside a transformer, by layer."""

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
        weights = {
            f"{module.lora_name}.{key}": each.detach()
            for module in self.modules.values()
            for key, each in module.state_dict().items()
        }
        return Draft(partial(self._write, {**note, MULTIPLIER: str(self.file.content["multiplier"])}), weights)

    def _write(self, header: Mapping[str, str], folder: Path, weights: Mapping[str, Tensor]) -> None:
        write_weights(self.native_file, header, folder, weights)
        write_json(folder / CONFIG_FILE, dict(self.file.content))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        # A multiplier of 0 would not do: with dora_wd the weight is still decomposed.
        for module in self.modules.values():
            module.org_module[0].forward = module.org_forward
        try:
            yield
        finally:
            for module in self.modules.values():
                module.org_module[0].forward = module.forward


def add_lycoris(
    transformer: nn.Module, config: LoraConfig, targets: Targets, spec: FamilySpec, *, seed: int, dtype: torch.dtype
) -> LycorisAdapter:
    """Freeze the transformer and add the modules that `lycoris_config` describes; see `AdapterKind.add`.

    Raises:
        ConfigError: the file cannot be read.
    """
    problems = Problems()
    file = problems.take(read_lycoris(config.lycoris_config, spec))
    if file is None:
        raise ConfigError(problems)
    logging.getLogger("LyCORIS").setLevel(logging.ERROR)
    transformer.requires_grad_(False)
    # modules draw their initial weights from the global generator
    with seeded(seed, (parameter.device for parameter in transformer.parameters())):
        layers = file.layers(weights_of(weight_shapes(transformer)))
        modules = {name: _wrap(transformer, name, file, settings) for name, settings in layers.items()}
    for module in modules.values():
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
    return LycorisAdapter(transformer, config, file, modules)


def _wrap(transformer: nn.Module, name: str, file: LycorisFile, settings: Mapping[str, Any]) -> Any:
    """Put a module around a layer's forward pass."""
    layer = transformer.get_submodule(name)
    key = f"{file.preset.get('lora_prefix', 'lycoris')}_{name}".replace(".", "_")
    module = network_module_dict[settings["algo"]](
        key, layer, float(settings["multiplier"]), int(settings["dim"]), settings["alpha"], settings["dropout"],
        weight_decompose=settings["dora_wd"], wd_on_out=settings["wd_on_output"],
        **{name: settings[name] for name in PASSED},
    )  # fmt: skip
    module.apply_to()
    # `apply_to` only replaces `forward`: as a child, the module moves and is saved with its layer.
    layer.add_module(CHILD, module)
    return module


def update_of(module: Any) -> Tensor:
    """What a module adds to the weight of its layer: its response to unit vectors, without the layer's own.

    The library's `get_diff_weight` is not used, since in version 4.1.3 that of LoKr applies the scale twice.
    """
    own, width, kernel = module.org_forward, module.shape[1], module.shape[2:]
    parameter = next(module.parameters())
    # A batch of unit vectors: the response to vector i is column i of the update.
    units = torch.eye(width, device=parameter.device).reshape(width, width, *kernel)
    # Zero in place of the layer's output leaves the update alone.
    module.org_forward = lambda inputs: inputs.new_zeros(())
    try:
        response: Tensor = module.eval().forward(units)
    finally:
        module.org_forward = own
    return response.float().transpose(0, 1)  # in out -> out in
