"""Everything that can be known and checked before a weight is loaded. Free of torch.

Called, the room is the function of the same name in `simpletuner.api`: `simpletuner.plan(config)`.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


class CallableRoom(ModuleType):
    """A module that is also a function; an import of any file in it would replace a function of its name."""

    def __call__(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `simpletuner.api.plan`."""
        return import_module("simpletuner.api").plan(config)


sys.modules[__name__].__class__ = CallableRoom
