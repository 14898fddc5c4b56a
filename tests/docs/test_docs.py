"""The docs are true: JSON blocks load, Python blocks run, links, files and tests exist."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import unicodedata
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.annexes.adapters.kinds import check_lycoris, read_lycoris
from simpletuner.annexes.start.recipe import RECIPES
from simpletuner.cli.app import main
from simpletuner.config.datasets import DatasetConfig, VideoConfig, read_datasets
from simpletuner.config.load import Layer, resolve
from simpletuner.config.schema import RunConfig, all_options
from simpletuner.config.sources import parse_arguments, read_json_layer
from simpletuner.config.types import plain_key
from simpletuner.data.buckets import PixelGrid
from simpletuner.errors import Problem, Problems
from simpletuner.models.registry import FAMILIES
from simpletuner.planning.checks import check_config, check_flavour, worth_reporting
from simpletuner.planning.prompt_library import PARSERS, read_library
from tests.docs.languages import FENCE, LANGUAGES
from tests.tools.refusals import family_complaints
from tests.tools.reports import found_by
from tests.tools.workspace import DATASETS, Workspace

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
REQUIRED = {"model_type": "lora", "model_family": "kandinsky5-image"}


def blocks(language: str) -> list[Any]:
    """Every fenced block of a language, with a name for the test's output."""
    parameters = []
    for page in PAGES:
        if page.parent.name in LANGUAGES:
            continue
        fences = FENCE.findall(page.read_text(encoding="utf-8"))
        texts = [text for kind, text in fences if kind == language]
        for number, text in enumerate(texts, start=1):
            parameters.append(pytest.param(text, id=f"{page.name}-{number}"))
    return parameters


def without_code(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get: lower case, signs dropped, spaces as dashes."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {anchor_of(heading) for heading in headings}


def anchor_of(heading: str) -> str:
    kept = [character for character in heading.lower() if is_kept(character)]
    return "".join(kept).strip().replace(" ", "-")


def is_kept(character: str) -> bool:
    """Letters, marks (as in Devanagari), numbers, and what stands between words."""
    return character in "-_ " or unicodedata.category(character)[0] in "LMN"


def test_the_architecture_page_places_every_module_of_data() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.partition("### Inside data/")[2].partition("\n#")[0]

    modules = {path.stem for path in (ROOT / "simpletuner" / "data").glob("[a-z]*.py")}

    assert set(re.findall(r"`(\w+)`", section)) == modules


@pytest.mark.parametrize("text", blocks("json"))
def test_json_blocks_of_the_docs_load(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "MY_KEY_ID", "MY_SECRET"):
        monkeypatch.setenv(name, "a-secret-of-the-docs")
    path = tmp_path / "block.json"
    path.write_text(text, encoding="utf-8")
    content = json.loads(text)
    problems = Problems()

    if isinstance(content, list):
        entries = read_datasets(
            path, problems, placeholders={"model_family": "kandinsky5-image", "output_dir": "out"}
        )
        assert len(entries) == len([entry for entry in content if not entry.get("disabled")])
    elif content.keys() & all_options().keys():
        layer = read_json_layer(path, problems)
        assert layer is not None
        config = resolve([Layer("required", list(REQUIRED.items())), layer], problems)
        problems += [*check_config(config), *check_settings(config)]
    elif "algo" in content:
        file = read_lycoris(str(path), FAMILIES["kandinsky5-image"], problems)
        assert file is not None
        problems += found_by(check_lycoris, file, {}, quantised=False)
    else:
        assert [prompt.nickname for prompt in read_library(path, problems)] == list(content)

    assert problems == []


def check_settings(config: RunConfig) -> list[Problem]:
    """Problems that the family and the flavour of a block have with its settings."""
    spec = FAMILIES[config.model.model_family]
    flavour = spec.flavour(config.model.model_flavour)
    return [
        *family_complaints(config, spec),
        *worth_reporting(found_by(check_flavour, config, flavour), config),
        *found_by(spec.checks.settings, config, flavour),
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_of_the_docs_resolve(page: Path) -> None:
    for link in LINK.findall(without_code(page)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page if not file else (page.parent / file).resolve()
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@cache
def sources() -> dict[str, str]:
    """Text of every Python file, by its path with a slash in front."""
    folders = ("simpletuner", "tests", "benchmarks", "scripts")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {
        f"/{path.relative_to(ROOT).as_posix()}": path.read_text(encoding="utf-8") for path in files
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_named_in_the_docs_exist(page: Path) -> None:
    """A moved file or a renamed test is noticed on the page that names it."""
    text = without_code(page)

    for name in re.findall(r"`([\w./]+\.py)`", text):
        assert any(path.endswith(f"/{name}") for path in sources()), name

    for name in re.findall(r"`(?:Test\w+\.)?(test_\w+)`", text):
        assert any(f"def {name}(" in source for source in sources().values()), name


def test_dataloader_page_documents_every_key() -> None:
    """Every key that has an effect is on the page, and the page names no others."""
    page = (ROOT / "docs" / "DATALOADER.md").read_text(encoding="utf-8")
    keys = set(DatasetConfig.model_fields)

    not_built = {"conditioning_image_embeds", "compress_cache"}
    assert {key for key in keys - not_built if f"`{key}`" not in page} == set()

    clip_keys = set(re.findall(r"^\| `video\.(\w+)`", page, re.MULTILINE))
    assert clip_keys == set(VideoConfig.model_fields)

    tables = re.findall(
        r"^\| (`[^|]*`[^|]*)\|", page.partition("## caption_strategy")[0], re.MULTILINE
    )
    named = {key for row in tables for key in re.findall(r"`(\w+)`", row)}
    assert named <= keys | {"disable", "framerate"}


def test_documented_example_sizes_are_current() -> None:
    """The table of sizes is computed, not remembered."""
    page = (ROOT / "docs" / "DATALOADER.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(pixel_area|pixel)` (\d+) \| (.*)$", page, re.MULTILINE)
    assert len(rows) == 4

    for kind, resolution, rest in rows:
        sources, *cells = [cell.strip() for cell in rest.strip("| ").split("|")]
        ratios = [ratio_of(source) for source in sources.removeprefix("ar ").split(" · ")]
        for alignment, cell in zip((16, 32, 64, 128), cells, strict=True):
            grid = PixelGrid(float(resolution), kind, alignment)
            sizes = [grid.size(ratio) for ratio in ratios]
            assert " · ".join(f"{width}×{height}" for width, height in sizes) == cell


def ratio_of(source: str) -> float:
    """A ratio, or the rounded ratio of a size."""
    width, sign, height = source.partition("×")
    return round(int(width) / int(height), 2) if sign else float(width)


# The blocks of PYTHON.md are one session, see test_python_page.py; those of EXTENDING.md:
# test_extending_page.py.
@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "text",
    [block for block in blocks("python") if not str(block.id).startswith(("PYTHON", "EXTENDING"))],
)
def test_python_blocks_of_the_docs_run(
    text: str, t2i_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tiny checkpoint in the place of the real one, and few steps."""
    workspace = Workspace.create(
        tmp_path, t2i_checkpoint, output_dir="output/my-lora", max_train_steps=1
    )

    assert workspace.train() == 0

    text = re.sub(r'"kandinskylab/[^"]*"', repr(str(t2i_checkpoint)), text)
    text = re.sub(r"num_inference_steps=\d+", "num_inference_steps=1", text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with contextlib.chdir(tmp_path):
        exec(compile(text, "snippet", "exec"), {})
        assert list(tmp_path.glob("*.png"))


# Words of messages on the page, and settings that cause them.
MISTAKES = {
    "learning_rte": ["learning_rte=1e-4"],
    "no samples detected": ["train_batch_size=16"],
}


@pytest.mark.parametrize("words", MISTAKES)
def test_errors_in_troubleshooting_match_the_program(
    words: str, t2i_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = troubleshooting_line("error: ", words)
    workspace = Workspace.create(tmp_path, t2i_checkpoint, pictures=10, max_train_steps=24)
    workspace.write_datasets([{**DATASETS[0], "id": "my-image-dataset", "repeats": 0}])

    assert workspace.run("plan", *MISTAKES[words]) == 2

    assert message in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("no configuration was found", ""),
        ("is not valid JSON", '{\n  "model_type": "lora"\n "seed": 1\n}\n'),
    ],
)
def test_config_errors_in_troubleshooting_match_the_program(
    words: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = troubleshooting_line("error: ", words)
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    if text:
        Path("config/config.json").write_text(text, encoding="utf-8")

    assert main(["train"]) == 2

    assert message in capsys.readouterr().err.splitlines()


def test_caption_warning_in_troubleshooting_matches_the_program(
    t2i_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = troubleshooting_line("warning: ", "captions come from the file names")
    workspace = Workspace.create(tmp_path, t2i_checkpoint, pictures=11, max_train_steps=24)
    dataset = {**DATASETS[0], "id": "my-pictures"}
    del dataset["caption_strategy"]
    workspace.write_datasets([dataset, DATASETS[1]])

    assert workspace.run("plan") == 0

    assert message.removeprefix("warning: ") in capsys.readouterr().out


def troubleshooting_line(kind: str, words: str) -> str:
    """The message of this kind that the page shows and that contains the words."""
    page = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith(kind) and words in line]
    assert len(lines) == 1
    return lines[0]


def test_documented_recipe_steps_match_the_program() -> None:
    page = (ROOT / "docs" / "DATASETS.md").read_text(encoding="utf-8")
    cells = []
    for purpose in ("subject", "style", "motion"):
        recipe = RECIPES[purpose]
        cells.append(
            f"{recipe.steps_per_file} a file, {recipe.fewest_steps} to {recipe.most_steps}"
        )

    assert f"| steps of `simpletuner start` | {' | '.join(cells)} |" in page


def test_keys_named_for_users_of_other_programs_exist() -> None:
    page = (ROOT / "docs" / "COMING_FROM.md").read_text(encoding="utf-8")
    keys = {*all_options(), *DatasetConfig.model_fields, *PARSERS, "position_start"}
    values = {"eval", "image"}

    named: set[str] = set()
    for ours in re.findall(r"^\| .* \| (.*) \|$", page, re.MULTILINE):
        named |= set(re.findall(r"`([a-z]+(?:_[a-z]+)*)`", ours))

    assert len(named) > 40
    assert named - keys - values == set()


def test_the_readme_and_the_index_sort_pages_into_the_same_kinds() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    table = readme.partition("| start | guides | reference")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines()[2:]]
    kinds = ("Start", "Guides", "Reference and how it works")

    for column, kind in enumerate(kinds):
        cells = "".join(row[column] for row in rows)
        section = index.partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
        assert re.findall(r"\(docs/([\w/]+\.md)\)", cells)
        assert sorted(re.findall(r"\(docs/([\w/]+\.md)\)", cells)) == sorted(
            re.findall(r"\(([\w/]+\.md)\)", section)
        )


def test_the_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}

    assert pages <= set(re.findall(r"\]\(([^)#]+)", readme))


def test_pictures_of_the_docs_are_small_and_shown() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sizes = {path: path.stat().st_size for path in (ROOT / "docs" / "images").iterdir()}

    assert {path.relative_to(ROOT).as_posix() for path in sizes} == set(
        re.findall(r"!\[[^\]]+\]\(([^)]+)\)", readme)
    )
    assert max(sizes.values()) <= 150_000


def drawn_tree() -> str:
    """The drawing of the tree in ARCHITECTURE.md."""
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.partition("## The tree")[2]
    return section.split("```")[1]


def drawn_name(path: Path) -> str:
    """A file or folder as the tree draws it."""
    return f"{path.name}/" if path.is_dir() else path.name


def test_file_tree_has_a_line_for_every_room() -> None:
    package = ROOT / "simpletuner"
    rooms = [path for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"]
    # Files that only re-export a few names need no line.
    files = [path for path in package.glob("*.py") if len(path.read_text().splitlines()) > 10]

    lines = {line.split()[0] for line in drawn_tree().splitlines() if line.strip()}

    assert {drawn_name(path) for path in rooms + files} <= lines


def test_file_tree_names_only_existing_files() -> None:
    existing = [*ROOT.glob("*"), *(ROOT / "simpletuner").rglob("*")]
    for folder in ("docs", "tests", "scripts"):
        existing += (ROOT / folder).iterdir()

    names = re.findall(r"[\w/]*\w(?:/|\.py)(?=[\s,;)])", drawn_tree())

    assert len(names) > 50
    assert set(names) <= {drawn_name(path) for path in existing}


CHANGED = "## Commands that have changed since the guides"
SYSTEM = ("apt", "mkdir", "popd", "pushd", "python")  # programs that are not ours


def changed_commands() -> dict[str, str]:
    """The table of INSTALL: what the guides say, and what to do now."""
    page = (ROOT / "docs" / "INSTALL.md").read_text(encoding="utf-8")
    table = page.partition(CHANGED)[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]*)` \| (.*) \|$", table, re.MULTILINE))


def test_substituted_guide_commands_occur_in_the_guides() -> None:
    """`hf` replaced `huggingface-cli`, and may change once more."""
    commands = re.findall(r"`(hf [a-z ]+)`", " ".join(changed_commands().values()))
    assert commands == ["hf auth login", "hf download"]

    for command in commands:
        hf = [sys.executable, "-m", "huggingface_hub.cli.hf"]
        help_text = subprocess.run(
            [*hf, *command.split()[1:], "--help"], capture_output=True, text=True, check=True
        ).stdout
    assert {"--repo-type", "--local-dir"} <= set(re.findall(r"--[a-z-]+", help_text)), (
        "as the guides write them"
    )


GUIDES = sorted((ROOT / "tests" / "data" / "guides").rglob("commands.sh"))


@pytest.mark.parametrize(
    "line", sorted({line for path in GUIDES for line in path.read_text("utf-8").splitlines()})
)
def test_guide_commands_run_or_have_a_substitute(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line.strip("# \\"))
    for changed in map(shlex.split, changed_commands()):
        if words[: len(changed)] == changed:
            return
    match words:
        case ["simpletuner", command]:
            assert main([command, "--help"]) == 0
        case [script] if script.startswith("./"):
            assert os.access(ROOT / script, os.X_OK)
        case ["cp", source, _]:
            assert (ROOT / source).is_file()
        case ["wandb", *_]:
            assert entry_points(group="console_scripts", name="wandb")
        case [flag, *_] if flag.startswith("--"):
            [(key, value)] = parse_arguments(words).settings
            assert isinstance(value, str) != all_options()[plain_key(key)].is_flag
        case [program, *_]:
            assert program in SYSTEM
