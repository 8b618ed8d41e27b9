"""Scores of episodes: the fields of a batch that they fill, the rewards of steps, and the rows of the log."""
from bisect import bisect_left
from itertools import accumulate, chain, islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.base import Advantage
from lightrft.datasets.prompt_rows import Message, prefill_of
from lightrft.datasets.token_texts import decode_behind
from lightrft.ops.segment import HERE, Ranks
from lightrft.strategy.base import StrategyBase
from lightrft.types import Batch, Episode, NUMBERS, Prompt
from lightrft.types.fields import numbers_of
from lightrft.utils.errors import UserError
from lightrft.utils.play import BETWEEN, Play
from lightrft.utils.score import Score

Steps = list[tuple[int, float]]  # where each step ends, and its reward
Columns = dict[str, Tensor]  # [B] each, by name; scores are float64, and NaN stands for one that is missing


def log_row(episode: Episode) -> dict[str, Any]:
    """Return the row of the log: the response, its score, and what else this run has of it."""
    prompt, score = episode.first_prompt, episode.score or Score(None)
    row = {"group_id": episode.group_id, "index": episode.index, "reward": score.total, "parts": score.parts,
           "weights": score.weights, "error": score.error, "finish_reason": episode.finish_reason, "uid": prompt.uid,
           "prompt": prompt.text, "response": episode.text, "reference": prompt.reference}  # yapf: disable
    if episode.greedy is not None:
        row["greedy_reward"], row["greedy_length"] = episode.greedy
    further = {"steps": episode.steps, "fault": score.fault, "numbers": numbers_of(episode)} | trajectory(episode)
    return row | {name: value for name, value in further.items() if value}


def trajectory(episode: Episode) -> dict[str, Any]:
    """Return a response of an environment as messages for other tools, with the schemas of its tools, and what the
    environment did; nothing of others."""
    play = episode.play
    if play is None:
        return {}
    facts = {"turns": play.turns, "calls": play.calls, "wait_s": play.wait_s, "ended": play.failure or play.limit,
             "metrics": play.metrics}  # yapf: disable
    tools, turns = episode.prompt.template_kwargs.get("tools"), _turns(episode.joined, play)
    return {"messages": _chat(episode.first_prompt, turns), **({"tools": tools} if tools else {}),
            **({"branches": _chats(episode, turns)} if episode.closed else {}),
            "environment": {name: value for name, value in facts.items() if value}}  # yapf: disable


def _turns(episode: Episode, play: Play) -> list[list[Message]]:
    """Return the turns of the policy, each with what was said behind it. Calls of tools are in ``tool_calls``,
    ``content`` is the rest of a turn, and turns that the environment has rewarded have a ``reward``."""
    turns, rewards, parsed = list[list[Message]](), dict(play.rewards), iter(play.parsed)
    ends = iter([stop - 1 for drawn, _, stop in episode.runs if drawn])
    for message in play.messages:
        if message["role"] == "assistant":
            message, reward = next(parsed, message), rewards.get(next(ends))
            message = message | {"content": message["content"] or ""}
            turns.append([message if reward is None else message | {"reward": reward}])
        else:  # also one that was said before the first turn
            turns[-1:] = [[*(turns[-1] if turns else ()), message]]
    return turns


def _chat(prompt: Prompt, turns: list[list[Message]]) -> list[Message]:
    """Return a prompt and turns as messages; a prefill at its end is the start of the first one."""
    begun, said = prefill_of(prompt.messages), [*chain.from_iterable(turns)]
    if begun is None:
        return [*(prompt.messages or [{"role": "user", "content": prompt.text}]), *said]
    said[:1] = [message | {"content": begun + message["content"]} for message in said[:1]]
    return [*prompt.messages[:-1], *said]


def _chats(episode: Episode, turns: list[list[Message]]) -> list[list[Message]]:
    """Return each branch of an episode as messages; the prompt of the next one has what was said behind the last turn.
    """
    chats, rest, (*closed, last) = [], iter(turns), episode.branches
    for branch in closed:
        *own, ended = islice(rest, sum(drawn for drawn, *_ in branch.runs))
        chats.append(_chat(branch.prompt, [*own, ended[:1]]))
    return [*chats, _chat(last.prompt, [*rest])]


def take_scores(episodes: list[Episode], scores: list[Score], tokenizer: PreTrainedTokenizerBase,
                turn_rewards: bool) -> None:
    """Set the scores of episodes, the declared numbers that come with them, and the rewards of their steps; with
    ``turn_rewards`` also those of the turns of an environment.

    Raises:
        UserError: a number comes from two places.
    """
    for episode, score in zip(episodes, scores, strict=True):
        episode.score, episode.steps = score, on_tokens(episode, score.steps, tokenizer)
        if turn_rewards and episode.play is not None and score.total is not None:
            weight = score.weights.get("environment", 0.0)
            episode.steps += [(at, weight * reward) for at, reward in episode.play.rewards]
    for name in NUMBERS:
        for episode in episodes:
            take_number(name, episode)


def take_number(name: str, episode: Episode) -> None:
    """Set a declared number of a scored episode that a reward returned beside its score, or its environment counted.

    Raises:
        UserError: a number comes from two places.
    """
    score, play = episode.score or Score(None), episode.play
    given = {f"the reward {part}": score.parts.get(f"{part}/{name}") for part in score.weights}
    given |= {"the environment": play.metrics.get(name) if play else None, "the rollout": episode.extra.get(name)}
    values = {source: value for source, value in given.items() if value is not None}
    if len(values) > 1:
        raise UserError(f"the number {name!r} of a response comes from {' and from '.join(values)}; rename it in one "
                        "of them")
    episode.extra |= {name: value for value in values.values()}
    NUMBERS.get(name).read(name, episode)  # refuses one for a number of every token, which is packed before


def fill_rewards(batch: Batch, episodes: list[Episode], estimator: Advantage, ranks: Ranks = HERE) -> dict[str, float]:
    """Fill the rewards of ``batch`` before shaping, what its estimator needs, and the numbers that are known by now,
    from the episodes of all ranks; return ``reward/*``.

    Args:
        ranks: holds the indices in the batch of this rank's ``episodes``.
    """
    table = _gather(episodes, ranks)
    rewards, weights = table["sample"]["reward"], table["weight"]
    batch.scored = ~rewards.isnan()
    batch.rewards = torch.where(batch.scored, rewards, 0.0).float()
    batch.extra.update(table["number"])
    metrics = _reward_metrics(table)
    if estimator.needs_parts:
        unjudged = torch.full_like(rewards, torch.nan)
        batch.reward_parts = _stack([table["part"].get(name, unjudged) for name in weights], len(rewards))
        batch.part_weights = _stack([column.nan_to_num() for column in weights.values()], len(rewards))
    if estimator.needs_greedy:
        greedy = table["sample"]["greedy_reward"]
        batch.baseline_rewards, batch.baseline_lengths = greedy.float(), table["sample"]["greedy_length"].float()
        metrics |= _greedy_metrics(batch.group_ids, greedy)
    return metrics


def _gather(episodes: list[Episode], ranks: Ranks) -> dict[str, Columns]:
    """Gather the numbers of the scores of all ranks, by kind and name, in the same order on every rank."""
    table: dict[str, Columns] = {kind: {} for kind in ("sample", "part", "weight", "error", "fault", "number")}
    for (kind, name), column in sorted(ranks.columns(_columns(episodes)).items(), key=lambda item: item[0]):
        table[kind][name] = column
    return table


def _columns(episodes: list[Episode]) -> dict[tuple[str, str], Tensor]:
    """Return the numbers of the scores, float64 [n] by kind and name, NaN where an episode has none; and the declared
    ones, in their types."""
    scores = [episode.score or Score(None) for episode in episodes]
    greedy = [episode.greedy or (None, 0) for episode in episodes]
    columns: dict[tuple[str, str], list[float | None]] = {("sample", "reward"): [score.total for score in scores],
                                                          ("sample", "greedy_reward"): [reward for reward, _ in greedy],
                                                          ("sample", "greedy_length"): [length for _, length in greedy]}
    for kind, tables in (("part", [score.parts for score in scores]), ("weight", [score.weights for score in scores]),
                         ("error", [{score.error: 1} if score.error else {} for score in scores]),
                         ("fault", [{score.fault: 1} if score.fault else {} for score in scores])):  # yapf: disable
        for name in set().union(*tables):
            columns[kind, name] = [table.get(name) for table in tables]
    numbers = {name: declared for name in NUMBERS if (declared := NUMBERS.get(name)).axis == "B"}
    return {
        key: torch.tensor([torch.nan if v is None else v for v in values], dtype=torch.float64)
        for key, values in columns.items()
    } | {("number", name): declared.pack([declared.read(name, episode) for episode in episodes])
         for name, declared in numbers.items()}  # yapf: disable


def _stack(columns: list[Tensor], size: int) -> Tensor:
    """Return columns [B] as float32 [B, K]; K may be 0."""
    return (torch.stack(columns, 1) if columns else torch.zeros(size, 0)).float()


def _reward_metrics(table: dict[str, Columns]) -> dict[str, float]:
    """Return ``reward/<part>/{mean,std}`` over the samples that each part judged, and counts of unscored samples and of
    rewards of 0 that the response is to blame for, by cause."""
    metrics: dict[str, float] = {"reward/unscored": int(table["sample"]["reward"].isnan().sum())}
    for name, column in table["part"].items():
        values = column[~column.isnan()].float()
        metrics[f"reward/{name}/mean"] = values.mean().item() if len(values) else 0.0
        metrics[f"reward/{name}/std"] = values.std(correction=0).item() if len(values) else 0.0
    for kind, name in (("error", "unscored"), ("fault", "faults")):
        metrics |= {f"reward/{name}/{cause}": int(column.nansum()) for cause, column in table[kind].items()}
    return metrics


def _greedy_metrics(group_ids: Tensor, greedy: Tensor) -> dict[str, float]:
    by_prompt = dict(zip(group_ids.tolist(), greedy.tolist()))
    rewards = [reward for reward in by_prompt.values() if reward == reward]
    return {
        "reward/greedy_mean": sum(rewards) / max(len(rewards), 1), "reward/greedy_unscored":
        len(by_prompt) - len(rewards)
    }


def on_tokens(sample: Episode, steps: Steps, tokenizer: PreTrainedTokenizerBase) -> Steps:
    """Move step ends from characters of the answer, a prefill and the turns of the policy, to the tokens of the
    sequence that write the last one."""
    sample = sample.joined
    turns = [(start, stop) for drawn, start, stop in sample.runs if drawn] if steps else []
    if not turns:
        return []
    moved, ids, begins = Steps(), sample.token_ids, _begins(sample)
    for end, reward in steps:
        number = max(bisect_left(begins, end) - 1, 0)
        start, stop = turns[number]
        moved.append((start - 1 + _tokens_of(ids[:stop], start, end - begins[number], tokenizer), reward))
    return moved


def _begins(sample: Episode) -> list[int]:
    """Return where the turns of the policy begin in its answer, in characters; the first behind the prefill."""
    begun, texts = len(prefill_of(sample.prompt.messages) or ""), [] if sample.play is None else sample.play.answers
    return [*accumulate((len(text) + len(BETWEEN) for text in texts[:-1]), initial=begun)]


def _tokens_of(ids: list[int], start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the fewest tokens from ``start`` on, at least one, whose text has at least ``end`` characters."""
    prompt, low, high = ids[:start], 1, len(ids) - start
    while low < high:
        middle = (low + high) // 2
        text, = decode_behind(tokenizer, [(prompt, ids[start:start + middle])])
        if len(text.rstrip("\ufffd")) >= end:  # the first bytes of a character are none yet
            high = middle
        else:
            low = middle + 1
    return low


def step_rewards(batch: Batch, numbers: list[int], episodes: list[Episode], strategy: StrategyBase) -> Tensor:
    """Return ``step_rewards`` [T] of the sequences of ``batch``, wherever they were scored; a collective.

    Args:
        numbers: indices in the rollout batch of this rank's ``episodes``; ``batch.sample_ids`` are such indices.
    """
    scored_here = {number: episode.steps for number, episode in zip(numbers, episodes)}
    steps = {number: ends for part in strategy.all_gather_object(scored_here) for number, ends in part.items()}
    rewards = torch.full((batch.num_tokens, ), torch.nan)
    for start, number in zip(batch.cu_seqlens.tolist(), batch.sample_ids.tolist()):
        for at, reward in steps[number]:
            rewards[start + at] = rewards[start + at].nan_to_num() + reward
    return rewards
