"""Episodes: responses to prompts, from the request to the batch, in branches where an environment forks one."""
import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

from lightrft.types.branches import Branch, load_segments, Segment, TokenSequence
from lightrft.utils.play import Play, Shown
from lightrft.utils.prompt import Prompt
from lightrft.utils.score import Score


def sample_seed(*path: int | str) -> int:
    """Hash a path such as (run seed, step, group, sample) to a 63-bit seed, the same on every rank and machine."""
    digest = hashlib.blake2b("/".join(map(str, path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Key(NamedTuple):
    """Name of an episode: its role ("sample", "greedy", "evaluation", "canary", "judge", "chat" ...), the number of its
    prompt and its index among the responses to that. Roles keep the episodes of several callers of one engine apart."""
    role: str
    group: int
    index: int  # type: ignore[assignment]  # tuple has a method of that name


@dataclass
class Episode(TokenSequence):
    """One response to a prompt. Lists per token hold prompt and response; those of ``segments`` the response alone.

    An environment may fork it: it rewrites the conversation, and the response goes on behind another prompt. ``prompt``
    and ``segments`` are those of the current branch, ``closed`` the branches before; all have one score and one
    advantage. Indices of tokens (``steps``, rewards of turns) count those of all branches, as in :attr:`joined`.

    ``finish_reason`` is "stop", "length", or "abort" while the response is unfinished. ``text`` is the response,
    decoded without special tokens at its end. ``extra`` holds further numbers, declared by
    :func:`lightrft.types.number`.

    ``score`` is None until the rewards have come. ``steps`` are its rewards of steps, with the tokens of the sequence
    that end them. ``greedy`` holds reward and length of the greedy response to the prompt, where the estimator needs
    them. ``seed`` is that of the noise: equal seeds and weights give equal responses. ``play``: what its environment
    did, if it has one.
    """
    prompt: Prompt
    group_id: int  # number of the prompt: in the rollout batch, or in all draws of the run
    index: int  # of the response in its group
    segments: list[Segment] = field(default_factory=list)
    finish_reason: str = "abort"
    text: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    score: Score | None = None
    steps: list[tuple[int, float]] = field(default_factory=list)
    greedy: tuple[float | None, int] | None = None
    role: str = "sample"
    seed: int = 0
    play: Play | None = None
    closed: list[Branch] = field(default_factory=list)

    @classmethod
    def of(cls, prompt: Prompt, group_id: int, index: int, drawn: Segment, finish_reason: str) -> "Episode":
        """Make an episode of drawn tokens."""
        episode = cls(prompt, group_id, index)
        episode.add([drawn], finish_reason)
        return episode

    @classmethod
    def group(cls, prompt: Prompt, group_id: int, seeds: Iterable[int], role: str = "sample") -> list["Episode"]:
        """Make a group of empty responses to a prompt, one per seed."""
        return [cls(prompt, group_id, index, role=role, seed=seed) for index, seed in enumerate(seeds)]

    @classmethod
    def load(cls, prompt: Prompt, group_id: int, index: int, state: dict[str, Any]) -> "Episode":
        """Restore an episode from :meth:`state`; checkpoints of earlier versions have no text, numbers, score and seed.
        """
        episode = cls(prompt, group_id, index, load_segments(state), state["finish_reason"], state.get("text", ""),
                      state.get("extra", {}), seed=state.get("seed", 0),
                      play=Play.load(state.get("play")))  # yapf: disable
        episode.closed = [Branch.load(prompt, branch) for branch in state.get("closed", ())]
        if state.get("score"):
            episode.score, episode.greedy = Score(**state["score"]), state["greedy"] and tuple(state["greedy"])
            episode.steps = [(end, reward) for end, reward in state["steps"]]
        return episode

    def state(self) -> dict[str, Any]:
        """Return the response, as lists per token, and its score, for a checkpoint. It has the prompts of closed
        branches; the current one is saved beside it."""
        return self.tokens_state() | {
            "finish_reason": self.finish_reason, "text": self.text, "extra": self.extra,
            "score": self.score and asdict(self.score), "steps": self.steps, "greedy": self.greedy, "seed": self.seed,
            "play": self.play and asdict(self.play), "closed": [branch.state() for branch in self.closed]
        }  # yapf: disable

    @property
    def key(self) -> Key:
        """Name of the episode among all of an engine."""
        return Key(self.role, self.group_id, self.index)

    def add(self, segments: Iterable[Segment], finish_reason: str = "abort") -> None:
        """Append tokens; after an "abort" the response goes on."""
        for segment in segments:
            segment.extend(self.segments)
        self.finish_reason = finish_reason

    def give(self, turn: list[int] | Segment) -> None:
        """Append tokens that the policy did not draw, after which the response goes on."""
        self.add([Segment.given(turn)])

    @property
    def open(self) -> bool:
        """True while the response is unfinished."""
        return self.finish_reason == "abort"

    @property
    def reward(self) -> float | None:
        """Reward of the response; None: unscored, which is not a reward of 0."""
        return None if self.score is None else self.score.total

    @property
    def truncated(self) -> bool:
        """True if the response hit the length limit."""
        return self.finish_reason == "length"

    @property
    def branches(self) -> list[Branch]:
        """The sequences of the episode, in the order in which they were drawn. One behind a fork is none of them if the
        response ended before anything was drawn there."""
        if self.closed and not self.open and not any(segment.drawn for segment in self.segments):
            return [*self.closed]
        return [*self.closed, Branch(self.prompt, self.segments, self.seed)]

    @property
    def first_prompt(self) -> Prompt:
        """Prompt of the first branch, behind which the whole response stands."""
        return self.closed[0].prompt if self.closed else self.prompt

    def fork(self, prompt: Prompt) -> None:
        """Go on behind another ``prompt`` of the same row: what was said so far, rewritten. The noise is another one
        from here on. A branch in which nothing was drawn is dropped: it has nothing to learn from."""
        if any(segment.drawn for segment in self.segments):
            self.closed.append(Branch(self.prompt, self.segments, self.seed))
            self.seed = sample_seed(self.seed, "branch", len(self.closed))
        self.prompt, self.segments, self.finish_reason = prompt, [], "abort"

    @property
    def joined(self) -> "Episode":
        """The whole response as one sequence, its branches one after another: the prompts of the later ones are given
        tokens in it. Without a fork it is the episode itself."""
        if not self.closed:
            return self
        return replace(self, prompt=self.first_prompt, segments=self.pieces[1:], closed=[])

    @property
    def pieces(self) -> list[Segment]:
        """The prompts, as given tokens with their media, and the segments behind each, of all branches."""
        if not self.closed:
            return super().pieces
        return [*chain.from_iterable(branch.pieces for branch in self.branches)]

    @property
    def forks(self) -> tuple[tuple[int, int], ...]:
        """Start and stop in :attr:`joined` of the prompts of all branches but the first."""
        if not self.closed:
            return ()
        starts = accumulate(branch.num_tokens for branch in self.closed)
        return tuple((start, start + branch.prompt_len) for start, branch in zip(starts, self.branches[1:]))

    @property
    def offset(self) -> int:
        """Index in :attr:`joined` of the first token of the current branch, behind all tokens of the closed ones."""
        return sum(branch.num_tokens for branch in self.closed)

    @property
    def drawn_len(self) -> int:
        """Number of tokens that the policy drew, in all branches; ``response_len`` is that of the current one alone."""
        return super().drawn_len + sum(branch.drawn_len for branch in self.closed)

    @property
    def shown(self) -> list[Shown]:
        """Pictures that the environment has shown behind the prompt."""
        by_key = {} if self.play is None else {picture.key: picture for picture in self.play.shown}
        return [by_key[key] for span in self.media_spans for key in span.keys if key in by_key]

    @property
    def pictures(self) -> tuple[Shown, ...]:
        """All pictures that the environment has shown, those of the prompt first."""
        return () if self.play is None else tuple(self.play.shown)


def prompt_groups(episodes: Iterable[Episode]) -> list[list[Episode]]:
    """Return the neighbours of one role and group that have the same prompt."""
    alike = attrgetter("role", "group_id", "prompt.token_ids", "prompt.media")
    return [[*group] for _, group in groupby(episodes, alike)]


def unfinished(episodes: Iterable[Episode]) -> list[Episode]:
    """Return the episodes whose response is unfinished."""
    return [episode for episode in episodes if episode.open]


def by_group(episodes: Iterable[Episode]) -> dict[int, list[Episode]]:
    """Return the episodes of each group by its number; groups and episodes keep their order."""
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, []).append(episode)
    return groups
