"""Conversion of responses to samples and packed batches, and the inputs of rewards and seeds."""
import hashlib
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from lightrft.rewards.base import RewardInput
from lightrft.rollout.engine import Completion
from lightrft.types import Experience, Prompt, Sample
from lightrft.utils.errors import UserError

Rows = list[dict[str, Any]]  # one per sample: text, parts, error ...
Ended = tuple[int, Prompt, int, Completion]  # number of the group, its prompt, index in the group, response


def sample_seed(*path: int | str) -> int:
    """Hash a path such as (run seed, step, group, sample) to a 63-bit seed, the same on every rank and machine."""
    digest = hashlib.blake2b("/".join(map(str, path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stop_token_ids(stop: list[str], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the token of every stop string; a string that is not exactly one token is an error."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in stop]
    for text, tokens in zip(stop, ids):
        if len(tokens) != 1:
            raise UserError(
                f"--stop {text!r} is {len(tokens)} tokens of this tokenizer; a stop string must be exactly one")
    return tuple(tokens[0] for tokens in ids)


def reward_input(prompt: Prompt, response: str) -> RewardInput:
    """Build the input of a reward; ``response`` never contains the prompt."""
    return RewardInput(prompt=prompt.text, response=response, messages=prompt.messages, data_source=prompt.data_source,
                       label=prompt.label, reference=prompt.reference, columns=prompt.columns)


def to_samples(tokenizer: PreTrainedTokenizerBase, ended: Iterable[Ended], weight_version: int,
               stop: tuple[int, ...] = ()) -> list[Sample]:
    """Decode finished responses into samples. Special tokens and ``stop`` tokens stay; only the end token goes."""
    ended, kept = list(ended), set(stop) - {tokenizer.eos_token_id}
    bodies = [
        done.token_ids[:-1] if done.finish_reason == "stop" and done.token_ids[-1] not in kept else done.token_ids
        for *_, done in ended
    ]
    texts = tokenizer.batch_decode(bodies, skip_special_tokens=False)
    return [
        Sample(prompt=prompt, group_id=group_id, index=index, token_ids=prompt.token_ids + done.token_ids,
               loss_mask=[False] * len(prompt.token_ids) + done.drawn,
               logprobs=[0.0] * len(prompt.token_ids) + done.logprobs,
               weight_versions=[-1] * len(prompt.token_ids) + [weight_version if d else -1 for d in done.drawn],
               finish_reason=done.finish_reason, text=text)
        for (group_id, prompt, index, done), text in zip(ended, texts)
    ]


def pack_samples(samples: list[Sample], n_per_prompt: int) -> Experience:
    """Pack samples into one Experience on the CPU; rewards are set later."""

    def flat(name: str, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.fromiter(chain.from_iterable(getattr(sample, name) for sample in samples), dtype))

    lens = torch.tensor([0] + [len(sample.token_ids) for sample in samples])
    return Experience(
        token_ids=flat("token_ids", np.int64),
        cu_seqlens=lens.cumsum(0).to(torch.int32),
        loss_mask=flat("loss_mask", np.bool_),
        group_ids=torch.tensor([s.group_id for s in samples], dtype=torch.long),
        sample_ids=torch.tensor([s.group_id * n_per_prompt + s.index for s in samples], dtype=torch.long),
        truncated=torch.tensor([s.finish_reason == "length" for s in samples], dtype=torch.bool),
        weight_versions=flat("weight_versions", np.int32),
        rollout_logprobs=flat("logprobs", np.float32),
        media=[s.prompt.media for s in samples],
    )


def set_rewards(exp: Experience, rows: Rows) -> None:
    """Fill ``scored`` and ``rewards``, before shaping."""
    exp.scored = torch.tensor([row["reward"] is not None for row in rows], dtype=torch.bool)
    exp.rewards = torch.tensor([row["reward"] or 0.0 for row in rows], dtype=torch.float32)
