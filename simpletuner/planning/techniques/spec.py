"""A technique as the plan sees it: its rules, its cost and the data that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from simpletuner.caching.catalogue import FeatureKind
from simpletuner.config.option import TechniqueGroup
from simpletuner.config.schema import RunConfig
from simpletuner.config.techniques.tread import Route
from simpletuner.data.dataset import Dataset
from simpletuner.errors import Problems
from simpletuner.models.cost import BatchShape, TransformerCost
from simpletuner.models.spec import FamilySpec


@dataclass(frozen=True)
class TechniqueCost:
    """The cost of a technique per micro-batch.

    Attributes:
        parameters: number of weights in the technique's module, all trained in float32.
        held: bytes kept on the device from the forward to the backward pass.
        flops: FLOPs of the forward and backward pass.
        forwards: mean number of extra forward passes of the transformer without gradients, on all
            tokens.
        passes: mean number of extra forward and backward passes, on all tokens.
    """

    parameters: int = 0
    held: float = 0.0
    flops: float = 0.0
    forwards: float = 0.0
    passes: float = 0.0


@dataclass(frozen=True)
class TrainedData:
    """Properties of a run's data that the specs depend on.

    Attributes:
        total_steps: optimizer steps of the run.
        regularised: share of the micro-batches by id of a dataset with regularisation data.
        strengths: `slider_strength` by id of a slider dataset.
        masked: share of the micro-batches that have masks.
    """

    total_steps: int = 1
    regularised: Mapping[str, float] = field(default_factory=dict)
    strengths: Mapping[str, float] = field(default_factory=dict)
    masked: float = 0.0

    @property
    def ids(self) -> frozenset[str]:
        """Ids of datasets whose target is the base model, which most techniques skip."""
        return frozenset(self.regularised)

    @property
    def plain(self) -> float:
        """Share of the micro-batches from all other datasets."""
        return 1 - sum(self.regularised.values())


class TechniqueSpec:
    """A technique that is on, as plan and budget see it. The class that trains gets its spec.

    The class methods are its rules, which apply while its keys do.

    Attributes:
        name: what messages, cached features and tests call it.
        trains: the class that trains, as `module:Class`; it is imported when a run is assembled.
        keys: its group of options; None if datasets alone turn it on.
        routes: ranges of blocks that some tokens skip.
        features: data per trained sample, cached beside the latents or computed in every step.
    """

    name: ClassVar[str]
    trains: ClassVar[str]
    keys: ClassVar[type[TechniqueGroup] | None] = None
    routes: Sequence[Route] = ()
    features: Sequence[FeatureKind] = ()

    @classmethod
    def of(cls, config: RunConfig, data: TrainedData) -> Self | None:
        """The technique of a run; None while it is off."""
        raise NotImplementedError

    @classmethod
    def check(cls, config: RunConfig, report: Problems) -> None:
        """Report contradictions between settings."""

    @classmethod
    def check_model(
        cls,
        config: RunConfig,
        spec: FamilySpec,
        routes: Sequence[Route],
        blocks: int | None,
        report: Problems,
    ) -> None:
        """Report what the model lacks or does not support.

        Args:
            routes: TREAD routes, ranges of blocks that some tokens skip.
            blocks: number of visual blocks; None if the checkpoint is not on this machine.
        """

    @classmethod
    def check_datasets(
        cls, config: RunConfig, datasets: Sequence[Dataset], report: Problems
    ) -> None:
        """Report missing data, and datasets that exclude the technique."""

    def cost(self, transformer: TransformerCost, batch: BatchShape) -> TechniqueCost:
        """The cost per micro-batch."""
        return TechniqueCost()
