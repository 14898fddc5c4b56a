"""The planned peak of a step against the measured one, at the sizes of the real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import Kandinsky5Transformer3DModel, SanaVideoTransformer3DModel
from peft import LoraConfig
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models import cost_of
from simpletuner.budget.step_memory import StepModel
from simpletuner.memory.quantisation.layers import QuantisedLinear, linear_layers
from simpletuner.memory.quantisation.scaled_rows import ScaledRows
from simpletuner.models.cost import Adapters, BatchShape, Kernels, TransformerCost
from simpletuner.models.kandinsky5 import blocks, nabla
from simpletuner.models.kandinsky5.cost import IMAGE_COST, VIDEO_COST
from simpletuner.models.kandinsky5.flex import compiled_flex
from simpletuner.models.kandinsky5.image import ROPE, Kandinsky5ImageAdapter
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.models.lora_layers import linear_modules, matching_modules
from simpletuner.models.sanavideo.cost import COST as SANA_COST
from simpletuner.models.sequence import SequenceGroup, TokenSplit
from simpletuner.speed.recomputation import enable_checkpointing
from tests.budget.test_estimate import make_config
from tests.tools.fake_runs import KANDINSKY, SANA, kandinsky_inputs, sana_inputs
from tests.tools.peak_memory import fake_step, hollow, peak_of_step
from tests.tools.tiny import NABLA

BF16 = torch.bfloat16


def train(model: Any, cost: TransformerCost, adapters: Adapters, checkpointed: bool) -> Any:
    """A LoRA on frozen weights, in the dtypes of training."""
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=adapters.rank, target_modules=sorted(adapters.modules)))
    if checkpointed:
        model.enable_gradient_checkpointing(
            lambda block, *rest: checkpoint(block, *rest, use_reentrant=False)
        )
    return model.train()


@pytest.mark.parametrize("checkpointed", [True, False], ids=["checkpointed", "plain"])
@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("t2v-lite-sft-5s", BatchShape(1, 16, 32, 48, 256)),
        ("t2i-lite-sft", BatchShape(2, 1, 64, 64, 128)),
        ("2b-480p", BatchShape(1, 21, 30, 52, 300)),
        ("2b-480p", BatchShape(1, 21, 30, 52, 300, timed_tokens=True)),
    ],
    ids=["lite", "image", "sana", "sana-i2v"],
)
def test_the_planned_peak_equals_the_measured_one(
    name: str, load: BatchShape, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0.95 <= planned_by_metered(name, load, checkpointed, None, monkeypatch) <= 1.1


@pytest.mark.parametrize(
    ("name", "load", "checkpointed", "levels"),
    [
        ("t2v-lite-sft-5s", BatchShape(1, 16, 32, 48, 256), True, torch.int8),
        ("t2i-lite-sft", BatchShape(2, 1, 64, 64, 128), False, torch.float8_e4m3fn),
    ],
    ids=["lite-int8", "image-fp8"],
)
def test_the_planned_peak_of_quantised_products_equals_the_measured_one(
    name: str,
    load: BatchShape,
    checkpointed: bool,
    levels: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 0.95 <= planned_by_metered(name, load, checkpointed, levels, monkeypatch) <= 1.1


# From 7 processes on, the output layer, which all of them compute, takes more memory than a share
# of a block.
@pytest.mark.parametrize("size", [2, 7])
def test_the_planned_peak_of_shared_tokens_equals_the_measured_one(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "all_to_all_single", lambda *arguments, **settings: None)
    load = BatchShape(1, 16, 32, 48, 256)
    assert 0.95 <= planned_by_metered("t2v-lite-sft-5s", load, True, None, monkeypatch, size) <= 1.1


def planned_by_metered(
    name: str,
    load: BatchShape,
    checkpointed: bool,
    levels: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
    sequence: int = 1,
) -> float:
    """Of what is there beside the weights.

    Args:
        levels: of weights that are multiplied as they are stored; None for bf16 weights.
        sequence: processes that share the tokens.
    """
    is_sana = name == "2b-480p"
    family = SANA_COST if is_sana else VIDEO_COST if name.startswith("t2v") else IMAGE_COST
    settings = {**family.published(name), "num_layers" if is_sana else "num_visual_blocks": 3}
    with torch.device("meta"):
        model: Any = (SanaVideoTransformer3DModel if is_sana else Kandinsky5Transformer3DModel)(
            **settings
        )
    cost = cost_of(family, model)
    if levels is not None:
        use_levels(model, levels)
    adapters = Adapters(
        16, frozenset(matching_modules(linear_modules(cost.shapes), SANA if is_sana else KANDINSKY))
    )
    model = train(model, cost, adapters, checkpointed)
    if sequence > 1:
        group = SequenceGroup(0, sequence, None)
        blocks.use_fast_blocks(model, blocks.TextPadding()).self_attention.group = group
        TokenSplit(group, ROPE).attach(list(model.visual_transformer_blocks))
    with fake_step(monkeypatch):
        hollow(model, lambda path, parameter: torch.float32 if cost.stays_float32(path) else BF16)
        metered = peak_of_step(
            model, sana_inputs(load) if is_sana else kandinsky_inputs(load, _channels(settings))
        )
    config = make_config(
        gradient_checkpointing=checkpointed,
        quantized_matmul=levels is not None,
        num_processes=sequence,
        sequence_parallel_size=sequence,
    )
    planned = StepModel(cost, config, adapters).memory(load)
    return (planned.inputs + planned.block + planned.outside) / metered


@pytest.mark.parametrize(
    ("flavour", "load", "checkpointed"),
    [
        ("t2v-pro-sft-5s-hd", BatchShape(1, 31, 32, 48, 256), False),
        ("t2v-lite-sft-10s", BatchShape(1, 61, 32, 48, 256), True),
    ],
    ids=["pro-512-plain", "lite-10s-checkpointed"],
)
def test_the_planned_peak_of_sparse_attention_equals_the_measured_one(
    flavour: str, load: BatchShape, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With flex attention's lists of tiles, and its output kept by checkpoints."""
    settings = {**VIDEO_COST.published(flavour), **NABLA, "num_visual_blocks": 3}
    with torch.device("meta"):
        model: Any = Kandinsky5Transformer3DModel(**settings)
    cost = cost_of(VIDEO_COST, model, Kernels(tile_lists=True))
    adapters = Adapters(16, frozenset(matching_modules(linear_modules(cost.shapes), KANDINSKY)))
    model = train(model, cost, adapters, checkpointed=False)
    config = make_config(gradient_checkpointing=checkpointed, speed="auto")
    with fake_step(monkeypatch):
        monkeypatch.setattr(nabla, "choose_attend", lambda *given: compiled_flex.__wrapped__(BF16))
        hollow(model, lambda path, parameter: torch.float32 if cost.stays_float32(path) else BF16)
        nabla.install(model)
        keep = blocks.use_fast_blocks(model, blocks.mask_padding(model)).self_attention
        layout = Kandinsky5ImageAdapter.__new__(Kandinsky5ImageAdapter).block_layout(model)
        enable_checkpointing(model, layout, config.precision, dropout=False, keep=keep)
        inputs = kandinsky_inputs(load, _channels(settings))
        shape = tuple(inputs["hidden_states"].shape)
        inputs["sparse_params"] = nabla.sparse_params(
            shape, dict(model.config), torch.device("cpu")
        )
        metered = peak_of_step(model, inputs)
    planned = StepModel(cost, config, adapters).memory(load)

    assert 0.95 <= (planned.inputs + planned.block + planned.outside) / metered <= 1.1


def use_levels(model: nn.Module, levels: torch.dtype) -> None:
    """Layers with quantised products, without numbers."""
    for path, layer in list(linear_layers(model, KANDINSKY5_IMAGE.quantised_layers)):
        rows, columns = layer.weight.shape
        scale = torch.empty((rows, 1), dtype=BF16, device="meta")
        packed = {"data": torch.empty((rows, columns), dtype=levels, device="meta"), "scale": scale}
        model.set_submodule(
            path,
            QuantisedLinear(layer, (ScaledRows(rounds_inputs=True, rounds_gradients=True), packed)),
        )


def _channels(settings: dict[str, object]) -> int:
    return 33 if settings["visual_cond"] else 16
