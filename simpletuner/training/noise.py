"""The noise of a micro-batch.

Every random number is derived from its position in the run: (seed, global step, micro-step,
sample).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.diffusion.flow import choose_shift, make_noisy, sample_noise, sample_sigmas
from simpletuner.diffusion.seeds import Place, seed_device
from simpletuner.distributed.world import World
from simpletuner.models.spec import FamilySpec
from simpletuner.techniques.base import Technique
from simpletuner.training.settings import StepSettings


@dataclass(frozen=True)
class NoiseSource:
    """Draws the noise of a run's micro-batches.

    Attributes:
        world: this process among those that train on different samples.
        techniques: may replace the drawn noise, such as by reassigning it among the samples.
    """

    settings: StepSettings
    spec: FamilySpec
    world: World
    techniques: Sequence[Technique]

    def add(self, batch: Batch, global_step: int, micro_step: int) -> NoisyBatch:
        """The batch with the sigmas and the noise of this position in the run.

        Also seeds the device's generator, from which dropout draws.
        """
        settings = self.settings
        place = self.place(len(batch.names), global_step, micro_step)
        seed_device(batch.latents.device, place.forward_seed)

        tokens = self.spec.tokens(*batch.latent_size)
        shift = choose_shift(
            settings.flow,
            tokens,
            self.spec.auto_shift,
            shift_is_explicit=settings.shift_is_explicit,
        )
        offset = settings.timestep_offsets.get(batch.dataset_id, 0.0)
        sigmas = sample_sigmas(place, settings.flow, shift, offset)

        noise = batch.noise
        # Noise drawn for another position would silently change the run.
        if noise is None or batch.place != place:
            noise = self._draw(batch, place)
        noisy = make_noisy(batch, sigmas, noise, settings.loss, place)
        # Read here, on the CPU; reading them later would synchronise.
        return replace(noisy, host_sigmas=tuple(sigmas.tolist()))

    def draw_ahead(self, batch: Batch, number: int) -> Batch:
        """The batch with its noise, as `add` would draw it.

        Drawing is slow, so the loader calls this ahead of the step, in the background.

        Args:
            number: number of earlier micro-batches in the run.
        """
        global_step, micro_step = divmod(number, self.settings.accumulation)
        place = self.place(len(batch.names), global_step, micro_step)
        return replace(batch, noise=self._draw(batch, place), place=place)

    def place(self, count: int, global_step: int, micro_step: int) -> Place:
        """The position in the run of a micro-batch of `count` samples."""
        # With shared noise, every process draws as if it were alone.
        world = World() if self.settings.shared_noise else self.world
        return Place(
            self.settings.seed,
            global_step,
            micro_step,
            slots=world.slots(count),
            group=world.size * count,
        )

    def _draw(self, batch: Batch, place: Place) -> Tensor:
        """The noise of a micro-batch, after techniques have changed it."""
        noise = sample_noise(batch.latents, place.generators("noise"))
        for technique in self.techniques:
            noise = technique.choose_noise(batch, noise, place)
        return noise
