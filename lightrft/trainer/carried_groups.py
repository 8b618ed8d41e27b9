"""Groups that are carried over to later steps, as values of a checkpoint."""
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import pairwise, repeat
from typing import Any

from lightrft.strategy.plain_pickle import reads_again
from lightrft.types import Episode, Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.logging import get_logger
from lightrft.utils.score import Score

_CARRIED = {
    "rows": "without --dynamic_sampling the %d samples carried over in the checkpoint are dropped",
    "open": "without --oversample the %d unfinished groups in the checkpoint are dropped",
}

_USED = ("uid", "token_ids", "text", "messages", "reference", "media", "template_kwargs")  # of a scored prompt


def warn_dropped(state: dict[str, Any], *kinds: str) -> None:
    """Warn that "rows" or "open" groups, which another source left in a checkpoint's ``state``, are dropped."""
    for kind in kinds:
        if state.get(kind):
            get_logger().warning(_CARRIED[kind], len(state[kind]))


def check_saved(prompts: Iterable[Prompt], option: str, columns: bool = True) -> None:
    """Check that checkpoints can keep what they hold of prompts whose responses ``option`` carries over, with the
    ``columns`` of their rows or without.

    Raises:
        UserError: names the first value that is not read again.
    """
    for prompt in prompts:
        values = {**prompt.columns} if columns else {}
        values |= {"reference": prompt.reference, "chat_template_kwargs": prompt.template_kwargs}
        if reads_again(values):
            continue
        name, value = next((item for item in values.items() if not reads_again(item[1])), ("", values))
        raise UserError(
            f"--{option} keeps rows in checkpoints, and {name!r} of row {prompt.uid} holds an object that is not read "
            f"again, because that could run code (of {type(value).__name__}, or in it). Give plain values (texts, "
            "numbers, lists, dicts, arrays), build the object in the reward or the environment, or add --disable_ckpt")


def group_state(group: list[Episode]) -> dict[str, Any]:
    """Return a group, finished or not, for a checkpoint, with all of its prompt. A response has a prompt of its own
    where its environment has begun again, and otherwise."""
    number, shared = group[0].group_id, group[0].prompt
    own = [{} if each.prompt.token_ids == shared.token_ids else {"prompt": asdict(each.prompt)} for each in group]
    return {"number": number, "prompt": asdict(shared),
            "responses": [each.state() | prompt for each, prompt in zip(group, own)]}  # yapf: disable


def load_group(state: dict[str, Any]) -> list[Episode]:
    """Restore a group from :func:`group_state`; in checkpoints of earlier versions the scores are apart."""
    shared, number = Prompt(**state["prompt"]), state["number"]
    prompts = [Prompt(**own["prompt"]) if "prompt" in own else shared for own in state["responses"]]
    group = [Episode.load(prompt, number, index, response)
             for index, (prompt, response) in enumerate(zip(prompts, state["responses"]))]  # yapf: disable
    for row in state.get("scored", ()):
        _load_score(group[row["index"]], row)
    return group


def finished_state(episode: Episode) -> dict[str, Any]:
    """Return a finished episode for a checkpoint, with what later stages read of its prompt."""
    used = {name: getattr(episode.prompt, name) for name in _USED}
    return {"prompt": used, "group_id": episode.group_id, "index": episode.index} | episode.state()


def load_finished(state: dict[str, Any]) -> list[Episode]:
    """Restore finished episodes from a checkpoint: from the states of each, or from the packed tokens and the rows that
    earlier versions wrote."""
    if "exp" in state:
        return [*_unpacked(state["exp"], state["rows"])]
    return [Episode.load(Prompt(**row["prompt"]), row["group_id"], row["index"], row) for row in state["rows"]]


def _load_score(episode: Episode, row: dict[str, Any]) -> None:
    """Restore the score of an episode from the ``row`` that checkpoints of earlier versions hold."""
    episode.score = Score(row["reward"], row["parts"], row["error"], row["weights"], fault=row.get("fault"))
    episode.steps = [(end, reward) for end, reward in row.get("steps", ())]
    if row.get("greedy_length") is not None:
        episode.greedy = row["greedy_reward"], row["greedy_length"]


def _unpacked(tensors: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[Episode]:
    """Yield the episodes whose tokens were packed in ``tensors``, one per row of their scores."""
    names = {"token_ids": "token_ids", "logprobs": "rollout_logprobs", "weight_versions": "weight_versions"}
    columns = {name: tensors[field].tolist() for name, field in names.items()}
    bounds = pairwise(tensors["cu_seqlens"].tolist())
    for row, (begin, end), keys in zip(rows, bounds, tensors.get("media") or repeat(())):
        drawn = [version >= 0 for version in columns["weight_versions"][begin:end]]
        start = begin + (drawn.index(True) if True in drawn else len(drawn))
        prompt = Prompt(row["uid"], columns["token_ids"][begin:start], row["prompt"] or "",
                        reference=row["reference"], media=tuple(keys))  # yapf: disable
        response: dict[str, Any] = {name: values[start:end] for name, values in columns.items()}
        response |= {"finish_reason": row["finish_reason"], "text": row["response"] or ""}
        episode = Episode.load(prompt, row["group_id"], row["index"], response)
        _load_score(episode, row)
        yield episode
