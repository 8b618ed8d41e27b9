"""The naive twins of the packed models: one sequence at a time, full logits, Hugging Face's own eager attention."""
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightrft.types import Experience

LENS = [5, 70, 1, 30, 12, 66, 16]


def experience(lens: list[int] = LENS, vocab: int = 260, seed: int = 0, keep: float = 0.7) -> Experience:
    """Random tokens; about ``keep`` of them in the loss mask (first tokens of sequences too, which never count)."""
    rng = torch.Generator().manual_seed(seed)
    total = sum(lens)
    return Experience(token_ids=torch.randint(4, vocab, (total, ), generator=rng),
                      cu_seqlens=torch.tensor([0, *lens]).cumsum(0).int(), loss_mask=torch.rand(total,
                                                                                                generator=rng) < keep)


def bounds(exp: Experience) -> list[tuple[int, int]]:
    """Start and end of every sequence."""
    cu = exp.cu_seqlens.tolist()
    return list(zip(cu, cu[1:]))


def logits_alone(hf: PreTrainedModel, exp: Experience) -> Tensor:
    """[T, V], one forward pass per sequence."""
    return torch.cat([hf(exp.token_ids[None, a:b], use_cache=False).logits[0] for a, b in bounds(exp)])


def logprobs(hf: PreTrainedModel, exp: Experience, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy [T], 0 where the mask is off and at first tokens."""
    logits, total = logits_alone(hf, exp).float() / temperature, exp.num_tokens
    kept = exp.loss_mask.clone()
    kept[exp.cu_seqlens[:-1].long()] = False
    previous = logits.log_softmax(-1).roll(1, 0)
    chosen = previous[torch.arange(total), exp.token_ids]
    entropy = -(previous.exp() * previous).sum(-1)
    return torch.where(kept, chosen, 0.0), torch.where(kept, entropy, 0.0)
