"""Distillation: the loss against Hugging Face, micro-batches, ranks, resuming, a sparse teacher live and from files,
refused teachers."""
import json
import shutil
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.config.options import ConfigError
from lightrft.config.shared_schema import StrategyConfig
from lightrft.ops.divergence import coarse, divergence, top_tokens
from lightrft.strategy.strategy import SingleProcessStrategy
from lightrft.tests.support import preference_runs as runs
from lightrft.tests.support import tiny
from lightrft.tests.support.preference_runs import home
from lightrft.tests.support.runs import no_picture
from lightrft.trainer.offline import teacher
from lightrft.trainer.offline.teacher_cache import TeacherCache
from lightrft.utils.errors import UserError

no_picture, home = no_picture, home  # fixtures; the module draws no curve
rig = runs.Rig("kd", "judged", {"teacher_model": "{home}/other"})
trainer_of = rig.trainer_of


def naive_loss(home, rows, kind, k, coef):
    """The student, its loss and the mean divergence, one sequence at a time."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(home / name) for name in ("model", "other"))
    gaps, nll, weights = [], [], []
    for row in rows:
        weights += [weight for weight, keep in zip(row.weights or [1.0] * len(row.token_ids), row.loss_mask) if keep]
        ids, mask = torch.tensor([row.token_ids]), torch.tensor(row.loss_mask)[1:]
        own, target = (model(input_ids=ids).logits[0, :-1][mask].log_softmax(-1) for model in (student, teacher))
        nll.append(-own.gather(-1, ids[0, 1:][mask][:, None])[:, 0])
        if k:
            best, target = top_tokens(target, k)
            own = coarse(own, best)
        gaps.append(divergence(own, target.detach(), kind, 0.3 if kind == "js" else 0.5))
    gaps, nll = torch.cat(gaps), torch.cat(nll)
    return student, (torch.tensor(weights) * (coef * gaps + (1 - coef) * nll)).mean(), gaps.mean()


def write_weighted(home):
    """Write chats with marked turns as ``weighted.jsonl``; return that name."""
    turns = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": str(i + k), "weight": weight}]
             for i in range(8) for k, weight in enumerate((0, 0.5, 2))]  # yapf: disable
    rows = [{"messages": sum(turns[i:i + 3], [])} for i in range(0, 24, 3)]
    (home / "weighted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "weighted"


@pytest.mark.parametrize("kind,k,weighted", [("forward", 0, False), ("reverse", 0, False), ("js", 0, False),
                                             ("forward", 3, False), ("reverse", 3, True)])  # yapf: disable
def test_loss_and_gradient_are_those_of_hugging_face(kind, k, weighted, home, tmp_path):
    trainer = trainer_of(home, tmp_path, write_weighted(home) if weighted else "", divergence=kind, kd_top_k=k,
                         kd_coef=0.7, micro_train_batch_size=3, **({"js_mix": 0.3} if kind == "js" else {}))
    trainer.actor.model.chunk_mib = 0.02  # a few rows at once
    rows = next(trainer.loader)
    assert {weight for row in rows for weight in row.weights} == ({0.0, 0.5, 1.0, 2.0} if weighted else set())
    trainer.loader.position = 0
    student, loss, gap = naive_loss(home, rows, kind, k, 0.7)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in student.parameters()]).item()
    got = trainer.train_step()
    assert got["kd/loss"] == pytest.approx(loss.item(), rel=1e-5) and got["kd/grad_norm"] == pytest.approx(
        norm, rel=1e-4)
    assert got["kd/divergence"] == pytest.approx(gap.item(), rel=1e-5)
    assert got["kd/loss_tokens"] == sum(sum(row.loss_mask) for row in rows)


@pytest.fixture(scope="module")
def straight(home, tmp_path_factory):
    save = tmp_path_factory.mktemp("straight")
    rig.run(home, save, kd_top_k=3, disable_ckpt=False, save_steps=2)
    return runs.exported(save), save


def test_one_micro_batch_is_eight_and_an_offloaded_teacher_the_same(straight, home, tmp_path):
    rig.run(home, tmp_path, micro_train_batch_size=1, kd_top_k=3, teacher_offload=True)
    assert runs.close(runs.exported(tmp_path), straight[0]) < 1e-5


def test_resumed_is_straight(straight, home, tmp_path):
    weights, save = straight
    resumed = tmp_path / "resumed"
    shutil.copytree(save, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000003")
    rig.run(home, resumed, kd_top_k=3, disable_ckpt=False, save_steps=2, load_checkpoint=True)
    assert runs.close(weights, runs.exported(resumed)) == 0 and runs.metrics(save) == runs.metrics(resumed)


@pytest.mark.dist
def test_two_ranks_are_one(straight, home, tmp_path):
    """With a cache, into which both ranks write."""
    runs.launch("lightrft.cli.train_kd", home, tmp_path / "two", "judged", teacher_model=home / "other", kd_top_k=3,
                micro_train_batch_size=2, teacher_cache_dir=tmp_path / "cache")
    assert runs.close(runs.exported(tmp_path / "two"), straight[0]) < 2e-5
    for a, b in zip(runs.metrics(tmp_path / "two"), runs.metrics(straight[1]), strict=True):
        assert all(a[f"kd/{key}"] == pytest.approx(b[f"kd/{key}"], rel=1e-4) for key in ("loss", "divergence", "nll"))


def test_the_cached_teacher_is_the_live_one(home, tmp_path, monkeypatch):
    """It is not loaded where a run only reads. Another k has a folder of its own, and other rows are added."""
    lines = (home / "judged.jsonl").read_text().splitlines(keepends=True)
    (home / "held.jsonl").write_text("".join(lines[20:23]))
    options = {"kd_top_k": 3, "max_steps": 2, "eval_data": [str(home / "held.jsonl")], "eval_steps": -1}
    cached = options | {"teacher_cache_dir": str(tmp_path / "cache"), "max_samples": 8}
    live = options | {"max_samples": 8}
    for name, given in (("live", live), ("first", cached)):
        rig.run(home, tmp_path / name, **given)
    (folder, ) = (tmp_path / "cache").iterdir()
    (file, ) = folder.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(teacher, "FrozenModel", lambda *args: 1 / 0)
        rig.run(home, tmp_path / "second", **cached)
        with pytest.raises(ZeroDivisionError):
            rig.run(home, tmp_path / "more", **cached | {"max_samples": 9})
        with pytest.raises(ZeroDivisionError):
            rig.run(home, tmp_path / "other", **cached | {"teacher_model": str(home / "model")})
    for name in ("first", "second"):
        assert runs.close(runs.exported(tmp_path / name), runs.exported(tmp_path / "live")) < 1e-5
    assert runs.metrics(tmp_path / "first") == runs.metrics(tmp_path / "second")
    file.write_bytes(file.read_bytes()[:100])
    rig.run(home, tmp_path / "again", **cached)
    assert runs.metrics(tmp_path / "again") == runs.metrics(tmp_path / "second")
    rig.run(home, tmp_path / "k", **cached | {"kd_top_k": 2})
    assert len([*(tmp_path / "cache").iterdir()]) == 3


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_that_see_other_files_are_refused(shared, home, tmp_path):
    """A strategy whose other rank has what this one has, or nothing."""

    class Two(SingleProcessStrategy):

        def all_gather_object(self, value):
            return [value, value if shared or not isinstance(value, bytes) else b"another"]

    make = partial(TeacherCache, str(tmp_path), str(home / "model"), 2, 8, False, Two(StrategyConfig()))
    if shared:
        assert make().known == {}
        return
    with pytest.raises(UserError, match="--teacher_cache_dir .*a rank cannot see the files of another rank"):
        make()


def test_the_student_comes_to_the_teacher(home, tmp_path):
    rig.run(home, tmp_path, kd_coef=1.0, max_steps=25, learning_rate=1e-2, eval_data=[str(home / "judged.jsonl")],
            eval_steps=-1)
    lines = runs.metrics(tmp_path)
    assert lines[-1]["eval/divergence"] < 0.3 * lines[0]["kd/divergence"]


def test_more_tokens_than_the_teacher_has_are_refused(home, tmp_path):
    with pytest.raises(UserError, match="--kd_top_k 100000: the models have [0-9]+ logits; give at most that, or 0"):
        trainer_of(home, tmp_path, kd_top_k=100000)


def test_a_teacher_with_another_vocabulary_is_refused(home, tmp_path):
    tiny.save_model(home / "foreign")
    tiny.tokenizer(extra="<|extra|>").save_pretrained(home / "foreign")
    with pytest.raises(UserError, match="--teacher_model .*of its tokens are not those of the trained.*same family"):
        trainer_of(home, tmp_path, teacher_model=str(home / "foreign"))
    width = len(tiny.tokenizer())
    tiny.change_json(tiny.save_model(home / "short") / "config.json", vocab_size=width - 8)
    with pytest.raises(UserError, match=f"--teacher_model .*embeddings of {width - 8} tokens, .* needs {width}. Take"):
        trainer_of(home, tmp_path, teacher_model=str(home / "short"))


def test_a_padded_head_is_not(home, tmp_path):
    """Models of one family pad their heads to different widths."""
    width = len(tiny.tokenizer()) + 16
    tiny.save_model(home / "padded", vocab_size=width)
    trainer = trainer_of(home, tmp_path, teacher_model=str(home / "padded"))
    assert trainer.vocab == width - 16 and trainer.train_step()["kd/divergence"] > 0


@pytest.mark.parametrize("options,said", [
    ({"teacher_model": None}, "--teacher_model is missing"),
    ({"teacher_model": "./nowhere"}, "--teacher_model ./nowhere: no such folder"),
    ({"js_mix": 0.3}, "--js_mix 0.3: has no effect with --divergence forward"),
    ({"teacher_cache_dir": "cache"}, "--teacher_cache_dir cache: has no effect without --kd_top_k; add --kd_top_k 64"),
    ({"teacher_cache_dir": "cache", "kd_top_k": 2, "teacher_offload": True}, "--teacher_offload true: has no effect"),
    ({"kd_coef": 0.0}, "--kd_coef 0: the teacher has no effect"),
    ({"pretrain_mode": True, "multiturn": False}, "--multiturn false: has no effect with --pretrain_mode"),
    ({"input_template": "Q"}, "--input_template 'Q': must hold {} exactly once"),
])
def test_options_that_do_not_fit_are_refused(options, said, home, tmp_path):
    with pytest.raises(ConfigError) as error:
        trainer_of(home, tmp_path, **options)
    assert said in str(error.value)
