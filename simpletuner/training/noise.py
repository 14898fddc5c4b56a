"""The noise of a micro-batch.

Every random number is derived from its position in the run: (seed, global step, micro-step, sample).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.diffusion.flow import choose_shift, make_noisy, sample_noise, sample_sigmas
from simpletuner.diffusion.seeds import Place, seed_device
from simpletuner.distributed.world import World
from simpletuner.training.state import Assembly


def add_noise(assembly: Assembly, batch: Batch, global_step: int, micro_step: int) -> NoisyBatch:
    """Draw sigmas and noise for this position in the run, and seed the device's generator for dropout."""
    settings, flow = assembly.settings, assembly.settings.flow
    place = place_of(assembly, len(batch.names), global_step, micro_step)
    seed_device(batch.latents.device, place.forward_seed)
    spec = assembly.adapter.spec
    tokens = spec.tokens(*batch.latent_size)
    shift = choose_shift(flow, tokens, spec.auto_shift, shift_is_explicit=settings.shift_is_explicit)
    sigmas = sample_sigmas(place, flow, shift, settings.timestep_offsets.get(batch.dataset_id, 0.0))
    noise = batch.noise
    # Noise drawn for another position would silently change the run.
    if noise is None or batch.place != place:
        noise = _noise(assembly, batch, place)
    noisy = make_noisy(batch, sigmas, noise, settings.loss, place)
    # Read here, on the CPU; reading them later would synchronise.
    return replace(noisy, host_sigmas=tuple(sigmas.tolist()))


def with_noise(assembly: Assembly, batch: Batch, number: int) -> Batch:
    """The batch with its noise as `add_noise` would draw it; slow, so it is called ahead in the background.

    Args:
        number: number of earlier micro-batches in the run.
    """
    place = place_of(assembly, len(batch.names), *divmod(number, assembly.settings.accumulation))
    return replace(batch, noise=_noise(assembly, batch, place), place=place)


def _noise(assembly: Assembly, batch: Batch, place: Place) -> Tensor:
    """The noise of a micro-batch, as its techniques deal it."""
    noise = sample_noise(batch.latents, place.generators("noise"))
    for technique in assembly.techniques:
        noise = technique.deal(batch, noise, place)
    return noise


def place_of(assembly: Assembly, count: int, global_step: int, micro_step: int) -> Place:
    """The position in the run of a micro-batch of `count` samples."""
    settings = assembly.settings
    # With shared noise, every process draws as if it were alone.
    world = World() if settings.shared_noise else assembly.data_parallel
    return Place(settings.seed, global_step, micro_step, world.slots(count), world.size * count)
