"""torch's settings for all tests, made on import, and two ways to avoid its compiler."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._dynamo.guards
import torch._inductor.config

from simpletuner.models.blocks import DynamicSizes
from simpletuner.speed import measure

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # see tests/conftest.py
if os.environ.get("MKLDNN") == "off":
    torch.backends.mkldnn.set_flags(False)

# Every run measures the processor. The smaller of two matmuls suffices here, and takes a sixteenth
# of the time.
measure.AFFORDABLE_SECONDS = 0.0

# After each compilation torch collects garbage, and flushes the processor's caches to time the
# guards: a fifth of the time that tiny graphs take.
torch._dynamo.config.run_gc_after_compile = False
torch._dynamo.guards.profile_guard_manager = lambda *given: 0.0

# pytest attaches a handler to every logger that does not propagate. A handler at torch.__trace
# makes torch write down each compilation, which takes as long as compiling; sixty more were a third
# of the time of a short test.
for logger in list(logging.root.manager.loggerDict.values()):
    if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
        logger.propagate = True


def trace(
    function: Callable[..., Any], compile: Callable[..., Any] = torch.compile, **settings: Any
) -> Any:
    """Like `torch.compile`, but runs the traced graphs without compiling them."""
    return compile(function, **{**settings, "backend": "eager", "mode": None})


def mark_no_sizes(sizes: DynamicSizes, inputs: object, dimensions: object) -> None:
    """Replaces `DynamicSizes.mark`: blocks are compiled for the sizes that they get.

    Symbols take two to three times as long to trace, and gain nothing with a single size.
    tests/speed proves that one graph serves all sizes.
    """


def usual_vectors() -> AbstractContextManager[None]:
    """Let inductor use vectors of 256 bits, which compile faster than wider ones."""
    # By a setting, since that is part of the key of the compiler's cache. Another run's code for
    # wider vectors, compiled for these, would compute NaN.
    patched: AbstractContextManager[None] = torch._inductor.config.patch({"cpp.simdlen": 256})
    return patched
