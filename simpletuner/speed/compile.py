"""Regional compilation: torch.compile for the repeated blocks of a transformer, and checks of their
gradients.

Blocks of one class share compiled code. Only a function inside `block.forward` is compiled, so that
hooks on blocks, checkpointing and weight streaming stay outside.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from simpletuner.config.launch import LaunchConfig
from simpletuner.memory.quantisation.layers import QuantisedLinear
from simpletuner.memory.quantisation.scaled_rows import ScaledRows
from simpletuner.models.adapter import BlockLayout, Compiler, Forward
from simpletuner.models.blocks import DynamicSizes, FastBlocks, call_kernel
from simpletuner.speed.recomputation import checkpointed, outside_checkpoints

# Largest accepted relative error of gradients. Compiled code rounds differently: correct blocks are
# off by thousandths, wrong blocks by more than 1.
TOLERANCE = 0.05

# By default, torch stops recompiling a function after eight versions. Padding, gradients, empty
# captions of one token, and Sana's timesteps per clip or token multiply to more.
VERSIONS = 16

logger = logging.getLogger(__name__)


@dataclass
class CompiledPiece:
    """A function of `FastBlocks.pieces`, compiled for any number of tokens; uncompiled if the
    compiler fails.

    Attributes:
        sampling: also run compiled code in calls without gradients, as in previews.
        strict: raise the compiler's errors instead of falling back.
        ones_are_sizes: see `configure_compiler`.
        sizes: the dynamic sizes of its inputs so far.
    """

    eager: Forward
    compiled: Forward
    sampling: bool = False
    strict: bool = False
    ones_are_sizes: bool = True
    sizes: DynamicSizes = field(default_factory=DynamicSizes)

    def __call__(self, block: nn.Module, hidden: Tensor, *others: Tensor | None) -> Any:
        # A single token, from an empty caption, is not worth another graph.
        if not (torch.is_grad_enabled() or self.sampling) or hidden.shape[1] == 1:
            return self.eager(block, hidden, *others)
        configure_compiler(ones_are_sizes=self.ones_are_sizes)
        inputs = (with_gradient(hidden), *others)
        self.sizes.mark(inputs, sizes_of)
        try:
            return self.compiled(block, *inputs)
        except TorchDynamoException as error:
            if self.strict:
                raise
            logger.warning("%s is not compiled: %s", self.eager.__name__, _reason(error))
            self.compiled = self.eager
        return self.eager(block, *inputs)


Case = tuple[object, ...]  # class of a block, and shapes and strides of its inputs


class CheckedForward:
    """`forward` of a stock block: compiled if its gradients have been verified, else uncompiled.

    Each shape is verified with its first inputs: on CPUs, inductor miscompiles blocks of Sana
    Video, and some gradients are silently wrong by orders of magnitude. Without gradients, outputs
    are compared.
    """

    def __init__(
        self, block: nn.Module, compiler: Compiler, verdicts: dict[Case, bool], sampling: bool
    ) -> None:
        self.block = block
        self.verdicts = verdicts
        self.sampling = sampling
        self.eager = block.forward
        self.compiled = compiler(block.forward)

    def __call__(self, hidden: Tensor, *others: Any, **named: Any) -> Any:
        # The first block's hidden states are a transposed view, whose strides would need a separate
        # graph.
        inputs = (with_gradient(hidden.contiguous()), *others)
        training = torch.is_grad_enabled()
        if not training and not self.sampling:
            return self.eager(*inputs, **named)
        # Training and sampling are compiled separately.
        case = (
            training,
            type(self.block),
            *(_shape(value) for value in (*inputs, *named.values())),
        )
        configure_compiler(
            ones_are_sizes=False
        )  # dynamic ones would break the attention of Sana Video
        if case not in self.verdicts:
            self.verdicts[case] = self._is_right(inputs, named)
        return (self.compiled if self.verdicts[case] else self.eager)(*inputs, **named)

    def _is_right(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> bool:
        name = type(self.block).__name__
        forwards = [partial(each, **named) for each in (self.eager, self.compiled)]
        try:
            worst = largest_error(self.block, forwards, inputs)
        except TorchDynamoException as error:
            logger.warning("%s is not compiled at this size: %s", name, _reason(error))
            return False
        if worst >= TOLERANCE:
            of = "gradients" if torch.is_grad_enabled() else "output"
            logger.warning(
                "%s is not compiled at this size: relative error of its %s %.2g.", name, of, worst
            )
        return worst < TOLERANCE


def compile_blocks(
    layout: BlockLayout,
    fast: FastBlocks | None,
    backend: str,
    launch: LaunchConfig,
    *,
    sampling: bool,
    recomputing: bool,
) -> None:
    """Compile the functions of fast blocks; for families without them, the forward of blocks, with
    verification.

    Args:
        sampling: also compile previews, which run without gradients.
        recomputing: let the last functions of checkpointed blocks recompute themselves.
    """
    any_sizes = fast is not None or layout.compiled is not None
    strict = launch.dynamo_fullgraph
    compiler = make_compiler(backend, launch, any_sizes=any_sizes)
    if fast is not None:
        if recomputing:
            fast.outside_checkpoint = outside_checkpoints()
            fast.recomputing = {name: checkpointed(fast.pieces[name]) for name in fast.last}
        for pieces in (fast.pieces, fast.recomputing):
            for name, piece in pieces.items():
                # Not with dynamo_dynamic, where even constant ones are symbols, and equal sizes
                # become one symbol.
                pieces[name] = CompiledPiece(
                    piece, compiler(piece), sampling, strict, not launch.dynamo_dynamic
                )
        return
    # The first stock block of a class is verified for all of them.
    verdicts: dict[Case, bool] = {}
    compiled = compiler if layout.compiled is None else partial(layout.compiled, compiler)
    for block in layout.blocks:
        block.forward = CheckedForward(block, compiled, verdicts, sampling)


def make_compiler(backend: str, launch: LaunchConfig, *, any_sizes: bool) -> Compiler:
    """`torch.compile` as configured.

    Args:
        any_sizes: one graph serves all sizes; otherwise every shape is compiled.
    """
    dynamic: bool | None = False
    if launch.dynamo_dynamic:
        dynamic = True
    elif any_sizes:
        dynamic = None  # symbols only for sizes that are marked or change
    return partial(
        torch.compile,
        backend=backend,
        mode=launch.dynamo_mode,
        fullgraph=launch.dynamo_fullgraph,
        dynamic=dynamic,
    )


def sizes_of(tensor: Tensor) -> list[int]:
    """Dimensions that vary between batches: samples and tokens.

    Per-sample vectors, `B C`, have no tokens, and a symbolic width would slow down matmuls and
    loops.
    """
    return [0, 1] if tensor.ndim > 2 or tensor.dtype == torch.bool else [0]


def configure_compiler(*, ones_are_sizes: bool) -> None:
    """Configure the compiler for this thread.

    Its settings are per thread, and on a GPU autograd recomputes checkpoints in separate threads.
    If only those threads reached the recompile limit, recomputation would not match the forward
    pass. The backward pass is compiled with the forward pass, where a failure can still fall back
    to the uncompiled function.

    Args:
        ones_are_sizes: treat sizes that are 1 at first as dynamic too; else batches of one are
            compiled separately.
    """
    if torch._dynamo.config.recompile_limit < VERSIONS:
        torch._dynamo.config.recompile_limit = VERSIONS
    if not torch._functorch.config.force_non_lazy_backward_lowering:
        torch._functorch.config.force_non_lazy_backward_lowering = True
    # This would split compiled functions at DDP's buckets, but they end with every block anyway.
    if torch._dynamo.config.optimize_ddp:
        torch._dynamo.config.optimize_ddp = False
    shapes: Any = torch.fx.experimental._config
    if shapes.backed_size_oblivious != ones_are_sizes:
        shapes.backed_size_oblivious = ones_are_sizes


def with_gradient(hidden: Tensor) -> Tensor:
    """Hidden states that require a gradient in training, like the outputs of blocks.

    The first block's input does not, and would need a separate compiled version.
    """
    return (
        hidden
        if hidden.requires_grad or not torch.is_grad_enabled()
        else hidden.detach().requires_grad_()
    )


def largest_error(block: nn.Module, forwards: Iterable[Forward], inputs: Sequence[Any]) -> float:
    """The largest relative error, by norm, of the second forward compared with the first.

    Compares the gradients of a block's weights and inputs or, without gradients, its output.
    """
    trains = torch.is_grad_enabled()
    results = (
        _gradients(block, forward, inputs) if trains else [forward(*inputs)] for forward in forwards
    )
    return max(map(_error, *results), default=0.0)


def _error(right: Tensor, wrong: Tensor) -> float:
    # If the right value is zero, any difference counts as a large error.
    error = float((wrong - right).float().norm() / right.float().norm().clamp_min(1e-12))
    return error if error == error else float("inf")  # `max` would ignore NaN


def _gradients(block: nn.Module, forward: Forward, inputs: Sequence[Any]) -> list[Tensor]:
    """Gradients of half the squared norm of the output."""
    copies = [
        value.detach().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in inputs
    ]
    with outside_checkpoints():
        output = forward(*copies)
        wanted = [
            each
            for each in (*copies, *block.parameters())
            if isinstance(each, Tensor) and each.requires_grad
        ]
        gradients = torch.autograd.grad(output, wanted, output.detach(), allow_unused=True)
    return [
        torch.zeros_like(like) if gradient is None else gradient
        for gradient, like in zip(gradients, wanted, strict=True)
    ]


def _reason(error: Exception) -> str:
    """The compiler's message without its trailing advice."""
    return " ".join(str(error).splitlines()[:2])


def _shape(value: Any) -> object:
    """The guard of compiled code: shape, strides and dtype of a tensor, or the value itself."""
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value


class FirstGradients:
    """`forward` of a block that logs how far quantised products change its gradients, in the first
    training call.

    The block is compared with its unpacked products on the run's batch, because the error depends
    on outliers, which random inputs lack. Both run uncompiled, with the same dropout.

    Args:
        message: log message, with a placeholder for the error.
        fast: the state of fast blocks.
    """

    def __init__(self, message: str, block: nn.Module, fast: FastBlocks | None) -> None:
        self.message = message
        self.block = block
        self.fast = fast or FastBlocks({})
        self.eager = block.forward
        self.pieces = dict(self.fast.pieces)
        self.is_pending = True

    def install(self) -> None:
        """Replace `forward`; the block may have been compiled since construction."""
        forward = self.block.forward

        def logged(hidden: Tensor, *others: Any, **named: Any) -> Any:
            if self.is_pending and torch.is_grad_enabled():
                self.is_pending = False
                self._log(with_gradient(hidden), *others, **named)
            return forward(hidden, *others, **named)

        self.block.forward = logged

    def _log(self, *inputs: Any, **named: Any) -> None:
        def quantised(*inputs: Any) -> Any:
            torch.manual_seed(0)
            return self.eager(*inputs, **named)

        def unpacked(*inputs: Any) -> Any:
            with unpacked_products(self.block):
                return quantised(*inputs)

        devices = [inputs[0].device] if inputs[0].is_cuda else []
        # The measurement must not advance the run's random streams.
        with torch.random.fork_rng(devices), self._uncompiled():
            error = largest_error(self.block, [unpacked, quantised], inputs)
        logger.info(self.message, error)

    @contextmanager
    def _uncompiled(self) -> Iterator[None]:
        """Uncompiled pieces, and attention that checkpointing does not record."""
        compiled = dict(self.fast.pieces)
        self.fast.pieces.update(self.pieces)
        try:
            with self.fast.self_attention.through(call_kernel):
                yield
        finally:
            self.fast.pieces.update(compiled)


@contextmanager
def unpacked_products(block: nn.Module) -> Iterator[None]:
    """A context in which quantised layers multiply by their unpacked, but still rounded,
    weights.
    """
    layers = [module for module in block.modules() if isinstance(module, QuantisedLinear)]
    forms = [layer.form for layer in layers]
    for layer in layers:
        layer.form = ScaledRows()
    try:
        yield
    finally:
        for layer, form in zip(layers, forms, strict=True):
            layer.form = form
