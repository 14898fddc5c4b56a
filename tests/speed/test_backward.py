"""No gradient is computed, kept or recomputed below the first block that needs one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

from simpletuner.config.techniques.tread import Route
from simpletuner.diffusion.batch import Batch
from simpletuner.memory.offload.streamer import in_backward
from simpletuner.models.adapter import FamilyAdapter
from simpletuner.models.registry import FAMILIES
from simpletuner.planning.techniques.spec import TechniqueSpec
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.run.settings import assembly_settings
from simpletuner.speed.compile import CheckedForward
from simpletuner.techniques.base import Site, Technique
from simpletuner.techniques.tread import Tread
from simpletuner.training.assemble import assemble, make_accelerator
from simpletuner.training.losses import Losses
from simpletuner.training.settings import TrainingSpec
from simpletuner.training.state import Assembly
from simpletuner.training.step import micro_loss, noisy_batch, run_micro_step
from tests.speed import test_speed as speed
from tests.tools.families import make_adapter, make_config
from tests.tools.sana_family import make_sana_adapter, make_sana_config
from tests.tools.saved_tensors import saved_bytes
from tests.tools.tiny import WIDTH, make_checkpoint
from tests.tools.tiny_sana import make_sana_checkpoint

VISUAL_BLOCKS = 4


@dataclass(frozen=True)
class Case:
    """A selection of trained weights.

    Attributes:
        targets: the layers with a LoRA; None for a full fine-tune.
        starts: blocks whose input gets a gradient although only the block itself is trained. That
            is what one compiled version for all blocks costs.
        kept: blocks whose input is kept, text blocks included.
    """

    targets: Sequence[str] | str | None
    starts: Sequence[str]
    kept: int


KANDINSKY = FAMILIES["kandinsky5-image"]
SANA = FAMILIES["sanavideo"]
TEXT = "text_transformer_blocks.0"
VISUAL = "visual_transformer_blocks"
ALL = 1 + VISUAL_BLOCKS
CASES = {
    "default": Case(list(KANDINSKY.lora_targets), [TEXT, f"{VISUAL}.0"], ALL),
    "all-linear": Case(KANDINSKY.lora_presets["all-linear"], [TEXT, f"{VISUAL}.0"], ALL),
    "slider": Case(KANDINSKY.lora_presets["slider"], [f"{VISUAL}.0"], VISUAL_BLOCKS),
    "full": Case(None, [], ALL),
    "the last block": Case(rf"{VISUAL}\.3\..*to_query", [f"{VISUAL}.3"], 1),
    "the late half": Case(rf"{VISUAL}\.[23]\.feed_forward\.in_layer", [f"{VISUAL}.2"], 2),
    "text blocks": Case(rf"{TEXT}\..*to_query", [TEXT, f"{VISUAL}.0"], ALL),
    "the time embedding": Case("time_embeddings.in_layer", [TEXT, f"{VISUAL}.0"], ALL),
    "text embeddings": Case("text_embeddings.in_layer", [f"{VISUAL}.0"], ALL),
    "the visual embedding": Case("visual_embeddings.in_layer", [], VISUAL_BLOCKS),
    "the output layer": Case("out_layer.out_layer", [], 0),
}
SANA_CASES = {
    "default": Case(list(SANA.lora_targets), ["transformer_blocks.0"], 2),
    "all-linear": Case(SANA.lora_presets["all-linear"], ["transformer_blocks.0"], 2),
    "slider": Case(SANA.lora_presets["slider"], ["transformer_blocks.0"], 2),
    "full": Case(None, [], 2),
    "the last block": Case(r"transformer_blocks\.1\.attn2\.to_q", ["transformer_blocks.1"], 1),
}


def test_every_preset_is_a_case() -> None:
    assert {*KANDINSKY.lora_presets} < {*CASES}
    assert {*SANA.lora_presets} < {*SANA_CASES}


class NoTracker(nullcontext[None]):
    """Stands in for the tracker of modules, whose hooks fail on inputs that are made to require a
    gradient.
    """

    parents = ("Global",)


@pytest.fixture(autouse=True)
def counts_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch run compiled code while FLOPs are counted; by default it runs the uncompiled."""
    monkeypatch.setattr(_FlopCounterMode, "is_infra_mode", classmethod(lambda mode: True))
    monkeypatch.setattr(flop_counter, "ModuleTracker", NoTracker)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    return make_checkpoint(folder / "t2i", "t2i", visual_blocks=VISUAL_BLOCKS)


@pytest.fixture(scope="module")
def sana(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sana_checkpoint(tmp_path_factory.mktemp("sana"))


def clip() -> Batch:
    """A clip for Sana Video."""
    latents = torch.randn(1, 16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    return Batch(latents, [{"prompt_embeds": torch.ones(5, WIDTH)}], ["a"])


def build(checkpoint: Path, case: Case, *techniques: Technique, **settings: Any) -> Assembly:
    kind = "full" if case.targets is None else "lora"
    settings = {"mixed_precision": "no", "learning_rate": 1e-2, "model_type": kind, **settings}
    adapter: FamilyAdapter
    if (checkpoint / "tokenizer_2").is_dir():
        config = make_config(checkpoint, **settings)
        adapter = make_adapter(checkpoint)
    else:
        config = make_sana_config(checkpoint, **settings)
        adapter = make_sana_adapter(checkpoint)
    targets: Any = case.targets or []
    intent = TrainingSpec(lora_targets=targets, seed=3, total_steps=10, learning_rate=1e-2)
    assembly = assemble(assembly_settings(config, intent), adapter, techniques, make_accelerator())
    assembly.transformer.train()
    return assembly


@dataclass
class Measured:
    """A step: its FLOPs, the blocks whose input is kept for the backward pass, and gradients."""

    flops: int
    kept: int
    gradients: dict[str, Tensor | None] = field(repr=False)


def measure(
    assembly: Assembly, batch: Batch, starts: Sequence[str] = (), *, warm: bool = False
) -> Measured:
    """Measure a step.

    Args:
        starts: blocks whose input gets a gradient.
        warm: after a step that compiles.
    """
    inputs: list[Tensor] = []

    def keep(block: nn.Module, given: tuple[Any, ...]) -> None:
        if not in_backward():
            inputs.append(given[0])

    def start(block: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = given
        if not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        return hidden, *others

    with ExitStack() as hooks, sdpa_kernel(SDPBackend.MATH):
        for name in starts:
            block = assembly.transformer.get_submodule(name)
            hooks.callback(block.register_forward_pre_hook(start).remove)
        if warm:
            run_micro_step(assembly, batch, 0, 0, Losses())
            assembly.optimizer.zero_grad(set_to_none=True)
        for block in assembly.adapter.block_layout(assembly.transformer).blocks:
            hooks.callback(block.register_forward_pre_hook(keep).remove)
        with FlopCounterMode(display=False) as counter, saved_bytes([]) as meter:
            run_micro_step(assembly, batch, 0, 0, Losses())
    kept = [hidden.untyped_storage().data_ptr() in meter.addresses for hidden in inputs]
    gradients = {name: weight.grad for name, weight in assembly.all_parameters.items()}
    assembly.optimizer.zero_grad(set_to_none=True)
    return Measured(counter.get_total_flops(), sum(kept), gradients)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what would be compiled as it is; which gradients are required does not depend on it."""
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", CASES)
def test_compiled_blocks_compute_and_keep_what_uncompiled_ones_do(deep: Path, name: str) -> None:
    case = CASES[name]
    batch = speed.make_batch(deep, "t2i")
    eager = build(deep, case, dynamo_backend="no")
    compiled = build(deep, case, dynamo_backend="aot_eager")
    expected = measure(eager, batch)
    actual = measure(compiled, batch)

    assert_exact(actual, expected)
    assert actual.kept == expected.kept == case.kept
    assert actual.flops == measure(eager, batch, case.starts).flops


def assert_exact(actual: Measured, expected: Measured) -> None:
    assert actual.gradients.keys() == expected.gradients.keys()
    assert any(gradient is not None and gradient.any() for gradient in actual.gradients.values())
    for name, gradient in expected.gradients.items():
        other = actual.gradients[name]
        if gradient is None or other is None:
            assert gradient is other, name
        else:
            assert torch.equal(other, gradient), name


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", SANA_CASES)
def test_compiled_blocks_of_sana_compute_and_keep_what_uncompiled_ones_do(
    sana: Path, name: str
) -> None:
    """With diffusers' code, since ours recomputes other parts of a block."""
    case = SANA_CASES[name]
    batch = clip()
    eager = build(sana, case, speed="reference", dynamo_backend="no")
    compiled = build(sana, case, speed="reference", dynamo_backend="aot_eager")
    expected = measure(eager, batch)
    actual = measure(compiled, batch, warm=True)  # the first call of a block compares it

    assert_exact(actual, expected)
    assert actual.kept == expected.kept == case.kept
    assert actual.flops == measure(eager, batch, case.starts).flops


@pytest.mark.usefixtures("uncompiled")
def test_blocks_of_sana_are_compared_in_the_first_step_only(
    sana: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[object] = []
    compare = CheckedForward._is_right
    monkeypatch.setattr(
        CheckedForward, "_is_right", lambda *given: compared.append(given) or compare(*given)
    )
    assembly = build(sana, SANA_CASES["default"], speed="reference", dynamo_backend="aot_eager")
    for _ in range(3):
        run_micro_step(assembly, clip(), 0, 0, Losses())

    assert len(compared) == 1


@pytest.mark.slow(10)
@pytest.mark.thorough
@pytest.mark.usefixtures("one_size")
@pytest.mark.parametrize("name", ["default", "all-linear", "slider", "full", "the late half"])
def test_graphs_compute_what_uncompiled_blocks_do(deep: Path, name: str) -> None:
    """Without recomputation, of which graphs leave out what no gradient reads."""
    case = CASES[name]
    batch = speed.make_batch(deep, "t2i")
    torch._dynamo.reset()
    settings = {"gradient_checkpointing": False}
    eager = build(deep, case, dynamo_backend="no", **settings)
    compiled = build(deep, case, dynamo_backend="aot_eager", **settings)
    expected = measure(eager, batch, case.starts)
    actual = measure(compiled, batch, warm=True)

    assert counters["stats"]["unique_graphs"] > 0
    assert actual.flops == expected.flops
    for weight, gradient in expected.gradients.items():
        torch.testing.assert_close(actual.gradients[weight], gradient)


@pytest.mark.slow(5)
@pytest.mark.usefixtures("one_size")
def test_frozen_blocks_share_their_graphs_with_previews(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One version of each function below the first trained block, and one from there on."""
    trace = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, backend, **more: trace(function, backend="eager", **more)
    )
    torch._dynamo.reset()
    counters.clear()
    case = Case(rf"{VISUAL}\.[23]\..*(to_query|in_layer)", [], 2)
    assembly = build(deep, case, dynamo_backend="aot_eager")
    batch = speed.make_batch(deep, "t2i")

    run_micro_step(assembly, batch, 0, 0, Losses())
    assert counters["stats"]["unique_graphs"] == 3 + 2

    with torch.no_grad():
        micro_loss(assembly, noisy_batch(assembly, batch, 0, 0), Losses())
    assert counters["stats"]["unique_graphs"] == 3 + 2 + 2, "previews add those with a LoRA"


class Added(Technique):
    """Adds a trained vector to the output of the first visual block."""

    def attach(self, site: Site) -> None:
        self.vector = nn.Linear(site.layout.width, 1, bias=False)
        site.layout.visual_blocks[0].register_forward_hook(self._add)

    def module(self) -> nn.Module:
        return self.vector

    def _add(self, block: nn.Module, given: Any, output: Tensor) -> Tensor | None:
        return output + self.vector.weight if torch.is_grad_enabled() else None


TECHNIQUES: dict[str, Callable[[], Technique]] = {
    "a route through frozen blocks": lambda: Tread(TreadSpec([Route(0.5, 1, -2)])),
    "a hook with a trained vector": lambda: Added(TechniqueSpec()),
}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", TECHNIQUES)
def test_techniques_below_the_first_trained_block_get_their_gradients(
    deep: Path, name: str, checkpointing: bool
) -> None:
    case = CASES["the last block"]
    batch = speed.make_batch(deep, "t2i")
    results = []
    for backend in ("no", "aot_eager"):
        settings = {"dynamo_backend": backend, "gradient_checkpointing": checkpointing}
        results.append(measure(build(deep, case, TECHNIQUES[name](), **settings), batch))

    assert_exact(results[1], results[0])
    assert all(gradient is not None for gradient in results[1].gradients.values())
