"""A step of a published model on fake tensors: its metered peak beside the planned one.

The transformers have their real width and few blocks, since every block adds the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import pytest
import torch
from diffusers import Kandinsky5Transformer3DModel, SanaVideoTransformer3DModel
from peft import LoraConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from benchmarks.models import cost_of
from simpletuner.budget.step_memory import StepMemory, StepModel
from simpletuner.models.cost import NO_ADAPTERS, Adapters, BatchShape, Kernels
from simpletuner.models.kandinsky5 import blocks, nabla
from simpletuner.models.kandinsky5.cost import VIDEO_COST
from simpletuner.models.kandinsky5.flex import compiled_flex
from simpletuner.models.kandinsky5.image import Kandinsky5ImageAdapter
from simpletuner.models.lora_layers import linear_modules, matching_modules
from simpletuner.models.sanavideo.cost import COST as SANA_COST
from simpletuner.models.sanavideo.video import SanaVideoAdapter
from simpletuner.speed.recomputation import enable_checkpointing
from simpletuner.training.guard import gradient_size
from simpletuner.training.release import GradientRelease
from simpletuner.training.update import KERNEL_KEYS, build_optimizer
from tests.budget.test_estimate import make_config
from tests.tools.peak_memory import Peak, fake_step, hollow
from tests.tools.tiny import NABLA

KANDINSKY = ["to_query", "to_key", "to_value"]
SANA = ["to_q", "to_k", "to_v", "to_out.0"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def kandinsky_inputs(
    load: BatchShape, channels: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    return {
        "hidden_states": torch.empty(
            load.samples, load.frames, 2 * load.height, 2 * load.width, channels, dtype=dtype
        ),
        "encoder_hidden_states": torch.empty(load.samples, load.text, 3584, dtype=dtype),
        "pooled_projections": torch.empty(load.samples, 768, dtype=dtype),
        "timestep": torch.zeros(load.samples),
        "visual_rope_pos": [
            torch.arange(load.frames),
            torch.arange(load.height),
            torch.arange(load.width),
        ],
        "text_rope_pos": torch.arange(load.text),
        "return_dict": False,
    }


def sana_inputs(
    load: BatchShape,
    channels: int = 16,
    patch: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    shape = (load.samples, 1, load.frames, load.height, load.width)
    return {
        "hidden_states": torch.empty(
            load.samples,
            channels,
            load.frames,
            patch * load.height,
            patch * load.width,
            dtype=dtype,
        ),
        "encoder_hidden_states": torch.empty(load.samples, load.text, 2304, dtype=dtype),
        "encoder_attention_mask": torch.ones(load.samples, load.text, dtype=torch.long),
        "timestep": torch.zeros(shape) if load.timed_tokens else torch.zeros(load.samples),
        "return_dict": False,
    }


@dataclass(frozen=True)
class FakeRun:
    """Settings of a step to meter.

    Attributes:
        blocks: number of large blocks; 0 for all of the published model.
        settings: of the run.
        kernel: of the update; None for the loop over weights, as on a CPU.
    """

    flavour: str
    load: BatchShape
    blocks: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    kernel: str | None = None

    @property
    def is_sana(self) -> bool:
        return self.flavour.startswith("2b")

    @property
    def planned(self) -> StepMemory:
        model, config = self._model()
        return self._plan(model, config).memory(self.load)

    def ratio(self, monkeypatch: pytest.MonkeyPatch) -> float:
        """The planned peak by the metered one, with all weights and optimizer state."""
        model, config = self._model()
        setup = self._plan(model, config)
        if setup.adapters.modules:
            model.requires_grad_(False)
            targets = sorted(setup.adapters.modules)
            model.add_adapter(LoraConfig(r=setup.adapters.rank, target_modules=targets))
        with fake_step(monkeypatch):
            metered = self._metered(model, setup, monkeypatch)
        return setup.memory(self.load).total / metered

    def _model(self) -> tuple[Any, dict[str, object]]:
        """The transformer on the meta device, and its config.json."""
        if self.is_sana:
            config = dict(SANA_COST.published(self.flavour))
            count = "num_layers"
            model_class: Any = SanaVideoTransformer3DModel
        else:
            config = dict(VIDEO_COST.published(self.flavour))
            count = "num_visual_blocks"
            model_class = Kandinsky5Transformer3DModel
            if config["attention_type"] == "nabla":
                config |= NABLA
        if self.blocks:
            config[count] = self.blocks
        with torch.device("meta"):
            return model_class(**config), config

    def _plan(self, model: Any, config: Mapping[str, object]) -> StepModel:
        family = SANA_COST if self.is_sana else VIDEO_COST
        cost = cost_of(family, model, Kernels(tile_lists=True))
        settings = make_config(**self.settings)
        adapters = NO_ADAPTERS
        if settings.model.model_type == "lora":
            modules = matching_modules(
                linear_modules(cost.shapes), SANA if self.is_sana else KANDINSKY
            )
            adapters = Adapters(16, frozenset(modules))
        return StepModel(cost, settings, adapters)

    def _metered(self, model: Any, setup: StepModel, monkeypatch: pytest.MonkeyPatch) -> int:
        """The peak of a step of a run that has trained before."""
        inputs = self._prepare(model, setup, monkeypatch)
        parameters = {
            name: weight for name, weight in model.named_parameters() if weight.requires_grad
        }
        optimizer = self._optimizer(parameters, setup)
        average: list[Tensor] = []
        if setup.config.ema.use_ema and not setup.config.ema.is_on_host:
            average += [
                torch.empty_like(weight, dtype=torch.float32) for weight in parameters.values()
            ]
        release = None
        if setup.releases_gradients:
            release = GradientRelease(parameters, optimizer, setup.config.optimizer)

        kept = [*model.parameters(), *_states(optimizer), *average]
        before = [*kept, *model.buffers(), *tree_leaves(inputs)]
        micro_steps = setup.config.schedule.gradient_accumulation_steps
        with Peak(value for value in before if isinstance(value, Tensor)) as peak:
            for _ in range(micro_steps):
                with nullcontext() if release is None else release.updating():
                    model(**inputs)[0].float().pow(2).mean().backward()
            if release is None:
                gradient_size(parameters.values(), setup.config.optimizer)
                optimizer.step()
            else:
                release.finish()
        return sum(tensor.nbytes for tensor in kept) + peak.most

    def _prepare(
        self, model: Any, setup: StepModel, monkeypatch: pytest.MonkeyPatch
    ) -> dict[str, Any]:
        """Give the transformer its weights, adapter and checkpoints; returns its inputs."""
        config = setup.config

        def dtype_of(path: str, parameter: nn.Parameter) -> torch.dtype:
            if "lora_" in path:
                return DTYPES[setup.trained_dtype]
            if setup.narrows_modulation and setup.cost.fits_bf16(path):
                return torch.bfloat16
            return torch.float32 if setup.cost.stays_float32(path) else DTYPES[setup.dtype]

        hollow(model, dtype_of)
        keep = None
        if self.is_sana:
            layout = SanaVideoAdapter.__new__(SanaVideoAdapter).block_layout(model)
        else:
            layout = Kandinsky5ImageAdapter.__new__(Kandinsky5ImageAdapter).block_layout(model)
            if setup.narrows_modulation:
                narrow(model)
            if model.config["attention_type"] == "nabla":
                attend = compiled_flex.__wrapped__(DTYPES[setup.dtype])
                monkeypatch.setattr(nabla, "choose_attend", lambda *given: attend)
                nabla.install(model)
            if config.speed.speed == "auto":
                fast = blocks.use_fast_blocks(model, blocks.mask_padding(model))
                keep = fast.self_attention
        enable_checkpointing(model.train(), layout, config.precision, dropout=False, keep=keep)
        return self._inputs(model, DTYPES[setup.dtype])

    def _inputs(self, model: Any, dtype: torch.dtype) -> dict[str, Any]:
        if self.is_sana:
            patch = model.config["patch_size"][1]
            return sana_inputs(self.load, model.config["in_channels"], patch, dtype)
        channels = 2 * model.config["in_visual_dim"] + 1  # noisy and given latents, and a mask
        if not model.config["visual_cond"]:
            channels = model.config["in_visual_dim"]
        inputs = kandinsky_inputs(self.load, channels, dtype)
        if model.config["attention_type"] == "nabla":
            shape = tuple(inputs["hidden_states"].shape)
            inputs["sparse_params"] = nabla.sparse_params(
                shape, dict(model.config), torch.device("cpu")
            )
        return inputs

    def _optimizer(self, parameters: Mapping[str, nn.Parameter], setup: StepModel) -> Optimizer:
        """The optimizer with its state, as after an earlier step."""
        optimizer = build_optimizer(
            parameters.values(),
            setup.config.optimizer,
            setup.config.precision.mixed_precision,
            1e-3,
        )
        for group in optimizer.param_groups:
            for option in KERNEL_KEYS:
                if self.kernel is not None and option in group:
                    group[option] = option == self.kernel
        for weight in parameters.values():
            weight.grad = torch.empty_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer


def narrow(model: nn.Module) -> None:
    """Store modulation in bf16; on fake tensors nothing can tell whether that is exact."""
    for name, module in model.named_modules():
        if name.endswith("modulation.out_layer"):
            module.forward = MethodType(blocks.upcast_linear, module)


def _states(optimizer: Optimizer) -> list[Tensor]:
    """The moments of all weights."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor) and value.ndim > 0]
