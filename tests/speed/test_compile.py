"""Compiled blocks: few graphs and correct gradients; blocks with wrong ones stay uncompiled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code

from benchmarks.models import cost_of
from simpletuner.config.speed import has_compiler
from simpletuner.config.techniques.tread import Route
from simpletuner.diffusion.batch import Batch
from simpletuner.models.adapter import PreviewRequest
from simpletuner.models.kandinsky5 import blocks, nabla
from simpletuner.models.kandinsky5.blocks import store_in_bf16
from simpletuner.models.kandinsky5.cost import VIDEO_COST
from simpletuner.models.sanavideo.video import CompiledOnGrid
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.speed.backward import with_gradient
from simpletuner.speed.compile import Case, CheckedForward, CompiledPiece, configure_compiler
from simpletuner.speed.recomputation import checkpointed
from simpletuner.techniques.tread import Tread
from simpletuner.training.losses import Losses
from simpletuner.training.state import Assembly
from simpletuner.training.step import micro_loss, noisy_batch
from simpletuner.validation.quiet import quiet
from tests.fidelity import test_sanavideo_training as sana
from tests.speed import test_speed as speed
from tests.speed.test_speed import loss_and_gradients
from tests.tools.assembly import CPU, make_assembly, make_batch
from tests.tools.cases import first_of
from tests.tools.tiny import WIDTH, build_kandinsky, make_checkpoint
from tests.tools.transformers import (
    KANDINSKY_TARGETS,
    adapters_of,
    block_inputs,
    kandinsky_inputs,
    with_lora,
)

pytestmark = pytest.mark.slow

# Latent height and width, and tokens of the caption; one has as many of the one as of the other.
BUCKETS = [(4, 4, 4), (4, 8, 6), (8, 4, 4), (8, 8, 9), (6, 10, 16), (12, 4, 5), (10, 10, 25)]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    # What an operation makes of its shapes is looked up for each symbol and hardly ever met again
    # in one trace.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def bucket(height: int, width: int, *captions: int) -> Batch:
    """Samples of one shape with captions of so many tokens."""
    generator = torch.Generator().manual_seed(height * width + captions[0])
    embeds = [
        {
            "prompt_embeds": torch.randn(tokens, WIDTH, generator=generator),
            "pooled_prompt_embeds": torch.randn(WIDTH, generator=generator),
        }
        for tokens in captions
    ]
    latents = torch.randn(len(captions), 16, 1, height, width, generator=generator)
    return Batch(latents, embeds, [str(number) for number in range(len(captions))])


def trace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count graphs without tracing the backward pass, which takes most of the time."""
    traced = partial(torch.compile, backend="eager")
    monkeypatch.setattr(
        torch, "compile", lambda function, backend, **settings: traced(function, **settings)
    )


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= tolerance * value.norm() + 1e-9, name


def clear(assembly: Assembly) -> None:
    for parameter in assembly.parameters.values():
        parameter.grad = None


# Latent frames, height and width of clips for Sana Video; the last ones are those of a batch of
# two.
GRIDS = [(3, 4, 4), (3, 4, 6), (3, 6, 4), (2, 8, 4), (5, 4, 8), (3, 8, 8), (2, 6, 10), (3, 4, 6)]
# Samples and tokens of their captions: last batches of a bucket, with and without padding, and
# empty captions.
LAST_BATCHES = [(8, 8, [6, 6]), (4, 8, [4, 9, 5]), (8, 4, [1]), (10, 10, [1, 1]), (4, 4, [1, 7])]


def test_few_graphs_serve_a_whole_run(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three graphs for seven buckets, three for masks and empty captions, three for previews."""
    trace_only(monkeypatch)
    compiled, eager = (
        make_assembly(t2i_checkpoint, Tread(TreadSpec([Route(0.5, 1, -1)])), **settings)
        for settings in ({"dynamo_backend": "aot_eager", "dynamo_fullgraph": True}, {})
    )

    def compare(batch: Batch, captions: list[int]) -> None:
        actual = loss_and_gradients(compiled, batch)
        expected = loss_and_gradients(eager, batch)
        # The softmax over a caption of one token has a gradient of zero, or of rounding.
        names = ["loss"] if max(captions) == 1 else list(expected)
        assert_close(actual, {name: expected[name] for name in names}, 1e-3)
        clear(compiled)
        clear(eager)

    for height, width, tokens in BUCKETS:
        compare(bucket(height, width, tokens), [tokens])

    assert 0 < graphs() <= 3

    for height, width, captions in LAST_BATCHES:
        compare(bucket(height, width, *captions), captions)
    with torch.no_grad():
        micro_loss(compiled, noisy_batch(compiled, bucket(8, 8, 6, 4), 0, 0), Losses())

    assert graphs() <= 9


@pytest.mark.usefixtures("one_size")
def test_blocks_are_compiled_except_for_sparse_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text block, and the functions before and after the self-attention, as in dense ones."""
    trace_only(monkeypatch)
    checkpoint = make_checkpoint(tmp_path, "t2v", nabla=True)
    compiled, eager = (
        speed.make_assembly(checkpoint, "nabla", **settings)
        for settings in ({"dynamo_backend": "aot_eager", "dynamo_fullgraph": True}, {})
    )
    batch = speed.make_batch(checkpoint, "nabla")

    assert_close(loss_and_gradients(compiled, batch), loss_and_gradients(eager, batch), 1e-3)
    assert graphs() == 3


# A call of a generated kernel, or of one of torch's, in the code that inductor writes.
LAUNCH = re.compile(
    r"^    .*\b(?:cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.MULTILINE
)


@pytest.mark.usefixtures("one_size", "usual_vectors")
@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C compiler")
def test_a_block_with_sparse_attention_launches_what_a_dense_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All kernels of a block with a LoRA, forward and backward, except for the self-attention."""
    # Kernels are called, but not compiled, which takes most of the time.
    monkeypatch.setattr(
        AsyncCompile, "cpp_pybinding", lambda *given, **named: lambda *arguments: None
    )
    counts = []
    for sparse in (False, True):
        model: Any = build_kandinsky(nabla=sparse)
        inputs = kandinsky_inputs(1, 32, 6, torch.float32)
        if sparse:
            nabla.install(model)
            latents = tuple(inputs["hidden_states"].shape)
            inputs["sparse_params"] = nabla.sparse_params(
                latents, dict(model.config), torch.device("cpu")
            )
        model = with_lora(model, adapters_of(cost_of(VIDEO_COST, model), KANDINSKY_TARGETS, 2))
        pieces = blocks.use_fast_blocks(model, blocks.mask_padding(model)).pieces
        for name in ("before_attention", "after_attention"):
            pieces[name] = CompiledPiece(pieces[name], torch.compile(pieces[name], fullgraph=True))
        block = model.visual_transformer_blocks[1]
        visual, text, *rest = block_inputs(model, inputs, block)
        visual, text = (hidden.detach().requires_grad_() for hidden in (visual, text))
        _, codes = run_and_get_code(lambda: block(visual, text, *rest).sum().backward())  # noqa: B023 - called at once
        counts.append(sum(len(LAUNCH.findall(code)) for code in codes))

    assert 60 < counts[0] == counts[1] <= 105 - 2, "two more for the self-attention"


def test_every_size_may_be_a_symbol(t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/models trace the backward pass with symbols."""
    trace_only(monkeypatch)
    settings = {"dynamo_backend": "aot_eager", "dynamo_dynamic": True, "dynamo_fullgraph": True}
    compiled, eager = (make_assembly(t2i_checkpoint, **changes) for changes in (settings, {}))
    batch = bucket(8, 8, 6)

    assert_close(loss_and_gradients(compiled, batch), loss_and_gradients(eager, batch), 1e-3)
    assert graphs() > 0


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors whose sizes are marked as dynamic, in order."""
    results: list[Tensor] = []
    mark = torch._dynamo.maybe_mark_dynamic
    monkeypatch.setattr(
        torch._dynamo,
        "maybe_mark_dynamic",
        lambda tensor, sizes: (results.append(tensor), mark(tensor, sizes)),
    )
    return results


def test_sizes_are_marked_as_dynamic_until_nothing_more_is_compiled(marks: list[Tensor]) -> None:
    """A shape is marked again after a compilation; unforeseen changes need no graph per size."""

    def scale(block: nn.Module, hidden: Tensor) -> Tensor:
        return hidden * (2 if block.training else 3)

    piece = CompiledPiece(scale, torch.compile(scale, backend="eager"))
    block = nn.Identity()

    def marked(tokens: int) -> int:
        before = len(marks)
        hidden = torch.ones(2, tokens, 4)
        assert torch.equal(piece(block, hidden), scale(block, hidden))
        return len(marks) - before

    assert [marked(tokens) for tokens in (5, 5, 5, 5, 7, 7, 7)] == [1, 1, 0, 0, 1, 0, 0]
    assert graphs() == 1

    block.eval()
    after = [marked(tokens) for tokens in (5, 5, 5, 5)]

    assert after in ([0, 1, 1, 0], [0, 1, 0, 0]), "torch 2.11 compiles once less"
    assert [marked(tokens) for tokens in (6, 8, 9, 9)] == [1, 1, 1, 0]
    assert graphs() <= 3


def test_a_repeated_step_marks_no_sizes(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, marks: list[Tensor]
) -> None:
    trace_only(monkeypatch)
    assembly = make_assembly(t2i_checkpoint, dynamo_backend="aot_eager")
    results = []
    for _ in range(3):
        loss_and_gradients(assembly, bucket(8, 8, 6))
        clear(assembly)
        results.append(len(marks))

    assert 0 < results[0] <= results[1] == results[2]


def in_a_thread(work: Callable[[], object]) -> None:
    """Autograd computes gradients of a GPU in other threads, with their own compiler settings."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()


def test_every_thread_has_the_same_recompile_limit() -> None:
    def double(block: nn.Module, hidden: Tensor) -> Tensor:
        return 2 * hidden

    piece = CompiledPiece(double, torch.compile(double, backend="eager", dynamic=False))
    block = nn.Identity()
    shapes = [torch.ones(1, 2, count) for count in range(2, 14)]
    piece(block, shapes[0])

    assert graphs() == 1

    in_a_thread(lambda: piece(block, shapes[0]))
    assert graphs() == 1, "what one thread has compiled serves all"

    in_a_thread(lambda: [piece(block, shape) for shape in shapes])
    assert graphs() == len(shapes) > 8


def test_a_compiler_that_fails_on_gradients_leaves_a_function_uncompiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The backward pass is compiled with the forward pass, while falling back is still possible."""

    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no kernel for this")

    def square(block: nn.Module, hidden: Tensor) -> Tensor:
        return hidden.sin() ** 2

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=fails
    )
    piece = CompiledPiece(
        square, torch.compile(square, backend=lambda graph, inputs: backend(graph, inputs))
    )
    hidden = torch.rand(2, 3, 4, requires_grad=True)
    piece(nn.Identity(), hidden).sum().backward()

    assert "square is not compiled" in caplog.text
    torch.testing.assert_close(hidden.grad, torch.sin(2 * hidden.detach()))


def test_what_the_backward_pass_does_not_read_is_not_recomputed() -> None:
    """The last of the seven products of a block is not recomputed, and no width is a symbol."""
    results: list[list[str]] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        results.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend: Any = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    block = build_kandinsky().visual_transformer_blocks[0].requires_grad_(False)
    tokens = [torch.randn(1, count, WIDTH, requires_grad=True) for count in (8, 5)]
    inputs = tokens[0], tokens[0].unflatten(-1, (2, -1)), torch.randn(1, 9 * WIDTH), tokens[1], None
    gradients = []
    for function in (blocks.after_attention, checkpointed(blocks.after_attention)):
        piece = CompiledPiece(function, torch.compile(function, backend=backend), strict=True)
        out = piece(block, *inputs)
        gradients.append(torch.autograd.grad(out, tokens, out.detach()))
    products = [sum("mm" in operation for operation in graph) for graph in results]

    assert products == [7, 7, 7, 7 + 6]
    assert not any("bmm" in operation for graph in results for operation in graph)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_functions_that_recompute_themselves_share_no_sizes() -> None:
    """torch records varying sizes by code object, and would compile these as symbols."""
    codes = {
        checkpointed(function).__code__ for function in (blocks.after_attention, blocks.text_block)
    }
    assert len(codes) == 2


@pytest.mark.usefixtures("one_size")
def test_previews_are_compiled_unless_switched_off(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_only(monkeypatch)
    batch = bucket(4, 4, 4)
    for switch, expected in (({"validation_torch_compile": False}, 0), ({}, 3)):
        counters.clear()
        assembly = make_assembly(t2i_checkpoint, dynamo_backend="aot_eager", **switch)
        with torch.no_grad():
            micro_loss(assembly, noisy_batch(assembly, batch, 0, 0), Losses())
        assert graphs() == expected


@pytest.mark.thorough
def test_previews_share_graphs_and_training_keeps_its_own(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All previews share one graph per function, plus one for text; training keeps its graphs."""
    trace_only(monkeypatch)
    eager, compiled = (
        make_assembly(t2i_checkpoint, dynamo_backend=backend) for backend in ("no", "aot_eager")
    )

    def pictures(assembly: Assembly, batched: bool, *sizes: int) -> list[Tensor]:
        pipeline = assembly.adapter.load_preview_pipeline(assembly.transformer, CPU, None)
        one, other = (
            make_batch(t2i_checkpoint, [caption]).embeds[0]
            for caption in ("a red square", "blurry")
        )
        requests = [
            PreviewRequest(one, other, side, side, 2, 5.0, 7, batched=batched) for side in sizes
        ]
        with quiet(assembly):
            return [
                torch.tensor(np.array(pipeline.render(request)[0]), dtype=torch.float)
                for request in requests
            ]

    micro_loss(compiled, noisy_batch(compiled, bucket(4, 4, 4), 0, 0), Losses()).backward()
    micro_loss(compiled, noisy_batch(compiled, bucket(4, 8, 6), 0, 0), Losses()).backward()
    for batched in (False, True):
        before = graphs()
        pairs = zip(
            pictures(compiled, batched, 64, 96), pictures(eager, batched, 64, 96), strict=True
        )
        assert all((actual - expected).abs().max() <= 1 for actual, expected in pairs)
        assert before < graphs() <= before + 3
        sampled = graphs()
        pictures(compiled, batched, 128)
        micro_loss(compiled, noisy_batch(compiled, bucket(8, 8, 9), 0, 0), Losses()).backward()
        assert graphs() == sampled


def test_the_mode_of_inductor_is_passed_to_torch(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []

    def compile_nothing(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        modes.append(settings["mode"])
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    make_assembly(
        t2i_checkpoint, dynamo_backend="inductor", dynamo_mode="max-autotune-no-cudagraphs"
    )

    assert set(modes) == {"max-autotune-no-cudagraphs"}


@pytest.mark.usefixtures("usual_vectors")
@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C compiler")
def test_inductor_compiles_a_block_correctly() -> None:
    """With padded captions, and modulation stored in bf16."""
    torch.manual_seed(0)
    model: Any = build_kandinsky()
    block = model.text_transformer_blocks[0]
    block.requires_grad_(False).feed_forward.requires_grad_(True)
    modulation = block.text_modulation.out_layer
    modulation.weight.data = modulation.weight.data.to(torch.bfloat16).float()
    store_in_bf16(model)

    assert modulation.weight.dtype == torch.bfloat16

    mask = torch.arange(6) < torch.tensor([[6], [4]])
    inputs = (
        with_gradient(torch.randn(2, 6, WIDTH)),
        torch.randn(2, WIDTH),
        torch.randn(2, 6, 1, 8),
        torch.randn(2, 6, 1, 8),
        mask,
    )
    results = []
    for compiler in (None, torch.compile):
        pieces = blocks.use_fast_blocks(model, blocks.mask_padding(model)).pieces
        piece = (
            pieces["text"]
            if compiler is None
            else CompiledPiece(pieces["text"], compiler(pieces["text"]))
        )
        piece(block, *inputs).square().sum().backward()
        results.append(
            {
                name: parameter.grad.clone()
                for name, parameter in block.feed_forward.named_parameters()
            }
        )
        block.zero_grad()

    assert_close(results[1], results[0], 0.02)
    assert graphs() == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_compiler_that_fails_leaves_a_block_uncompiled(
    strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such machine")

    def double(block: nn.Module, x: Tensor) -> Tensor:
        return 2 * x

    piece = CompiledPiece(double, torch.compile(double, backend=backend), strict=strict)
    x = torch.ones(1, 3)
    if strict:
        with pytest.raises(TorchDynamoException, match="no such machine"):
            piece(nn.Identity(), x)
        return

    for _ in range(2):
        assert torch.equal(piece(nn.Identity(), x), 2 * x)

    (warning,) = [
        record.message for record in caplog.records if record.name == "simpletuner.speed.compile"
    ]
    assert (
        warning == "double is not compiled: backend='backend' raised: ValueError: no such machine"
    )


class Doubling(torch.autograd.Function):
    """The identity with a gradient twice too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Block(nn.Module):
    """A stand-in for a stock block."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, count: int) -> Tensor:
        return count * torch.nn.functional.gelu(self.layer(x))


@pytest.mark.parametrize(("spoil", "is_right"), [(lambda x: x, True), (Doubling.apply, False)])
def test_wrong_gradients_keep_a_block_uncompiled(
    spoil: Callable[[Tensor], Tensor], is_right: bool
) -> None:
    torch.manual_seed(0)
    calls = []

    def compiler(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compiled(x: Tensor, count: int) -> Tensor:
            calls.append(count)
            return function(spoil(x), count)

        return compiled

    block = Block()
    twin = Block()
    verdicts: dict[Case, bool] = {}
    for stock in (block, twin):
        stock.forward = CheckedForward(stock, compiler, verdicts, sampling=False)  # type: ignore[assignment]
    x = torch.randn(2, 4)
    checkpointed = torch.utils.checkpoint.checkpoint(block, x, 3, use_reentrant=False)
    twin(checkpointed, 3).sum().backward()

    assert list(verdicts.values()) == [is_right], "one kind, one shape"
    assert len(calls) == (1 + 3 if is_right else 1), (
        "one to check; two blocks, of which one is computed again"
    )

    assert block.layer.weight.grad is not None


@pytest.mark.usefixtures("one_size")
@pytest.mark.parametrize("speed", first_of(["auto", "reference"]))
def test_compiled_blocks_of_sana_are_verified(sana_checkpoint: Path, speed: str) -> None:
    batch = sana.make_batch(sana_checkpoint, "i2v")
    eager = loss_and_gradients(sana.make_assembly(sana_checkpoint), batch)
    assembly = sana.make_assembly(sana_checkpoint, dynamo_backend="aot_eager", speed=speed)

    assert_close(loss_and_gradients(assembly, batch), eager, 1e-3)

    forward: Any = assembly.adapter.block_layout(assembly.transformer).blocks[0].forward
    assert isinstance(forward.compiled, CompiledOnGrid) == (speed == "auto"), (
        "reference compiles diffusers' own block"
    )

    assert list(forward.verdicts.values()) == [True]
    assert graphs() == 1, (
        "the first block's hidden states have other strides; they share the graph of the others"
    )


@pytest.mark.thorough
def test_few_graphs_serve_all_sizes_of_sana(
    sana_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for clips of all sizes, one for batches; conditioning frames would double them."""
    trace_only(monkeypatch)
    eager, compiled = (
        sana.make_assembly(sana_checkpoint, dynamo_backend=backend)
        for backend in ("no", "aot_eager")
    )
    pair = sana.make_batch(sana_checkpoint, "t2v")

    for number, (frames, height, width) in enumerate(GRIDS):
        batch = (
            pair
            if number == len(GRIDS) - 1
            else replace(pair, embeds=pair.embeds[:1], names=pair.names[:1])
        )
        size = (len(batch.names), 16, frames, height, width)
        latents = torch.randn(size, generator=torch.Generator().manual_seed(number))
        with_latents = replace(batch, latents=latents)
        assert_close(
            loss_and_gradients(compiled, with_latents),
            loss_and_gradients(eager, with_latents),
            1e-3,
        )
        clear(compiled)
        clear(eager)

    assert 0 < graphs() <= 2


def test_every_memory_layout_has_its_own_verdict() -> None:
    """A compiler that is wrong for only some strides must not pass with others."""

    def compiler(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, y, count: function(x, Doubling.apply(y) if y.is_contiguous() else y, count)

    class Adding(Block):
        def forward(self, x: Tensor, y: Tensor, count: int) -> Tensor:
            return super().forward(x + y, count)

    torch.manual_seed(0)
    block = Adding()
    eager = block.forward
    verdicts: dict[Case, bool] = {}
    block.forward = CheckedForward(block, compiler, verdicts, sampling=False)  # type: ignore[assignment]
    for y in (torch.randn(4, 4).t(), torch.randn(4, 4)):
        results = []
        for forward in (block, eager):
            block.zero_grad()
            y = y.detach().requires_grad_()
            forward(torch.ones(4, 4), y, 3).sum().backward()
            results.append(y.grad)
        torch.testing.assert_close(*results)

    assert list(verdicts.values()) == [True, False]


def test_ddp_does_not_split_compiled_functions() -> None:
    """Without a thread, since the compiler's settings belong to one."""

    def splits() -> bool:
        configure_compiler(ones_are_sizes=True)
        return bool(torch._dynamo.config.optimize_ddp)

    with ThreadPoolExecutor() as pool:
        assert [splits(), pool.submit(splits).result()] == [False, False]


@pytest.mark.parametrize("sampling", [False, True])
def test_a_verified_block_samples_compiled_if_it_is_told_to(sampling: bool) -> None:
    block = nn.Linear(3, 3)
    ran: list[str] = []

    def compiled(hidden: Tensor) -> Tensor:
        ran.append("compiled")
        return nn.functional.linear(hidden, block.weight, block.bias)

    forward = CheckedForward(block, lambda function: compiled, {}, sampling)
    hidden = torch.randn(2, 3)

    with torch.no_grad():
        forward(hidden)  # verified by the first inputs
        ran.clear()
        sampled = forward(hidden)

    assert ran == ["compiled"] * sampling
    assert torch.equal(sampled, block(hidden))


@pytest.mark.parametrize("ones_are_sizes", [True, False])
def test_the_compiler_treats_sizes_of_one_as_it_is_told(ones_are_sizes: bool) -> None:
    configure_compiler(ones_are_sizes=not ones_are_sizes)

    configure_compiler(ones_are_sizes=ones_are_sizes)

    assert torch.fx.experimental._config.backed_size_oblivious is ones_are_sizes
