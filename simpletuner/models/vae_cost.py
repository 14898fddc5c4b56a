"""Memory and compute of a VAE, calculated without torch from the measurements in `vaes.toml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from simpletuner.config.json_reader import read_toml
from simpletuner.models.cost_table import Factors, number, peak_of, sum_of

# Tiles of preview decoding, in pixels.
TILE = 384  # per side
OVERLAP = 128  # of neighbours


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
    tile: int = 256  # as in diffusers' video VAEs

    @property
    def pixels(self) -> int:
        """Pixels of one frame, or of one tile of it."""
        frame = self.width * self.height
        if not self.tiled:
            return frame
        return min(frame, self.tile * self.tile)


# The phases of encoding or decoding, by way of working (`_way`).
Ways = Mapping[str, Sequence[Factors]]


@dataclass(frozen=True)
class VaeCost:
    """Measured cost of a VAE per sample, as sums of products like in `cost.json`.

    `_numbers` has the names that products are made of.

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
        """What the names in products stand for."""
        frames = load.frames  # processed at a time
        if self.frames:
            frames = min(frames, self.frames)
        # The published VAE has 2 layers per block, and the rest of it counts as 3: 5 in all.
        layers = number(self.settings, "layers_per_block", 2) + 3
        return {
            "width": self._first_width(),
            "layers": layers / 5,  # relative to the published VAE
            "frame": frames,
            "later": max(frames - 1, 1),  # the frames without the first
            "pixel": load.pixels,  # of a frame or tile
            "clip": load.frames * load.width * load.height,  # pixels of all frames
        }

    def _first_width(self) -> int:
        """Channels of the first layers; config.json has them in a list, or alone."""
        widths = self.settings.get(self.width_key)
        if isinstance(widths, list | tuple):
            return widths[0]
        return number(self.settings, self.width_key, self.width)


def _way(ways: Ways, load: VaeLoad) -> str:
    """How a VAE works on a load: the most frugal way that is asked for and that it has."""
    if load.strips and load.tiled and "tiles" in ways:
        return "tiles"
    if load.strips and "strips" in ways:
        return "strips"
    if load.sliced and load.frames > 1 and "sliced" in ways:
        return "sliced"
    return "usual"


TABLES = read_toml("simpletuner.models", "vaes.toml")
VAE_COSTS = {name: VaeCost(**table) for name, table in TABLES.items()}
