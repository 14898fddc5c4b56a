"""The plans in the docs, as the program makes them today: `python -m tests.docs.plans` writes them.

- A sample is a code block whose first line is its command, `$ simpletuner plan ...`. What follows
  is an excerpt: the lines of the output from the first that begins with the same word to the last
  that does.
- The rows of two tables name what is planned: choices of `offload: auto`, and clips whose tokens
  are shared. `scripts/cards_page.py` writes the table of cards.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import av
import numpy as np
from av.video.frame import VideoFrame
from PIL import Image

from simpletuner.cli.app import main
from tests.docs.languages import DOCS, LANGUAGES, TRANSLATED, with_blocks

SAMPLE = re.compile(r"(?<=^```\n\$ )(simpletuner plan .*)\n((?:.+\n)+?)(?=```$)", re.MULTILINE)
CHOICES = re.compile(r"(?<=^\| `)(\S+)(?=` \|(?: [^|]+ \|){5}$)(.*)", re.MULTILINE)
SHARED = re.compile(r"(?<=^\| )((\d+)×(\d+), (\d+) frames.*?) \| [\d,]+ \|(.*\n.*)", re.MULTILINE)
SAMPLED = ("FSDP2", "MEMORY", "OFFLOAD", "quickstart/KANDINSKY5_VIDEO")
PICTURE = (1024, 1024)
CLIPS = {"videos": (1280, 720), "768": (768, 512), "1280": (1280, 768)}  # sizes by folder
CARD_EXAMPLES = (
    "kandinsky5-image-lora",
    "sanavideo-lora",
    "kandinsky5-video-lite-lora",
    "kandinsky5-video-pro-lora",
)
SIZES = (8, 12, 16, 24, 80)  # GB of the cards that the table of choices is for


def write_files(folder: Path) -> None:
    """Ten pictures and ten clips of ten seconds, with captions, where the examples expect them."""
    pictures = folder / "datasets" / "my_images"
    pictures.mkdir(parents=True)
    Image.new("RGB", PICTURE).save(pictures / "0.png")
    _repeat(pictures / "0.png")
    for name, size in CLIPS.items():
        clip = folder / "datasets" / name / "0.mp4"
        clip.parent.mkdir()
        _write_clip(clip, *size)
        _repeat(clip)


def _write_clip(path: Path, width: int, height: int) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.width = width
        stream.height = height
        black = np.zeros((height, width, 3), np.uint8)
        frame = VideoFrame.from_ndarray(black).reformat(format="yuv420p")
        for number in range(250):
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _repeat(first: Path) -> None:
    for number in range(10):
        first.with_name(f"{number}.txt").write_text("a caption")
        first.with_name(f"{number}{first.suffix}").write_bytes(first.read_bytes())


def excerpt(command: str, sample: str) -> str:
    """The part of a command's output that `sample` shows an earlier form of.

    It lies between the lines that begin with the first words of the sample's first and last line.
    """
    lines = "".join(printed(*shlex.split(command)[1:])).splitlines()
    first_word = re.escape(sample.splitlines()[0].split()[0])
    last_word = re.escape(sample.splitlines()[-1].split()[0])
    begin = next(number for number, line in enumerate(lines) if re.match(rf" *{first_word}", line))
    end = max(number for number, line in enumerate(lines) if re.match(rf" *{last_word}", line))
    return "".join(f"{line}\n" for line in lines[begin : end + 1])


def printed(*arguments: str) -> tuple[str, str]:
    """Standard output and standard error of a command."""
    output = io.StringIO()
    errors = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        main(arguments)
    return output.getvalue(), errors.getvalue()


def plan(*arguments: str) -> dict[str, Any]:
    return json.loads(printed("plan", "--json", *arguments)[0])


def choice(example: str, gigabytes: int) -> str:
    """A cell of the table of choices."""
    planned = plan(f"example={example}", "offload=auto", "--device-memory", str(gigabytes))
    if not planned["ok"]:
        return "does not fit"

    chosen = {key: setting["value"] for key, setting in planned["settings"].items()}
    match = re.search(r"(\d+ of \d+) blocks", " ".join(planned["offload_auto"]))
    blocks = match[1] if match else ""
    decoding = chosen.get("validation_decoding")
    words = []
    if chosen.get("group_offload_text_encoder"):
        words.append("text")
    if chosen.get("vae_enable_tiling"):
        words.append("VAE tiling")
    if chosen.get("gradient_checkpointing") is False:
        words.append("no checkpointing")
    if chosen.get("group_offload_resident_blocks"):
        words.append(f"{blocks} resident")
    if chosen.get("gradient_checkpointing_kept_blocks"):
        words.append(f"{blocks} kept")
    if chosen.get("offload_block_inputs"):
        words.append("inputs on the host")
    if decoding:
        words.append(f"previews in {decoding}")
    return ", ".join(words) or "nothing"


def choices_row(row: re.Match[str]) -> str:
    """A row of the table of choices: an example, and what is chosen for cards of several sizes."""
    choices = [choice(row[1], gigabytes) for gigabytes in SIZES]
    return f"{row[1]}` | {' | '.join(choices)} |"


def shared_cells(width: int, height: int, frames: int, card: str) -> Iterator[str]:
    """Cells of the table of sequence parallelism: tokens, seconds, host memory, bytes exchanged."""
    flavour = "t2v-pro-sft-5s-hd" if frames <= 121 else "t2v-pro-sft-10s-hd"
    video = {"num_frames": frames, "min_frames": frames}
    folder = f"datasets/{width}"
    entry: dict[str, Any] = {
        "id": "clips",
        "dataset_type": "video",
        "instance_data_dir": folder,
        "caption_strategy": "textfile",
    }
    entry |= {"resolution": height, "resolution_type": "pixel", "video": video}
    Path("datasets.json").write_text(
        json.dumps([entry, {"id": "text", "dataset_type": "text_embeds"}])
    )
    settings = [
        "example=kandinsky5-video-pro-lora",
        f"model_flavour={flavour}",
        "data_backend_config=datasets.json",
    ]
    settings += ["offload=auto", "validation_disable=true", "--devices", "8", "--device", card]
    whole = plan(*settings, "sequence_parallel_size=1")
    shared = plan(*settings, "sequence_parallel_size=8")
    assert shared["buckets"][0]["size"] == f"{width}x{height}@{frames}"

    yield f"{shared['buckets'][0]['tokens']:,}"
    yield f"{whole['seconds']['step']:.0f}" if whole["ok"] else "does not fit"
    seconds = shared["seconds"]["step"]
    yield f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"
    yield host_memory(whole) if whole["ok"] else ""
    yield host_memory(shared)
    yield f"{shared['processes']['sent']['exchanged'] / 1e9:.0f} GB"


def host_memory(planned: dict[str, Any]) -> str:
    """The peak of all phases."""
    return f"{max(phase['host'] for phase in planned['memory']) / 1e9:.0f} GB"


def shared_rows(row: re.Match[str]) -> str:
    """Two rows, for cards of 24 and of 80 GB."""
    width, height, frames = (int(number) for number in row.groups()[1:4])
    tokens, *small_card = shared_cells(width, height, frames, "4090")
    _, *large_card = shared_cells(width, height, frames, "a100")
    first = table_row([row[1], tokens, "24 GB", *small_card])
    second = table_row(["", "", "80 GB", *large_card])
    return f"{first}\n| {second}"


def table_row(cells: list[str]) -> str:
    """A row of a table without its first bar."""
    return " ".join(f"{cell} |".strip() for cell in cells)


def renewed(page: str) -> str:
    """The text of a page with today's plans; needs `write_files` in the working directory."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    text = SAMPLE.sub(lambda block: f"{block[1]}\n{excerpt(*block.groups())}", text)
    if page == "MEMORY":
        text = CHOICES.sub(choices_row, text)
    if page == "DISTRIBUTED":
        text = SHARED.sub(shared_rows, text)
    return text


if __name__ == "__main__":
    nowhere = {
        "query_gpu": mock.Mock(return_value=None),
        "torch_uses_gpus": mock.Mock(return_value=False),
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple("simpletuner.budget.device", **nowhere),
    ):
        write_files(Path(folder))
        with contextlib.chdir(folder):
            for stale in (*SAMPLED, "DISTRIBUTED"):
                (DOCS / f"{stale}.md").write_text(renewed(stale), encoding="utf-8")
                sys.stdout.write(f"{stale}\n")
    for english in TRANSLATED:
        for language in LANGUAGES:
            translation = DOCS / language / english.name
            text = translation.read_text(encoding="utf-8")
            text = with_blocks(text, english.read_text(encoding="utf-8"))
            translation.write_text(text, encoding="utf-8")
