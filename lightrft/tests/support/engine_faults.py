"""Runs of two ranks whose engine comes to grief in their second step, for tests of vLLM and of SGLang."""
import time
from pathlib import Path

from lightrft.tests.support import tiny, tiny_task
from lightrft.tests.support.launch import launch, no_orphans

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
OPTIONS = tiny_task.OPTIONS | {
    "engine_kv_mib": 16, "generate_max_len": 6, "train_batch_size": 32, "eval_steps": 0, "eval_at_start": False,
    "self_test": "false", "sync_proof": "fingerprint", "best_metric": "none", "use_tensorboard": False,
    "disable_ckpt": True
}  # yapf: disable


def launched(home, engine, cases):
    """A run for each case, "fault tp_size"; all at once, they mostly wait."""
    tiny_task.write_home(home)
    tiny.save_model(home / "model", **SIZES)
    runs = {}
    for case in cases:
        fault, tp_size = case.split()
        options = OPTIONS | {
            "engine_type": engine, "plugin": f"lightrft.tests.support.{engine}_fault_plugin",
            "pretrain": home / "model", "prompt_data": home / "train.jsonl", "reward": home / "reward.py",
            "save_path": home / case / "run", "engine_tp_size": tp_size
        }  # yapf: disable
        runs[case] = launch(home / case, options, 2, FAULT=fault)
    return runs


def ended(run, limit_s=60.0):
    """Exit codes, ``limit_s`` after the fault at the latest."""
    mark, end = run.logs[1].parent / "fault", time.monotonic() + 200
    while not mark.exists() and run.processes[1].is_alive() and time.monotonic() < end:
        time.sleep(0.1)
    assert mark.exists(), f"no fault was made\n{run.output}"
    return run.wait(limit_s - (time.time() - mark.stat().st_mtime))


def left(run, limit_s=5.0):
    """Processes of its ranks that still run after ``limit_s``, and whether reward workers do."""
    groups, end = {process.pid for process in run.processes}, time.monotonic() + limit_s
    while (found := [stat for stat in map(status, Path("/proc").glob("[0-9]*")) if stat and int(stat[4]) in groups
                     and stat[2] != "Z"]) and time.monotonic() < end:  # yapf: disable
        time.sleep(0.1)
    return found, not no_orphans(run.logs[0].parent)


def status(process):
    """Fields of its ``stat``; empty when it has ended."""
    try:
        return (process / "stat").read_text().replace(") ", ")_ ").split()
    except OSError:
        return []
