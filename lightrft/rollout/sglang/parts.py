"""Parts of responses as requests of SGLang."""
import asyncio
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.open_responses import OpenResponse
from lightrft.rollout.partwise import Part
from lightrft.rollout.sglang.client import SGLangNative
from lightrft.rollout.sglang.media import SGLangMedia
from lightrft.types import Key

_ROUND_S = 0.02  # while answers may come, after which responses are to resume


class SGLangParts:
    """Parts of responses, each of which is one SGLang request; those of one prompt share its cached prefix.

    The noise of a token depends on the seed and the token's position in the sequence, so a response resumes as it would
    have continued. SGLang's schedulers go on between two rounds.

    Args:
        stop_of: returns the tokens that end a response.
        media: makes SGLang's inputs of the media of requests; None: they take text only.
    """

    def __init__(self, native: SGLangNative, stop_of: Callable[[SamplingParams], list[int]],
                 media: SGLangMedia | None = None) -> None:
        self.native, self.stop_of, self.media = native, lru_cache(stop_of), media
        self.drawing: dict[Key, asyncio.Task[Part]] = {}

    def round(self, begun: list[OpenResponse], waiting: bool) -> list[Part]:
        """Implement :meth:`~lightrft.rollout.partwise.PartDrawer.round`: a round lasts until a part ends."""
        return self.native.run(lambda: self._round(begun, _ROUND_S if waiting else None))

    async def _round(self, begun: list[OpenResponse], limit_s: float | None) -> list[Part]:
        self.drawing |= {response.key: asyncio.ensure_future(self._draw(response)) for response in begun}
        await asyncio.wait(self.drawing.values(), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        return self._taken(sorted(key for key, task in self.drawing.items() if task.done()))

    def cancel(self, keys: Iterable[Key] | None = None) -> list[Part]:
        """Abort requests, and return what they have drawn."""
        cancelled = list(self.drawing if keys is None else keys)
        return self.native.run(lambda: self._cancel(cancelled)) if cancelled else []

    async def _cancel(self, keys: list[Key]) -> list[Part]:
        for key in keys:
            self.native.manager.abort_request(_name(key))
        await asyncio.wait([self.drawing[key] for key in keys])
        return self._taken(keys)

    def _taken(self, keys: list[Key]) -> list[Part]:
        return [self.drawing.pop(key).result() for key in keys]

    async def _draw(self, response: OpenResponse) -> Part:
        from sglang.srt.managers.io_struct import GenerateReqInput
        episode, room, p = response.episode, 1 if response.begins_hot else response.room, response.next_params
        sampling: dict[str, Any] = {
            "max_new_tokens": room, "temperature": p.temperature, "top_p": p.top_p, "top_k": p.top_k or -1, "min_p":
            p.min_p, "stop_token_ids": self.stop_of(p), "sampling_seed": episode.seed if p.temperature else -1
        }  # yapf: disable
        media = [self.media.of(episode.prompt, episode.response_ids)] if self.media and episode.prompt.media else None
        request = GenerateReqInput(rid=_name(response.key), input_ids=episode.token_ids, image_data=media,
                                   sampling_params=sampling, return_logprob=True)
        answer = await anext(self.native.manager.generate_request(request, None))
        meta, drawn = answer["meta_info"], list(answer["output_ids"])
        reason = meta["finish_reason"]["type"]
        if reason == "abort":  # an abort may come after the end
            reason = "stop" if drawn and drawn[-1] in self.stop_of(p) else "length" if len(drawn) == room else "abort"
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
        return Part(response.key, drawn, logprobs, reason)


def _name(key: Key) -> str:
    """Return SGLang's name of a part: an abort ends all requests whose names begin with the given one."""
    return "/".join(map(str, key)) + "."
