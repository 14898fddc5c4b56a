"""A real assembly around a tiny checkpoint, and batches for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.diffusion.batch import Batch, NoisyBatch, TextEmbeds
from simpletuner.diffusion.flow import make_noisy
from simpletuner.models.adapter import FamilyAdapter, TextRequest
from simpletuner.models.registry import FAMILIES
from simpletuner.models.source import ModelSource
from simpletuner.run.settings import assembly_settings
from simpletuner.techniques.base import HiddenStates, Site, Technique
from simpletuner.training.assemble import assemble, make_accelerator
from simpletuner.training.lora import LoraAdapter
from simpletuner.training.lora_files import write_weights
from simpletuner.training.settings import TrainingSpec
from simpletuner.training.state import Assembly
from simpletuner.training.trained import Publication
from simpletuner.weights.lora_names import LORA_FILE, STEP_NOTE
from tests.tools.families import CPU, make_adapter, make_config


def make_assembly(checkpoint: Path, *techniques: Technique, **settings: Any) -> Assembly:
    """A model in training mode, ready for its first step."""
    settings = {"mixed_precision": "no", "learning_rate": 1e-2, **settings}
    config = make_config(checkpoint, **settings)
    targets = ["to_query", "to_key", "to_value"]
    spec = TrainingSpec(lora_targets=targets, seed=3, total_steps=10, learning_rate=1e-2)
    assembly = assemble(
        assembly_settings(config, spec), make_adapter(checkpoint), techniques, make_accelerator()
    )
    assembly.transformer.train()
    return assembly


def lora_of(assembly: Assembly) -> LoraAdapter:
    """The LoRA that an assembly trains."""
    assert isinstance(assembly.trained, LoraAdapter)
    return assembly.trained


def write_lora(lora: LoraAdapter, folder: Path, **note: str) -> Path:
    """Write the file of a LoRA; returns its path."""
    write_weights(folder / LORA_FILE, lora.file_weights(), lora.header(note))
    return folder / LORA_FILE


def no_prediction() -> Tensor:
    """The `predict` of adapters that are published without a conversion."""
    raise AssertionError("only converted adapters are compared by a prediction")


def make_publication(
    checkpoint: Path, adapter: FamilyAdapter, predict: Callable[[], Tensor] = no_prediction
) -> Publication:
    """What a result is published with after step 1."""
    spec = FAMILIES["kandinsky5-image"]
    source = ModelSource.from_settings(spec, spec.flavours[0], make_config(checkpoint).flat)
    return Publication(adapter, source, torch.float32, None, {STEP_NOTE: "1"}, predict)


def make_site(adapter: FamilyAdapter, transformer: nn.Module, *techniques: Technique) -> Site:
    """The argument of `attach` for techniques on a bare transformer."""
    layout = adapter.block_layout(transformer)
    return Site(
        adapter=adapter,
        transformer=transformer,
        layout=layout,
        device=CPU,
        dtype=torch.float32,
        others=techniques,
        disabled=nullcontext,
        hidden=HiddenStates(layout),
        load_latent_encoder=partial(adapter.load_latent_encoder, CPU, torch.float32),
    )


def no_forward(noisy: NoisyBatch) -> Tensor:
    """The `predict` of techniques that must not run the model."""
    raise AssertionError("this technique runs the model")


def make_batch(checkpoint: Path, captions: list[str], side: int = 4) -> Batch:
    """Random latents of a square with the embeddings of some captions."""
    embeds = deepcopy(_encoded(checkpoint, tuple(captions)))
    latents = torch.randn(
        len(captions), 16, 1, side, side, generator=torch.Generator().manual_seed(0)
    )
    return Batch(latents, embeds, [f"d/{index}" for index in range(len(captions))])


@cache
def _encoded(checkpoint: Path, captions: tuple[str, ...]) -> list[TextEmbeds]:
    """Cached, since loading the encoder takes longer than most tests."""
    encoder = make_adapter(checkpoint).load_text_encoder(CPU, torch.float32)
    return encoder.encode([TextRequest(caption) for caption in captions])


def fixed_noise(batch: Batch) -> NoisyBatch:
    """The batch with noise and a noise level that depend only on each sample's latents."""
    noise = []
    sigmas = []
    for latents in batch.latents:
        noise.append(torch.randn(latents.shape, generator=_generator(latents)))
        sigmas.append(torch.rand(1, generator=_generator(latents)))
    return make_noisy(batch, torch.cat(sigmas), torch.stack(noise))


def _generator(latents: Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(int(latents.abs().sum().item() * 1000))
