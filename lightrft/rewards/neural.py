"""Reward models as reward parts: prompts and responses in the model's own words, scored in packed passes."""
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from math import isfinite
from typing import Generic, TypeVar

import torch

from lightrft.config.schema import Config, DataConfig, RewardConfig
from lightrft.datasets.records import Message
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.sft_dataset import answered, encode_all, Encoded
from lightrft.models.loader import context_of, load_scorer
from lightrft.models.packed_model import PackedModel
from lightrft.models.reward_model import RewardModel
from lightrft.models.tokenizer import load_tokenizer
from lightrft.rewards.base import Outcome, RewardInput
from lightrft.rewards.timeouts import GroupBudget
from lightrft.strategy.host_buffers import VisitingWeights
from lightrft.strategy.mixed_precision import round_frozen
from lightrft.types import Experience
from lightrft.utils.errors import UserError


@dataclass(frozen=True)
class ScorerSetup:
    """Device and type of reward models, the most tokens of one pass, and the longest text (0: the positions of the
    model); each rank holds the models whole."""
    device: torch.device = torch.device("cpu")
    bf16: bool = False
    max_tokens: int = 16384
    max_len: int = 0

    @classmethod
    def of(cls, config: Config, device: torch.device) -> "ScorerSetup":
        """Return the setup that the options ask for."""
        return cls(device, bool(config.model.bf16), config.train.max_tokens_per_micro_batch)


Model = TypeVar("Model", bound=PackedModel)


class ModelReward(ABC, Generic[Model]):
    """Reward model that scores a queue of responses at once, when the first score is waited for.

    Args:
        path: folder or hub id of the model.
        model: that model, frozen.
        cfg: whether models rest in host memory between passes.
    """

    def __init__(self, path: str, model: Model, cfg: RewardConfig, setup: ScorerSetup) -> None:
        self.path, self.model, self.setup = path, model.eval(), setup
        self.most = min((limit for limit in (context_of(path), setup.max_len) if limit), default=0)  # tokens; 0: any
        if setup.bf16:
            round_frozen(self.model)
        self.weights = VisitingWeights(self.model) if cfg.reward_offload else None
        if self.weights is None:
            self.model.to(setup.device)
        self.renderer = Renderer(DataConfig(), load_tokenizer(path))
        self._queue: list[tuple[RewardInput, Future[list[Outcome]]]] = []

    @abstractmethod
    def encode(self, items: list[RewardInput]) -> list[Encoded]:
        """Tokenize prompts and responses; the mask is True where :meth:`judge` reads the model.

        Raises:
            UserError: a prompt has pictures or sounds.
        """

    @abstractmethod
    def judge(self, exp: Experience) -> list[Outcome]:
        """Return the outcomes of packed sequences, in order; ``exp.loss_mask`` is the mask of :meth:`encode`."""

    def submit(self, inputs: list[RewardInput], budgets: list[GroupBudget]) -> "list[Future[list[Outcome]]]":
        """Queue responses; :meth:`flush` scores them."""
        futures: list[Future[list[Outcome]]] = [Future() for _ in inputs]
        self._queue += zip(inputs, futures, strict=True)
        return futures

    def flush(self) -> None:
        """Score all that is queued. A response that is too long for the model stays unscored."""
        queue, self._queue = self._queue, []
        if not queue:
            return
        rows = self.encode([item for item, _ in queue])
        fitting = [i for i, (ids, _) in enumerate(rows) if len(ids) <= (self.most or len(ids))]
        found = dict(zip(fitting, self.score([rows[i] for i in fitting])))
        for i, (item, future) in enumerate(queue):
            future.set_result([self.placed(item, self._outcome(found.get(i), len(rows[i][0])))])

    def placed(self, item: RewardInput, outcome: Outcome) -> Outcome:
        """Return the outcome of a response, with the places of its steps if they have rewards of their own."""
        return outcome

    def _outcome(self, found: Outcome | None, length: int) -> Outcome:
        if found is None:
            return Outcome(
                None, "too_long", f"{length} tokens are more than {self.most}, the positions of "
                f"{self.path!r} or the limit of its server")
        if found.value is None or not isfinite(found.value):
            return Outcome(None, "not_finite", f"the reward of {self.path!r} is {found.value}")
        return found

    @torch.no_grad()
    def score(self, rows: list[Encoded]) -> list[Outcome]:
        """Return the outcomes of tokenized sequences."""
        found: list[Outcome] = []
        if self.weights is not None:
            self.weights.to(self.setup.device)
        for part in _cut([len(ids) for ids, _ in rows], self.setup.max_tokens):
            exp = Experience.pack([rows[i][0] for i in part], [rows[i][1] for i in part])
            found += self.judge(exp.to(self.setup.device))
        if self.weights is not None:
            self.weights.to(torch.device("cpu"))
        return found


class NeuralReward(ModelReward[RewardModel]):
    """Scalar reward model of :func:`lightrft.models.loader.load_scorer`; ``cfg`` also says if rewards are normalised.

    Raises:
        UserError: the model has no head, no tokenizer, or no moments to normalise with.
    """

    def __init__(self, path: str, cfg: RewardConfig, setup: ScorerSetup) -> None:
        super().__init__(path, load_scorer(path), cfg, setup)
        head = self.model.head
        if cfg.normalize_reward and not head.measured:
            raise UserError(f"--normalize_reward: {path!r} has no mean and std of rewards in its config.json: train it "
                            "with --eval_data, or drop the option")
        self.mean, self.std = (head.mean, head.std) if cfg.normalize_reward else (0.0, 1.0)

    def encode(self, items: list[RewardInput]) -> list[Encoded]:
        """Implement :meth:`ModelReward.encode`: with the model's own template, up to the end token of the response."""
        chats = [answered(prompt_of(item, self.path), item.response, self.renderer, "a response") for item in items]
        ends = [(ids, mask, len(mask) - mask[::-1].index(True)) for ids, mask in encode_all(chats, self.renderer, None)]
        return [(ids[:end], mask[:end]) for ids, mask, end in ends]

    def judge(self, exp: Experience) -> list[Outcome]:
        """Implement :meth:`ModelReward.judge`: one score per sequence."""
        return [Outcome(score) for score in ((self.model(exp)[:, 0] - self.mean) / self.std).tolist()]


def prompt_of(item: RewardInput, path: str) -> str | list[Message]:
    """Return the prompt as text or messages; raise a :class:`UserError` if it has pictures or sounds."""
    if any(isinstance(turn.get("content"), list) and any(part.get("type") != "text" for part in turn["content"])
           for turn in item.messages):  # yapf: disable
        raise UserError(f"--reward_pretrain {path}: reward models in a run read text only, and a prompt has pictures, "
                        "videos or sounds; give them with --reward and a file of your own")
    return item.messages or item.prompt


def _cut(lens: list[int], limit: int) -> Iterator[list[int]]:
    """Yield consecutive indices of at most ``limit`` tokens together; a longer sequence is alone."""
    part: list[int] = []
    for i, length in enumerate(lens):
        if part and sum(lens[j] for j in part) + length > limit:
            yield part
            part = []
        part.append(i)
    if part:
        yield part
