"""Two processes divide the work between the steps, and the result is that of one."""

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
from tests.tools.processes import PATIENCE
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
        self.seen = list[Event]()
        self.written: list[str] = []
        self.act: Callable[[Event], object] = lambda event: None
        self.events = EventStream(self.seen.append, lambda event: self.act(event))
        self.events.subscribe(
            "The watch", world.follow(self.events.stop, print), ends_run=Exception
        )

    def fill(self) -> CacheFiller:
        plan = plan_that_fits(parse_arguments([])).plan
        filler = prepare_caches(
            Encoding(plan, build_adapter(plan), CPU, self.events), 1, world=self.world
        )
        filler.follow(2)
        return filler

    def phases(self) -> list[tuple[str, int | None, int]]:
        """Title, total and what was done of each phase that fills caches."""
        advanced = [
            each
            for each in self.seen
            if isinstance(each, PhaseAdvanced) and each.phase.kind == CACHING
        ]
        return list(
            {
                each.phase: (each.phase.title, each.phase.total, each.done) for each in advanced
            }.values()
        )

    def media(self) -> list[str]:
        return [each.media.path for each in self.seen if isinstance(each, MediaRendered)]

    def stops_at(self, kind: str, act: Callable[[], object]) -> None:
        """Ask for a stop when a phase first advances in process 1, and record whether this process
        was interrupted.
        """

        def stop(event: Event) -> None:
            if (
                self.world.rank == 1
                and isinstance(event, PhaseAdvanced)
                and event.phase.kind == kind
            ):
                self.events.stop.request()

        self.act = stop
        with pytest.raises(Interrupted):
            act()
        assert self.events.stop.requested, "all of them know"
        self.world.barrier()
        self.events.stop.requested = False
        self.act = lambda event: None


def work(rank: int, size: int) -> None:
    """The work of one process, in the current folder."""
    torch.set_num_threads(1)
    meeting = f"file://{Path('meeting').absolute()}"
    with (
        connect(World(rank, size, rank, size), meeting)
        if size > 1
        else nullcontext(World()) as world
    ):
        result = {
            "downloads": not world.leader_first(find_or_download),
            **everything(Process(world)),
        }
        Path(f"rank-{rank}.json").write_text(json.dumps(result))


def find_or_download() -> bool:
    """Whether a file was there already."""
    found = Path("downloaded").exists()
    Path("downloaded").touch()
    return found


def everything(process: Process) -> dict[str, Any]:
    decode = decoding.pictures.decode
    damaged = Path("datasets/pictures/p3.png").read_bytes()
    write = CacheStore.write
    draw = Renderer.write
    load = Encoding.load_text_encoder
    pictures: list[str] = []
    loading: list[float] = []

    def decode_some(source: Any) -> Image.Image:
        if source == damaged:
            raise MediaError("its pixels are damaged")
        return decode(source)

    def note(self: CacheStore, key: str, *arguments: Any) -> None:
        process.written.append(f"{self.folder}/{key}")
        write(self, key, *arguments)

    def note_loading(self: Encoding) -> Any:
        start = time.monotonic()
        encoder = load(self)
        loading.extend((start, time.monotonic()))
        return encoder

    def note_picture(self: Renderer, frames: Any, path: Path) -> None:
        pictures.append(path.name)
        draw(self, frames, path)

    with (
        patch.object(decoding.pictures, "decode", decode_some),
        patch.object(CacheStore, "write", note),
        patch.object(Encoding, "load_text_encoder", note_loading),
    ):
        filler = process.fill()
    assembly, validation, evaluation = build(process, filler)
    result: dict[str, Any] = {
        "written": process.written,
        "phases": process.phases(),
        "loading": loading,
    }
    result["samples"] = [sample.name for sample in filler.plan.datasets[0].samples]
    result["losses"] = evaluation.evaluate(assembly, 1)
    with patch.object(Renderer, "write", note_picture):
        validation.render(assembly, TrainState(1))
        result |= {"media": process.media(), "pictures": [*pictures]}
        if process.world.size > 1:
            pictures.clear()
            together = replace(assembly, is_sharded=True)
            assert evaluation.evaluate(together, 1) == result["losses"]
            validation.render(together, TrainState(2))
            result["in lockstep"] = [*pictures]
            for each in (assembly, together):
                process.seen.clear()
                process.stops_at(EVALUATION, partial(evaluation.evaluate, each, 3))
                process.stops_at(PREVIEWS, partial(validation.render, each, TrainState(3)))
                assert all(Path("output", path).exists() for path in process.media())
                assert process.world.gather(len(process.media()))[0] < 4
    return result


def build(
    process: Process, filler: CacheFiller
) -> tuple[Assembly, ValidationRunner, EvaluationLoss]:
    plan = filler.plan
    config = filler.plan.config
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
    samples = {each.id: each.samples for each in evaluated(plan)}
    evaluation = EvaluationLoss(
        config.evaluation, samples, reader.read_sample, 4.0, "comparison", process.events
    )
    return assembly, validation, evaluation


def test_the_last_to_finish_shows_what_the_others_have_done() -> None:
    seen: list[Event] = []
    done = Counter(done=6, finished=1)  # of another process, since this one last looked

    def count(name: str, by: int) -> int:
        done[name] += by
        return done[name]

    with EventStream(seen.append).phase("Encoding pictures", 10, "pictures", CACHING) as phase:
        shared = SharedPhase(phase, count)
        shared.advance(4)
        done["done"] += 3
        shared.wait(2)
    assert isinstance(seen[-2], PhaseAdvanced)
    assert seen[-2].done == 13


def run(*ranks: tuple[Workspace, int, int]) -> list[dict[str, Any]]:
    """What the processes, given as (folder, rank, size), did at the same time."""
    started = [workspace.fork(work, rank, size) for workspace, rank, size in ranks]
    for process in started:
        process.join(PATIENCE)
    assert [process.exitcode for process in started] == [0] * len(ranks)
    return [
        json.loads(workspace.path(f"rank-{rank}.json").read_text()) for workspace, rank, _ in ranks
    ]


def content(workspace: Workspace, *folders: str) -> dict[str, str]:
    paths = [path for folder in folders for path in workspace.path(folder).rglob("*.*")]
    files = [
        path
        for path in paths
        if path.suffix in (".zst", ".png") and path.parent.name != "in_progress"
    ]
    return {
        str(path.relative_to(workspace.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_what_the_watch_has_heard_stops_no_process_alone() -> None:
    events = EventStream()

    class Hearing(World):
        """Hears of a stop while the processes agree that none is due."""

        def gather(self, value: Any) -> list[Any]:
            events.stop.request()
            return [False, False]

    def render(shots: Sequence[str], phase: ProgressBar) -> Iterator[str]:
        phase.advance()
        yield from shots

    results = share_items(
        Hearing(0, 2), events, PhaseStarted("Rendering", 1), ["a preview"], render, in_lockstep=True
    )
    assert [*results] == ["a preview"], "all of them go on"
    assert events.stop.requested


class Machines(World):
    """Processes on machines of `local_size` each, seen by one of them."""

    def gather(self, value: Any) -> list[Any]:
        return [rank % self.local_size == 0 for rank in range(self.size)]


def test_text_encoders_that_stream_are_on_a_machine_once(
    filled: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(filled.folder)
    shutil.rmtree("cache")
    budget = plan_that_fits(parse_arguments(["group_offload_text_encoder=true"]))
    plan = budget.plan
    assert budget.listing is not None
    adapter = build_adapter(plan)
    events = EventStream()
    worlds = [Machines(rank, 4, rank % 2, 2) for rank in range(4)]
    encoding = Encoding(plan, adapter, CPU, events)
    fillers = [
        CacheFiller(encoding, budget.listing, world, Share(world.rank, 4)) for world in worlds
    ]
    found = [filler._texts_to_encode() for filler in fillers]
    assert found[1] == found[3] == []
    assert sorted(each.source for each in found[0] + found[2]) == sorted(
        text.source for text in budget.listing.texts
    )


@pytest.mark.slow(5)
def test_two_processes_share_the_work_of_one(tmp_path: Path, t2i_checkpoint: Path) -> None:
    one, two = (make_workspace(tmp_path / name, t2i_checkpoint) for name in ("one", "two"))
    alone, first, second = run((one, 0, 1), (two, 0, 2), (two, 1, 2))

    assert (alone["downloads"], first["downloads"], second["downloads"]) == (True, True, False)
    assert first["written"]
    assert second["written"]
    assert sorted(first["written"] + second["written"]) == sorted(alone["written"]), (
        "nothing is encoded twice"
    )
    assert len(set(alone["written"])) == len(alone["written"])
    assert first["loading"][1] <= second["loading"][0], (
        "one text encoder at a time passes through host memory"
    )
    assert content(two, "cache", "output/cache") == content(one, "cache", "output/cache")
    assert first["samples"] == second["samples"] == alone["samples"]
    assert "p3.png" not in alone["samples"]
    assert first["phases"] == alone["phases"]

    assert first["losses"] == second["losses"] == alone["losses"]
    assert len(alone["losses"]) == 2

    assert first["media"] == alone["media"]
    assert len(alone["media"]) == 4
    assert second["media"] == first["media"], "all know what there is"
    assert first["pictures"] == alone["pictures"][::2]
    assert second["pictures"] == alone["pictures"][1::2]
    assert len(first["in lockstep"]) == 4
    assert not second["in lockstep"]
    expected = content(one, "output/validation_images")
    found = content(two, "output/validation_images")
    assert expected.items() <= found.items()
    for path, digest in expected.items():
        assert found[path.replace("step_1_", "step_2_")] == digest, (
            "rendered by both, written by one"
        )
