"""Prompts with pictures, videos and sounds in vLLM's form, with the tensors that the trainer computes with."""
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.feature_extraction_utils import BatchFeature

from lightrft.models.actor_modality import FAMILIES
from lightrft.types import MediaSource, MediaTensors, Prompt
from lightrft.utils.errors import UserError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_GIVEN = {"images", "videos", "audio"}  # media among the arguments of a processor
_SECONDS = {"second_per_grid_ts"}  # between frames, of which positions are computed: not to be rounded to bfloat16
_OF_PICTURES = ("gemma4", "internvl")  # their frames come to vLLM as pictures do


class VLLMMedia:
    """Media of the prompts of one engine, each processed by ``source`` alone.

    vLLM finds the places of features and their positions with its own code for a family; only the call of Hugging
    Face's processor in it is replaced, by the tensors of the medium that is asked for. vLLM asks for one at a time,
    and keeps what it made of it by key.
    """

    def __init__(self, engine: "LLMEngine", source: MediaSource) -> None:
        self.engine, self.source = engine, source
        self._asked: MediaTensors | None = None

    def rendered(self, prompt: Prompt) -> Any:
        """Return vLLM's form of a prompt, with the tensors of all its media.

        Raises:
            UserError: vLLM expands the prompt to other tokens than the trainer.
        """
        self._replace_processor()
        media = {key: _native_medium(key.partition(":")[0], self.source.open(key)) for key in prompt.media}
        for key in media:
            found = self._rendered(prompt, media, [key], self.source.tensors(key))
        if len(prompt.media) > 1:
            found = self._rendered(prompt, media, prompt.media)
        if not _same_tokens(found, prompt.token_ids):
            kinds = ", ".join(dict.fromkeys(key.partition(":")[0] for key in prompt.media))
            raise UserError(
                f"vLLM makes {len(found['prompt_token_ids'])} tokens of a prompt with {kinds} that has "
                f"{len(prompt.token_ids)} for the trainer: it processes media of this model differently; use "
                "--engine_type hf")
        return found

    def tensors(self, prompt: Prompt) -> dict[str, list[Tensor]]:
        """Return the tensors with which vLLM computes the media of a prompt, by name, in the order of the media."""
        found: dict[str, list[Tensor]] = {}
        for items in self.rendered(prompt)["mm_kwargs"].values():
            for item in items:
                for name, value in item.get_data().items():
                    if isinstance(value, Tensor):  # Qwen3-VL's keep a list of times too
                        found.setdefault(name, []).append(value)
        return found

    def _rendered(self, prompt: Prompt, media: Mapping[str, Any], keys: Iterable[str],
                  asked: MediaTensors | None = None) -> Any:
        """Let vLLM replace the first placeholders of a prompt by the tokens of ``keys``, of which it has the tensors or
        asks for those of one; it knows a medium by its key."""
        names: dict[str, list[str]] = {}
        for key in keys:
            names.setdefault(key.partition(":")[0], []).append(key)
        native: Any = {"prompt_token_ids": prompt.unexpanded_ids, "multi_modal_uuids": names, "multi_modal_data": {
            kind: [media[key] for key in some] for kind, some in names.items()}}  # yapf: disable
        if any(key.startswith("video:") for key in media):  # its frames were chosen when it was decoded
            native["mm_processor_kwargs"] = {"do_sample_frames": False}
        self._asked = asked
        try:  # the other cache has no tensors here
            (found, ) = self.engine.renderer.render_cmpl([native], skip_mm_cache=True)
        finally:
            self._asked = None
        return found

    def _replace_processor(self) -> None:
        """Answer vLLM's calls of Hugging Face's processor, whose results it casts; every family makes them there."""
        context = self.engine.renderer.get_mm_processor().info.ctx
        if "call_hf_processor" not in vars(context):
            vars(context)["call_hf_processor"] = partial(self._process, context.call_hf_processor)

    def _process(self, own: Callable[..., Any], processor: Any, data: Mapping[str, Any],
                 options: Mapping[str, Any] = {}) -> Any:
        """Return the tensors of the medium that is asked for; other calls have text alone, or several media for which
        vLLM's cache has no room."""
        if self._asked is None or not _GIVEN & data.keys():
            return own(processor, data, options)
        tensors = self._as_processed(self._asked)
        exact = {name: tensors[name] for name in _SECONDS & tensors.keys()}
        return BatchFeature({**own(lambda **_: BatchFeature(tensors), data), **exact})

    def _as_processed(self, medium: MediaTensors) -> dict[str, Tensor]:
        """Return what the processor returns for a text with one medium. vLLM changes the shape of some in place."""
        found = {name: tensor.detach() for name, tensor in medium.tensors.items()}
        family = self.engine.model_config.hf_config.model_type
        if medium.kind == "video" and family in _OF_PICTURES:
            towers = FAMILIES[family].towers
            names = dict(zip(towers["video"].reads, towers["image"].reads))
            found = {names.get(name, name): tensor[0] if tensor.dim() == 5 else tensor
                     for name, tensor in found.items()}  # yapf: disable
        ids = self.engine.renderer.get_tokenizer().encode(medium.text, add_special_tokens=False)
        return found | {"input_ids": torch.tensor([ids])}


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
        facts = {"fps": 1.0, "duration": medium.seconds, "total_num_frames": medium.seconds, "frames_indices":
                 list(medium.times), "do_sample_frames": False}  # yapf: disable
        return np.stack([np.asarray(frame) for frame in medium.frames]), facts
    return (medium.samples, medium.rate) if kind == "audio" else medium
