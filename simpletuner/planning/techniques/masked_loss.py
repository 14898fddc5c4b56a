"""Masked loss: keys that need masks, and the pass of the prior."""

from __future__ import annotations

from collections.abc import Sequence

from simpletuner.config.schema import RunConfig
from simpletuner.config.techniques.masked_loss import MaskedLossConfig
from simpletuner.data.dataset import Dataset
from simpletuner.errors import Problems
from simpletuner.models.cost import BatchShape, TransformerCost
from simpletuner.planning.techniques.spec import TechniqueCost, TechniqueSpec, TrainedData


class MaskedLossSpec(TechniqueSpec):
    """Turned on by datasets with masks.

    Attributes:
        masked: share of the micro-batches that have masks.
    """

    name = "masked loss"
    trains = "simpletuner.techniques.masked_loss:MaskedLoss"
    keys = MaskedLossConfig

    def __init__(self, config: MaskedLossConfig, masked: float = 1.0) -> None:
        self.config = config
        self.masked = masked

    @classmethod
    def of(cls, config: RunConfig, data: TrainedData) -> MaskedLossSpec | None:
        return cls(config.techniques.of(MaskedLossConfig), data.masked) if data.masked else None

    @classmethod
    def check_datasets(
        cls, config: RunConfig, datasets: Sequence[Dataset], report: Problems
    ) -> None:
        """Report mask keys that have no effect without masks."""
        if any(dataset.masks and dataset.config.is_trained for dataset in datasets):
            return
        for key in MaskedLossConfig.model_fields:
            if config.is_explicit(key):
                report.warn(key, "has no effect: no dataset that is trained has masks.")

    def cost(self, transformer: TransformerCost, batch: BatchShape) -> TechniqueCost:
        if not self.config.masked_loss_prior:
            return TechniqueCost()
        return TechniqueCost(forwards=self.masked * self.config.masked_loss_probability)
