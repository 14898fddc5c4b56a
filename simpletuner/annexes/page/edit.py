"""The page itself, and routes of the form: what can be set, what is wrong with it, and what a run of it would need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from simpletuner.annexes.page.form import SECTIONS, TABS, dataset_fields, fields, tabs
from simpletuner.annexes.page.plans import Unsaved, plan_unsaved, show_datasets
from simpletuner.annexes.page.project import Project, Refusal, problems_json, project_of, read_object
from simpletuner.models.registry import FAMILIES, canonical_family_name
from simpletuner.redaction import redact_settings
from simpletuner.reporting.html import render


def routes() -> list[Route]:
    """The page itself, and routes under /api/fields, /api/training/validate, /api/plan and /dataset."""
    return [
        Route("/", page),
        Route("/tabs/{tab}", tab),
        Route("/api/fields/tabs", field_tabs),
        Route("/api/fields/metadata", field_metadata),
        Route("/api/training/validate", validate, methods=["POST"]),
        Route("/api/configuration/check", validate, methods=["POST"]),
        Route("/api/plan", plan_unsaved, methods=["POST"]),
        Route("/dataset", show_datasets),
    ]


def page(request: Request) -> Response:
    """The page with every tab; inside a run it shows the run only."""
    return HTMLResponse(rendered("server/page.html.jinja", in_run=project_of(request).run is not None))


def tab(request: Request) -> Response:
    """The form of one tab alone."""
    name = request.path_params["tab"]
    if name not in [each.lower() for each in TABS]:
        raise Refusal(404, f"{name!r} is not one of: {', '.join(TABS).lower()}.")
    return HTMLResponse(rendered("server/tab.html.jinja", tab=name))


def rendered(template: str, **values: object) -> str:
    """A template that shows fields."""
    return render(template, tabs=tabs(), sections=SECTIONS, fields=fields(), dataset_fields=dataset_fields(), **values)


def field_tabs(request: Request) -> Response:
    """The tabs and their sections."""
    return JSONResponse(tabs())


def field_metadata(request: Request) -> Response:
    """Every field, with the defaults and choices of `?family=`."""
    family = request.query_params.get("family")
    name = canonical_family_name(family) if family else None
    if name is not None and name not in FAMILIES:
        raise Refusal(404, f"{family!r} is not one of: {', '.join(FAMILIES)}.")
    return JSONResponse([asdict(field) for field in fields(name)])


async def validate(request: Request) -> Response:
    """What training would make of settings that need not be saved."""
    body = await read_object(request)
    return JSONResponse(await run_in_threadpool(judged, project_of(request), body))


def judged(project: Project, body: Mapping[str, Any]) -> dict[str, Any]:
    """The problems, the effective values, and the keys without effect that are not errors: those must be changed."""
    unsaved = Unsaved.of(project, body)
    judgement, outside, own = unsaved.judge(project)
    wrong = {problem.where for problem in judgement.problems if problem.fatal}
    own = [] if unsaved.entries is None else own
    return {
        "problems": problems_json([*outside, *judgement.problems, *own]),
        "effective": redact_settings(judgement.config.flat()),
        "family": judgement.spec.name,
        "flavour": judgement.flavour.name,
        "flavours": list(judgement.spec.flavour_names),
        "greyed": {key: reason for key, reason in judgement.without_effect.items() if key not in wrong},
    }
