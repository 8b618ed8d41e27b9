"""Rewards of the steps of responses: from characters of a response to tokens of a packed batch."""
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.strategy.base import StrategyBase
from lightrft.trainer.scores import ScoredSample
from lightrft.types import Experience, Sample

Steps = list[tuple[int, float]]  # where each step ends, and its reward


def on_tokens(sample: Sample, steps: Steps, tokenizer: PreTrainedTokenizerBase) -> Steps:
    """Move step ends from characters of ``sample.text`` to the tokens of the sequence that write the last one.

    A step that ends in what an environment appended gets its reward at the last token drawn before it (or the first
    one drawn), because no other token is an action.
    """
    if not steps:
        return []
    start, found = len(sample.prompt.token_ids), Steps()
    drawn = [i for i, own in enumerate(sample.loss_mask) if own]
    low = 0
    for end, reward in steps if drawn else ():
        low = _tokens_of(sample.token_ids[start:], end, low, tokenizer)
        at = start + low - 1
        found.append((max((i for i in drawn if i <= at), default=drawn[0]), reward))
    return found


def _tokens_of(ids: list[int], end: int, low: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the fewest leading tokens, more than ``low`` - 1, whose text has at least ``end`` characters."""
    low, high = max(low, 1), len(ids)
    while low < high:
        middle = (low + high) // 2
        text = str(tokenizer.decode(ids[:middle], skip_special_tokens=False))
        if len(text.rstrip("\ufffd")) >= end:  # the first bytes of a character are none yet
            high = middle
        else:
            low = middle + 1
    return low


def spread_steps(exp: Experience, numbers: list[int], scored: list[ScoredSample], strategy: StrategyBase) -> Tensor:
    """Return ``step_rewards`` [T] of the sequences of ``exp``, wherever they were scored; a collective.

    Args:
        numbers: indices in the batch of the samples ``scored`` on this rank; ``exp.sample_ids`` are such indices.
    """
    own = {number: each.steps for number, each in zip(numbers, scored)}
    known = {number: steps for part in strategy.all_gather_object(own) for number, steps in part.items()}
    out = torch.full((exp.num_tokens, ), torch.nan)
    for start, number in zip(exp.cu_seqlens.tolist(), exp.sample_ids.tolist()):
        for at, reward in known[number]:
            out[start + at] = out[start + at].nan_to_num() + reward
    return out
