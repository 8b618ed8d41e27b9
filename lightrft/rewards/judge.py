"""A language model as judge: a chat request per response to an OpenAI-compatible server; its answer has the score."""
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

from lightrft.config.engines import native_arguments
from lightrft.config.schema import RewardConfig
from lightrft.datasets.tool_texts import calls_of, shown_tools
from lightrft.rewards.base import Outcome, RewardInput, REWARDS
from lightrft.rewards.remote import post, RemoteReward, RequestFailed
from lightrft.utils.errors import UserError

TEMPLATE = """Judge a response to a prompt.

Prompt:
{prompt}

Reference answer (may be empty):
{reference}

Response:
{response}

Say in a few sentences what is right and wrong with the response. Then end with a line "Score: N", where N is a whole
number from 0 (useless) to 10 (correct and complete)."""
_NEEDED = "{response}"


class JudgeForm:
    """Form of the request for a grade, and of the answer.

    Raises:
        UserError: the template cannot be read or does not show the response.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        self.score = re.compile(cfg.judge_score)
        self.template = TEMPLATE if cfg.judge_template is None else _read(Path(cfg.judge_template).expanduser())

    def prompt(self, item: RewardInput, said: Callable[[Any], str] = str) -> str:
        """Fill the template: ``{prompt}``, ``{response}``, ``{turns}``, ``{reference}`` and columns of the row by name.

        The prompt is what the messages say, without the marks of the chat template. The turns of the response are JSON,
        so nothing that a tool writes reads as a turn of the policy.

        Args:
            said: returns the text of the content of a message.
        """
        turns = (f"{turn['role']}: {said(turn['content'])}{calls_of(turn)}" for turn in item.messages)
        asked = shown_tools(item.template_kwargs) * bool(item.messages) + "\n\n".join(turns) or item.prompt
        answered = json.dumps([turn | {"content": said(turn["content"])} for turn in item.turns], ensure_ascii=False)
        values = item.columns | {"prompt": asked, "response": item.response, "turns": answered,
                                 "reference": "" if item.reference is None else item.reference}  # yapf: disable
        return re.sub(r"\{(\w+)\}", lambda name: str(values.get(name[1], name[0])), self.template)

    def read(self, text: str) -> Outcome:
        """Return the last score of an answer; without one the response is unscored."""
        scores = [match[1] for match in self.score.finditer(text)]
        try:
            return Outcome(float(scores[-1]))
        except (IndexError, ValueError):
            return Outcome(None, "no_score", f"--judge_score {self.score.pattern} finds no number in: {text[-300:]!r}")


class Judge(JudgeForm):
    """Asks the model for a score; :meth:`ask` is the request of a :class:`~lightrft.rewards.remote.RemoteReward`."""

    def __init__(self, cfg: RewardConfig) -> None:
        super().__init__(cfg)
        self.model = cfg.judge_model
        self.arguments = {"temperature": 0, "max_tokens": 1024} | native_arguments(cfg.judge_args)
        key = os.environ.get(cfg.judge_key_env, "")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, session: requests.Session, url: str, batch: list[RewardInput], limit_s: float) -> list[Outcome]:
        """Judge the single response of ``batch``. Raises ``RequestFailed`` if there is no answer."""
        (item, ) = batch
        chat = {"model": self.model, "messages": [{"role": "user", "content": self.prompt(item)}]} | self.arguments
        answer = post(session, url, {name: value for name, value in chat.items() if value is not None}, limit_s,
                      self.headers)
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailed("wrong_json", f"{url}: expected a chat completion, got {str(answer)[:300]}") from error
        return [self.read(str(text or ""))]


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--judge_template {path}: cannot be read: {error}") from error
    if _NEEDED not in text:
        raise UserError(f"--judge_template {path}: does not show the response; write {_NEEDED} where it goes, and "
                        "{prompt}, {turns}, {reference} or {COLUMN} where you want them")
    return text


def judge_reward(cfg: RewardConfig) -> RemoteReward:
    """Return the judge of ``--judge_url`` with its concurrency, time limit and retries."""
    if not (cfg.judge_url and cfg.judge_model):
        raise UserError("--reward judge: needs --judge_url URL and --judge_model NAME")
    urls = [f"{url.rstrip('/')}/chat/completions" for url in cfg.judge_url]
    return RemoteReward(urls, cfg.judge_timeout_s, Judge(cfg).ask, cfg.judge_concurrency, most=1)


@REWARDS.register("judge")
def judge(batch: list[RewardInput]) -> list[float | None]:
    """Refuse to score: the judge of a run is built from its options, see :func:`judge_reward`."""
    raise UserError(f"--reward judge: the judge of {len(batch)} responses is built from --judge_url and --judge_model")
