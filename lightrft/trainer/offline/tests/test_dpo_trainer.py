"""Training on pairs: the loss against Hugging Face, micro-batches, ranks, references, resuming, refused input."""
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.cli import train_dpo
from lightrft.config.options import ConfigError
from lightrft.config.preference_schema import PAIR_LOSSES as NAMES
from lightrft.config.preference_schema import WITHOUT_REFERENCE
from lightrft.datasets.rows import DataError
from lightrft.models.shared_prompts import forward_row
from lightrft.ops.preference import PAIR_LOSSES, Pairs
from lightrft.tests.support import preference_runs as runs
from lightrft.tests.support.preference_runs import home
from lightrft.tests.support.runs import no_picture
from lightrft.trainer.offline import reference
from lightrft.trainer.optimizer_step import NonFiniteTraining
from lightrft.trainer.offline.reference_cache import digests, part_of
from lightrft.types import Experience

no_picture, home = no_picture, home  # fixtures; the module draws no curve
rig = runs.Rig("dpo", "pairs")
trainer_of, run = rig.trainer_of, rig.run

TOKEN_MEAN = {"hinge": False, "simpo": True}  # the losses tried with an NLL, and how it is averaged


def naive_loss(home, rows, name, options):
    """The policy, its loss and its log-probs."""
    hf, ref = (AutoModelForCausalLM.from_pretrained(home / model) for model in ("model", "other"))
    sides = [*zip(*((row.chosen, row.rejected) for row in rows))]
    chosen, rejected, ref_chosen, ref_rejected = (runs.naive_sums(model, side) for model in (hf, ref)
                                                  for side in sides)  # yapf: disable
    lens = [torch.tensor([float(sum(answer.loss_mask)) for answer in side]) for side in sides]
    loss = PAIR_LOSSES.get(name)
    if name in WITHOUT_REFERENCE:
        ref_chosen, ref_rejected = 0 * ref_chosen, 0 * ref_rejected
    pairs = Pairs(chosen, rejected, ref_chosen.detach(), ref_rejected.detach(), *lens)
    values = loss.fn(pairs, **{key: options[key] for key in loss.reads})
    return hf, values.mean(), pairs, loss


@pytest.mark.parametrize("name", NAMES)
def test_loss_gradient_and_rewards_are_those_of_hugging_face(name, home, tmp_path):
    """One pair per micro-batch here, a sequence at a time there; the reference is another model."""
    loss = PAIR_LOSSES.get(name)
    options = {"beta": 0.5, "label_smoothing": 0.1, "simpo_gamma": 0.7}
    given = {key: options[key] for key in loss.reads}
    given |= {"ref_pretrain": str(home / "other")} if name not in WITHOUT_REFERENCE else {}
    coef = 0.5 if name in TOKEN_MEAN else 0.0
    given |= {"nll_loss_coef": coef, "nll_token_mean": TOKEN_MEAN.get(name, False)}
    trainer = trainer_of(home, tmp_path, loss=name, micro_train_batch_size=1, **given)
    rows = next(trainer.loader)
    trainer.loader.position = 0
    hf, expected, pairs, loss = naive_loss(home, rows, name, options)
    nll = -pairs.chosen / pairs.chosen_lens
    nll = -pairs.chosen.sum() / pairs.chosen_lens.sum() if TOKEN_MEAN.get(name) else nll.mean()
    expected = expected + coef * nll
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in hf.parameters()]).item()
    got = trainer.train_step()
    assert got["dpo/loss"] == pytest.approx(expected.item(), rel=2e-5) and got["dpo/pairs"] == 8
    assert got["dpo/grad_norm"] == pytest.approx(norm, rel=2e-4)
    chosen, rejected = (0.5 * ratio for ratio in loss.ratios(pairs))
    found = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margin": chosen - rejected,
             "accuracy": ((chosen - rejected).sign() + 1) / 2, "logps/chosen": pairs.chosen,
             "logps/rejected": pairs.rejected, "nll": nll}  # yapf: disable
    for key, values in found.items():
        assert got[f"dpo/{key}"] == pytest.approx(values.mean().item(), rel=1e-4, abs=1e-6), key


def test_the_table_of_names_is_that_of_the_losses():
    assert NAMES == tuple(PAIR_LOSSES)


def test_pairs_stay_together(home, tmp_path):
    trainer = trainer_of(home, tmp_path, max_tokens_per_micro_batch=40)
    batch, parts = trainer._planned(next(trainer.loader))
    assert len(parts) > 2 and sorted(sum(parts, [])) == list(range(16))
    for part in parts:
        assert part and all(left + 1 == right and left % 2 == 0 for left, right in zip(part[::2], part[1::2]))
    exp = batch.exp.select(parts[0])
    assert forward_row(exp).row.num_tokens == exp.num_tokens - sum(exp.prompt_lens[::2])  # a pair shares its prompt
    assert exp.drawn.sum() == sum(sum(batch.exp.drawn[batch.exp.tokens_of([i])].tolist()) for i in parts[0])


@pytest.fixture(scope="module")
def straight(home, tmp_path_factory):
    """Three steps of aot (whose pairs meet over the whole batch) in one process, with a checkpoint after two."""
    save = tmp_path_factory.mktemp("straight")
    return run(home, save, **AOT, disable_ckpt=False, save_steps=2), save


AOT = {"loss": "aot", "eval_steps": 0}


def test_the_card_names_the_training(straight):
    card = (straight[1] / "hf" / "README.md").read_text(encoding="utf-8")
    assert "` after 3 steps of training on pairs of answers with lightrft" in card
    assert "\n- dpo\n" in card and "\n| dpo/loss |" in card


def test_one_micro_batch_is_eight(straight, home, tmp_path):
    run(home, tmp_path, **AOT, micro_train_batch_size=1)
    assert runs.close(runs.exported(tmp_path), runs.exported(straight[1])) < 1e-5
    assert runs.close(runs.exported(tmp_path), runs.load_file(home / "model" / "model.safetensors")) > 1e-3
    runs.same_steps(tmp_path, straight[1], "dpo")


def test_resumed_is_straight(straight, home, tmp_path):
    _, save = straight
    resumed = tmp_path / "resumed"
    shutil.copytree(save, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000003")
    run(home, resumed, **AOT, disable_ckpt=False, save_steps=2, load_checkpoint=True)
    assert runs.close(runs.exported(save), runs.exported(resumed)) == 0 and runs.metrics(save) == runs.metrics(resumed)


@pytest.mark.dist
def test_two_ranks_are_one(straight, home, tmp_path):
    runs.launch("lightrft.cli.train_dpo", home, tmp_path, "pairs", beta=0.5, **AOT, ref_offload=True,
                micro_train_batch_size=2)
    assert runs.close(runs.exported(tmp_path), runs.exported(straight[1])) < 2e-5
    for a, b in zip(runs.metrics(tmp_path), runs.metrics(straight[1]), strict=True):
        for key in ("loss", "rewards/margin", "accuracy", "logps/chosen", "grad_norm"):
            assert a[f"dpo/{key}"] == pytest.approx(b[f"dpo/{key}"], rel=1e-3, abs=1e-5), key


def test_the_reference_of_lora_is_the_base_model(home, tmp_path):
    trainer = run(home, tmp_path, lora_rank=4, eval_steps=0)
    exp = trainer.pack(trainer.rows[:4]).exp
    sums = trainer.reference.sums(exp, [[0, 3, 1], [2, 4, 5, 6, 7]])
    rows = [side for row in trainer.rows[:4] for side in (row.chosen, row.rejected)]
    alone = runs.naive_sums(AutoModelForCausalLM.from_pretrained(home / "model"), rows)
    assert sums.tolist() == pytest.approx(alone.tolist(), rel=1e-5)
    assert runs.metrics(tmp_path)[0]["dpo/rewards/margin"] == 0 < runs.metrics(tmp_path)[-1]["dpo/rewards/margin"]


def test_a_second_run_reads_the_log_probs_of_the_reference(home, tmp_path, monkeypatch):
    """Equal to a live reference; another reference has a file of its own."""
    options = {"ref_pretrain": str(home / "other"), "eval_data": [str(home / "pairs.jsonl")], "eval_steps": -1}
    run(home, tmp_path / "live", **options)
    cached = options | {"ref_cache_dir": str(tmp_path / "cache")}
    run(home, tmp_path / "first", **cached)
    passes = []
    monkeypatch.setattr(reference, "response_sums", lambda *args: passes.append(args))
    run(home, tmp_path / "second", **cached)
    assert not passes, "the reference has computed again"
    for name in ("first", "second"):
        assert runs.close(runs.exported(tmp_path / name), runs.exported(tmp_path / "live")) < 1e-5
    assert runs.metrics(tmp_path / "first") == runs.metrics(tmp_path / "second")
    monkeypatch.undo()
    run(home, tmp_path / "third", **cached | {"ref_pretrain": None})
    assert len([*(tmp_path / "cache").iterdir()]) == 2
    assert runs.metrics(tmp_path / "third")[0]["dpo/rewards/margin"] == pytest.approx(0, abs=1e-5)


def test_sums_are_known_by_tokens_loss_and_media():
    kinds = [([5, 6, 7], [False, True, True], ()), ([5, 6, 8], [False, True, True], ()),
             ([5, 6, 7], [False, False, True], ()), ([5, 6, 7], [False, True, True], ("cat", ))]  # yapf: disable
    tokens, masks, media = zip(*kinds, kinds[0])
    found, others = ([*digests(Experience.pack(tokens, masks, media=[*media]), settings)] for settings in "ab")
    assert len({*found}) == 4 and found[0] == found[4]
    assert [i for i in range(5) if found[i] != others[i]] == [3], "settings are those of media"


def test_a_damaged_cache_is_made_again(home, tmp_path):
    cache = tmp_path / "cache"
    for name, left in (("a", 100), ("b", 0), ("c", 0)):
        run(home, tmp_path / name, ref_cache_dir=str(cache), max_steps=1)
        (file, ) = cache.iterdir()
        size = file.stat().st_size
        file.write_bytes(file.read_bytes()[:left])
    assert size > 100
    assert runs.metrics(tmp_path / "a") == runs.metrics(tmp_path / "b") == runs.metrics(tmp_path / "c")


def test_training_on_pairs_learns_them(home, tmp_path):
    trainer = run(home, tmp_path, max_steps=12, eval_data=[str(home / "pairs.jsonl")], eval_steps=-1)
    lines = runs.metrics(tmp_path)
    assert lines[0]["dpo/accuracy"] == 0.5, "before the first update all pairs are ties"
    assert lines[-1]["eval/accuracy"] > 0.9 and lines[0]["dpo/loss"] == pytest.approx(0.693, abs=1e-3)
    assert trainer.evaluate()["eval/loss"] < 0.4


def test_processes_of_the_same_number_write_other_files(tmp_path):
    """As on two nodes, which share the folder of a cache."""
    assert part_of(tmp_path / "a.npz") != part_of(tmp_path / "a.npz")


def test_a_run_without_a_step_is_an_error(home, tmp_path):
    """Also one that is shorter than --max_bad_steps."""
    trainer = trainer_of(home, tmp_path, max_steps=2)
    loss_of = trainer.loss_of
    trainer.loss_of = lambda *batch: (loss_of(*batch)[0] * torch.nan, {})
    with pytest.raises(NonFiniteTraining, match="all 2 steps was not finite, and none was applied"):
        trainer.fit()
    assert not (tmp_path / "hf").exists()


def test_ties_are_refused_or_left_out(home, tmp_path):
    (home / "ties.jsonl").write_text((home / "pairs.jsonl").read_text() +
                                     '{"prompt": "a", "chosen": "b", "rejected": "b", "tie": true}\n')
    with pytest.raises(DataError, match="row 21 of training data 1: a tie.*--pair_policy skip"):
        trainer_of(home, tmp_path, "ties")
    assert len(trainer_of(home, tmp_path, "ties", pair_policy="skip").rows) == 20


@pytest.mark.parametrize("options,said", [
    ({"loss": "hinge", "label_smoothing": 0.1
      }, "--label_smoothing 0.1: has no effect with --loss hinge; drop it, or use "
     "sigmoid or robust or simpo or aot or exo"),
    ({"simpo_gamma": 1.0}, "--simpo_gamma 1: has no effect with --loss sigmoid; drop it, or use simpo"),
    ({"loss": "exo"}, "--loss exo: is not defined with --label_smoothing 0; add --label_smoothing"),
    ({"loss": "robust", "label_smoothing": 0.5}, "nearest valid value: 0.49"),
    ({"label_smoothing": 0.5}, "--label_smoothing 0.5: labels that are wrong half of the time carry no information"),
    ({"ipo": True, "loss": "hinge"}, "--ipo true: contradicts --loss hinge; drop one"),
    ({"loss": "simpo", "ref_offload": True}, "--ref_offload true: has no effect with --loss simpo, which has no ref"),
    ({"lora_rank": 2, "ref_pretrain": "other"}, "--ref_pretrain other: has no effect with --lora_rank, where the"),
    ({"ref_cache_dir": "cache", "ref_offload": True}, "--ref_offload true: has no effect with --ref_cache_dir"),
    ({"ref_pretrain": "./nowhere"}, "--ref_pretrain ./nowhere: no such folder"),
    ({"beta": 0.0}, "--beta 0: must be"),
])
def test_options_that_do_not_fit_are_refused(options, said, home, tmp_path):
    with pytest.raises(ConfigError) as error:
        trainer_of(home, tmp_path, **options)
    assert said in str(error.value)


def test_ipo_is_openrlhfs_name(home, tmp_path):
    found = [
        trainer_of(home, tmp_path, **options).train_step()["dpo/loss"]
        for options in ({"ipo": True}, {"loss": "ipo_sum"})
    ]
    assert found[0] == found[1] == pytest.approx(1.0)  # (0 - 1 / (2 * 0.5))**2


def test_the_printed_rows_are_one_pair(home, tmp_path):
    """Each schema of the documentation gives the same answers."""
    page = Path(__file__).parents[3] / "docs" / "preferences.md"
    if not page.exists():
        pytest.skip("installed without its repository")
    lines = page.read_text(encoding="utf-8").split("```json\n")[1].split("```")[0].splitlines()
    chats = [line for line in lines if "role" in line]
    (home / "printed.jsonl").write_text("\n".join(chats), encoding="utf-8")
    first, *others = trainer_of(home, tmp_path, "printed", train_batch_size=1).rows
    assert len(lines) == 4 and len(others) == 2
    for other in others:
        assert (other.chosen.token_ids, other.rejected.token_ids) == (first.chosen.token_ids, first.rejected.token_ids)
    tokenizer = trainer_of(home, tmp_path, "printed", train_batch_size=1).tokenizer
    said = [
        tokenizer.decode([t for t, keep in zip(side.token_ids, side.loss_mask) if keep])
        for side in (first.chosen, first.rejected)
    ]
    assert said == ["5<|im_end|>", "6<|im_end|>"]


# OpenRLHF's manual: its command, without the flags that are refused because packing and its attention are always on
MANUAL = """--save_path ./checkpoint/llama3-8b-dpo --save_steps -1 --logging_steps 1 --eval_steps -1
--train_batch_size 256 --micro_train_batch_size 1 --pretrain OpenRLHF/Llama-3-8b-sft-mixture --bf16 --max_epochs 1
--max_len 8192 --zero_stage 3 --strategy deepspeed --learning_rate 5e-7 --beta 0.1
--train_data OpenRLHF/preference_dataset_mixture2_and_safe_pku --apply_chat_template --chosen_key chosen
--rejected_key rejected --load_checkpoint --gradient_checkpointing --ref_offload --ipo --nll_loss_coef 0.1"""


def test_the_command_of_a_manual_runs(home, tmp_path):
    """With its paths, sizes and backend replaced by tiny ones."""
    words = shlex.split(MANUAL)
    swaps = {"--save_path": tmp_path, "--pretrain": home / "model", "--train_data": home / "pairs.jsonl",
             "--train_batch_size": 8, "--max_len": 100}  # yapf: disable
    for flag, value in swaps.items():
        words[words.index(flag) + 1] = str(value)
    for flag, count in (("--zero_stage", 2), ("--strategy", 2), ("--bf16", 1)):
        at = words.index(flag)
        del words[at:at + count]
    train_dpo.main([*words, "--packing_samples"])
    lines = runs.metrics(tmp_path)
    assert len(lines) == 2 and lines[0]["dpo/loss"] == pytest.approx(25.0 + 0.1 * lines[0]["dpo/nll"])
