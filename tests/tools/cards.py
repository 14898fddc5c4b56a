"""A GPU that this machine does not have, for plans."""

from __future__ import annotations

import pytest

from simpletuner.budget import device


def pretend_to_have(monkeypatch: pytest.MonkeyPatch, gibibytes: float) -> None:
    """Let every plan find a GPU with this much memory."""
    gpu = device.find_device(gibibytes)
    monkeypatch.setattr(device, "find_device", lambda *_, **__: gpu)
