"""Prior preservation: with other captions, or with other pictures (regularisation data)."""

from __future__ import annotations

from collections.abc import Sequence

from simpletuner.config.schema import RunConfig
from simpletuner.config.techniques.preservation import PreservationConfig
from simpletuner.data.dataset import Dataset
from simpletuner.errors import Problems
from simpletuner.models.cost import BatchShape, TransformerCost
from simpletuner.planning.techniques.spec import TechniqueCost, TechniqueSpec, TrainedData


class RegularisationSpec(TechniqueSpec):
    """Turned on by datasets with `is_regularisation_data`.

    Attributes:
        dataset_ids: these datasets.
        share: their share of the micro-batches.
    """

    name = "regularisation"
    trains = "simpletuner.techniques.preservation:Regularisation"

    def __init__(self, dataset_ids: frozenset[str], share: float = 0.0) -> None:
        self.dataset_ids = dataset_ids
        self.share = share

    @classmethod
    def of(cls, config: RunConfig, data: TrainedData) -> RegularisationSpec | None:
        return cls(data.ids, 1 - data.plain) if data.regularised else None

    def cost(self, transformer: TransformerCost, batch: BatchShape) -> TechniqueCost:
        return TechniqueCost(forwards=self.share)


class PreservationSpec(TechniqueSpec):
    """Preservation of the predictions for other captions.

    Attributes:
        weight: of the term in the loss.
        probability: share of the micro-batches with the term, of those that are not regularisation
            data.
        plain: share of these micro-batches.
    """

    name = "preservation"
    trains = "simpletuner.techniques.preservation:Preservation"
    keys = PreservationConfig

    def __init__(self, weight: float, probability: float, plain: float = 1.0) -> None:
        self.weight = weight
        self.probability = probability
        self.plain = plain

    @classmethod
    def of(cls, config: RunConfig, data: TrainedData) -> PreservationSpec | None:
        keys = config.techniques.of(PreservationConfig)
        if not keys.is_on:
            return None
        return cls(keys.preservation_weight, keys.preservation_probability, data.plain)

    @classmethod
    def check(cls, config: RunConfig, report: Problems) -> None:
        """Report a trigger without a prompt to replace it."""
        keys = config.techniques.of(PreservationConfig)
        if keys.is_on and keys.preservation_trigger and not keys.preservation_prompt:
            report.error(
                "preservation_trigger",
                f"{keys.preservation_trigger!r} needs a preservation_prompt.",
            )

    @classmethod
    def check_datasets(
        cls, config: RunConfig, datasets: Sequence[Dataset], report: Problems
    ) -> None:
        """Warn if some captions lack the trigger; it is an error if all of them do."""
        keys = config.techniques.of(PreservationConfig)
        if not keys.is_on or keys.preservation_trigger is None:
            return
        has_trigger = []
        for dataset in datasets:
            if not dataset.config.is_trained or dataset.config.is_regularisation_data:
                continue
            for sample in dataset.samples:
                has_trigger += [keys.names_subject(caption) for caption in sample.captions]
        total = len(has_trigger)
        count = has_trigger.count(True)
        if count == total:
            return
        message = f"{keys.preservation_trigger!r} is in {count} of {total} captions"
        if count == 0:
            report.error("preservation_trigger", f"{message}.")
        else:
            report.warn(
                "preservation_trigger",
                f"{message}; for the others preservation_prompt is the whole caption.",
            )

    def cost(self, transformer: TransformerCost, batch: BatchShape) -> TechniqueCost:
        # The base model's pass has no gradients; the LoRA's pass has a backward pass.
        share = self.probability * self.plain
        return TechniqueCost(forwards=share, passes=share)
