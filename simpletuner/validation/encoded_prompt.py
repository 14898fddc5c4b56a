"""A prompt of previews, with its embeddings from the caches and its source picture."""

from __future__ import annotations

from dataclasses import dataclass

from PIL.Image import Image

from simpletuner.caching.catalogue import Catalogue
from simpletuner.config.types import Size
from simpletuner.data.sample import Sample
from simpletuner.diffusion.batch import TextEmbeds
from simpletuner.encoding.decoding import prepared_picture
from simpletuner.encoding.read import BatchReader
from simpletuner.planning.prompts import ValidationPrompt


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt whose embeddings are cached.

    Embeddings and source picture depend on the preview's size, since the picture is fitted to it
    and may be part of the prompt.

    Attributes:
        negative_text: the negative prompt.
        picture: the source picture of i2i and i2v; None without one.
    """

    prompt: ValidationPrompt
    negative_text: str
    picture: Sample | None
    catalogue: Catalogue
    reader: BatchReader

    @property
    def picture_hash(self) -> str:
        """SHA-256 of the source picture; empty without one."""
        return "" if self.picture is None else self.picture.content

    def embeds(self, size: Size) -> TextEmbeds:
        """The embeddings of the prompt."""
        return self._read(self.prompt.prompt, size, negative=False)

    def negative(self, size: Size) -> TextEmbeds:
        """The embeddings of the negative prompt."""
        return self._read(self.negative_text, size, negative=True)

    def source(self, size: Size) -> Image | None:
        """The source picture, fitted."""
        fitted = self._fitted_picture(size)
        return None if fitted is None else prepared_picture(fitted)

    def _read(self, text: str, size: Size, *, negative: bool) -> TextEmbeds:
        fitted = self._fitted_picture(size)
        return self.reader.read(self.catalogue.text(None, text, fitted, negative=negative))

    def _fitted_picture(self, size: Size) -> Sample | None:
        return None if self.picture is None else self.picture.fitted(size)
