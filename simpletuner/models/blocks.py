"""Fast blocks: the repeated blocks of a transformer as functions that training can compile or wrap, and their kernels.

Fast blocks (`FamilyAdapter.use_fast_blocks`) compute exactly the same as the diffusers blocks. Self-attention is a
separate function, so that checkpointing can keep its output and each device can use its fastest kernel.

Every call's kernel is timed once per device and stored in `kernel_choices.json`, in the output folder and, for other
runs, in the cache folder. Kernels round differently and timings vary, so a choice applies to all processes until the
device or a version changes: resumed runs, previews and `simpletuner sample` then compute like the run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from simpletuner.atomic import changing, write_json
from simpletuner.distributed.world import World

if TYPE_CHECKING:
    from simpletuner.models.sequence import SequenceGroup

AttentionKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
AttentionCall = Callable[[AttentionKernel, Tensor, Tensor, Tensor], Tensor]
# Errors unrelated to the tested kernel: out of memory, or a device made unusable by an earlier call.
DEVICE_FAILURES = (torch.OutOfMemoryError, torch.AcceleratorError)


def milliseconds(run: Callable[[], object], repeats: int = 3) -> float:
    """Time of a call on a CUDA device, the shortest of several: the first also loads kernels."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def torch_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(Q Kᵀ / √D) V of `B S H D` tensors; `mask` `B 1 1 S` is true for visible keys."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))  # B H S D
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def call_kernel(kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return kernel(query, key, value)


class SelfAttention:
    """The self-attention shared by all blocks of a transformer; never part of a compiled function.

    Attributes:
        choose: chooses the kernel of a dense call; may time kernels, since it never runs inside a compiled function.
        group: sequence-parallel group, which shards the heads here; None without one.
    """

    group: SequenceGroup | None = None

    def __init__(self) -> None:
        self.choose: Callable[[Tensor, Tensor, Tensor], AttentionKernel] = lambda query, key, value: torch_attention
        self._call: AttentionCall = call_kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel | None = None) -> Tensor:
        group = self.group if torch.is_grad_enabled() else None
        if group is not None:
            query, key, value = (group.by_head(each) for each in (query, key, value))
        out = self._call(kernel or self.choose(query, key, value), query, key, value)
        return out if group is None else group.by_token(out)

    @property
    def shares(self) -> int:
        """How many processes share the heads of a call."""
        return 1 if self.group is None or not torch.is_grad_enabled() else self.group.size

    @property
    def is_kept(self) -> bool:
        """Whether calls are redirected, as in checkpointed blocks that keep the result."""
        return self._call is not call_kernel

    @contextmanager
    def through(self, call: AttentionCall) -> Iterator[None]:
        """Redirect calls to `call`."""
        previous, self._call = self._call, call
        try:
            yield
        finally:
            self._call = previous


class FreeSizes:
    """Marks dimensions as dynamic for the compiler.

    Marking takes longer than launching a kernel, so inputs are marked once per shape, and again after a compilation.
    """

    def __init__(self) -> None:
        self._marked: set[object] = set()
        self._graphs = 0

    def mark(self, inputs: Sequence[Tensor | None], dimensions: Callable[[Tensor], Sequence[int]]) -> None:
        """Mark `dimensions` of the inputs of a call."""
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if graphs != self._graphs:
            self._graphs = graphs
            self._marked.clear()
        kinds = [None if each is None else (each.shape, each.dtype, each.requires_grad) for each in inputs]
        # Training and sampling are compiled separately, as are different dtypes.
        call = (torch.is_grad_enabled(), *kinds)
        if call in self._marked:
            return
        self._marked.add(call)
        for tensor in inputs:
            if tensor is not None:
                # Unlike `mark_dynamic`, this does not raise if the compiler must specialise, as for a size of 1.
                torch._dynamo.maybe_mark_dynamic(tensor, [*dimensions(tensor)])


@dataclass
class FastBlocks:
    """State shared by all fast blocks of a transformer.

    Attributes:
        pieces: the functions before and after the self-attention, by name; replacing one affects all blocks. The first
            argument is a block, the second its hidden states, the others are tensors or None. Dimension 1 of every
            tensor counts tokens, or is 1, or is the same at every size.
        last: names of functions that end a block.
        recomputing: versions of the last functions that keep only their inputs for the backward pass, by name.
        outside_checkpoint: context around these versions that hides the enclosing block's checkpoint.
    """

    pieces: dict[str, Callable[..., Any]]
    self_attention: SelfAttention = field(default_factory=SelfAttention)
    last: tuple[str, ...] = ()
    recomputing: dict[str, Callable[..., Any]] = field(default_factory=dict)
    outside_checkpoint: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def finish(self, name: str, *inputs: Any) -> Any:
        """Run the last function of a block.

        In a checkpointed block, a version that recomputes itself is outside the checkpoint, whose recomputation ends
        before it.
        """
        if name not in self.recomputing or not self.self_attention.is_kept:
            return self.pieces[name](*inputs)
        with self.outside_checkpoint:
            return self.recomputing[name](*inputs)


CHOICES_FILE = "kernel_choices.json"
# Part of a platform's name, since another version may have other speeds and rounding.
KERNEL_PACKAGES = ("triton", "flash-attn", "flash-attn-3", "flash-attn-4")

logger = logging.getLogger(__name__)

# Device and versions -> call -> kernel.
Choices = dict[str, dict[str, str]]
_CHOICES = TypeAdapter(Choices)


class KernelChoices:
    """Kernel choices of a process, in memory only until `open`."""

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self._world = World()
        self._known: Choices = {}
        self._others: Choices = {}

    def open(self, folder: Path | None, *earlier: Path, world: World = World(), shared: Path | None = None) -> None:
        """Read the choices of a folder, and store new ones there. Collective.

        Args:
            folder: None to store nothing.
            earlier: folders of the runs that this run continues or samples; their choices take precedence.
            world: the processes that must make the same choices.
            shared: folder with the choices of all runs, used for calls without a choice, and updated.
        """
        self._paths, self._world = [each / CHOICES_FILE for each in (folder, shared) if each is not None], world

        def collect() -> tuple[Choices, Choices]:
            path = folder and folder / CHOICES_FILE
            stored = path and read_choices(path)
            choices = merge_choices(stored or {}, *(read_choices(run / CHOICES_FILE) or {} for run in earlier))
            if path is not None and choices != stored and (choices or path.exists()):
                write_json(path, choices, durable=False)
            return choices, (shared and read_choices(shared / CHOICES_FILE)) or {}

        self._known, self._others = world.on_main(collect)

    def choose(self, device: torch.device, call: str, among: Collection[str], pick: Callable[[], str]) -> str:
        """The kernel of a call.

        Args:
            call: everything that determines a kernel's speed.
            among: kernels that may be stored.
            pick: times the kernels; called if none is stored for this device and these versions.
        """
        platform = describe_platform(device)
        known = self._known.get(platform, {}).get(call)
        # A file from another version of this program may name an unknown kernel.
        if known is not None and known in among:
            return known
        picked = self._others.get(platform, {}).get(call)
        if picked is None or picked not in among:
            if self._known and platform not in self._known:
                logger.info("Kernels were chosen on %s, and are timed anew on %s.", "; ".join(self._known), platform)
            picked = pick()
        # A fallback, such as dense instead of sparse attention, is not stored, so the next run tries again.
        if picked not in among:
            return picked
        # Timings differ between processes, so the first result decides for all.
        chosen = self._world.first(f"{platform}: {call}", picked)
        self._known = merge_choices(self._known, {platform: {call: chosen}})
        if chosen == picked:  # otherwise the first process has written it
            self._store()
        return chosen

    def _store(self) -> None:
        for path in self._paths:
            # Read again, since other processes may have added their calls meanwhile.
            with changing(path):
                write_json(path, merge_choices(read_choices(path) or {}, self._known), durable=False)

    def knows(self, device: torch.device, call: str) -> bool:
        """Whether a kernel has been chosen for a call."""
        return call in self._known.get(describe_platform(device), {})


KERNELS = KernelChoices()  # those of this process


def read_choices(path: Path) -> Choices | None:
    """The choices in a file; None if it is missing or, with a warning, damaged."""
    try:
        return _CHOICES.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        logger.warning("%s is damaged: kernels are timed again, and may round differently.", path)
        return None


def merge_choices(*parts: Choices) -> Choices:
    """Merge choices; later parts take precedence."""
    merged: Choices = {}
    for platform, calls in (item for part in parts for item in part.items()):
        merged.setdefault(platform, {}).update(calls)
    return merged


@functools.cache
def describe_platform(device: torch.device) -> str:
    """A device, and the versions of the libraries that compute on it."""
    on_gpu = device.type == "cuda"
    parts = [torch.cuda.get_device_name(device) if on_gpu else device.type, f"torch {torch.__version__}"]
    parts += [f"cuDNN {torch.backends.cudnn.version()}"] if on_gpu else []
    for package in KERNEL_PACKAGES:
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(parts)
