"""A micro-step never makes the host wait for the device.

The meta device stands in for a GPU. It has no values, so reading one is an error. Copies to it from
the host are watched, and so are operations on tensors of both devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.models import RandomAdapter, lora_targets, make_accelerator, make_batch, make_config
from simpletuner.config.techniques.masked_loss import MaskedLossConfig
from simpletuner.config.techniques.tread import Route
from simpletuner.diffusion.batch import Batch
from simpletuner.models.kandinsky5.nabla import sparse_params
from simpletuner.planning.techniques.masked_loss import MaskedLossSpec
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.run.settings import assembly_settings
from simpletuner.techniques.base import Technique
from simpletuner.techniques.masked_loss import MaskedLoss
from simpletuner.techniques.tread import Tread
from simpletuner.training import noise, step
from simpletuner.training.assemble import assemble
from simpletuner.training.losses import Losses, MicroLoss
from simpletuner.training.settings import TrainingSpec

GPU = torch.device("meta")


class Watched(TorchDispatchMode):
    """Records blocking copies to the device, and operations on tensors of two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in given if tensor.device.type == "cpu" and tensor.dim()]
        if func is torch.ops.aten._to_copy.default:
            leaves = bool(on_host) and torch.device(named.get("device") or "cpu") == GPU
            if leaves and not named.get("non_blocking"):
                self.found.append(f"{func} of {tuple(given[0].shape)}")
        elif on_host and len(on_host) < sum(bool(tensor.dim()) for tensor in given):
            self.found.append(f"{func} on two devices")
        return func(*args, **named)


def masked() -> list[Technique]:
    return [MaskedLoss(MaskedLossSpec(MaskedLossConfig())), Tread(TreadSpec([Route(0.5, 0, -1)]))]


@pytest.mark.parametrize(
    "techniques",
    [list, lambda: [Tread(TreadSpec([Route(0.5, 0, -1)]))], masked],
    ids=["all tokens", "half", "masked"],
)
@pytest.mark.parametrize("settings", [{}, {"speed": "reference"}], ids=["fast", "reference"])
@pytest.mark.parametrize("size", ["tiny", "tiny-video", "tiny-sana"])
def test_no_operation_of_a_step_synchronises_the_host(
    monkeypatch: pytest.MonkeyPatch,
    size: str,
    settings: dict[str, Any],
    techniques: Callable[[], list[Technique]],
) -> None:
    if size == "tiny-sana" and techniques():
        pytest.skip("Sana's blocks need all tokens")
    config = make_config(
        size, mixed_precision="bf16", gradient_checkpointing=True, lora_rank=4, **settings
    )
    intent = TrainingSpec(
        lora_targets=lora_targets(size), seed=0, total_steps=10, learning_rate=1e-4
    )
    assembly = assemble(
        assembly_settings(config, intent),
        RandomAdapter(config, size, "cpu"),
        techniques(),
        make_accelerator("cpu"),
    )
    assembly.transformer.train().to(GPU)
    batch = make_batch(size, 2)
    first = batch.embeds[0]["prompt_embeds"][:-3]  # of unequal lengths, so that there is a mask
    batch = replace(batch, embeds=[{**batch.embeds[0], "prompt_embeds": first}, batch.embeds[1]])
    if size in ("tiny-video", "tiny-sana"):
        batch = replace(batch, condition=batch.latents[:, :, :1])
    if techniques is masked:
        batch = replace(batch, loss_mask=(batch.latents[:, :1] > 0).float())
    monkeypatch.setattr(noise, "seed_device", lambda device, seed: None)
    with Watched() as watched:
        losses = Losses()
        step.run_micro_step(assembly, batch.to(GPU, non_blocking=True), 0, 0, losses)

    assert losses[0].total.device == GPU
    assert watched.found == []


def test_metrics_of_techniques_are_read_together_with_the_losses() -> None:
    loss = MicroLoss(["d/0"], timesteps=[0.5], per_sample=torch.zeros(1, device=GPU))
    loss.log({"crepa_weight": torch.tensor(0.5)})
    assert loss.extra["crepa_weight"].device == GPU


def test_losses_and_gradient_sizes_are_read_in_one_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any other way to read a number of the meta device is an error."""
    config = make_config("tiny", mixed_precision="bf16", lora_rank=4)
    intent = TrainingSpec(
        lora_targets=lora_targets("tiny"), seed=0, total_steps=10, learning_rate=1e-4
    )
    assembly = assemble(
        assembly_settings(config, intent),
        RandomAdapter(config, "tiny", "cpu"),
        [],
        make_accelerator("cpu"),
    )
    transformer = assembly.transformer.train().to(GPU)
    trained = {
        name: parameter
        for name, parameter in transformer.named_parameters()
        if parameter.requires_grad
    }
    optimizer = torch.optim.AdamW(trained.values(), foreach=False)
    assembly = replace(assembly, parameters=trained, optimizer=optimizer)
    reads: list[int] = []
    batch = make_batch("tiny", 2).to(GPU, non_blocking=True)

    def read(tensor: Tensor) -> list[float]:
        if tensor.device != GPU:
            return on_host(tensor)
        reads.append(tensor.numel())
        return [0.5] * tensor.numel()

    on_host: Any = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", read)
    monkeypatch.setattr(noise, "seed_device", lambda device, seed: None)
    # The batch is on the model's device already.
    monkeypatch.setattr(Batch, "to", lambda batch, device, non_blocking: batch)
    loader: Any = Endless(batch)
    report = step.optimizer_step(assembly, loader, 0)

    # Total and diffusion loss, loss and timestep of two samples, and the size of the gradient.
    assert reads == [2 + 2 * 2 + 1]
    assert report.metrics["train_loss"] == report.metrics["grad_absmax"] == 0.5


class Endless:
    """A loader that yields one batch again and again."""

    epoch = 1
    epochs_done = 0

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __next__(self) -> Batch:
        return self.batch


def test_the_window_of_sparse_attention_is_made_on_the_device() -> None:
    sides = {"attention_wT": 3, "attention_wH": 3, "attention_wW": 3}
    others = {
        "attention_type": "nabla",
        "attention_P": 0.9,
        "attention_add_sta": True,
        "attention_method": "topcdf",
    }
    with Watched() as watched:
        window = sparse_params((1, 2, 32, 32, 16), {**sides, **others}, GPU)["sta_mask"]

    assert window.shape == (1, 1, 8, 8)
    assert window.device == GPU
    assert watched.found == []
