"""The noise of a micro-batch.

Every random number is derived from (seed, global step, micro-step, sample): its place in the run.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.diffusion.flow import choose_shift, make_noisy, mixflow_sigmas, sample_noise, sample_sigmas
from simpletuner.diffusion.seeds import Place, seed_device
from simpletuner.distributed.world import World
from simpletuner.training.meter import tokens_of
from simpletuner.training.state import Assembly


def add_noise(assembly: Assembly, batch: Batch, global_step: int, micro_step: int) -> NoisyBatch:
    """Draw sigmas and noise for this place in the run, and seed the device's generator for dropout."""
    settings, flow = assembly.settings, assembly.settings.flow
    place = place_of(assembly, len(batch.names), global_step, micro_step)
    seed_device(batch.latents.device, place.forward_seed)
    tokens, auto_shift = tokens_of(assembly, batch), assembly.adapter.spec.auto_shift
    shift = choose_shift(flow, tokens, auto_shift, shift_is_explicit=settings.shift_is_explicit)
    sigmas = sample_sigmas(place, flow, shift, settings.timestep_offsets.get(batch.dataset_id, 0.0))
    # Compared, not trusted: noise drawn for another place would change the run without a trace.
    noise = batch.noise if batch.noise is not None and batch.place == place else _noise(batch, place)
    levels = mixflow_sigmas(place, sigmas, flow.mixflow_gamma) if flow.mixflow_enabled else None
    noisy = make_noisy(batch, sigmas, noise, settings.loss, levels, place)
    # Read here, where they are on the CPU: later that would wait for the device.
    return replace(noisy, host_sigmas=tuple(sigmas.tolist()))


def with_noise(assembly: Assembly, batch: Batch, number: int) -> Batch:
    """The batch with its noise as `add_noise` would draw it, which takes long: to be done ahead, in the background.

    Args:
        number: micro-batches of the run before this one.
    """
    place = place_of(assembly, len(batch.names), *divmod(number, assembly.settings.accumulation))
    return replace(batch, noise=_noise(batch, place), place=place)


def _noise(batch: Batch, place: Place) -> Tensor:
    return sample_noise(batch.latents, place.generators("noise"))


def place_of(assembly: Assembly, count: int, global_step: int, micro_step: int) -> Place:
    """Where in the run a micro-batch of `count` samples is."""
    settings = assembly.settings
    # With shared noise every process draws what it would draw alone.
    world = World() if settings.shared_noise else assembly.world.of_groups(settings.sequence)
    return Place(settings.seed, global_step, micro_step, world.slots(count), world.size * count)
