"""The examples' own scripts, end to end on two ranks: one launch each, small enough for a laptop."""
import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lightrft.tests.support import tiny
from lightrft.tests.support.browser import opened
from lightrft.tests.support.gpu_measurements import piece
from lightrft.tests.support.launch import free_port, run_script
from lightrft.tests.support.warm import warm_environ, warm_python

ROOT = Path(__file__).parents[2]
QUICKSTART, GSM8K = ROOT / "examples" / "quickstart", ROOT / "examples" / "gsm8k_geo3k"
PREFERENCES = ROOT / "examples" / "preferences"
GSM8K_RUN = GSM8K / "run_grpo_gsm8k_qwen2.5_0.5b.sh"
pytestmark = [
    pytest.mark.dist, pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "examples").exists(), reason="installed without its repository")
]

# what every training step reports (no critic here)
CANONICAL = [
    *(f"reward/{key}" for key in ("mean", "std", "min", "max")), "group/zero_spread_frac", "group/singletons",
    *(f"advantage/{key}" for key in ("mean", "std", "min", "max")),
    *(f"policy/{key}" for key in ("loss", "clip_frac_low", "clip_frac_high", "ratio_max", "kl_old", "entropy",
                                  "grad_norm", "lr")),
    *(f"rollout/{key}" for key in ("prompts", "samples", "tokens", "tokens_per_s", "response_len/mean",
                                   "response_len/max", "truncated_frac")),
    *(f"rollout/mismatch/{key}" for key in ("abs_dp_mean", "abs_dp_max", "kl_k3", "pearson", "ess")),
    *(f"time/{key}_s" for key in ("rollout", "reward", "update", "weight_sync", "step")), "perf/tokens_per_s",
    "perf/peak_mem_gib"
]  # yapf: disable


def shell(environment):
    """The environment of a person who works in another folder."""
    return os.environ | warm_environ() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment


def launch(*command, cwd, timeout=200, **environment):
    """Run a command to its end, for at most ``timeout`` seconds; returns what it printed."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=shell(environment), capture_output=True,
                          text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def options_of(folder):
    """``config.yaml`` of a run, flat."""
    tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    return {name: value for group in tree.values() if isinstance(group, dict) for name, value in group.items()}


def check_model(folder, parameters):
    """``hf/`` is what a hub download would be, and generates."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == parameters
    prompt = tokenizer("What is 347+286?\n", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt.input_ids.shape[1]
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "README.md"} <= names
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: transformers\nbase_model: ") and "| reward/mean |" in card


# -- examples/gsm8k_geo3k ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    """Preprocess the shipped problems, then the launch script on two ranks for two steps."""
    folder = tmp_path_factory.mktemp("gsm8k")
    tiny.save_model(folder / "model", max_position_embeddings=1024)
    run_script(GSM8K / "data_preprocess" / "gsm8k.py", "--local_dataset_path", GSM8K / "data" / "raw_200.jsonl",
               "--local_save_dir", folder / "data")
    sizes = {"TBS": "8", "RBS": "4", "N_SAMPLES": "2", "MICRO_TRAIN": "2", "PROMPT_MAX_LEN": "640",
             "GENERATE_MAX_LEN": "12", "EVAL_STEPS": "2", "SAVE_STEPS": "1", "LR": "0.5", "KL": "0.02"}  # yapf: disable
    launch("bash", GSM8K_RUN, "--max_steps", 2, "--max_eval_samples", 4, "--actor_learning_rate", 1e-3,
           "--lr_warmup_ratio", 0, "--entropy_coef", 0.1, cwd=folder, ENGINE="hf", MODEL=str(folder / "model"),
           DATA=str(folder / "data"), SAVE="out", NPROC="2", MASTER_PORT=free_port(), **sizes)  # yapf: disable
    return folder / "out"


def test_gsm8k_metrics(gsm8k):
    first, second = lines(gsm8k / "metrics.jsonl")
    parts = [f"reward/{part}/{key}" for part in ("math", "format") for key in ("mean", "std")]
    for row in (first, second):
        missing = set([*CANONICAL, *parts, "policy/kl_ref", "time/ref_s"]) - set(row)
        assert not missing and None not in row.values(), missing
        assert row["rollout/prompts"] == 4 and row["rollout/samples"] == 8 and row["reward/unscored"] == 0
    assert [first["step"], second["step"]] == [1, 2] and second["time/checkpoint_s"] > 0 and second["time/eval_s"] > 0
    assert {"eval/all/pass@1", "eval/openai/gsm8k/reward@1", "eval/openai/gsm8k/len"} <= set(second)


def test_gsm8k_starts_at_the_reference(gsm8k):
    first, second = lines(gsm8k / "metrics.jsonl")
    assert first["policy/kl_ref"] == first["policy/first_kl_ref"] == first["policy/first_ratio_gap"] == 0
    assert first["policy/grad_norm"] > 0 and second["policy/kl_ref"] > 0
    assert first["rollout/mismatch/abs_logp_mean"] < 0.01  # bfloat16


def test_gsm8k_environment_and_arguments_win(gsm8k):
    options = options_of(gsm8k)
    assert options["train_batch_size"] == 8 and options["init_kl_coef"] == 0.02 and options[
        "micro_train_batch_size"] == 2
    assert options["actor_learning_rate"] == 1e-3 and options["max_steps"] == 2
    assert options["bf16"] and options["gradient_checkpointing"] and options["adam_offload"] and options["l2"] == 1e-2
    assert options["strategy"] == "fsdp" and options["use_kl_loss"] and options["kl_estimator"] == "k3"


def test_gsm8k_outputs(gsm8k):
    check_model(gsm8k / "hf", sum(p.numel() for p in tiny.model(max_position_embeddings=1024).parameters()))
    assert [path.name for path in sorted((gsm8k / "checkpoints").iterdir())] == ["step_000001", "step_000002"]
    assert all((path / "COMPLETE.json").exists() for path in (gsm8k / "checkpoints").iterdir())
    rows = lines(gsm8k / "rollouts" / "step_2.jsonl")
    assert len(rows) == 8 and all(set(row["parts"]) == {"math", "format"} for row in rows)
    assert "2 ranks" in (gsm8k / "log_node0.txt").read_text(encoding="utf-8")


def test_gsm8k_saves_when_asked_to_stop(gsm8k, tmp_path):
    """SIGTERM to the script, as a scheduler sends it: ranks and log end, the newest step is kept."""
    sizes = {"TBS": "8", "RBS": "4", "N_SAMPLES": "2", "PROMPT_MAX_LEN": "640", "GENERATE_MAX_LEN": "4",
             "EVAL_STEPS": "0", "NPROC": "2", "ENGINE": "hf"}  # yapf: disable
    env = shell(sizes | {"SAVE": str(tmp_path), "MODEL": f"{gsm8k.parent}/model", "DATA": f"{gsm8k.parent}/data",
                         "MASTER_PORT": free_port()})  # yapf: disable
    run = subprocess.Popen(["bash", str(GSM8K_RUN), "--max_steps", "5000"], env=env, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    metrics = tmp_path / "metrics.jsonl"
    while not (metrics.exists() and lines(metrics)) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    run.terminate()
    printed, _ = run.communicate(timeout=60)  # ends when every process that holds the pipe has ended
    steps = len(lines(metrics))
    assert run.returncode != 0 and 0 < steps < 5000, printed[-3000:]
    assert (tmp_path / "checkpoints" / f"step_{steps:06d}" / "COMPLETE.json").exists()
    assert f"stopped after step {steps} of 5000" in (tmp_path / "log_node0.txt").read_text(encoding="utf-8")


def test_gsm8k_defaults(gsm8k, tmp_path):
    """Untouched, the script asks for the run that its users know; DATA may hold the rows in another form."""
    for split in ("train", "test"):
        rows = pq.read_table(gsm8k.parent / "data" / f"{split}.parquet").to_pylist()
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    # here the model is too short for its lengths
    plan = ["--dry_run", "--plan_gpus", "2xH100", f"--eval_data={tmp_path}/test.jsonl"]
    shown = launch("bash", GSM8K_RUN, *plan, cwd=tmp_path, NPROC="2", ENGINE="hf", MASTER_PORT=free_port(),
                   MODEL=str(gsm8k.parent / "model"), DATA=str(tmp_path))  # yapf: disable
    assert f"{tmp_path}/train.jsonl" in shown and f"{tmp_path}/test.jsonl" in shown and "given twice" not in shown
    known = dict(re.findall(r"^  (\w+) +(\S+) +\[(?:flag|script)\]$", shown, re.MULTILINE))
    expected = {
        "train_batch_size": "128", "rollout_batch_size": "128", "n_samples_per_prompt": "5", "num_episodes": "30",
        "micro_train_batch_size": "4", "micro_rollout_batch_size": "4", "prompt_max_len": "1024",
        "generate_max_len": "2048", "init_kl_coef": "0.01", "use_kl_loss": "true", "kl_estimator": "k3",
        "actor_learning_rate": "1e-06", "l2": "0.01", "strategy": "fsdp", "adam_offload": "true", "bf16": "true",
        "gradient_checkpointing": "true", "eval_steps": "20", "save_steps": "20", "engine_type": "hf",
        "advantage_estimator": "group_norm", "seed": "42", "save_path": "runs/grpo_gsm8k_qwen2.5_0.5b"
    }  # yapf: disable
    assert {name: known.get(name) for name in expected} == expected
    assert "128 prompts x 5 = 640 samples" in shown and "5 optimizer steps of 128 samples" in shown


def test_gsm8k_readme_names_every_variable():
    readme = (GSM8K / "README.md").read_text(encoding="utf-8")
    files = (GSM8K_RUN, *(ROOT / "examples" / name for name in ("launch.sh", "torchrun.sh")))
    script = "".join(path.read_text(encoding="utf-8") for path in files)
    rows = {name: default.strip("`") for names, default in re.findall(r"^\| (`.+?`) \| (.*?) \|", readme, re.MULTILINE)
            for name in re.findall(r"`(\w+)`", names)}  # yapf: disable
    variables = dict(re.findall(r"^(\w+)=\$\{\1:-(.*)\}$", script, re.MULTILINE))
    assert len(rows) > 20 and rows.keys() == variables.keys()
    assert (rows.pop("ENGINE"), variables.pop("ENGINE")) == ("vllm` if it is installed, else `hf",
                                                             "$(installed_engine)")
    assert all(rows[name] == default.replace("$HOME", "~") for name, default in variables.items())


# -- examples/quickstart ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """``run_quickstart.sh``: data and model, four supervised steps, three of GRPO on two ranks."""
    folder = tmp_path_factory.mktemp("quickstart") / "out"
    sizes = {"PREPARE_ARGS": "--train_rows 64 --test_rows 16 --sft_rows 128", "SFT_ARGS": "--max_steps 4",
             "WARM_CURVES": "1"}  # yapf: disable
    words = ("--seed 3 --max_steps 3 --eval_steps 3 --save_steps 2 --rollout_batch_size 4 --n_samples_per_prompt 4 "
             "--train_batch_size 16 --print_samples 2 --no_drop_zero_advantage").split()  # all of its groups are flat
    printed = launch("bash", QUICKSTART / "run_quickstart.sh", *words, cwd=folder.parent, OUT=str(folder), **sizes)
    (folder / "printed.txt").write_text(printed, encoding="utf-8")
    return folder


def test_quickstart_refuses_before_the_warm_up(tmp_path):
    few = "--train_rows 64 --test_rows 16 --sft_rows 128"
    for words, code, message in ((["--learning_rat", "3"], 2, "did you mean --actor_learning_rate"),
                                 (["--train_batch_size", "7"], 2, "must be a multiple"),
                                 (["--dry_run", "--seed=5"], 0, "[flag]"), (["--help"], 0, "usage: ")):  # yapf: disable
        run = subprocess.run(["bash", str(QUICKSTART / "run_quickstart.sh"), *words], capture_output=True, text=True,
                             timeout=100, env=shell({"OUT": str(tmp_path), "PREPARE_ARGS": few}))
        assert run.returncode == code and message in run.stdout + run.stderr and "2/3" not in run.stdout, run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "data"]


@pytest.mark.parametrize("gpus, environ, ranks", [(1, {}, 1), (4, {}, 2), (4, {"CUDA_VISIBLE_DEVICES": "3"}, 1),
                                                  (1, {"NPROC": "2"}, 2)])  # yapf: disable
def test_quickstart_has_a_process_per_gpu(gpus, environ, ranks, tmp_path):
    listed = "\n".join(f"echo GPU {i}" for i in range(gpus))
    for name, line in (("nvidia-smi", listed), ("python3", "echo $WORLD_SIZE")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    found = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path), **environ}
    run = subprocess.run(["bash", str(QUICKSTART / "run_quickstart.sh"), "--dry_run"], capture_output=True, text=True,
                         timeout=100, env=found, check=True)
    assert run.stdout.splitlines()[-1] == str(ranks)


def test_quickstart_metrics(quickstart):
    rows = lines(quickstart / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(set(CANONICAL) <= set(row) and "reward/accuracy/carries/mean" in row for row in rows[1:])
    assert all("eval/all/pass@1" in row for row in (rows[0], rows[3]))
    assert lines(quickstart / "sft" / "metrics.jsonl")[-1]["step"] == 4
    assert options_of(quickstart)["seed"] == options_of(quickstart / "sft")["seed"] == 3


def test_quickstart_as_make_gpu_measures_it(tmp_path, monkeypatch):
    """The whole script in its reduced form."""
    monkeypatch.setattr(sys, "executable", warm_python())
    for name, value in shell({"PYTHONPATH": str(ROOT)}).items():
        monkeypatch.setenv(name, value)
    one, options = piece(tmp_path, "quickstart")
    found = importlib.import_module(f"benchmarks.gpu.{one.function.split(':')[0]}")
    *_, tables = getattr(found, one.function.split(":")[1])(one.setting.__class__(**json.loads(options["setting"])))
    row, = tables[one.tables[0]]
    assert set(tables) == set(one.tables) and row["steps"] == 2 and 0 <= row["pass@1 before"] <= 1, row
    assert 0 < row["step, ms"] < 1e3 * row["all, s"]


def test_quickstart_shows_solutions_before_and_after(quickstart):
    printed = (quickstart / "printed.txt").read_text(encoding="utf-8")
    assert "2/3 supervised warm-up" in printed and "3/3 GRPO on 2 processes" in printed
    assert "Loading weights" not in printed and "Writing model shards" not in printed
    for step in (0, 3):
        shown = printed.split(f"held-out solutions after step {step}\n")[1].split("\n--- 3 ---")[0]
        assert "--- 1 ---" in shown and "--- 2 ---" in shown and "prompt:   What is" in shown
    assert printed.count("--- 2 ---") == 2 and "--- 3 ---" not in printed


def test_quickstart_leaves_what_it_promises(quickstart):
    expected = [*(f"data/{name}.parquet" for name in ("train", "test", "sft")), "learning_curve.png", "config.yaml",
                *(f"rollouts/step_{n}.jsonl" for n in (1, 2, 3)), "checkpoints/step_000002/COMPLETE.json",
                "checkpoints/step_000003/COMPLETE.json"]  # yapf: disable
    assert [name for name in expected if not (quickstart / name).is_file()] == []
    assert (quickstart / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert any((quickstart / "tensorboard").glob("events.out.tfevents.*"))
    rollout = lines(quickstart / "rollouts" / "step_3.jsonl")
    assert len(rollout) == 16 and {"prompt", "response", "reward", "reference", "advantage"} <= set(rollout[0])
    check_model(quickstart / "hf", 135_872)
    warmed_up = AutoModelForCausalLM.from_pretrained(quickstart / "sft" / "hf")
    assert warmed_up.config.vocab_size == 64


def test_quickstart_report(quickstart):
    """In a browser. Its samples are those of the rollouts, on both ranks."""
    page = quickstart / "report.html"
    assert page.stat().st_size < 20e6
    records = [row for row in lines(quickstart / "samples.jsonl") if row["kind"] == "training"]
    for record in records:
        rollout = {(row["uid"], row["index"]): row
                   for row in lines(quickstart / f"rollouts/step_{record['step']}.jsonl")}
        shown = [(rollout[group["uid"], sample["index"]], sample) for group in record["groups"]
                 for sample in group["samples"]]
        assert len(shown) == 16 and all(row["reward"] == sample["reward"] for row, sample in shown)
        assert all("".join(sample["text"]).startswith(row["response"]) for row, sample in shown)
    with opened(page) as (tab, requests):
        assert {"response length (tokens)", "entropy (nats)", "loss of the policy"} <= {
            text.split("\n")[0] for text in tab.locator("figcaption").all_inner_texts()}  # yapf: disable
        assert tab.locator("#at").inner_text() == "3 (3 of 3)" and tab.locator(".sample").count() == 16
        tab.locator("#step").press("Home")
        assert tab.locator("#at").inner_text() == "1 (1 of 3)"
        said = ["".join(sample["text"]) for group in records[0]["groups"] for sample in group["samples"]]
        assert [text.rstrip() for text in tab.locator(".sample pre").all_text_contents()] == [
            text.rstrip() for text in said]  # yapf: disable
        rewards = [sample["reward"] for group in records[0]["groups"] for sample in group["samples"]]
        tab.locator("#low").fill("0.5")
        assert tab.locator(".sample").count() == sum(reward >= 0.5 for reward in rewards)
        tab.get_by_label("held-out prompts").check()
        tab.locator("#low").fill("")
        tab.locator("#prompt").select_option("0:0")
        assert tab.locator("#step").get_attribute("max") == "1", "before the first step and after the last"
        assert tab.locator("article").count() == 1 and requests == [page.as_uri()]


def test_quickstart_reads_its_run_back(quickstart):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(quickstart / "tensorboard"))
    events.Reload()
    rewards = [row["reward/mean"] for row in lines(quickstart / "metrics.jsonl")[1:]]
    assert [event.value for event in events.Scalars("reward/mean")] == pytest.approx(rewards)


# -- examples/preferences ---------------------------------------------------------------------------------------------
def printed_scripts():
    """The two commands of README.md."""
    return [ROOT / path for path in re.findall(r"^bash (\S+)", (PREFERENCES / "README.md").read_text(), re.MULTILINE)]


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """``run_preferences.sh`` with one of its losses; the chain trains with all, on the same seed."""
    folder = tmp_path_factory.mktemp("preferences") / "out"
    launch("bash",
           printed_scripts()[0], cwd=folder.parent, OUT=str(folder), LOSSES="sigmoid", SEED="1",
           PREPARE_ARGS="--test_rows 200", DPO_ARGS="--max_epochs 2")
    return folder


def accuracies(folder):
    """Share of right answers of each evaluated model."""
    return {row["model"]: row["value"] for row in lines(folder / "results.jsonl") if row["metric"] == "avg@1"}


@pytest.mark.whole
def test_training_on_pairs_of_its_answers_surpasses_a_careless_teacher(taught):
    found = accuracies(taught / "evaluation")
    assert found["sft-hf"] < 0.5 and found["sigmoid-hf"] > found["sft-hf"] + 0.15, found


@pytest.mark.whole
def test_a_reward_model_of_the_pairs_teaches_as_the_only_reward(taught):
    launch("bash", printed_scripts()[1], cwd=taught, OUT=str(taught), SEED="1", GRPO_ARGS="--max_steps 10")
    assert lines(taught / "rm" / "metrics.jsonl")[-1]["eval/accuracy"] >= 0.95
    steps = lines(taught / "grpo" / "metrics.jsonl")
    assert all(row["reward/mean"] == row["reward/rm/mean"] for row in steps if "reward/mean" in row)
    found = accuracies(taught / "evaluation_grpo")
    assert found["grpo-hf"] > found["sft-hf"] + 0.3, found
