"""An empty project, and its page behind the access control."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.guard import Access, Guard
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.serve import create_app


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path.resolve()


@pytest.fixture
def page(folder: Path) -> TestClient:
    app = Guard(create_app(Project(folder)), Access())
    return TestClient(app, base_url="http://localhost:8001", raise_server_exceptions=False)
