"""Regional compilation: torch.compile for the repeated blocks of a transformer.

Blocks of one class share compiled code. Only a function inside `block.forward` is compiled, so that
hooks on blocks, checkpointing and weight streaming stay outside.

Tests compare compiled fast blocks with uncompiled ones. Blocks of families without fast blocks are
compared in the run, at the first batch of each shape, and stay uncompiled if their gradients
differ.
"""

from __future__ import annotations

import logging
import math
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
from simpletuner.speed.backward import BackwardPass, gradients_as_needed, with_gradient
from simpletuner.speed.recomputation import checkpointed, outside_checkpoints

# Largest accepted relative error of gradients. Compiled code rounds differently: correct blocks are
# off by thousandths, miscompiled ones by more than 1. So any bound in between separates them.
TOLERANCE = 0.05

# By default, torch stops recompiling a function after eight versions. Padding, gradients, empty
# captions of one token, and Sana's timesteps per clip or token multiply to more.
VERSIONS = 16

# Inductor writes kernels of products only for GPUs with as many multiprocessors, as an RTX 3080
# has, and warns on smaller ones (`torch._inductor.utils.is_big_gpu`).
TUNED_MULTIPROCESSORS = 68

logger = logging.getLogger(__name__)


@dataclass
class CompiledPiece:
    """A function of `FastBlocks.pieces`, compiled for any number of tokens.

    It stays uncompiled if the compiler fails.

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
        if not torch.is_grad_enabled() and not self.sampling:
            return self.eager(block, hidden, *others)
        if hidden.shape[1] == 1:  # the token of an empty caption is not worth another graph
            return self.eager(block, hidden, *others)
        configure_compiler(ones_are_sizes=self.ones_are_sizes)
        inputs = (hidden, *others)
        with gradients_as_needed(hidden):
            self.sizes.mark(inputs, sizes_of)
            try:
                return self.compiled(block, *inputs)
            except TorchDynamoException as error:
                if self.strict:
                    raise
                logger.warning("%s is not compiled: %s", self.eager.__name__, _reason(error))
                self.compiled = self.eager
        return self.eager(block, *inputs)


# What one compiled version serves: training or sampling, a class of blocks, and the shapes of the
# inputs.
Case = tuple[object, ...]


class CheckedForward:
    """`forward` of a stock block: compiled if its gradients have been verified, else uncompiled.

    Each case is verified with its first inputs: on CPUs, inductor miscompiles blocks of Sana Video,
    and some gradients are silently wrong by orders of magnitude. Without gradients, outputs are
    compared.

    Args:
        verdicts: whether compiled code is right, by case; shared by all blocks.
        sampling: also run compiled code without gradients.
    """

    def __init__(
        self, block: nn.Module, compiler: Compiler, verdicts: dict[Case, bool], sampling: bool
    ) -> None:
        self.block = block
        self.verdicts = verdicts
        self.sampling = sampling
        self.backward = BackwardPass()
        self.eager = block.forward
        self.compiled = compiler(block.forward)

    def __call__(self, hidden: Tensor, *others: Any, **named: Any) -> Any:
        # The first block's hidden states are a transposed view, whose strides would need a separate
        # graph.
        hidden = self.backward.prepare(self.block, hidden.contiguous(), *others, *named.values())
        inputs = (hidden, *others)
        if not torch.is_grad_enabled() and not self.sampling:
            return self.eager(*inputs, **named)
        configure_compiler(ones_are_sizes=False)  # else the attention of Sana Video would break
        guards = [_guard(value) for value in (*inputs, *named.values())]
        with gradients_as_needed(hidden):
            case = (torch.is_grad_enabled(), type(self.block), *guards)
            if case not in self.verdicts:
                self.verdicts[case] = self._is_right(inputs, named)
            forward = self.compiled if self.verdicts[case] else self.eager
            return forward(*inputs, **named)

    def _is_right(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Compare the compiled with the uncompiled block; logs why it is not used."""
        name = type(self.block).__name__
        forwards = [partial(self.eager, **named), partial(self.compiled, **named)]
        try:
            error = largest_error(self.block, forwards, inputs)
        except TorchDynamoException as failure:
            logger.warning("%s is not compiled at this size: %s", name, _reason(failure))
            return False
        if error < TOLERANCE:
            return True
        compared = "gradients" if torch.is_grad_enabled() else "output"
        message = "%s is not compiled at this size: relative error of its %s %.2g."
        logger.warning(message, name, compared, error)
        return False


def compile_blocks(
    layout: BlockLayout,
    fast: FastBlocks | None,
    backend: str,
    launch: LaunchConfig,
    *,
    sampling: bool,
    recomputing: bool,
    tunes_int8: bool,
) -> None:
    """Compile the functions of fast blocks or, for families without them, `forward` of blocks.

    The latter is verified.

    Args:
        sampling: also compile previews, which run without gradients.
        recomputing: let the last functions of checkpointed blocks recompute themselves.
        tunes_int8: choose the kernels of int8 products in fast blocks by measurements.
    """
    any_sizes = fast is not None or layout.compiled is not None
    compiler = make_compiler(backend, launch, any_sizes=any_sizes)
    if fast is not None:
        if tunes_int8:
            from simpletuner.speed.int8_kernels import tuning_int8  # imports inductor

            compiler = tuning_int8(compiler)
        _compile_pieces(fast, compiler, launch, sampling=sampling, recomputing=recomputing)
        backward = BackwardPass()
        for block in layout.blocks:
            _require_gradients(block, backward)
        return
    # The first stock block of a class is verified for all of them.
    verdicts: dict[Case, bool] = {}
    if layout.compiled is not None:
        compiler = partial(layout.compiled, compiler)
    for block in layout.blocks:
        block.forward = CheckedForward(block, compiler, verdicts, sampling)


def _compile_pieces(
    fast: FastBlocks,
    compiler: Compiler,
    launch: LaunchConfig,
    *,
    sampling: bool,
    recomputing: bool,
) -> None:
    """Compile the functions of fast blocks."""
    if recomputing:
        fast.outside_checkpoint = outside_checkpoints()
        fast.recomputing = {name: checkpointed(fast.pieces[name]) for name in fast.last}
    for pieces in (fast.pieces, fast.recomputing):
        for name, piece in pieces.items():
            pieces[name] = CompiledPiece(
                eager=piece,
                compiled=compiler(piece),
                sampling=sampling,
                strict=launch.dynamo_fullgraph,
                # Not with dynamo_dynamic, where even constant ones are symbols, and equal sizes
                # become one symbol.
                ones_are_sizes=not launch.dynamo_dynamic,
            )


def _require_gradients(block: nn.Module, backward: BackwardPass) -> None:
    """Let the hidden states of a fast block require a gradient if the backward pass reaches it."""
    forward: Forward = block.forward

    def run(hidden: Tensor, *others: Any) -> Any:
        return forward(backward.prepare(block, hidden, *others), *others)

    block.forward = run


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


def can_tune_int8(backend: str, launch: LaunchConfig, device: torch.device) -> bool:
    """Whether inductor may write kernels of int8 products for this device, and time them.

    A `dynamo_mode` decides itself what is tuned. With other kernels, results are rounded to bf16 at
    other places, so deterministic runs must not depend on measurements.
    """
    if backend != "inductor" or launch.dynamo_mode is not None:
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False
    if device.type != "cuda" or torch.version.hip:
        return False
    properties = torch.cuda.get_device_properties(device)
    return bool(properties.multi_processor_count >= TUNED_MULTIPROCESSORS)


def sizes_of(tensor: Tensor) -> list[int]:
    """Dimensions that vary between batches: samples and tokens.

    Per-sample vectors, `B C`, have no tokens, and a symbolic width would slow down matmuls and
    loops.
    """
    has_tokens = tensor.ndim > 2 or tensor.dtype == torch.bool  # masks are bool, `B S`
    return [0, 1] if has_tokens else [0]


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


def largest_error(block: nn.Module, forwards: Iterable[Forward], inputs: Sequence[Any]) -> float:
    """The largest relative error, by norm, of the second forward compared with the first.

    Compares the gradients of a block's weights and inputs or, without gradients, its output.
    """
    results: list[list[Tensor]] = []
    for forward in forwards:
        if torch.is_grad_enabled():
            results.append(_gradients(block, forward, inputs))
        else:
            results.append([forward(*inputs)])
    return max(map(_relative_error, *results), default=0.0)


def _relative_error(expected: Tensor, actual: Tensor) -> float:
    # If the expected value is zero, any difference counts as a large error.
    size = expected.float().norm().clamp_min(1e-12)
    error = float((actual - expected).float().norm() / size)
    return math.inf if math.isnan(error) else error  # `max` would ignore NaN


def _gradients(block: nn.Module, forward: Forward, inputs: Sequence[Any]) -> list[Tensor]:
    """Gradients of half the squared norm of the output, for all that needs a gradient.

    The derivative of that loss by the output is the output itself, so every element counts, and no
    target is needed.
    """
    copies: list[Any] = []
    for value in inputs:
        if isinstance(value, Tensor) and value.is_floating_point():
            # A leaf of a graph of its own, which leaves the gradients of the run alone.
            value = value.detach().requires_grad_(value.requires_grad)
        copies.append(value)
    with outside_checkpoints():
        output = forward(*copies)
        leaves = [
            value
            for value in (*copies, *block.parameters())
            if isinstance(value, Tensor) and value.requires_grad
        ]
        gradients = torch.autograd.grad(output, leaves, output.detach(), allow_unused=True)
    # A zero for what the output does not depend on, in either version of the block.
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for gradient, leaf in zip(gradients, leaves, strict=True)
    ]


def _reason(error: Exception) -> str:
    """The compiler's message without its trailing advice."""
    return " ".join(str(error).splitlines()[:2])


def _guard(value: Any) -> object:
    """What compiled code depends on: shape, strides and dtype of a tensor, or the value itself."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, tuple | list):  # of rotary tables, which are new in every step
        return tuple(map(_guard, value))
    return value


class FirstGradients:
    """`forward` of a block that logs how far quantised products change its first gradients.

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
    """A context in which quantised layers multiply by their unpacked, still rounded, weights."""
    layers = [module for module in block.modules() if isinstance(module, QuantisedLinear)]
    forms = [layer.form for layer in layers]
    for layer in layers:
        layer.form = ScaledRows()
    try:
        yield
    finally:
        for layer, form in zip(layers, forms, strict=True):
            layer.form = form
