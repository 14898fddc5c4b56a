from __future__ import annotations

import pytest

from tests.tools.workspace import Workspace


@pytest.fixture
def workspace(filled: Workspace) -> Workspace:
    """With caches: encoding takes a third of a tiny run."""
    return filled
