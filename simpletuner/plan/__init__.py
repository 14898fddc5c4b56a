"""All checks that need no weights. Imports no torch.

Calling the package calls `simpletuner.api.plan`: `simpletuner.plan(config)`.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


class CallableRoom(ModuleType):
    """A callable module, since importing any of its files would replace a function with the same name."""

    def __call__(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `simpletuner.api.plan`."""
        return import_module("simpletuner.api").plan(config)


sys.modules[__name__].__class__ = CallableRoom
