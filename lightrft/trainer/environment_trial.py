"""Trial of an environment in a dry run: one episode of it, with a stand-in for what the policy draws."""
from collections.abc import Generator, Iterator
from typing import Any

from lightrft.datasets.prompt_rows import text_of
from lightrft.environments.play import Player
from lightrft.rollout.turns import result_of, Turn
from lightrft.types import Episode, Prompt, Segment
from lightrft.utils.errors import UserError
from lightrft.utils.play import Play

_SHOWN = 200  # characters of a text


def try_environment(player: Player, prompt: Prompt, max_new_tokens: int) -> Generator[str, None, Play]:
    """Play one episode from ``prompt``, whose turns are its reference, and yield a line for each turn. Return what the
    environment did in it.

    Raises:
        UserError: the environment fails, or its messages cannot be written.
    """
    tools = ", ".join(tool["function"]["name"] for tool in player.pool.info.tools)
    yield f"environment: {player.pool.spec.title} ({player.pool.info.kind}){f', tools: {tools}' if tools else ''}"
    player.check(prompt)
    episode, text = Episode(prompt, 0, 0, role="trial"), str("" if prompt.reference is None else prompt.reference)
    drawn = [*player.tokenizer(text, add_special_tokens=False).input_ids, player.tokenizer.eos_token_id]
    with player.playing([episode], max_new_tokens) as ask:
        yield from opened(episode)
        while episode.finish_reason == "abort" and episode.response_len + len(drawn) <= max_new_tokens:
            episode.add([Segment(drawn, [0.0] * len(drawn), True, 0)], "stop")
            following = result_of(ask([episode])[0])
            yield _line(episode, text, following)
            if following is None:
                break
            if isinstance(following, Prompt):
                episode.fork(following)
                continue
            following = Segment.given(following)
            if not 0 < len(following.token_ids) < max_new_tokens - episode.response_len:
                break
            episode.give(following)
    assert episode.play is not None, "its session was open"
    return episode.play


def opened(episode: Episode) -> Iterator[str]:
    """Yield a line about what the environment begins with, if it says something."""
    assert episode.play is not None, "its session is open"
    _refuse_failure(episode)
    if (asked := episode.play.asked) is not None:
        prompt = episode.prompt
        says = prompt.text if prompt.messages == asked["messages"] else prompt.messages[-1]["content"]
        yield f"environment: begins with {_short(says)}"


def _refuse_failure(episode: Episode) -> None:
    if episode.play is not None and episode.play.failure:
        raise UserError(f"the environment fails ({episode.play.failure}) in a trial with the prompt "
                        f"{episode.prompt.uid!r}; the log above has the details. Correct it")


def _line(episode: Episode, text: str, following: Turn) -> str:
    _refuse_failure(episode)
    play: Any = episode.play
    answers = [message["content"] for message in play.messages[::-1]]
    answer = _short(answers[0]) if play.messages[-1]["role"] != "assistant" else "nothing, so the response ends"
    if isinstance(following, Prompt):
        answer = f"another conversation, which ends with {_short(following.messages[-1]['content'])}"
    reward = f", reward so far {play.reward:g}" if play.reward is not None else ""
    return f"environment: a turn {_short(text)} is answered with {answer}{reward}"


def _short(content: Any) -> str:
    text = text_of(content)
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ...")
