"""HTML written in Python: elements whose texts and attributes are escaped unless they are `Html`. Free of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import TypeAlias

VOID = frozenset({"br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"})

Attribute = str | int | float | bool | None
Child: TypeAlias = "str | int | Iterable[Child] | None"


class Html(str):
    """Text that is HTML already and is not escaped."""

    __slots__ = ()


def element(tag: str, *children: Child, **attributes: Attribute) -> Html:
    """One element, with its children escaped unless they are `Html`.

    Args:
        tag: `div`, or with classes `div.card.wide`.
        children: text, elements and nested sequences of them; None, True and False are left out.
        attributes: `data_step=3` becomes `data-step="3"`, and `for_` becomes `for`. True means an attribute without
            a value; None and False leave it out.
    """
    name, *classes = tag.split(".")
    if classes:
        attributes = {"class": " ".join(classes), **attributes}
    start = f"<{name}{''.join(_attribute(key, value) for key, value in attributes.items())}>"
    return Html(start if name in VOID else f"{start}{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Concatenated children, without an element around them."""
    return Html("".join(map(_render, children)))


def breakable(text: str) -> Html:
    """A path or name that may wrap after its separators only."""
    return Html(re.sub(r"([/\\_.:-]+)", r"\1<wbr>", escape(text, quote=False)))


def data_block(name: str, value: object) -> Html:
    """JSON for a script of the page to read."""
    # Escaped, so that a text such as `</script>` cannot end the element.
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return element("script", Html(text), type="application/json", id=name)


def document(title: str, body: Child, *, policy: str, scripts: Iterable[str] = (), refresh: int | None = None) -> str:
    """A whole page with the styles and scripts inside it.

    Args:
        policy: the Content-Security-Policy, as a meta element because no server sends the page.
        scripts: names of files in this package, in the order in which they run.
        refresh: seconds after which a browser without JavaScript reloads the page.
    """
    head = (
        element("meta", charset="utf-8"),
        element("meta", **{"http-equiv": "Content-Security-Policy"}, content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        refresh and element("noscript", element("meta", **{"http-equiv": "refresh"}, content=refresh)),
        element("title", title),
        element("style", Html(_resource("page.css"))),
    )
    code = [element("script", Html(_resource(name))) for name in scripts]
    return f"<!DOCTYPE html>\n{element('html', element('head', *head), element('body', body, code), lang='en')}\n"


def _resource(name: str) -> str:
    return files("simpletuner.reporting").joinpath(name).read_text(encoding="utf-8")


def _render(child: Child) -> str:
    if child is None or isinstance(child, bool):
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str | int):
        return escape(str(child))
    return "".join(map(_render, child))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
