"""A start with many files and full caches: a dry run, and training up to the end of step 1.

The folders are generated: small PNG files with captions, and cache entries that are copies of a few
real ones under the keys of the plan. Each command is a separate process. Its CPU time is given in
seconds and in units of `python -c "import torch"` in the same round, its memory as the peak of the
process above that of a start with `FEW` files. This file does not import torch.
"""

from __future__ import annotations

import json
import statistics
import struct
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.startup import FIRST_STEP, UNIT, Command, Usage, environment
from benchmarks.timing import Ratio, arguments, show
from simpletuner.caching.catalogue import AnyEntry, LatentEntry
from simpletuner.caching.entry import entry_path, read_entry, store_entry
from simpletuner.caching.keys import provenance_of

SIZES = ((96, 64), (64, 64), (64, 96), (80, 64), (64, 80), (128, 64), (64, 128), (112, 64))
FEW = 2 * len(SIZES)  # pictures of the start that others are compared with
PER_FOLDER = 1000
MAKE_FOLDER = """
import json
import sys
from pathlib import Path
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import Workspace
folder = Path(sys.argv[1])
settings = json.loads(sys.argv[2])
Workspace.create(folder / "run", make_checkpoint(folder / "checkpoint"), pictures=0, **settings)
"""
COPY_ENTRIES = "from benchmarks.many_files import copy_entries; copy_entries()"
SETTINGS = {"max_train_steps": 50, "checkpoint_step_interval": 1000, "cache_dir": "cache"}
PRODUCT = ("-m", "simpletuner")


def picture(number: int) -> bytes:
    """A PNG file of one colour, different for each number, which is in it as a comment."""
    width, height = SIZES[number % len(SIZES)]
    colour = bytes((number % 251, number // 251 % 251, 7))
    rows = (b"\0" + colour * width) * height
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"tEXt", b"Comment\0" + str(number).encode()),
        (b"IDAT", zlib.compress(rows, 1)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file: length, kind, content and checksum."""
    length = struct.pack(">I", len(content))
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return length + kind + content + checksum


def add_pictures(folder: Path, first: int, end: int) -> None:
    """Write pictures with caption files, every tenth with two captions."""
    for number in range(first, end):
        target = folder / f"{number // PER_FOLDER:03}"
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{number:06}.png").write_bytes(picture(number))
        caption = f"number {number}, a plain picture in one colour, soft light from the left"
        lines = [f"{caption}, no people"]
        if number % 10 == 0:
            lines.append("the same scene, described a second time")
        (target / f"{number:06}.txt").write_text("\n".join(lines) + "\n")


def copy_entries() -> None:
    """Fill the caches of the configuration in the working directory with copies of their entries.

    Raises:
        KeyError: no entry has the shape of a missing one.
    """
    from simpletuner.config.sources import parse_arguments
    from simpletuner.planning.build import plan_training
    from simpletuner.planning.entries import list_entries, make_catalogue

    plan = plan_training(parse_arguments([]))
    catalogue = make_catalogue(plan)
    assert catalogue is not None
    listing = list_entries(plan, catalogue)
    entries: list[AnyEntry] = [*listing.texts, *listing.latents]
    content_by_shape = {}
    for entry in entries:
        key = entry.key.digest()
        if entry_path(entry.folder, key).is_file():
            content_by_shape[_shape(entry)] = read_entry(entry.folder, key)
    for entry in entries:
        key = entry.key.digest()
        if not entry_path(entry.folder, key).is_file():
            content = content_by_shape[_shape(entry)]
            provenance = provenance_of(entry.key, "generated")
            store_entry(entry.folder, key, content, provenance, compress=True)


def _shape(entry: AnyEntry) -> tuple[int, int] | None:
    """Width and height of a latent's picture; None for a caption."""
    return entry.sample.geometry.size if isinstance(entry, LatentEntry) else None


def make_folder(folder: Path, count: int) -> Path:
    """Make a working directory with this many pictures and full caches."""
    make = [sys.executable, "-c", MAKE_FOLDER, str(folder), json.dumps(SETTINGS)]
    subprocess.run(make, check=True, env=environment(), stderr=subprocess.DEVNULL)
    run = folder / "run"
    pictures = run / "datasets" / "pictures"
    add_pictures(pictures, 0, FEW)
    fill = [sys.executable, *PRODUCT, "cache", "fill"]
    subprocess.run(
        fill,
        check=True,
        cwd=run,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    add_pictures(pictures, FEW, count)
    subprocess.run([sys.executable, "-c", COPY_ENTRIES], check=True, cwd=run, env=environment())
    return run


def commands(run: Path) -> dict[str, Command]:
    """The timed commands by name."""
    fresh = (run / "output",)
    return {
        "dry run": Command((*PRODUCT, "train", "--dry-run"), run, fresh=fresh),
        "step 1": Command((*PRODUCT, "train"), run, FIRST_STEP, fresh),
    }


@dataclass
class Measured:
    """CPU time and memory of the commands by the number of pictures, round by round."""

    unit: list[float] = field(default_factory=list)
    taken: dict[tuple[str, int], list[Usage]] = field(default_factory=dict)

    def line(self, name: str, count: int) -> Ratio:
        """What so many files add to a start with few of them."""
        pairs = list(zip(self.taken[name, count], self.taken[name, FEW], strict=True))
        added = [usage.cpu - few.cpu for usage, few in pairs]
        whole = statistics.median(usage.cpu for usage, _ in pairs)
        memory = statistics.median(usage.peak - few.peak for usage, few in pairs) / 1e6
        peak = statistics.median(usage.peak for usage, _ in pairs) / 1e6
        note = (
            f"adds {statistics.median(added):.2f} s and {memory:.0f} MB; in all {whole:.2f} s of "
            f"CPU and {peak:.0f} MB"
        )
        shares = [seconds / base for seconds, base in zip(added, self.unit, strict=True)]
        return Ratio(f"{name}, {count:,} pictures", shares, note=note)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else None, rounds=3)
    parser.add_argument(
        "--counts",
        type=int,
        nargs="+",
        default=[1_000, 10_000, 100_000],
        help="numbers of pictures",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="make the folders here, or use those that are here",
    )
    options = parser.parse_args()
    kept_folder = vars(options).pop("keep")  # results must not name folders of this machine
    measured = Measured()
    with tempfile.TemporaryDirectory() as temporary:
        parent = kept_folder or Path(temporary)
        runs = {count: parent / str(count) / "run" for count in (FEW, *options.counts)}
        for count, run in runs.items():
            if not run.is_dir():
                make_folder(run.parent, count)
            first = commands(run)["step 1"].run(sys.executable)
            print(
                f"first start, {count:,} pictures: {first.cpu:.2f} s of CPU, "
                f"{first.peak / 1e6:.0f} MB"
            )
        for _ in range(options.rounds):
            measured.unit.append(Command(("-c", UNIT), parent).run(sys.executable).cpu)
            for count, run in runs.items():
                for name, command in commands(run).items():
                    usage = command.run(sys.executable)
                    measured.taken.setdefault((name, count), []).append(usage)
    ratios = []
    for name in ("dry run", "step 1"):
        for count in options.counts:
            ratios.append(measured.line(name, count))
    title = "What files add to a start with full caches, CPU time in units of `import torch`"
    show(title, ratios, options)


if __name__ == "__main__":
    main()
