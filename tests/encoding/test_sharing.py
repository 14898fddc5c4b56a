"""Two processes share the work between the steps, and the result is that of one."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image

from simpletuner.annexes.fitting.ready import plan_that_fits
from simpletuner.annexes.processes.joining import connect
from simpletuner.caching.catalogue import Share
from simpletuner.config.sources import parse_arguments
from simpletuner.data.entries import ProgressBar
from simpletuner.data.files import MediaError
from simpletuner.distributed.world import World
from simpletuner.encoding import decoding
from simpletuner.encoding.caches import CacheFiller, prepare_caches
from simpletuner.encoding.encoders import Encoding, build_adapter
from simpletuner.encoding.read import BatchReader, CacheStore
from simpletuner.encoding.sharing import SharedPhase, share_items
from simpletuner.errors import Interrupted
from simpletuner.planning.entries import evaluated
from simpletuner.reporting.events import (
    CACHING,
    EVALUATION,
    PREVIEWS,
    Event,
    EventStream,
    MediaRendered,
    PhaseAdvanced,
    PhaseStarted,
)
from simpletuner.run.session import encoded_prompts
from simpletuner.run.settings import assembly_settings, render_settings, training_spec
from simpletuner.training.assemble import assemble, make_accelerator
from simpletuner.training.ema import Ema
from simpletuner.training.state import Assembly, TrainState
from simpletuner.validation.eval_loss import EvaluationLoss
from simpletuner.validation.renderer import Renderer
from simpletuner.validation.runner import ValidationRunner
from tests.tools.processes import finish
from tests.tools.workspace import DATASETS, EVAL, Workspace

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "validation_disable": False,
    "validation_disable_unconditional": False,
    "validation_preview": True,
    "use_ema": True,
    "ema_validation": "comparison",
    "eval_steps_interval": 1,
    "eval_timesteps": 2,
    "vae_batch_size": 1,
}
RANDOM_CROPS = {"crop": True, "crop_style": "random", "crop_aspect": "square"}


def make_workspace(folder: Path, checkpoint: Path) -> Workspace:
    workspace = Workspace.create(folder, checkpoint, **SETTINGS)
    workspace.add_pictures("datasets/held out", 3, seed=1)
    workspace.write_datasets([{**DATASETS[0], **RANDOM_CROPS}, EVAL, DATASETS[1]])
    return workspace


class Process:
    """What one of the processes did."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.published = list[Event]()
        self.written: list[str] = []
        self.act: Callable[[Event], object] = lambda event: None
        self.events = EventStream(self.published.append, lambda event: self.act(event))
        watch = world.follow(self.events.stop, print)
        self.events.subscribe("The watch", watch, ends_run=Exception)

    def fill(self) -> CacheFiller:
        plan = plan_that_fits(parse_arguments([])).plan
        encoding = Encoding(plan, build_adapter(plan), CPU, self.events)
        filler = prepare_caches(encoding, 1, world=self.world)
        filler.follow(2)
        return filler

    def phases(self) -> list[tuple[str, int | None, int]]:
        """Title, total and last count of each phase that fills caches."""
        last: dict[PhaseStarted, tuple[str, int | None, int]] = {}
        for event in self.published:
            if isinstance(event, PhaseAdvanced) and event.phase.kind == CACHING:
                last[event.phase] = (event.phase.title, event.phase.total, event.done)
        return list(last.values())

    def media(self) -> list[str]:
        return [event.media.path for event in self.published if isinstance(event, MediaRendered)]

    def stops_at(self, kind: str, act: Callable[[], object]) -> None:
        """Ask for a stop when a phase first advances in process 1, and check that all stop."""

        def stop(event: Event) -> None:
            is_phase = isinstance(event, PhaseAdvanced) and event.phase.kind == kind
            if is_phase and self.world.rank == 1:
                self.events.stop.request()

        self.act = stop
        with pytest.raises(Interrupted):
            act()
        assert self.events.stop.requested, "in every process"
        self.world.barrier()
        self.events.stop.requested = False
        self.act = lambda event: None


def work(rank: int, size: int) -> None:
    """The work of one process, in the current folder."""
    torch.set_num_threads(1)
    joined: Any = nullcontext(World())
    if size > 1:
        joined = connect(World(rank, size, rank, size), f"file://{Path('meeting').absolute()}")
    with joined as world:
        downloads = not world.leader_first(find_or_download)
        result = {"downloads": downloads, **do_all_work(Process(world))}
        Path(f"rank-{rank}.json").write_text(json.dumps(result))


def find_or_download() -> bool:
    """Whether a file was on this machine already."""
    is_downloaded = Path("downloaded").exists()
    Path("downloaded").touch()
    return is_downloaded


def do_all_work(process: Process) -> dict[str, Any]:
    """Fill the caches, evaluate and render; returns what this process did and got."""
    loading: list[float] = []
    filler = fill_with_a_damaged_file(process, loading)
    assembly, validation, evaluation = build(process, filler)
    result: dict[str, Any] = {
        "written": process.written,
        "phases": process.phases(),
        "loading": loading,
        "samples": [sample.name for sample in filler.plan.datasets[0].samples],
        "losses": evaluation.evaluate(assembly, 1),
    }
    pictures: list[str] = []
    write = Renderer.write

    def note_picture(renderer: Renderer, frames: Any, path: Path) -> None:
        pictures.append(path.name)
        write(renderer, frames, path)

    with patch.object(Renderer, "write", note_picture):
        validation.render(assembly, TrainState(1))
        result |= {"media": process.media(), "pictures": [*pictures]}
        if process.world.size > 1:
            pictures.clear()
            sharded = replace(assembly, is_sharded=True)
            assert evaluation.evaluate(sharded, 1) == result["losses"]
            validation.render(sharded, TrainState(2))
            result["in lockstep"] = [*pictures]
            for shared in (assembly, sharded):
                process.published.clear()
                process.stops_at(EVALUATION, partial(evaluation.evaluate, shared, 3))
                process.stops_at(PREVIEWS, partial(validation.render, shared, TrainState(3)))
                assert all(Path("output", path).exists() for path in process.media())
                assert process.world.gather(len(process.media()))[0] < 4
    return result


def fill_with_a_damaged_file(process: Process, loading: list[float]) -> CacheFiller:
    """Fill the caches; notes when the text encoder was loading, and the entries written."""
    decode = decoding.pictures.decode
    damaged = Path("datasets/pictures/p3.png").read_bytes()
    write = CacheStore.write
    load = Encoding.load_text_encoder

    def decode_others(source: Any) -> Image.Image:
        if source == damaged:
            raise MediaError("its pixels are damaged")
        return decode(source)

    def note_entry(store: CacheStore, key: str, *arguments: Any) -> None:
        process.written.append(f"{store.folder}/{key}")
        write(store, key, *arguments)

    def note_loading(encoding: Encoding) -> Any:
        loading.append(time.monotonic())
        encoder = load(encoding)
        loading.append(time.monotonic())
        return encoder

    with (
        patch.object(decoding.pictures, "decode", decode_others),
        patch.object(CacheStore, "write", note_entry),
        patch.object(Encoding, "load_text_encoder", note_loading),
    ):
        return process.fill()


def build(
    process: Process, filler: CacheFiller
) -> tuple[Assembly, ValidationRunner, EvaluationLoss]:
    """What trains, renders and evaluates with these caches."""
    plan = filler.plan
    config = plan.config
    settings = assembly_settings(config, training_spec(plan))
    assembly = assemble(settings, filler.encoding.adapter, [], make_accelerator(), process.world)
    assembly.trained.ema = Ema(assembly.parameters, config.ema, CPU)
    with torch.no_grad():
        for name, parameter in assembly.parameters.items():
            if "lora_B" in name:
                parameter.fill_(0.1)
    encoding = filler.encoding
    reader = BatchReader(filler.catalogue, 0.0, plan.seed, encoding.restore, encoding.encode)
    validation = ValidationRunner(
        render_settings(plan),
        "comparison",
        encoded_prompts(plan, filler.catalogue, reader),
        plan.sizes,
        plan.output_dir,
        process.events,
    )
    samples = {dataset.id: dataset.samples for dataset in evaluated(plan)}
    evaluation = EvaluationLoss(
        config.evaluation, samples, reader.read_sample, 4.0, "comparison", process.events
    )
    return assembly, validation, evaluation


def test_the_last_to_finish_shows_what_the_others_have_done() -> None:
    published: list[Event] = []
    counters = Counter(done=6, finished=1)  # of another process

    def count(name: str, by: int) -> int:
        counters[name] += by
        return counters[name]

    with EventStream(published.append).phase("Encoding pictures", 10, "pictures", CACHING) as phase:
        shared = SharedPhase(phase, count)
        shared.advance(4)
        counters["done"] += 3  # the other process goes on
        shared.wait(2)

    assert isinstance(published[-2], PhaseAdvanced)
    assert published[-2].done == 13  # 6 + 4 + 3


def run(*ranks: tuple[Workspace, int, int]) -> list[dict[str, Any]]:
    """What the processes, given as (folder, rank, size), did at the same time."""
    processes = [workspace.fork(work, rank, size) for workspace, rank, size in ranks]
    assert finish(processes) == [0] * len(ranks)
    return [
        json.loads(workspace.path(f"rank-{rank}.json").read_text()) for workspace, rank, _ in ranks
    ]


def hashes(workspace: Workspace, *folders: str) -> dict[str, str]:
    """The hash of every entry and picture below folders, by its path."""
    result: dict[str, str] = {}
    for folder in folders:
        for path in workspace.path(folder).rglob("*.*"):
            if path.suffix in (".zst", ".png") and path.parent.name != "in_progress":
                name = str(path.relative_to(workspace.folder))
                result[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return result


def test_a_stop_that_arrives_after_the_agreement_stops_no_process_alone() -> None:
    events = EventStream()

    class LateStop(World):
        """A stop is requested while the processes agree that none is due."""

        def gather(self, value: Any) -> list[Any]:
            events.stop.request()
            return [False, False]

    def render(prompts: Sequence[str], phase: ProgressBar) -> Iterator[str]:
        phase.advance()
        yield from prompts

    phase = PhaseStarted("Rendering", 1)
    results = share_items(LateStop(0, 2), events, phase, ["a preview"], render, in_lockstep=True)

    assert list(results) == ["a preview"], "all of them go on"
    assert events.stop.requested


class Machines(World):
    """Processes on machines of `local_size` each, seen by one of them."""

    def gather(self, value: Any) -> list[Any]:
        return [rank % self.local_size == 0 for rank in range(self.size)]


def test_streamed_text_encoders_are_loaded_once_on_a_machine(
    filled: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(filled.folder)
    shutil.rmtree("cache")
    budget = plan_that_fits(parse_arguments(["group_offload_text_encoder=true"]))
    listing = budget.listing

    assert listing is not None

    encoding = Encoding(budget.plan, build_adapter(budget.plan), CPU, EventStream())
    worlds = [Machines(rank, 4, rank % 2, 2) for rank in range(4)]
    fillers = [CacheFiller(encoding, listing, world, Share(world.rank, 4)) for world in worlds]

    first, second, third, fourth = (filler._texts_to_encode() for filler in fillers)

    assert second == []
    assert fourth == []

    sources = sorted(text.source for text in listing.texts)
    assert sorted(text.source for text in first + third) == sources


@pytest.mark.slow(5)
def test_two_processes_share_the_work_of_one(tmp_path: Path, t2i_checkpoint: Path) -> None:
    one = make_workspace(tmp_path / "one", t2i_checkpoint)
    two = make_workspace(tmp_path / "two", t2i_checkpoint)

    alone, first, second = run((one, 0, 1), (two, 0, 2), (two, 1, 2))

    assert [alone["downloads"], first["downloads"], second["downloads"]] == [True, True, False]

    check_caches(alone, first, second)
    assert hashes(two, "cache", "output/cache") == hashes(one, "cache", "output/cache")
    assert len(alone["losses"]) == 2
    assert first["losses"] == alone["losses"]
    assert second["losses"] == alone["losses"]

    check_previews(alone, first, second)
    expected = hashes(one, "output/validation_images")
    previews = hashes(two, "output/validation_images")

    assert expected.items() <= previews.items()

    for path, digest in expected.items():
        in_lockstep = path.replace("step_1_", "step_2_")
        assert previews[in_lockstep] == digest, "rendered by both, written by one"


def check_caches(alone: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    """Two processes encode each entry once, and leave out the damaged file."""
    assert first["written"]
    assert second["written"]
    assert len(set(alone["written"])) == len(alone["written"])
    assert sorted(first["written"] + second["written"]) == sorted(alone["written"])
    # One text encoder at a time passes through host memory.
    assert first["loading"][1] <= second["loading"][0]
    assert "p3.png" not in alone["samples"]
    assert first["samples"] == alone["samples"]
    assert second["samples"] == alone["samples"]
    assert first["phases"] == alone["phases"]


def check_previews(alone: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    """Two processes take turns, or render together if the weights are sharded."""
    assert len(alone["media"]) == 4
    assert first["media"] == alone["media"]
    assert second["media"] == alone["media"]
    assert first["pictures"] == alone["pictures"][::2]
    assert second["pictures"] == alone["pictures"][1::2]
    assert len(first["in lockstep"]) == 4
    assert not second["in lockstep"]
