"""Fixtures of whole runs.

What imports torch is imported in the fixtures: tests/conftest.py says why.
"""

from __future__ import annotations

import pytest

from tests.conftest import make_room
from tests.tools.workspace import Workspace


@pytest.fixture
def workspace(filled: Workspace) -> Workspace:
    """A folder with filled caches: encoding takes a third of a tiny run."""
    return filled


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, finished: Workspace) -> Workspace:
    """A run that was never stopped; runs with its settings that were stopped must equal it."""
    from tests.tools.runs import STATEFUL_RUN

    run: Workspace = finished.stopped(tmp_path_factory.mktemp("straight") / "run", 0)
    run.write_config(**STATEFUL_RUN)
    with pytest.MonkeyPatch.context() as patch:
        make_room(patch)
        assert run.train() == 0
    return run
