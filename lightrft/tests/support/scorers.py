"""Tiny reward models that Hugging Face reads too, and rewards by Hugging Face alone."""
import json
import random
import string

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightrft.config.rm_schema import GRMConfig
from lightrft.models.reward_model import RewardHead, SCORES, STEPS
from lightrft.models.tokenizer import load_tokenizer
from lightrft.tests.support import runs, tiny
from lightrft.tests.support.preference_runs import trainer_of
from lightrft.trainer.offline.grm_trainer import GRMTrainer

OTHER = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}\n{% endfor %}"


def save_scorer(folder, seed, template=tiny.CHATML, **moments):
    """A tiny classifier of Hugging Face with one score, and its tokenizer."""
    tiny.save_model(folder, seed=seed)
    torch.manual_seed(seed)
    hf = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    if moments:
        setattr(hf.config, SCORES, vars(RewardHead(**moments)))
    hf.save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_other_scorer(folder, heads=("value_head", ), architecture="RewardModel", **entries):
    """A reward model as OpenRLHF saves it: a decoder with heads of its own names, each twice the one before."""
    save_scorer(folder, seed=1)
    state = load_file(folder / "model.safetensors")
    score = state.pop("score.weight")
    state |= {f"{name}.weight": score * 2**i for i, name in enumerate(heads)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    tiny.change_json(folder / "config.json", architectures=[architecture], **entries)
    return str(folder)


def save_judge(folder, **form):
    """A tiny process reward model."""
    tiny.save_model(folder, seed=3, initializer_range=0.4)
    tiny.change_json(folder / "config.json", **{STEPS: {"placeholder_token": "#", "step_separator": "\n"} | form})
    return str(folder)


def train_judge(folder):
    """A tiny judge of two candidates, trained to find what begins with an a better than with a b."""
    tiny.save_model(folder / "model", initializer_range=0.1)
    rows = [{"prompt": f"{i}", "chosen": "a" * (1 + k % 3), "rejected": "b" * (1 + k % 2)} for i in range(1, 6)
            for k in range(6)]  # yapf: disable
    draw = random.Random(0)
    noise = ["".join(draw.choices(string.printable + "\ufffd" * 60, k=1 + i % 5)) for i in range(80)]
    rows += [{"prompt": runs.PROMPTS[i % 6], "chosen": "a" + noise[i], "rejected": "b" + noise[40 + i]}
             for i in range(40)]  # yapf: disable
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    trainer_of(GRMTrainer, GRMConfig, folder, folder / "run", "train", max_steps=140, learning_rate=1e-2, max_len=160,
               task_instruction="{prompt} {first} {second}").fit()
    return str(folder / "run" / "hf")


def says(path, text, most=60):
    """What a judge says to a request, by Hugging Face's generate."""
    hf, tokenizer = AutoModelForCausalLM.from_pretrained(path), load_tokenizer(path)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                          return_tensors="pt", return_dict=False)
    said = hf.generate(asked, max_new_tokens=most, do_sample=False, attention_mask=torch.ones_like(asked))
    return tokenizer.decode(said[0, asked.shape[1]:], skip_special_tokens=True)


def plain(path, items):
    """Rewards by Hugging Face alone: one conversation at a time, up to its end token."""
    hf, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), load_tokenizer(path)
    chats = [[*item.messages, {"role": "assistant", "content": item.response}] for item in items]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n") for chat in chats]
    with torch.no_grad():
        return [hf(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits.item() for text in texts]
