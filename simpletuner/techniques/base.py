"""The interface of techniques, which change the mathematics of a training step.

`choose_noise` is called ahead of a micro-batch's step. The micro-step calls `before_forward` of
every technique, the forward pass, `extra_losses`, `weigh` and the backward pass, all within
`acting`; then `extra_passes`. At its neutral setting, a technique is identical to plain training.
The plan reads its `TechniqueSpec` (`planning.techniques`), which does not import torch. Code that
only observes is a callback (`training.loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from simpletuner.caching.catalogue import FeatureKind
from simpletuner.config.techniques.tread import Route
from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.diffusion.seeds import Place
from simpletuner.distributed.world import World
from simpletuner.models.adapter import BlockLayout, FamilyAdapter, LatentEncoder
from simpletuner.planning.techniques.spec import TechniqueSpec

if TYPE_CHECKING:
    from simpletuner.models.sequence import SequenceGroup

# A forward pass without techniques: returns the model's current velocity prediction.
Predict = Callable[[NoisyBatch], Tensor]
# An extra forward pass, with gradients, through the given function; returns losses by their logged
# names.
ExtraPass = Callable[[Predict], Mapping[str, Tensor]]


class FeatureEncoder(Protocol):
    """Computes the features of one kind."""

    def encode(self, latents: Tensor) -> Tensor:
        """The features of one sample's clean latents `C F H W`; any shape and dtype."""
        ...


class Technique:
    """Base class of all techniques. Its methods change nothing; override as needed.

    Attributes:
        routes: ranges of blocks that some tokens skip, for the FLOPs of a step.
    """

    routes: Sequence[Route] = ()

    def __init__(self, spec: TechniqueSpec) -> None:
        """Keep what training needs of the spec; every class takes the spec of its own name."""

    @property
    def name(self) -> str:
        """Name of its module and its state in a checkpoint; unique, as a class is used once."""
        return type(self).__name__

    def attach(self, site: Site) -> None:
        """Register hooks and build a module.

        Called once, after the model is built and before the optimizer is. Hooks must do nothing
        under `no_grad` and draw no random numbers: activation checkpointing runs a block and its
        hooks twice. For hidden states, use `site.hidden`, which records each only once. torch's
        global generators are seeded for the technique, and restored afterwards.
        """
        self.site = site

    @classmethod
    def load_encoder(
        cls,
        kind: FeatureKind,
        adapter: FamilyAdapter,
        load_vae: Callable[[], LatentEncoder],
        device: torch.device,
    ) -> FeatureEncoder:
        """Load what computes the features of its spec, onto the device.

        Called only if a cache entry is missing.
        """
        raise NotImplementedError

    def module(self) -> nn.Module | None:
        """The technique's trained float32 weights, built in `attach`, or None.

        They are moved to the device, trained in a separate parameter group, and saved in
        checkpoints, but neither published nor part of the moving average.
        """
        return None

    def adopt(self, module: nn.Module) -> None:
        """Receive the module wrapped for several processes, and call that from now on."""

    def choose_noise(self, batch: Batch, noise: Tensor, place: Place) -> Tensor:
        """Choose the noise of a micro-batch, `B C F H W`.

        Offsets and perturbations are added to it later. Called ahead of the step, in the thread
        that reads batches, so it must be a function of its arguments alone. Where samples of a
        micro-batch trade their noise, results depend on the number of processes.

        Args:
            noise: standard normal, on the device of the batch, which is the CPU in a run.
            place: position in the run, for random numbers.
        """
        return noise

    def acting(self, batch: Batch) -> AbstractContextManager[None]:
        """A context around the forward and backward pass of a micro-batch, undone on exit."""
        return nullcontext()

    def before_forward(self, noisy: NoisyBatch, predict: Predict) -> NoisyBatch:
        """Replace the transformer's input or its target.

        `predict` runs the model without gradients. All processes must make the same decision
        whether to return losses or metrics, for all samples of a micro-step together. With sharded
        weights, they must also run the same number of forward passes.
        """
        return noisy

    def kept_tokens(self, block: int) -> Tensor | None:
        """The tokens that pass through a visual block in this micro-step, int64 `B K`.

        None for all tokens.
        """
        return None

    def weigh(self, noisy: NoisyBatch, prediction: Tensor, loss: Tensor) -> Tensor:
        """Weigh the elementwise loss, float32 `B C F H W`; its mean is minimised."""
        return loss

    def extra_losses(self, noisy: NoisyBatch, prediction: Tensor) -> Mapping[str, Tensor]:
        """Scalars to add to the loss, by their logged names."""
        return {}

    def extra_passes(self, noisy: NoisyBatch) -> Sequence[ExtraPass]:
        """Extra passes of this micro-batch, the same number in all processes.

        They run after the main backward pass, when its graph is freed and no technique is `acting`.
        """
        return ()

    def metrics(self) -> Mapping[str, Tensor]:
        """Scalars of the last micro-step to log besides the losses, without gradients."""
        return {}

    def summary(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Derived numbers to log, from the means of a step over processes and micro-steps."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State for an exact resume besides the module."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True)
class Site:
    """The argument of `attach`.

    Attributes:
        transformer: with LoRA, checkpointing and compilation; not yet on the device.
        device: compute device.
        dtype: dtype of the transformer's hidden states.
        others: all techniques of the run, including this one, in calling order.
        disabled: context in which the model predicts as before training.
        hidden: hidden states of visual blocks in the forward pass of each micro-step.
        load_latent_encoder: loads the VAE onto the device, in the run's dtype.
        world: the processes that train together.
        is_sharded: weights are sharded, so all processes must run the same forward passes.
    """

    adapter: FamilyAdapter
    transformer: nn.Module
    layout: BlockLayout
    device: torch.device
    dtype: torch.dtype
    others: Sequence[Technique]
    disabled: Callable[[], AbstractContextManager[None]]
    hidden: HiddenStates
    load_latent_encoder: Callable[[], LatentEncoder]
    world: World = field(default_factory=World)
    is_sharded: bool = False

    def kept_tokens(self, block: int) -> Tensor | None:
        """The tokens in the hidden states of a visual block, int64 `B K`; None if all are."""
        for technique in self.others:
            kept = technique.kept_tokens(block)
            if kept is not None:
                return kept
        return None


class HiddenStates:
    """The output of watched visual blocks in the forward pass of a micro-step, for a loss.

    Compilation and streaming replace a block's `forward`; hooks run outside of it, independently of
    both. Activation checkpointing runs a block and its hooks again in the backward pass. The
    tensors of that second run are not part of the step's graph, so hooks record only while a
    forward pass is `open`.
    """

    def __init__(self, layout: BlockLayout, group: SequenceGroup | None = None) -> None:
        self._layout = layout
        self._group = group
        self._watched: set[int] = set()
        self._recorded: dict[int, Tensor] = {}
        self._is_open = False

    def watch(self, block: int) -> None:
        """Record the output of a visual block in every micro-step from now on."""
        if block not in self._watched:
            self._watched.add(block)
            # Prepended, to record the output before TREAD merges skipped tokens.
            self._layout.visual_blocks[block].register_forward_hook(
                partial(self._keep, block), prepend=True
            )

    @contextmanager
    def open(self) -> Iterator[None]:
        """Record within this context, which must span the forward pass and all reads."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            # Otherwise the graph and its activations would stay alive until the next forward pass.
            self._recorded.clear()

    def __getitem__(self, block: int) -> Tensor:
        """The output `B S D` of a watched block, as part of the graph.

        `S` counts the tokens that passed through the block.
        """
        hidden = self._recorded[block]
        return hidden if self._group is None else self._group.gathered(hidden)

    def _keep(self, block: int, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self._is_open:
            self._recorded[block] = output
