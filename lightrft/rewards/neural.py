"""Reward models as reward parts: prompts and responses rendered by the model's template, scored in packed passes."""
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain
from math import isfinite
from typing import Generic

import torch

from lightrft.config.schema import DataConfig, RewardConfig
from lightrft.datasets.sft_dataset import answered, encode_all, Encoded
from lightrft.models.config_json import context_of
from lightrft.models.loader import load_scorer
from lightrft.models.reward_model import RewardModel
from lightrft.models.vocabulary import check_ids, embeddings_of
from lightrft.rewards.base import Outcome, RewardInput
from lightrft.rewards.placement import Load, Model, Placement, ScorerSetup
from lightrft.rewards.prompt_reader import PromptReader
from lightrft.rewards.timeouts import GroupBudget
from lightrft.types import Experience
from lightrft.utils.errors import UserError
from lightrft.utils.tensors import runs

Media = tuple[str, ...]
_DUMMY: Encoded = ([0, 0], [False, True])  # for a pass of a rank that has nothing left


def positions_of(path: str, setup: ScorerSetup) -> int:
    """Return the most tokens that a reward model reads; 0: any number."""
    return min((limit for limit in (context_of(path), setup.max_len) if limit), default=0)


class QueuedReward(ABC, Generic[Model]):
    """Reward model that scores a queue of responses at once.

    Args:
        path: folder or hub id of the model.
        load: loads that model, frozen.
        cfg: where it rests between passes.
        rendering: of prompts.

    Attributes:
        together: it compares the responses that are submitted together.
    """
    together = False

    def __init__(self, path: str, load: Load[Model], cfg: RewardConfig, setup: ScorerSetup,
                 rendering: DataConfig | None = None) -> None:
        self.path, self.cfg, self.setup, self.most = path, cfg, setup, positions_of(path, setup)
        self.place = Placement(load, cfg, setup)
        self.reader = PromptReader(path, setup, rendering)
        self.model.modality.media = self.reader.store
        self.tokens = embeddings_of(self.model, path)
        self._queue: list[tuple[list[RewardInput], list[Future[list[Outcome]]]]] = []

    @property
    def model(self) -> Model:
        """The model, on whichever device it is."""
        return self.place.model

    @property
    def waiting(self) -> int:
        """Number of queued responses."""
        return sum(len(items) for items, _ in self._queue)

    def submit(self, inputs: list[RewardInput], budgets: list[GroupBudget]) -> "list[Future[list[Outcome]]]":
        """Queue responses, and return a future for each; :meth:`flush` scores them.

        Raises:
            UserError: a prompt has media that the model does not read.
        """
        futures, readable = self.reader.begin(inputs)
        self._queue.append(([inputs[i] for i in readable], [futures[i] for i in readable]))
        return futures

    def flush(self) -> None:
        """Score all that is queued; a collective of a model that ranks divide."""
        queue, self._queue = self._queue, []
        futures = [future for _, some in queue for future in some]
        for future, outcome in zip(futures, self.outcomes([items for items, _ in queue]), strict=True):
            future.set_result([outcome])

    def unread(self, ids: list[int], reserved: int = 0) -> Outcome | None:
        """Return why the model cannot read ``ids``, of a response or a request, before ``reserved`` others; None: it
        can."""
        if self.most and len(ids) + reserved > self.most:
            more = f" ({reserved} of them for the answer)" * (reserved > 0)
            return Outcome(
                None, "too_long", f"{len(ids) + reserved} tokens{more} are more than {self.most}, the "
                f"positions of {self.path!r} or the limit of its server")
        try:
            check_ids("the text", ids, self.tokens, self.reader.renderer.tokenizer)
        except UserError as error:
            return Outcome(None, "unknown_token", f"{self.path!r}: {error}")
        return None

    @abstractmethod
    def view(self, items: list[RewardInput]) -> list[Encoded]:
        """Tokenize responses, or requests about them, as the model reads them; the mask is True where it is read."""

    @abstractmethod
    def outcomes(self, groups: list[list[RewardInput]]) -> list[Outcome]:
        """Return the outcomes of all responses, in order; those submitted together form a group. A collective of a
        model that ranks divide."""


class ModelReward(QueuedReward[Model]):
    """Reward model that scores each queued response in packed passes."""

    @abstractmethod
    def encode(self, items: list[RewardInput], media: list[Media]) -> list[Encoded]:
        """Tokenize prompts with their ``media`` and responses; the mask is True where :meth:`judge` reads the model."""

    @abstractmethod
    def judge(self, model: Model, exp: Experience) -> list[Outcome]:
        """Return the outcomes of packed sequences, in order; ``exp.loss_mask`` is the mask of :meth:`encode`."""

    def view(self, items: list[RewardInput]) -> list[Encoded]:
        """Return the sequences with which the model is asked."""
        return self.encode(items, [self.reader.media(item) for item in items])

    def outcomes(self, groups: list[list[RewardInput]]) -> list[Outcome]:
        """Implement :meth:`QueuedReward.outcomes`. A response that the model cannot read stays unscored."""
        items = [*chain.from_iterable(groups)]
        if not self.place.most(len(items)):
            return []
        media = [self.reader.media(item) for item in items]
        rows = self.encode(items, media)
        outcomes = {i: outcome for i, (ids, _) in enumerate(rows) if (outcome := self.unread(ids))}
        readable = [i for i in range(len(rows)) if i not in outcomes]
        scored = self.score([rows[i] for i in readable], [media[i] for i in readable])
        outcomes |= {i: self._finite(outcome) for i, outcome in zip(readable, scored, strict=True)}
        return [self.placed(item, outcomes[i]) for i, item in enumerate(items)]

    def placed(self, item: RewardInput, outcome: Outcome) -> Outcome:
        """Return the outcome of a response, with the places of its steps if they have rewards of their own."""
        return outcome

    def _finite(self, outcome: Outcome) -> Outcome:
        if outcome.value is None or not isfinite(outcome.value):
            return Outcome(None, "not_finite", f"the reward of {self.path!r} is {outcome.value}")
        return outcome

    @torch.no_grad()
    def score(self, rows: list[Encoded], media: Sequence[Media] = ()) -> list[Outcome]:
        """Return the outcomes of tokenized sequences with the media of their prompts; a collective of a model that
        ranks divide."""
        found: list[Outcome] = []
        parts = [*runs(range(len(rows)), lambda i: len(rows[i][0]), self.setup.max_tokens)]
        with self.place.here() as model:
            for number in range(self.place.most(len(parts))):
                part = parts[number] if number < len(parts) else []
                exp = _packed([rows[i] for i in part], [media[i] for i in part] if media else [()] * len(part))
                found += self.judge(model, exp.to(self.setup.device))[:len(part)]
        return found


def _packed(rows: list[Encoded], media: list[Media]) -> Experience:
    """Pack sequences; what is before the first token that is read is the prompt, which responses of a group share."""
    rows, media = rows or [_DUMMY], media or [()]
    prompts = [mask.index(True) if True in mask else len(mask) for _, mask in rows]
    return Experience.pack([ids for ids, _ in rows], [mask for _, mask in rows], media=media, prompt_lens=prompts)


class NeuralReward(ModelReward[RewardModel]):
    """Scalar reward model of :func:`lightrft.models.loader.load_scorer`; ``cfg`` also says if rewards are normalised.

    Raises:
        UserError: the model has no head or no tokenizer.
    """

    def __init__(self, path: str, cfg: RewardConfig, setup: ScorerSetup) -> None:
        super().__init__(path, partial(load_scorer, path, prefix=setup.head), cfg, setup)
        head = self.model.head
        self.mean, self.std = (head.mean, head.std) if cfg.normalize_reward else (0.0, 1.0)

    def encode(self, items: list[RewardInput], media: list[Media]) -> list[Encoded]:
        """Implement :meth:`ModelReward.encode`: with the model's own template, up to the end token of the response; of
        several turns it reads all messages."""
        reader = self.reader
        chats = [
            replace(answered(reader.prompt(item), reader.response(item), reader.renderer, "a response"), media=keys,
                    template_kwargs=item.template_kwargs) for item, keys in zip(items, media)
        ]
        ends = [(ids, mask, len(mask) - mask[::-1].index(True))
                for ids, mask in encode_all(chats, reader.renderer, reader.store)]  # yapf: disable
        return [(ids[:end], mask[:end]) for ids, mask, end in ends]

    def judge(self, model: RewardModel, exp: Experience) -> list[Outcome]:
        """Implement :meth:`ModelReward.judge`: one score per sequence."""
        return [Outcome(score) for score in ((model(exp)[:, 0] - self.mean) / self.std).tolist()]
