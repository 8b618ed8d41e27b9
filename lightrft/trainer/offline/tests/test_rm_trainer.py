"""Reward models: loss, gradient and scores against Hugging Face, ranks, micro-batches, resuming."""
import ast
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from lightrft.cli.export import export
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.models.loader import load_scorer
from lightrft.models.tokenizer import load_tokenizer
from lightrft.ops.preference import pair_loss
from lightrft.tests.support import reward_model_runs, runs
from lightrft.tests.support.launch import torchrun
from lightrft.tests.support.packages import needs_deepspeed
from lightrft.tests.support.preference_runs import exported, metrics
from lightrft.tests.support.reward_model_runs import alone, config_of, PACK, trainer_of
from lightrft.trainer.offline.rm_trainer import RMTrainer
from lightrft.types import Experience
from lightrft.utils.errors import UserError

no_picture, base = runs.no_picture, reward_model_runs.base


def run(config):
    trainer_of(config).fit()
    return exported(Path(config.checkpoint.save_path))


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory):
    """A finished run: its folder, with checkpoints."""
    folder = tmp_path_factory.mktemp("straight")
    run(config_of(base, folder, save_steps=4, disable_ckpt=False, eval_steps=7))
    return folder


def test_loss_gradient_and_evaluation_are_those_of_hugging_face(base, straight, tmp_path):
    """Also of a batch that is cut: one pair in each forward pass."""
    config = config_of(base, tmp_path, micro_train_batch_size=1)
    config.model.pretrain = str(straight / "hf")  # it has a head
    hf, trainer = AutoModelForSequenceClassification.from_pretrained(straight / "hf"), trainer_of(config)
    batch = next(trainer.loader)
    trainer.loader.position = 0
    chosen, rejected = (alone(hf, [getattr(pair, name) for pair in batch])[:, 0] for name in ("chosen", "rejected"))
    labels = torch.tensor([0.5 if pair.tie else 1.0 for pair in batch])
    margins = torch.tensor([pair.margin or 0.0 for pair in batch])
    loss = pair_loss(chosen, rejected, labels, margins).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in hf.parameters() if p.grad is not None]).item()
    got = trainer.train_step()
    assert got["rm/loss"] == pytest.approx(loss.item(), rel=1e-5) and got["rm/pairs"] == 8
    assert got["rm/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert got["rm/accuracy"] == pytest.approx((chosen > rejected)[labels != 0.5].float().mean().item())
    assert got["rm/rewards/margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-4)
    config.train.micro_train_batch_size = 0
    whole = trainer_of(config).train_step()
    for key in ("rm/loss", "rm/grad_norm", "rm/accuracy", "rm/rewards/chosen"):
        assert whole[key] == pytest.approx(got[key], rel=1e-5), key
    trainer.actor.model.hf_model.score.weight.data.zero_()  # it cannot tell the answers apart: as right as a guess
    assert trainer.evaluate()["eval/accuracy"] == 0.5 == trainer.train_step()["rm/accuracy"]


def test_it_learns_and_is_exported_as_a_classifier_with_the_moments_of_its_rewards(base, straight):
    lines = metrics(straight)
    assert lines[0]["rm/loss"] > 0.69 and lines[-1]["rm/loss"] < 0.6 and lines[-1]["eval/accuracy"] == 1.0
    hf = AutoModelForSequenceClassification.from_pretrained(straight / "hf").eval()
    rows = RMTrainer.read(config_of(base, straight), load_tokenizer(str(base)), "eval", None)
    answers = [answer for pair in rows for answer in (pair.chosen, pair.rejected)]
    with torch.no_grad():
        wanted = alone(hf, answers)[:, 0]
        exp = Experience.pack([answer.token_ids for answer in answers])
        torch.testing.assert_close(load_scorer(str(straight / "hf"))(exp)[:, 0], wanted, rtol=1e-4, atol=1e-5)
        padded = load_tokenizer(str(straight / "hf")).pad({"input_ids": [answer.token_ids for answer in answers]},
                                                          return_tensors="pt", padding_side="right")
        torch.testing.assert_close(hf(**padded).logits[:, 0], wanted, rtol=1e-4, atol=1e-5)
    kept = AutoConfig.from_pretrained(straight / "hf").reward_model
    assert kept["mean"] == pytest.approx(wanted.mean().item(), rel=1e-4) == lines[-1]["eval/reward_mean"]
    assert kept["std"] == pytest.approx(wanted.std(correction=0).item(), rel=1e-4) == lines[-1]["eval/reward_std"]


@pytest.mark.parametrize("options", [{"eval_data": []}, {"eval_steps": 0}])
def test_without_an_evaluation_the_moments_are_those_of_training_rows(base, straight, tmp_path, options):
    """The training rows are the held-out ones of the other run."""
    config = config_of(base, tmp_path, **options)
    run(config)
    wanted, heads = ({name: AutoConfig.from_pretrained(folder / "hf").reward_model[name] for name in ("mean", "std")}
                     for folder in (straight, tmp_path))
    assert wanted["std"] > 0 and heads == pytest.approx(wanted)
    assert not any("eval/loss" in line for line in metrics(tmp_path))


def test_the_card_scores_an_answer_as_training_does(base, straight, tmp_path, capsys):
    card = (straight / "hf" / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: text-classification\n" in card
    exec(card.partition("```python\n")[2].partition("```")[0], {})  # as a reader would run it
    row = {"prompt": [{"role": "user", "content": "What is 12+30?"}], "chosen": "42", "rejected": "?"}
    config = config_of(base, tmp_path)
    config.data.train_data = [hold_rows([row])]
    (pair, ) = RMTrainer.read(config, load_tokenizer(str(base)), "train", None)
    with torch.no_grad():
        wanted = load_scorer(str(straight / "hf"))(Experience.pack([pair.chosen.token_ids])).item()
    assert ast.literal_eval(capsys.readouterr().out)["preference"] == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_a_checkpoint_is_exported_as_the_run_exports(base, straight, tmp_path):
    export(straight, tmp_path / "out")
    own, found = (load_file(folder / "model.safetensors") for folder in (straight / "hf", tmp_path / "out"))
    assert own.keys() == found.keys() and all(torch.equal(own[name], found[name]) for name in own)
    assert any("score" in name for name in own)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (straight / "hf", tmp_path / "out")]
    assert configs[0] == configs[1] and configs[0]["reward_model"]["std"] > 0


def test_resumed_is_straight(base, straight, tmp_path):
    resumed = tmp_path / "resumed"
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000007")  # as if killed after step 4, its metrics written further
    again = run(config_of(base, resumed, save_steps=4, disable_ckpt=False, load_checkpoint=True, eval_steps=7))
    weights = load_file(straight / "hf" / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights) and weights.keys() == again.keys()
    assert metrics(straight) == metrics(resumed)


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("deepspeed --zero_stage 3", marks=needs_deepspeed)])
def test_two_ranks_are_one_rank(base, straight, tmp_path, strategy):
    """One pair per forward pass, so that a rank has empty micro-batches too."""
    data = base / "pairs.jsonl"
    words = f"""--max_len 200 --train_batch_size 8 --max_steps 7 --lr_warmup_ratio 0 --learning_rate 3e-3 --disable_ckpt
        --micro_train_batch_size 3 --strategy {strategy} --pretrain {base} --train_data {data} --eval_data {data}
        --save_path {tmp_path}"""
    torchrun("lightrft.cli.train_rm", *words.split())
    one, two = (load_file(folder / "hf" / "model.safetensors") for folder in (straight, tmp_path))
    assert one.keys() == two.keys()
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 2e-4
    for a, b in zip(metrics(straight), metrics(tmp_path), strict=True):
        assert a["rm/loss"] == pytest.approx(b["rm/loss"], rel=1e-4) and a["rm/accuracy"] == b["rm/accuracy"]
        assert a["rm/tokens"] == b["rm/tokens"]
    assert a["eval/reward_mean"] == pytest.approx(b["eval/reward_mean"], abs=1e-3)
    assert a["eval/reward_std"] == pytest.approx(b["eval/reward_std"], rel=0.02)


def test_the_head_computes_in_float32_where_the_model_computes_in_bfloat16(base, straight, tmp_path):
    config = config_of(base, tmp_path, bf16=True)
    config.model.pretrain = str(straight / "hf")
    trainer = trainer_of(config)
    trainer.scorer.eval()
    hidden, weight = trainer.scorer.hidden_states(PACK), load_file(straight / "hf" /
                                                                   "model.safetensors")["score.weight"]
    assert hidden.dtype == torch.bfloat16
    last = hidden.float()[PACK.cu_seqlens[1:].long() - 1]
    close = partial(torch.allclose, rtol=1e-5, atol=1e-6)
    assert close(trainer.scorer(PACK), last @ weight.T)
    assert not close(last @ weight.bfloat16().float().T, last @ weight.T)
    assert trainer.train_step()["rm/optimizer_steps"] == 1


def test_models_that_cannot_score_are_refused(base, tmp_path):
    with pytest.raises(UserError, match="has no head .*Qwen2ForCausalLM.* train one with lightrft rm"):
        load_scorer(str(base))
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has 3 scores; give a sequence classifier with one"):
        load_scorer(str(tmp_path))
    with pytest.raises(DataError, match="--chosen_key 'better': no row of"):
        trainer_of(config_of(base, tmp_path, chosen_key="better"))


def test_a_tokenizer_without_a_pad_token_leaves_no_way_to_take_the_end_for_padding(base, tmp_path):
    """Hugging Face scores the last token that is no padding; where padding is eos, that would be the one before."""
    trainer = trainer_of(config_of(base, tmp_path))
    assert trainer.scorer.config.pad_token_id == trainer.tokenizer.pad_token_id
    trainer.tokenizer.pad_token = trainer.tokenizer.eos_token
    again = RMTrainer(trainer.config, trainer.strategy, lambda: RMTrainer.load(trainer.config), trainer.tokenizer,
                      trainer.loader.dataset)
    assert again.scorer.config.pad_token_id is None
