"""Passes of the HF engine over several tokens of a sequence: prompts, begun responses, and what is appended to rows."""
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightrft.models.actor_modality import ActorModality
from lightrft.rollout.hf.kv_cache import Extend, Joined, KVCache, Prefill
from lightrft.rollout.open_responses import OpenPrompt, OpenResponse
from lightrft.types import Experience, MediaSpan
from lightrft.utils.tensors import upload

PREFILL_TOKENS = 8192  # a pass takes no further sequence from here on
View = Prefill | Extend | Joined


class Passes:
    """Passes through ``model`` that fill ``cache``."""

    def __init__(self, model: PreTrainedModel, modality: ActorModality, cache: KVCache) -> None:
        self.model, self.modality, self.cache, self.device = model, modality, cache, cache.device

    def run(self, inputs: dict[str, Any], view: View) -> Tensor:
        """Run one pass; return the logits [k, V] that ``view`` asks for."""
        return self.modality.logits(self.model, view.last, kv_cache=view, **inputs)

    def prompts(self, prompts: list[OpenPrompt], slots: list[int]) -> Tensor:
        """Run each prompt, into its prompt slot; return last-token logits [prompts, V]."""
        inputs = self._inputs([prompt.prompt.token_ids for prompt in prompts], [[prompt.span] for prompt in prompts])
        view = Prefill(self.cache, inputs.pop("packing"), np.array(slots))
        if any(prompt.prompt.media for prompt in prompts):
            for prompt, end in zip(prompts, _ends(inputs, view)):
                prompt.shift = end - prompt.length
        return self.run(inputs, view)

    def begun(self, responses: list[OpenResponse], slots: np.ndarray) -> Tensor:
        """Run the tokens of begun responses, what follows their prompts into ``slots``; return last-token logits
        [k, V]."""
        return torch.cat([self._begun([responses[i] for i in group], slots[group]) for group in groups(responses)])

    def _begun(self, responses: list[OpenResponse], slots: np.ndarray) -> Tensor:
        inputs = self._inputs([response.episode.token_ids for response in responses],
                              [[response.prompt.span, *response.episode.media_spans] for response in responses])
        skip = np.array([response.prompt.length for response in responses])
        view = Prefill(self.cache, inputs.pop("packing"), slots, skip)
        if any(response.episode.media_spans for response in responses):
            for response, end in zip(responses, _ends(inputs, view)):
                response.shift = end - response.episode.num_tokens - response.prompt.shift
        return self.run(inputs, view)

    def appended(self, responses: list[OpenResponse], begins: np.ndarray) -> tuple[dict[str, Any], Extend]:
        """Return the pass over the tokens of responses from ``begins`` on, but for the last one, in their slots."""
        slots, prompts = np.array([each.slot for each in responses]), [each.prompt for each in responses]
        counts = np.array([response.episode.response_len for response in responses]) - 1 - begins
        lengths = np.array([prompt.length for prompt in prompts])
        view = Extend(self.cache, np.array([prompt.slot for prompt in prompts]), lengths, slots, begins, counts)
        sequences = [response.episode.response_ids[begin:-1] for response, begin in zip(responses, begins)]
        spans = [response.spans_from(begin) for response, begin in zip(responses, begins.tolist())]
        at = upload(np.repeat(begins + [response.after for response in responses], counts), self.device)
        if not any(spans):
            ids = upload([token for sequence in sequences for token in sequence], self.device)[None]
            at = at + upload(np.concatenate([np.arange(count) for count in counts]), self.device)
            return {"input_ids": ids, "position_ids": at[None], "attention_mask": None, "use_cache": False}, view
        inputs = self._inputs(sequences, [[MediaSpan(0, 0, ()), *some] for some in spans])
        del inputs["packing"]
        for response, end, count in zip(responses, _ends(inputs, view), counts.tolist()):
            response.shift += end - count
        return inputs | {"position_ids": inputs["position_ids"] + at}, view

    def _inputs(self, sequences: list[list[int]], spans: list[list[MediaSpan]]) -> dict[str, Any]:
        """Pack sequences with media in ``spans`` (:attr:`Batch.spans`) for one forward pass."""
        exp = Experience.pack(sequences, **Experience.with_spans(spans))
        return self.modality.inputs(exp.to(self.device), self.model)


def groups(responses: Sequence[OpenResponse]) -> list[np.ndarray]:
    """Return the indices of the responses of each pass."""
    lengths = np.array([response.episode.num_tokens for response in responses], dtype=np.int64)
    passes = (lengths.cumsum() - lengths) // PREFILL_TOKENS
    return [np.flatnonzero(passes == number) for number in np.unique(passes)]


def _ends(inputs: dict[str, Any], view: Prefill | Extend) -> list[int]:
    """Return the position after each sequence of a row."""
    rows = inputs["position_ids"].flatten(0, -2)[-3:]  # of four rows the first is the index
    return (rows[:, view.last].amax(0) + 1).tolist()
