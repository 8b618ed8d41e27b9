"""The greedy response of every prompt, whose reward is the baseline of ReMax (arXiv:2310.10505)."""
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.rewards.manager import RewardManager
from lightrft.rollout.engine import Request, RolloutEngine, SamplingParams
from lightrft.trainer.samples import reward_input, to_samples
from lightrft.types import Sample


class GreedyBaseline:
    """Generates and scores one greedy response per prompt, with the weights and the rewards of the samples.

    It is not a sample: it is not trained on, and it enters no group and no metric of samples.
    """

    def __init__(self, engine: RolloutEngine, rewards: RewardManager, tokenizer: PreTrainedTokenizerBase) -> None:
        self.engine, self.rewards, self.tokenizer = engine, rewards, tokenizer

    def start(self, samples: list[Sample], sampling: SamplingParams) -> Callable[[], dict[int, dict[str, Any]]]:
        """Answer the prompts of this rank's ``samples`` greedily and start scoring.

        Args:
            sampling: parameters of the samples; length and stop tokens are taken from them.

        Returns:
            A function that waits for the scores: group id -> entries for the rows of the group.
        """
        params = SamplingParams(sampling.max_new_tokens, temperature=0.0, stop_token_ids=sampling.stop_token_ids)
        prompts = {sample.group_id: sample.prompt for sample in samples}
        requests = [Request(prompt.token_ids, [0], prompt.mm_inputs) for prompt in prompts.values()]
        ended = ((*prompt, 0, done[0]) for prompt, done in zip(prompts.items(), self.engine.generate(requests, params)))
        greedy = to_samples(self.tokenizer, ended, self.engine.weight_version, params.stop_token_ids)
        handle = self.rewards.submit([reward_input(sample.prompt, sample.text) for sample in greedy])
        return lambda: {
            sample.group_id: {"greedy_reward": score.total, "greedy_length": sample.response_len}
            for sample, score in zip(greedy, self.rewards.wait(handle))
        }
