"""Trial of the rewards of a run: one row is scored."""
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.options import show
from lightrft.config.schema import Config
from lightrft.datasets.prompt_rows import missing, text_of
from lightrft.datasets.rendering import Renderer
from lightrft.rewards.base import RewardInput, Score
from lightrft.rewards.correctness import check_accuracy_part
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.validation import check_references, good_answers, nothing_scored, quoted, score_answers
from lightrft.utils.errors import UserError
from lightrft.utils.play import Play
from lightrft.utils.prompt import Message, Prompt

AWAITED = (None, "unreachable", "no_rival", "no_environment", "no_reward")
"""Scored; the server does not run yet; a judge will compare the answer with others; the environment was not played, or
gave no reward yet."""
EXCUSED = (*AWAITED, "none")
"""The last one: the function declines to judge."""


def rendered(prompt: Prompt, config: Config, tokenizer: Any) -> tuple[str, list[Message]]:
    """Render a prompt as the run does: its text, and its messages if it is a chat. Without a tokenizer (None) the text
    of a chat is that of its turns."""
    renderer = Renderer(config.data, tokenizer)
    messages = renderer.messages(prompt.asked)
    if messages is None:
        return renderer.text(prompt.text), []
    if tokenizer is None:
        return "\n".join(text_of(turn["content"]) for turn in messages), messages
    return renderer.opened([messages], [prompt.template_kwargs])[0], messages


def try_row(rewards: RewardManager, prompt: Prompt, where: str, config: Config,
            tokenizer: PreTrainedTokenizerBase | None, play: Play | None = None) -> str:
    """Score a stand-in for a response to one row, its reference or nothing, with the turns of ``play``; the time is
    bounded as in a run.

    Raises:
        UserError: it is left unscored for another reason than those of ``EXCUSED``, or a function declines to judge
            every answer with which a run probes the rewards.
    """
    text, messages = rendered(prompt, config, tokenizer)
    row = RewardInput(text, "", messages, prompt.data_source, prompt.label, prompt.reference, prompt.columns,
                      prompt.media, config.data.chat_template_kwargs | prompt.template_kwargs, play=play)
    check_references(rewards, [row])
    known = not missing(prompt.reference)
    row, score = _first_that_earns(rewards, row, good_answers(rewards, row) if known else [""])
    asked = f"{where}, {f'answered with its reference ({quoted(row.response)})' if known else 'with an empty response'}"
    if rewards.cfg.reward_probe and score.error not in AWAITED:
        probed = score_answers(rewards, row)
        if all(one.total is None for one in probed):
            raise nothing_scored(row, probed)
    elif score.error not in EXCUSED:
        raise UserError(
            f"rewards: {asked}, could not be scored: {score.error}, by {_failed(score)} (details in the log "
            "above). Correct the reward or the row")
    check_accuracy_part(config.eval.accuracy_part, rewards.part_names(), [score.parts])
    parts = ", ".join(f"{name} {'unscored' if value is None else show(value)} x {show(score.weights[name])}"
                      for name, value in score.parts.items() if name in score.weights)  # yapf: disable
    total = f"unscored: {score.error}" if score.total is None else f"{score.total:.6g}"
    return f"rewards: {asked}: {parts}; total {total}"


def _first_that_earns(rewards: RewardManager, row: RewardInput, answers: list[str]) -> tuple[RewardInput, Score]:
    """Score the first and the last of ``answers`` to a row, one by one, until one gets a reward or a reward is excused;
    else return the first, or the last if the first was an error."""
    tried = list[tuple[RewardInput, Score]]()
    for answer in dict.fromkeys((answers[0], answers[-1])):
        one = replace(row, response=answer)
        tried += [(one, score) for score in rewards.collect(rewards.submit([one]))]
        score = tried[-1][1]
        if score.total or score.total is None and score.error in EXCUSED:
            break
    failed = tried[0][1].error not in EXCUSED
    return tried[-1] if failed or (tried[-1][1].total or 0) > 0 else tried[0]


def _failed(score: Score) -> str:
    return ", ".join(name for name in score.weights if score.parts[name] is None)
