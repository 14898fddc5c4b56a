"""Stars: the renders of a run that a user likes, in a small file of its output folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from simpletuner.atomic import locked_for_change, write_atomically
from simpletuner.errors import UserError
from simpletuner.planning.checkpoint_folder import STARS_FILE

MOST_STARS = 10_000
LONGEST_NAME = 300  # of a prompt


@dataclass(frozen=True)
class Star:
    """A render that a user likes.

    Attributes:
        step, strength, ema: its weights.
        prompt: the name of its prompt.
    """

    step: int
    strength: float
    prompt: str
    ema: bool = False


STARS = TypeAdapter(list[Star])


def read_stars(folder: Path) -> list[Star]:
    """The stars of a run, in the order in which they were given.

    Raises:
        UserError: the file is damaged; it is kept.
    """
    path = folder / STARS_FILE
    if not path.is_file():
        return []
    try:
        return STARS.validate_json(path.read_bytes())
    except ValidationError:
        raise UserError(f"{path} is damaged; repair or move it.") from None


def set_star(folder: Path, star: Star, *, starred: bool) -> list[Star]:
    """Give or take a star, and return all.

    The file is read again under a lock, so that another tab's stars are kept.

    Raises:
        UserError: the folder is gone, the file is damaged, or it has too many stars.
    """
    path = folder / STARS_FILE
    if not folder.is_dir():
        # Writing would make it again, with nothing but the star.
        raise UserError(f"{folder} was deleted or moved, so its renders cannot be starred.")
    with locked_for_change(path):
        before = read_stars(folder)
        stars = [other for other in before if other != star]
        if starred:
            stars.append(star)
        if len(stars) > MOST_STARS:
            raise UserError(f"{path} already has {MOST_STARS:,} stars; take some back first.")
        if stars != before:
            write_atomically(path, STARS.dump_json(stars, indent=2) + b"\n")
    return stars


@dataclass(frozen=True)
class StarredWeights:
    """Weights with their stars.

    Attributes:
        prompts: the names of the starred prompts.
        is_gone: the weights do not exist any more.
    """

    step: int
    strength: float
    ema: bool
    prompts: Sequence[str]
    is_gone: bool


def by_weights(stars: Sequence[Star], usable: Sequence[int]) -> list[StarredWeights]:
    """The stars of the same weights together, those with most stars first."""
    names: dict[tuple[int, float, bool], list[str]] = {}
    for star in stars:
        names.setdefault((star.step, star.strength, star.ema), []).append(star.prompt)
    starred = [
        StarredWeights(step, strength, ema, prompts, step not in usable)
        for (step, strength, ema), prompts in names.items()
    ]
    return sorted(starred, key=lambda weights: -len(weights.prompts))
