"""Supervised fine-tuning: the loss, what it covers, resuming, ranks, LoRA."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightrft.config.schema import CheckpointConfig
from lightrft.config.shared_schema import PolicyModelConfig, SinkConfig
from lightrft.config.offline_schema import OfflineTrainConfig
from lightrft.config.sft_schema import SFTConfig, SFTDataConfig
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.models.loader import load_actor
from lightrft.models.tokenizer import load_tokenizer
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import runs, tiny
from lightrft.tests.support.launch import torchrun
from lightrft.tests.support.preference_runs import exported, metrics
from lightrft.trainer.offline import offline_trainer
from lightrft.trainer.offline.sft_trainer import SFTTrainer, pack_rows

no_picture = runs.no_picture

CHATS = [[("user", f"{a}+{b}?"), ("assistant", f"{a + b}."), ("user", "Sure?"), ("assistant", "Yes" * (1 + a % 3))]
         if (a + b) % 2 else [("system", "Add."), ("user", f"{a}+{b}?"), ("assistant", f"{a} and {b} make {a + b}.")]
         for a in range(6) for b in range(4)]  # yapf: disable


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model with ``train.jsonl`` beside it: chats of one and of two assistant turns."""
    folder = tiny.save_model(tmp_path_factory.mktemp("base"))
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def config_of(base, out, model=(), checkpoint=(), data=(), **train):
    options = {"train_batch_size": 8, "max_steps": 10, "learning_rate": 3e-3, "lr_warmup_ratio": 0.0}
    return SFTConfig(model=PolicyModelConfig(pretrain=str(base), **dict(model)),
                     data=SFTDataConfig(**{"train_data": [str(base / "train.jsonl")], "max_len": 200} | dict(data)),
                     train=OfflineTrainConfig(**(options | train)),
                     checkpoint=CheckpointConfig(save_path=str(out), async_save=False, **dict(checkpoint)),
                     log=SinkConfig(logging_steps=1000))  # yapf: disable


def trainer_of(config, held_out=False):
    strategy = get_strategy(config.strategy)
    strategy.setup()
    tokenizer = load_tokenizer(config.model.pretrain)
    rows = SFTDataset(config.data.as_data_config(), tokenizer, config.data.max_len)
    with strategy.init_model_context():
        actor = load_actor(config.model)
    return SFTTrainer(config, strategy, actor, tokenizer, rows, rows[:5] if held_out else ())


def run(config):
    trainer_of(config).fit()
    return exported(Path(config.checkpoint.save_path))


def naive_loss(hf, rows):
    """Hugging Face's own cross-entropy, one conversation at a time, as a mean over all labels that are not -100."""
    total, count = torch.zeros(()), 0
    for row in rows:
        ids = torch.tensor([row.token_ids])
        labels = torch.where(torch.tensor([row.loss_mask]), ids, -100)
        total = total + hf(input_ids=ids, labels=labels).loss * sum(row.loss_mask)
        count += sum(row.loss_mask)
    return total / count


def test_loss_and_gradient_norm_are_those_of_hugging_face(base, tmp_path):
    trainer = trainer_of(config_of(base, tmp_path, micro_train_batch_size=3), held_out=True)
    hf = AutoModelForCausalLM.from_pretrained(base)
    held_out = naive_loss(hf, trainer.eval_rows).item()
    assert trainer.evaluate()["eval/loss"] == pytest.approx(held_out, rel=1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline_trainer, "HELD_OUT", 2)
        assert trainer.evaluate()["eval/loss"] == pytest.approx(held_out, rel=1e-5), "5 rows in three parts"
    batch = next(trainer.loader)
    trainer.loader.position = 0
    loss = naive_loss(hf, batch)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in hf.parameters()]).item()
    got = trainer.train_step()
    assert got["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert got["sft/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert got["sft/loss_tokens"] == sum(sum(row.loss_mask) for row in batch)
    assert got["sft/tokens"] == sum(len(row.token_ids) for row in batch)


def test_only_assistant_turns_are_learnt(base, tmp_path):
    trainer = trainer_of(config_of(base, tmp_path))
    tokenizer = trainer.tokenizer
    for row, chat in zip(trainer.loader.dataset, CHATS):
        said = tokenizer.decode([token for token, keep in zip(row.token_ids, row.loss_mask) if keep])
        assert said == "".join(f"{text}<|im_end|>" for role, text in chat if role == "assistant")
    exp = pack_rows(trainer.loader.dataset[:4])
    exp.loss_mask = exp.loss_mask.clone()
    logprobs, _ = trainer.actor.model(exp)
    assert torch.equal(logprobs != 0, exp.loss_mask)


def test_the_plan_knows_the_cost_of_attention(base, tmp_path, monkeypatch):
    trainer, given = trainer_of(config_of(base, tmp_path)), []
    plan = offline_trainer.plan_mini_batch
    monkeypatch.setattr(offline_trainer, "plan_mini_batch",
                        lambda *args, **more: given.append(more) or plan(*args, **more))
    trainer.plan_of(pack_rows(trainer.loader.dataset[:4]))
    assert given[0]["attention"] == trainer.actor.model.attention > 0


def test_loss_falls(base, tmp_path):
    config = config_of(base, tmp_path, max_steps=30, learning_rate=1e-2)
    run(config)
    losses = [row["sft/loss"] for row in metrics(tmp_path)]
    assert len(losses) == 30 and sum(losses[-5:]) < 0.5 * sum(losses[:5])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    before = naive_loss(AutoModelForCausalLM.from_pretrained(base), trainer_of(config).loader.dataset).item()
    assert naive_loss(model, trainer_of(config).loader.dataset).item() < 0.5 * before


@pytest.mark.parametrize("size,epochs,steps,told", [
    (16, 1, 1, "8 of 24 conversations are left over in the last epoch, which ends with its last full batch of 16; with "
     "a --train_batch_size that divides 24 none is"),
    (16, 2, 3, None),  # what one epoch leaves opens the next one
    (8, 1, 3, None),
])  # yapf: disable
def test_rows_after_the_last_full_batch_are_told(base, tmp_path, capsys, size, epochs, steps, told):
    trainer = trainer_of(config_of(base, tmp_path, train_batch_size=size, max_epochs=epochs, max_steps=0))
    said = capsys.readouterr().err
    assert trainer.total_steps == steps and (told in said if told else "left over" not in said)


@pytest.mark.dist
def test_two_ranks_are_one_rank(base, tmp_path):
    one = run(config_of(base, tmp_path / "one", learning_rate=1e-3))
    words = f"""--max_len 200 --train_batch_size 8 --micro_train_batch_size 2 --max_steps 10 --lr_warmup_ratio 0
        --learning_rate 1e-3 --disable_ckpt --pretrain {base} --train_data {base / 'train.jsonl'}
        --save_path {tmp_path / 'two'}"""
    torchrun("lightrft.cli.train_sft", *words.split())
    two = load_file(tmp_path / "two" / "hf" / "model.safetensors")
    start = load_file(base / "model.safetensors")
    assert one.keys() == two.keys() == start.keys()
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-5
    assert max((one[name] - start[name]).abs().max().item() for name in one) > 1e-3
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert a["sft/loss"] == pytest.approx(b["sft/loss"], rel=1e-5) and a["sft/tokens"] == b["sft/tokens"]


def test_resumed_is_straight(base, tmp_path):
    """In a mix of two sources."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    shutil.copy(base / "train.jsonl", base / "again.jsonl")
    mixed = {"train_data": [str(base / "train.jsonl"), str(base / "again.jsonl")], "train_data_probs": [0.9, 0.1]}
    weights = run(config_of(base, straight, checkpoint={"save_steps": 4}, data=mixed, max_steps=7))
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000007")  # as if killed after step 4, its metrics written further
    again = run(config_of(base, resumed, checkpoint={"save_steps": 4, "load_checkpoint": True}, data=mixed,
                          max_steps=7))
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert metrics(straight) == metrics(resumed) and [row["step"] for row in metrics(resumed)] == list(range(1, 8))


def test_lora_exports_adapter_and_merged_weights(base, tmp_path):
    lora = {"lora_rank": 4, "lora_alpha": 8}
    run(config_of(base, tmp_path, model=lora, learning_rate=1e-2))
    losses = [row["sft/loss"] for row in metrics(tmp_path)]
    assert losses[-1] < losses[0]
    ids = torch.arange(40)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    untouched = AutoModelForCausalLM.from_pretrained(base)
    before = untouched(ids).logits
    adapted = PeftModel.from_pretrained(untouched, tmp_path / "hf" / "adapter")
    assert sum("lora_" in name for name in load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")) == 28
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-4, rtol=1e-4)
    assert (merged(ids).logits - before).abs().max() > 0.1
