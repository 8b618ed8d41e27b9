"""Tiny models that hear; Qwen2.5-Omni also sees."""
import json

import torch
from tokenizers import Tokenizer
from transformers import (Qwen2_5OmniProcessor, Qwen2AudioProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor,
                          VoxtralProcessor, WhisperFeatureExtractor)

from lightrft.tests.support.tiny_family import TinyFamily
from lightrft.tests.support.tiny_grids import GRID_TOWER, PIXELS, ROPE

_SECOND = {"feature_size": 16, "chunk_length": 1, "sampling_rate": 16000}  # 100 mel frames
_EAR = {"num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
        "max_source_positions": 50, "initializer_range": 0.12}  # yapf: disable
_QWEN = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
_HALF_MINUTE = _SECOND | {"chunk_length": 30}
SOUND = "<|audio_bos|><|AUDIO|><|audio_eos|>"

_AUDIO_ID = 24
_VOXTRAL = {"sampling_rate": 16000, "padding": True, "truncation": False, "pad_to_multiple_of": 32000,
            "return_tensors": "pt"}  # yapf: disable


def _voxtral(tok):
    """The processor knows its token by the id that it has in Mistral's vocabulary."""
    state = json.loads(tok.backend_tokenizer.to_str())
    mark = next(token for token in state["added_tokens"] if token["content"] == "[AUDIO]")
    vocabulary = state["model"]["vocab"]
    vocabulary.pop(next(name for name, index in vocabulary.items() if index == _AUDIO_ID))
    vocabulary["[AUDIO]"] = mark["id"] = _AUDIO_ID
    state["added_tokens"].sort(key=lambda token: token["id"])
    tok._tokenizer = Tokenizer.from_str(json.dumps(state))
    return VoxtralProcessor(WhisperFeatureExtractor(**_SECOND | {"chunk_length": 2}), tok)


def _voxtral_prompt(processor, text, audio=(), **unused):
    """What Mistral's own tokenizer writes: 12.5 tokens for each second of whole windows, here of two seconds."""
    mel = [processor._retrieve_input_features([wave], 200, **_VOXTRAL) for wave in audio]
    for one in mel:
        text = text.replace("[AUDIO]", "[audio]" * (25 * len(one)), 1)
    ids = processor.tokenizer(text.replace("[audio]", "[AUDIO]"), return_tensors="pt").input_ids
    return {"input_ids": ids} | ({"input_features": torch.cat(mel)} if mel else {})


def _qwen2_audio(window, positions):
    """A Qwen2-Audio model that takes sounds in windows of as many frames as twice its tower has positions."""
    return TinyFamily(
        "qwen2_audio", {"text_config": {"model_type": "qwen2"},
                        "audio_config": _EAR | {"max_source_positions": positions}},
        lambda tok: Qwen2AudioProcessor(WhisperFeatureExtractor(**window), tok),
        {"audio": SOUND}, {"audio_token_id": "<|AUDIO|>"}, names=_QWEN)  # yapf: disable


LONG = _qwen2_audio(_HALF_MINUTE, 1500)  # the windows of published models
SOUNDS = {
    "qwen2_audio": _qwen2_audio(_SECOND, 50),
    "qwen2_5_omni_thinker": TinyFamily(
        "qwen2_5_omni_thinker",
        {"text_config": {"rope_parameters": ROPE},
         "audio_config": _EAR | {"output_dim": 64, "n_window": 8},
         "vision_config": GRID_TOWER | {"window_size": 56, "fullatt_block_indexes": [1]}},
        lambda tok: Qwen2_5OmniProcessor(Qwen2VLImageProcessor(**PIXELS), Qwen2VLVideoProcessor(**PIXELS),
                                         WhisperFeatureExtractor(**_SECOND), tok),
        {"image": "<|vision_bos|><|IMAGE|><|vision_eos|>", "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
         "audio": SOUND},
        {"image_token_id": "<|IMAGE|>", "video_token_id": "<|VIDEO|>", "audio_token_id": "<|AUDIO|>",
         "vision_start_token_id": "<|vision_bos|>", "vision_end_token_id": "<|vision_eos|>",
         "audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>"},
        names=_QWEN | {"image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "vision_bos_token": "<|vision_bos|>",
                       "vision_eos_token": "<|vision_eos|>"}),
    "voxtral": TinyFamily(
        "voxtral", {"text_config": {"model_type": "llama"},
                    "audio_config": {"num_mel_bins": 16, "hidden_size": 32, "intermediate_size": 128,
                                     "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
                                     "max_source_positions": 100, "initializer_range": 0.12}},
        _voxtral, {"audio": "[BEGIN_AUDIO][AUDIO]"}, {"audio_token_id": "[AUDIO]"}, {"begin": "[BEGIN_AUDIO]"},
        process=_voxtral_prompt),
}  # yapf: disable
