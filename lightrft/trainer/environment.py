"""Environments (tools, users, games) that answer a response, which then resumes with another turn."""
from collections.abc import Callable
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import DataConfig
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.token_texts import decode_behind
from lightrft.rollout.engine import Continuation, Ended, NextTurn
from lightrft.types import Prompt
from lightrft.utils.errors import UserError


class Environment(Protocol):
    """Answers the turns of a policy. It is called on the rank that generates the response, and keeps no state of it.

    Its answers become tokens of the response that the policy did not sample: they are not in the loss, have no
    log-prob, and count in lengths (metrics, limits and the overlong penalty). They begin with no blank that they do not
    have themselves. Rewards see the whole response. Evaluation uses the same environment.
    """

    def turn(self, prompt: Prompt, response: str) -> str | None:
        """Return the text to append to ``response``, which has just drawn a stop token; None ends it.

        Args:
            response: all turns so far, with earlier answers and special tokens.
        """


def next_turn(environment: Environment | None, tokenizer: PreTrainedTokenizerBase,
              so_far: Callable[[int, int], tuple[Prompt, list[int]]]) -> NextTurn | None:
    """Return the callback of an engine that asks ``environment``; None without one.

    Args:
        so_far: prompt, and the tokens that a response had before this call, by request and index among its seeds.
    """
    if environment is None:
        return None

    renderer = Renderer(DataConfig(), tokenizer)

    def ask(ended: Ended) -> list[Continuation | None]:
        begun = [so_far(i, k) for i, k, _ in ended]
        texts = decode_behind(tokenizer, [(prompt.token_ids, tokens + done.token_ids)
                                          for (prompt, tokens), (*_, done) in zip(begun, ended)])  # yapf: disable
        answers = [environment.turn(prompt, text) for (prompt, _), text in zip(begun, texts)]
        for (prompt, _), answer in zip(begun, answers):
            if not (answer is None or isinstance(answer, str)):
                raise UserError(f"the environment answers the prompt {prompt.uid!r} with {answer!r}; turn() returns a "
                                "text, or None to end the response")
        tokens = iter(renderer.encode_inside([answer for answer in answers if answer is not None]))
        return [None if answer is None else Continuation(next(tokens)) for answer in answers]

    return ask
