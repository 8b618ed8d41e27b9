"""metrics.jsonl across a resume, the other sinks with their real packages, the step table, the aliases."""
import json
import logging
import os
import re
import sqlite3
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightrft.config.schema import Config
from lightrft.config.tree import options
from lightrft.tests.support.packages import needs
from lightrft.tests.support.warm import warm_environ, warm_python
from lightrft.utils.sinks import MetricSinks, alias_metrics
from lightrft.utils.trackers import ACCELERATE


def numbers(step):
    return {"reward/mean": step / 7, "policy/entropy": 1.0 / (step + 1), "time/rollout_s": 0.25, "time/step_s": 0.5}


def run(folder, steps, resumed_at=None, samples=(), **options):
    sinks = MetricSinks(folder, **options)
    if resumed_at is not None:
        sinks.truncate_after(resumed_at)
    for step in steps:
        sinks.log(step, numbers(step))
    if samples:
        sinks.table(steps[-1], "samples/held-out", samples)
    sinks.close()
    return folder / "metrics.jsonl"


def test_lines_are_complete_and_sorted(tmp_path):
    sinks = MetricSinks(tmp_path)
    sinks.log(3, {"z": 1.5, "a": float("nan"), "b": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3, "a": null, "b": 2, "z": 1.5}\n', "before close"
    sinks.close()


def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path):
    straight = run(tmp_path / "straight", range(1, 9))
    broken = run(tmp_path / "broken", range(1, 7))
    with open(broken, "a", encoding="utf-8") as file:
        file.write('{"step": 3, "rew')  # killed while writing
    run(tmp_path / "broken", range(5, 9), resumed_at=4)
    assert broken.read_bytes() == straight.read_bytes(), "the files differ"


def test_a_new_run_moves_the_old_file_aside(tmp_path):
    for _ in range(3):
        run(tmp_path, [1, 2], resumed_at=0)
    assert sorted(path.name
                  for path in tmp_path.glob("*.jsonl")) == ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]


def test_truncating_after_the_first_line_is_refused(tmp_path):
    sinks = MetricSinks(tmp_path)
    sinks.log(1, numbers(1))
    with pytest.raises(RuntimeError, match="before the first log"):
        sinks.truncate_after(0)


def test_tensorboard_shows_a_resumed_run_once(tmp_path):
    run(tmp_path, range(1, 7), tensorboard=True)
    run(tmp_path, range(5, 9), resumed_at=4, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == list(range(1, 9)), "not purged"
    assert events.Scalars("reward/mean")[7].value == pytest.approx(8 / 7), "wrong value"


def test_a_new_run_moves_old_tensorboard_events_aside(tmp_path):
    run(tmp_path, range(1, 7), tensorboard=True)
    run(tmp_path, [1, 2], resumed_at=0, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2]
    assert (tmp_path / "tensorboard.1").is_dir()


def test_without_tensorboard_there_is_no_folder(tmp_path):
    run(tmp_path, [1])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_missing_package_names_its_extra_before_the_run(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=re.escape(f"pip install -e '.[{package}]'")):
        MetricSinks(tmp_path, **{package: {"project": "p"}})


SAMPLES = [{"prompt": "1+1?", "response": "2 <b>", "reward": 1.0, "advantage": 0.5, "reference": ["2"], "uid": "0"},
           {"prompt": "2+2?", "response": "5", "reward": None}]  # yapf: disable


def test_tensorboard_shows_samples_as_text(tmp_path):
    sinks = MetricSinks(tmp_path, tensorboard=True)
    sinks.table(3, "samples/training", SAMPLES)
    sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    event, = events.Tensors("samples/training/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 3 and "prompt:   1+1?" in text and "response: 5" in text and "reward 1" in text


@needs("wandb")
def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = {"project": "p", "name": "n", "group": None, "entity": None}
    run(tmp_path, [1, 2], wandb=settings, run_config={"train": {"seed": 1}}, samples=SAMPLES)
    identity = (tmp_path / "wandb_run_id").read_text()
    run(tmp_path, [3], resumed_at=2, wandb=settings, run_config={})
    folders = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert folders and all(identity in name for name in folders), "not one run"  # two in one second end in -1
    MetricSinks(tmp_path).truncate_after(0)
    assert not (tmp_path / "wandb_run_id").exists(), "a new run would resume under the old id"
    records = b"".join(path.read_bytes() for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert b"reward/mean" in records and b"samples/held-out" in records, "no metrics or no table in the run file"
    table, = (tmp_path / "wandb").glob("offline-run-*/files/media/table/samples/*.table.json")
    assert json.loads(table.read_text())["data"][1][:2] == ["2+2?", "5"], "another table"


def python(program, folder, **environ):
    """Run a program in a process, with the folder as its argument."""
    (folder / "program.py").write_text(program)
    return subprocess.run([warm_python(), folder / "program.py", folder], timeout=100, capture_output=True, text=True,
                          env=os.environ | warm_environ() | environ)  # yapf: disable


TRACKIO = """
import sys
from lightrft.utils.sinks import MetricSinks
for steps in ([1, 2], [3]):
    sinks = MetricSinks(sys.argv[1], trackio=dict(project="p", name="n"))
    for step in steps:
        sinks.log(step, {"reward/mean": step / 7})
        sinks.table(step, "samples/training", [{"prompt": "1+1?", "response": f"{step}!", "reward": 1.0}])
    sinks.close()
"""


@needs("trackio")
def test_trackio_local(tmp_path):
    done = python(TRACKIO, tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert done.returncode == 0, done.stderr[-2000:]
    database = sqlite3.connect(tmp_path / "trackio" / "p.db")
    rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert sorted({row[:2] for row in rows}) == [("n", 1), ("n", 2), ("n", 3)], rows
    assert any("samples/training" in str(row[2]) for row in rows), "no table"


MLFLOW = """
import sys
from lightrft.utils.sinks import MetricSinks
sinks = MetricSinks(sys.argv[1], trackers=["mlflow"], naming=("p", "n"), run_config={"train": {"seed": 7, "l2": [0.5]}})
for step in (1, 2):
    sinks.log(step, {"reward/mean": step / 7, "eval/all/pass@1": 0.5})
sinks.close()
from mlflow import MlflowClient
client = MlflowClient()
run, = client.search_runs([client.get_experiment_by_name("p").experiment_id])
print(run.info.run_name, run.info.status, run.data.params["seed"], run.data.metrics["eval/all/pass_at_1"],
      [(point.step, round(point.value, 3)) for point in client.get_metric_history(run.info.run_id, "reward/mean")])
"""

KEYLESS = """
import sys
from lightrft.utils.errors import UserError
from lightrft.utils.sinks import MetricSinks
try:
    MetricSinks(sys.argv[1], wandb={"project": "p"}).open(1)
except UserError as error:
    print(error)
"""


@needs("mlflow")
def test_mlflow_through_accelerate(tmp_path):
    done = python(MLFLOW, tmp_path, MLFLOW_TRACKING_URI=(tmp_path / "mlflow").as_uri(), MLFLOW_ALLOW_FILE_STORE="true")
    assert done.stdout.strip() == "n FINISHED 7 0.5 [(1, 0.143), (2, 0.286)]", done.stderr[-2000:]


@needs("wandb")
def test_a_tracker_that_cannot_start_is_an_error_in_words_before_the_first_step(tmp_path, monkeypatch):
    """W&B refuses without a key where nobody can be asked for one."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    done = python(KEYLESS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^--use_wandb: the tracker cannot start: .*[kK]ey.*WANDB_MODE=offline needs no account",
                     done.stdout, re.MULTILINE), done.stdout


def test_the_trackers_are_those_of_accelerate():
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS
    assert {*ACCELERATE, "tensorboard", "wandb", "trackio"} == {str(name) for name in LOGGER_TYPE_TO_CLASS}
    assert options(Config)["trackers"].choices == ACCELERATE


def test_unknown_aliases_are_refused(tmp_path):
    with pytest.raises(ValueError, match="none, verl, trl"):
        MetricSinks(tmp_path, aliases="ray")


def test_aliases_are_written_too(tmp_path):
    line = json.loads(run(tmp_path, [1], aliases="verl").read_text())
    assert line["critic/rewards/mean"] == line["reward/mean"] and line["timing_s/gen"] == 0.25, line


def test_verl_and_trl_names():
    ours = {
        "reward/mean": 1.0, "reward/math/std": 2.0, "policy/clip_frac_low": 0.25, "policy/clip_frac_high": 0.5,
        "eval/gsm8k/pass@4": 0.75, "eval/gsm8k/reward@4": 0.5, "rollout/response_len/max": 9.0
    }
    verl, trl = alias_metrics(ours, "verl"), alias_metrics(ours, "trl")
    assert alias_metrics(ours, "none") == ours and ours.items() <= verl.items() and ours.items() <= trl.items()
    assert verl["actor/pg_clipfrac"] == trl["clip_ratio/region_mean"] == 0.75
    assert verl["val-core/gsm8k/acc/best@4"] == 0.75 and verl["val-core/gsm8k/reward/mean@4"] == 0.5
    assert verl["response_length/max"] == trl["completions/max_length"] == 9.0
    assert trl["rewards/math/std"] == 2.0 and trl["reward"] == 1.0
    assert "actor/entropy" not in verl and "entropy" not in trl, "an alias of nothing"


def test_aliases_of_names_with_a_slash():
    ours = {"eval/openai/gsm8k/pass@1": 0.5, "eval/openai/gsm8k/reward@2": 0.25, "reward/geo/format/mean": 2.0,
            "reward/unscored/mean": 3.0}  # yapf: disable
    verl, trl = alias_metrics(ours, "verl"), alias_metrics(ours, "trl")
    assert verl["val-core/openai/gsm8k/acc/best@1"] == 0.5 and verl["val-core/openai/gsm8k/reward/mean@2"] == 0.25
    assert trl["rewards/geo/format/mean"] == 2.0 and "rewards/unscored/mean" not in trl


def table_lines(caplog, tmp_path, every):
    caplog.clear()
    logger = logging.getLogger("lightrft")
    logger.addHandler(caplog.handler)
    run(tmp_path, range(1, 7), logging_steps=every)
    logger.removeHandler(caplog.handler)
    return [record.getMessage() for record in caplog.records]


def test_logging_steps_thins_the_table_but_not_the_file(tmp_path, caplog):
    assert len(table_lines(caplog, tmp_path / "a", 1)) == 7 and len(table_lines(caplog, tmp_path / "b", 3)) == 3
    assert len((tmp_path / "b" / "metrics.jsonl").read_text().splitlines()) == 6
