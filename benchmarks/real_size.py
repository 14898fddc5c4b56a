"""Host memory of loading real sizes, against the estimate of `simpletuner plan`.

Checkpoints of random weights are written to a scratch folder, shard by shard. For each size and way
to load, a process then loads the transformer as a run does, and runs one micro-step of a few tokens
on the CPU.

Measured are the pages that only the process has: anonymous pages and shared memory, every few
milliseconds. Pages of mapped checkpoints are not among them, since the system evicts them when it
needs room; they are in the high-water mark (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.models import (
    SHAPES,
    SIZES,
    adapter_settings,
    cost_of,
    dtype_of,
    hollow_transformer,
    lora_targets,
    make_accelerator,
    make_batch,
    make_config,
    random_weight,
)
from benchmarks.timing import Ratio, arguments, show
from simpletuner.budget.device import HOST_BASE
from simpletuner.budget.workload import Parts
from simpletuner.config.schema import RunConfig
from simpletuner.diffusion.flow import make_noisy
from simpletuner.models.adapter import load_adapter
from simpletuner.models.cost import BatchShape
from simpletuner.models.registry import FAMILIES
from simpletuner.models.source import ModelSource
from simpletuner.run.settings import assembly_settings
from simpletuner.training.assemble import assemble
from simpletuner.training.settings import TrainingSpec
from simpletuner.weights.files import INDEX_SUFFIX
from simpletuner.weights.part import DIFFUSERS_WEIGHTS

BAR = 1.10
SHARD = 10**9  # bytes
LATENTS = (1, 8, 8)  # frames, height, width
CAPTION = 8  # tokens
INTERVAL = 0.005  # seconds between two readings of the memory
STATUS = Path("/proc/self/status")
KINDS: Mapping[str, Mapping[str, Any]] = {
    "int8, streamed": {"base_model_precision": "int8-quanto", "enable_group_offload": True},
    "int8, from disk": {
        "base_model_precision": "int8-quanto",
        "enable_group_offload": True,
        "group_offload_to_disk_path": "offloaded",
    },
    "int8, resident": {"base_model_precision": "int8-quanto"},
    "bf16, streamed": {"enable_group_offload": True},
}


@dataclass(frozen=True)
class Peaks:
    """Peak memory of a process and its estimate, in bytes.

    Attributes:
        loading, step: measured in the phase.
        high_water: of the whole process, with pages of mapped files.
        packed: size of the packed weights.
    """

    loading: float
    step: float
    high_water: float
    planned_loading: float
    planned_step: float
    packed: float


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else None, rounds=1)
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="scratch folder; a checkpoint in it is used again",
    )
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["lite", "image", "sana"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument(
        "--sparse", action="store_true", help="zeros in files without blocks on the disk"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.here:
        print(json.dumps(asdict(measure(options.folder, options.size[0], options.kinds[0]))))
        return
    ratios: list[float] = []
    for size in options.size:
        write_checkpoint(options.folder / size, size, sparse=options.sparse)
        for kind in options.kinds:
            rounds = [in_a_process(options.folder, size, kind) for _ in range(options.rounds)]
            ratios += compare(f"{size}, {kind}", rounds)
    del options.folder, options.here  # results must not name folders of this machine
    show("Host memory of a process against the plan, on a CPU", ratios, options)


def compare(name: str, rounds: list[Peaks]) -> Iterator[Ratio]:
    """The lines of one way to load one size."""
    last = rounds[-1]
    yield _ratio(
        f"{name}: loading, measured / planned",
        [peaks.loading for peaks in rounds],
        last.planned_loading,
        f"{last.packed / 1e9:.2f} GB of packed weights",
    )
    yield _ratio(
        f"{name}: micro-step, measured / planned",
        [peaks.step for peaks in rounds],
        last.planned_step,
        f"{last.high_water / 1e9:.2f} GB with mapped pages",
    )


def _ratio(title: str, measured: list[float], planned: float, note: str) -> Ratio:
    sizes = f"measured {measured[-1] / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB"
    return Ratio(title, [peak / planned for peak in measured], BAR, f"{sizes}, {note}")


def in_a_process(folder: Path, size: str, kind: str) -> Peaks:
    """The result of `measure` in a new process."""
    words = ["--here", "--folder", str(folder), "--size", size, "--kinds", kind]
    command = [sys.executable, "-m", "benchmarks.real_size", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Peaks(**json.loads(done.stdout.splitlines()[-1]))


def write_checkpoint(folder: Path, size: str, *, sparse: bool = False) -> None:
    """Write the transformer of a size with random weights, unless the folder has one.

    Weights are in bf16, but for those that stay in float32. Only one shard is in memory at a time.

    Args:
        sparse: write zeros that take no room on the disk. The same pages are mapped and packed.
    """
    target = folder / "transformer"
    model = hollow_transformer(size)
    index = target / f"{DIFFUSERS_WEIGHTS}{INDEX_SUFFIX}"
    if index.is_file():
        return
    model.save_config(target)
    shards = list(split(model))
    generator = torch.Generator().manual_seed(0)
    file_of_weight: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"{DIFFUSERS_WEIGHTS}-{number:05}-of-{len(shards):05}.safetensors"
        if sparse:
            save_zeros(model, names, target / file)
        else:
            weights = {name: draw(model, name, generator) for name in names}
            save_file(weights, target / file, {"format": "pt"})
        file_of_weight |= dict.fromkeys(names, file)
    content = {"metadata": {}, "weight_map": file_of_weight}
    index.write_text(json.dumps(content), encoding="utf-8")


def split(model: Any) -> Iterator[list[str]]:
    """Names of the weights of each file."""
    names: list[str] = []
    room = SHARD
    for name, like in model.named_parameters():
        size = like.numel() * dtype_of(model, name, torch.bfloat16).itemsize
        if names and size > room:
            yield names
            names = []
            room = SHARD
        names = [*names, name]
        room = room - size
    yield names


def save_zeros(model: Any, names: list[str], path: Path) -> None:
    """Write a safetensors file whose values are a hole in the file.

    The format: the length of the header in 8 bytes, the header as JSON, the values.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype = dtype_of(model, name, torch.bfloat16)
        like = model.get_parameter(name)
        start = end
        end = end + like.numel() * dtype.itemsize
        kind = "F32" if dtype == torch.float32 else "BF16"
        header[name] = {"dtype": kind, "shape": list(like.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def draw(model: Any, name: str, generator: torch.Generator) -> torch.Tensor:
    path, _, key = name.rpartition(".")
    dtype = dtype_of(model, name, torch.bfloat16)
    return random_weight(
        path, key, model.get_parameter(name), torch.device("cpu"), dtype, generator
    )


def measure(folder: Path, size: str, kind: str) -> Peaks:
    """Load a checkpoint in this process, and run a micro-step."""
    settings = dict(KINDS[kind])
    key = "group_offload_to_disk_path"
    if key in settings:
        settings[key] = str(folder / settings[key])
    config = make_config(
        size,
        pretrained_model_name_or_path=str(folder / size),
        mixed_precision="bf16",
        speed="reference",
        **settings,
    )
    with Watch() as loading:
        assembly = load_assembly(config, size)
    with Watch() as step:
        batch = make_batch(size, 1, LATENTS)
        batch.embeds[0]["prompt_embeds"] = batch.embeds[0]["prompt_embeds"][:CAPTION]
        noisy = make_noisy(batch, torch.tensor([0.5]), torch.randn(batch.latents.shape))
        prediction = assembly.adapter.predict(assembly.transformer, assembly.adapter.prepare(noisy))
        (prediction - noisy.target).square().mean().backward()
    planned_loading, planned_step, packed = estimate(config, size)
    return Peaks(
        loading=loading.peak,
        step=step.peak,
        high_water=memory()["VmHWM"],
        planned_loading=planned_loading,
        planned_step=planned_step,
        packed=packed,
    )


def load_assembly(config: RunConfig, size: str) -> Any:
    """Load a transformer as a run does."""
    spec = FAMILIES[SHAPES[size].family]
    flavour = spec.flavour(SHAPES[size].flavour)
    source = ModelSource.from_settings(spec, flavour, config.flat)
    adapter = load_adapter(spec)(adapter_settings(config), flavour, source)
    intent = TrainingSpec(
        lora_targets=lora_targets(size), seed=0, total_steps=1, learning_rate=1e-4
    )
    return assemble(assembly_settings(config, intent), adapter, [], make_accelerator("cpu"))


def estimate(config: RunConfig, size: str) -> tuple[float, float, float]:
    """Bytes that the plan expects while loading, in the step, and of packed weights."""
    spec = FAMILIES[SHAPES[size].family]
    cost = cost_of(spec.cost, hollow_transformer(size))
    model = Parts(spec, cost, lora_targets(size), spec.cost.vae, 0, ()).model(config)
    frames, height, width = LATENTS
    load = BatchShape(1, frames, height // spec.patch_size, width // spec.patch_size, CAPTION)
    waiting = HOST_BASE
    if config.offload.group_offload_to_disk_path is None:
        waiting += model.streamed_bytes
    packed = sum(model.blocks) + model.rest_bytes
    return waiting + model.passing_bytes, waiting + model.memory(load).total, packed


class Watch:
    """Measures the peak memory of this process while its block runs."""

    def __init__(self) -> None:
        self.peak = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._done.set()
        self._thread.join()

    def _measure(self) -> None:
        while True:
            pages = memory()
            self.peak = max(self.peak, pages["RssAnon"] + pages["RssShmem"])
            if self._done.wait(INTERVAL):
                return


def memory() -> dict[str, float]:
    """The memory of this process in bytes, as Linux counts it."""
    sizes = {}
    for line in STATUS.read_text(encoding="ascii").splitlines():
        name, *rest = line.split()
        if name.startswith(("Rss", "VmHWM")):
            sizes[name.rstrip(":")] = float(rest[0]) * 1024  # the file has kB
    return sizes


if __name__ == "__main__":
    main()
