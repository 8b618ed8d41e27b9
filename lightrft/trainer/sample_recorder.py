"""Records a few groups of samples token by token, for the report of a run: ``samples.jsonl``."""
import os
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.strategy.base import StrategyBase
from lightrft.trainer.evaluator import Answer, GROUPS, SAMPLES
from lightrft.trainer.fast_exp_maker import Rollout
from lightrft.trainer.samples import sample_seed
from lightrft.types import Batch, Episode, MediaSource
from lightrft.utils.errors import first_line, optional_output, UserError
from lightrft.utils.logging import get_logger
from lightrft.utils.score import Score
from lightrft.utils.sinks import backup_path, cut_after
from lightrft.utils.trajectory_saver import json_line, shorten

TOKENS = 8192  # of a record; longer responses are cut in the middle
CHARACTERS = 4000  # of a prompt
RECORDS = 32  # of a run, for training and held-out prompts each
THUMBNAILS, THUMBNAIL = 8, 160  # pictures of a prompt, and their longest side in pixels
FILE = "samples.jsonl"

Group = list[tuple[Episode, int]]  # samples of one prompt, and their indices in the batch


@dataclass
class Response:
    """Scored response, with the advantages and entropies of its tokens; these are empty where there are none."""
    episode: Episode
    advantages: list[float]
    entropies: list[float] = field(default_factory=list)

    @classmethod
    def of_batch(cls, episodes: Iterable[Episode], batch: Batch) -> "list[Response]":
        """Take the numbers of the sequences of ``batch``, which are those of ``episodes``."""
        bounds, advantages = pairwise(batch.cu_seqlens.tolist()), batch.advantages.tolist()
        entropies = [] if batch.entropies is None else batch.entropies.tolist()
        spans = [slice(begin + prompt, end) for prompt, (begin, end) in zip(batch.prompt_lens or (), bounds)]
        return [cls(episode, advantages[span], entropies[span]) for episode, span in zip(episodes, spans, strict=True)]

    def row(self, texts: "TokenTexts", limit: int) -> dict[str, Any]:
        """Return the record of the response, with at most ``limit`` tokens, half of them from its end."""
        episode = self.episode.joined
        token_ids = episode.response_ids
        size, before, score = len(token_ids), episode.prompt.token_ids[-1], episode.score or Score(None)
        logprobs = [logprob if segment.drawn else None for segment in episode.segments for logprob in segment.logprobs]
        half = limit // 2 if size > limit else size
        tail = slice(max(size - half, half), size)
        kept = [*range(half), *range(size)[tail]]
        shown = texts(before, token_ids[:half])
        shown += texts(token_ids[tail.start - 1], token_ids[tail]) if tail.start < size else []
        drawn = [self.advantages[i] for i in kept if logprobs[i] is not None] if self.advantages else []
        row: dict[str, Any] = {
            "index": episode.index, "reward": score.total, "parts": score.parts, "error": score.error,
            "finish": episode.finish_reason, "tokens": size, "text": shown,
            "logprobs": [None if logprobs[i] is None else round(logprobs[i] or 0.0, 3) for i in kept]
        }  # yapf: disable
        if drawn:  # most algorithms give all tokens of a response the same advantage
            same = min(drawn) == max(drawn)
            row["advantages"] = round(drawn[0], 4) if same else [round(self.advantages[i], 4) for i in kept]
        if self.entropies:
            row["entropies"] = [None if logprobs[i] is None else round(self.entropies[i], 2) for i in kept]
        return row | ({"cut": [half, size - len(kept)]} if len(kept) < size else {}) | _turns(episode, kept)


def _turns(episode: Episode, kept: list[int]) -> dict[str, Any]:
    """Return who else wrote the tokens ``kept`` of a response, the rewards of turns, and what its environment did.

    ``given`` has runs [start, stop, roles] and ``rewards`` pairs [last token of the turn, reward], as indices in
    ``kept``. Nothing is returned of a response that the policy wrote alone.
    """
    if episode.play is None:
        return {}
    play, place = episode.play, {at + episode.prompt_len: i for i, at in enumerate(kept)}
    behind: list[list[str]] = [[]]  # roles of what was written behind each turn; none where it is a rewritten history
    for message in play.messages:
        behind.append([]) if message["role"] == "assistant" else behind[-1].append(message["role"])
    roles = [", ".join(dict.fromkeys(each)) or "rewritten" for each in behind[1:]]
    given = [(start, stop) for drawn, start, stop in episode.runs if not drawn]
    shown = [([place[at] for at in range(*run) if at in place], role) for run, role in zip(given, roles)]
    facts = {"turns": play.turns, "calls": play.calls, "wait_s": round(play.wait_s, 3),
             "ended": play.failure or play.limit}  # yapf: disable
    return {"given": [[run[0], run[-1] + 1, role] for run, role in shown if run],
            "rewards": [[place[at], reward] for at, reward in play.rewards if at in place],
            "environment": {name: value for name, value in facts.items() if value}}  # yapf: disable


class TokenTexts:
    """Text that each token adds to the tokens before it; a character of several tokens belongs to its last one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._decode = lru_cache(1 << 16)(self._decoded)

    def _decoded(self, *token_ids: int) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False,
                                         clean_up_tokenization_spaces=False))

    def __call__(self, before: int, token_ids: list[int]) -> list[str]:
        """Decode ``token_ids``, which follow the token ``before``: tokenizers write the first word of a text in another
        way."""
        texts, first = [""] * len(token_ids), 0  # tokens from ``first`` on have no text yet
        for i in range(len(token_ids)):
            text = self._text(before, token_ids[first:i + 1])
            if not text.endswith("\ufffd") or i + 1 == len(token_ids):
                texts[i], before, first = text, token_ids[i], i + 1
            elif i - first == 3:  # a character has at most four bytes: the first token is none of it
                texts[first], before, first = self._text(before,
                                                         token_ids[first:first + 1]), token_ids[first], first + 1
        return texts

    def _text(self, before: int, token_ids: list[int]) -> str:
        return self._decode(before, *token_ids)[len(self._decode(before)):]


class SampleRecorder:
    """Appends records to ``samples.jsonl``: groups of training prompts, and groups of held-out prompts.

    A record is made in about ``RECORDS`` steps of a run, so its cost and the size of the file are bounded. Training
    prompts are chosen by a hash of their uid, so those of one epoch are chosen again in the next. Pictures and the
    first frames of videos are recorded as thumbnails; of a sound only its kind is recorded.
    """

    def __init__(self, folder: Path, strategy: StrategyBase, tokenizer: PreTrainedTokenizerBase, enabled: bool,
                 media: MediaSource | None = None) -> None:
        self.media = media
        self.path, self.strategy, self.texts, self.enabled = folder / FILE, strategy, TokenTexts(tokenizer), enabled
        self.next = {"training": 0, "held-out": 0}

    def start(self, step: int) -> None:
        """Remove the records of an earlier run after ``step``; at step 0 rename its file."""
        if self.strategy.is_main:
            if step == 0:
                backup_path(self.path)
            cut_after(self.path, step)

    def _due(self, kind: str, step: int, total_steps: int) -> bool:
        due = self.enabled and (step >= self.next[kind] or step == total_steps)
        if due:
            self.next[kind] = step + -(-total_steps // RECORDS)
        return due

    def rollout(self, step: int, total_steps: int, rollout: Rollout) -> None:
        """Record groups of a rollout; a collective."""
        if not (self._due("training", step, total_steps) and rollout.shards.size):
            return
        chosen = self._chosen(rollout)
        batch = rollout.shards.collect(list(chosen))
        if self.strategy.is_main:
            self._write("training", step, Response.of_batch(chosen.values(), batch))

    def _chosen(self, rollout: Rollout) -> dict[int, Episode]:
        """Return samples of the groups with the lowest hashes, by their index in the batch."""
        numbered = zip(rollout.episodes, rollout.shards.numbers.tolist())
        here = sorted(numbered, key=lambda each: (each[0].group_id, each[0].index))
        groups = [list(group)[:SAMPLES] for _, group in groupby(here, key=lambda each: each[0].group_id)]
        ranked = [(sample_seed("report", group[0][0].prompt.uid), group[0][0].group_id, group) for group in groups]
        parts = self.strategy.all_gather_object(_lowest(ranked))
        return {number: sample for *_, group in _lowest(chain.from_iterable(parts)) for sample, number in group}

    def evaluation(self, step: int, total_steps: int, answers: Sequence[Answer]) -> None:
        """Record the first groups of an evaluation: the same prompts every time."""
        if self._due("held-out", step, total_steps) and self.strategy.is_main:
            shown = [answer.sample for answer in answers if answer.sample and answer.group_id < GROUPS]
            self._write("held-out", step, [Response(sample, []) for sample in shown])

    def _write(self, kind: str, step: int, responses: list[Response]) -> None:
        limit, groups = TOKENS // max(len(responses), 1), []
        for _, members in groupby(responses, key=lambda response: response.episode.group_id):
            group = list(members)
            prompt = group[0].episode.first_prompt
            rows = [response.row(self.texts, limit) | self._media_of(response.episode) for response in group]
            groups.append({"uid": prompt.uid, "prompt": shorten(prompt.text, CHARACTERS),
                           "reference": prompt.reference, "samples": rows,
                           "media": [self._shown(key) for key in prompt.media[:THUMBNAILS]]})  # yapf: disable
        self._append(json_line({"step": step, "kind": kind, "groups": groups}).encode("utf-8", "replace"))

    def _media_of(self, episode: Episode) -> dict[str, Any]:
        """Return the first pictures that an environment has shown in a response; those of ``reset`` are in the prompt.
        """
        if self.media is None or not (shown := episode.joined.shown):
            return {}
        known = [*map(self.media.show, shown[:THUMBNAILS])]  # of another rank, perhaps
        return {"media": [self._shown(one.key) for one in known]}

    def _shown(self, key: str) -> str:
        """Return a picture, or the first frame of a video, as a small JPEG in a data URL; of a sound, and of what
        cannot be read any more, its kind."""
        kind = key.partition(":")[0]
        if kind == "audio" or self.media is None:
            return kind
        try:
            medium, file = self.media.open(key), BytesIO()
            picture = (medium.frames[0] if kind == "video" else medium).copy()
            picture.thumbnail((THUMBNAIL, THUMBNAIL))
            picture.save(file, "JPEG", quality=80)
        except (UserError, OSError, ValueError, MemoryError) as error:
            get_logger().warning(f"the report shows no picture for {key}: {first_line(error)}")
            return kind
        return f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"

    def _append(self, line: bytes) -> None:
        """Append a whole line or nothing: without room on the disk the run continues without it."""
        size = self.path.stat().st_size if self.path.exists() else 0
        with optional_output(f"a record of {self.path.name}"):
            try:
                with open(self.path, "ab") as file:
                    file.write(line)
            except OSError:
                os.truncate(self.path, size)
                raise


def _lowest(ranked: Iterable[tuple[int, int, Group]]) -> list[tuple[int, int, Group]]:
    return sorted(ranked, key=lambda each: each[:2])[:GROUPS]
