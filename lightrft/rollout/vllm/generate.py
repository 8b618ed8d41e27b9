"""One call of ``generate`` on vLLM: requests in, responses out as they finish."""
from typing import TYPE_CHECKING, Any

from lightrft.rollout.collector import CompletionCollector
from lightrft.rollout.engine import Completion, Ended, SamplingParams
from lightrft.rollout.vllm.launch import NativeStream
from lightrft.rollout.vllm.media import VLLMMedia

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine


class VLLMRun:
    """One ``generate`` call, in which every part of a response is one vLLM request; those of one prompt share its
    cached blocks.

    With ``params.first_temperature`` the first token of a response is a part. A part that resumes a response, from a
    prefix or from an earlier part, has a seed derived from its start position (vLLM's noise starts again).

    Args:
        collector: has the requests, and gets the parts as they end.
        adapter: vLLM's ``LoRARequest`` of all requests, if any.
        media: media of requests.
        stream: what vLLM computes on; callbacks of the trainer run on the trainer's.
    """

    def __init__(self, engine: "LLMEngine", collector: CompletionCollector, params: SamplingParams, stop_ids: list[int],
                 adapter: Any = None, media: VLLMMedia | None = None, stream: NativeStream | None = None) -> None:
        self.engine, self.collector, self.params, self.stop_ids = engine, collector, params, stop_ids
        self.adapter, self.media, self.stream = adapter, media, stream or NativeStream()
        self.rendered: dict[int, Any] = {}  # vLLM's form of the prompts with media, with the tensors of their media
        self.drawing: dict[str, tuple[int, int, str]] = {}  # request, index among its seeds, vLLM's own name; by ours

    def run(self) -> list[list[Completion]]:
        """Generate; return this rank's responses, in the order of its requests and their seeds."""
        try:
            self._draw()
        finally:  # after an error too, or the next call would resume what is left
            rest = self._abort()
        return self.collector.finish(rest)

    def _draw(self) -> None:
        for i, request in enumerate(self.collector.requests):
            for j in range(len(request.seeds)):
                self._add(i, j)
        complete = self.collector.empty
        while not self.collector.enough(complete):
            with self.stream.entered():
                outputs = self.engine.step() if self.drawing else []  # all wait for answers
            complete, resumed = self.collector.take([self._take(out) for out in outputs if out.finished])
            for i, j in resumed:
                self._add(i, j)

    def _add(self, i: int, j: int) -> None:
        request, begun = self.collector.requests[i], self.collector.begun(i, j)
        temperature, left = self.params.temperature, self.params.max_new_tokens - len(begun)
        if self.params.first_temperature is not None and not begun:
            temperature, left = self.params.first_temperature, 1
        name, seed = f"{i}/{j}/{len(begun)}", (request.seeds[j] + len(begun)) % (1 << 63)
        prompt = self._prompt(i) | {"prompt_token_ids": request.token_ids + begun}
        native = self._native(temperature, left, seed)
        self.drawing[name] = i, j, self.engine.add_request(name, prompt, native, lora_request=self.adapter)

    def _prompt(self, i: int) -> Any:
        """Return vLLM's form of the prompt of request ``i``, with its media: made once for all its responses."""
        request = self.collector.requests[i]
        if not request.media or self.media is None:
            return {}
        if i not in self.rendered:
            self.rendered[i] = self.media.prompt(request)
        return self.rendered[i]

    def _native(self, temperature: float, max_tokens: int, seed: int) -> Any:
        """Build vLLM's parameters, which are used once, so that vLLM need not copy them."""
        from vllm import SamplingParams as NativeParams
        from vllm.sampling_params import RequestOutputKind
        p = self.params
        native = NativeParams(temperature=min(temperature, 2.0), top_p=p.top_p, top_k=p.top_k, min_p=p.min_p, seed=seed,
                              repetition_penalty=p.repetition_penalty, max_tokens=max_tokens,
                              stop_token_ids=self.stop_ids, ignore_eos=True, logprobs=0, flat_logprobs=True,
                              detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True)
        native.temperature = temperature  # more than 2 (FIRE) is refused by the constructor alone
        return native

    def _take(self, output: Any) -> tuple[int, int, Completion]:
        """Convert a finished vLLM request to the part of a response that it drew."""
        i, j, _ = self.drawing.pop(output.request_id)
        return i, j, _part(output)

    def _abort(self) -> Ended:
        """Stop what is unfinished; return it as it is."""
        from vllm.v1.engine import FinishReason
        states = self.engine.output_processor.request_states
        rest: list[tuple[int, int, Completion]] = []
        for i, j, native in self.drawing.values():
            output: Any = states[native].make_request_output([], None, FinishReason.ABORT, None)
            rest.append((i, j, _part(output)))
        self.engine.abort_request(list(self.drawing))
        self.drawing.clear()
        return rest


def _part(output: "RequestOutput") -> Completion:
    native: Any = output.outputs[0]
    return Completion(list(native.token_ids), list(native.logprobs.logprobs), native.finish_reason)
