"""The plans that the docs show, as the program makes them today: `python -m tests.docs.plans`
writes them anew.

- A sample is a code block whose first line is its command, `$ simpletuner plan ...`. What follows
  is an excerpt: the lines of the output from the first that begins with the same word to the last
  that does.
- The rows of three tables name what is planned: choices of `offload: auto`, clips whose tokens
  are shared, and cards with the time that they take.
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
from simpletuner.reporting.wording import duration_text
from tests.docs.languages import DOCS, LANGUAGES, TRANSLATED, with_blocks

SAMPLE = re.compile(r"(?<=^```\n\$ )(simpletuner plan .*)\n((?:.+\n)+?)(?=```$)", re.MULTILINE)
CHOICES = re.compile(r"(?<=^\| `)(\S+)(?=` \|(?: [^|]+ \|){5}$)(.*)", re.MULTILINE)
SHARED = re.compile(r"(?<=^\| )((\d+)×(\d+), (\d+) frames.*?) \| [\d,]+ \|(.*\n.*)", re.MULTILINE)
CARD_TIMES = re.compile(r"(?<=^\| `)([\w-]+)` \| \d+ GB \|.*", re.MULTILINE)
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
    """Ten pictures and ten clips of ten seconds, with captions, where the packaged examples look
    for them.
    """
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
        frame = VideoFrame.from_ndarray(np.zeros((height, width, 3), np.uint8)).reformat(
            format="yuv420p"
        )
        for number in range(250):
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _repeat(first: Path) -> None:
    for number in range(10):
        first.with_name(f"{number}.txt").write_text("a caption")
        first.with_name(f"{number}{first.suffix}").write_bytes(first.read_bytes())


def excerpt(command: str, sample: str) -> str:
    """Of what a command prints now, the part of which `shown` is an earlier form."""
    lines = "".join(printed(*shlex.split(command)[1:])).splitlines()
    first, last = (
        re.escape(line.split()[0]) for line in (sample.splitlines()[0], sample.splitlines()[-1])
    )
    begin = next(number for number, line in enumerate(lines) if re.match(rf" *{first}", line))
    end = max(number for number, line in enumerate(lines) if re.match(rf" *{last}", line))
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
    found = plan(f"example={example}", "offload=auto", "--device-memory", str(gigabytes))
    if not found["ok"]:
        return "does not fit"
    chosen = {key: each["value"] for key, each in found["settings"].items()}
    blocks = re.search(r"(\d+ of \d+) blocks", " ".join(found["offload_auto"]))
    words = {
        "text": chosen.get("group_offload_text_encoder"),
        "VAE tiling": chosen.get("vae_enable_tiling"),
        "no checkpointing": chosen.get("gradient_checkpointing") is False,
        f"{blocks and blocks[1]} resident": chosen.get("group_offload_resident_blocks"),
        f"{blocks and blocks[1]} kept": chosen.get("gradient_checkpointing_kept_blocks"),
        "inputs on the host": chosen.get("offload_block_inputs"),
        f"previews in {chosen.get('validation_decoding')}": chosen.get("validation_decoding"),
    }
    return ", ".join(word for word, applies in words.items() if applies) or "nothing"


def shared_cells(width: int, height: int, frames: int, card: str) -> Iterator[str]:
    """Cells of the table of shared tokens: seconds a step, host memory of all processes, bytes
    exchanged.
    """
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
    whole, shared = (plan(*settings, f"sequence_parallel_size={count}") for count in (1, 8))
    assert shared["buckets"][0]["size"] == f"{width}x{height}@{frames}"
    host = [
        f"{max(phase['host'] for phase in each['memory']) / 1e9:.0f} GB" for each in (whole, shared)
    ]
    yield f"{shared['buckets'][0]['tokens']:,}"
    yield f"{whole['seconds']['step']:.0f}" if whole["ok"] else "does not fit"
    yield (
        f"{shared['seconds']['step']:.2g}"
        if shared["seconds"]["step"] < 10
        else f"{shared['seconds']['step']:.0f}"
    )
    yield from (host[0] if whole["ok"] else "", host[1])
    yield f"{shared['processes']['sent']['exchanged'] / 1e9:.0f} GB"


def shared_rows(row: re.Match[str]) -> str:
    """Two rows, for cards of 24 and of 80 GB."""
    width, height, frames = (int(number) for number in row.groups()[1:4])
    (tokens, *small), (_, *large) = (
        list(shared_cells(width, height, frames, card)) for card in ("4090", "a100")
    )
    rows = [row[1], tokens, "24 GB", *small], ["", "", "80 GB", *large]
    return "\n".join(" ".join(f"{cell} |".strip() for cell in cells) for cells in rows).replace(
        "\n", "\n| "
    )


def card_row(row: re.Match[str]) -> str:
    """A row of the table of cards: a card's memory, and how long the packaged examples take."""
    card = row[1]
    plans = [
        plan(f"example={example}", "offload=auto", "--device", card) for example in CARD_EXAMPLES
    ]
    memory = f"{plans[0]['device']['memory'] / 2**30:.0f} GB"
    times = []
    for answer in plans:
        times.append(duration_text(answer["seconds"]["total"]) if answer["ok"] else "does not fit")
    return f"{card}` | {memory} | {' | '.join(times)} |"


def renewed(page: str) -> str:
    """The text of a page with today's plans; the working directory holds the files of
    `write_files`.
    """
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    text = SAMPLE.sub(lambda block: f"{block[1]}\n{excerpt(*block.groups())}", text)
    if page == "MEMORY":
        text = CHOICES.sub(
            lambda row: f"{row[1]}` | {' | '.join(choice(row[1], size) for size in SIZES)} |", text
        )
    if page == "TROUBLESHOOTING":
        text = CARD_TIMES.sub(card_row, text)
    return SHARED.sub(shared_rows, text) if page == "DISTRIBUTED" else text


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
            for stale in (*SAMPLED, "DISTRIBUTED", "TROUBLESHOOTING"):
                (DOCS / f"{stale}.md").write_text(renewed(stale), encoding="utf-8")
                sys.stdout.write(f"{stale}\n")
    for page in TRANSLATED:
        for translation in (DOCS / language / page.name for language in LANGUAGES):
            text = with_blocks(
                translation.read_text(encoding="utf-8"), page.read_text(encoding="utf-8")
            )
            translation.write_text(text, encoding="utf-8")
