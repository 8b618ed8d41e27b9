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
from transformers import AutoModelForCausalLM, GenerationConfig, logging as hf_logging, Qwen2Config, Qwen2Tokenizer

from benchmarks.gpu.catalog import Setting
from lightrft.config.cli import parse_config
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.models.loader import load_tokenizer
from lightrft.trainer.session import training_session
from lightrft.trainer.spmd_ppo_trainer import build_models, SPMDPPOTrainer
from lightrft.utils.env import World

SHAPES = {  # of Qwen2.5
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True, "initializer_range": 0.02},
    "7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False, "initializer_range": 0.02},
}  # yapf: disable
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 128, "vocab_size": 512, "initializer_range": 0.1}  # yapf: disable
LORA = ("7b", )  # sizes that train adapters, because one GPU does not hold their gradients and moments
LOGIT_STD = 4.0
SPECIAL = ["<pad>", "<eos>", "<unk>"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT_BYTES, PROMPTS = 96, 256
REWARD = Path(__file__).with_name("reward.py")


def shape(setting: Setting) -> dict[str, Any]:
    """Return the shape of the model; reduced ones keep what differs between the sizes."""
    full = SHAPES[setting.size]
    return TINY | {"tie_word_embeddings": full["tie_word_embeddings"]} if setting.reduced else full


def build_tokenizer(vocabulary: int) -> Qwen2Tokenizer:
    """Build a tokenizer with one token per byte, and a word for every other id of the model."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = SPECIAL + letters
    vocab = {token: i for i, token in enumerate(tokens + [f"w{i}" for i in range(len(tokens), vocabulary)])}
    return Qwen2Tokenizer(vocab=vocab, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                          chat_template=CHAT_TEMPLATE, padding_side="left")  # yapf: disable


@torch.no_grad()
def write_model(folder: Path, setting: Setting) -> None:
    """Write a random model in bfloat16, whose logits have a standard deviation of ``LOGIT_STD``, and its tokenizer."""
    hf_logging.disable_progress_bar()
    sizes, tokenizer = shape(setting), build_tokenizer(shape(setting)["vocab_size"])
    config = Qwen2Config(max_position_embeddings=1 << 17, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                         pad_token_id=tokenizer.pad_token_id, **sizes)  # yapf: disable
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # of the last norm and not of the head: a tied head would make every token predict itself
    model.model.norm.weight.mul_(LOGIT_STD / (sizes["initializer_range"] * sizes["hidden_size"]**0.5))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
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
    """Write prompts of equal length that share no prefix."""
    rows = [{"prompt": f"{i:04d} " + "why? " * (PROMPT_BYTES // 5), "reference": str(i)} for i in range(PROMPTS)]
    path = Path(setting.scratch) / f"prompts-{World.from_env().rank}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def trainer_flags(setting: Setting, prompts: int, samples: int, new_tokens: int, steps: int) -> list[str]:
    """Return the options of a run in bfloat16, without its model and data.

    Args:
        prompts, samples: of a step, which makes one optimizer step.
        new_tokens: length of the responses, which random models hardly ever end before.
    """
    flags = (f"--save_path {setting.scratch}/run --engine_type {setting.engine} --bf16 --rollout_batch_size {prompts} "
             f"--n_samples_per_prompt {samples} --train_batch_size {prompts * samples} --prompt_max_len 128 "
             f"--generate_max_len {new_tokens} --max_steps {steps} --disable_ckpt --reward {REWARD}:compute_score "
             "--reward_probe False --actor_learning_rate 1e-6 --lr_scheduler constant").split()
    flags += ["--engine_tp_size", str(setting.tp)] if setting.tp > 1 else []
    flags += ["--lora_rank", "16"] if setting.size in LORA else []
    flags += ["--gradient_checkpointing"] if setting.recompute else []
    if setting.reduced:
        return [*flags, "--engine_kv_mib", "64"]
    # a large engine starts while the trainer's weights are on the device
    small = setting.size in LORA and setting.engine != "hf"
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
        dataset = PromptsDataset(data, tokenizer, config.rollout.prompt_max_len)
        models = build_models(config, session.strategy)
        trainer = SPMDPPOTrainer(config, session.strategy, models, tokenizer, dataset, (), session.timer)
        trainer.export = lambda name: None  # type: ignore[method-assign]  # 15 GB, measured by nobody
        try:
            yield trainer
        finally:
            trainer.maker.rewards.shutdown()
            trainer.engine.shutdown()
