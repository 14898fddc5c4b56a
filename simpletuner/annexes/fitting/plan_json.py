"""The plan as one JSON document, for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from simpletuner.annexes.fitting.plan_text import (
    budget_lines,
    changed_settings,
    learned_share,
    parallelism,
)
from simpletuner.budget.budget import Budget, remaining_seconds, remaining_steps
from simpletuner.budget.device import Device
from simpletuner.budget.disk import find_writings
from simpletuner.data.dataset import Dataset
from simpletuner.data.sample import HELD_OUT
from simpletuner.errors import Problem
from simpletuner.planning.plans import Plan
from simpletuner.reporting.layout import Layout

# Files of a dataset that are listed with the reason why they are left out.
MOST_LEFT_OUT = 200


def plan_json(budget: Budget | None, problems: Sequence[Problem]) -> str:
    """The document; if a fatal problem prevents a plan, it holds only the problems.

    Bytes and seconds are plain numbers; unknown values are `null`.
    """
    document = {
        # Checks of the plan and of the budget may report the same problem.
        "problems": [problem.to_json() for problem in dict.fromkeys(problems)],
        "ok": not any(problem.fatal for problem in problems),
    }
    if budget is not None:
        document |= _document(budget)
    return json.dumps(document, indent=2, ensure_ascii=False)


def _document(budget: Budget) -> dict[str, Any]:
    plan = budget.plan
    launch = budget.config.launch
    settings = {
        key: {"value": value, "origin": origin} for key, value, origin in changed_settings(plan)
    }
    _, *lines = budget_lines(budget, Layout(), verbose=True)  # without the line of the device
    return {
        "model": _model_in_json(budget),
        "output_dir": str(plan.output_dir),
        "seed": plan.seed,
        "settings": settings,
        "datasets": [_dataset_in_json(dataset) for dataset in plan.datasets],
        "length": _length_in_json(plan),
        "device": _device_in_json(budget.device),
        "assumed": [line.strip() for line in lines if "assumed" in line],
        "memory": [
            {
                "phase": phase.name,
                "device": phase.device,
                "host": phase.on_host(budget.device),
            }
            for phase in budget.phases
        ],
        "buckets": _buckets_in_json(budget),
        "seconds": _seconds_in_json(budget),
        "processes": {
            "count": launch.num_processes,
            "machines": launch.num_machines,
            "way": parallelism(launch, budget.config.offload),
            "sent": asdict(budget.sent),
        },
        "disk": [
            {"what": writing.what, "folder": str(writing.folder), "bytes": writing.total}
            for writing in find_writings(budget)
        ],
        "offload_auto": list(budget.decisions),
        "proposals": {decision: dict(settings) for decision, settings in budget.proposals.items()},
    }


def _model_in_json(budget: Budget) -> dict[str, Any]:
    plan = budget.plan
    return {
        "family": plan.spec.name,
        "flavour": plan.flavour.name,
        "type": plan.config.model.model_type,
        "location": plan.source["transformer"].location,
        "download": budget.parts.download_bytes(plan.source),
    }


def _length_in_json(plan: Plan) -> dict[str, Any]:
    length = plan.length
    return {
        "steps": length.total_steps,
        "steps_done": length.total_steps - remaining_steps(plan),
        "epochs": length.epochs,
        "batches_per_epoch": length.batches_per_epoch,
        "finished": plan.is_finished,
    }


def _device_in_json(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "memory": device.memory,
        "usable": device.usable,
        "note": device.note,
    }


def _buckets_in_json(budget: Budget) -> list[dict[str, Any]]:
    density = budget.parts.transformer.density
    buckets = []
    for bucket, step in zip(budget.workload.buckets, budget.steps, strict=True):
        tokens = step.load.tokens
        entry = {
            "size": bucket.label,
            "share": bucket.share,
            "tokens": step.load.samples * tokens,
            "flops": step.cost.executed.total,
            "attention_density": density(tokens) if density else None,  # None: dense
            "memory": step.memory.total,
            "seconds": step.cost.seconds,
        }
        buckets.append(entry)
    return buckets


def _seconds_in_json(budget: Budget) -> dict[str, float]:
    """Seconds that remain, without filling the caches."""
    training, previews = remaining_seconds(budget)
    return {
        "step": budget.step_seconds,
        "training": training,
        "previews": previews,
        "total": training + previews,
    }


def _dataset_in_json(dataset: Dataset) -> dict[str, Any]:
    left_out = [{"file": entry.name, "reason": entry.use} for entry in dataset.unused_media()]
    held_out = dataset.counts()[HELD_OUT]
    return {
        "id": dataset.id,
        # Pictures or clips; others in the folder do not count.
        "files": len(dataset.samples) + len(left_out) + held_out,
        "used": len(dataset.samples),
        "held_out": held_out,
        "left_out": left_out[:MOST_LEFT_OUT],
        "trained": dataset.config.is_trained,
        "repeats": dataset.repeats,
        "buckets": dataset.sizes(),
        "learned": learned_share(dataset),  # null without masks
    }
