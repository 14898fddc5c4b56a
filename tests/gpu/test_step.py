"""What only a GPU can show of a step: no synchronisation, float16, streaming, a CPU's numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from simpletuner.budget.device import read_rates
from simpletuner.config.launch import LaunchConfig
from simpletuner.data.sampler import PlannedBatch
from simpletuner.diffusion.batch import Batch
from simpletuner.models.loading import full_linear
from simpletuner.run.settings import assembly_settings
from simpletuner.speed.compile import can_tune_int8
from simpletuner.speed.int8_kernels import tuning_int8
from simpletuner.speed.measure import device_rates
from simpletuner.training import step
from simpletuner.training.assemble import assemble
from simpletuner.training.loader import BatchLoader
from simpletuner.training.losses import Losses
from simpletuner.training.settings import TrainingSpec
from simpletuner.training.state import Assembly
from tests.memory.test_products import draw, layer
from tests.tools.assembly import make_batch
from tests.tools.families import make_adapter, make_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")
CAPTIONS = ["a star", "two blue circles", "a green square on black", "x"]
PLAIN = {"speed": "reference", "disable_tf32": True}


class OneBatchLoader:
    """Stands in for the loader: the same batch without end, pinned for a GPU."""

    epoch = 1
    epochs_done = 0

    def __init__(self, batch: Batch, device: str) -> None:
        self.batch = batch.pin_memory() if device == "cuda" else batch

    def __next__(self) -> Batch:
        return self.batch


def assembled(checkpoint: Path, device: str = "cuda", **settings: Any) -> Assembly:
    """An assembly on either device."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    # The first accelerator of a process decides the device of all later ones.
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    settings = {"mixed_precision": "no", "learning_rate": 1e-2, **settings}
    intent = TrainingSpec(
        lora_targets=["to_query", "to_key", "to_value"], seed=3, total_steps=10, learning_rate=1e-2
    )
    accelerator = Accelerator(mixed_precision="no", cpu=device == "cpu")
    assembly = assemble(
        assembly_settings(make_config(checkpoint, **settings), intent),
        make_adapter(checkpoint),
        [],
        accelerator,
    )
    assembly.transformer.train()
    return assembly


def run(assembly: Assembly, batch: Batch, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some steps, and copies of the trained weights after them."""
    loader: Any = OneBatchLoader(batch, assembly.accelerator.device.type)
    losses = []
    for number in range(steps):
        report = step.optimizer_step(assembly, loader, number)
        losses.append(report.metrics["train_loss"])
    return losses, weights_of(assembly)


def weights_of(assembly: Assembly) -> dict[str, Tensor]:
    """Copies of the trained weights, in float32 on the CPU."""
    return {
        name: weight.detach().float().cpu().clone() for name, weight in assembly.parameters.items()
    }


def test_gpu_step_matches_the_cpu(t2i_checkpoint: Path) -> None:
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    start = weights_of(assembled(t2i_checkpoint, "cpu", **PLAIN))

    cpu_losses, cpu_weights = run(assembled(t2i_checkpoint, "cpu", **PLAIN), batch)
    gpu_losses, gpu_weights = run(assembled(t2i_checkpoint, "cuda", **PLAIN), batch)

    assert cpu_losses == pytest.approx(gpu_losses, rel=1e-3)
    for name, weight in cpu_weights.items():
        change = (weight - start[name]).norm()
        assert change > 0
        assert (gpu_weights[name] - weight).norm() < 0.05 * change, name


@pytest.mark.parametrize(
    "settings",
    [
        PLAIN,
        {"gradient_checkpointing": True, "dynamo_backend": "no"},
        {"dynamo_backend": "no", "base_model_precision": "int8dq-torchao"},
    ],
)
def test_step_never_synchronises_before_the_losses_are_read(
    t2i_checkpoint: Path, settings: dict[str, Any]
) -> None:
    """The captions have unequal lengths, so a mask is made."""
    if "base_model_precision" in settings:
        pytest.importorskip("torchao")
    assembly = assembled(t2i_checkpoint, mixed_precision="bf16", **settings)
    batch = make_batch(t2i_checkpoint, CAPTIONS).pin_memory()

    def micro_step(number: int) -> None:
        losses = Losses()
        on_gpu = batch.to(GPU, non_blocking=True)
        step.run_micro_step(assembly, on_gpu, number, 0, losses)

    micro_step(0)  # the first one may synchronise, to make handles of libraries
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        micro_step(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_float16_trains_and_skips_a_step_that_overflows(t2i_checkpoint: Path) -> None:
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    assembly = assembled(t2i_checkpoint, mixed_precision="fp16", **PLAIN)
    assert assembly.scaler.is_enabled()

    before = weights_of(assembly)
    losses, after = run(assembly, batch)
    assert all(0 < loss < 100 for loss in losses)
    assert any(not torch.equal(before[name], after[name]) for name in after)

    # With this scale every gradient overflows: the step is skipped, and the scale halved.
    assembly.scaler.update(2.0**100)
    _, after_overflow = run(assembly, batch, steps=1)
    assert all(torch.equal(after[name], after_overflow[name]) for name in after)
    assert assembly.scaler.get_scale() == 2.0**99


@pytest.mark.parametrize("use_stream", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_streamed_weights_train_bit_for_bit_like_resident_ones(
    t2i_checkpoint: Path, use_stream: bool, checkpointing: bool
) -> None:
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    settings = {
        "mixed_precision": "bf16",
        "gradient_checkpointing": checkpointing,
        "dynamo_backend": "no",
    }
    offload = {"enable_group_offload": True, "group_offload_use_stream": use_stream}
    losses, weights = run(assembled(t2i_checkpoint, **settings), batch)
    streaming = assembled(t2i_checkpoint, **settings, **offload)

    streamed_losses, streamed_weights = run(streaming, batch)
    assert streamed_losses == losses
    assert all(torch.equal(streamed_weights[name], weight) for name, weight in weights.items())

    loader: Any = OneBatchLoader(batch, "cuda")
    report = step.optimizer_step(streaming, loader, 3)
    assert report.weights_seconds is not None
    assert 0 < report.weights_seconds < report.seconds


@pytest.mark.parametrize(("name", "least"), [("int8-quanto", (7, 5)), ("fp8-quanto", (8, 9))])
def test_quantised_products_match_the_cpu(name: str, least: tuple[int, int]) -> None:
    if torch.cuda.get_device_capability() < least:
        pytest.skip(f"needs compute capability {least}")

    expected = quantised_product(name, "cpu")
    actual = quantised_product(name, "cuda")

    assert_equal_in_bf16(actual, expected)


@pytest.mark.parametrize("kernels", ["ATEN,TRITON", "TRITON"])
def test_tuned_int8_products_match_the_cpu(kernels: str) -> None:
    """Also where inductor's own kernel is the only one, which scales its sums."""
    if not can_tune_int8("inductor", LaunchConfig(), GPU):
        pytest.skip("inductor writes no products for this GPU")

    def compile_with(function: Any, *, options: dict[str, Any]) -> Any:
        options = {**options, "max_autotune_gemm_backends": kernels}
        return torch.compile(function, options=options, dynamic=False)

    tuned = tuning_int8(compile_with)

    expected = quantised_product("int8-quanto", "cpu")
    actual = quantised_product("int8-quanto", "cuda", tuned)

    assert_equal_in_bf16(actual, expected)


def assert_equal_in_bf16(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Equal to 8 significant bits."""
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).norm() < 2**-8 * other.norm()


def quantised_product(
    name: str, device: str, prepare: Callable[[Any], Any] = lambda module: module
) -> tuple[Tensor, Tensor]:
    """Outputs of a quantised layer and the gradient of its inputs, in float32 on the CPU."""
    module = prepare(layer(name, dtype=torch.bfloat16).to(device))
    inputs = draw(4, 9, 64, dtype=torch.bfloat16).detach().to(device).requires_grad_()
    outputs = module(inputs)
    output_gradient = draw(4, 9, 48, dtype=torch.bfloat16).detach().to(device)
    (gradient,) = torch.autograd.grad(outputs, inputs, output_gradient)
    return outputs.detach().float().cpu(), gradient.float().cpu()


@pytest.mark.real_gpu
def test_deliberate_float32_uses_no_tf32() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("has no TF32")
    x = torch.randn(64, 512, device=GPU)
    weight = torch.randn(256, 512, device=GPU)
    exact = (x.double() @ weight.double().t()).float()
    # pytest's monkeypatch cannot restore this setting.
    products = torch.backends.cuda.matmul
    allowed = products.allow_tf32
    products.allow_tf32 = True

    try:
        in_tf32 = linear(x, weight, None)
        in_float32 = full_linear(x, weight, None)
    finally:
        products.allow_tf32 = allowed

    assert (in_tf32 - exact).norm() / exact.norm() > 1e-4
    assert (in_float32 - exact).norm() / exact.norm() < 1e-6


def test_loader_returns_pinned_memory() -> None:
    class OneBatch:
        datasets = ()

        def batches(self, epoch: int) -> list[PlannedBatch]:
            return [PlannedBatch(epoch, 0, "d", "b", (8, 8), (), (), range(0))]

        def batches_per_epoch(self, epoch: int) -> int:
            return 1

    latents = torch.arange(16.0).view(1, 1, 1, 4, 4)
    unpinned = Batch(latents, [{"prompt_embeds": torch.ones(3, 8)}], ["a"], condition=latents + 1)
    config = make_config(Path()).caching
    loader = BatchLoader(OneBatch(), lambda planned: unpinned, config, lambda epoch: None, pin=True)

    try:
        batch = next(loader)
    finally:
        loader.close()

    assert batch.latents.is_pinned()
    assert batch.embeds[0]["prompt_embeds"].is_pinned()
    assert batch.condition is not None
    assert batch.condition.is_pinned()
    on_gpu = batch.to(GPU, non_blocking=True)
    assert torch.equal(on_gpu.latents.cpu(), latents)


def test_block_measurement_leaves_no_state_behind(tmp_path: Path) -> None:
    before = torch.cuda.get_rng_state()
    allocated = torch.cuda.memory_allocated()

    rates = device_rates(tmp_path, GPU, torch.bfloat16)

    assert rates is not None
    assert rates == read_rates(tmp_path)
    assert rates.matmul_flops > 1e12
    assert rates.host_to_device_bytes is not None
    assert rates.host_to_device_bytes > 1e9
    assert torch.equal(torch.cuda.get_rng_state(), before)
    # The workspace of the matrix library stays; it takes less than 64 MiB.
    assert torch.cuda.memory_allocated() - allocated < 64 * 2**20
    assert torch.cuda.max_memory_allocated() < 2**30
