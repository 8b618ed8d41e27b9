"""Language models of the run as judges: they answer a request about responses, and the answer determines the reward.

A judge of ``lightrft grm`` says which of two candidates is better, so responses to one prompt are compared with each
other. Another language model grades each response, as the text of ``--judge_template`` asks it to.
"""
import re
from abc import abstractmethod
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from lightrft.config.rm_schema import JudgeFormat
from lightrft.config.schema import DataConfig, RewardConfig, RolloutConfig
from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.datasets.judgements import ANSWERS, request, TIE, verdict
from lightrft.datasets.media import KINDS
from lightrft.datasets.prompt_rows import Message, text_of
from lightrft.datasets.sft_dataset import Encoded
from lightrft.datasets.tool_texts import calls_of, shown_tools
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.loader import load_actor
from lightrft.models.rope import grouped
from lightrft.rewards.base import Outcome, RewardInput
from lightrft.rewards.judge import JudgeForm
from lightrft.rewards.neural import Media, positions_of, QueuedReward
from lightrft.rewards.placement import ScorerSetup
from lightrft.rewards.references import ReferenceFormError
from lightrft.rewards.rules import reference_answers
from lightrft.rollout.engine import RolloutEngine, SamplingParams
from lightrft.rollout.hf.engine import engine_on
from lightrft.rollout.scheduler import generate, Round
from lightrft.rollout.weight_sync.sync import sync_weights
from lightrft.types import Episode, Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.progress import phase

POINTS = {ANSWERS[0]: (1.0, 0.0), ANSWERS[1]: (0.0, 1.0), ANSWERS[TIE]: (0.5, 0.5)}  # of the first and the second
_MARK = re.compile(f"\ufdd0({'|'.join(KINDS)})\ufdd1")  # a medium in the text of a request; both are no characters
Asked = tuple[str, Media]  # text of a request, with marks, and its media
Answer = str | Outcome  # why there is none: the judge cannot read the request


def marked(content: Any) -> str:
    """Return the text of a message, with a mark for each medium."""
    if not isinstance(content, list):
        return plain(text_of(content))
    kinds = [str(part.get("type", "text")) for part in content]
    return "".join(f"\ufdd0{kind}\ufdd1" if kind in KINDS else plain(text_of([part]))
                   for kind, part in zip(kinds, content))  # yapf: disable


def plain(text: str) -> str:
    """Remove what would be read as a mark."""
    return text.replace("\ufdd0", "").replace("\ufdd1", "")


def chat_of(text: str) -> list[Message]:
    """Return the user's turn that a request is, with a part for each mark."""
    pieces = _MARK.split(text)  # texts and, between them, kinds
    if len(pieces) == 1:
        return [{"role": "user", "content": text}]
    parts = [{"type": piece} if i % 2 else {"type": "text", "text": piece} for i, piece in enumerate(pieces)]
    return [{"role": "user", "content": [part for part in parts if part.get("text", part["type"])]}]


class GenerativeReward(QueuedReward[ActorLanguage]):
    """Language model that judges a queue of responses by generating, greedily, one answer per request.

    Args:
        rendering: of its requests.

    Raises:
        UserError: answers of ``--judge_max_len`` tokens are longer than the model reads.
    """

    def __init__(self, path: str, cfg: RewardConfig, setup: ScorerSetup, rendering: DataConfig) -> None:
        most = positions_of(path, setup)
        if 0 < most <= cfg.judge_max_len:
            raise UserError(f"--judge_max_len {cfg.judge_max_len}: {path!r} has {most} positions for a request and its "
                            f"answer; nearest valid value: a number well below {most}")
        self.room = most - cfg.judge_max_len  # tokens of a request; negative: any number
        super().__init__(path, partial(load_actor, PolicyModelConfig(pretrain=path), train=False), cfg, setup,
                         rendering)
        self._engine: RolloutEngine | None = None

    @abstractmethod
    def ask(self, items: list[RewardInput]) -> list[Asked]:
        """Write the requests about responses that were submitted together."""

    @abstractmethod
    def read(self, items: list[RewardInput], said: list[Answer]) -> list[Outcome]:
        """Return the outcome of each response; ``said``: answers to :meth:`ask`."""

    def view(self, items: list[RewardInput]) -> list[Encoded]:
        """Implement :meth:`QueuedReward.view`: the requests."""
        return [(ids, [False] * len(ids)) for ids in self.encoded(self.ask(items))]

    def outcomes(self, groups: list[list[RewardInput]]) -> list[Outcome]:
        """Ask the model about all responses at once, and read its answers."""
        asked = [self.ask(items) for items in groups]
        requests = [*chain.from_iterable(asked)]
        said = iter(self.answers(requests) if self.place.most(len(requests)) else ())
        found = (self.read(items, [next(said) for _ in some]) for items, some in zip(groups, asked))
        return [*chain.from_iterable(found)]

    def encoded(self, asked: list[Asked]) -> list[list[int]]:
        """Tokenize requests, up to the start of the answer."""
        rendered = self.reader.renderer.encode([chat_of(text) for text, _ in asked])
        return [self.reader.ids(text, ids, media) for (text, ids), (_, media) in zip(rendered, asked)]

    def answers(self, asked: list[Asked]) -> list[Answer]:
        """Generate the answers to requests. A collective of a divided model."""
        ids, decode, most = self.encoded(asked), self.reader.renderer.tokenizer.decode, self.cfg.judge_max_len
        said: dict[int, Answer] = {i: error for i, row in enumerate(ids) if (error := self.unread(row, most))}
        readable = [i for i in range(len(ids)) if i not in said]
        with self.awake() as engine:
            bar = phase(len(readable), "judging", "request")

            def heard(finished: Round) -> None:
                bar.update(len(finished.groups))

            for group in grouped(self.model.hf_model, (len(ids[i]) + most for i in readable)):
                episodes = [Episode(Prompt("", ids[i], "", media=asked[i][1]), i, 0, role="judge")
                            for i in (readable[number] for number in group)]  # yapf: disable
                generate(engine, episodes, SamplingParams(most, 0.0), heard=heard)
                for episode in episodes:
                    said[episode.group_id] = str(decode(episode.response_ids, skip_special_tokens=True))
            bar.close()
        return [said[i] for i in range(len(asked))]

    @contextmanager
    def awake(self) -> Iterator[RolloutEngine]:
        """Context of an engine with the weights: on the model itself, or on a whole copy of a divided one, whose memory
        is there in this context alone."""
        place, setup = self.place, self.setup
        with place.here() as model:
            if self._engine is None:
                lengths = RolloutConfig(prompt_max_len=max(self.room, 1), generate_max_len=self.cfg.judge_max_len)
                self._engine = engine_on(model, setup.device, lengths, self.reader.renderer.tokenizer, setup.bf16,
                                         fixed=False)
            self._engine.wake()
            if place.prepared is not None and setup.strategy is not None:
                sync_weights(setup.strategy, place.prepared, self._engine, 0)
            yield self._engine
            self._engine.sleep()
            if place.weights is not None:  # graphs of its steps hold addresses that the weights will not have again
                self._engine = None


class GradingJudge(GenerativeReward):
    """Language model that grades each response, as the judge behind ``--judge_url`` does."""

    def __init__(self, path: str, cfg: RewardConfig, setup: ScorerSetup) -> None:
        self.form = JudgeForm(cfg)
        super().__init__(path, cfg, setup, DataConfig())

    def ask(self, items: list[RewardInput]) -> list[Asked]:
        """Implement :meth:`GenerativeReward.ask`: one request per response."""
        texts = [self.form.prompt(replace(item, response=plain(item.response)), marked) for item in items]
        return [(text, self.reader.media(item) if _MARK.search(text) else ()) for text, item in zip(texts, items)]

    def read(self, items: list[RewardInput], said: list[Answer]) -> list[Outcome]:
        """Implement :meth:`GenerativeReward.read`: the score that the answer has."""
        return [answer if isinstance(answer, Outcome) else self.form.read(answer) for answer in said]


@dataclass
class Standing:
    """Points of one response in its comparisons, by its place in the request; None: the answer is none of those known.
    """
    points: dict[str, float | None] = field(default_factory=dict)
    error: Outcome | None = None

    def outcome(self) -> Outcome:
        """Return the mean of the points; without any, the response is unscored."""
        known = {place: value for place, value in self.points.items() if value is not None}
        extra = {"answered": len(known) / len(self.points), **known} if self.points else {}
        if not known:
            error = self.error or Outcome(None, "no_rival", "the only response to its prompt, and no reference answer")
            return Outcome(None, error.error, error.detail, extra)
        return Outcome(sum(known.values()) / len(known), extra=extra)


class ComparingJudge(GenerativeReward):
    """Judge of ``lightrft grm``. The reward of a response is the mean of its points: 1 where it is better, 1/2 where
    both are equally good, 0 where the other one is better.

    The responses to a prompt form a ring: each is compared with the one after it. So each comes first once and second
    once, and a position bias of the judge favours none. A single response is compared, in both orders, with the
    reference answer of its row.
    """
    together = True

    def __init__(self, path: str, form: JudgeFormat, cfg: RewardConfig, setup: ScorerSetup) -> None:
        self.form = form
        super().__init__(
            path, cfg, setup,
            DataConfig(system_prompt=form.system_prompt, input_template=form.input_template,
                       chat_template_kwargs=form.chat_template_kwargs))

    def ask(self, items: list[RewardInput]) -> list[Asked]:
        """Implement :meth:`GenerativeReward.ask`: one request per comparison of different texts."""
        return [(request(self.form.instruction, _text(items[min(one)]), plain(first),
                         plain(second)), self.reader.media(items[min(one)]))
                for one, (first, second) in _comparisons(items) if first != second]

    def read(self, items: list[RewardInput], said: list[Answer]) -> list[Outcome]:
        """Implement :meth:`GenerativeReward.read`; equal texts are equally good."""
        standings, answers = [Standing() for _ in items], iter(said)
        for pair, (first, second) in _comparisons(items):
            answer = next(answers) if first != second else f"<answer>{ANSWERS[TIE]}</answer>"
            points = None if isinstance(answer, Outcome) else POINTS.get(verdict(answer))
            for place, index in zip(("first", "second"), pair):
                if index < len(items):
                    standings[index].points[place] = None if points is None else points[place == "second"]
                    if points is None:
                        standings[index].error = answer if isinstance(answer, Outcome) else Outcome(
                            None, "no_answer", f"{self.path!r} gave none of the answers {', '.join(ANSWERS)}: "
                            f"{answer[-300:]!r}")
        return [standing.outcome() for standing in standings]


Comparison = tuple[tuple[int, int], tuple[str, str]]  # indices of both candidates and their texts


def _comparisons(items: list[RewardInput]) -> Iterator[Comparison]:
    """Yield the comparisons of responses; a reference answer has an index behind them all."""
    groups: dict[tuple[Hashable, str], list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault((item.group, repr(item.messages)), []).append(i)
    for group in groups.values():
        for i, j in zip(group, group[1:] + group[:1]) if len(group) > 1 else ():
            yield (i, j), (items[i].response, items[j].response)
        known = _answers_to(items[group[0]]) if len(group) == 1 else []
        for text in known[:1]:
            yield (group[0], len(items)), (items[group[0]].response, text)
            yield (len(items), group[0]), (text, items[group[0]].response)


def _answers_to(item: RewardInput) -> list[str]:
    """Return the accepted answers; none of a reference in a form that cannot be read, to which there is no rival."""
    try:
        return reference_answers(item.reference)
    except ReferenceFormError:
        return []


def _text(item: RewardInput) -> str:
    """Return the prompt in the form of a judge's training data: the text of all its turns."""
    turns = (marked(turn["content"]) + plain(calls_of(turn)) for turn in item.messages)
    return plain(shown_tools(item.template_kwargs)) * bool(item.messages) + "\n".join(turns) or plain(item.prompt)
