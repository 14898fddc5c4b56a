"""The memory model: peaks of published models, optimizer states, and what each switch saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import nn

from simpletuner.budget.device import Device, rates_of
from simpletuner.budget.step_cost import Step
from simpletuner.budget.step_memory import StepModel
from simpletuner.config.load import Layer, resolve
from simpletuner.config.optimizers import OPTIMIZERS
from simpletuner.config.schema import OptimizerName, RunConfig
from simpletuner.config.speed import checkpointed_blocks
from simpletuner.errors import Problems
from simpletuner.models.cost import (
    BYTES,
    NO_ADAPTERS,
    Adapters,
    BatchShape,
    FamilyCost,
    Kernels,
    TransformerCost,
)
from simpletuner.models.kandinsky5.cost import IMAGE_COST, VIDEO_COST
from simpletuner.models.lora_layers import linear_modules, matching_modules
from simpletuner.models.sanavideo.cost import COST as SANA_COST
from simpletuner.training.update import build_optimizer

KANDINSKY = ["to_query", "to_key", "to_value"]
SANA = ["to_q", "to_k", "to_v", "to_out.0"]


def lora(cost: TransformerCost, targets: list[str]) -> StepModel:
    """A bf16 model with float32 adapters of rank 16 and AdamW, as in the metered runs below."""
    adapters = Adapters(16, frozenset(matching_modules(linear_modules(cost.shapes), targets)))
    config = make_config(
        optimizer="adamw", validation_torch_compile=False, group_offload_use_stream=True
    )
    return StepModel(cost, config, adapters)


def full(cost: TransformerCost, **settings: object) -> StepModel:
    """A full fine-tune."""
    return StepModel(cost, make_config(model_type="full", **settings))


def make_config(**settings: object) -> RunConfig:
    """Settings of a run with diffusers' own code."""
    values = {
        "model_type": "lora",
        "model_family": "kandinsky5-video",
        "speed": "reference",
        **settings,
    }
    problems = Problems()
    config = resolve([Layer("config.json", list(values.items()))], problems)
    assert not problems, problems
    return config


def under(model: StepModel, **settings: object) -> StepModel:
    """A model under changed settings."""
    return replace(model, config=model.config.with_values(settings, "test"))


# Metered peaks in GB: weights resident, blocks streamed through two slots (there the few text
# blocks stayed on the device; the engine streams them, too), and block inputs on the host.
PEAKS: list[tuple[str, FamilyCost, str, list[str], BatchShape, float, float, float]] = [
    (
        "lite",
        VIDEO_COST,
        "t2v-lite-sft-5s",
        KANDINSKY,
        BatchShape(1, 16, 32, 48, 256),
        10.4,
        6.3,
        3.7,
    ),
    (
        "image",
        IMAGE_COST,
        "t2i-lite-sft",
        KANDINSKY,
        BatchShape(1, 1, 64, 64, 256),
        15.3,
        2.95,
        2.0,
    ),
    (
        "pro",
        VIDEO_COST,
        "t2v-pro-sft-5s-hd",
        KANDINSKY,
        BatchShape(1, 31, 32, 48, 256),
        80,
        40,
        17.7,
    ),
    (
        "pro-hd",
        VIDEO_COST,
        "t2v-pro-sft-5s-hd",
        KANDINSKY,
        BatchShape(1, 31, 48, 80, 256),
        134,
        94,
        38,
    ),
    ("sana", SANA_COST, "2b-480p", SANA, BatchShape(1, 21, 30, 52, 300), 15.9, 12.2, 9.8),
]


def late(cost: TransformerCost) -> StepModel:
    """A LoRA on the late half of the 32 visual blocks of Lite."""
    return lora(
        cost, [f"visual_transformer_blocks.{n}.self_attention.to_query" for n in range(16, 32)]
    )


def test_blocks_below_the_first_trained_one_keep_and_compute_no_gradient() -> None:
    cost = VIDEO_COST.of_flavour("t2v-lite-sft-5s", attention_type="regular")
    load = BatchShape(1, 16, 32, 48, 256)
    steps = [Step(model, load, H100) for model in (lora(cost, KANDINSKY), late(cost))]
    whole, half = steps

    assert half.memory.inputs == pytest.approx(whole.memory.inputs / 2)
    assert sum(half.model.checkpointed) == 16
    # Forward 1, backward 2 and recomputation 1 of all blocks; the last two of half of them.
    assert half.cost.executed.total == pytest.approx(whole.cost.executed.total * 2 / 3, rel=0.1)
    assert half.cost.seconds < 0.7 * whole.cost.seconds


def test_streamed_blocks_below_the_first_trained_one_are_copied_once() -> None:
    cost = VIDEO_COST.of_flavour("t2v-lite-sft-5s", attention_type="regular")
    load = BatchShape(1, 1, 4, 4, 16)
    whole, half = (
        Step(under(model, enable_group_offload=True), load, H100).cost.copying
        for model in (lora(cost, KANDINSKY), late(cost))
    )

    assert half / whole == pytest.approx((32 + 15) / (32 + 32))


@pytest.mark.parametrize(
    ("family", "flavour", "targets", "load", "resident", "streamed", "on_host"),
    [row[1:] for row in PEAKS],
    ids=[row[0] for row in PEAKS],
)
def test_estimates_match_metered_peaks_of_published_models(
    family: FamilyCost,
    flavour: str,
    targets: list[str],
    load: BatchShape,
    resident: float,
    streamed: float,
    on_host: float,
) -> None:
    cost = family.of_flavour(flavour, attention_type="regular")
    setup = lora(cost, targets)
    through_slots = under(setup, enable_group_offload=True)
    # In the metered runs, the text blocks stayed on the device; the engine streams them too.
    text_blocks = sum(cost.block_bytes("bf16", quantised=0.0)[: -cost.large]) / 1e9

    for model, metered in (
        (setup, resident),
        (through_slots, streamed),
        (under(through_slots, offload_block_inputs=True), on_host),
    ):
        planned = model.memory(load).total / 1e9
        on_device = text_blocks if model.streamed_blocks else 0.0
        assert planned <= metered * 1.05
        assert metered <= (planned + on_device) * 1.05


@pytest.fixture
def lite() -> TransformerCost:
    return VIDEO_COST.of_flavour("t2v-lite-sft-5s")


LOAD = BatchShape(1, 16, 32, 48, 256)


def test_checkpointed_block_keeps_only_its_input(lite: TransformerCost) -> None:
    setup = lora(lite, KANDINSKY)
    unit = LOAD.tokens * lite.hidden * 2
    assert setup.memory(LOAD).inputs == 32 * unit
    kept = under(setup, speed="auto", speed_keep_attention=True).memory(LOAD).inputs
    assert kept / 32 / unit == pytest.approx(2.0, rel=0.05)


def test_checkpointing_interval_matches_the_step(lite: TransformerCost) -> None:
    setup = lora(lite, KANDINSKY)
    assert sum(setup.checkpointed) == 32
    # Two text blocks come first; of the 34 those with an even number are checkpointed.
    assert sum(under(setup, gradient_checkpointing_interval=2).checkpointed) == 16
    assert sum(under(setup, gradient_checkpointing=False).checkpointed) == 0


def test_kept_blocks_are_not_checkpointed(lite: TransformerCost) -> None:
    setup = lora(lite, KANDINSKY)
    all_blocks = len(lite.blocks)
    for kept in range(all_blocks + 1):
        chosen = checkpointed_blocks(all_blocks, 1, kept)
        assert chosen.count(False) == kept
        assert under(setup, gradient_checkpointing_kept_blocks=kept).checkpointed == chosen[2:], (
            "two text blocks come first"
        )

    assert checkpointed_blocks(6, 1, 2) == [True, True, False, True, True, False]


@pytest.mark.parametrize(
    ("family", "flavour", "targets", "load", "stock", "compiled"),
    [
        ("kandinsky", "t2v-lite-sft-5s", KANDINSKY, LOAD, 24.2, 17.3),
        ("sana", "2b-480p", SANA, BatchShape(1, 21, 30, 52, 300), 51.1, 21.1),
    ],
)
def test_compiled_block_saves_less(
    family: str, flavour: str, targets: list[str], load: BatchShape, stock: float, compiled: float
) -> None:
    """The expected numbers are in tensors of the hidden states' size."""
    costs = {"kandinsky": VIDEO_COST, "sana": SANA_COST}[family]
    ratios = []
    for kernels in (Kernels(), Kernels(compiled=True)):
        cost = costs.of_flavour(flavour, kernels)
        saved = cost.activations(load, 2, lora(cost, targets).adapters).saved
        ratios.append(saved / (load.tokens * cost.hidden * 2))
    full_stock = costs.of_flavour(flavour).activations(load, 2, NO_ADAPTERS).saved
    full_compiled = cost.activations(load, 2, NO_ADAPTERS).saved

    assert ratios == pytest.approx([stock, compiled], rel=0.02)
    assert full_stock == full_compiled, "only a LoRA's blocks were measured"
    assert full_stock > stock * load.tokens * cost.hidden * 2, "trained weights need more"


def test_compiled_kernels_move_fewer_bytes() -> None:
    # In tensors of the hidden states' size. A LoRA on four layers of every token adds 3 to a pass.
    load = BatchShape(1, 16, 32, 48, 256)
    moved = []
    for kernels in (Kernels(), Kernels(compiled=True)):
        cost = VIDEO_COST.of_flavour("t2v-lite-sft-5s", kernels)
        activations = cost.activations(load, 2, lora(cost, KANDINSKY).adapters)
        unit = load.tokens * cost.hidden * 2
        moved.append((activations.forward / unit, activations.backward / unit))
        assert activations.traffic / unit == pytest.approx(185, rel=0.02), (
            "previews that are not compiled"
        )

    assert moved == [pytest.approx((185, 371), rel=0.02), pytest.approx((42, 57), rel=0.03)]


H100 = Device("H100", 80e9, None, True, rates_of("H100"), "")


def test_gpu_step_takes_the_longer_of_kernels_and_launches() -> None:
    load = BatchShape(1, 16, 32, 48, 256)

    def lite_without_recomputation(kernels: Kernels) -> StepModel:
        cost = VIDEO_COST.of_flavour("t2v-lite-sft-5s", kernels)
        return under(lora(cost, KANDINSKY), gradient_checkpointing=False)

    model = lite_without_recomputation(Kernels(compiled=True))
    stock = Step(lite_without_recomputation(Kernels()), load, H100)
    compiled = Step(model, load, H100)
    compiled_previews = Step(under(model, validation_torch_compile=True), load, H100)

    # 1.66 s: calculated by hand for Lite on an H100 in 16 bits.
    assert compiled.cost.seconds == pytest.approx(1.66, rel=0.15)
    assert stock.cost.seconds > 1.2 * compiled.cost.seconds
    assert compiled_previews.forward_seconds < compiled.forward_seconds


def test_cpu_step_takes_the_sum_of_kernels_and_launches() -> None:
    load = BatchShape(1, 1, 8, 8, 16)
    cost = IMAGE_COST.of_flavour("t2i-lite-sft")
    machine = replace(H100, is_gpu=False)
    step_cost = Step(lora(cost, KANDINSKY), load, machine).cost
    assert step_cost.seconds == step_cost.computing + step_cost.launching
    on_gpu = Step(lora(cost, KANDINSKY), load, H100).cost
    assert on_gpu.seconds == on_gpu.launching > on_gpu.computing


def test_tile_lists_take_less_memory_than_masks() -> None:
    load = BatchShape(1, 31, 32, 48, 256)

    def saved(kernels: Kernels, **settings: str) -> float:
        cost = VIDEO_COST.of_flavour("t2v-pro-sft-10s-hd", kernels, **settings)
        return cost.activations(load, 2, NO_ADAPTERS).saved

    dense = saved(Kernels(), attention_type="regular")
    tiles = saved(Kernels(tile_lists=True))
    masks = saved(Kernels())

    # 31 * 32 * 48 tokens are 744 tiles of 64; there are 32 heads. A GPU has a boolean for every
    # pair of tiles and head, a CPU a mask of 64 numbers in 16 bits.
    assert tiles - dense == 744**2 * 32
    assert masks - dense == 64 * 2 * 744**2 * 32


def test_resident_blocks_take_their_bytes_up_to_all_blocks(lite: TransformerCost) -> None:
    streamed = under(lora(lite, KANDINSKY), enable_group_offload=True)
    blocks = lite.block_bytes("bf16", quantised=0.0)
    five = under(streamed, group_offload_resident_blocks=5)
    half = under(streamed, group_offload_resident_blocks=17)  # of 34
    all_blocks = under(streamed, group_offload_resident_blocks=99)
    resident = under(streamed, enable_group_offload=False)

    assert five.frozen_bytes - streamed.frozen_bytes == pytest.approx(5 * max(blocks))
    assert all_blocks.frozen_bytes == pytest.approx(resident.frozen_bytes)
    assert streamed.streamed_bytes == sum(blocks)
    assert half.streamed_bytes == pytest.approx(streamed.streamed_bytes / 2)
    assert all_blocks.streamed_bytes == 0


def test_block_inputs_are_on_the_device_or_the_host(lite: TransformerCost) -> None:
    setup = lora(lite, KANDINSKY)
    moved = under(setup, offload_block_inputs=True)
    gone = setup.memory(LOAD).inputs - moved.memory(LOAD).inputs

    assert moved.inputs_on_host_bytes(LOAD) == pytest.approx(gone)
    assert setup.inputs_on_host_bytes(LOAD) == 0


def test_int8_halves_linear_weights(lite: TransformerCost) -> None:
    setup = lora(lite, KANDINSKY)
    quantised = under(setup, base_model_precision="int8-quanto")
    numbers = 0
    for name, (outputs, inputs) in linear_modules(lite.shapes).items():
        # Modulation stays in 16 bits.
        if "blocks." in name and "mod" not in name:
            numbers += outputs * inputs

    # One byte instead of two.
    assert setup.frozen_bytes - quantised.frozen_bytes == pytest.approx(numbers, rel=0.01)


def test_full_fine_tune_trains_every_weight(lite: TransformerCost) -> None:
    model = full(lite, optimizer="adamw_bf16")
    # Kandinsky computes modulation in float32, and so trains it in float32.
    wide = lite.float32_parameters
    narrow = lite.parameters - wide
    assert wide == pytest.approx(0.279e9, rel=0.01)
    assert model.frozen_bytes == 0
    assert model.trained_bytes == narrow * (2 + 8) + wide * (4 + 8)
    assert model.gradient_bytes == narrow * 2 + wide * 4
    assert model.checkpoint_bytes(copies=1) == model.trained_bytes


@pytest.mark.parametrize("place", ["device", "host"])
def test_moving_average_is_counted_where_it_is_kept(
    lite: TransformerCost, place: Literal["device", "host"]
) -> None:
    plain = full(lite)
    averaged = under(plain, use_ema=True, ema_device="cpu" if place == "host" else "accelerator")
    more = averaged.trained_bytes - plain.trained_bytes
    assert more == (4 * lite.parameters if place == "device" else 0)
    elsewhere: Literal["device", "host"] = "host" if place == "device" else "device"
    memory = averaged.average_memory(place)
    assert (memory.kept, memory.waiting) == (4 * lite.parameters, plain.trained_weights)
    assert averaged.checkpoint_bytes(1) - plain.checkpoint_bytes(1) == (
        4 * lite.parameters + plain.trained_weights
    )
    assert averaged.average_memory(elsewhere).kept == plain.average_memory(place).kept == 0


def test_full_model_is_saved_shard_by_shard(lite: TransformerCost) -> None:
    pro = VIDEO_COST.of_flavour("t2v-pro-sft-5s-hd")
    model = full(lite)

    assert model.saving_bytes == model.trained_weights < 5e9
    assert replace(model, cost=pro).saving_bytes == 5e9 < 2 * pro.parameters


@pytest.mark.parametrize(
    ("name", "is_full", "bytes_per_number"),
    [
        ("adamw", True, 0),
        ("torch-rmsprop", True, 0),
        ("optimi-lion", True, 0),
        ("adamw_schedulefree", True, 4),
        ("adamw", False, 0),
        ("torch-rmsprop", False, 8),
        ("optimi-lion", False, 2),
        ("adamw_bf16", False, 0),
    ],
)
def test_temporaries_of_an_update_are_counted(
    lite: TransformerCost, name: OptimizerName, is_full: bool, bytes_per_number: int
) -> None:
    """They are needed after the backward pass, when its activations are freed.

    The bytes per number are metered in `tests/training/test_optimizers.py`.
    """
    setup = lora(lite, KANDINSKY)
    if is_full:
        setup = replace(setup, adapters=NO_ADAPTERS)
    updated = under(setup, optimizer=name)
    assert updated.update_tensors * BYTES[updated.trained_dtype] == bytes_per_number
    memory = updated.memory(LOAD)
    # A full fine-tune with an optimizer of float32 weights has its peak there.
    is_peak = name == "adamw_schedulefree"
    assert memory.update == (bytes_per_number * lite.parameters if is_peak else 0)
    assert (memory.inputs == memory.block == memory.outside == 0) == is_peak


TRIED: list[OptimizerName] = [
    "adamw_bf16",
    "adamw",
    "torch-adam",
    "torch-rmsprop",
    "torch-adagrad",
    "torch-sgd",
    "optimi-lion",
    "optimi-adan",
    "optimi-stableadamw",
    "optimi-sgd",
    "optimi-ranger",
]


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, "") for name in TRIED), ("adamw_bf16", "beta2=.99"), ("optimi-adan", "beta3=.999")],
)
def test_state_bytes_equal_those_of_the_real_optimizer(
    lite: TransformerCost, name: OptimizerName, settings: str
) -> None:
    config = make_config(optimizer=name, optimizer_config=settings)
    dtype = torch.bfloat16 if OPTIMIZERS[name].keeps_bf16 else torch.float32
    weight = nn.Parameter(torch.randn(256, 64, dtype=dtype))
    optimizer = build_optimizer(
        [weight], config.optimizer, mixed_precision="bf16", learning_rate=1e-3
    )
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    tensors = [
        tensor
        for tensor in optimizer.state[weight].values()
        if isinstance(tensor, torch.Tensor) and tensor.ndim > 1
    ]

    assert (
        StepModel(lite, config).state_bytes("bf16" if dtype == torch.bfloat16 else "fp32")
        == sum(tensor.nbytes for tensor in tensors) / weight.numel()
    )


def test_gradients_appear_while_activations_go(lite: TransformerCost) -> None:
    """The peak is at the last block with many tokens, at the first with few."""
    model = full(lite, gradient_checkpointing=False)
    many = model.memory(LOAD)
    few = model.memory(BatchShape(1, 1, 8, 8, 64))

    unit = max(model.block_gradients)
    assert many.gradients < 2 * unit
    assert few.gradients == pytest.approx(model.gradient_bytes)
    activations = model.activations(LOAD)
    assert many.inputs == pytest.approx(sum(block.saved + block.held for block in activations))


@pytest.mark.parametrize(
    "settings", [{"gradient_accumulation_steps": 2}, {"num_processes": 2}], ids=["steps", "ddp"]
)
def test_gradients_of_earlier_passes_and_buckets_are_there_all_the_time(
    lite: TransformerCost, settings: dict[str, object]
) -> None:
    model = full(lite, gradient_checkpointing=False, **settings)

    assert model.memory(LOAD).gradients == model.gradient_bytes
    assert model.bucket_bytes == (model.gradient_bytes if "num_processes" in settings else 0)


def test_released_gradients_are_those_of_one_block(lite: TransformerCost) -> None:
    released = {
        "optimizer_release_gradients": True,
        "max_grad_norm": 1.0,
        "grad_clip_method": "value",
    }
    model = full(lite, **released)
    outside = model.gradient_bytes - sum(model.block_gradients)

    assert model.memory(LOAD).gradients == pytest.approx(max(model.block_gradients) + outside)


@pytest.mark.parametrize(
    ("flavour", "gigabytes"),
    [("t2v-lite-sft-5s", 0.55), ("t2i-lite-sft", 1.22), ("t2v-pro-sft-5s-hd", 4.75)],
)
def test_frozen_modulation_that_fits_bf16_takes_half(flavour: str, gigabytes: float) -> None:
    cost = VIDEO_COST.of_flavour(flavour)
    stored = under(lora(cost, KANDINSKY), speed="auto")
    unknown = replace(stored, cost=replace(cost, modulation=frozenset()))

    assert unknown.frozen_bytes - stored.frozen_bytes == pytest.approx(gigabytes * 1e9, rel=0.02)
    assert under(stored, speed="reference").frozen_bytes == unknown.frozen_bytes
    adapted = lora(cost, [*KANDINSKY, "visual_modulation.out_layer"])
    assert under(adapted, speed="auto").frozen_bytes == unknown.frozen_bytes
    trained = replace(stored, adapters=NO_ADAPTERS)
    assert trained.trained_bytes == replace(unknown, adapters=NO_ADAPTERS).trained_bytes
