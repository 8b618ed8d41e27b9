"""KTO: the loss against Hugging Face, mismatched pairs, micro-batches, ranks, references, resuming, refused rows."""
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.config.options import ConfigError
from lightrft.datasets.judged import mismatched, others
from lightrft.datasets.rows import DataError
from lightrft.datasets.sft_dataset import SFTExample
from lightrft.ops.preference import kto, kto_kl
from lightrft.tests.support import preference_runs as runs
from lightrft.tests.support.preference_runs import home, naive_sums
from lightrft.tests.support.runs import no_picture
from lightrft.trainer.offline import reference

no_picture, home = no_picture, home  # fixtures; the module draws no curve
rig = runs.Rig("kto", "judged")
trainer_of, run = rig.trainer_of, rig.run
WEIGHTS = {"desirable_loss_weight": 1.5, "undesirable_loss_weight": 0.5}


def test_loss_gradient_and_metrics_are_those_of_hugging_face(home, tmp_path):
    trainer = trainer_of(home, tmp_path, ref_pretrain=str(home / "other"), micro_train_batch_size=1, **WEIGHTS)
    rows = next(trainer.loader)
    trainer.loader.position = 0
    hf, ref = (AutoModelForCausalLM.from_pretrained(home / name) for name in ("model", "other"))
    with torch.no_grad():
        kl = kto_kl(*(naive_sums(each, [row.mismatched for row in rows]) for each in (hf, ref)))
        base = naive_sums(ref, [row.answer for row in rows])
    sums, good = naive_sums(hf, [row.answer for row in rows]), torch.tensor([row.desirable for row in rows])
    loss = kto(sums, base, good, kl, 0.5, 1.5, 0.5).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in hf.parameters()]).item()
    got, rewards = trainer.train_step(), 0.5 * (sums - base)
    assert 0 < good.sum() < 8 and kl > 0 and got["kto/answers"] == 8
    assert got["kto/kl"] == pytest.approx(kl.item(), rel=1e-5)
    assert got["kto/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert got["kto/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, side in (("chosen", good), ("rejected", ~good)):
        assert got[f"kto/rewards/{name}"] == pytest.approx(rewards[side].mean().item(), rel=1e-4)
        assert got[f"kto/logps/{name}"] == pytest.approx(sums[side].mean().item(), rel=1e-4)


def test_mismatched_sequences_have_the_answer_to_another_prompt(home, tmp_path):
    trainer = trainer_of(home, tmp_path)
    tokenizer, rows = trainer.tokenizer, trainer.rows
    texts = [tokenizer.decode(row.mismatched.token_ids) for row in rows]
    for i, (row, text) in enumerate(zip(runs.JUDGED, texts)):
        following = runs.JUDGED[(i + 2) % len(texts)]  # two rows per prompt
        assert text == f"{row['prompt']}{following['completion']}<|im_end|>" and row["prompt"] != following["prompt"]


def test_answers_of_one_kind_are_told(home, tmp_path, capsys):
    for label in (True, False):
        rows = [row | {"label": label} for row in runs.JUDGED]
        (home / "alike.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        trainer_of(home, tmp_path, "alike")
        assert f"all {len(rows)} answers are {'' if label else 'un'}desirable" in capsys.readouterr().err
    trainer_of(home, tmp_path)
    assert "desirable" not in capsys.readouterr().err


def test_the_next_other_prompt_is_found_from_everywhere():

    def row(prompt, media=()):
        return SFTExample("", [ord(letter) for letter in prompt] + [0], [False] * len(prompt) + [True], media)

    assert others([row(text) for text in "aabca"]) == [2, 2, 3, 4, 2]
    assert others([row(text) for text in "aabbbcc"]) == [2, 3, 5, 6, 5, 0, 1], "each answer to the next prompt counts"
    seen = [row("a", ("cat", )), row("a", ("cat", )), row("a", ("dog", ))]
    assert others(seen) == [2, 2, 0] and mismatched(seen[0], seen[2], 9).media == ("cat", ), "of the prompt"
    with pytest.raises(DataError, match="2 judged answers to one prompt.*several prompts"):
        others([row("a"), row("a")])


@pytest.fixture(scope="module")
def straight(home, tmp_path_factory):
    """Three steps in one process, with a checkpoint after two."""
    save = tmp_path_factory.mktemp("straight")
    (home / "three.jsonl").write_text("".join(json.dumps(row) + "\n" for row in runs.JUDGED[1:4]), encoding="utf-8")
    return run(home, save, **held(home), disable_ckpt=False, save_steps=2), save


def held(home):
    """Options of a run with three held-out answers, so that one of two ranks has a forward pass without any, and with
    a KL above 0, which another reference gives."""
    return WEIGHTS | {"ref_pretrain": str(home / "other"), "eval_data": [str(home / "three.jsonl")], "eval_steps": -1}


def test_one_micro_batch_is_eight(straight, home, tmp_path):
    run(home, tmp_path, **held(home), micro_train_batch_size=1)
    assert runs.close(runs.exported(tmp_path), runs.exported(straight[1])) < 1e-5
    assert runs.close(runs.exported(tmp_path), runs.load_file(home / "model" / "model.safetensors")) > 1e-3
    runs.same_steps(tmp_path, straight[1], "kto")
    assert runs.metrics(tmp_path)[0]["kto/kl"] > 0


def test_resumed_is_straight(straight, home, tmp_path):
    _, save = straight
    resumed = tmp_path / "resumed"
    shutil.copytree(save, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000003")
    run(home, resumed, **held(home), disable_ckpt=False, save_steps=2, load_checkpoint=True)
    assert runs.close(runs.exported(save), runs.exported(resumed)) == 0 and runs.metrics(save) == runs.metrics(resumed)


@pytest.mark.dist
def test_two_ranks_are_one(straight, home, tmp_path):
    options = held(home) | {"eval_data": home / "three.jsonl", "beta": 0.5}
    runs.launch("lightrft.cli.train_kto", home, tmp_path, "judged", **options, micro_train_batch_size=1)
    assert runs.close(runs.exported(tmp_path), runs.exported(straight[1])) < 2e-5
    for a, b in zip(runs.metrics(tmp_path), runs.metrics(straight[1]), strict=True):
        for key in ("loss", "kl", "rewards/chosen", "rewards/rejected", "logps/chosen", "grad_norm"):
            assert a[f"kto/{key}"] == pytest.approx(b[f"kto/{key}"], rel=1e-3, abs=1e-5), key
    for key in ("loss", "rewards/chosen", "logps/chosen", "logps/rejected"):
        assert a[f"eval/{key}"] == pytest.approx(b[f"eval/{key}"], rel=1e-3), key


def test_the_cache_has_mismatched_sequences_too(home, tmp_path, monkeypatch):
    options = {"ref_cache_dir": str(tmp_path / "cache"), "eval_data": [str(home / "judged.jsonl")], "eval_steps": -1}
    run(home, tmp_path / "first", **options)
    sums, passes = reference.response_sums, []
    monkeypatch.setattr(reference, "response_sums", lambda *args: passes.append(args) or sums(*args))
    run(home, tmp_path / "second", **options)
    assert not passes and runs.metrics(tmp_path / "first") == runs.metrics(tmp_path / "second")


def test_training_on_judged_answers_learns_them(home, tmp_path):
    run(home, tmp_path, max_steps=12, eval_data=[str(home / "judged.jsonl")], eval_steps=-1)
    first, last = runs.metrics(tmp_path)[0], runs.metrics(tmp_path)[-1]
    assert first["kto/loss"] == pytest.approx(0.5) and first["kto/kl"] == 0
    assert last["eval/loss"] < 0.4 and last["eval/rewards/chosen"] - last["eval/rewards/rejected"] > 1


@pytest.mark.parametrize("row,said", [
    ({"prompt": "a", "completion": "b"}, "the row has no column 'label' .it has prompt, completion.*--label_key"),
    ({"prompt": "a", "completion": "b", "label": "yes"}, "the column 'label' is 'yes': expected true or false"),
    ({"prompt": "a", "completion": "b", "label": 0.5}, "the column 'label' is 0.5"),
    ({"prompt": "a", "completion": " ", "label": True}, "no answer to train on"),
    ({"prompt": "a", "completion": "<|im_end|>", "label": True}, "the answer is empty, or an end token alone"),
    ({"prompt": "a", "completion": "", "response": "b", "label": True}, "no answer to train on"),
    ({"completion": "b", "label": True}, "no demonstration"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                   {"role": "user", "content": "c"}], "label": True}, "does not end with an answer"),
    ({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": ""}],
      "label": True}, "the answer in turn 2 of the chat is empty"),
])  # yapf: disable
def test_rows_that_cannot_be_used_are_refused(row, said, home, tmp_path):
    (home / "bad.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=said):
        trainer_of(home, tmp_path, "bad")


def test_weights_that_leave_nothing_to_learn_are_refused(home, tmp_path):
    with pytest.raises(ConfigError, match="--desirable_loss_weight 0 with .* 0: nothing would be trained"):
        trainer_of(home, tmp_path, desirable_loss_weight=0.0, undesirable_loss_weight=0.0)
    trainer_of(home, tmp_path, desirable_loss_weight=0.0)


@pytest.mark.parametrize("option", ["input_key", "output_key", "label_key"])
def test_a_named_column_that_no_row_has(option, home, tmp_path):
    with pytest.raises(DataError, match=f"--{option} 'typo': no row of .*judged.jsonl has it"):
        trainer_of(home, tmp_path, **{option: "typo"})


def test_a_row_beyond_the_limit_is_left_out_and_counted(home, tmp_path, capsys):
    """A long prompt as well as a long answer; no sequence of another row's answer is longer either."""
    rows = [*runs.JUDGED[:4], *({**runs.JUDGED[0], key: "1" * 40} for key in ("prompt", "completion"))]
    (home / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = trainer_of(home, tmp_path, "long", max_len=12, train_batch_size=1).rows
    assert [row.uid for row in found] == [f"0:{i}" for i in range(4)] and found.dropped == 2
    assert "2 of 6 rows are longer than --max_len 12" in capsys.readouterr().err
    assert all(row.mismatched.loss_mask.index(True) < len(row.mismatched.token_ids) <= 12 for row in found)


def test_of_a_chat_only_the_last_answer_is_in_the_loss(home, tmp_path):
    chats = [[("user", f"{i}?"), ("assistant", "first"), ("user", "Sure?"), ("assistant", f"last {i}")] for i in "12"]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat], "label": i}
            for i, chat in enumerate(chats)]  # yapf: disable
    (home / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    trainer = trainer_of(home, tmp_path, "chats", train_batch_size=1)
    said = [trainer.tokenizer.decode([t for t, keep in zip(row.answer.token_ids, row.answer.loss_mask) if keep])
            for row in trainer.rows]  # yapf: disable
    assert said == ["last 1<|im_end|>", "last 2<|im_end|>"] and [row.desirable for row in trainer.rows] == [False, True]
