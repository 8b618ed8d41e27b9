"""Generative judges: rows in both orders, the accuracy of what a judge says, and a judge that learns."""
import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightrft.cli.train_grm import main
from lightrft.config.offline_schema import OfflineConfig
from lightrft.config.rm_schema import GRMConfig, JudgeDataConfig
from lightrft.config.tree import options
from lightrft.datasets.judgements import ANSWERS, chosen_is_second, JudgementDataset, to_judgement, verdict
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.models.tokenizer import load_tokenizer
from lightrft.tests.support import launch, tiny
from lightrft.tests.support.preference_runs import close, exported, metrics, naive_sums, trainer_of
from lightrft.trainer.offline.grm_trainer import GRMTrainer

ROW = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
SHORT = "{prompt} {first} {second}"
ROWS = [{"prompt": f"{i}", "chosen": "a" * (1 + i % 3), "rejected": "b" * (1 + i % 2), "alone": "Say a.",
         "tie": i % 10 == 9, "why": "It has {chosen} in it."} for i in range(40)]  # yapf: disable
LEARN = {"train_batch_size": 16, "max_steps": 150, "learning_rate": 1e-2, "max_len": 160, "eval_steps": -1,
         "task_instruction": SHORT, "generate_max_len": 60}  # yapf: disable


@pytest.fixture(name="home", scope="module")
def fixture_home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    tiny.save_model(folder / "model", initializer_range=0.1)
    for name, rows in (("train", [row for row in ROWS if not row["tie"]]), ("all", ROWS[-20:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def judgement(row, second=False, **options):
    return to_judgement({**ROW, **row}, JudgeDataConfig(**options), second, "file, row 1", ("<|im_end|>", ))


def test_both_orders_say_the_same():
    told = {"judgement": "{chosen} adds, {rejected} does not."}
    first, second = (judgement(told, place) for place in (False, True))
    assert "Prompt: 2+2?\n\nResponse 1: 4\n\nResponse 2: 5\n" in first.request
    assert "Prompt: 2+2?\n\nResponse 1: 5\n\nResponse 2: 4\n" in second.request
    assert first.text == "Response 1 adds, Response 2 does not.\n<answer>Response 1 is better</answer>"
    assert second.text == "Response 2 adds, Response 1 does not.\n<answer>Response 2 is better</answer>"
    assert (first.answer, second.answer) == ANSWERS[:2] and verdict(first.text) == first.answer
    assert judgement({"tie": True, "rejected": "4"}).text == "<answer>Both are equally good</answer>"
    own = {"judgement": "<answer>{chosen} is better</answer>", "chosen": [{"role": "assistant", "content": "{second}"}]}
    asked = judgement(own, True, task_instruction=SHORT)
    assert asked.request == "2+2? 5 {second}" and asked.text == "<answer>Response 2 is better</answer>"


@pytest.mark.parametrize("key", ["prompt", "question"])
def test_all_turns_of_a_prompt_are_in_the_request(key):
    turns = [{"role": "user", "content": "Add 2 and 3."}, {"role": "user", "content": "Then double it."}]
    assert "Add 2 and 3.\nThen double it." in judgement({key: turns}, prompt_key=key).request
    whole = {"chosen": [*turns, {"role": "assistant", "content": "10"}]}
    assert judgement({key: turns, **whole}, prompt_key=key) == judgement({key: turns, "chosen": "10"}, prompt_key=key)
    assert "S\n2+2?" in judgement({"system": "S"}).request


def test_media_follow_their_candidates():
    row = {
        "prompt": "<image>Like this?", "chosen": "<image> and <image>", "rejected": "<image>", "images": list("pabc")
    }
    assert judgement(row).media == {"images": list("pabc")}
    assert judgement(row, True).media == {"images": list("pcab")}


@pytest.mark.parametrize("row,said", [
    ({"chosen": "5"}, "row 1: the chosen and the rejected candidate are equal"),
    ({"rejected": ""}, "the row has no rejected"),
    ({"rejected": "<|im_end|>\n"}, "the row has no rejected"),
    ({"rejected": "4<|im_end|>"}, "row 1: the chosen and the rejected candidate are equal"),
    ({"prompt": None}, "the row has no prompt"),
    ({"tie": "false"}, "row 1: the column 'tie' is 'false': expected true or false"),
    ({"judgement": "<answer>Response 2 is better</answer>"}, "ends with 'Response 2 is better', and 'Response 1"),
    ({
        name: [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        for name, asked, said in (("chosen", "2+2?", "4"), ("rejected", "2+3?", "6"))
    }, "row 1: the candidates end different"),
    ({"chosen": [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}], "rejected": "6"
      }, "row 1: the candidates end chats without the text in the column 'prompt'"),
    ({"judgement": 5}, "row 1: the column 'judgement' is 5: expected a text"),
    ({"chosen": [{"role": "user", "content": "2+2?"}]}, "row 1: chosen ends with a turn of 'user'"),
    ({"chosen": [{"role": "assistant", "content": [{"type": "image"}]}]}, "has media inside its messages"),
])
def test_rows_that_cannot_be_judged_are_refused(row, said):
    with pytest.raises(DataError, match=said):
        judgement(row)


def test_the_order_is_random_and_seeded():
    draws = [[chosen_is_second(seed, f"0:{i}") for i in range(400)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2] and 160 < sum(draws[0]) < 240


def naive_accuracy(trainer, folder):
    """By Hugging Face's generate, a row at a time: right answers by the place of the better candidate."""
    hf, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    found = {0: [], 1: [], 2: []}
    for i, row in enumerate(trainer.eval_rows):
        ids = row.token_ids[:row.loss_mask.index(True)]
        out = hf.generate(torch.tensor([ids]), max_new_tokens=60, do_sample=False, attention_mask=None)[0, len(ids):]
        said = verdict(tokenizer.decode(out, skip_special_tokens=True))
        found[row.right].append(1.0 if said == ANSWERS[row.right] else 0.5 * (said == ANSWERS[2]))
    return {place: sum(right) / len(right) for place, right in found.items()}


def test_a_judge_learns_and_its_accuracy_is_that_of_its_words(home):
    """On two ranks, which share the rows, too."""
    trainer = trainer_of(GRMTrainer, GRMConfig, home, home / "run", "train", **LEARN,
                         eval_data=[str(home / "all.jsonl")])
    before = trainer.evaluate()
    assert before["eval/accuracy"] == before["eval/answered"] == 0.0
    trainer.fit()
    after = trainer.evaluate()
    wanted = naive_accuracy(trainer, home / "run" / "hf")
    assert (after["eval/accuracy_first"], after["eval/accuracy_second"]) == pytest.approx((wanted[0], wanted[1]))
    assert after["eval/accuracy"] == pytest.approx(
        sum(wanted[row.right] for row in trainer.eval_rows) / len(trainer.eval_rows))
    assert min(wanted[0], wanted[1]) >= 0.9 and after["eval/answered"] >= 0.9, (before, after)
    on_two = judged_on_two_ranks(home)
    assert on_two["grm/loss_tokens"] == metrics(home / "run")[-1]["grm/loss_tokens"]
    assert {name: on_two[name] for name in after} == pytest.approx(after, rel=1e-4)
    rows, long = [*trainer.eval_rows], trainer.eval_rows[0]
    long = replace(long, token_ids=long.token_ids[:1] * 505 + long.token_ids, loss_mask=[False] * 505 + [True])
    assert trainer.judge([*rows, long])[:-1] == trainer.judge(rows), "a prompt leaves less room to its own judgement"
    trainer.config.train.generate_max_len = 3
    assert trainer.evaluate()["eval/answered"] == 0.0


def test_accuracies_are_told_apart_by_the_place_of_the_better_candidate(home, tmp_path):
    """A judge that always says the same is right on the rows of one place alone."""
    trainer = trainer_of(GRMTrainer, GRMConfig, home, tmp_path, "train", **LEARN, eval_data=[str(home / "all.jsonl")])
    places = [row.right for row in trainer.eval_rows]
    for place, name in enumerate(("first", "second")):
        trainer.judge = lambda rows: [ANSWERS[place]] * len(rows)  # noqa: B023
        found = trainer.evaluate()
        assert found.pop(f"eval/accuracy_{name}") == 1.0 == found["eval/answered"]
        assert {found.get("eval/accuracy_first", 0.0), found.get("eval/accuracy_second", 0.0)} == {0.0}
        assert found["eval/accuracy"] == places.count(place) / len(places), "ties count here"
    trainer.judge = lambda rows: [ANSWERS[2]] * len(rows)
    found = trainer.evaluate()
    assert found["eval/accuracy_first"] == found["eval/accuracy_second"] == 0.5, "it cannot tell them apart"
    assert found["eval/accuracy"] == (1 + places.count(2) / len(places)) / 2
    trainer.judge = lambda rows: ["no idea"] * len(rows)
    found = trainer.evaluate()
    assert found["eval/answered"] == found["eval/accuracy"] == found["eval/accuracy_first"] == 0.0


def judged_on_two_ranks(home):
    """The metrics of a step that changes nothing, with its evaluation."""
    options = LEARN | {"pretrain": home / "run" / "hf", "train_data": home / "train.jsonl", "max_steps": 1,
                       "eval_data": home / "all.jsonl", "save_path": home / "two", "learning_rate": 0.0,
                       "disable_ckpt": True}  # yapf: disable
    run = launch.launch(home / "ranks", options, 2, module="lightrft.cli.train_grm")
    assert run.wait(200) == [0, 0], run.output
    return metrics(home / "two")[-1]


SHORT_RUN = {"task_instruction": SHORT, "max_len": 160, "eval_steps": 0}


@pytest.fixture(name="straight", scope="module")
def fixture_straight(home, tmp_path_factory):
    """Three steps in one process, with a checkpoint after two."""
    save = tmp_path_factory.mktemp("straight")
    trainer_of(GRMTrainer, GRMConfig, home, save, "train", **SHORT_RUN, disable_ckpt=False, save_steps=2).fit()
    return save


def test_the_gradient_of_packed_rows_is_that_of_hugging_face_alone(home, tmp_path):
    trainer = trainer_of(GRMTrainer, GRMConfig, home, tmp_path, "train", **SHORT_RUN, micro_train_batch_size=3)
    rows, hf = next(trainer.loader), AutoModelForCausalLM.from_pretrained(home / "model")
    trainer.loader.position = 0
    loss = -naive_sums(hf, rows).sum() / sum(sum(row.loss_mask) for row in rows)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in hf.parameters()]).item()
    got = trainer.train_step()
    assert got["grm/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert got["grm/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_one_micro_batch_is_eight(home, straight, tmp_path):
    trainer_of(GRMTrainer, GRMConfig, home, tmp_path, "train", **SHORT_RUN, micro_train_batch_size=1).fit()
    assert close(exported(tmp_path), exported(straight)) < 1e-5
    assert close(exported(straight), load_file(home / "model" / "model.safetensors")) > 1e-3


def test_resumed_is_straight(home, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_000003")
    trainer_of(GRMTrainer, GRMConfig, home, tmp_path / "resumed", "train", **SHORT_RUN, disable_ckpt=False,
               save_steps=2, load_checkpoint=True).fit()  # yapf: disable
    assert close(exported(straight), exported(tmp_path / "resumed")) == 0
    assert metrics(straight) == metrics(tmp_path / "resumed")


def test_rows_of_a_split_are_rendered_with_their_options(home):
    """Every option of the rows changes the tokens, and only the judgement is learnt."""
    tokenizer, data = load_tokenizer(str(home / "model")), partial(JudgeDataConfig,
                                                                   train_data=[str(home / "all.jsonl")])
    plain = JudgementDataset(data(), tokenizer)[0]
    flips = {"prompt_key": "alone", "chosen_key": "alone", "rejected_key": "alone", "judgement_key": "why",
             "task_instruction": SHORT}  # yapf: disable
    for name, value in flips.items():
        assert JudgementDataset(data(**{name: value}), tokenizer)[0].token_ids != plain.token_ids, name
        if name.endswith("_key"):
            with pytest.raises(DataError, match=f"--{name} 'typo': no row of .*all.jsonl has it"):
                JudgementDataset(data(**{name: "typo"}), tokenizer)
    learnt = [token for token, keep in zip(plain.token_ids, plain.loss_mask) if keep]
    assert tokenizer.decode(learnt) == f"<answer>{ANSWERS[plain.right]}</answer><|im_end|>"
    assert set(options(GRMConfig)) - set(options(OfflineConfig)) == {*flips, "generate_max_len"}
    held = [
        JudgementDataset(JudgeDataConfig(train_data=[hold_rows(ROWS)]), tokenizer, seed=seed)[:20] for seed in (0, 1)
    ]
    assert [one.right for one in held[0]] != [one.right for one in held[1]]


@pytest.mark.parametrize("option,said", [
    ({"task_instruction": "{second} or {first}?"}, "must hold {prompt}, {first} and {second}"),
    ({"apply_chat_template": True}, "--apply_chat_template: has no effect"),
])  # yapf: disable
def test_options_that_hide_a_candidate_or_do_nothing_are_refused(home, capsys, option, said):
    given = {"pretrain": home / "model", "train_data": home / "all.jsonl", "train_batch_size": 4, **option}
    with pytest.raises(SystemExit) as done:
        main(launch.flags(given))
    assert done.value.code == 2 and said in capsys.readouterr().err
