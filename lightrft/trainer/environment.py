"""Environments (tools, users, games) that answer a response, which then resumes with another turn."""
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import DataConfig
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.token_texts import decode_behind
from lightrft.environments.play import Player, QUICK_S
from lightrft.rollout.turns import NextTurn, Turn
from lightrft.types import Episode, Prompt
from lightrft.types.fields import check_declared
from lightrft.utils.errors import UserError

_THREADS = 64  # most answers at once


class Environment(Protocol):
    """Answers the turns of a policy. It is called on the rank that generates the response, in threads, for several
    responses at once, and keeps no state of them. While it answers one response, all others go on.

    Its answers become tokens of the response that the policy did not sample: they are not in the loss, have no
    log-prob, and count in lengths (metrics, limits and the overlong penalty). They begin with no blank that they do not
    have themselves. Rewards read what the policy drew, and have the turns apart. Evaluation uses the same environment.
    """

    def turn(self, prompt: Prompt, response: str) -> "str | Reply | None":
        """Return the text to append to ``response``, which has just drawn a stop token; None ends it. A :class:`Reply`
        also has numbers for the log.

        Args:
            response: all turns so far, with earlier answers and special tokens.
        """


AnyEnvironment = Environment | Player
TurnsOf = tuple[NextTurn | None, bool]  # what gives turns, and whether it hears of responses that the limit has cut


@dataclass(frozen=True)
class Reply:
    """Answer of an environment with numbers of the response by name, such as the seconds that a tool took.

    They are declared by :func:`lightrft.types.number`, and added to those of the earlier turns of the response.
    """
    text: str | None
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingReply:
    """A :class:`~lightrft.rollout.turns.PendingTurn` of an environment in ``episode``."""
    episode: Episode
    renderer: Renderer
    answer: "Future[str | Reply | None]"

    def done(self) -> bool:
        """Return True once the environment has answered."""
        return self.answer.done()

    def add_done_callback(self, callback: "Callable[[Future[Any]], object]") -> None:
        """Call ``callback`` then, in another thread perhaps."""
        self.answer.add_done_callback(callback)

    def result(self) -> Turn:
        """Wait for the answer, add its numbers to the episode, and return its tokens.

        Raises:
            UserError: the answer is no text, or a number is not declared.
        """
        answer = self.answer.result()
        reply = answer if isinstance(answer, Reply) else Reply(answer)
        if not (reply.text is None or isinstance(reply.text, str)):
            raise UserError(f"the environment answers the prompt {self.episode.prompt.uid!r} with {reply.text!r}; "
                            "turn() returns a text, or None to end the response")
        check_declared(reply.numbers)
        for name, value in reply.numbers.items():
            if not isinstance(value, (bool, int, float)):
                raise UserError(f"the environment answers the prompt {self.episode.prompt.uid!r} with the number "
                                f"{name} = {value!r}; numbers of a Reply are int or float, added over its turns")
            self.episode.extra[name] = self.episode.extra.get(name, 0) + value
        return None if reply.text is None else self.renderer.encode_inside([reply.text])[0]


@contextmanager
def turns_of(environment: AnyEnvironment | None, tokenizer: PreTrainedTokenizerBase, episodes: Sequence[Episode],
             max_new_tokens: int) -> Iterator[TurnsOf]:
    """Open the environments of episodes, and yield what gives their turns."""
    if isinstance(environment, Player):
        with environment.playing(episodes, max_new_tokens) as ask:
            yield ask, True
    else:
        yield next_turn(environment, tokenizer), False


def next_turn(environment: Environment | None, tokenizer: PreTrainedTokenizerBase) -> NextTurn | None:
    """Return the callback of a run that asks ``environment``; None without one."""
    if environment is None:
        return None

    renderer, pool = Renderer(DataConfig(), tokenizer), ThreadPoolExecutor(_THREADS, "environment")

    def ask(episodes: list[Episode]) -> list[PendingReply]:
        texts = decode_behind(tokenizer, [(episode.prompt.token_ids, episode.response_ids) for episode in episodes])
        replies = [PendingReply(episode, renderer, pool.submit(environment.turn, episode.prompt, text))
                   for episode, text in zip(episodes, texts)]  # yapf: disable
        wait([reply.answer for reply in replies], QUICK_S)
        return replies

    return ask
