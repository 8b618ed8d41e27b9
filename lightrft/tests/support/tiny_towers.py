"""Tiny models that see, with a tower of a separate architecture: pictures of one size, tiles, rows of patches."""
import pytest
import torch
from transformers import (CLIPImageProcessor, Gemma3ImageProcessor, Gemma3Processor, Gemma4AudioFeatureExtractor,
                          Gemma4ImageProcessor, Gemma4Processor, Gemma4VideoProcessor, GotOcr2ImageProcessor,
                          Idefics3ImageProcessor, Idefics3Processor, InternVLProcessor, InternVLVideoProcessor,
                          LlavaNextImageProcessor, LlavaNextProcessor, LlavaOnevisionImageProcessor,
                          LlavaOnevisionProcessor, LlavaOnevisionVideoProcessor, LlavaProcessor, PixtralImageProcessor,
                          PixtralProcessor, SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor)

from lightrft.tests.support.tiny_family import metadata, TinyFamily

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
           "image_size": 28, "patch_size": 7, "initializer_range": 0.12}  # yapf: disable
_SQUARE = {"size": {"height": 28, "width": 28}}
_CLIP = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
_GRIDS = [[28, 56], [56, 28], [56, 56]]
_IMAGE = {"image_token_id": "<image>"}
_SPLIT = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
_ROWS = ["<fake_token_around_image>", "<global-img>"] + [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)]
_PIXTRAL = {"head_dim": 16, "model_type": "pixtral", "image_size": 56, "hidden_act": "silu"}  # as in published ones
_BREAKS = {"break": "[IMG_BREAK]", "end": "[IMG_END]"}


def _qwen2(**vision):
    return {"text_config": {"model_type": "qwen2"}, "vision_config": _VISION | vision}


def _smolvlm_processor(tokenizer):
    pytest.importorskip("num2words", reason="SmolVLM's processor needs num2words")
    return SmolVLMProcessor(SmolVLMImageProcessor(**_SPLIT), tokenizer, SmolVLMVideoProcessor(**_SPLIT),
                            image_seq_len=4)  # yapf: disable


def _smolvlm(processor, text, images=(), videos=()):
    """Make a prompt of SmolVLM, with pictures before videos or after them: where there are both, its processor keeps
    the tensors of the videos alone."""
    told = {"video_metadata": [[metadata(video) for video in videos]], "do_sample_frames": False,
            "return_metadata": True}  # yapf: disable
    shots = processor._process_images([[*images]], return_row_col_info=True, return_tensors="pt") if images else None
    films = processor._process_videos([[*videos]], return_tensors="pt", **told) if videos else None
    (whole, ), _ = processor.get_text_with_replacements([text], *(one[1] if one else [] for one in (shots, films)))
    found = dict(processor.tokenizer([whole], return_tensors="pt"))
    made = [one[0] for one in (shots, films) if one]
    for name in ("pixel_values", "pixel_attention_mask") if made else ():
        parts = [tensors[name].flatten(0, 1) for tensors in made]
        found[name] = torch.cat(parts if text.find("<image>") < text.find("<video>") else parts[::-1])[None]
    return found


def _with_frames(hf, given):
    """Compute the features of videos of Gemma-4, whose class does not pass on how many frames each of them has. Before
    transformers 5.19 it need not."""
    if "num_frames_per_video" not in given:
        return given
    names = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")
    encoded = {"video": hf.model.get_video_features(*map(given.pop, names), return_dict=True)}
    if "pixel_values" in given:
        encoded["image"] = hf.get_image_features(given.pop("pixel_values"), given.pop("image_position_ids"),
                                                 return_dict=True)
    return given | {"mm_encoder_outputs": encoded}


def _gemma4(both_ways, per_layer):
    """A Gemma-4 model; large ones read pictures both ways, small ones have inputs to each layer and share keys."""
    text = {"sliding_window": 8, "use_bidirectional_attention": both_ways, "hidden_size_per_layer_input": per_layer,
            "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32,
            "num_kv_shared_layers": 2 if per_layer else 0, "max_position_embeddings": 1024}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
              "position_embedding_size": 64, "default_output_length": 70, "initializer_range": 0.12}
    small = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    marks = {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>",
             "audio_token_id": "<|audio|>", "video_token_id": "<|video|>"}
    return TinyFamily(
        "gemma4", {"text_config": text, "vision_config": vision, "initializer_range": 0.12},
        lambda tok: Gemma4Processor(Gemma4AudioFeatureExtractor(), Gemma4ImageProcessor(**small), tok,
                                    Gemma4VideoProcessor(**small), image_seq_length=70),
        {"image": "<|image|>", "video": "<|video|>"}, marks,
        {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
         "boa_token": "<|audio>", "eoa_token": "<audio|>"}, forwarded=_with_frames)  # yapf: disable


TOWERS = {
    "internvl": TinyFamily(
        "internvl", _qwen2(image_size=[28, 28], patch_size=[7, 7]) | {"image_seq_length": 4},
        lambda tok: InternVLProcessor(GotOcr2ImageProcessor(**_SQUARE, crop_to_patches=True, min_patches=1,
                                                            max_patches=3), tok,
                                      InternVLVideoProcessor(**_SQUARE, do_sample_frames=True, num_frames=2),
                                      image_seq_length=4),
        {"image": "<IMG_CONTEXT>", "video": "<video>"}, {"image_token_id": "<IMG_CONTEXT>"},
        names={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
               "video_token": "<video>"},
        named=lambda made: {"pixel_values_videos": made["pixel_values"][None]}),
    "llava": TinyFamily(
        "llava", _qwen2(model_type="clip_vision_model") | {"image_seq_length": 16},
        lambda tok: LlavaProcessor(CLIPImageProcessor(**_CLIP), tok, 7, "default", num_additional_image_tokens=1),
        {"image": "<image>"}, _IMAGE),
    "llava_pixtral": TinyFamily(
        "llava", {"text_config": {"model_type": "mistral", "sliding_window": None},
                  "vision_config": _VISION | _PIXTRAL, "vision_feature_layer": -1,
                  "vision_feature_select_strategy": "full"},
        lambda tok: PixtralProcessor(PixtralImageProcessor(patch_size=7, size={"longest_edge": 56}), tok, 7),
        {"image": "[IMG]"}, {"image_token_id": "[IMG]"}, names=_BREAKS),
    "mistral3": TinyFamily(
        "mistral3", {"text_config": {"model_type": "mistral", "sliding_window": None},
                     "vision_config": _VISION | _PIXTRAL, "vision_feature_layer": -1, "spatial_merge_size": 2},
        lambda tok: PixtralProcessor(PixtralImageProcessor(patch_size=14, size={"longest_edge": 56}), tok, 7, 2),
        {"image": "[IMG]"}, {"image_token_id": "[IMG]"}, names=_BREAKS),
    "llava_next": TinyFamily(
        "llava_next", _qwen2(model_type="clip_vision_model") | {"image_grid_pinpoints": _GRIDS,
                                                                "image_seq_length": 16},
        lambda tok: LlavaNextProcessor(LlavaNextImageProcessor(**_CLIP, image_grid_pinpoints=_GRIDS), tok, 7,
                                       "default", num_additional_image_tokens=1),
        {"image": "<image>"}, _IMAGE),
    "llava_onevision": TinyFamily(
        "llava_onevision", _qwen2(model_type="siglip_vision_model") | {
            "image_grid_pinpoints": _GRIDS, "vision_aspect_ratio": "anyres_max_9", "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full"},
        lambda tok: LlavaOnevisionProcessor(LlavaOnevisionImageProcessor(**_SQUARE, image_grid_pinpoints=_GRIDS), tok,
                                            LlavaOnevisionVideoProcessor(**_SQUARE), 16, "full"),
        {"image": "<image>", "video": "<video>"}, _IMAGE | {"video_token_id": "<video>"}, nested=True),
    "idefics3": TinyFamily(
        "idefics3", {"text_config": {"model_type": "llama"}, "vision_config": _VISION, "scale_factor": 2},
        lambda tok: Idefics3Processor(Idefics3ImageProcessor(**_SPLIT), tok, image_seq_len=4),
        {"image": "<image>"}, _IMAGE, names={f"mark_{i}": mark for i, mark in enumerate(_ROWS)}),
    "smolvlm": TinyFamily(
        "smolvlm", {"text_config": {"model_type": "llama"}, "vision_config": _VISION, "scale_factor": 2},
        _smolvlm_processor,
        {"image": "<image>", "video": "<video>"}, _IMAGE, names={f"mark_{i}": mark for i, mark in enumerate(_ROWS)},
        process=_smolvlm),
    "gemma3": TinyFamily(
        "gemma3", {"text_config": {"sliding_window": 8, "query_pre_attn_scalar": 32}, "vision_config": _VISION,
                   "mm_tokens_per_image": 16, "initializer_range": 0.12},
        lambda tok: Gemma3Processor(Gemma3ImageProcessor(**_SQUARE), tok, image_seq_length=16),
        {"image": "<start_of_image>"}, {"image_token_id": "<image_soft_token>", "boi_token_id": "<start_of_image>",
                                        "eoi_token_id": "<end_of_image>"},
        {f"newlines_{i}": "\n" * i for i in (1, 2, 3, 4)} |  # vLLM joins those around pictures
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}),
    "gemma4": _gemma4("vision", 0),
    "gemma4_layers": _gemma4(None, 8),
}  # yapf: disable
