"""Prefix caching: the words that all prompts begin with are encoded once.

In a causal model the states of the words before the caption are the same for all captions. Later tokens need only
their keys and values in each layer; these are kept here with the hidden states, and only the caption is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache

# Matrix products with very few rows use other kernels, which round differently from those of the whole prompt.
FEWEST_TO_READ = 8


class PromptStart:
    """Keys, values and hidden states of the tokens that all prompts begin with.

    Args:
        tokens: ids that every prompt is likely to begin with. Each batch is compared with them, because the tokenizer
            may merge the start of a caption with the last letters before it.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = torch.tensor(tokens, dtype=torch.long)
        self._layers: list[tuple[Tensor, Tensor]] = []  # keys and values, 1 H S D
        self._hidden: Tensor | None = None  # 1 S D

    def read(self, decoder: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Last hidden states `B L D` of whole prompts; they differ from the decoder's own by rounding alone.

        Args:
            decoder: a causal language model of transformers without its head, the same one in every call.
            ids, mask: tokens `B L`, padded on the right; the mask is 0 for padding. Without a mask each token attends
                to all before it, which never includes padding on the right.
        """
        if self._hidden is None:
            self._hidden = self._read_start(decoder, ids)
        shared = self._shared(ids)
        cache = DynamicCache()  # a new one for each batch: the decoder appends to it
        for index, states in enumerate(self._layers):
            cache.update(*(state[:, :, :shared].expand(len(ids), -1, -1, -1) for state in states), index)
        rest = decoder(input_ids=ids[:, shared:], attention_mask=mask, past_key_values=cache).last_hidden_state
        return torch.cat([self._hidden[:, :shared].expand(len(ids), -1, -1), rest], dim=1)

    def _shared(self, ids: Tensor) -> int:
        """How many tokens all prompts share with the start, leaving at least `FEWEST_TO_READ` of each prompt."""
        most = max(0, min(len(self.tokens), ids.shape[1] - FEWEST_TO_READ))
        same = (ids[:, :most] == self.tokens[:most].to(ids.device)).all(0)
        return int(same.int().cumprod(0).sum())

    def _read_start(self, decoder: nn.Module, ids: Tensor) -> Tensor:
        """Store keys and values of the start; returns its hidden states.

        It is read in a row as long as the prompts, because some attention kernels round depending on the length.
        """
        length, cache = len(self.tokens), DynamicCache()
        row = torch.cat([self.tokens.to(ids.device), ids[0, length:]])
        hidden: Tensor = decoder(input_ids=row[None], past_key_values=cache).last_hidden_state
        self._layers = [
            (layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone()) for layer in cache.layers
        ]
        return hidden[:, :length].clone()
