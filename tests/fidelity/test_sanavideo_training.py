"""Sana Video in training: gradients, LoRA files for the stock pipeline, and the model's sigmas."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.diffusion.batch import Batch, NoisyBatch, TextEmbeds
from simpletuner.diffusion.flow import make_noisy, shift_sigmas
from simpletuner.models.adapter import TextRequest
from simpletuner.models.lora_checks import check_lora_file
from simpletuner.models.lora_layers import linear_modules, matching_modules
from simpletuner.models.sanavideo.spec import SANA_VIDEO
from simpletuner.run.settings import assembly_settings
from simpletuner.speed.recomputation import enable_checkpointing
from simpletuner.training.assemble import assemble, make_accelerator
from simpletuner.training.lora import rounding_error
from simpletuner.training.lora_files import verify_file
from simpletuner.training.lora_hooks import applied_loras
from simpletuner.training.settings import TrainingSpec
from simpletuner.training.state import Assembly
from tests.tools.assembly import lora_of, write_lora
from tests.tools.families import CPU
from tests.tools.reports import found_by
from tests.tools.sana_family import make_sana_adapter, make_sana_config, stock_pipeline
from tests.tools.tolerances import MODEL, assert_all_close, assert_close

ALL_LINEAR = SANA_VIDEO.lora_presets["all-linear"]
DEFAULT = list(SANA_VIDEO.lora_targets)
MODES = ["t2v", "i2v"]


@cache
def encoded(checkpoint: Path, dtype: torch.dtype) -> list[TextEmbeds]:
    encoder = make_sana_adapter(checkpoint).load_text_encoder(CPU, dtype)
    return encoder.encode([TextRequest("a ball"), TextRequest("")])


def make_batch(checkpoint: Path, mode: str, dtype: torch.dtype = torch.float32) -> Batch:
    embeds = deepcopy(encoded(checkpoint, dtype))
    latents = torch.randn(2, 16, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    condition = latents[:, :, :1] if mode == "i2v" else None
    return Batch(latents, embeds, ["d/0", "d/1"], condition=condition)


def noisy_batch(checkpoint: Path, mode: str, dtype: torch.dtype = torch.float32) -> NoisyBatch:
    batch = make_batch(checkpoint, mode, dtype)
    noise = torch.randn(batch.latents.shape, generator=torch.Generator().manual_seed(1))
    return make_sana_adapter(checkpoint).prepare(make_noisy(batch, torch.tensor([0.3, 0.8]), noise))


def make_assembly(checkpoint: Path, targets: Any = None, **settings: Any) -> Assembly:
    values = {"mixed_precision": "no", "learning_rate": 1e-2, **settings}
    config = make_sana_config(checkpoint, **values)
    spec = TrainingSpec(lora_targets=targets or DEFAULT, seed=3, total_steps=10, learning_rate=1e-2)
    adapter = make_sana_adapter(checkpoint, **settings)
    assembly = assemble(assembly_settings(config, spec), adapter, [], make_accelerator())
    assembly.transformer.train()
    return assembly


@pytest.mark.parametrize("mode", MODES)
def test_checkpointed_gradients_equal_plain_ones(sana_checkpoint: Path, mode: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        adapter = make_sana_adapter(sana_checkpoint)
        transformer = adapter.load_transformer(torch.float32)
        config = make_sana_config(sana_checkpoint, gradient_checkpointing=checkpointing)
        enable_checkpointing(
            transformer, adapter.block_layout(transformer), config.precision, dropout=False
        )
        transformer.train()
        adapter.predict(transformer, noisy_batch(sana_checkpoint, mode)).square().mean().backward()
        gradients.append(
            {name: parameter.grad for name, parameter in transformer.named_parameters()}
        )

    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
    assert_all_close(gradients[1], gradients[0], terms=MODEL)


def test_blocks_run_in_the_order_of_the_layout(sana_checkpoint: Path) -> None:
    adapter = make_sana_adapter(sana_checkpoint)
    transformer = adapter.load_transformer(torch.float32)
    blocks = adapter.block_layout(transformer).blocks
    entered = []
    for block in blocks:
        block.register_forward_pre_hook(lambda module, _: entered.append(module))

    adapter.predict(transformer, noisy_batch(sana_checkpoint, "t2v"))

    assert [id(block) for block in entered] == [id(block) for block in blocks]
    assert len(blocks) == 2


@pytest.mark.parametrize("targets", [DEFAULT, ALL_LINEAR], ids=["default", "all-linear"])
@pytest.mark.parametrize("task", MODES)
def test_a_trained_lora_loads_into_the_stock_pipeline(
    sana_checkpoint: Path, tmp_path: Path, targets: Any, task: str
) -> None:
    assembly = make_assembly(sana_checkpoint, targets, lora_rank=4, lora_alpha=6)
    lora = lora_of(assembly)
    assert lora is not None
    for index, parameter in enumerate(assembly.parameters.values()):
        generator = torch.Generator().manual_seed(index)
        parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    path = write_lora(lora, tmp_path)
    adapter = make_sana_adapter(sana_checkpoint)
    verify_file(path, lora.file_weights(), lora.form, adapter.load_bare_pipeline())
    assert 0 < rounding_error(lora, torch.bfloat16) < 0.01
    pipeline = stock_pipeline(sana_checkpoint, task)
    weights = dict(pipeline.transformer.named_parameters())
    modules = linear_modules({name: tuple(weight.shape) for name, weight in weights.items()})
    assert found_by(check_lora_file, "LoRA", path, modules, SANA_VIDEO.name) == []
    noisy = noisy_batch(sana_checkpoint, task)

    with torch.no_grad():
        base = adapter.predict(pipeline.transformer, noisy)
        with applied_loras(pipeline.transformer, [(path, 1.0)], torch.float32, torch.device("cpu")):
            applied = adapter.predict(pipeline.transformer, noisy)
        pipeline.load_lora_weights(tmp_path)
        loaded = adapter.predict(pipeline.transformer, noisy)
        trained = adapter.predict(assembly.transformer.eval(), noisy)

    assert (trained - base).abs().max() > 1e-2, "the LoRA changes something"
    # Two loads of one file may differ in the last bits, by the alignment of their weights; the
    # LoRA's are equal.
    assert_close(loaded, trained, terms=MODEL)
    assert_close(applied, trained, terms=MODEL)


def test_all_linear_covers_attention_and_pointwise_convolutions(sana_checkpoint: Path) -> None:
    transformer = make_sana_adapter(sana_checkpoint).load_transformer(torch.float32)
    names = [name for name, _ in transformer.named_modules()]

    # Of two blocks: four layers in two attentions, and two convolutions.
    assert len(matching_modules(names, DEFAULT)) == 2 * (2 * 4)
    assert len(matching_modules(names, ALL_LINEAR)) == 2 * (2 * 4 + 2)


@pytest.mark.parametrize(
    "settings", [{}, {"flow_schedule_shift": 9.0, "flow_use_uniform_schedule": True}]
)
def test_training_sigmas_follow_the_models_schedule(
    sana_checkpoint: Path, settings: dict[str, Any]
) -> None:
    """Logit-normal with a shift of 3, whatever the user set and however large the clip is."""
    assembly = make_assembly(sana_checkpoint, disable_segmented_timestep_sampling=True, **settings)
    latents = torch.zeros(4000, 16, 1, 2, 2)
    batch = Batch(latents, [], ["x"] * len(latents))

    sigmas = assembly.noise.add(batch, 0, 0).sigmas.sort().values

    shares = (torch.arange(len(latents)) + 0.5) / len(latents)
    expected = shift_sigmas(torch.sigmoid(torch.special.ndtri(shares)), 3.0)

    assert (sigmas - expected).abs().max() < 0.05


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_type", ["lora", "full"])
def test_bf16_training_is_finite(sana_checkpoint: Path, mode: str, model_type: str) -> None:
    settings = {"mixed_precision": "bf16", "model_type": model_type, "gradient_checkpointing": True}
    assembly = make_assembly(sana_checkpoint, optimizer="optimi-adamw", **settings)
    for sigma in (1e-6, 0.5, 1.0):
        batch = make_batch(sana_checkpoint, mode, torch.bfloat16)
        noise = torch.randn(batch.latents.shape, generator=torch.Generator().manual_seed(1))
        noisy = assembly.adapter.prepare(make_noisy(batch, torch.full((2,), sigma), noise))
        prediction = assembly.adapter.predict(assembly.transformer, noisy)
        assert prediction.dtype == torch.float32
        loss = (prediction - noisy.target).square().mean()
        loss.backward()
        assert loss.isfinite()

    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in assembly.parameters.values()
    )
