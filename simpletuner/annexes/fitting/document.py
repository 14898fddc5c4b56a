"""The plan as one JSON document, for programs: `simpletuner plan --json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from simpletuner.annexes.fitting.fit import find_ways, way_of
from simpletuner.budget.budget import Budget, remaining_seconds, remaining_steps
from simpletuner.budget.disk import find_writings
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
    listed = [{"key": each.where, "message": each.message, "fatal": each.fatal} for each in dict.fromkeys(problems)]
    judged = {"problems": listed, "ok": not any(problem.fatal for problem in problems)}
    described = _described(*weighed) if weighed else {}
    return json.dumps(judged | described, indent=2, ensure_ascii=False)


def _described(plan: Plan, budget: Budget) -> dict[str, Any]:
    values, origins = redact_settings(plan.config.flat()), plan.config.origins
    changed = [name for name in all_options() if origins[name] != "default"]
    device, launch, length = budget.device, budget.config.launch, plan.length
    training, previews = remaining_seconds(plan, budget)
    seconds = {"step": budget.step_seconds, "training": training, "previews": previews, "total": training + previews}
    return {
        "model": {
            "family": plan.spec.name,
            "flavour": plan.flavour.name,
            "type": plan.config.model.model_type,
            "location": plan.source["transformer"].location,
        },
        "output_dir": str(plan.output_dir),
        "seed": plan.seed,
        "settings": {name: {"value": values[name], "origin": origins[name]} for name in changed},
        "datasets": [_dataset(dataset) for dataset in plan.datasets],
        "length": {
            "steps": length.total_steps,
            "steps_done": length.total_steps - remaining_steps(plan),
            "epochs": length.epochs,
            "batches_per_epoch": length.batches_per_epoch,
            "finished": plan.is_finished,
        },
        "device": {"name": device.name, "memory": device.memory, "usable": device.usable},
        "memory": [{"phase": each.name, "device": each.device, "host": each.host} for each in budget.phases],
        "buckets": [
            {
                "size": bucket.label,
                "share": bucket.share,
                "tokens": step.load.samples * step.load.tokens,
                "flops": step.cost.executed.total,
                "memory": step.memory.total,
                "seconds": step.cost.seconds,
            }
            for bucket, step in zip(budget.workload.buckets, budget.steps, strict=True)
        ],
        "seconds": seconds,  # without filling the caches
        "processes": {
            "count": launch.num_processes,
            "machines": launch.num_machines,
            "way": way_of(budget.config),
            "sent": asdict(budget.sent),
            "ways": [_way(name, way) for name, way in find_ways(budget).items()],
        },
        "disk": [
            {"what": each.what, "folder": str(each.folder), "bytes": each.total} for each in find_writings(plan, budget)
        ],
        "offload_auto": list(budget.decisions),
    }


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


def _way(name: str, way: Budget | str) -> dict[str, Any]:
    if isinstance(way, str):
        return {"way": name, "fits": False, "excluded": way}
    device, host = way.peaks
    return {
        "way": name,
        "fits": way.fits,
        "device": device,
        "host": host,
        "sent": way.sent.total,
        "seconds": way.step_seconds,
    }
