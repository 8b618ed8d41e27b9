"""One call of ``generate`` on SGLang: requests in, responses out as they finish."""
import asyncio
from typing import Any

from lightrft.rollout.engine import Completion, Request, SamplingParams
from lightrft.rollout.sglang_native import SGLangNative
from lightrft.rollout.told import Ended


class SGLangRun:
    """Every sample is an SGLang request of its own, with its own seed; samples of one prompt share its cached prefix.

    What a seed draws for a token hangs on the token's place in the sequence, so that a response goes on from a prefix
    as it would have in one go. With ``params.first_temperature`` a response takes two requests, one for its first
    token.
    """

    def __init__(self, native: SGLangNative, requests: list[Request], params: SamplingParams,
                 stop_ids: list[int]) -> None:
        self.native, self.requests, self.params, self.stop_ids = native, requests, params, stop_ids
        self.drawing: dict[asyncio.Task[Completion], tuple[int, int]] = {}
        self.begun = self.enough = False

    def ended(self) -> Ended:
        """Waits for responses; those that are done by now and were not before."""
        return self.native.run(self._some)

    def abort(self) -> Ended:
        """Stop what is under way; it counts as it is."""
        return self.native.run(self._rest) if self.drawing else []

    async def _some(self) -> Ended:
        if not self.begun:
            pairs = [(i, j) for i, request in enumerate(self.requests) for j in range(len(request.seeds))]
            self.drawing = {asyncio.ensure_future(self._draw(i, j)): (i, j) for i, j in pairs}
            self.begun = True
        return self._take((await asyncio.wait(self.drawing, return_when=asyncio.FIRST_COMPLETED))[0])

    async def _rest(self) -> Ended:
        self.enough = True
        self.native.manager.abort_request(abort_all=True)
        return self._take((await asyncio.wait(self.drawing))[0])

    def _take(self, done: set["asyncio.Task[Completion]"]) -> Ended:
        return sorted((*self.drawing.pop(task), task.result()) for task in done)

    async def _draw(self, i: int, j: int) -> Completion:
        request, p = self.requests[i], self.params
        begun = request.prefixes[j] if request.prefixes else []
        left = p.max_new_tokens - len(begun)
        if p.first_temperature is None or begun:
            return await self._ask(request.token_ids + begun, request.seeds[j], p.temperature, left)
        first = await self._ask(request.token_ids, request.seeds[j], p.first_temperature, 1)
        if first.finish_reason != "length" or left == 1:
            return first
        if self.enough:
            return Completion(first.token_ids, first.logprobs, "abort")
        rest = await self._ask(request.token_ids + first.token_ids, request.seeds[j], p.temperature, left - 1)
        return Completion(first.token_ids + rest.token_ids, first.logprobs + rest.logprobs, rest.finish_reason)

    async def _ask(self, token_ids: list[int], seed: int, temperature: float, new_tokens: int) -> Completion:
        from sglang.srt.managers.io_struct import GenerateReqInput
        p = self.params
        sampling: dict[str, Any] = {
            "max_new_tokens": new_tokens, "temperature": temperature, "top_p": p.top_p, "top_k": p.top_k or -1,
            "min_p": p.min_p, "stop_token_ids": self.stop_ids, "sampling_seed": seed if temperature else -1
        }  # yapf: disable
        asked = GenerateReqInput(input_ids=token_ids, sampling_params=sampling, return_logprob=True)
        answer = await anext(self.native.manager.generate_request(asked, None))
        told, drawn = answer["meta_info"], list(answer["output_ids"])
        reason = told["finish_reason"]["type"]
        if reason == "abort":  # it may come after the end
            ended = drawn and drawn[-1] in self.stop_ids
            reason = "stop" if ended else "length" if len(drawn) == new_tokens else "abort"
        return Completion(drawn, [entry[0] for entry in told.get("output_token_logprobs") or []], reason)
