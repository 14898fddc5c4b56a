"""The words that all prompts begin with are read once.

A causal model reads from left to right, so what it makes of the words before the caption is the same for all
captions. What later tokens need of earlier ones are their keys and values in each layer; they are kept here, with the
hidden states, and only the caption is left to compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache

# Matrix products of very few rows take other kernels, which round otherwise than those of the whole prompt.
FEWEST_TO_READ = 8


class PromptStart:
    """Keys, values and hidden states of the first tokens of all prompts.

    Args:
        tokens: ids of what every prompt is likely to begin with. How much of it a prompt really shares is looked up:
            a caption may melt with the last letters before it into one token.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = torch.tensor(tokens, dtype=torch.long)
        self._layers: list[tuple[Tensor, Tensor]] = []  # keys and values, 1 H S D
        self._hidden: Tensor | None = None  # 1 S D

    def read(self, decoder: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Last hidden states `B L D` of whole prompts, as the decoder alone would give them but for rounding.

        Args:
            decoder: a causal language model of transformers without its head, always the same one.
            ids, mask: tokens `B L`, padded on the right; 0 in the mask for those that others shall not see. Without a
                mask each token sees all before it, which no padding on the right is.
        """
        if self._hidden is None:
            self._hidden = self._read_start(decoder, ids)
        shared = self._shared(ids)
        cache = DynamicCache()  # its own for each batch: the decoder appends to it
        for index, states in enumerate(self._layers):
            cache.update(*(state[:, :, :shared].expand(len(ids), -1, -1, -1) for state in states), index)
        rest = decoder(input_ids=ids[:, shared:], attention_mask=mask, past_key_values=cache).last_hidden_state
        return torch.cat([self._hidden[:, :shared].expand(len(ids), -1, -1), rest], dim=1)

    def _shared(self, ids: Tensor) -> int:
        """How many tokens all prompts have in common with the start; some of a prompt are always left to read."""
        most = max(0, min(len(self.tokens), ids.shape[1] - FEWEST_TO_READ))
        same = (ids[:, :most] == self.tokens[:most].to(ids.device)).all(0)
        return int(same.int().cumprod(0).sum())

    def _read_start(self, decoder: nn.Module, ids: Tensor) -> Tensor:
        """Keep what the layers say about the start; returns its hidden states.

        It is read in a row as long as the prompts: some attention kernels round by the length of the row.
        """
        length, cache = len(self.tokens), DynamicCache()
        row = torch.cat([self.tokens.to(ids.device), ids[0, length:]])
        hidden: Tensor = decoder(input_ids=row[None], past_key_values=cache).last_hidden_state
        self._layers = [
            (layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone()) for layer in cache.layers
        ]
        return hidden[:, :length].clone()
