"""A look at the files of a configuration's datasets, whether or not they could be trained on as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simpletuner.config.arguments import Arguments
from simpletuner.config.load import RunConfig, raise_if_fatal
from simpletuner.data.build import build_datasets
from simpletuner.data.context import DataContext
from simpletuner.data.dataset import Dataset
from simpletuner.errors import ConfigError, Problem
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec, Flavour
from simpletuner.plan.build import find_flavour, fit_grid, read_settings, settle_task


@dataclass(frozen=True)
class Survey:
    """Datasets with the settings that they are read with.

    Attributes:
        notes: what is wrong with the datasets, or worth knowing, besides the settings.
    """

    config: RunConfig
    spec: FamilySpec
    flavour: Flavour
    source: ModelSource
    datasets: Sequence[Dataset]
    notes: Sequence[Problem]


def survey(arguments: Arguments, problems: list[Problem]) -> Survey:
    """Read settings and every file of the datasets; datasets need not have captions, or enough samples.

    Raises:
        ConfigError: with every problem of the settings at once.
    """
    config, spec, _, entries = read_settings(arguments, problems)
    if spec is None:
        raise ConfigError(problems)
    flavour, entries = settle_task(find_flavour(config, spec, problems), entries)
    source = ModelSource.from_config(spec, flavour, config)
    spec = spec.for_checkpoint(flavour, source)
    config, found = fit_grid(config, spec), list[Problem]()
    datasets = build_datasets(entries, DataContext.of(config, spec, flavour.task), found)
    ids = {dataset.id for dataset in datasets}
    # A problem of a dataset as a whole, and not of one of its keys, is about its files.
    problems.extend(problem for problem in found if problem.where not in ids)
    raise_if_fatal(problems)
    return Survey(config, spec, flavour, source, datasets, [replace(each, fatal=False) for each in found])
