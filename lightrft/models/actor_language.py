"""The policy of a text model."""
from contextlib import AbstractContextManager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.models.actor_modality import ActorModality
from lightrft.models.lora import adapter_disabled
from lightrft.models.packed_model import PackedModel
from lightrft.ops.logprobs import chunked_logprobs, Read, read_logprobs
from lightrft.types import Experience


class ActorLanguage(PackedModel):
    """A causal language model that returns log-probs of packed sequences; the logits never exist as a whole.

    Args:
        model: a Hugging Face causal LM with ``attn_implementation="packed"``, or a PEFT model around one; or the folder
            or hub id of a model, which is loaded to be trained.
        chunk_mib: MiB of float32 logits alive at once.
        modality: the family's positions, body and head; text by default.
        options: with a path, those of :class:`~lightrft.config.schema.ModelConfig`, such as ``lora_rank=8``.

    Attributes:
        fused_logprobs: log-probs come from the kernels of ``--fused_logprobs``.
        made_with: the path and the options that it was made with; empty for one that was made of a model.
    """

    def __init__(self, model: nn.Module | str | Path, chunk_mib: int = 256, modality: ActorModality | None = None,
                 **options: Any) -> None:
        if not isinstance(model, nn.Module):  # by name: the loader makes actors
            vars(self).update(vars(resolve_name("lightrft.models.by_path:load_at")(str(model), options)))
            return
        super().__init__(model, modality)
        self.chunk_mib, self.fused_logprobs = chunk_mib, False
        self.made_with: dict[str, Any] = {}

    def forward(self, exp: Experience, temperature: float = 1.0, entropy: bool = False, read: Read | None = None,
                vocab: int | None = None) -> tuple[Tensor | None, ...]:
        """Return ``(logprobs [T], entropy [T] or None)`` in nats and float32, at ``temperature``.

        ``logprobs[t] = log p(token_t | tokens before)`` where ``exp.drawn`` keeps t and t is not the first token
        of its sequence, else 0. Both are differentiable; a mask that keeps nothing gives zeros, and zero gradients.

        With ``read`` the result is what that makes of the log-probs of the first ``vocab`` tokens, at the same
        positions (:func:`lightrft.ops.logprobs.read_logprobs`).
        """
        index, hidden = self.action_hidden_states(exp)
        head = self.modality.head(self.hf_model)
        weight = head.weight.to(hidden.dtype)  # ZeRO-3 gathers float32
        hidden = hidden * head.scale if head.scale != 1.0 else hidden
        if read is not None:
            return read_logprobs(hidden, weight, read, vocab, head.bias, self.chunk_mib, head.soft_cap)
        logprobs, entropies = chunked_logprobs(hidden, weight, exp.token_ids[index], temperature=temperature,
                                               bias=head.bias, chunk_mib=self.chunk_mib, entropy=entropy,
                                               soft_cap=head.soft_cap, fused=self.fused_logprobs)
        return _scatter(logprobs, index, exp), None if entropies is None else _scatter(entropies, index, exp)

    def adapter_disabled(self) -> AbstractContextManager[Any]:
        """Context without the LoRA adapters, in which the model is its own reference. Raises an error without LoRA."""
        return adapter_disabled(self.model)


def _scatter(values: Tensor, index: Tensor, exp: Experience) -> Tensor:
    """Put ``values`` [N] at positions ``index`` of a row of T zeros."""
    out = torch.zeros(exp.num_tokens, dtype=values.dtype, device=values.device)
    return out.index_put((index, ), values)


ActorVL = ActorAL = ActorLanguage  # one path for all modalities
