"""The loss on pretraining rows: its gradient is that of a plain loop, each step draws a batch, and what is refused."""
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.config.cli import parse_config
from lightrft.models.tokenizer import load_tokenizer
from lightrft.preflight.validate import validate
from lightrft.tests.support import runs
from lightrft.tests.support.invariants import build, gradients, make_rollout
from lightrft.trainer.pretraining_loss import read_pretraining


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = runs.write_home(tmp_path_factory.mktemp("home"))
    rows = [{"prompt": text, "response": text[::-1] * (1 + i % 3)} for i, text in enumerate(runs.PROMPTS)]
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": str(i), "weight": weight}]
             for text in runs.PROMPTS for i, weight in enumerate((0, 0.5, 2))]  # yapf: disable
    chats = [{"messages": sum(turns[i:i + 3], [])} for i in range(0, len(turns), 3)]
    for name, of in (("demos", rows), ("weighted", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of), encoding="utf-8")
    return folder


def plain_loss(home, rows):
    """Mean NLL of the learnt tokens, and that with their weights, by a stock model in float64, one row at a time."""
    model, lost, weights = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float64), [], []
    for row in rows:
        ids = torch.tensor(row.token_ids)
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        lost.append(-logprobs[torch.tensor(row.loss_mask[1:])])
        weights.append(torch.tensor(row.weights or [1.0] * len(ids))[1:][torch.tensor(row.loss_mask[1:])])
    return model, torch.cat(lost).mean(), (torch.cat(weights) * torch.cat(lost)).mean()


@pytest.mark.parametrize("whole,file", [(True, "demos"), (False, "demos"), (True, "weighted"), (False, "weighted")])
def test_the_loss_is_added_to_that_of_the_policy(whole, file, home, tmp_path):
    """Micro-batches of rows of several lengths; the first gradient of a step with the loss minus that without it."""
    found = {}
    more = {"pretrain_data": [f"{file}.jsonl"], "ptx_coef": 0.3, "ptx_batch_size": 5, "pretrain_mode": whole,
            "pretrain_max_len": 128}  # yapf: disable
    for name, options in (("without", {}), ("with", more)):
        trainer = build(home, tmp_path / name, **options)
        rollout = make_rollout(trainer)
        if options:
            rows = trainer.update.pretraining.loader.ahead()
        found[name] = gradients(trainer, rollout)
    model, loss, weighted = plain_loss(home, rows)
    (0.3 * weighted).backward()
    (plain, before), (metrics, after) = found["without"], found["with"]
    for name, parameter in model.named_parameters():
        got = (after[f"actor/model.{name}"] - before[f"actor/model.{name}"]).double()
        assert torch.allclose(got, parameter.grad, atol=2e-6, rtol=1e-4), name
    assert metrics["policy/ptx_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["policy/loss"] - plain["policy/loss"] == pytest.approx(0.3 * weighted.item(), rel=1e-4)
    assert any(not all(row.loss_mask[1:]) for row in rows) is not (whole and file == "demos")
    assert any(0.5 in row.weights for row in rows) is (file == "weighted")


def test_every_step_of_the_policy_draws_the_next_batch(home, tmp_path):
    done = runs.run(home, tmp_path, pretrain_data=["demos.jsonl"], ptx_batch_size=4, train_batch_size=4, max_epochs=2,
                    max_steps=2, advantage_estimator="gae", freezing_actor_steps=1)  # yapf: disable
    loader = done.trainer.update.pretraining.loader
    assert loader.position == 4 * 4, "steps in which the policy is frozen draw nothing"
    assert ["policy/ptx_loss" in line for line in done.lines] == [False, True]


@pytest.mark.parametrize("options,words", [
    ({"ptx_coef": 0.1}, "--ptx_coef 0.1: has no effect without --pretrain_data"),
    ({"pretrain_data": ["demos.jsonl"], "ptx_coef": 0.0}, "has no effect without --ptx_coef"),
    ({"pretrain_data": ["./demo.jsonl"]}, "--pretrain_data ./demo.jsonl: no such file"),
    ({"pretrain_data": ["a/b", "c/d"], "pretrain_data_probs": [0.5]}, "1 values for 2 --pretrain_data entries"),
])
def test_options_that_contradict_each_other_are_refused(options, words, home, tmp_path, monkeypatch):
    monkeypatch.chdir(home)
    given = {"pretrain": str(home / "model"), "prompt_data": ["train.jsonl"], "save_path": str(tmp_path)}
    with pytest.raises(ValueError, match=words):
        validate(parse_config([], defaults=runs.BASE | given | options).config, 1)


def test_rows_that_cannot_be_used_are_refused(home, tmp_path):
    seen = home / "seen.jsonl"
    seen.write_text(json.dumps({"prompt": "<image>What?", "response": "A dog", "images": ["dog.png"]}) + "\n")
    tokenizer = load_tokenizer(str(home / "model"))
    bad = [({"pretrain_data": ["seen.jsonl"]}, "text"), ({"pretrain_max_len": 2}, "--pretrain_max_len 2"),
           ({}, "--ptx_batch_size 8: a batch cannot be filled, the data has 5 rows")]  # yapf: disable
    for options, words in bad:
        with pytest.raises(ValueError, match=words):
            read_pretraining(runs.config_of(home, tmp_path, **{"pretrain_data": ["demos.jsonl"]} | options), tokenizer,
                             None)


def test_rows_are_those_of_the_split_without_what_wraps_prompts(home, tmp_path):
    for split, text in (("train", "a"), ("test", "b")):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    tokenizer = load_tokenizer(str(home / "model"))
    config = runs.config_of(home, tmp_path / "run", pretrain_data=[str(tmp_path)], pretrain_split="test",
                            input_template="Q: {}", system_prompt="S", difficulty_key="rate", difficulty_min=0.1,
                            ptx_batch_size=1)
    (row, ) = read_pretraining(config, tokenizer, None)
    assert tokenizer.decode(row.token_ids, skip_special_tokens=True) == "b"
