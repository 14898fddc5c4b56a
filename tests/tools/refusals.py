"""The errors and warnings that `simpletuner` prints."""

from __future__ import annotations

import pytest

from simpletuner.config.schema import RunConfig
from simpletuner.errors import Problem
from simpletuner.models.spec import FamilySpec
from simpletuner.planning.checks import check_family, worth_reporting
from tests.tools.reports import found_by
from tests.tools.workspace import Workspace


def complaints(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], *arguments: str
) -> list[str]:
    """The errors of a command line that must be refused: exit code 2 and no traceback."""
    capsys.readouterr()
    code = workspace.run(*(arguments or ("plan",)))
    printed = capsys.readouterr().err
    assert code == 2, printed
    assert "Traceback" not in printed
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    return [error.removeprefix("error: ") for error in errors]


def complaint(workspace: Workspace, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of a command line that must be refused for one reason."""
    (error,) = complaints(workspace, capsys, *arguments)
    return error


def warnings(workspace: Workspace, capsys: pytest.CaptureFixture[str], *settings: str) -> str:
    """The warnings of a plan that must be accepted."""
    capsys.readouterr()
    code = workspace.run("plan", *settings)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out.partition("Warnings:\n")[2].partition("\n\n")[0]


def family_complaints(config: RunConfig, spec: FamilySpec) -> list[Problem]:
    """The problems of settings for a family that are worth reporting."""
    return worth_reporting(found_by(check_family, config, spec), config)
