"""Process reward models: the loss against Hugging Face, micro-batches, ranks, resuming, known metrics."""
import json
import random
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.cli.export import export
from lightrft.cli.merge_lora import merge
from lightrft.config.rm_schema import PRMConfig, StepDataConfig, StepFormat
from lightrft.config.schema import RewardConfig
from lightrft.datasets.rows import hold_rows
from lightrft.datasets.steps import StepDataset
from lightrft.models.config_json import reward_kind
from lightrft.models.reward_model import STEPS
from lightrft.rewards.base import RewardInput
from lightrft.rewards.manager import RewardManager
from lightrft.tests.support import preference_runs as runs
from lightrft.tests.support import tiny
from lightrft.tests.support.boundary_tokenizers import metaspace
from lightrft.tests.support.runs import no_picture
from lightrft.trainer.model_card import _judgements
from lightrft.trainer.offline.prm_trainer import PRMTrainer
from lightrft.types import Experience

no_picture = no_picture  # the module draws no curve
TOKENS = {"placeholder_token": "#", "reward_tokens": ["+", "-"]}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return runs.write_home(tmp_path_factory.mktemp("home"))


def trainer_of(home, save, data="steps", **options):
    return runs.trainer_of(PRMTrainer, PRMConfig, home, save, data, **TOKENS | options)


def run(home, save, **options):
    trainer_of(home, save, **options).fit()
    return runs.exported(save)


def naive(hf, rows, classes, graded):
    """Loss, accuracies and base rate in float64, one whole solution and one step at a time."""
    losses, right, solved, found, good = [], [], [], [], []
    for row in rows:
        logits = hf(input_ids=torch.tensor([row.token_ids])).logits[0].double()
        at = [i for i, keep in enumerate(row.loss_mask) if keep]
        judged, truth = [], []
        for label, logit in zip(row.labels, logits[at], strict=True):
            logprobs = (logit if classes is None else logit[classes]).log_softmax(-1)
            losses.append(-label * logprobs[0] - (1 - label) * logprobs[1] if graded else -logprobs[int(label)])
            judged.append(logprobs.argmax().item())
            truth.append(int(label < 0.5) if graded else int(label))
        right += [a == b for a, b in zip(judged, truth)]
        solved.append(judged == truth)
        good += [each == 0 for each in truth]
        if classes and any(truth):
            found.append(
                next((i for i, each in enumerate(judged) if each), -1) == next(i for i, each in enumerate(truth)
                                                                               if each))
    means = (sum(each) / len(each) for each in (right, solved, found, good) if each)
    return torch.stack(losses).mean(), dict(
        zip(("accuracy", "accuracy_solution", "accuracy_first_error", "base_rate"), means))


@pytest.mark.parametrize("options,count", [({}, 4), ({"label_key": "graded"}, 4), ({"data": "completions"}, 4),
                                           ({"reward_tokens": ["+", "-", "0"]}, 4), ({"reward_tokens": []}, 2)])
def test_loss_gradient_and_metrics_are_those_of_hugging_face(options, count, home, tmp_path):
    """Hard and graded labels, of completions, of three classes, and over the whole vocabulary."""
    trainer = trainer_of(home, tmp_path, micro_train_batch_size=3, **options)
    rows, form = next(trainer.loader), trainer.config.data.form
    trainer.loader.position = 0
    hf = AutoModelForCausalLM.from_pretrained(home / "model")
    loss, wanted = naive(hf, rows, form.reward_ids(trainer.tokenizer) or None, form.graded)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in hf.parameters()]).item()
    got = trainer.train_step()
    assert got["prm/steps"] == sum(len(row.labels) for row in rows)
    assert got["prm/loss"] == pytest.approx(loss.item(), rel=1e-5) and got["prm/grad_norm"] == pytest.approx(
        norm, rel=1e-4)
    names = [*wanted][:count]
    assert {name: got.get(f"prm/{name}") for name in names} == pytest.approx({name: wanted[name] for name in names})
    assert ("prm/base_rate" in got) is (count == 4)


@pytest.fixture(scope="module")
def straight(home, tmp_path_factory):
    """Three steps in one process, with a checkpoint after two."""
    save = tmp_path_factory.mktemp("straight")
    return run(home, save, disable_ckpt=False, save_steps=2, eval_steps=0), save


def test_one_micro_batch_is_eight(straight, home, tmp_path):
    assert runs.close(run(home, tmp_path, micro_train_batch_size=1, eval_steps=0), straight[0]) < 1e-5
    assert runs.close(straight[0], runs.load_file(home / "model" / "model.safetensors")) > 1e-3


def test_resumed_is_straight_and_a_checkpoint_is_exported(straight, home, tmp_path):
    weights, save = straight
    resumed = tmp_path / "resumed"
    shutil.copytree(save, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000003")
    again = run(home, resumed, disable_ckpt=False, save_steps=2, eval_steps=0, load_checkpoint=True)
    assert runs.close(weights, again) == 0 and runs.metrics(save) == runs.metrics(resumed)
    for folder in (save / "hf", tmp_path / "exported"):
        if not folder.exists():
            export(save, folder)
        assert reward_kind(str(folder)).steps == StepFormat("#", ["+", "-"], "\n")
    assert runs.close(runs.load_file(tmp_path / "exported" / "model.safetensors"), weights) == 0
    assert reward_kind(str(home / "model")).language


def test_the_adapter_of_a_judge_of_steps_is_merged_to_what_is_exported(home, tmp_path):
    run(home, tmp_path, lora_rank=2, max_steps=2, eval_steps=0)
    merge(str(home / "model"), tmp_path / "hf" / "adapter", tmp_path / "merged")
    assert all(reward_kind(str(tmp_path / name)).steps == StepFormat("#", ["+", "-"]) for name in ("merged", "hf"))
    own, merged = (runs.load_file(tmp_path / name / "model.safetensors") for name in ("hf", "merged"))
    assert runs.close(own, merged) < 1e-6 < runs.close(own, runs.load_file(home / "model" / "model.safetensors"))


def test_the_code_of_the_card_judges_steps_as_training_does(straight, home, tmp_path, capsys):
    card = (straight[1] / "hf" / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: token-classification\n" in card
    exec(card.partition("```python\n")[2].partition("```")[0], {})  # as a reader would run it
    shown = json.loads(capsys.readouterr().out.rpartition("good ")[2])
    row = {"prompt": [{"role": "user", "content": "What is 12+30?"}], "completions": ["2+0=2", "1+3=4"],
           "labels": [True, True]}  # yapf: disable
    (home / "one.jsonl").write_text(json.dumps(row), encoding="utf-8")
    trainer = trainer_of(home, tmp_path, data="one", pretrain=str(straight[1] / "hf"), train_batch_size=1)
    exp = trainer.pack(next(trainer.loader)).exp
    with torch.no_grad():
        (wanted, ) = trainer.actor.model.eval()(exp, read=lambda logprobs, part: (logprobs.exp()[:, 0], ))
    assert shown == pytest.approx(wanted.tolist(), rel=1e-4) and len(shown) == 2


def test_a_tokenizer_that_puts_blanks_before_texts(tmp_path, capsys):
    """Training, reward and card judge the same tokens: no blank is before a step."""
    folder, form = tmp_path / "judge", StepFormat("<E>", ["<U>", "<A>"])
    tiny.save_model(folder, "llama", seed=3, initializer_range=0.4)
    tiny.change_json(folder / "config.json", **{STEPS: vars(form)})
    tokenizer = metaspace(tiny.CHATML)
    tokenizer.save_pretrained(folder)
    chat = [{"role": "user", "content": "What is 12+30?"}]
    row = {"prompt": chat, "completions": ["2+0=2", "1+3=4"], "labels": [True, True]}
    cfg = StepDataConfig(train_data=[hold_rows([row])], placeholder_token="<E>", reward_tokens=form.reward_tokens)
    example, hf = StepDataset(cfg, tokenizer)[0], AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = hf(torch.tensor([example.token_ids])).logits[0][torch.tensor(example.loss_mask)]
    wanted = logits[:, form.reward_ids(tokenizer)].softmax(-1)[:, 0].tolist()
    manager = RewardManager(RewardConfig(reward_pretrain=[str(folder)], step_reward="per_step"))
    (score, ) = manager.collect(manager.submit([RewardInput("", "2+0=2\n1+3=4", chat)]))
    assert [reward for _, reward in score.steps] == pytest.approx(wanted, rel=1e-4)
    exec(_judgements(form, folder, tokenizer), {})
    assert json.loads(capsys.readouterr().out.rpartition("good ")[2]) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.dist
def test_two_ranks_are_one(straight, home, tmp_path):
    runs.launch("lightrft.cli.train_prm", home, tmp_path, "steps", placeholder_token="#", reward_tokens="+,-",
                eval_steps=0, micro_train_batch_size=2, strategy="fsdp")
    assert runs.close(runs.exported(tmp_path), straight[0]) < 2e-5
    for a, b in zip(runs.metrics(tmp_path), runs.metrics(straight[1]), strict=True):
        for key in ("loss", "grad_norm", "accuracy", "accuracy_solution", "accuracy_first_error", "base_rate"):
            assert a[f"prm/{key}"] == pytest.approx(b[f"prm/{key}"], rel=1e-3, abs=1e-5), key


def test_packed_is_alone(home, tmp_path):
    trainer = trainer_of(home, tmp_path)
    exp, model = trainer.pack(next(trainer.loader)).exp, trainer.actor.model.eval()

    def judged(exp):
        return model(exp, read=lambda logprobs, part: (logprobs, ))[0]

    with torch.no_grad():
        alone = torch.cat([judged(exp.select([i])) for i in range(exp.num_seqs)])
        torch.testing.assert_close(judged(exp), alone, rtol=1e-5, atol=1e-6)


def test_metrics_by_hand(home, tmp_path):
    """Three solutions: all right; the first bad step is taken for good; a graded 1/2 that counts nowhere."""
    trainer = trainer_of(home, tmp_path)
    exp = Experience.pack([[1] * 4] * 4, [[False, True, True, True]] * 3 + [[False] * 4])
    labels = torch.tensor([1, 1, 1, 1, 0, 0, 0.5, 0.9, 0.2])
    got = trainer._metrics_of(exp, labels, torch.tensor([0, 0, 0, 0, 0, 1, 1, 0, 1]))
    assert {name: values.tolist() for name, values in got.items()} == {
        "accuracy": [1, 1, 1, 1, 0, 1, 1, 1], "accuracy_solution": [1, 0, 1], "accuracy_first_error": [0, 1],
        "base_rate": [1, 1, 1, 1, 0, 0, 1, 0]}  # yapf: disable


def drawn_sums(count, seed):
    """Solutions of four sums of small numbers, half of which are one too large."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        sums = [(draw.randrange(4), draw.randrange(3), draw.randrange(2)) for _ in range(4)]
        rows.append({"prompt": "Add.\n", "completions": [f"{a}+{b}={a + b + off}" for a, b, off in sums],
                     "labels": [not off for *_, off in sums]})  # yapf: disable
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_it_learns_to_judge_drawn_sums(tmp_path):
    tiny.save_model(tmp_path / "model")
    (tmp_path / "drawn.jsonl").write_text(drawn_sums(1000, 0), encoding="utf-8")
    (tmp_path / "held_out.jsonl").write_text(drawn_sums(100, 1), encoding="utf-8")
    run(tmp_path, tmp_path / "run", data="drawn", train_batch_size=32, max_steps=120, learning_rate=5e-3, eval_steps=-1,
        eval_data=[str(tmp_path / "held_out.jsonl")])
    last = runs.metrics(tmp_path / "run")[-1]
    assert 0.4 < last["eval/base_rate"] < 0.6 and last["eval/accuracy"] >= 0.95
    assert last["eval/accuracy_first_error"] >= 0.9
