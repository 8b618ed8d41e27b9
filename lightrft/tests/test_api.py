"""Training from a program: keywords are checked as flags are, and the same file runs alone and under torchrun."""
import json
import os
import re
import subprocess
import sys

import pandas as pd
import numpy as np
import pytest

from lightrft import GRPO, RL, SFT
from lightrft.config.cli import keyword_words
from lightrft.config.options import ConfigError
from lightrft.config.schema import Config
from lightrft.datasets.rows import load_rows
from lightrft.rewards.workers.pool import LoadError
from lightrft.tests.support import tiny_task
from lightrft.tests.support.launch import ROOT
from lightrft.tests.support.runs import no_picture  # noqa: F401  (a fixture)
from lightrft.tests.support.warm import warm_environ, warm_python
from lightrft.utils.errors import UserError

SMALL = {
    "rollout_batch_size": 4, "n_samples_per_prompt": 2, "train_batch_size": 8, "prompt_max_len": 64,
    "generate_max_len": 8, "max_steps": 2, "engine_kv_mib": 1, "self_test": False, "disable_ckpt": True
}  # yapf: disable
PROGRAM = '''
from lightrft import GRPO

def digits(solution_str, ground_truth):
    return float(ground_truth in solution_str)

rows = [{{"prompt": f"What is {{a}}+{{b}}?", "reference": str(a + b)}} for a in range(4) for b in range(4)]
for number in range(3):
    run = GRPO("{model}", rewards=[digits, (lambda completions, **rest: [len(text) for text in completions], 0.1)],
               train_dataset=rows, save_path="{save}" + str(number), **{options}).train()
    print("last", run.metrics["step"].tolist(), round(run.metrics["reward/lambda/mean"].iloc[-1], 6))
'''


@pytest.fixture(name="home", scope="module")
def fixture_home(tmp_path_factory):
    return tiny_task.write_home(tmp_path_factory.mktemp("home"))


def test_keywords_are_checked_as_flags_are(home):
    with pytest.raises(ConfigError) as error:
        GRPO(home / "model", n_samples_per_promt=4, rollout_batch_size="many", algorithm={"gama": 1.0})
    for part in ("did you mean n_samples_per_prompt", "  rollout_batch_size: expected an integer, got 'many'",
                 "algorithm.gama"):
        assert part in str(error.value)
    with pytest.raises(UserError, match="max_len is not an option here"):
        GRPO(home / "model", max_len=4)
    with pytest.raises(UserError, match="pretrain is given by the keyword model already"):
        GRPO(home / "model", pretrain="other")
    with pytest.raises(UserError, match="model: a dict; give the folder or the hub id of a model"):
        GRPO({"model": home})
    with pytest.raises(UserError, match="reward is given by the keyword rewards already"):
        GRPO(home / "model", "exact", reward="format")
    for data, told in ((42, "42 holds no rows; give a path"), ([], "the list is empty; give a path")):
        with pytest.raises(UserError, match=f"train_dataset: {told}"):
            GRPO(home / "model", "exact", data)
    for data, told in (({"prompt": ["1?"], "reference": ["2"]}, "these are columns; give datasets.Dataset.from_dict"),
                       ({"prompt": "1 + 1?", "reference": "2"}, "this is one row; give a list of rows"),
                       ({"train": tiny_task.rows(2), "test": []}, "a dict of train, test; give one of its data sets"),
                       (["What is 1 + 1?"], "is no path; a row is a dict, such as {'prompt': 'What is 1 + 1?'}")):
        with pytest.raises(UserError, match=re.escape(told)):
            GRPO(home / "model", "exact", data)
    for name, told in (("plugin", "from Python give plugins="), ("dry_run", "from Python call .plan()"),
                       ("plan_gpus", "on the command line"), ("config", "give the options of the file themselves")):
        with pytest.raises(ConfigError, match=re.escape(f"{name} is not an option of a run: {told}")):
            GRPO(home / "model", "exact", tiny_task.rows(4), **{name: "x"})
    with pytest.raises(UserError, match="the weight of 'exact' is 'format'; give a number, or a list"):
        GRPO(home / "model", [("exact", "format")])
    with pytest.raises(ConfigError) as error:
        GRPO("./no/model", "exact", "absent.jsonl", n_samples_per_prompt=1, use_kl_loss=True, reward_probe=False).plan()
    for part in ("n_samples_per_prompt 1: ", "model ./no/model: no such folder", "train_dataset absent.jsonl: no such"):
        assert any(problem.startswith(part) for problem in error.value.problems), error.value
    assert "--" not in str(error.value)


@pytest.mark.parametrize("exits", [False, True])
def test_errors_of_a_run_name_keywords(home, tmp_path, exits, capsys):
    """Also where the process ends with one line, as under torchrun."""
    compares = "n_samples_per_prompt 1: group_norm compares responses of one prompt; nearest valid value: 2, or adv"
    for options, part in (({"n_samples_per_prompt": 1}, compares),
                          ({"prompt_max_len": 9999}, "prompt_max_len 9999 + generate_max_len 8")):
        one = GRPO(home / "model", "exact", tiny_task.rows(4), save_path=str(tmp_path), **SMALL | options)
        with pytest.raises(SystemExit if exits else UserError) as error:
            one._train(exits)
        text = capsys.readouterr().err if exits else str(error.value)
        assert part in text and "--prompt" not in text and "--adv" not in text


def script(folder, text):
    """Run a program that sees no hub."""
    (folder / "ten.py").write_text(f"from lightrft import GRPO\n{text}\n")
    environ = os.environ | warm_environ() | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([warm_python(), "ten.py"], cwd=folder, capture_output=True, text=True, timeout=300,
                          env=environ)  # yapf: disable


def test_an_expected_error_that_is_not_caught_is_one_line(tmp_path):
    """Such as a hub id without a network; other errors have their traceback, and a program may catch them."""
    run = f"GRPO('org/absent', 'exact', [dict(prompt='1', reference='1')] * 4, **{SMALL}).train()"
    done = script(tmp_path, run)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert last.startswith("ten.py: error: cannot load") and "org/absent" in last
    done = script(tmp_path, f"try:\n    {run}\nexcept ValueError:\n    1 / 0")
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("ZeroDivisionError")


def test_an_error_does_not_end_a_prompt(tmp_path):
    """Neither that of a program run by ``python -i``, nor that of a line typed after it, which may be a command."""
    (tmp_path / "first.py").write_text("from lightrft import GRPO\nGRPO('model', gama=1)")
    typed = (
        "GRPO('model', lamda=1)\nfrom lightrft.cli.main import main\nfrom lightrft.config.cli import parse_config\n"
        "parse_config(['--lamba', '1'])\nmain(['sft', '--packd'])\nprint('still', 'here')\n")
    done = subprocess.run([sys.executable, "-i", "first.py"], input=typed, cwd=tmp_path, capture_output=True, text=True,
                          timeout=200, env=os.environ | {"PYTHONPATH": str(ROOT)})  # yapf: disable
    for words in ("key gama", "key lamda", "flag --lamba", "flag --packd"):
        assert f"unknown {words}" in done.stderr
    assert done.stderr.count("ConfigError") == 4
    assert done.stdout.strip() == "still here" and done.returncode == 0 and "SystemExit" not in done.stderr


def test_other_flags_keep_their_form():
    with pytest.raises(UserError) as error, keyword_words(Config, {"reward": "rewards"}):
        raise UserError("--reward x: see --dry_run; drop --lora_rank, or add --no_report (--gama)")
    assert str(error.value) == "rewards x: see --dry_run; drop lora_rank, or add report=False (--gama)"


def test_the_plan_shows_where_a_value_comes_from(home):
    plan = RL(home / "model", ["exact", "format=0.1"], tiny_task.rows(4), recipe="dapo", **SMALL).plan()
    assert "keyword" in plan and "recipe dapo" in plan and "format=0.1" in plan and "memory:" in plan


def test_a_plan_for_other_gpus_leaves_the_run_as_it_is(home):
    run = GRPO(home / "model", ["exact"], tiny_task.rows(8), **SMALL)
    here, there = run.plan(), run.plan(gpus="2xH100")
    assert "bf16                             false                        [default: no GPU]" in here
    assert "bf16                             true                         [default: CUDA]" in there
    assert "2 ranks" in there and run.plan() == here and not run.parsed.config.model.bf16
    with pytest.raises(ConfigError, match="^gpus 8: expected GPUS x NAME"):
        run.plan(gpus="8")


def test_the_plan_reads_the_data_and_scores_a_row(home, tmp_path):
    plan = GRPO(home / "model", lambda completions, **row: [0.5] * len(completions), tiny_task.rows(4), **SMALL).plan()
    assert "data: 4 rows" in plan and "0.5" in plan.splitlines()[-1], plan

    def broken(completions, **row):
        raise ValueError("no idea")

    with pytest.raises(UserError, match="no answer to the row .* could be scored: exception "):
        GRPO(home / "model", broken, tiny_task.rows(4), **SMALL).plan()
    rows = [{"prompt": "1+1?", "response": "2"}, {"prompt": "1+1?"}]
    plan = SFT(home / "model", rows[:1], max_len=32).plan("1x80")  # another machine may have more rows
    assert "data: 1 rows" in plan and plan.count("would end at its start: --train_batch_size") == 1, plan
    with pytest.raises(UserError, match="train_batch_size.* a batch cannot be filled"):
        SFT(home / "model", rows[:1], max_len=32).plan()
    (file := tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))  # the held-out rows make no batch
    assert "its start" not in SFT(home / "model", str(file), eval_data=[str(file)], max_len=32,
                                  train_batch_size=1).plan()
    with pytest.raises(UserError, match="row 2.*no answer to train on"):
        SFT(home / "model", rows, max_len=32).plan()


@pytest.mark.parametrize("rewards, entries", [("exact", ["exact"]), ("exact,format=0.1", ["exact", "format=0.1"]),
                                              (("exact", 0.5), ["exact=0.5"]),
                                              (("exact", "format"), ["exact", "format"]),
                                              ([("format", 0.1), "exact"], ["format=0.1", "exact"])])
def test_names_are_taken_as_flags_take_them(home, rewards, entries):
    assert GRPO(home / "model", rewards).parsed.config.reward.reward == entries


def test_several_sources_and_numbers_of_numpy(home):
    both = GRPO(home / "model", ("exact", np.float32(0.5)), ["a.jsonl", home / "b.jsonl"], max_steps=np.int64(3),
                prompt_data_probs=[0.3, 0.7]).parsed.config
    assert both.data.prompt_data == ["a.jsonl", str(home / "b.jsonl")] and both.data.prompt_data_probs == [0.3, 0.7]
    assert both.reward.reward == ["exact=0.5"] and both.train.max_steps == 3
    assert GRPO(home / "model", "exact", prompt_data="a.jsonl").parsed.config.data.prompt_data == ["a.jsonl"]


def test_rewards_that_are_none_are_refused(home, tmp_path):
    with pytest.raises(UserError, match="no name, no function"):
        GRPO(home / "model", [3], tiny_task.rows(4))
    with pytest.raises(LoadError, match="known signatures"):
        GRPO(home / "model", lambda text: 1.0, tiny_task.rows(4), save_path=str(tmp_path), **SMALL).train()


def test_equal_names_are_told_apart(home):
    both = GRPO(home / "model", [lambda completions: [0.0], (lambda completions: [1.0], 0.5), "format"])
    assert both.parsed.config.reward.reward == ["lambda=1", "lambda2=0.5", "format"]


def test_a_run_returns_its_metrics_and_its_model(home, tmp_path, no_picture):  # noqa: F811
    """Twice in one process, with a function of this module, on a data set of Hugging Face and on a table."""
    datasets = pytest.importorskip("datasets")
    calls = [datasets.Dataset.from_list(tiny_task.rows(8)), pd.DataFrame(tiny_task.rows(8))]
    runs = [GRPO(home / "model", lambda completions, reference: [len(text) for text in completions], data,
                 tiny_task.rows(3, 20), eval_steps=1, save_path=str(tmp_path / str(i)), **SMALL).train()
            for i, data in enumerate(calls)]  # yapf: disable
    first, second = (run.metrics for run in runs)
    assert first["step"].tolist() == [
        1, 2
    ] and first["reward/lambda/mean"].tolist() == second["reward/lambda/mean"].tolist()
    names = list(first.columns)
    assert names[0] == "step" and names[1].startswith("eval/") and "policy/loss" in names
    late = [name.startswith(("perf/", "time/")) for name in names]
    assert any(late) and late == sorted(late)
    assert runs[0].model().config.vocab_size == len(runs[0].tokenizer())


def test_supervised_fine_tuning_has_the_same_face(home, tmp_path, no_picture):  # noqa: F811
    rows = [{"messages": [{"role": "user", "content": str(i)}, {"role": "assistant", "content": "yes"}]}
            for i in range(8)]  # yapf: disable
    run = SFT(home / "model", rows, rows[:2], train_batch_size=4, max_steps=2, max_len=64, disable_ckpt=True,
              chat_template="chatml", save_path=str(tmp_path)).train()
    assert run.metrics["sft/loss"].notna().all() and "eval/loss" in run.metrics


def test_rows_in_memory_name_their_content(home, tmp_path):
    specs = [GRPO(home / "model", "exact", tiny_task.rows(count)).parsed.config.data.prompt_data for count in (4, 4, 5)]
    assert specs[0] == specs[1] != specs[2]
    with pytest.raises(UserError, match="rows of a Python program"):
        GRPO(home / "model", "exact", "memory:0", save_path=str(tmp_path), **SMALL).train()


def test_media_of_hugging_face_data_sets_stay_encoded(home):
    """At any depth, of a data set and of a stream: nothing decodes them, so that no torchcodec is needed."""
    datasets = pytest.importorskip("datasets")
    one = {"bytes": b"encoded", "path": None}
    rows = [{"prompt": "?", "audio": one, "image": one, "video": one, "images": [one, one], "frames": [[one]],
             "messages": [{"role": "user", "content": {"image": one, "text": "?"}}]}]  # yapf: disable
    image, text = datasets.Image(), datasets.Value("string")
    media = datasets.Dataset.from_list(rows).cast(datasets.Features({
        "prompt": text, "audio": datasets.Audio(), "image": image, "video": datasets.Video(),
        "images": datasets.List(image), "frames": datasets.List(datasets.List(image)),
        "messages": datasets.List({"role": text, "content": {"image": image, "text": text}})}))  # yapf: disable
    for data in (media, media.to_iterable_dataset(), datasets.IterableDataset.from_generator(lambda: iter(rows)), rows):
        spec, = GRPO(home / "model", "exact", data).parsed.config.data.prompt_data
        assert load_rows(spec).rows == rows
    assert media.features["image"].decode, "the data set of the program has changed"


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_file_runs_alone_and_under_torchrun(home, tmp_path, ranks):
    """Its functions are in ``__main__`` and travel to the workers by value. Every run has a group of its own."""
    options = SMALL | {"strategy": "auto"}
    (tmp_path / "ten.py").write_text(PROGRAM.format(model=home / "model", save=tmp_path / "run", options=options))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environ = os.environ | warm_environ() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([warm_python(), *launcher, "ten.py"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=300, env=environ)  # yapf: disable
    assert done.stdout.count("last [1, 2]") == 3 * ranks, done.stderr[-3000:]
