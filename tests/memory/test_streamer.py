"""Streaming changes no number, and copies as little as possible."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from simpletuner.config.schema import OffloadConfig
from simpletuner.memory.offload import attach
from simpletuner.memory.offload.image import plain_tensors
from simpletuner.memory.offload.streamer import in_backward
from simpletuner.memory.quantisation import scaled_rows
from tests.tools.cases import first_of
from tests.tools.streaming import (
    BLOCKS,
    CPU,
    AdversarialCopier,
    Trained,
    assert_equal,
    order,
    to_int8,
    to_packed,
    to_products,
)

KEPT: dict[str, Any] = {"checkpointing": False}
# The compiled block shares its slot with others, so its weights move between slots.
COMPILED: dict[str, Any] = {"compiled": "aot_eager", "blocks": 4}
# The last compiled functions of blocks are outside of the checkpoints.
RECOMPUTING: dict[str, Any] = {**COMPILED, "recomputing": True}


@pytest.fixture(autouse=True)
def adversary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the adversarial copier everywhere in this file."""
    monkeypatch.setattr(attach, "choose_copier", lambda *place, **settings: AdversarialCopier())
    monkeypatch.setattr(scaled_rows, "FEW", 0)  # tiny batches have few tokens


# The first seven run every time: together they have every property of the others.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no checkpointing, pairs": (KEPT, {"group_offload_blocks_per_group": 2}),
    "every third checkpointed, residents": ({"interval": 3}, {"group_offload_resident_blocks": 1}),
    "packed int4, bf16, pairs": (
        {"prepare": to_packed("int4-quanto"), "dtype": torch.bfloat16},
        {"group_offload_blocks_per_group": 2},
    ),
    "packed int8, compiled": (
        {**COMPILED, "compiled": "eager", "prepare": to_packed("int8-quanto")},
        {},
    ),
    "products in int8": ({"prepare": to_products("int8-quanto")}, {}),
    "recomputed by themselves, every second, packed int8, pairs": (
        {**RECOMPUTING, "compiled": "eager", "interval": 2, "prepare": to_packed("int8-quanto")},
        {"group_offload_blocks_per_group": 2},
    ),
    "more slots than blocks": ({}, {"slots": 9}),
    "groups of unequal size": ({}, {"group_offload_blocks_per_group": 4}),
    "one streams": ({}, {"group_offload_resident_blocks": BLOCKS - 1}),
    "leaf level": ({}, {"group_offload_type": "leaf_level"}),
    "no checkpointing": (KEPT, {}),
    "no checkpointing, three slots": (KEPT, {"slots": 3}),
    "no checkpointing, bf16": ({**KEPT, "dtype": torch.bfloat16}, {}),
    "every second checkpointed": ({"interval": 2}, {}),
    "int8, pairs, residents": (
        {"prepare": to_int8},
        {"group_offload_blocks_per_group": 2, "group_offload_resident_blocks": 2},
    ),
    "packed int8, no checkpointing": ({**KEPT, "prepare": to_packed("int8-quanto")}, {}),
    "packed fp8, every second checkpointed": (
        {"interval": 2, "prepare": to_packed("fp8-quanto")},
        {},
    ),
    "products in fp8, no checkpointing": ({**KEPT, "prepare": to_products("fp8-quanto")}, {}),
    "compiled": (COMPILED, {}),
    "recomputed by themselves": (RECOMPUTING, {}),
}


@pytest.mark.slow(1)
@pytest.mark.usefixtures("one_size")
@pytest.mark.parametrize("mode", first_of(MODES, 7))
def test_streamed_training_is_bit_equal_in_every_mode(mode: str) -> None:
    """Also if another thread runs the backward pass, as on a GPU."""
    model, offload = MODES[mode]
    torch._dynamo.reset()  # graphs of earlier tests would count towards the limit
    streamed = Trained(**model)
    if model.get("compiled") == "eager":  # computes the same as without a compiler
        plain = Trained(**{**model, "compiled": None})
    else:
        plain = Trained(**model)
    expected = plain.step()
    streamer = streamed.offloaded(**offload)

    def backward_in_a_thread(loss: Tensor) -> None:
        before = counters["stats"]["unique_graphs"]
        with ThreadPoolExecutor(1) as autograd:
            autograd.submit(loss.backward).result()
        # Only for fast blocks, since a run does not compile stock blocks as a whole.
        assert streamed.fast is None or counters["stats"]["unique_graphs"] == before

    for number in range(3):
        # Other memory behind a weight must not cause a recompilation.
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            backward = Tensor.backward if number == 1 else backward_in_a_thread
            assert_equal(streamed.step(backward), expected)
            # Not with aot_eager, which takes twice as long as "eager".
            if number == 0 and model.get("compiled") != "aot_eager":
                assert torch.equal(streamed.sample(), plain.sample()), "sampling between steps"

    assert order(streamer), "without copies, the test would prove nothing"


@pytest.mark.parametrize("checkpointing", [True, False])
def test_streaming_from_disk_is_bit_equal(tmp_path: Path, checkpointing: bool) -> None:
    plain = Trained(checkpointing=checkpointing)
    streamed = Trained(checkpointing=checkpointing)
    folder = tmp_path / "new" / "folder"
    streamed.offloaded(group_offload_to_disk_path=str(folder))

    assert_equal(streamed.step(), plain.step())
    assert torch.equal(streamed.sample(), plain.sample())
    assert list(folder.iterdir()) == [], "no file stays behind, however the run ends"


@pytest.mark.parametrize("settings", [{}, KEPT])
def test_copies_run_in_the_order_of_computation(settings: dict[str, Any]) -> None:
    trained = Trained(**settings)
    streamer = trained.offloaded()
    trained.predict().mean().backward()

    assert order(streamer) == [0, 1, 2, 3, 4, 5, 3, 2, 1, 0]

    trained.predict().mean().backward()
    assert order(streamer) == [2, 3, 4, 5, 3, 2, 1, 0]


@pytest.mark.parametrize("settings", [{}, KEPT])
def test_groups_below_the_first_trained_block_are_copied_once(settings: dict[str, Any]) -> None:
    """From the second step on, which knows where the backward pass ends."""
    last = r"visual_transformer_blocks\.[34]\..*to_query"
    trained = Trained(targets=last, **settings)
    streamer = trained.offloaded()
    for _ in range(2):
        trained.step()
    order(streamer)

    assert_equal(trained.step(), Trained(targets=last, **settings).step())
    assert order(streamer) == [1, 2, 3, 4, 5, 0], "the last one is for the next step"


@pytest.mark.parametrize(("slots", "size"), [(2, 1), (3, 1), (2, 2), (2, 3), (4, 1), (6, 1)])
def test_a_step_copies_every_group_outside_the_slots_twice(slots: int, size: int) -> None:
    trained = Trained()
    streamer = trained.offloaded(slots=slots, group_offload_blocks_per_group=size)
    groups = BLOCKS // size
    trained.step()
    order(streamer)
    for _ in range(2):
        trained.step()
        assert len(order(streamer)) == 2 * (groups - slots)


def test_sampling_prefetches_the_first_group_after_the_last() -> None:
    trained = Trained()
    streamer = trained.offloaded()
    trained.sample()

    assert order(streamer) == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0]

    trained.step()
    assert order(streamer) == [1, 2, 3, 4, 5, 3, 2, 1, 0], "what sampling left is used"


def test_the_adversarial_copier_detects_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained()
    trained.offloaded()
    monkeypatch.setattr(AdversarialCopier, "wait", lambda copier, copy: None)

    assert trained.predict().isnan().all()


def test_the_adversarial_copier_detects_weights_saved_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attach, "SlotReferences", lambda streamer: nullcontext())
    plain = Trained(**KEPT)
    streamed = Trained(**KEPT)
    streamed.offloaded()
    actual = streamed.step()
    expected = plain.step()

    assert any(not torch.equal(actual[name], expected[name]) for name in actual)


@pytest.mark.parametrize(
    ("checkpointing", "prepare"), [(True, None), (False, None), (True, to_int8)]
)
def test_a_block_computes_with_the_weights_in_its_slot(
    monkeypatch: pytest.MonkeyPatch,
    checkpointing: bool,
    prepare: Callable[[nn.Module], None] | None,
) -> None:
    """The weights of the computing block are in a slot; of others, only what is not yet evicted."""
    trained = Trained(prepare=prepare, checkpointing=checkpointing)
    streamer = trained.offloaded()
    weights = [
        [leaf for tensor in image.tensors for leaf in plain_tensors(tensor)]
        for image in streamer.images
    ]
    slots = {slot.untyped_storage().data_ptr() for slot in streamer.slots}
    seen: list[set[int]] = []

    def look(module: nn.Module, inputs: Any) -> None:
        places = [
            {leaf.untyped_storage().data_ptr() in slots for leaf in group} for group in weights
        ]
        assert all(len(place) == 1 for place in places), "a group is in slots, or it is not"
        seen.append({index for index, place in enumerate(places) if True in place})

    for block in trained.layout.blocks:
        next(block.children()).register_forward_pre_hook(look)
    trained.step()

    assert seen[:BLOCKS] == [{0}, {1}, {2}, {3}, {4}, {4, 5}]
    assert seen[BLOCKS:] == ([{4, 5}, {4}, {3}, {2}, {1}, {0, 1}] if checkpointing else [])


@pytest.mark.parametrize("prepare", [None, to_int8])
def test_streaming_changes_neither_names_nor_the_state_dict(
    prepare: Callable[[nn.Module], None] | None,
) -> None:
    plain = Trained(prepare=prepare)
    streamed = Trained(prepare=prepare)
    before = {name: id(parameter) for name, parameter in streamed.model.named_parameters()}
    streamed.offloaded()
    for moment in (lambda: None, streamed.step, streamed.sample):
        moment()
        assert {
            name: id(parameter) for name, parameter in streamed.model.named_parameters()
        } == before
        actual = streamed.model.state_dict()
        expected = plain.model.state_dict()
        assert list(actual) == list(expected), "names and their order"
        for name, value in expected.items():
            values = [
                getattr(tensor, "dequantize", lambda tensor=tensor: tensor)()
                for tensor in (actual[name], value)
            ]
            assert torch.equal(*values), name


def test_trained_weights_are_never_streamed() -> None:
    trained = Trained()
    addresses = [weight.data_ptr() for weight in trained.lora_weights()]
    streamer = trained.offloaded()
    trained.step()

    assert [weight.data_ptr() for weight in trained.lora_weights()] == addresses

    streamed = {id(tensor) for image in streamer.images for tensor in image.tensors}
    assert not streamed & {id(weight) for weight in trained.lora_weights()}


def test_moving_the_model_leaves_streamed_weights_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`to` skips streamed weights, also if a pipeline calls it, and moves all others."""
    plain = Trained()
    trained = Trained()
    streamer = trained.offloaded()
    trained.step()
    moved: list[int] = []
    trained.model._apply(lambda tensor: (moved.append(id(tensor)), tensor)[1])
    streamed = {id(tensor) for image in streamer.images for tensor in image.tensors}

    assert streamed
    assert not streamed & set(moved)
    assert {id(weight) for weight in trained.lora_weights()} <= set(moved)

    trained.model.to(torch.float64)
    assert {weight.dtype for weight in trained.lora_weights()} == {torch.float64}

    trained.model.to(torch.float32)
    assert list(trained.model.state_dict()) == list(plain.model.state_dict())
    assert_equal(trained.step(), plain.step())


def test_waits_are_reported_once() -> None:
    trained = Trained()
    streamer = trained.offloaded()
    trained.step()

    assert streamer.waited() > 0
    assert streamer.waited() == 0


def test_torchs_private_function_detects_the_backward_pass() -> None:
    """`torch._C._current_graph_task_id` is -1 outside the autograd engine, and the engine's number
    inside.
    """
    seen: list[bool] = []
    value = torch.ones(2, requires_grad=True)
    product = value * 2
    product.register_hook(lambda gradient: seen.append(in_backward()))

    assert not in_backward()

    product.sum().backward()
    assert seen == [True]
    assert not in_backward()


NO_STREAM = "group_offload_use_stream has no effect: the compute device is not a CUDA device."
ONE_GROUP = (
    f"group_offload_blocks_per_group: 9 is more than the {BLOCKS} blocks that stream; "
    "they form one group."
)


@pytest.mark.parametrize(
    ("settings", "warnings"),
    [
        ({}, []),
        ({"group_offload_use_stream": True}, [NO_STREAM]),
        ({"group_offload_blocks_per_group": BLOCKS}, []),
        ({"group_offload_blocks_per_group": 9}, [ONE_GROUP]),
    ],
)
def test_only_settings_without_effect_are_warned_about(
    settings: dict[str, Any], warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    attach._warn_once.cache_clear()

    Trained().offloaded(**settings)

    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == (
        warnings
    )


def test_offloading_without_blocks_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    trained = Trained()
    blocks = attach.streamed_blocks(trained.layout.blocks, BLOCKS)

    offload = attach.Offload(OffloadConfig(enable_group_offload=True), CPU)

    assert offload.attach(trained.model, blocks, keeps_saved=False) is None
    assert caplog.messages == [
        "group_offload_resident_blocks covers every block: nothing is left to offload."
    ]
