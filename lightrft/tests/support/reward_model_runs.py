"""A tiny reward model on ragged pairs: its rows, config and trainer in this process."""
import json

import pytest
import torch

from lightrft.config.cli import parse_config
from lightrft.config.rm_schema import RMConfig
from lightrft.models.tokenizer import load_tokenizer
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import tiny
from lightrft.trainer.offline.rm_trainer import RMTrainer
from lightrft.types import Experience
from lightrft.utils.env import seed_everything

PACK = Experience.pack([[5, 6, 7], [8, 9], [10, 11, 12, 13]])
BY_LENGTH = ("chosen", "rejected", "tie", None)
ROWS = [{"prompt": [{"role": "user", "content": f"{a}+{b}?"}], "chosen": f"{a}+{b} is {a + b}.",
         "rejected": "I do not know" + "!" * (1 + a), "margin": b / 10 if b else None, "tie": a == b == 1,
         "heads": {"short": BY_LENGTH[b]}} for a in range(6) for b in range(4)]  # yapf: disable


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model with ``pairs.jsonl`` beside it: ragged pairs with margins, a tie and a second standard."""
    folder = tiny.save_model(tmp_path_factory.mktemp("base"))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return folder


def config_of(base, out, **options):
    """A config of eight pairs per step."""
    data = str(base / "pairs.jsonl") if (base / "pairs.jsonl").exists() else ""
    given = {"pretrain": str(base), "train_data": [data], "eval_data": [data], "save_path": str(out), "max_len": 200,
             "train_batch_size": 8, "max_steps": 7, "learning_rate": 3e-3, "lr_warmup_ratio": 0.0,
             "async_save": False, "logging_steps": 1000, "disable_ckpt": True}  # yapf: disable
    return parse_config([], defaults=given | options, tree=RMConfig).config


def trainer_of(config):
    seed_everything(config.train.seed)
    strategy = get_strategy(config.strategy, bf16=bool(config.model.bf16))
    strategy.setup()
    tokenizer = load_tokenizer(config.model.pretrain)
    rows = RMTrainer.read(config, tokenizer, "train", None)
    held_out = RMTrainer.read(config, tokenizer, "eval", None) if config.held_out else []
    return RMTrainer(config, strategy, lambda: RMTrainer.load(config), tokenizer, rows, held_out)


def alone(hf, answers):
    """Hugging Face's scores of tokenized answers, each in a pass of its own."""
    return torch.stack([hf(input_ids=torch.tensor([answer.token_ids])).logits[0] for answer in answers])
