"""Sketches: thumbnails of previews during sampling (`validation_preview`).

Decoding with the VAE at every sampling step would cost more than the step, so a linear map converts
the channels of a latent position to its colour. On first use, it is fitted to the checkpoint's VAE
by least squares, on a few small decoded latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from simpletuner.atomic import open_atomically
from simpletuner.models.adapter import LatentEncoder
from simpletuner.models.spec import FamilySpec
from simpletuner.reporting.events import PreviewGrew
from simpletuner.reporting.metrics import MediaRecord

IN_PROGRESS = "validation_images/in_progress"
CELLS = 12  # latent positions per side of the fitted samples


class ColourMap:
    """A linear map from the channels of a latent position to its colour in [0, 1].

    Attributes:
        weights: `C+1 3`; the last row is a constant.
    """

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    @classmethod
    @torch.no_grad()
    def fit(cls, encoder: LatentEncoder, spec: FamilySpec) -> ColourMap:
        """Fit the map to a VAE's outputs for a colour chart, and for random latents.

        The chart has colours as pictures do, but only few of the latents' directions; random
        latents at several scales have the others.
        """
        # In a video VAE, the first latent frame is one frame and later ones are several: two frames
        # cover both.
        latent_frames = 1 if spec.media == "image" else 2
        frames = 1 + (latent_frames - 1) * spec.frame_stride
        colours = smooth_noise(3, 1, details=CELLS // 3).clamp(-1, 1)
        pixels = interpolate(colours[:, :, 0], scale_factor=spec.vae_stride, mode="bicubic")
        still_clip = pixels.clamp(-1, 1).unsqueeze(2).expand(-1, -1, frames, -1, -1)
        chart = encoder.encode(still_clip, [0])

        latents = [chart]
        for details in (CELLS // 6, CELLS // 3, CELLS * 2 // 3):
            latents.append(smooth_noise(chart.shape[1], latent_frames, details))
        inputs = torch.cat([_inputs(z) for z in latents])
        targets = torch.cat([_colours(encoder.decode(z), latent_frames) for z in latents])
        return cls(torch.linalg.lstsq(inputs, targets).solution)

    def __call__(self, z: Tensor) -> list[Image.Image]:
        """One small picture per latent frame of z, `1 C F H W`."""
        frames, height, width = z.shape[2:]
        # NaN, from a diverged model, has no uint8 value.
        colours = (_inputs(z) @ self.weights).nan_to_num().clamp(0, 1) * 255
        array = colours.round().to(torch.uint8).reshape(frames, height, width, 3).numpy()
        return [Image.fromarray(frame) for frame in array]


def smooth_noise(channels: int, frames: int, details: int) -> Tensor:
    """Deterministic noise of unit variance: `1 channels frames CELLS CELLS`.

    Args:
        details: random numbers per side, between which it is interpolated.
    """
    generator = torch.Generator().manual_seed(details)
    noise = torch.randn(frames, channels, details, details, generator=generator)
    noise = interpolate(noise, size=(CELLS, CELLS), mode="bicubic")
    return (noise / noise.std()).movedim(0, 1).unsqueeze(0)


def _colours(pixels: Tensor, frames: int) -> Tensor:
    """The mean decoded colour of latent positions, in [0, 1]: `frames*CELLS*CELLS 3`.

    Args:
        pixels: `1 3 F H W` in [-1, 1].
        frames: number of latent frames. The first covers one frame, all others the same number.
    """
    parts = [pixels]
    if frames > 1:
        parts = [pixels[:, :, :1], *pixels[:, :, 1:].tensor_split(frames - 1, dim=2)]
    means = []
    for part in parts:
        frame = part.mean(2).cpu().double()
        means.append(interpolate(frame, size=(CELLS, CELLS), mode="area"))
    return (torch.stack(means, dim=1).movedim(2, -1).reshape(-1, 3) + 1) / 2


def _inputs(z: Tensor) -> Tensor:
    """The latent positions of `1 C F H W` with a constant 1 appended: `F*H*W C+1`.

    In float64 on the CPU, for the least squares.
    """
    positions = z.detach().cpu().double().movedim(1, -1).reshape(-1, z.shape[1])
    ones = torch.ones(len(positions), 1, dtype=torch.float64)
    return torch.cat([positions, ones], dim=1)


@dataclass
class GrowingPreview:
    """Writes sketches of a preview; called after every sampling step.

    Attributes:
        every: sampling steps between sketches.
        total: number of sampling steps.
        media: the finished preview, without its path.
        seconds: duration of a clip.
    """

    colours: ColourMap
    every: int
    total: int
    media: MediaRecord
    seconds: float
    output_dir: Path
    publish: Callable[[PreviewGrew], None]
    _before: tuple[float, Tensor] | None = field(default=None, init=False)

    def __call__(self, done: int, timestep: float, sigma: float, z: Tensor) -> None:
        """Handle the latents `z` at noise level `sigma`, after `done` steps."""
        z = z.detach().float().clone()  # the pipeline may continue in place
        clean = self._clean(sigma, z)
        self._before = (sigma, z)
        if done % self.every == 0:
            stem = self.output_dir / IN_PROGRESS / f"{self.media.file_stem()}_{done:03d}"
            path = self._write(self.colours(clean), stem)
            media = replace(self.media, path=path.relative_to(self.output_dir).as_posix())
            self.publish(PreviewGrew(media, done, self.total, timestep))

    def _clean(self, sigma: float, z: Tensor) -> Tensor:
        """The clean latents predicted by the last step.

        On the path (1 - sigma) clean + sigma noise, the velocity is dz/dsigma, and clean = z -
        sigma velocity.
        """
        # The first call has no velocity yet; equal levels would divide by zero.
        if self._before is None or self._before[0] == sigma:
            return z
        previous_sigma, previous_z = self._before
        return z - sigma * (z - previous_z) / (sigma - previous_sigma)

    def _write(self, frames: list[Image.Image], stem: Path) -> Path:
        """Write a PNG, or an endless GIF of a clip's duration."""
        kind = "PNG"
        options: dict[str, Any] = {}
        if len(frames) > 1:
            kind = "GIF"
            options = {
                "save_all": True,
                "append_images": frames[1:],
                "loop": 0,  # endless
                "duration": round(1000 * self.seconds / len(frames)),  # of a frame, in ms
            }
        path = stem.with_name(f"{stem.name}.{kind.lower()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomically(path, durable=False) as file:
            frames[0].save(file, kind, **options)
        return path


def discard_unfinished(output_dir: Path) -> None:
    """Remove the sketches of an earlier round of previews."""
    for suffix in ("png", "gif"):
        for path in (output_dir / IN_PROGRESS).glob(f"step_*.{suffix}"):
            path.unlink(missing_ok=True)
