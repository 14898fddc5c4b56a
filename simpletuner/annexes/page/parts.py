"""Parts of the page that are drawn one by one: a part that fails says so in its place."""

from __future__ import annotations

import logging
from collections.abc import Callable

from simpletuner.annexes.page.project import Refusal
from simpletuner.annexes.report import html
from simpletuner.errors import UserError, full_text
from simpletuner.redaction import redact

logger = logging.getLogger(__name__)


def draw_part(title: str, draw: Callable[[], str]) -> str:
    """The HTML of a part, or the reason why it cannot be shown, so that other parts still are.

    Raises:
        Refusal: the request names something that does not exist.
    """
    try:
        return draw()
    except Refusal:
        raise
    except Exception as error:
        # Any error: the reason stands in the place of the part, and the rest of the page is shown.
        logger.debug("A part of the page cannot be shown: %s", title, exc_info=True)
        return html.render("page/failure.html.jinja", title=title, reason=redact(reason_for(error)))


def reason_for(error: Exception) -> str:
    """The message of an error; of an unforeseen one with its type, for a report."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be read: {error.strerror}."
    return f"{type(error).__name__}: {full_text(error)}."
