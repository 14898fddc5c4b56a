"""Every fast path against `speed: reference`: equal losses, gradients and runs."""

from __future__ import annotations

import gc
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from simpletuner.diffusion.batch import Batch
from simpletuner.models.adapter import FamilyAdapter, TextRequest
from simpletuner.models.kandinsky5 import nabla
from simpletuner.run.settings import assembly_settings
from simpletuner.speed.recomputation import Recomputed, SavedAsRecipes
from simpletuner.training.assemble import assemble, make_accelerator
from simpletuner.training.losses import Losses
from simpletuner.training.settings import TrainingSpec
from simpletuner.training.state import Assembly
from simpletuner.training.step import micro_loss, noisy_batch, run_micro_step
from tests.models.test_nabla import differentiable_flex
from tests.tools import families
from tests.tools.families import make_video_adapter
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import Workspace

CPU = torch.device("cpu")
ALL_LINEAR = r".*blocks\.\d+\.((self|cross)_attention\.(to_\w+|out_layer)|feed_forward\.\w+_layer)"
CASES = ["t2i", "i2i", "t2v", "i2v", "nabla"]


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path, i2i_checkpoint: Path
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("video")
    made = {task: make_checkpoint(folder / task, task) for task in ("t2v", "i2v")}
    made["nabla"] = make_checkpoint(folder / "nabla", "t2v", nabla=True)
    return {**made, "t2i": t2i_checkpoint, "i2i": i2i_checkpoint}


def make_adapter(checkpoint: Path, case: str) -> FamilyAdapter:
    if case in ("t2i", "i2i"):
        return families.make_adapter(checkpoint, case)
    return make_video_adapter(checkpoint, "i2v" if case == "i2v" else "t2v")


def make_assembly(checkpoint: Path, case: str, targets: Any = None, **settings: Any) -> Assembly:
    settings = {"mixed_precision": "no", "learning_rate": 1e-2, **settings}
    config = families.make_config(checkpoint, **settings)
    intent = TrainingSpec(
        lora_targets=targets or ["to_query", "to_key", "to_value"],
        seed=3,
        total_steps=10,
        learning_rate=1e-2,
    )
    assembly = assemble(
        assembly_settings(config, intent), make_adapter(checkpoint, case), [], make_accelerator()
    )
    assembly.transformer.train()
    return assembly


def make_batch(checkpoint: Path, case: str) -> Batch:
    """One clip for block-sparse attention, else two samples of unequal captions, so that one is
    padded.
    """
    return deepcopy(_batch(checkpoint, case))


@cache
def _batch(checkpoint: Path, case: str) -> Batch:
    captions = ["a ball"] if case == "nabla" else ["a star", "two blue circles on a table"]
    source = families.picture(64, 64) if case == "i2i" else None
    encoder = make_adapter(checkpoint, case).load_text_encoder(CPU, torch.float32)
    embeds = encoder.encode([TextRequest(caption, source) for caption in captions])
    size = {"t2i": (1, 8, 8), "i2i": (1, 8, 8), "nabla": (2, 32, 32)}.get(case, (3, 4, 6))
    latents = torch.randn(len(captions), 16, *size, generator=torch.Generator().manual_seed(0))
    condition = latents[:, :, :1] if case in ("i2i", "i2v") else None
    return Batch(latents, embeds, captions, condition=condition)


def loss_and_gradients(assembly: Assembly, batch: Batch) -> dict[str, Tensor]:
    losses = Losses()
    run_micro_step(assembly, batch, 0, 0, losses)
    gradients = {
        name: parameter.grad
        for name, parameter in assembly.parameters.items()
        if parameter.grad is not None
    }
    assert len(gradients) == len(assembly.parameters)
    return {"loss": losses[0].total, **gradients}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert any(gradient.any() for gradient in actual.values())
    for name, value in actual.items():
        assert torch.equal(expected[name], value), name


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_auto_equals_reference(checkpoints: dict[str, Path], case: str, precision: str) -> None:
    batch = make_batch(checkpoints[case], case)
    settings = {"mixed_precision": precision, "targets": ALL_LINEAR}
    stock = loss_and_gradients(
        make_assembly(checkpoints[case], case, speed="reference", **settings), batch
    )
    auto = make_assembly(checkpoints[case], case, **settings)

    assert_equal(stock, loss_and_gradients(auto, batch))


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "full"},
        {"lora_dropout": 0.2},
        {"gradient_checkpointing_interval": 2},
        {"use_dora": True},
    ],
    ids=["full", "dropout", "interval", "dora"],
)
def test_other_training_settings_equal_the_reference(
    checkpoints: dict[str, Path], settings: dict[str, Any]
) -> None:
    batch = make_batch(checkpoints["t2i"], "t2i")
    stock = loss_and_gradients(
        make_assembly(checkpoints["t2i"], "t2i", speed="reference", **settings), batch
    )
    auto = make_assembly(checkpoints["t2i"], "t2i", **settings)

    assert_equal(stock, loss_and_gradients(auto, batch))


class CountedAttention(TorchDispatchMode):
    """Counts how often attention is computed."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("keep", "again"), [(True, 0), (False, 1)])
@pytest.mark.parametrize(("case", "calls"), [("t2i", 1), ("nabla", 8)])
def test_kept_attention_is_not_computed_again(
    checkpoints: dict[str, Path], case: str, calls: int, keep: bool, again: int
) -> None:
    """The calls of attention in a step of one text block and two visual blocks.

    Every visual block has a self-attention and a cross-attention, computed forward and again
    backward. Sparse self-attention is one call, or one for the queries of each of eight tiles.
    """
    assembly = make_assembly(checkpoints[case], case, speed_keep_attention=keep)
    batch = make_batch(checkpoints[case], case)
    with CountedAttention() as counted:
        loss_and_gradients(assembly, batch)

    assert counted.calls == 2 * (1 + 2) + 2 * calls * (1 + again)


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Block-sparse attention as on a GPU; returns the queries of each call."""
    attend = differentiable_flex(monkeypatch)
    queries: list[int] = []

    def counted(query: Tensor, *others: Tensor) -> Tensor:
        queries.append(query.shape[1])
        return attend(query, *others)

    monkeypatch.setattr(nabla, "choose_attend", lambda *given: counted)
    return queries


@pytest.mark.parametrize("keep", [True, False])
def test_the_output_of_flex_attention_is_kept(
    checkpoints: dict[str, Path], flex: list[int], keep: bool
) -> None:
    """One call per block, and again in the backward pass unless the output is kept."""
    batch = make_batch(checkpoints["nabla"], "nabla")
    results = []
    for settings in ({"speed_keep_attention": keep}, {"gradient_checkpointing": False}):
        results.append(
            loss_and_gradients(make_assembly(checkpoints["nabla"], "nabla", **settings), batch)
        )

    assert flex == [512] * ((2 if keep else 4) + 2)
    assert_equal(*results)


# of the tiny models, and of a clip
BLOCKS = 2
WIDTH = 32
HEADS = 2
TILES = 8


def test_keeping_costs_one_tensor_per_block(checkpoints: dict[str, Path]) -> None:
    """Per token, the output and its log-sum-exp."""
    assert bytes_of_keeping(checkpoints["t2i"], "t2i") == BLOCKS * 2 * 16 * (WIDTH + HEADS) * 4


def test_keeping_sparse_attention_costs_no_lists(
    checkpoints: dict[str, Path], flex: list[int]
) -> None:
    """Like dense attention, and a byte per pair of tiles and head."""
    dense = BLOCKS * 64 * TILES * (WIDTH + HEADS) * 4
    assert bytes_of_keeping(checkpoints["nabla"], "nabla") == dense + BLOCKS * HEADS * TILES**2


def test_keeping_sparse_attention_costs_masks_on_a_cpu(checkpoints: dict[str, Path]) -> None:
    """Also the output in parts, and in float32 what each tile of queries sees."""
    numbers = 2 * WIDTH + HEADS + TILES * HEADS
    assert bytes_of_keeping(checkpoints["nabla"], "nabla") == BLOCKS * 64 * TILES * numbers * 4


def bytes_of_keeping(checkpoint: Path, case: str) -> int:
    """How much more a forward pass keeps if it keeps the output of attention."""
    batch = make_batch(checkpoint, case)
    kept = []
    gc.collect()
    gc.freeze()  # what earlier tests have left need not be looked through each time
    for keep in (False, True):
        assembly = make_assembly(checkpoint, case, speed_keep_attention=keep)
        before = live_bytes()
        loss = micro_loss(assembly, noisy_batch(assembly, batch, 0, 0), Losses())
        kept.append(live_bytes() - before)
        del loss
    return kept[1] - kept[0]


def live_bytes() -> int:
    """Bytes of all tensors visible to Python; every storage counts once."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) is Tensor]
    return sum(
        {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors
        }.values()
    )


@pytest.mark.parametrize(
    ("settings", "fast"),
    [({}, True), ({"speed": "reference"}, False)],
)
def test_only_fast_settings_replace_the_forward_of_blocks(
    checkpoints: dict[str, Path], settings: dict[str, Any], fast: bool
) -> None:
    assembly = make_assembly(checkpoints["t2i"], "t2i", **settings)
    blocks = assembly.adapter.block_layout(assembly.transformer).blocks
    assert all(("forward" in vars(block)) is fast for block in blocks)


@pytest.mark.slow
def test_a_run_may_change_its_speed_on_resume(tmp_path: Path, t2i_checkpoint: Path) -> None:
    reference = Workspace.create(tmp_path / "reference", t2i_checkpoint, speed="reference")
    assert reference.train() == 0
    mixed = Workspace.create(tmp_path / "mixed", t2i_checkpoint)
    assert mixed.train("max_train_steps=2", "speed=reference") == 0
    assert mixed.train() == 0
    assert mixed.metrics() == reference.metrics()

    weights = "output/pytorch_lora_weights.safetensors"
    assert mixed.path(weights).read_bytes() == reference.path(weights).read_bytes()


def test_saved_views_are_recomputed_with_their_strides() -> None:
    """For example halves of queries: with an offset of 0, the first half would count twice."""
    inputs = torch.randn(3, 8, requires_grad=True)
    (passed,) = Recomputed.apply(inputs)
    with SavedAsRecipes([passed]):
        product = passed[:, 4:] * passed[:, :4]
    product.square().sum().backward()
    result = inputs.grad
    inputs.grad = None
    (inputs[:, 4:] * inputs[:, :4]).square().sum().backward()

    assert torch.equal(result, inputs.grad)
