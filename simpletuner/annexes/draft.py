"""Unfinished settings, checked by the same rules as a training run. Used by the wizard and the
page; never raises.
"""

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
    """What settings that may be unfinished come to.

    Attributes:
        problems: all their problems.
        without_effect: keys that have no effect with these settings, set or not, and why.
    """

    problems: Sequence[Problem]
    without_effect: Mapping[str, str]


class Draft:
    """An unfinished config.json.

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
        return str(
            self.config.run.data_backend_config or (self.file.parent / DATASET_FILE).as_posix()
        )

    def effective(self, key: str) -> Any:
        """The value that training would use: the written value, or the default of the family or
        key.
        """
        return self.values[key] if key in self.values else self.config.flat[key]

    def weigh(self, key: str, changes: Mapping[str, Any]) -> list[Problem]:
        """Problems of a key after these changes, and new problems of other keys; None removes a
        key.
        """
        known = set(self.judgement.problems)
        problems = self.judge(self._with(changes)).problems
        of_key = [problem for problem in problems if problem.where == key]
        # An invalid value was replaced by its default, so problems of other keys would be
        # misleading.
        is_invalid = any(problem.fatal for problem in of_key)
        return (
            of_key
            if is_invalid
            else [*of_key, *(problem for problem in problems if problem not in {*known, *of_key})]
        )

    def change(self, changes: Mapping[str, Any]) -> None:
        """Apply changes; None removes a key. Values are converted to their types: "1e-4" becomes a
        number.

        Unchanged keys stay as the user wrote them, and so do references to variables and packaged
        examples.
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
        problems = arguments.problems
        # Writing the draft must not overwrite its dataset file.
        written = plan.config.run.data_backend_config or ""
        if Path(written).expanduser() == self.file:
            problems.error("data_backend_config", "is the file of these settings; choose another.")
        elif written and (written.endswith("/") or Path(written).expanduser().is_dir()):
            default = (self.file.parent / DATASET_FILE).as_posix()
            message = (
                f"{written!r} is a folder, not a dataset file such as {default}, which lists such "
                "folders."
            )
            problems.error("data_backend_config", message)
        return Judgement(**vars(plan), problems=problems, without_effect=without_effect)

    def _with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: value for key, value in {**self.values, **changes}.items() if value is not None
        }


def key_of(problem: Problem) -> str:
    """The key of a problem; `where` may also name a part of the value, such as
    `tread_config.routes[0]`.
    """
    return re.split(r"[.\[]", problem.where)[0]
