"""Fixtures that many rooms share: tiny checkpoints, made once per session, and folders ready to
train in.

torch and what needs it are imported by those who use them: xdist reads this file before it starts
the processes that run the tests, and needs no torch itself.
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
# depends on the kernels of one machine, ask for others: OMP_NUM_THREADS=2, MKLDNN=off, and torch's
# own ATEN_CPU_CAPABILITY=default.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# One for all tests, of which each has a folder of its own; a run sets these if they are unset.
COMPILED = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))
os.environ.setdefault("TRITON_CACHE_DIR", str(COMPILED / "triton"))

# A tiny run makes and drops many small objects, in few cycles: looking for these took a twentieth
# of its time.
gc.set_threshold(100_000, 50, 50)

# Started by a shell in the background, a process ignores Ctrl-C; started by `nohup`, the end of its
# terminal. So would every process that the tests start.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

_frozen_modules = 0
_collecting = _collecting_since = (
    0.0  # seconds of a processor since objects were frozen, and when the last one began
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked thorough, too")


def pytest_configure(config: pytest.Config) -> None:
    """Only `-m gpu` sees the GPUs of this machine. All other tests are of the CPU, and fork what
    has imported diffusers, which asks for a GPU; CUDA does not work in forks of a process that has
    asked."""
    if not wants_gpu(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def wants_gpu(config: pytest.Config) -> bool:
    return str(config.option.markexpr).startswith("gpu")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """xdist starts processes that have imported everything already, unless these are to use a
    GPU.
    """
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
    """Deselect the tests that would take the suite beyond its minutes, unless they are named one by
    one.
    """
    if any("::" in argument for argument in config.args):
        return
    thorough = [item for item in items if item.get_closest_marker("thorough")]
    if thorough:
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


def share_out(items: list[pytest.Item]) -> None:
    """What takes long starts early, or all other processes would wait for one in the end.

    xdist cuts the list into one part per process, and whoever has done his takes from the end of
    the longest that is left. So each part begins with slow tests (a costly setup first) and ends
    with quick ones. The slow tests of a module stay together, and share what it sets up.
    """
    slow, quick = (
        [item for item in items if bool(seconds(item)) is wanted] for wanted in (True, False)
    )
    groups = [[*group] for _, group in itertools.groupby(slow, key=lambda item: item.path)]
    parts: list[list[pytest.Item]] = [
        [] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
    ]
    for group in sorted(groups, key=lambda group: -sum(map(seconds, group))):
        min(parts, key=lambda part: sum(map(seconds, part))).extend(group)
    for place, part in enumerate(parts):
        part.sort(key=lambda item: item.get_closest_marker("costly_setup") is None)
        size = (len(items) + place) // len(parts)
        part += [quick.pop() for _ in range(min(size - len(part), len(quick)))]
    items[:] = itertools.chain.from_iterable(parts)


def seconds(item: pytest.Item) -> float:
    """About how long a slow test takes; 0 for a quick one."""
    slow = item.get_closest_marker("slow")
    return float(slow.args[0] if slow and slow.args else 2 * bool(slow))


def pytest_collection_finish() -> None:
    import tests.tools.torch_settings  # noqa: F401 - it makes them

    _freeze_objects()
    gc.callbacks.append(_time_collections)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Libraries import their parts when these are first used, most of them in the first tests, and
    keep more and more: torch's compiler a hundred thousand objects a minute."""
    if len(sys.modules) > _frozen_modules + 50 or _collecting > 0.05:
        _freeze_objects()


def _freeze_objects() -> None:
    """Take what is there to stay out of the garbage collector's sight: a run collects after each
    encoder that it releases, and looking through the modules of torch and transformers takes as
    long as the rest of a tiny run."""
    global _frozen_modules, _collecting
    _frozen_modules = len(sys.modules)
    gc.collect()
    gc.freeze()
    _collecting = 0.0


def _time_collections(phase: str, info: dict[str, int]) -> None:
    """Add up what collections of all generations take, which a run asks for."""
    global _collecting, _collecting_since
    if info["generation"] == 2:
        _collecting += time.thread_time() - _collecting_since if phase == "stop" else 0.0
        _collecting_since = time.thread_time()


@pytest.fixture(scope="session", autouse=True)
def _early_forkserver() -> None:
    """Processes of tests are forked from what is imported here, before the first test has left
    anything behind.
    """
    from tests.tools.workers import fork_the_forkserver

    fork_the_forkserver()


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the developer's shell chooses the config of a test or adds to it, and no run
    before it how many threads share a sum."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    others = (
        EXTRA_ARGUMENTS,
        "CONFIG_PATH",
        "CONFIG_BACKEND",
        "CONFIG_TYPE",
        "SIMPLETUNER_CONFIG_DIR",
    )
    for name in (*ENV_VARIABLES, *LAUNCH_VARIABLES, *others):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run waits for the disk some thirty times, and no test asks what would be left without
    power.
    """
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans be judged by their settings and not by the memory of whoever runs the tests."""
    monkeypatch.setattr("simpletuner.budget.device.host_memory", lambda: 1e12)
    monkeypatch.setattr("simpletuner.budget.device.query_gpu", lambda: None)
    monkeypatch.setattr(
        "simpletuner.budget.device.torch_uses_gpus", lambda: True
    )  # whatever build is installed here


@pytest.fixture(autouse=True)
def _roomy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room(monkeypatch)


@pytest.fixture(autouse=True)
def _silent_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans do not depend on whether the hub can be reached from here; tests/weights/test_hub.py
    asks one.
    """
    monkeypatch.setattr("simpletuner.weights.hub.ask_hub", lambda repository, revision: None)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are traced as `torch.compile` traces them, and run as they are; this takes half of
    the time. What backends make of their graphs is for tests/speed."""
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
    """A folder with a config, a dataset file and eight captioned pictures, ready for a short t2i
    run.
    """
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
    with pytest.MonkeyPatch.context() as patch:
        make_room(patch)
        assert (
            workspace.run(
                "cache",
                "fill",
                "validation_disable=false",
                "validation_disable_unconditional=false",
            )
            == 0
        )
    return workspace


@pytest.fixture
def filled(tmp_path: Path, encoded: Workspace) -> Workspace:
    """The folder of `workspace` after `cache fill`."""
    return Workspace(shutil.copytree(encoded.folder, tmp_path / "run"))
