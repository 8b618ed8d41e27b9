"""Episodes with an environment: sessions in workers, turns from tokens, answers back to tokens."""
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby, takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import DataConfig
from lightrft.datasets.control_tokens import special_ids
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.token_texts import decode_behind
from lightrft.environments.answers import PendingAnswer, PendingLastWord, play_of
from lightrft.environments.base import Failure, Message, Step, Task, ToolCall, Turn as TurnOfPolicy
from lightrft.environments.chat_format import ChatFormat
from lightrft.environments.media import Pictures
from lightrft.environments.opened_prompt import opened_prompt
from lightrft.environments.pool import Answer, EnvironmentPool
from lightrft.environments.rewritten_prompt import news_in, rewritten_prompt
from lightrft.rollout.turns import Given, NextTurn, PendingTurn, Turn
from lightrft.types import Branch, Episode, Key, Prompt, Segment
from lightrft.types.branches import REWRITTEN
from lightrft.utils.errors import UserError
from lightrft.utils.play import Play, Shown
from lightrft.utils.trajectory_saver import shorten
from lightrft.utils.watchdog import tick

logger = logging.getLogger(__name__)

QUICK_S = 0.01  # answers that come so soon resume their responses in the same round, so quick runs repeat to the bit
_LOOK_S = 1.0  # between two signs of life while resets are waited for


class Player:
    """Plays episodes in the environments of a pool: one session each, opened before its first token.

    Args:
        form: reads turns and writes messages; None: the environment reads and writes text with the marks of the
            template.
        prompt_max_len: longest prompt, with the messages of ``reset``, in tokens.
        media: store of the media of the policy; None: it reads text alone.
        images: most pictures of the environment in a response.
    """

    def __init__(self, pool: EnvironmentPool, tokenizer: PreTrainedTokenizerBase, form: ChatFormat | None,
                 max_turns: int, prompt_max_len: int, media: MediaStore | None = None, images: int = 0) -> None:
        self.pool, self.tokenizer, self.form = pool, tokenizer, form
        self.max_turns, self.prompt_max_len, self._ends = max_turns, prompt_max_len, special_ids(tokenizer)
        self.pictures = Pictures(media, images, Renderer(DataConfig(), tokenizer))
        self._sessions: dict[Key, tuple[Play, int]] = {}  # numbers, with the records that they write
        self._logged: set[str] = set()
        self._quick = True  # no answer was late so far

    @contextmanager
    def playing(self, episodes: Sequence[Episode], max_new_tokens: int) -> Iterator[NextTurn]:
        """Open the sessions of episodes that have none, and yield what gives their turns; close those of episodes that
        are finished then."""
        self._open([episode for episode in episodes if not self._plays(episode)], max_new_tokens)
        try:
            yield lambda ended: self._ask(ended, max_new_tokens)
        finally:
            for episode in episodes:
                if not episode.open:
                    self._close(episode)

    def leave(self, episodes: Iterable[Episode]) -> None:
        """Close the sessions of episodes that go on at another rank, where their turns are played again."""
        for episode in episodes:
            self._close(episode)

    @property
    def role(self) -> str:
        """Role of the messages that answer most turns."""
        return "tool" if self.pool.info.tools else "user"

    def check(self, prompt: Prompt) -> None:
        """Raise a :class:`UserError` if a prompt does not show the tools, or is no chat that messages could follow."""
        if self.pool.info.tools and not prompt.template_kwargs.get("tools"):
            raise UserError("the prompts do not show the tools of the environment. Remedy: PromptsDataset(..., "
                            "tools=pool.info.tools)")
        if self.form is not None and not prompt.messages:
            raise UserError(
                f"--environment {self.pool.spec.title} answers with messages, and the prompt {prompt.uid!r} "
                "is a text. Write prompts as messages, or use --apply_chat_template")

    def shutdown(self) -> None:
        """Kill the workers."""
        self.pool.shutdown()

    def log_once(self, failure: Failure) -> None:
        """Log the first failure of each cause.

        Raises:
            UserError: no response could be played with this environment.
        """
        if failure.cause == "refused":
            raise UserError(f"--environment {self.pool.spec.title}: {failure.detail}")
        if failure.cause not in self._logged:
            self._logged.add(failure.cause)
            logger.warning(
                "an environment failed (%s), and its response is left unscored; further ones are only "
                "counted, as env/%s\n%s", failure.cause, failure.cause, failure.detail)

    def _last_word(self, episode: Episode, turn: Turn) -> "Turn | PendingTurn":
        """Tell an environment that its response ends without ``turn``, its answer."""
        asked, answer = time.monotonic(), self.pool.cut_short(self._sessions[episode.key][1])
        pending = PendingLastWord(self, episode, answer, asked, turn)
        self._wait_briefly([answer])
        return pending.result() if answer.done() else pending

    def following(self, pending: PendingAnswer, answer: Step) -> "Turn | PendingTurn":
        """Return the tokens of an answer, and of its pictures, or the prompt that takes the place of what was said;
        without room for these, the last word of its environment."""
        episode, play = pending.episode, play_of(pending.episode)
        if play.turns >= self.max_turns:
            play.limit = "max_turns"
            return None
        if answer.history:
            return self._forked(episode, play, answer.history)
        shown = self.pictures.of(answer)
        if len(play.shown) + len(shown) > self.pictures.most:
            play.limit = "no_room"
            return self._last_word(episode, None)
        given = self._given_by(episode, pending.drawn, answer, shown)
        if given is None or len(Segment.given(given).token_ids) >= pending.room:
            play.limit = "open_thought" if given is None else "no_room"
            return self._last_word(episode, given)
        play.messages += self._read_of(answer)
        play.shown += shown
        return given

    def _forked(self, episode: Episode, play: Play, history: list[Message]) -> "Turn | PendingTurn":
        """Return the prompt of the conversation that goes on in place of what was said; without room for it, the last
        word of its environment."""
        assert self.form is not None, "an interface of text has no histories"
        first = episode.first_prompt
        row_media = first.media if play.asked is None else play.asked.get("media", first.media)
        prompt, pictures = rewritten_prompt(episode.prompt, history, row_media, self.form, self.pictures)
        seen = {one.key for one in play.shown}
        shown = [*play.shown, *({one.key: one for one in pictures if one.key not in seen}.values())]
        if len(prompt.token_ids) > self.prompt_max_len or max(len(shown), len(pictures)) > self.pictures.most:
            play.limit, episode.finish_reason = "no_room", "length"
            return self._last_word(episode, None)
        play.messages += news_in(prompt.messages, [*first.messages, *play.messages])
        play.shown = shown
        return prompt

    def _given_by(self, episode: Episode, drawn: int, answer: Step, shown: Sequence[Shown]) -> Given | None:
        """Return what an answer appends behind the last ``drawn`` tokens of an episode."""
        if answer.text is not None:
            return self.pictures.written(answer.text, shown)
        if self.form is None:
            raise UserError(f"--environment {self.pool.spec.title} answers with messages, and its interface "
                            f"({self.pool.info.kind}) is one of text")
        ids, messages = episode.token_ids, answer.messages or []
        assert not isinstance(messages, str), "the worker has made messages of it"
        if shown:
            return self.pictures.segment(self.form.continuation_text(ids[-drawn:], messages), shown)
        return self.form.continuation(ids[:-drawn], ids[-drawn:], messages)

    def _read_of(self, answer: Step) -> list[Message]:
        """Return the messages of an answer as the policy reads them."""
        if answer.text is not None or self.form is None:
            return [{"role": "environment", "content": answer.text}]
        assert not isinstance(answer.messages, str), "the worker has made messages of it"
        return self.form.safe(answer.messages or [])

    def _open(self, episodes: Sequence[Episode], max_new_tokens: int) -> None:
        """Begin sessions, all at once. Those of episodes from a checkpoint play the turns that these have again; where
        an environment answers otherwise now, its response begins anew."""
        lost = [(episode, episode.branches) for episode in episodes
                if episode.play is not None and (episode.segments or episode.closed)]  # yapf: disable
        self._begin_all(episodes)
        again = [(episode, branches) for episode, branches in lost if _same(episode.prompt, branches[0].prompt)]
        self._replay(again, max_new_tokens)
        anew = [episode for episode, branches in lost if _progress(episode.branches) < _progress(branches)]
        for episode in anew:
            play_of(episode).restarts += 1
        self._begin_all(anew)

    def _begin_all(self, episodes: Sequence[Episode]) -> None:
        """Begin sessions, all at once, and add the messages of ``reset`` to the prompts."""
        groups = [[*run] for _, run in groupby(episodes, lambda episode: episode.key[:2])]
        resets = [[self._reset(episode, group[0].seed) for episode in group] for group in groups]
        _await(future for futures in resets for future in futures)
        for group, futures in zip(groups, resets):
            self._begin(group, [future.result() for future in futures])

    def _replay(self, episodes: Sequence[tuple[Episode, list[Branch]]], max_new_tokens: int) -> None:
        """Play the turns in ``branches`` again, at once for all episodes. Those whose answers are the same have all
        branches then."""
        running = [self._turns_again(episode, branches, max_new_tokens) for episode, branches in episodes]
        while running:
            asked = [next(turns, None) for turns in running]
            _await(pending.answer for pending in asked if pending is not None)
            running = [turns for turns, pending in zip(running, asked) if pending is not None]

    def _turns_again(self, episode: Episode, branches: list[Branch], max_new_tokens: int) -> Iterator[PendingAnswer]:
        """Give an episode its segments; yield the pending answer to each turn, up to one that differs."""
        for turn in _turns_of(branches):
            if isinstance(turn, Prompt) or not turn[0].drawn:
                pending = self._asked(episode, max_new_tokens)
                if pending is None:
                    return
                yield pending
                if not _same(pending.result(), turn):
                    return
                play_of(episode).replays += 1
            if isinstance(turn, Prompt):
                episode.fork(turn)
            else:
                episode.segments += turn

    def _plays(self, episode: Episode) -> bool:
        """Return True if an episode has a session here; one from a checkpoint or from another rank has none."""
        play, _ = self._sessions.get(episode.key, (None, 0))
        return play is not None and play is episode.play

    def _reset(self, episode: Episode, seed: int) -> "Future[Answer]":
        """Begin the session of an episode. One whose session was lost begins again, from its prompt as it was."""
        self._close(episode)
        play = Play(seed=seed)
        if (lost := episode.play) is not None:
            play = Play(seed=lost.seed, restarts=lost.restarts, replays=lost.replays)
            first, asked = episode.branches[0], lost.asked or {}
            media = {"media": tuple(asked["media"])} if "media" in asked else {}  # a list in JSON
            episode.prompt, episode.seed = replace(first.prompt, **asked | media), first.seed
            episode.finish_reason = "abort"
        episode.play, episode.segments, episode.closed, prompt = play, [], [], episode.prompt
        task = Task(prompt.uid, prompt.text, prompt.messages, prompt.data_source, prompt.label, prompt.reference,
                    prompt.columns, self.pictures.most, self.max_turns)  # yapf: disable
        session, future = self.pool.reset(task, (play.seed ^ _APART) & _SEEDS)
        self._sessions[episode.key] = play, session
        return future

    def _begin(self, group: list[Episode], answers: list[Answer]) -> None:
        """Add the messages of ``reset``, the same for a group, to the prompt of its episodes.

        Raises:
            UserError: they differ within the group, or the prompt is a text.
        """
        begun = [answer for answer in answers if isinstance(answer, Step)]
        if any(_said(answer) != _said(begun[0]) for answer in begun):
            raise UserError(
                f"--environment {self.pool.spec.title}: reset(prompt, seed) gave different messages for the "
                f"prompt {group[0].prompt.uid!r} and one seed: {shorten(repr(_said(begun[0])), 500)} and others. The "
                "responses to a prompt are compared, so it has to be the same for all; draw with the seed")
        asked = prompt = group[0].prompt
        shown = list[Shown]()
        if begun and _said(begun[0]):
            opened = self._opened(asked, begun[0])
            if isinstance(opened, Failure):
                answers = [opened for _ in answers]
            else:
                prompt, shown = opened
        for episode, answer in zip(group, answers):
            if prompt is not asked:
                play_of(episode).asked = {name: getattr(asked, name) for name in REWRITTEN}
            episode.prompt, play_of(episode).shown = prompt, [*shown]
            if isinstance(answer, Failure):
                play_of(episode).failure = answer.cause
                self.log_once(answer)

    def _opened(self, prompt: Prompt, answer: Step) -> "tuple[Prompt, list[Shown]] | Failure":
        if answer.text is None and (self.form is None or not prompt.messages):
            raise UserError(f"--environment {self.pool.spec.title}: reset() gave messages, and the prompt "
                            f"{prompt.uid!r} is a text; write it as messages, or use --apply_chat_template")
        return opened_prompt(prompt, answer, self.form, self.pictures, self.prompt_max_len,
                             self.pool.info.continues_prompt)  # yapf: disable

    def _ask(self, ended: list[Episode], max_new_tokens: int) -> "list[Turn | PendingAnswer]":
        """Pass the last turns of episodes to their sessions; one without an environment ends."""
        asked = [self._asked(episode, max_new_tokens) for episode in ended]
        self._wait_briefly([each.answer for each in asked if each is not None])
        return [*asked]

    def _wait_briefly(self, answers: "list[Future[Answer]]") -> None:
        if self._quick and answers:
            self._quick = not wait(answers, QUICK_S).not_done

    def _asked(self, episode: Episode, max_new_tokens: int) -> PendingAnswer | None:
        play, ids = play_of(episode), episode.token_ids
        drawn = _drawn_last(episode)
        message, calls = self._read(ids[:-drawn], ids[-drawn:])
        text, *response = decode_behind(
            self.tokenizer,
            [(ids[:-drawn], self._body(ids[-drawn:])),
             *([(episode.prompt.token_ids, episode.response_ids)] if self.pool.info.reads_response else [])])
        cut, room = episode.finish_reason == "length", max_new_tokens - episode.response_len
        turn = TurnOfPolicy(text, calls, message or {"role": "assistant", "content": text}, play.turns, room, cut,
                            "".join(response), cut or play.turns + 1 >= self.max_turns)  # yapf: disable
        play.messages.append({"role": "assistant", "content": text})
        play.parsed += [message] if message else []
        play.turns, play.calls = play.turns + 1, play.calls + len(calls)
        if play.failure:
            return None
        answer = self.pool.step(self._sessions[episode.key][1], turn)
        return PendingAnswer(self, episode, answer, time.monotonic(), drawn, room, cut)

    def _read(self, before: list[int], drawn: list[int]) -> "tuple[Message, tuple[ToolCall, ...]]":
        return self.form.read(before, drawn) if self.form is not None else ({}, ())

    def _body(self, drawn: list[int]) -> list[int]:
        """Return a turn without its end token."""
        return drawn[:-1] if drawn[-1] in self._ends else drawn

    def _close(self, episode: Episode) -> None:
        _, session = self._sessions.pop(episode.key, (None, None))
        if session is not None:
            self.pool.close(session)


def _await(futures: "Iterable[Future[Answer]]") -> None:
    """Wait for answers, with signs of life."""
    waiting = {*futures}
    while waiting:
        tick()
        waiting = wait(waiting, _LOOK_S).not_done


def _said(answer: Step) -> Any:
    """Return what ``reset`` says: messages behind those of the prompt, or in its place a text or other messages."""
    return answer.text or answer.history or answer.messages


_APART = 0x5DEECE66D  # the noise of an environment is not that of the policy
_SEEDS = 0x7FFFFFFF  # 31 bits: generators of numpy and of games in C take no larger seed


def _turns_of(branches: Sequence[Branch]) -> "Iterator[Prompt | list[Segment]]":
    """Yield the turns of a response and of its environment: segments of one source, or the prompt of a branch."""
    for number, branch in enumerate(branches):
        if number:
            yield branch.prompt
        for _, run in groupby(branch.segments, lambda segment: segment.drawn):
            yield [*run]


def _progress(branches: Sequence[Branch]) -> tuple[int, int]:
    return len(branches), len(branches[-1].segments)


def _same(answer: "Turn | PendingTurn", turn: "Prompt | list[Segment]") -> bool:
    """Return True if an environment answers with the tokens and media of ``turn``."""
    if isinstance(turn, Prompt):
        asked = answer if isinstance(answer, Prompt) else None  # media are a list in JSON
        return asked is not None and (asked.token_ids, [*asked.media]) == (turn.token_ids, [*turn.media])
    return isinstance(answer, (list, Segment)) and [Segment.given(answer)] == turn


def _drawn_last(episode: Episode) -> int:
    """Return the number of tokens of the last turn: those that were drawn since tokens were given."""
    runs = takewhile(lambda segment: segment.drawn, reversed(episode.segments))
    return sum(len(segment.token_ids) for segment in runs)
