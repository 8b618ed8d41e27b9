"""A run that goes on with other options or other data says so."""
import re
import shutil
from pathlib import Path

import pytest

from lightrft.tests.support import runs, tiny_task
from lightrft.tests.support.launch import errors, launch
from lightrft.utils.errors import UserError

no_picture = runs.no_picture

SAVED = {"disable_ckpt": False, "max_steps": 2}
TOLD = "options differ from those of the checkpoint: "


@pytest.fixture(name="home", scope="module")
def home_fixture(tmp_path_factory):
    """With a finished run of two steps in ``run``."""
    home = runs.write_home(tmp_path_factory.mktemp("home"))
    runs.run(home, home / "run", **SAVED)
    return home


def resumed(home, folder, **options):
    shutil.copytree(home / "run", folder)
    return runs.run(home, folder, **SAVED | {"max_steps": 3, "load_checkpoint": True} | options)


def test_each_change_is_named_once(home, tmp_path, capsys):
    shutil.copy(home / "train.jsonl", tmp_path / "more.jsonl")
    done = resumed(home, tmp_path / "run", eps_clip=0.3, seed=7, prompt_data=[str(tmp_path / "more.jsonl")])
    text = capsys.readouterr().err
    assert [line["step"] for line in done.lines] == [1, 2, 3] and text.count(TOLD) == 1
    changed = f"--prompt_data {tmp_path}/more.jsonl (was {home}/train.jsonl), --eps_clip 0.3 (was 0.2)"
    assert f"{TOLD}{changed}, --seed 7 (was 42)" in text
    assert "the data order continues as in the checkpoint: seed 42" in text


@pytest.mark.dist
def test_two_ranks_tell_it_once(home, tmp_path):
    """The same path with other rows, another seed; the rollout batch is refused on both ranks."""
    rows = (home / "train.jsonl").read_text().replace("two plus two", "two plus one")
    (tmp_path / "train.jsonl").write_text(rows)
    (tmp_path / "reward.py").write_text(tiny_task.REWARD, encoding="utf-8")
    options = runs.BASE | {"pretrain": home / "model", "prompt_data": tmp_path / "train.jsonl", "disable_ckpt": False,
                           "reward": tmp_path / "reward.py", "load_checkpoint": True}  # yapf: disable
    options = {("no_" if value is False else "") + name: value is False or value for name, value in options.items()}
    for name in ("good", "bad"):
        shutil.copytree(home / "run", tmp_path / name)
    good = launch(tmp_path, options | {"save_path": tmp_path / "good", "seed": 7, "max_steps": 3}, ranks=2)
    bad = launch(tmp_path / "x", options | {"save_path": tmp_path / "bad", "rollout_batch_size": 2, "max_steps": 0,
                                            "train_batch_size": 4}, ranks=2)  # yapf: disable
    assert good.wait() == [0, 0], good.output
    assert good.output.count(TOLD) == 1 and "--seed 7 (was 42)" in good.output, good.output
    assert good.output.count("but other rows: the run continues after the first 8 rows") == 1, good.output
    assert bad.wait() == [2, 2] and len(errors(bad.output)) == 1 and "Traceback" not in bad.output, bad.output


def test_the_warning_in_the_docs_is_a_real_one(home, tmp_path, capsys):
    page = Path(runs.__file__).parents[2] / "docs" / "safety.md"
    if not page.exists():
        pytest.skip("installed without its repository")
    shown = re.search(f"^WARNING: {TOLD}.*$", page.read_text(encoding="utf-8"), re.MULTILINE)[0]
    resumed(home, tmp_path / "run", eps_clip=0.3, seed=7)
    assert f" {shown}\n" in capsys.readouterr().err


def test_the_checkpoint_of_the_resumed_run_has_the_new_options(home, tmp_path, capsys):
    resumed(home, tmp_path / "run", eps_clip=0.3)
    capsys.readouterr()
    runs.run(home, tmp_path / "run", **SAVED | {"max_steps": 4, "load_checkpoint": True, "eps_clip": 0.3})
    assert TOLD not in capsys.readouterr().err


def test_options_that_make_another_model_are_named(home, tmp_path):
    told = r"another model: .*\. Options differ from those of the checkpoint: --lora_rank 2 \(was 0\)\. Resume with "
    with pytest.raises(UserError, match=told):
        resumed(home, tmp_path / "run", lora_rank=2)


def test_what_may_change_freely(home, tmp_path, capsys):
    done = resumed(home, tmp_path / "run", max_steps=4, save_steps=1, eval_steps=1,
                   eval_data=[str(home / "test.jsonl")], micro_train_batch_size=2, logging_steps=2, self_test=True)
    assert done.metrics["step"] == 4 and TOLD not in capsys.readouterr().err


def test_a_fixed_coefficient_is_that_of_the_options(home, tmp_path):
    first = {"init_kl_coef": 0.5, "use_kl_loss": True, "entropy_coef": 0.1}
    runs.run(home, tmp_path, **SAVED, **first)
    then = first | {"init_kl_coef": 0.25, "entropy_coef": 0.2, "max_steps": 3, "load_checkpoint": True}
    done = runs.run(home, tmp_path, **SAVED | then)
    assert [(line["policy/kl_coef"], line["policy/entropy_coef"])
            for line in done.lines] == [(.5, .1)] * 2 + [(.25, .2)]


def test_another_batch_of_prompts(home, tmp_path, capsys):
    """The position in the data counts prompts, so it goes on there; without --max_steps the run has no length."""
    with pytest.raises(UserError, match="--rollout_batch_size 2: .* with 4, .* --max_steps"):
        resumed(home, tmp_path / "a", rollout_batch_size=2, max_steps=0, train_batch_size=4)
    assert len(runs.read_lines(tmp_path / "a" / "metrics.jsonl")) == 2
    done = resumed(home, tmp_path / "b", rollout_batch_size=2, train_batch_size=4)
    assert "--rollout_batch_size 2 (was 4)" in capsys.readouterr().err
    assert done.trainer.loader.position == 2 * 4 + 2 and done.metrics["rollout/prompts"] == 2
