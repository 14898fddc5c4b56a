"""docs/OPTIONS.md lists the keys of the schema and the environment variables that are read."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from simpletuner.config.schema import all_options

ROOT = Path(__file__).parents[2]
SOURCES = "\n".join(
    path.read_text(encoding="utf-8") for path in sorted((ROOT / "simpletuner").rglob("*.py"))
)
READ = re.compile(r"""os\.environ(?:\.get\(|\[)["']([A-Z][A-Z_]+)["']""")
# Looked at to find out what another program would do; nobody sets them for a run.
OF_OTHERS = {
    "TERM",
    "COLUMNS",
    "NETRC",
    "WANDB_BASE_URL",
    "WANDB_CONFIG_DIR",
    "WANDB_DIR",
    "WANDB_DISABLED",
    "CUDA_VISIBLE_DEVICES",
    "WANDB_IDENTITY_TOKEN_FILE",
}


VARIABLE = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \|(.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "OPTIONS.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def variables(page: str) -> dict[str, bool]:
    """By name, whether simpletuner itself reads it."""
    rows = VARIABLE.findall(page.split("## Environment configuration variables")[1])
    return {
        name: "(Read by " not in rest for names, rest in rows for name in re.findall(r"\w+", names)
    }


def test_the_options_page_is_up_to_date(page: str) -> None:
    render_page = runpy.run_path(str(ROOT / "scripts" / "options_page.py"))["render_page"]
    assert page == render_page(page), "./scripts/docs writes it anew"


def test_the_options_page_begins_with_common_keys(page: str) -> None:
    first = page.partition("## The keys that most people set\n")[2].partition("\n## ")[0]

    keys = re.findall(r"\[`(\w+)`\]", first)

    assert 30 <= len(keys) <= 40
    assert [key for key in keys if not all_options()[key].common] == []


def test_common_keys_come_first_in_their_section(page: str) -> None:
    sections = page.partition("## Model\n")[2].split("\n## ")
    parted = [section.split("\nRarely set:\n") for section in sections if "Rarely set:" in section]

    assert len(parted) > 10
    for common, rare in parted:
        assert {all_options()[key].common for key in keys_of(common)} == {True}
        assert {all_options()[key].common for key in keys_of(rare)} == {False}


def keys_of(table: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)


def test_every_key_and_alias_is_listed_once(page: str) -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|(.*)$", page.split("## Defaults of the model families")[0], re.MULTILINE
    )
    assert sorted(name for name, _ in rows) == sorted(all_options())

    meanings = dict(rows)
    for option in all_options().values():
        assert option.help in meanings[option.name].replace("\\|", "|")
        for alias in option.aliases:
            assert f"`{alias}`" in meanings[option.name]


def test_rows_have_as_many_cells_as_their_table(page: str) -> None:
    width = 0
    for line in page.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1
        if line.startswith("|---"):
            width = cells
        elif line.startswith("| `"):
            assert cells == width, line


def test_the_options_page_has_the_anchor_of_the_guides(page: str) -> None:
    assert "## Environment configuration variables\n" in page
    assert "(#environment-configuration-variables)" in page


def test_every_listed_variable_is_read(variables: dict[str, bool]) -> None:
    read_here = [name for name, is_read_here in variables.items() if is_read_here]

    assert "TRAINER_EXTRA_ARGS" in read_here
    for name in read_here:
        assert f'"{name}"' in SOURCES


def test_every_read_variable_is_listed(variables: dict[str, bool]) -> None:
    assert set(READ.findall(SOURCES)) - OF_OTHERS <= variables.keys()
