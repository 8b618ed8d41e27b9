"""Tiny models and data in place of those that commands of other trainers' documents name."""
import json
import re
import shlex
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from peft import get_peft_model, LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightrft.models.tokenizer import load_tokenizer
from lightrft.tests.support import media_runs, tiny
from lightrft.tests.support.launch import free_port
from lightrft.tests.support.scorers import save_scorer

_PATHS = {
    "model":
    "meta-llama/Meta-Llama-3-8B OpenRLHF/Llama-3-8b-sft-mixture mistralai/Mistral-7B-v0.1 meta-llama/Llama-2-7b-hf "
    "meta-llama/Meta-Llama-3-8B-Instruct meta-llama/Meta-Llama-3-70B-Instruct meta-llama/Llama-2-13b-chat-hf "
    "meta-llama/Llama-2-7b-chat-hf Qwen/Qwen3-4B-Thinking-2507 Qwen/Qwen2-7B-Instruct "
    "Qwen/Qwen2.5-0.5B-Instruct Qwen/Qwen2.5-7B-Instruct deepseek-ai/deepseek-coder-6.7b-instruct "
    "Skywork/Skywork-Orz-Math-7B $MODEL_PATH",
    "rm": "OpenRLHF/Llama-3-8b-rm-700k OpenRLHF/Llama-3-8b-rm-mixture",
    "adapters/rm": "./checkpoint/llama3-8b-rm",
    "adapters/model": "./checkpoint/llama-3-8b-sft",
    "vl/model": "Qwen/Qwen2.5-VL-7B-Instruct",
    "orca.jsonl": "Open-Orca/OpenOrca",
    "texts.jsonl": "{your_pretrain_dataset}",
    "mixture.jsonl": "OpenRLHF/preference_dataset_mixture2_and_safe_pku",
    "prompts.jsonl": "OpenRLHF/prompt-collection-v0.1",
    "unpaired.jsonl": "Dylan2048/ultrafeedback-unpaired-preferences",
    "shepherd.jsonl": "peiyi9979/Math-Shepherd zhuzilin/Math-Shepherd",
    "dapo.jsonl": "zhuzilin/dapo-math-17k /path/to/your/dataset.jsonl",
    "answers.jsonl": "$GENERATE_OUTPUT",
    "best.jsonl": "$RM_OUTPUT",
    "pairs.jsonl": "$PAIRS_OUTPUT",
    "rl": "/path/to/your/preprocessed/gsm8k_dataset $HOME/data/gsm8k $HOME/data/or1",
    "vl/rl": "/path/to/your/preprocessed/geo3k_dataset",
    "vl/hpdv3.json": "/path/to/hpdv3/train.json",
    "vl/cot.json": "/path/to/imagegen-cot-reward-5k/train.json",
    "reward.py": "/openrlhf/examples/scripts/reward_func.py examples/python/agent_func.py",
}  # yapf: disable
PATHS = {name: path for path, names in _PATHS.items() for name in names.split()}
"""Name in a document -> path below the home."""
ON_GPUS = tuple(
    """vllm_num_engines vllm_tensor_parallel_size vllm_gpu_memory_utilization vllm_enable_sleep vllm_sync_backend
enforce_eager enable_prefix_caching max_num_seqs tp_size rm_engine_tp engine_type engine_tp_size engine_mem_util
enable_engine_sleep deepspeed_enable_sleep ref_reward_offload""".split())
"""Words of a command that are left out where it runs, on a CPU and with the engine hf."""
_TRAIN = "--max_steps 1 --train_batch_size 4 --micro_train_batch_size 2 --report false --no_use_wandb"
_ENGINE = "--engine_kv_mib 1 --generate_max_len 4"
_SIZES = {
    "train": f"{_TRAIN} {_ENGINE} --rollout_batch_size 4 --micro_rollout_batch_size 4 --prompt_max_len 64 "
    "--max_eval_samples 4",
    "rm": _TRAIN,
    "grm": _TRAIN,
    "generate": f"{_ENGINE} --prompt_max_len 64 --max_samples 8",
    "scores": "--max_samples 8",
    "chat": _ENGINE,
    "serve_rm": "",
}
_QUOTED = {r"$'User: {}\nAssistant: '": "'User: {}\nAssistant: '", "{wandb_token}": "TOKEN"}
_REWARD = """def reward_func(queries, prompts, labels):
    return [float(len(query)) for query in queries]
"""


def words_of(command: str, home: Path, out: Path, port: str = "") -> list[str]:
    """The words of a command of a document; it writes below ``out``. A server listens on ``port``, by default one on
    which nothing listens."""
    for text, meant in _QUOTED.items():
        command = command.replace(text, meant)
    command = re.sub(r"(//localhost:|--port )5000\b", rf"\g<1>{port or free_port()}", command)
    command = re.sub(r"(--(?:save|ckpt|output)_path) \S*?(/\w[\w.-]*)?(?= |$)", rf"\1 {out}\2", command)
    names = sorted(PATHS, key=len, reverse=True)
    found = "|".join(re.escape(name) + r"(?![\w-])" for name in names)
    return shlex.split(re.sub(found, lambda name: str(home / PATHS[name[0]]), command))


def tiny_sizes(command: str, words: list[str]) -> list[str]:
    """The words of ``lightrft COMMAND`` for one step on a CPU: without :data:`ON_GPUS`, with sizes at the end, which
    replace those before."""
    kind = "scores" if command == "generate" and "rm" in words else command
    return [*without(words, ON_GPUS), *_SIZES.get(kind, f"{_TRAIN} --max_len 64").split()]


def without(words: Iterable[str], names: Container[str]) -> list[str]:
    """Leave out the flags ``names`` with their values, and so the words of verl."""
    name, rest = "", []
    for word in words:
        name = word.partition("=")[0].lstrip("-") if word.startswith("--") or "=" in word else name
        rest += [word] if name not in names else []
    return rest


def _lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _asked(i: int, text: str = "What is {0}+{0}?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text.format(i)}]


def _graded(i: int, text: str = "What is {0}+{0}?") -> dict[str, Any]:
    """A row as verl's and LightRFT's preprocessing write it."""
    return {"data_source": "openai/gsm8k", "prompt": _asked(i, text), "extra_info": {"label": "gsm8k_rule"},
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)}}  # yapf: disable


def _write_adapters(home: Path) -> None:
    """Write a LoRA adapter of the model, and one that makes it a reward model."""
    rm = AutoModelForSequenceClassification.from_pretrained(home / "model", num_labels=1)
    for name, tuned, task in (("model", AutoModelForCausalLM.from_pretrained(home / "model"), "CAUSAL_LM"),
                              ("rm", rm, "SEQ_CLS")):
        get_peft_model(tuned, LoraConfig(r=1, target_modules=["q_proj"],
                                         task_type=task)).save_pretrained(home / "adapters" / name)


def write_texts(home: Path) -> Path:
    """Write models and rows of text, with the columns of the data sets whose place they take."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["ки"])
    heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # as wide as vLLM needs on CPUs
    tiny.save_model(home / "model", max_position_embeddings=1 << 17, vocab_size=len(tokenizer), **heads)
    tokenizer.save_pretrained(home / "model")
    save_scorer(home / "rm", seed=1, mean=0.5, std=2.0)
    _write_adapters(home)
    (home / "reward.py").write_text(_REWARD, encoding="utf-8")
    numbers, made = range(256), {}
    said = {side: [{"role": "assistant", "content": side}] for side in ("yes", "no")}
    made["orca"] = [{"question": f"{i}?", "response": "yes"} for i in numbers]
    made["texts"] = [{"input": f"text {i}"} for i in numbers]
    made["mixture"] = [{"chosen": _asked(i) + said["yes"], "rejected": _asked(i) + said["no"]} for i in numbers]
    made["prompts"] = [{"context_messages": _asked(i)} for i in range(1024)]
    made["unpaired"] = [{"instruction": f"{i}?", "response": "yes", "score": i % 2} for i in numbers]
    made["shepherd"] = [{"input": f"{i}? Step 1: {i} ки\nStep 2: {i} ки", "label": ["+", "-"], "value": ["+", "-"]}
                        for i in numbers]  # yapf: disable
    made["dapo"] = [{"prompt": _asked(i), "label": str(2 * i)} for i in numbers]
    made["answers"] = [{"input": f"{i}?", "output": text} for i in numbers for text in ("yes", "no", "both", "none")]
    made["best"] = [{"input": f"{i}?", "output": "yes", "reward": 1.0} for i in numbers]
    made["pairs"] = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in numbers]
    for name, rows in made.items():
        _lines(home / f"{name}.jsonl", rows)
    (home / "rl").mkdir()
    asked = [{"question": f"{i}?", "answer": "yes"} for i in numbers]
    graded = [*map(_graded, range(1024))]
    for name, rows in (("train", graded), ("test", graded[:256]), ("aime24", graded[:30]), ("sft", asked)):
        pq.write_table(pa.Table.from_pylist(rows), home / "rl" / f"{name}.parquet")
    return home


def write_pictures(home: Path) -> Path:
    """Write a model that sees, and rows with pictures, below ``home / "vl"``; return ``home``."""
    media_runs.write_home(folder := home / "vl", "qwen2_5_vl")
    for file in (folder / "model").glob("*config.json"):
        file.write_text(file.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 16384'))
    tokenizer = load_tokenizer(str(folder / "model"))
    tokenizer.chat_template = (folder / "template.jinja").read_text()
    tokenizer.save_pretrained(folder / "model")
    for name in ("a", "b", "rl/a"):
        (file := folder / f"{name}.png").parent.mkdir(exist_ok=True)
        file.write_bytes(media_runs.picture(ord(name[-1]))["bytes"])
    rated = [{"prompt": f"cat {i}", "path1": "a.png", "path2": "b.png"} for i in range(32)]
    said = "<think>Image 1 is a cat.</think><answer>Image 1 is better</answer>"
    judged = {"images": ["a.png", "b.png"], "conversations": [{"from": "human", "value": "Which?"},
                                                              {"from": "gpt", "value": said}]}  # yapf: disable
    for name, rows in (("hpdv3", rated), ("cot", [judged] * 8)):
        (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    for split in ("train", "test"):
        _lines(folder / "rl" / f"{split}.jsonl", [_graded(i, "<image>{}?") | {"images": ["a.png"]} for i in range(128)])
    return home
