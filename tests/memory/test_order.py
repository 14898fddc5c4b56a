"""Streams in the worst order: nothing is read too early, and nothing freed or overwritten in use.

Programs run once on a simulated GPU, and are repeated in many orders. Without any of the waits and
events in the code, at least one of these orders must fail.
"""

from __future__ import annotations

import ast
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simpletuner.config.schema import CachingConfig, OffloadConfig, OptimizerConfig, PrecisionConfig
from simpletuner.diffusion.batch import Batch, upload
from simpletuner.memory.offload import attach, copiers
from simpletuner.memory.offload.block_inputs import BlockInputs
from simpletuner.speed.recomputation import enable_checkpointing
from simpletuner.training.drafts import CopiedDrafts, Draft, page_locked_copy
from simpletuner.training.loader import BatchLoader
from simpletuner.training.release import GradientRelease, HostState
from simpletuner.validation.background import DecodingThread
from tests.tools.adversarial_gpu import GPU, PACKAGE, Actor, LyingGpu, Violation
from tests.training.test_optimizers import build, weights

CALLS = ("record_event", "wait_event", "wait_stream", "record_stream", "synchronize")
STOPWATCHES = ("timing.py",)  # files that wait only to measure time
ORDERS = int(os.environ.get("ORDERS", "100"))  # of each program


class Block(nn.Module):
    """A frozen layer, and weights that are trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width).requires_grad_(False)
        self.adapter = nn.Parameter(torch.randn(width, width) / 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + (self.layer(hidden) @ self.adapter).tanh()


class Stack(nn.Module):
    """Blocks, called like those of a diffusers transformer."""

    def __init__(self, blocks: int, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.run: Callable[[nn.Module, Tensor], Tensor] = lambda block, hidden: block(hidden)

    def enable_gradient_checkpointing(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        self.run = run

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = self.run(block, hidden) if torch.is_grad_enabled() else block(hidden)
        return hidden.square().mean()


def streamed(gpu: LyingGpu, *, blocks: int = 5, keeps: bool = False, **settings: Any) -> None:
    """Stream weights and offload inputs of blocks, in steps of growing batches and in sampling."""
    model = Stack(blocks)
    if not keeps:
        layout: Any = SimpleNamespace(blocks=[*model.blocks])
        enable_checkpointing(
            model,
            layout,
            PrecisionConfig(gradient_checkpointing=True),
            dropout=False,
            block_inputs=BlockInputs(GPU),
        )
    attach.place_model(model, [*model.blocks], GPU)
    attach.Offload(OffloadConfig(**settings), GPU).attach(model, [*model.blocks], keeps_saved=keeps)
    for size in (2, 3):
        model(torch.randn(size, 8).to(GPU)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad)
                    parameter.grad = None
    with torch.no_grad():
        model(torch.randn(2, 8).to(GPU))


class Reader:
    """The thread that reads the disk."""

    def __init__(self, gpu: LyingGpu) -> None:
        self.gpu = gpu
        self.thread = Actor(gpu)

    def submit(self, work: Callable[..., Any], *given: Any) -> Any:
        with self.gpu.in_thread(self.thread):
            actual = work(*given)
        done = self.thread.now()

        def result() -> Any:
            self.gpu.host.add(None, done)
            return actual

        return SimpleNamespace(result=result)


def from_disk(gpu: LyingGpu) -> None:
    """Weights come through a pinned buffer, which a thread fills."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(copiers, "ThreadPoolExecutor", lambda workers, name: Reader(gpu))
        streamed(
            gpu,
            blocks=4,
            keeps=True,
            group_offload_use_stream=True,
            group_offload_to_disk_path=folder,
        )


def hosted(gpu: LyingGpu) -> None:
    """Optimizer state is prefetched and evicted in the backward pass, once in another order.

    Then it is read.
    """
    trained = weights()
    for weight in trained:
        weight.data = weight.data.to(GPU)
    optimizer = build("torch-adam", trained)
    host = HostState(optimizer, GPU)
    release = GradientRelease(
        {str(n): weight for n, weight in enumerate(trained)}, optimizer, OptimizerConfig(), host
    )
    for number in range(4):
        with release.updating():
            ordered = trained[::-1] if number == 2 else trained
            torch.stack([(weight * weight).sum() for weight in ordered]).sum().backward()
        release.finish()
    for state in optimizer.state.values():
        assert state["exp_avg"].clone().isfinite().all()


def loaded(gpu: LyingGpu) -> None:
    """Batches and numbers are uploaded from pinned memory, which is freed at once."""
    planned = SimpleNamespace(batches=lambda epoch: range(6), batches_per_epoch=lambda epoch: 6)
    made = [Batch(torch.randn(2, 3), [{"prompt_embeds": torch.randn(4)}], ["x"]) for _ in range(6)]
    total = torch.zeros(()).to(GPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        loader = BatchLoader(
            planned, made.__getitem__, CachingConfig(), lambda epoch: None, pin=True
        )
        for number in range(6):
            batch = next(loader).to(GPU, non_blocking=True)
            total += batch.latents.sum() * batch.embeds[0]["prompt_embeds"].sum()
            total += upload(torch.tensor(float(number)), GPU)
        loader.close()


def saved(gpu: LyingGpu) -> None:
    """A checkpoint is copied to page-locked memory, which a thread reads while the next step
    changes the weights.
    """
    weights = {str(number): torch.randn(4).to(GPU) for number in range(3)}
    written: list[Tensor] = []
    draft = Draft(
        "",
        lambda path, content: written.extend(tensor.clone() for tensor in content.values()),
        weights,
    )
    with pytest.MonkeyPatch.context() as patch:
        # Here a GPU's tensors say that they are on the CPU.
        patch.setattr(
            "simpletuner.training.drafts._to_host", lambda path, tensor: page_locked_copy(tensor)
        )
        copies = CopiedDrafts([draft], GPU)
    for weight in weights.values():
        weight.mul_(2)
    Reader(gpu).submit(lambda: [copy.write_into(Path()) for copy in copies.wait()]).result()
    assert all(tensor.isfinite().all() for tensor in written)


def decoded(gpu: LyingGpu) -> None:
    """Previews are decoded on a separate stream, once their latents are complete."""
    decoding: Any = DecodingThread(Reader(gpu), GPU)
    for number in range(3):
        latents = torch.randn(4).to(GPU) * 2
        decode = partial(lambda latents: [latents.square().sum().item()], latents)
        decoding.submit(str(number), decode, lambda frames: frames)
        del decode, latents
    assert all(math.isfinite(frame) for frames in decoding.finished(wait=True) for frame in frames)


PROGRAMS: dict[str, Callable[[LyingGpu], None]] = {
    "beside": partial(streamed, group_offload_use_stream=True),
    "pairs": partial(
        streamed, keeps=True, group_offload_use_stream=True, group_offload_blocks_per_group=2
    ),
    "inline": partial(streamed, keeps=True),
    "disk": from_disk,
    "hosted": hosted,
    "loaded": loaded,
    "saved": saved,
    "decoded": decoded,
}


@cache
def recorded(name: str) -> LyingGpu:
    gpu = LyingGpu()
    with torch.random.fork_rng(devices=[]), gpu.recording():
        torch.manual_seed(0)
        PROGRAMS[name](gpu)
    return gpu


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_order_of_streams_changes_a_number(name: str) -> None:
    for seed in range(ORDERS):
        recorded(name).play(seed)


def goes_wrong(gpu: LyingGpu, seed: int, without: str) -> bool:
    """Whether an order goes wrong without a call."""
    try:
        gpu.play(seed, without)
    except Violation:
        return True
    return False


def is_needed(site: str, gpus: Sequence[LyingGpu]) -> bool:
    """Whether some program goes wrong in some order without a call.

    Most do so in the first orders, or never.
    """
    users = [gpu for gpu in gpus if site in gpu.sites]
    return any(goes_wrong(gpu, seed, site) for seed in range(ORDERS) for gpu in users)


def calls() -> Iterator[tuple[str, str, str]]:
    """File, function and name of all calls in the package that order steps of the GPU."""
    for file in PACKAGE.rglob("*.py"):
        if file.name in STOPWATCHES:
            continue
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                for name in called_methods(function) & {*CALLS}:
                    yield file.name, function.name, name


def called_methods(function: ast.FunctionDef) -> set[str]:
    """The names of methods that a function calls itself, not in functions inside of it."""
    names: set[str] = set()
    nodes: list[ast.AST] = [*ast.iter_child_nodes(function)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names.add(node.func.attr)
        nodes.extend(ast.iter_child_nodes(node))
    return names


@pytest.mark.slow
def test_every_wait_is_needed() -> None:
    """From every place; and the programs here cover all waits of the package."""
    gpus = [recorded(name) for name in PROGRAMS]
    sites = set[str]().union(*(gpu.sites for gpu in gpus))
    reached = {
        (file, chain.split(" < ")[0], call)
        for file, chain, call in (site.split(": ") for site in sites)
    }

    assert reached == set(calls())
    assert [site for site in sorted(sites) if not is_needed(site, gpus)] == []
