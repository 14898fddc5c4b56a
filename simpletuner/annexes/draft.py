"""Unfinished settings, judged by the same rules as a training run. Shared by wizard and page; never raises."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.config.load import Layer
from simpletuner.config.schema import RunConfig, all_options
from simpletuner.config.sources import DATASET_FILE, Arguments, located_at, resolve_alias
from simpletuner.errors import Problem, result_of
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import FamilySpec
from simpletuner.plan.build import Plan, make_plan


@dataclass(frozen=True)
class Judgement(Plan):
    """The plan of some settings, finished or not, and all their problems."""

    problems: Sequence[Problem] = ()


class Draft:
    """An unfinished config.json.

    Attributes:
        file: where it will be written.
        values: what will be written, by key; texts with `{env:NAME}` stay as they are.
        loaded: keys that the file had before.
    """

    def __init__(self, file: Path, values: Mapping[str, Any] | None = None) -> None:
        self.file = file
        self.loaded = frozenset(values or {})
        # Every config needs these; an answer replaces them.
        required = {"model_family": next(iter(FAMILIES)), "model_type": all_options()["model_type"].choices[0]}
        self.values: dict[str, Any] = {**required, **(values or {})}
        self._latest: tuple[str, Judgement] | None = None
        self.judgement = self.judge(self.values)

    @property
    def config(self) -> RunConfig:
        return self.judgement.config

    @property
    def spec(self) -> FamilySpec:
        return self.judgement.spec

    @property
    def dataset_file(self) -> str:
        """Path of the dataset file, whether or not it exists."""
        return str(self.config.run.data_backend_config or (self.file.parent / DATASET_FILE).as_posix())

    def effective(self, key: str) -> Any:
        """The value that training would use now: as written, else the family's or the key's default."""
        return self.values[key] if key in self.values else self.config.flat[key]

    def weigh(self, key: str, changes: Mapping[str, Any]) -> list[Problem]:
        """Problems that a key has with these changes, else new ones of other keys; None removes a key."""
        known, problems = set(self.judgement.problems), self.judge(self._with(changes)).problems
        mine = [problem for problem in problems if problem.where == key]
        # In place of an invalid value its default was judged, whose effects on other keys mean nothing.
        is_invalid = any(problem.fatal for problem in mine)
        return mine if is_invalid else [*mine, *(each for each in problems if each not in {*known, *mine})]

    def change(self, changes: Mapping[str, Any]) -> None:
        """Apply the changes; None removes a key. Values are converted to their type, so "1e-4" becomes a number."""
        values = self._with(changes)
        self.judgement = self.judge(values)
        flat = self.config.flat
        self.values = {
            # Untouched keys stay as the user wrote them; references stay references in the file.
            key: flat[key] if key in changes and "{env:" not in str(value) else value
            for key, value in values.items()
        }

    def after(self, changes: Mapping[str, Any]) -> Draft:
        """This draft after the changes; None removes a key."""
        # Shallow: values and judgement are replaced, never changed in place.
        draft = copy.copy(self)
        draft.values = self._with(changes)
        draft.judgement = self.judge(draft.values)
        return draft

    def judge(self, values: Mapping[str, Any]) -> Judgement:
        """Every problem that shows in the settings alone. An answer is judged before it is taken, and when it is."""
        written = repr(values)  # nested lists and objects have no hash
        if self._latest is None or self._latest[0] != written:
            self._latest = written, self._judge(values)
        return self._latest[1]

    def _judge(self, values: Mapping[str, Any]) -> Judgement:
        # It may name files of a packaged example, as config.json may.
        layer = Layer("", [(key, resolve_alias(value)) for key, value in values.items()])
        # The problems of a config.env are about another file; the plan reports them.
        arguments = Arguments(base=result_of(located_at(self.file, layer)))
        plan, problems = make_plan(arguments, "draft"), arguments.problems
        # Writing the draft would replace its dataset file.
        datasets = Path(plan.config.run.data_backend_config or DATASET_FILE).expanduser()
        if datasets == self.file:
            problems.append(Problem("data_backend_config", "is the file that these settings go to; choose another."))
        elif datasets.is_dir():
            message = f"{str(datasets)!r} is a folder; name a file in it, such as {datasets / DATASET_FILE}."
            problems.append(Problem("data_backend_config", message))
        return Judgement(**vars(plan), problems=problems)

    def _with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in {**self.values, **changes}.items() if value is not None}


def key_of(problem: Problem) -> str:
    """The key of a problem, whose place may be a part of its value, such as `tread_config.routes[0]`."""
    return re.split(r"[.\[]", problem.where)[0]
