"""What `simpletuner` says when it refuses."""

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
    """The errors of a command line that has to end with exit code 2, a list of problems and no
    traceback.
    """
    capsys.readouterr()
    code = workspace.run(*(arguments or ("plan",)))
    told = capsys.readouterr().err
    assert code == 2, told
    assert "Traceback" not in told
    return [
        line.removeprefix("error: ") for line in told.splitlines() if line.startswith("error: ")
    ]


def complaint(workspace: Workspace, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The same where one problem is expected, and only one."""
    (only,) = complaints(workspace, capsys, *arguments)
    return only


def warnings(workspace: Workspace, capsys: pytest.CaptureFixture[str], *settings: str) -> str:
    """What a plan that is fine warns of."""
    capsys.readouterr()
    code = workspace.run("plan", *settings)
    told = capsys.readouterr()
    assert code == 0, told.err
    return told.out.partition("Warnings:")[2]


def family_complaints(config: RunConfig, spec: FamilySpec) -> list[Problem]:
    """What is wrong with settings in this family, without what is not worth a line."""
    return worth_reporting(found_by(check_family, config, spec), config)
