"""Unfinished settings of the wizard and the page, checked by the rules of a training run."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.config.load import Layer
from simpletuner.config.schema import RunConfig, all_options
from simpletuner.config.sources import (
    DATASET_FILE,
    EXAMPLES_ALIAS,
    Arguments,
    located_at,
    resolve_alias,
)
from simpletuner.errors import Problem, Problems
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import FamilySpec
from simpletuner.planning.build import plan_draft
from simpletuner.planning.plans import PreviewPlan


@dataclass(frozen=True, kw_only=True)
class Judgement(PreviewPlan):
    """The plan and the problems of settings that may be unfinished.

    Attributes:
        problems: all their problems.
        without_effect: keys that have no effect with these settings, set or not, and why.
    """

    problems: Sequence[Problem]
    without_effect: Mapping[str, str]


class Draft:
    """An unfinished config.json; its methods do not raise for invalid settings.

    Attributes:
        file: the path to write to.
        values: the values to write, by key; references such as `{env:NAME}` are not expanded.
        loaded: keys that the file had before.
    """

    def __init__(self, file: Path, values: Mapping[str, Any] | None = None) -> None:
        self.file = file
        self.loaded = frozenset(values or {})
        # Every config needs these keys; answers replace the defaults.
        required = {
            "model_family": next(iter(FAMILIES)),
            "model_type": all_options()["model_type"].choices[0],
        }
        self.values: dict[str, Any] = {**required, **(values or {})}
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
        return str(self.config.run.data_backend_config or self._default_dataset_file)

    @property
    def _default_dataset_file(self) -> str:
        return (self.file.parent / DATASET_FILE).as_posix()

    def effective(self, key: str) -> Any:
        """The value that training would use: as written, or the default of the family or key."""
        if key in self.values:
            return self.values[key]
        return self.config.flat[key]

    def weigh(self, key: str, changes: Mapping[str, Any]) -> list[Problem]:
        """Problems of a key after these changes, and new problems of other keys.

        Args:
            changes: values by key; None removes a key.
        """
        problems = self.judge(self._with(changes)).problems
        of_key = [problem for problem in problems if problem.where == key]
        if any(problem.fatal for problem in of_key):
            # The value was replaced by its default, so problems of other keys would mislead.
            return of_key
        seen = {*self.judgement.problems, *of_key}
        return [*of_key, *(problem for problem in problems if problem not in seen)]

    def change(self, changes: Mapping[str, Any]) -> None:
        """Apply changes; None removes a key.

        Changed values are converted to their types: "1e-4" becomes a number. Unchanged keys stay
        as the user wrote them, and so do references to variables and packaged examples.
        """
        values = self._with(changes)
        self.judgement = self.judge(values)
        flat = self.config.flat
        for key in values.keys() & changes.keys():
            written = str(values[key])
            if "{env:" not in written and not written.startswith(EXAMPLES_ALIAS):
                values[key] = flat[key]
        self.values = values

    def after(self, changes: Mapping[str, Any]) -> Draft:
        """A copy of this draft with changes applied; None removes a key."""
        # A shallow copy is enough: values and judgement are never changed in place.
        draft = copy.copy(self)
        draft.values = self._with(changes)
        draft.judgement = self.judge(draft.values)
        return draft

    def judge(self, values: Mapping[str, Any]) -> Judgement:
        """Plan settings and collect their problems, in about two milliseconds."""
        # As in config.json, values may refer to files of packaged examples.
        layer = Layer("", [(key, resolve_alias(value)) for key, value in values.items()])
        # Problems of a config.env belong to another file; the plan reports them.
        arguments = Arguments(base=located_at(self.file, Problems(), layer))
        plan, without_effect = plan_draft(arguments)
        self._check_dataset_file(plan.config, arguments.problems)
        return Judgement(**vars(plan), problems=arguments.problems, without_effect=without_effect)

    def _check_dataset_file(self, config: RunConfig, report: Problems) -> None:
        """Report a dataset file that the draft would overwrite, or that is a folder."""
        written = config.run.data_backend_config
        if not written:
            return
        path = Path(written).expanduser()
        if path == self.file:
            report.error("data_backend_config", "is the file of these settings; choose another.")
        elif written.endswith("/") or path.is_dir():
            report.error(
                "data_backend_config",
                f"{written!r} is a folder, not a dataset file such as "
                f"{self._default_dataset_file}, which lists such folders.",
            )

    def _with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The values with changes; None removes a key."""
        values = {**self.values, **changes}
        return {key: value for key, value in values.items() if value is not None}


def key_of(problem: Problem) -> str:
    """The key of a problem, whose `where` may name a part of the value, as in `routes[0].start`."""
    key, *_ = re.split(r"[.\[]", problem.where)
    return key
