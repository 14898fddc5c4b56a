"""HTML pages from the Jinja templates in this package, or as `room/name` in another; all texts are escaped.

Free of torch.
"""

from __future__ import annotations

import functools
import re
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

FOLDER = Path(__file__).parent
# A page may show what it contains and video files next to it, and load nothing else.
POLICY = (
    "default-src 'none'; img-src data:; media-src data: 'self' file:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def render(template: str, **values: object) -> str:
    """A page from a template that extends `page.html.jinja`.

    Args:
        values: what the template shows, and `scripts` and `refresh` of the page.
    """
    return _environment().get_template(template).render(values, policy=POLICY, now=datetime.now().astimezone())


def breakable(text: str) -> Markup:
    """A path or name that may wrap after its separators only."""
    return Markup("<wbr>").join(re.findall(r"[^/\\_.:-]*[/\\_.:-]+|[^/\\_.:-]+", text))


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader([FOLDER, FOLDER.parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    environment.filters["grouped"] = "{:,}".format
    environment.globals["resource"] = lambda name: Markup((FOLDER / name).read_text(encoding="utf-8"))
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment
