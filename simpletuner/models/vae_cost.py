"""Memory and compute of a VAE, calculated without torch; `vaes.toml` has the measurements of every
class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from simpletuner.config.json_reader import read_toml
from simpletuner.models.cost_table import Factors, number, peak_of, sum_of

# of preview decoding: pixels per side of a tile, and overlap of two tiles
TILE = 384
OVERLAP = 128


@dataclass(frozen=True)
class VaeLoad:
    """Pictures or clips of one size, in pixels, for the VAE to encode or decode.

    Attributes:
        tiled: processed in tiles (`vae_enable_tiling`, `validation_decoding`).
        sliced: 3D convolutions run in slices of time (`vae_enable_patch_conv`).
        strips: large layers run in strips of rows (`validation_decoding`).
        tile: pixels per side of a tile.
    """

    samples: int
    frames: int
    width: int
    height: int
    tiled: bool = False
    sliced: bool = False
    strips: bool = False
    # As in diffusers' video VAEs.
    tile: int = 256

    @property
    def pixels(self) -> int:
        """Pixels of one frame, or of one tile of it."""
        whole = self.width * self.height
        return min(whole, self.tile * self.tile) if self.tiled else whole


Ways = Mapping[str, Sequence[Factors]]  # by way of working, the phases of it


@dataclass(frozen=True)
class VaeCost:
    """Measured cost of a VAE per sample, as sums of products like in `cost.json`.

    In products, `width` is the first width of its layers, `layers` their number relative to the
    published VAE, `frame` the frames processed at a time, `later` these without the first, `pixel`
    the pixels of a frame or tile, and `clip` the pixels of all frames.

    Attributes:
        parameters: number of parameters; in `VAE_COSTS`, of the published VAE.
        encoding, decoding: numbers alive in each phase, by way of working: `usual`, `sliced`, in
            `strips`, in `tiles`.
        flops: of decoding.
        upsampling: numbers that decoding upsamples at once.
        width_key: config key of the first width; `width` is the default.
        frames: maximum number of frames processed at a time; 0 for all.
        settings: its config.json; empty for the published VAE.
    """

    parameters: int
    encoding: Ways
    decoding: Ways
    flops: Factors = field(default_factory=dict)
    upsampling: Factors = field(default_factory=dict)
    width_key: str = ""
    width: int = 1
    frames: int = 0
    settings: Mapping[str, object] = field(default_factory=dict)

    def encode(self, load: VaeLoad) -> float:
        """Numbers alive at the peak of encoding."""
        return self._peak(self.encoding, load)

    def decode(self, load: VaeLoad) -> float:
        """Numbers alive at the peak of decoding."""
        return self._peak(self.decoding, load)

    def upsampled(self, load: VaeLoad) -> float:
        """Numbers that decoding a sample upsamples at once."""
        return sum_of(self.upsampling, self._numbers(load))

    def decode_flops(self, load: VaeLoad) -> float:
        """FLOPs of decoding."""
        return load.samples * sum_of(self.flops, self._numbers(load))

    def _peak(self, ways: Ways, load: VaeLoad) -> float:
        return load.samples * peak_of(ways[_way(ways, load)], self._numbers(load))

    def _numbers(self, load: VaeLoad) -> dict[str, float]:
        first = self.settings.get(self.width_key)
        frames = min(load.frames, self.frames or load.frames)
        return {
            "width": first[0]
            if isinstance(first, list | tuple)
            else number(self.settings, self.width_key, self.width),
            "layers": (number(self.settings, "layers_per_block", 2) + 3) / 5,
            "frame": frames,
            "later": max(frames - 1, 1),
            "pixel": load.pixels,
            "clip": load.frames * load.width * load.height,
        }


def _way(ways: Ways, load: VaeLoad) -> str:
    """The way in which a VAE works on a load, of those that it has."""
    if load.strips and load.tiled and "tiles" in ways:
        return "tiles"
    if load.strips and "strips" in ways:
        return "strips"
    if load.sliced and load.frames > 1 and "sliced" in ways:
        return "sliced"
    return "usual"


VAE_COSTS = {
    name: VaeCost(**table) for name, table in read_toml("simpletuner.models", "vaes.toml").items()
}
