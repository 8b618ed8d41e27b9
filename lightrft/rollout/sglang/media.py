"""Media of requests in SGLang's form: the trainer's own tensors, places and positions.

SGLang's processors are not used. They would process every medium again, and find its places by token id, also where a
policy has drawn such a token.
"""
from collections.abc import Collection, Iterator
from hashlib import sha256
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from lightrft.models.actor_language import ActorLanguage
from lightrft.rollout.engine import refuse_media
from lightrft.types import MediaSource, Prompt

_COMPARED = ("glm4v", "llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_LEVELS = 3  # layers of Qwen3-VL with experts to which SGLang adds features
_PATCH = 1176  # numbers in a patch; of others SGLang's Qwen2.5-VL takes the pixels for features
_OTHERWISE = {
    "gemma3": "SGLang hides the later tokens of a picture from the earlier ones",
    "gemma4": "SGLang has no attention for Gemma-4 on a CPU, so it could not be compared with the trainer",
    "qwen2_audio": "SGLang treats the silence after a sound as part of it",
    "voxtral": "SGLang reads Voxtral in Mistral's own format",
}


def refuse_families(config: PretrainedConfig, kinds: Collection[str], causal: bool = False) -> None:
    """Refuse models whose media SGLang computes in another way than the trainer, whether it attends backwards alone
    (``causal``) or not.

    Raises:
        UserError: with the engine that takes them.
    """
    reason = _reason(config) if kinds else ""
    if reason:
        refuse_media("sglang", kinds, reason)


def _reason(config: PretrainedConfig) -> str:
    family = config.model_type
    if family not in _COMPARED:
        return _OTHERWISE.get(family, f"SGLang has no own code for {family}")
    eye: Any = config.vision_config
    if family == "llava" and eye.model_type != "pixtral":
        return f"SGLang does not run LLaVA with a tower of type {eye.model_type}"
    if family in ("llava", "mistral3") and eye.hidden_act != "silu":
        return f"SGLang's tower computes silu, and the model's {eye.hidden_act} (hidden_act)"
    if family == "qwen2_5_vl" and (size := eye.in_channels * eye.temporal_patch_size * eye.patch_size**2) != _PATCH:
        return f"SGLang takes patches of {_PATCH} numbers of Qwen2.5-VL, and the model has {size} (patch_size)"
    if family == "qwen3_vl_moe" and (levels := len(eye.deepstack_visual_indexes)) != _LEVELS:
        return f"SGLang adds features to {_LEVELS} layers of Qwen3-VL with experts, and the model to {levels}"
    return ""


class ProcessedMedia:
    """Takes the place of SGLang's processors, for requests that bring what :meth:`SGLangMedia.of` returns."""
    prefer_tokenized_input = True

    async def process_mm_data_async(self, image_data: list[Any], **_: Any) -> Any:
        """Return the inputs that a request brings."""
        return image_data[0]

    def clear_preprocess_cache(self) -> None:
        """Do nothing: what the trainer's processor makes of media depends on no weight."""


def take_processed_media() -> None:
    """Let SGLang's tokenizer manager take requests with processed media, and load no processors."""
    from sglang.srt.managers import tokenizer_manager as here
    here.import_processors = here.get_processor_wrapper = lambda *_: None
    here.get_mm_processor = lambda *_, **__: ProcessedMedia()


class SGLangMedia:
    """Media of the requests of one engine, for the model of ``actor``.

    SGLang knows a medium by its key, and computes its features once for all requests between two updates.
    """

    def __init__(self, actor: ActorLanguage, source: MediaSource, tokenizer: Any) -> None:
        self.modality, self.hf, self.source = actor.modality, actor.hf_model, source
        self.marks = {kind: tokenizer.convert_ids_to_tokens(token) for kind, token in actor.modality.tokens.items()}

    def of(self, prompt: Prompt, begun: list[int]) -> Any:
        """Return SGLang's inputs for a prompt with media, after which a response begins with the tokens ``begun``."""
        from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput as Inputs
        items = [item for kind in self.modality.kinds for item in self._items(prompt, kind)]
        ids = prompt.token_ids + begun
        return Inputs(mm_items=items, input_ids=ids, padded_input_ids=Inputs.build_padded_input_ids(ids, items),
                      **self._positions(prompt, len(begun)))

    def _items(self, prompt: Prompt, kind: str) -> Iterator[Any]:
        """Yield SGLang's items of the media of ``kind``, in the order of the prompt."""
        from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
        places = iter(self.modality.prompt_places(prompt.token_ids, kind))
        for key in (key for key in prompt.media if key.startswith(f"{kind}:")):
            medium = self.source.tensors(key)
            feature, *others = self.modality.tower_inputs(medium).items()
            here = islice(places, medium.text.count(self.marks[kind]))
            item = MultimodalDataItem(modality=Modality.from_str(kind), feature=feature[1], offsets=_runs(list(here)),
                                      model_specific_data=dict(others))
            item.set_identity(sha256(key.encode()).digest())
            yield item

    def _positions(self, prompt: Prompt, begun: int) -> dict[str, Tensor]:
        """Positions of M-RoPE; nothing where a token's index is its position."""
        positions = self.modality.prompt_positions(self.hf, prompt.token_ids, prompt.media)
        if positions is None:
            return {}
        after = int(positions.max()) + 1
        more = torch.arange(after, after + begun).expand(3, -1)
        return {
            "mrope_positions": torch.cat([positions, more], 1), "mrope_position_delta":
            torch.tensor([[after - positions.shape[1]]])
        }


def _runs(places: list[int]) -> list[tuple[int, int]]:
    """First and last place of each run of successive ``places``."""
    starts = [one for before, one in zip([-2, *places], places) if one != before + 1]
    ends = [one for one, after in zip(places, [*places[1:], -2]) if after != one + 1]
    return list(zip(starts, ends))
