"""Process reward models as reward parts: a response is split into steps, whose judgements give its reward."""
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod

from lightrft.config.options import line_breaks
from lightrft.config.rm_schema import StepFormat
from lightrft.config.schema import RewardConfig
from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.datasets.sft_dataset import Encoded
from lightrft.datasets.steps import encode_steps, split_steps, step_ends
from lightrft.models.loader import load_process_reward_model
from lightrft.models.reward_model import ProcessRewardModel
from lightrft.models.tokenizer import load_tokenizer
from lightrft.rewards.base import Outcome, RewardInput
from lightrft.rewards.neural import Media, ModelReward
from lightrft.rewards.placement import ScorerSetup
from lightrft.types import Experience
from lightrft.utils.errors import UserError
from lightrft.utils.play import BETWEEN

REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "mean": lambda steps: sum(steps) / len(steps),
    "product": prod,
    "last": lambda steps: steps[-1],
    "per_step": sum,
}
"""By the value of ``--step_reward``: probabilities of the steps, at least one -> the reward."""


class StepReward(ModelReward[ProcessRewardModel]):
    """Process reward model of ``lightrft prm``; the reward is computed from the probabilities that the steps are good.

    A response without a step has the reward 0, the least that there is. Of several turns it reads those of the policy;
    each ends a step.

    Raises:
        UserError: the model has no tokenizer or no reward tokens.
    """

    def __init__(self, path: str, form: StepFormat, cfg: RewardConfig, setup: ScorerSetup) -> None:
        if not form.reward_tokens:
            raise UserError(f"--reward_pretrain {path}: the process reward model was trained without --reward_tokens, "
                            "so the token for a good step is unknown; train it with them")
        tokenizer = load_tokenizer(path)
        load = partial(load_process_reward_model, PolicyModelConfig(pretrain=path), form, form.reward_ids(tokenizer),
                       False)
        super().__init__(path, load, cfg, setup)
        self.form, self.reduce = form, REDUCTIONS[cfg.step_reward]
        self.apart = cfg.step_reward == "per_step"
        self.separator = form.step_separator if cfg.step_separator is None else line_breaks(cfg.step_separator)

    def encode(self, items: list[RewardInput], media: list[Media]) -> list[Encoded]:
        """Implement :meth:`ModelReward.encode`: as in training, a placeholder after every step."""
        reader = self.reader
        prompts = reader.renderer.encode([reader.prompt(item) for item in items],
                                         [item.template_kwargs for item in items])
        heads = [(text, reader.ids(text, ids, keys)) for (text, ids), keys in zip(prompts, media)]
        steps = [split_steps(self.separator.join(item.answers), self.form, self.separator) for item in items]
        return encode_steps(heads, steps, self.form, reader.renderer)

    def judge(self, model: ProcessRewardModel, exp: Experience) -> list[Outcome]:
        """Implement :meth:`ModelReward.judge`; the number of steps goes to the metrics."""
        (good, ) = model(exp)
        steps, judged = iter(good.exp().tolist()), exp.host.loss_mask.split(exp.lens)
        found = [[next(steps) for _ in range(int(mask.sum()))] for mask in judged]
        return [self._joined(each) for each in found]

    def _joined(self, steps: list[float]) -> Outcome:
        placed = tuple((0, reward) for reward in steps) if self.apart else ()
        return Outcome(self.reduce(steps) if steps else 0.0, extra={"steps": len(steps)}, steps=placed)

    def placed(self, item: RewardInput, outcome: Outcome) -> Outcome:
        """Override :meth:`ModelReward.placed`: each step ends with its last visible character."""
        if not outcome.steps:
            return outcome
        starts = accumulate((len(text) + len(BETWEEN) for text in item.answers), initial=0)
        ends = [start + end for start, text in zip(starts, item.answers)
                for end in step_ends(text, self.form, self.separator)]  # yapf: disable
        return replace(outcome, steps=tuple((end, reward) for end, (_, reward) in zip(ends, outcome.steps)))
