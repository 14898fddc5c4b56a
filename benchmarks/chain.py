"""The whole chain, from mp4 files to optimizer steps, against the work that cannot be avoided.

    clips ─► decode ─► VAE ─► cache ─► loader ─► step

The encoder alone works on decoded frames in memory, and steps alone work on one batch in memory;
the difference is what reading files, threads, caches and the loader add. Wall time needs a machine
with free cores, since decoding and writing run beside the encoder; CPU time is valid on a busy one,
too. Encoders are loaded before the clock starts. The VAE is the real one for a real size, else an
eighth as wide; the text encoder is that of the tests. A package of the extra `dev` makes the clips.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import (
    SHAPES,
    RandomAdapter,
    build_clip_vae,
    lora_targets,
    make_accelerator,
    make_batch,
    make_config,
)
from benchmarks.step import RATE, _Memory
from benchmarks.timing import Ratio, arguments, compare, interleave, show
from simpletuner.caching.catalogue import Catalogue, LatentEntry, TextEntry
from simpletuner.config.sources import parse_arguments
from simpletuner.data.sampler import PlannedBatch
from simpletuner.diffusion.batch import Batch
from simpletuner.encoding.decoding import decode_sample
from simpletuner.encoding.encoders import build_adapter
from simpletuner.encoding.fill import fill_latents, fill_texts, to_pixels
from simpletuner.encoding.read import BatchReader
from simpletuner.models.adapter import TextRequest
from simpletuner.models.kandinsky5.video import HunyuanLatentEncoder
from simpletuner.planning.build import plan_training
from simpletuner.planning.entries import list_entries, make_catalogue
from simpletuner.planning.plans import Plan
from simpletuner.reporting.events import EventStream, PhaseStarted, RunningPhase
from simpletuner.run.settings import assembly_settings
from simpletuner.training.assemble import assemble
from simpletuner.training.loader import BatchLoader
from simpletuner.training.settings import TrainingSpec
from simpletuner.training.state import Assembly
from simpletuner.training.step import optimizer_step
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import DATASETS, Workspace

try:
    from tests.tools.clips import write_clip
except ModuleNotFoundError as error:
    sys.exit(f"The package {error.name} is missing; install the extra dev: pip install -e .[dev]")

BAR = 1.15
WAITING_BAR = 0.01


@dataclass(frozen=True)
class Scale:
    """The transformer of a size, its files, and the frames and side that are trained."""

    transformer: str
    clip: tuple[int, int]
    seconds: float
    frames: int
    resolution: int


SCALES = {
    "tiny": Scale("tiny-video", (96, 64), 1.0, 5, 64),
    "medium": Scale("medium-video", (384, 256), 1.0, 17, 128),
    "lite": Scale("lite", (1280, 854), 3.0, 61, 512),
}


@dataclass
class Chain:
    """Everything between the files and the steps, loaded."""

    plan: Plan
    catalogue: Catalogue
    texts: Sequence[TextEntry]
    latents: Sequence[LatentEntry]
    text_encoder: Any
    encoder: HunyuanLatentEncoder
    assembly: Assembly
    size: str
    steps: int
    waits: list[float] = field(default_factory=list)
    phase: Any = field(default_factory=lambda: RunningPhase(EventStream(), PhaseStarted("Filling")))

    def fill_texts(self) -> None:
        """Encode and write every caption."""
        empty({entry.folder for entry in self.texts})
        device = self.text_encoder.device.type
        batch_size = self.plan.config.caching.captions_at_once(device, streamed=False)
        fill_texts(self.texts, self.text_encoder, batch_size, self.phase)

    def fill_latents(self) -> None:
        """Decode, encode and write every clip."""
        empty({entry.folder for entry in self.latents})
        failures = fill_latents(
            self.latents, lambda: self.encoder, self.plan.config.caching, self.phase
        )
        if failures:
            raise RuntimeError(failures)

    def train(self) -> None:
        """Steps on what the caches hold."""
        reader = BatchReader(self.catalogue, 0.0, 0, _refuse, _refuse)
        loader = BatchLoader(
            self.plan.sampler(),
            lambda planned: self.with_captions(reader, planned),
            self.plan.config.caching,
            lambda epoch: None,
            pin=True,
        )
        try:
            reports = [optimizer_step(self.assembly, loader, step) for step in range(self.steps)]
        finally:
            loader.close()
        waited = sum(report.data_seconds for report in reports)
        self.waits.append(waited / sum(report.seconds for report in reports))

    def train_in_memory(self) -> None:
        """As many steps on one batch in memory."""
        frames, height, width = self.latent_size()
        loader: Any = _Memory(make_batch(self.size, 1, (frames, height, width)))
        for step in range(self.steps):
            optimizer_step(self.assembly, loader, step)

    def with_captions(self, reader: BatchReader, planned: PlannedBatch) -> Batch:
        """A batch from the caches; for a real transformer, with random captions of its width."""
        batch = reader(planned)
        if SHAPES[self.size].gigabytes is None:
            return batch
        return replace(batch, embeds=make_batch(self.size, len(batch.names)).embeds)

    def latent_size(self) -> tuple[int, int, int]:
        """Frames, height and width of the clips' latents."""
        sample = self.latents[0].sample
        width, height = sample.geometry.size
        return (sample.frames - 1) // 4 + 1, height // 8, width // 8


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else None, tuple(SCALES), rounds=5)
    parser.add_argument("--clips", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        chain = prepare(Path(name), options.size, options.device, options.clips)
        with contextlib.chdir(Path(name) / "run"):
            wall, cpu = measure(chain, options.rounds, options.device)
    title = (
        f"The chain from {options.clips} clips to {chain.steps} steps, {options.size} on "
        f"{options.device}"
    )
    show(title, ratios_of(chain, wall, cpu), options)


def measure(
    chain: Chain, rounds: int, device: str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Wall and CPU seconds of every stage, and of the work that cannot be avoided.

    The working directory must be the folder of the plan.
    """
    decoded = [decode_sample(entry.sample) for entry in chain.latents]
    variants: dict[str, Callable[[], None]] = {
        "encode texts": lambda: _encode_texts(chain),
        "encode": lambda: _encode(chain, decoded),
        "decode": lambda: _decode_all(chain),
        "steps": chain.train_in_memory,
        "fill texts": chain.fill_texts,
        "fill": chain.fill_latents,
        "train": chain.train,
    }
    chain.fill_texts()
    chain.fill_latents()
    wall = interleave(variants, rounds, lambda: _wall(device))
    return wall, interleave(variants, rounds, time.process_time)


def ratios_of(
    chain: Chain, wall: dict[str, list[float]], cpu: dict[str, list[float]]
) -> list[Ratio]:
    """Every stage in units of its unavoidable work, then the whole chain."""
    wall["chain"] = sum_of(wall, "fill texts", "fill", "train")
    wall["unavoidable"] = sum_of(wall, "encode texts", "encode", "steps")
    cpu["encode and decode"] = sum_of(cpu, "encode", "decode")

    def note(name: str) -> str:
        return f"{min(wall[name]):.2f} s"

    return [
        compare(
            "captions: wall of caching / encoder",
            wall,
            "fill texts",
            "encode texts",
            note=note("fill texts"),
        ),
        compare("clips: wall of caching / encoder", wall, "fill", "encode", BAR, note("fill")),
        compare(
            "clips: CPU of caching / encoder and decoding", cpu, "fill", "encode and decode", BAR
        ),
        compare("decoding / encoder, wall", wall, "decode", "encode", note="what the threads hide"),
        compare(
            "steps from the cache / steps in memory, wall",
            wall,
            "train",
            "steps",
            note=note("train"),
        ),
        Ratio("waiting for data / step", chain.waits[1:], WAITING_BAR),
        compare(
            "whole chain / encoders and steps alone, wall",
            wall,
            "chain",
            "unavoidable",
            note=note("chain"),
        ),
    ]


def sum_of(seconds: dict[str, list[float]], *names: str) -> list[float]:
    """The sum of some stages in every round."""
    return [sum(stages) for stages in zip(*(seconds[name] for name in names), strict=True)]


def prepare(folder: Path, size: str, device: str, clips: int) -> Chain:
    """Files, a plan for them, encoders and a transformer."""
    scale = SCALES[size]
    run = Workspace.create(
        folder / "run", make_checkpoint(folder / "checkpoint", "t2v"), pictures=0
    )
    run.write_config(
        model_family="kandinsky5-video", model_flavour="t2v-lite-sft-5s", train_batch_size=1
    )
    video = {
        "num_frames": scale.frames,
        "min_frames": scale.frames,
        "frame_rate": 24 if scale.frames > 5 else 12,
    }
    dataset = {
        **DATASETS[0],
        "dataset_type": "video",
        "video": video,
        "resolution": scale.resolution,
    }
    run.write_datasets([{**dataset, "instance_data_dir": str(run.path("clips"))}, *DATASETS[1:]])
    for index in range(clips):
        write_clip(run.path(f"clips/clip{index}.mp4"), size=scale.clip, seconds=scale.seconds)
        run.path(f"clips/clip{index}.txt").write_text(
            f"clip {index}, " + "something moves slowly to the left " * 2
        )
    with run.inside():
        plan = plan_training(parse_arguments([]))
        catalogue = make_catalogue(plan)
        assert catalogue is not None
        listing = list_entries(plan, catalogue)
        text_encoder = build_adapter(plan).load_text_encoder(torch.device(device), torch.float32)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    encoder = HunyuanLatentEncoder(
        build_clip_vae(scale.transformer, device), torch.device(device), dtype
    )
    assembly = _assembly(scale.transformer, device)
    return Chain(
        plan=plan,
        catalogue=catalogue,
        texts=[*listing.texts],
        latents=[*listing.latents],
        text_encoder=text_encoder,
        encoder=encoder,
        assembly=assembly,
        size=scale.transformer,
        steps=2 * clips,
    )


def empty(folders: set[Path]) -> None:
    """Remove the cache entries of an earlier round."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _assembly(size: str, device: str) -> Assembly:
    precision = "no" if device == "cpu" else "bf16"
    config = make_config(
        size, mixed_precision=precision, gradient_checkpointing=True, learning_rate=RATE
    )
    intent = TrainingSpec(
        lora_targets=lora_targets(size), seed=0, total_steps=100_000, learning_rate=RATE
    )
    assembly = assemble(
        assembly_settings(config, intent),
        RandomAdapter(config, size, device),
        [],
        make_accelerator(device),
    )
    assembly.transformer.train()
    return assembly


def _encode_texts(chain: Chain) -> None:
    for entry in chain.texts:
        chain.text_encoder.encode([TextRequest(entry.caption, bare=entry.bare)])


def _encode(chain: Chain, decoded: Sequence[Any]) -> None:
    for entry, frames in zip(chain.latents, decoded, strict=True):
        chain.encoder.encode(to_pixels(frames)[None], [entry.key.seed()])


def _decode_all(chain: Chain) -> None:
    for entry in chain.latents:
        decode_sample(entry.sample)


def _wall(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _refuse(entry: object) -> None:
    raise RuntimeError(f"a cache entry is damaged: {entry}")


if __name__ == "__main__":
    main()
