"""The plan as one JSON document, for programs: `simpletuner plan --json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from simpletuner.annexes.fitting.ways import Way, find_ways, way_of
from simpletuner.budget.budget import BucketCost, Budget
from simpletuner.budget.disk import find_writings
from simpletuner.budget.rounds import remaining_seconds, remaining_steps
from simpletuner.config.schema import all_options
from simpletuner.data.dataset import Dataset
from simpletuner.errors import Problem
from simpletuner.plan.build import Plan
from simpletuner.redaction import redact_settings

MOST_LEFT_OUT = 200  # files of a dataset that are listed with their reason; the plan in the terminal lists all


def plan_json(weighed: tuple[Plan, Budget] | None, problems: Sequence[Problem]) -> str:
    """The document; if a fatal problem prevents a plan, it holds only the problems.

    Bytes and seconds are plain numbers; unknown values are `null`.
    """
    told: dict[str, Any] = {"problems": [_problem(each) for each in dict.fromkeys(problems)]}
    told["ok"] = not any(problem.fatal for problem in problems)
    if weighed is not None:
        told |= _described(*weighed)
    return json.dumps(told, indent=2, ensure_ascii=False)


def _problem(problem: Problem) -> dict[str, Any]:
    return {"key": problem.where, "message": problem.message, "fatal": problem.fatal}


def _described(plan: Plan, budget: Budget) -> dict[str, Any]:
    return {
        "model": {
            "family": plan.spec.name,
            "flavour": plan.flavour.name,
            "type": plan.config.model.model_type,
            "location": plan.source["transformer"].location,
        },
        "output_dir": str(plan.output_dir),
        "seed": plan.seed,
        "settings": _settings(plan),
        "datasets": [_dataset(dataset) for dataset in plan.datasets],
        "length": {
            "steps": plan.length.total_steps,
            "steps_done": plan.length.total_steps - remaining_steps(plan),
            "epochs": plan.length.epochs,
            "batches_per_epoch": plan.length.batches_per_epoch,
            "finished": plan.is_finished,
        },
        "device": {"name": budget.device.name, "memory": budget.device.memory, "usable": budget.device.usable},
        "memory": [{"phase": each.name, "device": each.device, "host": each.host} for each in budget.phases],
        "buckets": [_bucket(budget, each) for each in budget.buckets],
        "seconds": _seconds(plan, budget),
        "processes": _processes(budget),
        "disk": [
            {"what": each.what, "folder": str(each.folder), "bytes": each.total} for each in find_writings(plan, budget)
        ],
        "offload_auto": list(budget.decisions),
    }


def _settings(plan: Plan) -> dict[str, Mapping[str, Any]]:
    """Settings that differ from their defaults, with their origin; secrets are redacted."""
    values, origins = redact_settings(plan.config.flat()), plan.config.origins
    changed = [name for name in all_options() if origins[name] != "default"]
    return {name: {"value": values[name], "origin": origins[name]} for name in changed}


def _dataset(dataset: Dataset) -> dict[str, Any]:
    ledger = dataset.ledger()
    used = [entry for entry in ledger if not entry.use]
    left_out = [{"file": entry.name, "reason": entry.use} for entry in ledger if entry.use]
    return {
        "id": dataset.id,
        "files": len(ledger),
        "used": len(used),
        "left_out": left_out[:MOST_LEFT_OUT],
        "trained": dataset.config.is_trained,
        "repeats": dataset.repeats,
        "buckets": Counter(entry.trained_size for entry in used if entry.geometry is not None),
    }


def _bucket(budget: Budget, each: BucketCost) -> dict[str, Any]:
    load = budget.parts.load(each.bucket)
    return {
        "size": each.bucket.label,
        "share": each.bucket.share,
        "tokens": load.samples * load.tokens,
        "flops": each.step.executed.total,
        "memory": each.memory.total,
        "seconds": each.step.seconds,
    }


def _processes(budget: Budget) -> dict[str, Any]:
    """How many train together and what each sends in a step; for several, how the ways to do so compare."""
    launch = budget.config.launch
    return {
        "count": launch.num_processes,
        "machines": launch.num_machines,
        "way": way_of(budget.config),
        "sent": asdict(budget.sent),
        "ways": [_way(way) for way in find_ways(budget)],
    }


def _way(way: Way) -> dict[str, Any]:
    if way.budget is None:
        return {"way": way.name, "fits": False, "excluded": way.reason}
    device, host = way.peaks
    return {
        "way": way.name,
        "fits": way.fits,
        "device": device,
        "host": host,
        "sent": way.budget.sent.total,
        "seconds": way.budget.step_seconds,
    }


def _seconds(plan: Plan, budget: Budget) -> dict[str, float]:
    """Estimated durations, without filling the caches."""
    training, previews = remaining_seconds(plan, budget)
    return {"step": budget.step_seconds, "training": training, "previews": previews, "total": training + previews}
