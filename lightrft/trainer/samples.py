"""Responses, unfinished groups of responses, samples and packed batches; the seeds of samples and inputs of rewards."""
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import DataConfig, RolloutConfig
from lightrft.datasets.records import prefill_of
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.token_texts import decode_behind
from lightrft.rewards.base import RewardInput
from lightrft.rollout.engine import Completion, Request, RolloutEngine, SamplingParams
from lightrft.trainer.environment import Environment, next_turn
from lightrft.trainer.scores import ScoredSample
from lightrft.types import Experience, flatten, Prompt, Sample
from lightrft.utils.errors import UserError
from lightrft.utils.progress import phase


def sample_seed(*path: int | str) -> int:
    """Hash a path such as (run seed, step, group, sample) to a 63-bit seed, the same on every rank and machine."""
    digest = hashlib.blake2b("/".join(map(str, path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stop_token_ids(stop: list[str], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the token that every stop string is within a text; one that is not exactly one token is an error."""
    ids = Renderer(DataConfig(), tokenizer).encode_inside(stop) if stop else []
    for text, tokens in zip(stop, ids):
        if len(tokens) != 1:
            raise UserError(
                f"--stop {text!r} is {len(tokens)} tokens of this tokenizer; a stop string must be exactly one")
    return tuple(tokens[0] for tokens in ids)


def sampling_params(cfg: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """Return the parameters with which responses are drawn."""
    return SamplingParams(cfg.generate_max_len, cfg.temperature, cfg.top_p, cfg.top_k, cfg.min_p,
                          stop_token_ids(cfg.stop, tokenizer), cfg.first_token_temperature if cfg.use_fire else None)


def reward_input(prompt: Prompt, response: str) -> RewardInput:
    """Build the input of a reward. ``response`` does not contain the prompt; a prefill at the end of that is the start
    of the answer, so rewards read it there, as in TRL."""
    begun = prefill_of(prompt.messages)
    messages = prompt.messages if begun is None else prompt.messages[:-1]
    return RewardInput(prompt=prompt.text.removesuffix(begun
                                                       or ""), response=(begun or "") + response, messages=messages,
                       data_source=prompt.data_source, label=prompt.label, reference=prompt.reference,
                       columns=prompt.columns, media=prompt.media, template_kwargs=prompt.template_kwargs)


@dataclass
class Response(Completion):
    """Response so far, without its prompt; ``weight_versions`` are the versions of the weights that drew its tokens, -1
    on appended ones."""
    weight_versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, done: Completion, version: int) -> "Response":
        """Make a response of a completion that the weights of ``version`` generated."""
        return cls(done.token_ids, done.logprobs, done.finish_reason, done.appended, done.per_token(version, -1))

    def add(self, more: Completion, version: int) -> None:
        """Append tokens that the weights of ``version`` generated."""
        self.extend(more)
        self.weight_versions = self.weight_versions + more.per_token(version, -1)


Ended = tuple[int, Prompt, int, Response]  # number of the group, its prompt, index in the group, response


@dataclass
class ResponseGroup:
    """Responses to one prompt, finished or not, on the rank that generates them."""
    number: int  # of its prompt: in the batch, or in all draws of the run
    prompt: Prompt
    responses: list[Response]
    scored: list[ScoredSample] = field(default_factory=list)  # of the responses that are finished and scored

    @classmethod
    def new(cls, number: int, prompt: Prompt, size: int) -> "ResponseGroup":
        """Create a group of ``size`` empty responses."""
        return cls(number, prompt, [Response([], [], "abort") for _ in range(size)])

    @classmethod
    def load(cls, state: dict[str, Any]) -> "ResponseGroup":
        """Restore a group from the result of :func:`dataclasses.asdict`."""
        responses = [Response(**response) for response in state["responses"]]
        scored = [ScoredSample(**each) for each in state["scored"]]
        return cls(state["number"], Prompt(**state["prompt"]), responses, scored)

    @property
    def open(self) -> list[int]:
        """Indices of the unfinished responses."""
        return [j for j, response in enumerate(self.responses) if response.finish_reason == "abort"]

    @property
    def tokens(self) -> int:
        """Number of tokens generated so far."""
        return sum(len(response.token_ids) for response in self.responses)

    def oldest(self, version: int) -> int:
        """Return the version of the oldest weights that drew a token; ``version`` if no token is drawn yet."""
        return min((v for response in self.responses for v in response.weight_versions[:1]), default=version)

    def add(self, completions: list[Completion], version: int, indices: list[int]) -> None:
        """Extend the responses at ``indices``; finished ones are complete already and are skipped."""
        for j, more in zip(indices, completions, strict=True):
            if self.responses[j].finish_reason == "abort":
                self.responses[j].add(more, version)

    def ended(self, index: int) -> Ended:
        """Return a finished response, to be decoded."""
        return self.number, self.prompt, index, self.responses[index]

    def samples(self, group_id: int) -> list[Sample]:
        """Convert the finished group to samples, without decoding."""
        return [_sample(group_id, self.prompt, index, done) for index, done in enumerate(self.responses)]


def _sample(group_id: int, prompt: Prompt, index: int, done: Response, text: str = "") -> Sample:
    n = len(prompt.token_ids)
    return Sample(prompt, group_id, index, prompt.token_ids + done.token_ids, [False] * n + done.drawn,
                  [0.0] * n + done.logprobs, [-1] * n + done.weight_versions, done.finish_reason, text)


def to_samples(tokenizer: PreTrainedTokenizerBase, ended: Iterable[Ended], stop: tuple[int, ...] = ()) -> list[Sample]:
    """Decode finished responses into samples. Special tokens and ``stop`` tokens stay; only the end token goes."""
    ended, kept = list(ended), set(stop) - {tokenizer.eos_token_id}
    bodies = [
        done.token_ids[:-1] if done.finish_reason == "stop" and done.token_ids[-1] not in kept else done.token_ids
        for *_, done in ended
    ]
    texts = decode_behind(tokenizer, [(prompt.token_ids, body) for (_, prompt, *_), body in zip(ended, bodies)])
    return [_sample(*each, text) for each, text in zip(ended, texts)]


def respond(engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, environment: Environment | None,
            numbered: list[tuple[int, Prompt]], seeds: list[list[int]], sampling: SamplingParams,
            phase_name: str) -> list[Sample]:
    """Generate one decoded sample per seed of each numbered prompt, with the engine's current weights.

    ``phase_name`` names the progress on the console.
    """
    requests = [Request.of(prompt, own) for (_, prompt), own in zip(numbered, seeds)]
    turns = next_turn(environment, tokenizer, lambda i, k: (numbered[i][1], []))
    bar = phase(len(requests), phase_name, "prompt")

    def finished(request: int, responses: list[Completion]) -> None:
        bar.update(1)

    completions = engine.generate(requests, sampling, finished, next_turn=turns)
    bar.close()
    version = engine.weight_version
    ended = ((*prompt, j, Response.of(done, version)) for prompt, responses in zip(numbered, completions)
             for j, done in enumerate(responses))
    return to_samples(tokenizer, ended, sampling.stop_token_ids)


def pack_samples(samples: list[Sample], n_per_prompt: int) -> Experience:
    """Pack samples into one Experience on the CPU; rewards are set later."""
    return Experience.pack(
        [each.token_ids for each in samples],
        [each.loss_mask for each in samples],
        group_ids=torch.tensor([each.group_id for each in samples], dtype=torch.long),
        sample_ids=torch.tensor([each.group_id * n_per_prompt + each.index for each in samples], dtype=torch.long),
        prompt_lens=[len(each.prompt.token_ids) for each in samples],
        truncated=torch.tensor([each.finish_reason == "length" for each in samples], dtype=torch.bool),
        weight_versions=flatten([each.weight_versions for each in samples], np.int32),
        rollout_logprobs=flatten([each.logprobs for each in samples], np.float32),
        media=[each.prompt.media for each in samples],
    )
