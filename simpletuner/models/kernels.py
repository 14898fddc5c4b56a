"""The kernel of each call, timed once per device: `kernel_choices.json` in the output folder.

Kernels round differently, and timings vary. So a choice holds for all processes, and until the device or a version
changes: resumed runs, previews and `simpletuner sample` then compute as the run did.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from simpletuner.atomic import write_json
from simpletuner.distributed.world import World

CHOICES_FILE = "kernel_choices.json"
KERNEL_PACKAGES = ("triton", "flash-attn", "flash-attn-3", "flash-attn-4")

logger = logging.getLogger(__name__)

# Device and versions -> call -> kernel.
Choices = dict[str, dict[str, str]]
_CHOICES = TypeAdapter(Choices)


class KernelChoices:
    """The choices of a process; in memory only until `open`."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._world = World()
        self._known: Choices = {}

    def open(self, folder: Path | None, *earlier: Path, world: World = World()) -> None:
        """Read the choices of a folder, and store new ones there. Collective.

        Args:
            folder: None to store nothing.
            earlier: folders of the runs that this one continues or samples; their choices take precedence.
            world: the processes that must choose alike.
        """
        self._path, self._world = folder and folder / CHOICES_FILE, world
        self._known = world.on_main(lambda: self._collect([each / CHOICES_FILE for each in earlier]))

    def choose(self, device: torch.device, call: str, among: Collection[str], pick: Callable[[], str]) -> str:
        """The kernel of a call.

        Args:
            call: everything that determines a kernel's speed.
            among: kernels that may be remembered.
            pick: times the kernels, if none is stored for this device and these versions.
        """
        place = describe_place(device)
        known = self._known.get(place, {}).get(call)
        if known is not None and known in among:
            return known
        if self._known and place not in self._known:
            logger.info("Kernels were chosen on %s, and are timed anew on %s.", "; ".join(self._known), place)
        picked = pick()
        return self._remember(place, call, picked) if picked in among else picked

    def knows(self, device: torch.device, call: str) -> bool:
        """Whether the kernel of a call was chosen."""
        return call in self._known.get(describe_place(device), {})

    def _remember(self, place: str, call: str, picked: str) -> str:
        chosen = self._world.first(f"{place}: {call}", picked)
        self._known = merge_choices(self._known, {place: {call: chosen}})
        if self._path is not None and chosen == picked:  # otherwise the first process has written it
            write_json(self._path, merge_choices(read_choices(self._path) or {}, self._known), durable=False)
        return chosen

    def _collect(self, earlier: list[Path]) -> Choices:
        """All choices, after they were written to the file."""
        own = None if self._path is None else read_choices(self._path)
        found = merge_choices(own or {}, *(read_choices(path) or {} for path in earlier))
        if self._path is not None and found != own and (found or self._path.exists()):
            write_json(self._path, found, durable=False)
        return found


KERNELS = KernelChoices()  # those of this process


def read_choices(path: Path) -> Choices | None:
    """The choices in a file; None if it is absent, or damaged, with a warning."""
    try:
        return _CHOICES.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        logger.warning("%s is damaged: kernels are timed again, and may round differently.", path)
        return None


def merge_choices(*parts: Choices) -> Choices:
    """The choices of all parts; later ones come first."""
    places = dict.fromkeys(place for part in parts for place in part)
    return {place: {call: name for part in parts for call, name in part.get(place, {}).items()} for place in places}


@functools.cache
def describe_place(device: torch.device) -> str:
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
