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
        length: of the row in which they are read, at least theirs. Some attention kernels round depending on it, so
            it must not depend on a prompt.
    """

    def __init__(self, tokens: Sequence[int], length: int) -> None:
        self.tokens, self.length = torch.tensor(tokens, dtype=torch.long), length
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
            self._hidden = self._read_start(decoder, ids.device)
        shared = self._shared(ids)
        hidden = self._hidden.new_empty(*ids.shape, self._hidden.shape[-1])
        for count in shared.unique().tolist():
            # All rows each time, since kernels round by their number: no prompt is read differently beside another.
            rows = shared == count
            hidden[rows] = self._read_rest(decoder, ids, mask, count)[rows]
        return hidden

    def _read_rest(self, decoder: nn.Module, ids: Tensor, mask: Tensor | None, shared: int) -> Tensor:
        """Hidden states of prompts whose first `shared` tokens are those of the start."""
        assert self._hidden is not None
        cache = DynamicCache()  # a new one for each batch: the decoder appends to it
        for index, states in enumerate(self._layers):
            cache.update(*(state[:, :, :shared].expand(len(ids), -1, -1, -1) for state in states), index)
        rest = decoder(input_ids=ids[:, shared:], attention_mask=mask, past_key_values=cache).last_hidden_state
        return torch.cat([self._hidden[:, :shared].expand(len(ids), -1, -1), rest], dim=1)

    def _shared(self, ids: Tensor) -> Tensor:
        """How many tokens each prompt shares with the start, leaving at least `FEWEST_TO_READ` of it."""
        most = max(0, min(len(self.tokens), ids.shape[1] - FEWEST_TO_READ))
        return (ids[:, :most] == self.tokens[:most].to(ids.device)).int().cumprod(1).sum(1)

    def _read_start(self, decoder: nn.Module, device: torch.device) -> Tensor:
        """Store keys and values of the start; returns its hidden states."""
        row, cache, count = lengthen(self.tokens[None], self.length).to(device), DynamicCache(), len(self.tokens)
        hidden: Tensor = decoder(input_ids=row, past_key_values=cache).last_hidden_state
        self._layers = [
            (layer.keys[:, :, :count].clone(), layer.values[:, :, :count].clone()) for layer in cache.layers
        ]
        return hidden[:, :count].clone()


def lengthen(rows: Tensor, length: int) -> Tensor:
    """Rows `B L` of at least `length` tokens, by repeating the last one. No earlier token sees those after it."""
    return torch.cat([rows, rows[:, -1:].expand(-1, max(0, length - rows.shape[1]))], dim=1)
