"""The view of a dataset's files: searched, sorted, and a page at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from simpletuner.annexes.captions.address import ADDRESS_VARIABLE
from simpletuner.annexes.captions.library import Library
from simpletuner.annexes.page.project import checked_value, project_of
from simpletuner.annexes.page.settings.files import shown
from simpletuner.annexes.page.settings.library import open_dataset, written_file
from simpletuner.annexes.page.settings.library_order import OF_CAPTIONS, ORDERS, in_order
from simpletuner.annexes.report.html import render
from simpletuner.rounding import ceil_div

SIZES = (60, 120, 240)  # files on a page
LARGEST_NUMBER = 10**9


@dataclass(frozen=True)
class LibraryView:
    """What a request asks to see.

    Attributes:
        only: `excluded` or `uncaptioned` restricts the files.
        order: a key of `ORDERS`.
        size: number of files on a page.
        page: from 1.
    """

    words: str
    only: str
    order: str
    size: int
    page: int

    @classmethod
    def asked(cls, query: Mapping[str, str]) -> LibraryView:
        """The view in the query of an address; what makes no sense there is replaced."""
        order = query.get("order", "")
        size = asked_number(query, "size", SIZES[0])
        return cls(
            words=query.get("words", ""),
            only=query.get("only", ""),
            order=order if order in ORDERS else "",
            size=size if size in SIZES else SIZES[0],
            page=asked_number(query, "page", 1),
        )

    def names(self, library: Library) -> tuple[list[str], int, int]:
        """The files in order, how many were not searched, and how many not compared, in time."""
        found, not_searched = library.find(self.words, self.only)
        names, not_compared = in_order(library, found, self.order)
        return names, not_searched, not_compared

    def address(self, **changes: object) -> dict[str, object]:
        """The query of this view with changes, without what is usual."""
        query = {**vars(self), **changes}
        usual = {"words": "", "only": "", "order": "", "size": SIZES[0], "page": 1}
        return {key: value for key, value in query.items() if value != usual[key]}


def asked_number(query: Mapping[str, str], key: str, default: int) -> int:
    """A whole number in a query, at least 0."""
    text = query.get(key, "")
    if not (text.isascii() and text.isdecimal()):
        return default
    return min(int(text[:10]), LARGEST_NUMBER)


def show_files(request: Request) -> Response:
    """A page of a dataset's files, as HTML.

    The query is `config`, `dataset`, `words`, `only`, `order`, `size` and `page`.
    """
    library = open_dataset(request, request.query_params)
    view = LibraryView.asked(request.query_params)
    names, not_searched, not_compared = view.names(library)
    pages = max(1, ceil_div(len(names), view.size))
    page = min(max(1, view.page), pages)
    orders = dict(ORDERS)
    if library.locked:
        orders = {key: label for key, label in ORDERS.items() if key not in OF_CAPTIONS}
    html = render(
        "page/settings/library.html.jinja",
        part="all",
        library=library,
        folder=shown(project_of(request), Path(library.root)),
        files=library.show(names[view.size * (page - 1) : view.size * page]),
        view=view,
        orders=orders,
        sizes=SIZES,
        found=len(names),
        missed=not_searched,
        not_compared=not_compared,
        page=page,
        pages=pages,
        say=str,
        address=os.environ.get(ADDRESS_VARIABLE, ""),
    )
    return HTMLResponse(html)


def list_names(request: Request) -> Response:
    """The names of all files of a view, in its order; the query is that of `show_files`."""
    library = open_dataset(request, request.query_params)
    names, _, _ = LibraryView.asked(request.query_params).names(library)
    return JSONResponse({"names": names})


def list_captions(request: Request, body: dict[str, Any]) -> Response:
    """Files with their captions for the large view: `{"config", "dataset", "files": [NAME]}`."""
    library = open_dataset(request, body)
    names = checked_value(body, "files", list)
    all_names = {*library.listing.files}
    known = [str(name) for name in names[: SIZES[0]] if name in all_names]
    return JSONResponse({"files": [written_file(library, file) for file in library.show(known)]})
