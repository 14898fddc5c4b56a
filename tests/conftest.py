"""Fixtures that many rooms share: tiny checkpoints, made once per session, and training folders.

torch is imported inside functions: xdist reads this file before it starts the processes that run
the tests, and needs no torch itself.
"""

from __future__ import annotations

import contextlib
import gc
import getpass
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.sources import ENV_VARIABLES, EXTRA_ARGUMENTS, LAUNCH_VARIABLES
from tests.tools.workspace import Workspace

# Tiny models gain nothing from threads, and tests must not fight over cores. To see that no test
# depends on the kernels of one machine, choose others: OMP_NUM_THREADS=2, MKLDNN=off, or torch's
# ATEN_CPU_CAPABILITY=default.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# One cache for all tests. Otherwise a run would set these to the folder of its test.
COMPILED = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))
os.environ.setdefault("TRITON_CACHE_DIR", str(COMPILED / "triton"))

# A tiny run makes many small objects and few cycles; collecting at Python's usual threshold took a
# twentieth of its time.
gc.set_threshold(100_000, 50, 50)

# A process that a shell starts in the background ignores Ctrl-C, and one that `nohup` starts
# ignores the end of its terminal. All processes that the tests start would inherit this.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

_frozen_modules = 0  # imported when objects were last frozen
_collecting = 0.0  # processor seconds spent in full collections since then
_collecting_since = 0.0  # start of the last full collection, on the clock of the thread


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked thorough, too")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs of this machine, except from `-m gpu`.

    All other tests run on the CPU, in forks of a process that has imported diffusers. That import
    initialises CUDA, which does not work in forks.
    """
    if not wants_gpu(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def wants_gpu(config: pytest.Config) -> bool:
    return str(config.option.markexpr).startswith("gpu")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Let xdist fork workers from a process that has imported everything, except for GPU tests."""
    if wants_gpu(config):
        return
    from tests.tools.workers import forked_workers

    workers = contextlib.ExitStack()
    config.add_cleanup(workers.close)
    folder = workers.enter_context(tempfile.TemporaryDirectory())
    program = workers.enter_context(forked_workers(Path(folder), config.args))
    for spec in specs:
        spec.python = program


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        leave_out_thorough(config, items)
    share_out(items)


def leave_out_thorough(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that are too slow for every run, unless they are named on the command line."""
    if any("::" in argument for argument in config.args):
        return
    thorough = [item for item in items if item.get_closest_marker("thorough")]
    if thorough:
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


def share_out(items: list[pytest.Item]) -> None:
    """Order the tests so that slow ones start early; otherwise the last would be waited for.

    xdist cuts the list into one part per process, and a process that has finished its part takes
    from the end of the longest one. So each part begins with slow tests (a costly setup first) and
    ends with quick ones. The slow tests of a module stay together, and share what it sets up.
    """
    slow = [item for item in items if seconds(item)]
    quick = [item for item in items if not seconds(item)]
    groups = [[*group] for _, group in itertools.groupby(slow, key=lambda item: item.path)]
    groups.sort(key=total_seconds, reverse=True)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for group in groups:  # the slowest first, to the part that is shortest so far
        min(parts, key=total_seconds).extend(group)
    for place, part in enumerate(parts):
        part.sort(key=lambda item: item.get_closest_marker("costly_setup") is None)
        size = (len(items) + place) // len(parts)
        while quick and len(part) < size:
            part.append(quick.pop())
    items[:] = itertools.chain.from_iterable(parts)


def total_seconds(items: list[pytest.Item]) -> float:
    return sum(map(seconds, items))


def seconds(item: pytest.Item) -> float:
    """About how long a slow test takes; 0 for a quick one."""
    slow = item.get_closest_marker("slow")
    if slow is None:
        return 0.0
    return float(slow.args[0]) if slow.args else 2.0


def pytest_collection_finish() -> None:
    import tests.tools.torch_settings  # noqa: F401 - the import makes the settings

    _freeze_objects()
    gc.callbacks.append(_time_collections)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Freeze again after many imports or slow collections.

    Libraries import their parts on first use, mostly in the first tests, and keep more and more
    objects: torch's compiler a hundred thousand a minute.
    """
    if len(sys.modules) > _frozen_modules + 50 or _collecting > 0.05:
        _freeze_objects()


def _freeze_objects() -> None:
    """Exempt all present objects from garbage collection.

    A run collects after each encoder that it releases, and scanning the modules of torch and
    transformers takes as long as the rest of a tiny run.
    """
    global _frozen_modules, _collecting
    _frozen_modules = len(sys.modules)
    gc.collect()
    gc.freeze()
    _collecting = 0.0


def _time_collections(phase: str, info: dict[str, int]) -> None:
    """Add up the time of full collections, as runs request them."""
    global _collecting, _collecting_since
    if info["generation"] != 2:
        return
    now = time.thread_time()
    if phase == "stop":
        _collecting += now - _collecting_since
    _collecting_since = now


@pytest.fixture(scope="session", autouse=True)
def _early_forkserver() -> None:
    """Start the process that tests fork others from, before any test leaves something behind."""
    from tests.tools.workers import fork_the_forkserver

    fork_the_forkserver()


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protect tests from variables of the developer's shell and from an earlier run's threads."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    paths = ("CONFIG_PATH", "CONFIG_BACKEND", "CONFIG_TYPE", "SIMPLETUNER_CONFIG_DIR")
    for name in (*ENV_VARIABLES, *LAUNCH_VARIABLES, EXTRA_ARGUMENTS, *paths, "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync, for which a run waits some thirty times; no test cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


# Rooms whose tests say where the program warns.
WATCHED = frozenset(
    {"caching", "encoding", "memory", "run", "techniques", "training", "validation"}
)


@pytest.fixture(autouse=True)
def _no_other_warnings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if the program warns where no test expects it: a warning said in vain is a defect.

    Tests that warn on purpose read what is said, or are marked `warns`. Of the slow ones,
    tests/run/test_train.py reads the log of a plain run.
    """
    from tests.tools.warnings import our_warnings

    reads = {"caplog", "capsys", "capfd"} & set(request.fixturenames)
    is_watched = request.path.parent.name in WATCHED
    with our_warnings() as warnings:
        yield
    marks = {mark.name for mark in request.node.iter_markers()}
    if is_watched and not reads and not marks & {"warns", "slow"}:
        assert warnings == []


def make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans depend on their settings and not on the machine that runs the tests."""
    monkeypatch.setattr("simpletuner.budget.device.host_memory", lambda: 1e12)
    monkeypatch.setattr("simpletuner.budget.device.query_gpu", lambda: None)
    # Whatever build of torch is installed.
    monkeypatch.setattr("simpletuner.budget.device.torch_uses_gpus", lambda: True)


@pytest.fixture(autouse=True)
def _roomy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room(monkeypatch)


@pytest.fixture(autouse=True)
def _silent_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans not depend on whether the hub can be reached; tests/weights/test_hub.py has one."""
    monkeypatch.setattr("simpletuner.weights.hub.ask_hub", lambda repository, revision: None)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace functions as `torch.compile` does, and run them uncompiled, in half of the time.

    tests/speed tests what backends make of the graphs.
    """
    from tests.tools.torch_settings import trace

    monkeypatch.setattr("torch.compile", trace)


@pytest.fixture
def one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `mark_no_sizes`."""
    from tests.tools.torch_settings import mark_no_sizes

    monkeypatch.setattr("simpletuner.models.blocks.DynamicSizes.mark", mark_no_sizes)


@pytest.fixture
def usual_vectors() -> Iterator[None]:
    """For tests that have inductor generate and compile code."""
    from tests.tools.torch_settings import usual_vectors

    with usual_vectors():
        yield


@pytest.fixture(scope="session")
def t2i_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kandinsky 5 text-to-image checkpoint of random weights."""
    from tests.tools.tiny import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("t2i"), "t2i")


@pytest.fixture(scope="session")
def i2i_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kandinsky 5 image-to-image checkpoint of random weights."""
    from tests.tools.tiny import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("i2i"), "i2i")


@pytest.fixture(scope="session")
def sana_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Sana Video checkpoint of random weights."""
    from tests.tools.tiny_sana import make_sana_checkpoint

    return make_sana_checkpoint(tmp_path_factory.mktemp("sana"))


@pytest.fixture
def workspace(tmp_path: Path, t2i_checkpoint: Path) -> Workspace:
    """A folder with a config and eight captioned pictures, ready for a short t2i run."""
    return Workspace.create(tmp_path / "run", t2i_checkpoint)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path) -> Workspace:
    """The folder of `workspace` after a run, to be copied."""
    workspace = Workspace.create(tmp_path_factory.mktemp("finished") / "run", t2i_checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        make_room(patch)
        assert workspace.train() == 0
    return workspace


@pytest.fixture
def trained(tmp_path: Path, finished: Workspace) -> Workspace:
    """The folder of `workspace` after a run of four steps."""
    return Workspace(shutil.copytree(finished.folder, tmp_path / "run"))


@pytest.fixture(scope="session")
def encoded(tmp_path_factory: pytest.TempPathFactory, finished: Workspace) -> Workspace:
    """The folder of `workspace` with caches for training and for previews, to be copied."""
    workspace = Workspace(
        shutil.copytree(finished.folder, tmp_path_factory.mktemp("encoded") / "run")
    )
    for path in workspace.path("output").iterdir():
        if path.name != "cache":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    previews = ("validation_disable=false", "validation_disable_unconditional=false")
    with pytest.MonkeyPatch.context() as patch:
        make_room(patch)
        assert workspace.run("cache", "fill", *previews) == 0
    return workspace


@pytest.fixture
def filled(tmp_path: Path, encoded: Workspace) -> Workspace:
    """The folder of `workspace` after `cache fill`."""
    return Workspace(shutil.copytree(encoded.folder, tmp_path / "run"))
