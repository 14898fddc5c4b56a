"""LayerSync: aligns the tokens of a shallow block with the tokens of a deeper block of the same model.

Haghighi et al., "LayerSync: Self-aligning Intermediate Layers", arXiv 2510.12581. The loss is the negative cosine
similarity of each token at the student block and, detached, at the teacher block. It needs no encoder, no projector and
no extra forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import cosine_similarity

from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.techniques.base import Site, Technique


class LayerSync(Technique):
    """Adds `-weight * cos(student, teacher)`, averaged over the tokens.

    Args:
        student, teacher: visual blocks, counted from 0.
        skipped: ids of datasets to skip, since their target is the base model.
    """

    def __init__(self, student: int, teacher: int, weight: float, skipped: frozenset[str] = frozenset()) -> None:
        self._student, self._teacher, self._weight, self._skipped = student, teacher, weight, skipped

    def attach(self, site: Site) -> None:
        super().attach(site)
        for block in (self._student, self._teacher):
            site.hidden.watch(block)

    def extra_losses(self, noisy: NoisyBatch, prediction: Tensor) -> Mapping[str, Tensor]:
        if noisy.batch.dataset_id in self._skipped:
            return {}
        student = self._tokens(self._student, self._teacher)
        teacher = self._tokens(self._teacher, self._student).detach()
        # float32, since bf16 cosines near 1 have steps of .004.
        return {"layersync_loss": -self._weight * cosine_similarity(student.float(), teacher.float(), dim=-1).mean()}

    def _tokens(self, block: int, other: int) -> Tensor:
        """The tokens of a block that also pass through the other block, `B S D`."""
        hidden, kept = self.site.hidden[block], self.site.kept_tokens(other)
        if kept is None or self.site.kept_tokens(block) is not None:  # the plan allows at most one route
            return hidden
        return hidden.gather(1, kept[..., None].expand(-1, -1, hidden.shape[-1]))
