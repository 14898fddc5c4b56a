"""Prefix caching: encodes the common start of all prompts once.

In a causal model, the states of the tokens before the caption are the same for all captions, and
later tokens need only their keys and values. These are cached with the hidden states, so that only
the caption is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache

# Matmuls with very few rows use other kernels, which round differently.
FEWEST_TO_READ = 8


class PromptStart:
    """Keys, values and hidden states of the tokens at the start of all prompts.

    Args:
        tokens: ids at the usual start of prompts. Every batch is compared with them, because the
            tokenizer may merge the start of a caption with the last letters before it.
        length: length of the padded row in which they are encoded, independent of prompts, since
            attention kernels may round differently by length.
    """

    def __init__(self, tokens: Sequence[int], length: int) -> None:
        self.tokens = torch.tensor(tokens, dtype=torch.long)
        self.length = length
        self._layers: list[tuple[Tensor, Tensor]] = []  # keys and values, 1 H S D
        self._hidden: Tensor | None = None  # 1 S D

    def read(self, decoder: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Last hidden states `B L D` of whole prompts, equal to the decoder's up to rounding.

        Args:
            decoder: a causal language model of transformers without its head, the same one in every
                call.
            ids, mask: tokens `B L`, padded on the right; the mask is 0 for padding. Without a mask,
                each token attends to all earlier tokens, which never include padding on the right.
        """
        if self._hidden is None:
            self._hidden = self._read_start(decoder, ids.device)
        shared = self._shared(ids)
        hidden = self._hidden.new_empty(*ids.shape, self._hidden.shape[-1])
        for count in shared.unique().tolist():
            # All rows, since kernels round differently by their number, and states must not depend
            # on the batch.
            rows = shared == count
            hidden[rows] = self._read_rest(decoder, ids, mask, count)[rows]
        return hidden

    def _read_rest(
        self, decoder: nn.Module, ids: Tensor, mask: Tensor | None, shared: int
    ) -> Tensor:
        """Hidden states of prompts that share their first `shared` tokens with the start."""
        assert self._hidden is not None
        samples = len(ids)
        cache = DynamicCache()  # new for each batch, since the decoder appends to it
        for index, (keys, values) in enumerate(self._layers):
            cache.update(
                keys[:, :, :shared].expand(samples, -1, -1, -1),
                values[:, :, :shared].expand(samples, -1, -1, -1),
                index,
            )
        output = decoder(input_ids=ids[:, shared:], attention_mask=mask, past_key_values=cache)
        start = self._hidden[:, :shared].expand(samples, -1, -1)
        return torch.cat([start, output.last_hidden_state], dim=1)

    def _shared(self, ids: Tensor) -> Tensor:
        """Number of tokens that each prompt shares with the start, `B`.

        At least `FEWEST_TO_READ` remain to compute.
        """
        most = max(0, min(len(self.tokens), ids.shape[1] - FEWEST_TO_READ))
        is_equal = ids[:, :most] == self.tokens[:most].to(ids.device)
        # The product is 1 up to the first difference, and 0 from there on.
        return is_equal.int().cumprod(1).sum(1)

    def _read_start(self, decoder: nn.Module, device: torch.device) -> Tensor:
        """Store keys and values of the start; returns its hidden states."""
        row = lengthen(self.tokens[None], self.length).to(device)
        cache = DynamicCache()
        count = len(self.tokens)
        hidden: Tensor = decoder(input_ids=row, past_key_values=cache).last_hidden_state
        self._layers = [
            (layer.keys[:, :, :count].clone(), layer.values[:, :, :count].clone())
            for layer in cache.layers
        ]
        return hidden[:, :count].clone()


def lengthen(rows: Tensor, length: int) -> Tensor:
    """Pad rows `B L` to at least `length` tokens by repeating the last one.

    Which token it is does not matter, since no earlier token attends to it.
    """
    missing = max(0, length - rows.shape[1])
    return torch.cat([rows, rows[:, -1:].expand(-1, missing)], dim=1)
