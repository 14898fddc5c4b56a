"""A small transformer that streams, and a copier that turns every mistake into NaN."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import Kandinsky5Transformer3DModel
from torch import Tensor, nn

from simpletuner.config.launch import LaunchConfig
from simpletuner.config.lora import LoraConfig
from simpletuner.config.precision import QUANTISATIONS
from simpletuner.config.schema import OffloadConfig, PrecisionConfig
from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.memory.offload import attach
from simpletuner.memory.offload.block_inputs import BlockInputs
from simpletuner.memory.offload.copiers import Copier
from simpletuner.memory.offload.side_stream import SideStream
from simpletuner.memory.offload.streamer import SlotReferences, Streamer
from simpletuner.memory.quantisation.layers import quantise, use_quantised_products
from simpletuner.models.kandinsky5.blocks import mask_padding, use_fast_blocks
from simpletuner.models.kandinsky5.image import Kandinsky5ImageAdapter
from simpletuner.models.kandinsky5.spec import ALL_LINEAR
from simpletuner.speed.compile import compile_blocks
from simpletuner.speed.recomputation import enable_checkpointing
from simpletuner.training.lora import add_lora
from tests.tools.tiny import WIDTH, build_kandinsky, fill_zeros

CPU = torch.device("cpu")
BLOCKS = 6
TARGETS = ["to_query", "to_key", "to_value"]
NAN_BYTE = 0xFF  # four of them are a float32 NaN, two a bfloat16 one


class AdversarialCopier(Copier):
    """The worst that a copier may do.

    A slot is overwritten with NaN as soon as its copy is submitted, and filled only when somebody
    waits for the copy.

    Attributes:
        submitted: addresses of the images, in the order of their submission.
    """

    def __init__(self) -> None:
        super().__init__(SideStream(CPU))
        self.submitted: list[int] = []
        self.seconds = 0.0

    def make_slot(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), NAN_BYTE, dtype=torch.uint8)

    def submit(self, slot: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        self.submitted.append(flat.data_ptr())
        slot.fill_(NAN_BYTE)
        return slot, flat

    def wait(self, copy: tuple[Tensor, Tensor]) -> None:
        started = time.perf_counter()
        slot, flat = copy
        slot[: flat.numel()].copy_(flat)
        self.seconds += time.perf_counter() - started

    def waited(self) -> float:
        seconds = self.seconds
        self.seconds = 0.0
        return seconds


class Trained:
    """A Kandinsky transformer of six blocks (one of them reads text) with a LoRA, and one batch.

    Equal arguments give equal weights and inputs.
    """

    def __init__(
        self,
        *,
        checkpointing: bool = True,
        interval: int | None = None,
        block_inputs: BlockInputs | None = None,
        prepare: Any = None,
        compiled: str | None = None,
        dtype: torch.dtype = torch.float32,
        blocks: int = BLOCKS,
        recomputing: bool = False,
        targets: list[str] | str = TARGETS,
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model: nn.Module = build_kandinsky(visual_blocks=blocks - 1)
            self.latents = torch.randn(2, 1, 4, 4, 16)
            self.pooled = torch.randn(2, WIDTH)
            # Two lengths, so that there is padding.
            self.texts: tuple[Tensor, ...] = (torch.randn(5, WIDTH), torch.randn(3, WIDTH))
        for name, parameter in self.model.named_parameters():
            if not any(part in name for part in Kandinsky5Transformer3DModel._keep_in_fp32_modules):
                parameter.data = parameter.data.to(dtype)
        self.dtype = dtype
        self.padding = mask_padding(self.model)
        self.model.requires_grad_(False)
        if prepare is not None:
            prepare(self.model)
        self.lora = add_lora(
            self.model, LoraConfig(lora_rank=4), targets, seed=1, dtype=torch.float32
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            fill_zeros(self.lora_weights())
        precision = PrecisionConfig(
            gradient_checkpointing=checkpointing, gradient_checkpointing_interval=interval
        )
        self.keeps_saved = not precision.checkpoints_all
        # Made without a checkpoint to load from.
        self.adapter = Kandinsky5ImageAdapter.__new__(Kandinsky5ImageAdapter)
        self.adapter.dtype = self.dtype
        self.adapter.padding = self.padding
        self.adapter.task = "t2i"
        self.layout = self.adapter.block_layout(self.model)
        self.fast = use_fast_blocks(self.model, self.padding) if recomputing else None
        enable_checkpointing(
            self.model,
            self.layout,
            precision,
            dropout=False,
            block_inputs=block_inputs,
            keep=self.fast and self.fast.self_attention,
        )
        if compiled is not None and self.fast is not None:
            compile_blocks(
                self.layout,
                self.fast,
                compiled,
                LaunchConfig(),
                sampling=False,
                recomputing=True,
                tunes_int8=False,
            )
        elif compiled is not None:
            block = self.layout.blocks[1]
            block.forward = torch.compile(block.forward, backend=compiled)
        self.model.train()

    def to(self, device: torch.device) -> None:
        """Move the model and its inputs."""
        self.model.to(device)
        self._move_inputs(device)

    def offloaded(self, *, slots: int = 2, device: torch.device = CPU, **settings: Any) -> Streamer:
        """Stream the blocks with these settings of the config."""
        self._move_inputs(device)
        config = OffloadConfig(enable_group_offload=True, **settings)
        blocks = attach.streamed_blocks(self.layout.blocks, config.group_offload_resident_blocks)
        attach.place_model(self.model, blocks, device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attach, "SLOTS", slots)
            streamer = attach.Offload(config, device).attach(
                self.model, blocks, keeps_saved=self.keeps_saved
            )
        assert streamer is not None
        if self.fast is not None:
            self.fast.outside_checkpoint = SlotReferences(streamer)
        return streamer

    def _move_inputs(self, device: torch.device) -> None:
        self.latents = self.latents.to(device)
        self.pooled = self.pooled.to(device)
        self.texts = tuple(text.to(device) for text in self.texts)

    def lora_weights(self) -> nn.ParameterList:
        return nn.ParameterList(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        )

    def predict(self, timestep: float = 300.0) -> Tensor:
        embeds = [
            {"prompt_embeds": text, "pooled_prompt_embeds": pooled}
            for text, pooled in zip(self.texts, self.pooled, strict=True)
        ]
        latents = self.latents.movedim(-1, 1)
        timesteps = torch.tensor([timestep, 700.0], device=self.latents.device)
        batch = Batch(latents, embeds, ["a", "b"])
        noisy = NoisyBatch(batch, latents, timesteps / 1000, latents, timesteps, target=latents)
        return self.adapter.predict(self.model, noisy)

    def sample(self) -> Tensor:
        with torch.no_grad():
            return torch.stack([self.predict(timestep) for timestep in (900.0, 500.0)])

    def step(self, backward: Callable[[Tensor], None] = Tensor.backward) -> dict[str, Tensor]:
        """The loss and the gradients of one training step."""
        loss = self.predict().square().mean()
        backward(loss)
        gradients = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
                parameter.grad = None
        assert gradients, "a test without gradients would prove nothing"
        return {"loss": loss.detach(), **gradients}


def to_int8(model: nn.Module) -> None:
    """Quantise the linear layers of blocks with optimum-quanto's own modules."""
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(
        model, weights=quanto.qint8, include=["*transformer_blocks*"], exclude=["*modulation*"]
    )
    quanto.freeze(model)
    model.requires_grad_(False)


def to_packed(name: str) -> Callable[[nn.Module], None]:
    """A function that quantises the same layers by a `base_model_precision`."""

    def pack(model: nn.Module) -> None:
        quantise(model, ALL_LINEAR, QUANTISATIONS[name], accelerator=CPU)

    return pack


def to_products(name: str) -> Callable[[nn.Module], None]:
    """Like `to_packed`, with matmuls in the quantised type."""

    def prepare(model: nn.Module) -> None:
        to_packed(name)(model)
        use_quantised_products(model)

    return prepare


def assert_equal(results: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that the tensors are bit-equal."""
    assert results.keys() == expected.keys()
    for name in expected:
        assert torch.equal(results[name], expected[name]), name


def order(streamer: Streamer) -> list[int]:
    """The groups copied since the last call, in order."""
    copier: Any = streamer.copier
    addresses = [image.flat.data_ptr() for image in streamer.images]
    groups = [addresses.index(address) for address in copier.submitted]
    copier.submitted.clear()
    return groups
