"""Tiny reward models that Hugging Face reads too, and rewards by Hugging Face alone."""
import torch
from transformers import AutoModelForSequenceClassification

from lightrft.models.process_reward_model import KEY as STEPS
from lightrft.models.reward_model import KEY, RewardHead
from lightrft.models.tokenizer import load_tokenizer
from lightrft.tests.support import tiny

OTHER = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}\n{% endfor %}"


def save_scorer(folder, seed, template=tiny.CHATML, **moments):
    """A tiny classifier of Hugging Face with one score, and its tokenizer."""
    tiny.save_model(folder, seed=seed)
    torch.manual_seed(seed)
    hf = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    if moments:
        setattr(hf.config, KEY, vars(RewardHead(**moments)))
    hf.save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_judge(folder, **form):
    """A tiny process reward model."""
    tiny.save_model(folder, seed=3, initializer_range=0.4)
    tiny.change_json(folder / "config.json", **{STEPS: {"placeholder_token": "#", "step_separator": "\n"} | form})
    return str(folder)


def plain(path, items):
    """Rewards by Hugging Face alone: one conversation at a time, up to its end token."""
    hf, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), load_tokenizer(path)
    chats = [[*item.messages, {"role": "assistant", "content": item.response}] for item in items]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n") for chat in chats]
    with torch.no_grad():
        return [hf(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits.item() for text in texts]
