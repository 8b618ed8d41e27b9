"""Random models of real shapes, their tokenizer, prompts and reward, and a trainer around them."""
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (GenerationConfig, logging as hf_logging, PretrainedConfig, Qwen2_5_VLConfig, Qwen2Config,
                          Qwen2Tokenizer)

from benchmarks.gpu.catalog import LARGE, Setting, WITH_PICTURES
from lightrft.config.cli import parse_config
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.models.architectures import modality_of
from lightrft.models.tokenizer import load_tokenizer
from lightrft.trainer.model_media import open_media
from lightrft.trainer.session import training_session
from lightrft.trainer.spmd_ppo_trainer import build_models, SPMDPPOTrainer
from lightrft.utils.env import World

SHAPES = {  # of Qwen2.5
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True, "initializer_range": 0.02},
    "7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False, "initializer_range": 0.02},
    "3b-vl": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
              "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True, "initializer_range": 0.02},
}  # yapf: disable
SHAPES["3b"] = SHAPES["3b-vl"]  # its decoder
TOWER = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
         "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}  # yapf: disable
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 128, "vocab_size": 512, "initializer_range": 0.1}  # yapf: disable
TINY_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
              "window_size": 56, "fullatt_block_indexes": [1]}  # yapf: disable
LOGIT_STD = 4.0
SPECIAL = ["<pad>", "<eos>", "<unk>"]
MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
CHAT_TEMPLATE = ("{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
                 "{% else %}{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else "
                 "'<|vision_start|><|image_pad|><|vision_end|>' }}{% endfor %}{% endif %}{% endfor %}")
PROMPT_BYTES, PROMPTS = 96, 256
PATCH, MERGE = 14, 2  # pixels of a patch; patches of a token, along each side
PIXELS, TINY_PIXELS = 448, 56  # of a side of a picture, which is 256 or 4 tokens
REWARD = Path(__file__).with_name("reward.py")


def shape(setting: Setting) -> dict[str, Any]:
    """Return the shape of the model; reduced ones keep what differs between the sizes."""
    full = SHAPES[setting.size]
    return TINY | {"tie_word_embeddings": full["tie_word_embeddings"]} if setting.reduced else full


def build_config(setting: Setting, tokenizer: Qwen2Tokenizer) -> PretrainedConfig:
    """Build the configuration of the model."""
    sizes: dict[str, Any] = shape(setting) | {"max_position_embeddings": 1 << 17, "bos_token_id": None,
                                              "eos_token_id": tokenizer.eos_token_id,
                                              "pad_token_id": tokenizer.pad_token_id}  # yapf: disable
    if setting.size not in WITH_PICTURES:
        return Qwen2Config(**sizes)
    half = sizes["hidden_size"] // sizes["num_attention_heads"] // 2
    sections = [half - 2 * (3 * half // 8), *[3 * half // 8] * 2]  # of time, height and width, as in Qwen2.5-VL
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    tower = (TINY_TOWER if setting.reduced else TOWER) | {"patch_size": PATCH, "spatial_merge_size": MERGE}
    start, image, end, video = tokenizer.convert_tokens_to_ids(MARKS)
    return Qwen2_5_VLConfig(text_config=sizes, vision_config=tower, tie_word_embeddings=sizes["tie_word_embeddings"],
                            image_token_id=image, video_token_id=video, vision_start_token_id=start,
                            vision_end_token_id=end)  # yapf: disable


def build_tokenizer(vocabulary: int) -> Qwen2Tokenizer:
    """Build a tokenizer with one token per byte, the marks of pictures, and a word for every other id of the model."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = SPECIAL + MARKS + letters
    vocab = {token: i for i, token in enumerate(tokens + [f"w{i}" for i in range(len(tokens), vocabulary)])}
    return Qwen2Tokenizer(vocab=vocab, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                          additional_special_tokens=MARKS, chat_template=CHAT_TEMPLATE,
                          padding_side="left")  # yapf: disable


def save_processor(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    """Write the processor of Qwen2.5-VL, which needs torchvision."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor
    patches = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2,
               "size": {"shortest_edge": TINY_PIXELS**2, "longest_edge": PIXELS**2}}  # yapf: disable
    Qwen2_5_VLProcessor(Qwen2VLImageProcessor(**patches), tokenizer, Qwen2VLVideoProcessor(**patches),
                        chat_template=tokenizer.chat_template).save_pretrained(folder)


@torch.no_grad()
def write_model(folder: Path, setting: Setting) -> None:
    """Write a random model in bfloat16, whose logits have a standard deviation of ``LOGIT_STD``, and its tokenizer."""
    hf_logging.disable_progress_bar()
    sizes, tokenizer = shape(setting), build_tokenizer(shape(setting)["vocab_size"])
    config = build_config(setting, tokenizer)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = modality_of(config, setting.size).auto_class.from_config(config, dtype=torch.bfloat16)
    # of the last norm and not of the head: a tied head would make every token predict itself
    model.get_decoder().norm.weight.mul_(LOGIT_STD / (sizes["initializer_range"] * sizes["hidden_size"]**0.5))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if setting.size in WITH_PICTURES:
        save_processor(folder, tokenizer)
    del model
    torch.cuda.empty_cache()


def model_folder(setting: Setting) -> Path:
    """Return the folder of the random model. The first rank makes it where it is missing; the others wait."""
    folder = Path(setting.models) / (f"tiny-{setting.size}" if setting.reduced else setting.size)
    while not folder.exists():
        if World.from_env().is_main:
            new = folder.with_name(f"{folder.name}-unfinished")
            shutil.rmtree(new, ignore_errors=True)
            write_model(new, setting)
            new.rename(folder)
        else:
            time.sleep(0.5)
    return folder


def write_prompts(setting: Setting) -> Path:
    """Write prompts of equal length that share no prefix, each with a picture if the model takes them."""
    rows = [{"prompt": f"{i:04d} " + "why? " * (PROMPT_BYTES // 5), "reference": str(i)} for i in range(PROMPTS)]
    if setting.size in WITH_PICTURES:
        rows = [{"prompt": [{"role": "user", "content": f"<image>{row['prompt']}"}], "reference": row["reference"],
                 "images": [draw_picture(setting, i)]} for i, row in enumerate(rows)]  # yapf: disable
    path = Path(setting.scratch) / f"prompts-{World.from_env().rank}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def draw_picture(setting: Setting, index: int) -> str:
    """Draw a picture of one colour in ``scratch``, and return the name of its file."""
    from PIL import Image
    side = TINY_PIXELS if setting.reduced else PIXELS
    path = Path(setting.scratch) / f"picture-{World.from_env().rank}-{index}.png"
    Image.new("RGB", (side, side), (index, 255 - index, 128)).save(path)
    return path.name


def trainer_flags(setting: Setting, prompts: int, samples: int, new_tokens: int, steps: int) -> list[str]:
    """Return the options of a run in bfloat16, without its model and data.

    Args:
        prompts, samples: of a step, which makes one optimizer step.
        new_tokens: length of the responses, which random models hardly ever end before.
    """
    longest = 512 if setting.size in WITH_PICTURES else 128
    flags = (f"--save_path {setting.scratch}/run --engine_type {setting.engine} --bf16 --rollout_batch_size {prompts} "
             f"--n_samples_per_prompt {samples} --train_batch_size {prompts * samples} --prompt_max_len {longest} "
             f"--generate_max_len {new_tokens} --max_steps {steps} --disable_ckpt --reward {REWARD}:compute_score "
             "--reward_probe False --actor_learning_rate 1e-6 --lr_scheduler constant").split()
    flags += ["--strategy", setting.strategy]
    flags += ["--engine_tp_size", str(setting.tp)] if setting.tp > 1 else []
    flags += ["--lora_rank", "16"] if setting.size in LARGE else []
    flags += ["--gradient_checkpointing"] if setting.recompute else []
    flags += [] if setting.liger else ["--use_liger", "false"]
    flags += ["--fused_decode", "--fused_logprobs"] if setting.fused else []
    if setting.reduced:
        return [*flags, "--engine_kv_mib", "64"]
    # a large engine starts while the trainer's weights are on the device
    small = setting.size in LARGE and setting.engine != "hf"
    return [*flags, "--engine_mem_util", "0.4"] if small else flags


@contextmanager
def open_trainer(setting: Setting, prompts: int, samples: int, new_tokens: int, steps: int) -> Iterator[SPMDPPOTrainer]:
    """Open the trainer of a run; under torchrun on every rank. The final export is left out. For the arguments see
    :func:`trainer_flags`."""
    flags = trainer_flags(setting, prompts, samples, new_tokens, steps)
    flags += ["--pretrain", str(model_folder(setting)), "--prompt_data", str(write_prompts(setting))]
    parsed = parse_config(flags, "python -m benchmarks.gpu")
    with training_session(parsed) as session:
        config, data = parsed.config, parsed.config.data
        tokenizer = load_tokenizer(str(config.model.pretrain), data.chat_template)
        media = open_media(str(config.model.pretrain), tokenizer, data)
        dataset = PromptsDataset(data, tokenizer, config.rollout.prompt_max_len, media=media)
        models = build_models(config, session.strategy)
        trainer = SPMDPPOTrainer(config, session.strategy, models, tokenizer, dataset, (), session.timer, media=media)
        trainer.export = lambda name: None  # type: ignore[method-assign]  # 15 GB, measured by nobody
        try:
            yield trainer
        finally:
            trainer.maker.rewards.shutdown()
            trainer.engine.shutdown()
