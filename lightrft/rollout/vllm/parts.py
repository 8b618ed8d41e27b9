"""Parts of responses as requests of vLLM."""
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, TYPE_CHECKING

import torch

from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.open_responses import OpenPrompt, OpenResponse
from lightrft.rollout.partwise import Part
from lightrft.rollout.vllm.launch import NativeStream, process_state_kept
from lightrft.rollout.vllm.media import VLLMMedia
from lightrft.types import Key
from lightrft.utils.watchdog import tick

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine


class VLLMParts:
    """Parts of responses, each of which is one vLLM request; those of one prompt share its cached blocks.

    A part that resumes a response has a seed derived from its start position: vLLM's noise starts again. A step may
    draw from the global generators, and the first of a part may change the state of the process; both are restored.

    Args:
        stop_of: returns the tokens that end a response.
        adapter: vLLM's ``LoRARequest`` of all requests, if any.
        media: media of requests.
        stream: what vLLM computes on; all else runs on the trainer's.
    """

    def __init__(self, engine: "LLMEngine", stop_of: Callable[[SamplingParams], list[int]], adapter: Any = None,
                 media: VLLMMedia | None = None, stream: NativeStream | None = None) -> None:
        self.engine, self.stop_of = engine, lru_cache(stop_of)
        self.adapter, self.media, self.stream = adapter, media, stream or NativeStream()
        self.names: dict[Key, tuple[str, str]] = {}  # of the requests under way: ours, and vLLM's own

    def round(self, begun: list[OpenResponse], waiting: bool) -> list[Part]:
        """Implement :meth:`~lightrft.rollout.partwise.PartDrawer.round`: every part draws a token."""
        with process_state_kept() if begun else _generators_kept():
            for response in begun:
                self._begin(response)
            with self.stream.entered():
                outputs = self.engine.step()
        client: Any = self.engine.engine_core
        if client.engine_core.scheduler.running:
            tick()
        return [self._taken(output) for output in outputs if output.finished]

    def _begin(self, response: OpenResponse) -> None:
        episode, params, room = response.episode, response.next_params, 1 if response.begins_hot else response.room
        begun, prompt = episode.response_len, self._prompt(response.prompt) | {"prompt_token_ids": episode.token_ids}
        native = native_params(params, self.stop_of(params), room, (episode.seed + begun) % (1 << 63))
        name = "/".join(map(str, (*response.key, begun)))
        self.names[response.key] = name, self.engine.add_request(name, prompt, native, lora_request=self.adapter)

    def _prompt(self, prompt: OpenPrompt) -> Any:
        """Return vLLM's form of a prompt, with its media: made once for all its responses."""
        if not prompt.prompt.media or self.media is None:
            return {}
        prompt.rendered = prompt.rendered or self.media.rendered(prompt.prompt)
        return prompt.rendered

    def _taken(self, output: Any) -> Part:
        """Convert a finished vLLM request to the part that it drew."""
        role, group, index, _ = output.request_id.rsplit("/", 3)
        del self.names[key := Key(role, int(group), int(index))]
        return _part(key, output)

    def cancel(self, keys: Iterable[Key] | None = None) -> list[Part]:
        """Abort requests, and return what they have drawn."""
        from vllm.v1.engine import FinishReason
        states, parts = self.engine.output_processor.request_states, []
        names = {key: self.names.pop(key) for key in list(self.names if keys is None else keys)}
        for key, (_, native) in names.items():
            output: Any = states[native].make_request_output([], None, FinishReason.ABORT, None)
            parts.append(_part(key, output))
        self.engine.abort_request([name for name, _ in names.values()])
        return parts


def native_params(params: SamplingParams, stop_ids: list[int], max_tokens: int, seed: int) -> Any:
    """Build vLLM's parameters, which are used once, so that vLLM need not copy them."""
    from vllm import SamplingParams as NativeParams
    from vllm.sampling_params import RequestOutputKind
    native = NativeParams(temperature=min(params.temperature,
                                          2.0), top_p=params.top_p, top_k=params.top_k, min_p=params.min_p, seed=seed,
                          repetition_penalty=params.repetition_penalty, max_tokens=max_tokens, stop_token_ids=stop_ids,
                          ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
                          output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True)
    native.temperature = params.temperature  # more than 2 (FIRE) is refused by the constructor alone
    return native


def _part(key: Key, output: "RequestOutput") -> Part:
    native: Any = output.outputs[0]
    return Part(key, list(native.token_ids), list(native.logprobs.logprobs), native.finish_reason)


def _generators_kept() -> AbstractContextManager[None]:
    """Context after which torch's generators, of the CPU and of this rank's device, are as before."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])
