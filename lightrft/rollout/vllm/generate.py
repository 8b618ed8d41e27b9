"""One call of ``generate`` on vLLM: requests in, responses out as they finish."""
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lightrft.rollout.collector import CompletionCollector
from lightrft.rollout.engine import Completion, Ended, Request, SamplingParams
from lightrft.types import MediaSource
from lightrft.utils.errors import UserError

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
        media: source of the media of requests.
    """

    def __init__(self, engine: "LLMEngine", collector: CompletionCollector, params: SamplingParams, stop_ids: list[int],
                 adapter: Any = None, media: MediaSource | None = None) -> None:
        self.engine, self.collector, self.params, self.stop_ids = engine, collector, params, stop_ids
        self.adapter, self.media = adapter, media
        self.rendered: dict[int, Any] = {}  # vLLM's form of the prompts with media, whose media it has processed
        self.drawing: dict[str, tuple[int, int, str]] = {}  # request, index among its seeds, vLLM's own name; by ours

    def run(self) -> list[list[Completion]]:
        """Generate; return this rank's responses, in the order of its requests and their seeds."""
        try:
            self._draw()
        finally:  # after an error too, or the next call would resume what is left
            rest = self._abort()
        self.collector.store(rest)
        return self.collector.own

    def _draw(self) -> None:
        for i, request in enumerate(self.collector.requests):
            for j in range(len(request.seeds)):
                self._add(i, j)
        complete = self.collector.empty
        while not self.collector.enough(complete):
            complete, resumed = self.collector.take([self._take(out) for out in self.engine.step() if out.finished])
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
        """Return vLLM's form of the prompt of request ``i``, with its media: processed once for all its responses."""
        request = self.collector.requests[i]
        if not request.media or self.media is None:
            return {}
        if i not in self.rendered:
            self.rendered[i] = rendered(self.engine, request, self.media)
        return self.rendered[i]

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

    def _take(self, output: Any) -> tuple[int, int, Completion]:
        """Convert a finished vLLM request to the part of a response that it drew."""
        i, j, _ = self.drawing.pop(output.request_id)
        return i, j, _part(output)

    def _abort(self) -> Ended:
        """Stop what is unfinished; return it as it is."""
        from vllm.v1.engine import FinishReason
        states = self.engine.output_processor.request_states
        rest: Ended = []
        for i, j, native in self.drawing.values():
            output: Any = states[native].make_request_output([], None, FinishReason.ABORT, None)
            rest.append((i, j, _part(output)))
        self.engine.abort_request(list(self.drawing))
        self.drawing.clear()
        return rest


def rendered(engine: "LLMEngine", request: Request, media: MediaSource, whole: bool = False) -> Any:
    """Process the media of a prompt; return vLLM's form of it. ``whole``: with the tensors of all media, also of those
    that vLLM's cache holds.

    Raises:
        UserError: vLLM expands the prompt to other tokens than the trainer.
    """
    data: dict[str, list[Any]] = {}
    for key in request.media:
        kind = key.partition(":")[0]
        data.setdefault(kind, []).append(_native_medium(kind, media.open(key)))
    prompt: Any = {"prompt_token_ids": request.unexpanded, "multi_modal_data": data}
    if "video" in data:  # its frames were chosen when it was decoded
        prompt["mm_processor_kwargs"] = {"do_sample_frames": False}
    (found, ) = engine.renderer.render_cmpl([prompt], skip_mm_cache=whole)
    if not _same_tokens(found, request.token_ids):
        raise UserError(
            f"vLLM makes {len(found['prompt_token_ids'])} tokens of a prompt with {', '.join(data)} that has "
            f"{len(request.token_ids)} for the trainer: it processes media of this model in another way; "
            "use --engine_type hf")
    return found


def media_tensors(engine: "LLMEngine", request: Request, media: MediaSource) -> dict[str, list[Tensor]]:
    """Return the tensors that vLLM's processor makes of the media of a prompt, by name, in the order of the media."""
    found: dict[str, list[Tensor]] = {}
    for items in rendered(engine, request, media, whole=True)["mm_kwargs"].values():
        for item in items:
            for name, value in item.get_data().items():
                if isinstance(value, Tensor):  # Qwen3-VL's keep a list of times too
                    found.setdefault(name, []).append(value)
    return found


def _same_tokens(found: Any, ours: list[int]) -> bool:
    """Return True if vLLM's tokens are the trainer's. In the places of features one other token may stand, which vLLM
    writes for videos of InternVL: nobody reads it."""
    places = {each.offset + i for some in found["mm_placeholders"].values() for each in some
              for i in range(each.length) if each.is_embed is None or each.is_embed[i]}  # yapf: disable
    theirs = list(found["prompt_token_ids"])
    other = [(i, pair) for i, pair in enumerate(zip(theirs, ours)) if pair[0] != pair[1]]
    return len(theirs) == len(ours) and all(i in places for i, _ in other) and len({pair for _, pair in other}) < 2


def _native_medium(kind: str, medium: Any) -> Any:
    """Return a decoded medium in vLLM's form; frames with their times, as indices into a video of one a second."""
    if kind == "video":
        told = {"fps": 1.0, "duration": medium.seconds, "total_num_frames": medium.seconds, "frames_indices":
                list(medium.times), "do_sample_frames": False}  # yapf: disable
        return np.stack([np.asarray(frame) for frame in medium.frames]), told
    return (medium.samples, medium.rate) if kind == "audio" else medium


def _part(output: "RequestOutput") -> Completion:
    native: Any = output.outputs[0]
    return Completion(list(native.token_ids), list(native.logprobs.logprobs), native.finish_reason)
