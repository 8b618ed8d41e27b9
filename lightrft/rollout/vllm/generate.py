"""One call of ``generate`` on vLLM: requests in, responses out as they finish."""
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightrft.rollout.engine import Completion, SamplingParams
from lightrft.rollout.collector import CompletionCollector

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine


@dataclass
class _Drawing:
    """An unfinished sample. ``first``: the tokens that an earlier request drew for it; ``native_id``: vLLM's id."""
    request: int
    sample: int
    first: Completion
    native_id: str = ""


class VLLMRun:
    """One ``generate`` call, in which every sample is one vLLM request with its own seed; samples of one prompt share
    its cached blocks.

    With ``params.first_temperature`` a response takes two requests: one for the first token, one that continues it. A
    request that continues, from there or from a prefix, has a seed derived from its start position (vLLM's noise
    starts again).

    Args:
        collector: has the requests, and gets the responses as they end.
        adapter: vLLM's ``LoRARequest`` of all samples, if any.
        agree: returns whether all ranks that run the engine together have enough; only then does it stop.
    """

    def __init__(self, engine: "LLMEngine", collector: CompletionCollector, params: SamplingParams, stop_ids: list[int],
                 agree: Callable[[bool], bool], adapter: Any = None) -> None:
        self.engine, self.collector, self.params, self.stop_ids = engine, collector, params, stop_ids
        self.requests, self.agree, self.adapter = collector.requests, agree, adapter
        self.drawing: dict[str, _Drawing] = {}

    def run(self) -> list[list[Completion]]:
        """Generate; return this rank's responses, in the order of its requests and their seeds."""
        try:
            self._draw_all()
        finally:  # after an error too, or the next call would resume what is left
            self._abort()
        return self.collector.own()

    def _draw_all(self) -> None:
        for i, request in enumerate(self.requests):
            for j in range(len(request.seeds)):
                self._add(_Drawing(i, j, Completion([], [], "")))
        complete = self.collector.empty
        while True:
            enough = self.collector.enough(complete)
            if complete and self.agree(enough) or not self.engine.has_unfinished_requests():
                return
            outputs: list[Any] = [output for output in self.engine.step() if output.finished]
            complete = self.collector.take([ended for ended in map(self._take, outputs) if ended is not None])

    def _add(self, drawing: _Drawing) -> None:
        request, j = self.requests[drawing.request], drawing.sample
        begun = (request.prefixes[j] if request.prefixes else []) + drawing.first.token_ids
        temperature, left = self.params.temperature, self.params.max_new_tokens - len(begun)
        if self.params.first_temperature is not None and not begun:
            temperature, left = self.params.first_temperature, 1
        name = f"{drawing.request}/{j}/{len(begun)}"
        seed = (request.seeds[j] + len(begun)) % (1 << 63)
        prompt: Any = {"prompt_token_ids": request.token_ids + begun}
        drawing.native_id = self.engine.add_request(name, prompt, self._native(temperature, left, seed),
                                                    lora_request=self.adapter)
        self.drawing[name] = drawing

    def _native(self, temperature: float, max_tokens: int, seed: int) -> Any:
        """Build vLLM's parameters, which are used once, so that vLLM need not copy them."""
        from vllm import SamplingParams as NativeParams
        from vllm.sampling_params import RequestOutputKind
        p = self.params
        native = NativeParams(temperature=min(temperature, 2.0), top_p=p.top_p, top_k=p.top_k, min_p=p.min_p, seed=seed,
                              max_tokens=max_tokens, stop_token_ids=self.stop_ids, ignore_eos=True, logprobs=0,
                              flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
                              skip_clone=True)
        native.temperature = temperature  # more than 2 (FIRE) is refused by the constructor alone
        return native

    def _take(self, output: "RequestOutput") -> tuple[int, int, Completion] | None:
        """Process a finished vLLM request: return the sample's request, index and response, unless it continues."""
        drawing = self.drawing.pop(output.request_id)
        i, j, response = drawing.request, drawing.sample, _response(drawing, output)
        if self._goes_on(drawing, response):
            self._add(_Drawing(i, j, response))
            return None
        return i, j, response

    def _goes_on(self, drawing: _Drawing, response: Completion) -> bool:
        """True if this was only the first token, drawn at its own temperature."""
        request, params = self.requests[drawing.request], self.params
        begun = drawing.first.token_ids or (request.prefixes and request.prefixes[drawing.sample])
        return (params.first_temperature is not None and not begun and params.max_new_tokens > 1
                and response.finish_reason == "length")

    def _abort(self) -> None:
        """Stop unfinished responses; keep them as they are."""
        from vllm.v1.engine import FinishReason
        states = self.engine.output_processor.request_states
        for drawing in self.drawing.values():
            output: Any = states[drawing.native_id].make_request_output([], None, FinishReason.ABORT, None)
            self.collector.keep([(drawing.request, drawing.sample, _response(drawing, output))])
        self.engine.abort_request(list(self.drawing))
        self.drawing.clear()


def _response(drawing: _Drawing, output: "RequestOutput") -> Completion:
    native: Any = output.outputs[0]
    first = drawing.first
    return Completion(first.token_ids + list(native.token_ids), first.logprobs + list(native.logprobs.logprobs),
                      native.finish_reason)
