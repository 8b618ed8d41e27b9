"""The command ``lightrft``: its commands, and what a user sees when several processes fail."""
import importlib.util
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from lightrft import __version__
from lightrft.cli import main as command, train
from lightrft.cli.offline import OFFLINE
from lightrft.config.schema import Config
from lightrft.config.tree import options
from lightrft.tests.support.launch import ROOT
from lightrft.tests.support.warm import warm_environ, warm_python
from lightrft.utils.env import World


def run(*words):
    """Run ``lightrft`` in a process."""
    return subprocess.run([warm_python(), "-m", "lightrft.cli.main", *words], capture_output=True, text=True,
                          timeout=200, cwd=ROOT, env=os.environ | warm_environ())  # yapf: disable


def test_every_command_shows_its_options(capsys):
    assert command.main([]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in command.COMMANDS) and max(map(len, said.splitlines())) <= 80
    for name in command.COMMANDS:
        with pytest.raises(SystemExit) as done:
            command.main([name, "--help"])
        shown = {"report": "RUN", "merge_lora": "--lora_path", "serve_rm": "--reward_pretrain"}.get(name, "--pretrain")
        assert done.value.code == 0 and shown in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["train", "--nproc", "8", "--help", "eps_clip"])  # once, not on eight processes
    assert capsys.readouterr().out.startswith("--eps_clip float\n  lower clip")
    assert command.main(["trian"]) == 2 and "'trian' (did you mean train?)\n" in capsys.readouterr().err
    assert command.main(["--version"]) == 0 and capsys.readouterr().out == f"lightrft {__version__}\n"


@pytest.mark.parametrize("words", [
    "report runs/frist", "export runs/frist out", "merge_lora --model_path x --lora_path runs/frist --output_path out"
])
def test_a_folder_that_is_not_there_names_the_one_that_is_meant(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        command.main(words.split())
    assert done.value.code == 2 and "(did you mean first?)" in capsys.readouterr().err


THEIRS = {
    "sft": "train_sft fsdp_sft_trainer sft_trainer openrlhf.cli.train_sft train-sft train_sft.py",
    "dpo": "train_dpo", "rm": "train_rm reward", "kto": "train_kto", "kd": "train_kd gkd", "prm": "train_prm",
    "grm": "train_grm", "train": "train_ppo_ray main_ppo verl.trainer.main_ppo examples/gsm8k_geo3k/train_colocate.py",
    "train --recipe grpo": "grpo GRPO", "train --recipe ppo": "ppo", "dpo --loss orpo": "orpo", "dpo --ipo": "ipo",
    "sft --pretrain_mode": "pt", "generate": "batch_inference main_generation infer", "evaluate": "eval main_eval",
    "chat": "interactive_chat", "merge_lora": "lora_combiner",
    "convert": "model_merger zero_to_fp32 openrlhf.cli.convert_dcp_to_hf",
    "train --teacher_model MODEL --reward format=0": "opd train_opd", "dpo, kto, rm, kd or train": "rlhf"
}  # yapf: disable
TYPOS = {"trian": "train", "tain": "train", "stf": "sft", "dop": "dpo", "dppo": "dpo", "kot": "kto", "grmm": "grm",
         "pmr": "prm", "genrate": "generate", "evalute": "evaluate", "exprot": "export", "chta": "chat",
         "doctr": "doctor", "serve": "serve_rm", "merge-lora": "merge_lora", "convret": "convert", "train_stf": "sft",
         "batch_inferense": "generate"}  # yapf: disable


def test_a_command_of_another_trainer_is_answered_with_ours(capsys):
    """Its words are a command line that is known here; a typing error gets the nearest name, another word none."""
    for ours, words in THEIRS.items():
        for word in words.split():
            assert command.main([word]) == 2
            assert capsys.readouterr().err.startswith(
                f"lightrft: error: unknown command {word!r}; here: lightrft {ours}\n")
        name, *flags = ours.split() if "," not in ours else ["dpo"]
        known = {"train": Config} | {one.name: one.tree for one in OFFLINE.values()}
        assert name in command.COMMANDS and (not flags or flags[0][2:] in options(known[name]))
    for word, near in TYPOS.items():
        assert command.main([word]) == 2 and f"(did you mean {near}?)\n" in capsys.readouterr().err
    for word in "test plot run install list status deploy app tune config vllm-serve".split():
        assert command.main([word]) == 2 and f"unknown command {word!r}\n" in capsys.readouterr().err


@pytest.mark.parametrize("word, name", [("batch_inference", "generate"), ("interactive_chat", "chat"),
                                        ("lora_combiner", "merge_lora"), ("train_ppo_ray", "train"),
                                        ("train_ppo", "train"), ("train_colocate", "train"), ("sft", "sft")])
def test_a_module_of_another_trainer_runs_our_command_and_says_so(word, name, monkeypatch, capsys):
    """As python -m, torchrun -m and deepspeed --module run it; the line comes from the first rank."""
    monkeypatch.setattr(sys, "argv", ["", "--help"])
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as done:
            runpy.run_module(f"lightrft.cli.{word}", run_name="__main__", alter_sys=True)
        out, err = capsys.readouterr()
        assert done.value.code == 0 and out.startswith(f"usage: lightrft {name} ")
        ours = f"lightrft.cli.{word} is lightrft {name} here, or python -m {command.COMMANDS[name][0]}"
        default = "; --advantage_estimator is gae, unless it is given" if "ppo" in word else ""
        assert err.endswith(f"{ours}{default}\n") if rank == "0" else not err


@pytest.mark.parametrize("word, flags, estimator", [
    ("train_ppo", [], "gae"), ("train_ppo_ray", [], "gae"), ("main_ppo", [], "gae"),
    ("train_ppo_ray", ["--advantage_estimator", "rloo"], "rloo"),
    ("train_colocate", [], Config().algorithm.advantage_estimator)
])  # yapf: disable
def test_a_module_that_is_named_after_ppo_estimates_advantages_with_its_critic(word, flags, estimator, monkeypatch):
    parsed = []
    monkeypatch.setattr(train, "train", parsed.append)
    monkeypatch.setattr(sys, "argv", ["", "--pretrain", "m", "--prompt_data", "d", *flags])
    with pytest.raises(SystemExit) as done:
        runpy.run_module(f"lightrft.cli.{word}", run_name="__main__", alter_sys=True)
    assert not done.value.code and parsed[0].config.algorithm.advantage_estimator == estimator


def test_a_module_that_is_no_command_is_not_found():
    for name in ("lightrft.cli.nosuch", "lightrft.batch_inference"):
        assert importlib.util.find_spec(name) is None


@pytest.mark.parametrize("word, ours", [("train_opd", "train --teacher_model MODEL --reward format=0"),
                                        ("grpo", "train --recipe grpo"), ("rlhf", "dpo, kto, rm, kd or train")])
def test_a_module_whose_work_needs_an_option_names_the_command(word, ours, capsys):
    """Its words may lack the option; without it the command would train another thing."""
    with pytest.raises(SystemExit) as done:
        runpy.run_module(f"lightrft.cli.{word}", run_name="__main__", alter_sys=True)
    assert done.value.code == 2 and capsys.readouterr().err == f"lightrft.cli.{word}: error: here: lightrft {ours}\n"


def test_the_number_of_processes_is_taken_out_of_the_words(capsys):
    assert command.take_nproc(["--a", "1", "--nproc", "8", "--b"]) == ("8", ["--a", "1", "--b"])
    assert command.take_nproc(["--nproc=2"]) == ("2", []) and command.take_nproc(["--a"]) == ("", ["--a"])
    for words in (["--nproc"], ["--nproc", "many"], ["--nproc=0"]):
        with pytest.raises(SystemExit, match="2"):
            command.take_nproc(words)
        assert "expected the number of processes" in capsys.readouterr().err


def test_help_names_a_command(monkeypatch):
    monkeypatch.setitem(command.COMMANDS, "counts", ("counts", ""))
    monkeypatch.setitem(sys.modules, "counts", SimpleNamespace(main=lambda words: words))
    assert command.main(["help", "counts", "seed"]) == ["--help", "seed"]


def test_a_plan_for_many_processes_starts_none(monkeypatch):
    monkeypatch.setattr(command, "launch", None)
    monkeypatch.setitem(command.COMMANDS, "counts", ("counts", ""))
    monkeypatch.setitem(sys.modules, "counts", SimpleNamespace(main=lambda words: (words, World.from_env().world_size)))
    for words in (["counts", "--nproc", "8", "--dry_run"], ["--nproc", "8", "counts", "--dry_run"]):
        assert command.main(words) == (["--dry_run"], 8) and World.from_env() == World()


@pytest.mark.dist
def test_an_error_of_the_user_is_the_last_line_and_comes_once(tmp_path):
    """Before a process starts, with the hint that one process gives, and within a process group; the launcher adds
    nothing."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1", "reference": "2"}\n' * 2)
    early = run("train", "--nproc", "2", "--pretrain", "model", "--prompt_data", "data", "--n_samples_per_prompt", "0")
    late = run("train", "--nproc", "2", "--pretrain", str(ROOT / "docs"), "--prompt_data", str(tmp_path / "a.jsonl"),
               "--rollout_batch_size", "2", "--save_path", str(tmp_path / "run"))
    assert early.returncode == 2 and early.stderr == (
        "lightrft train: error: --n_samples_per_prompt 0: must be at least 1; nearest valid value: 1\n"
        "See --help for the options.\n")
    assert late.returncode == 2 and "Traceback" not in late.stderr, late.stderr
    last = late.stderr.strip().splitlines()[-1]
    assert late.stderr.count("holds no model") == 1 and re.search("error: .*holds no model", last), late.stderr


def test_torchrun_ends_its_report_with_the_error_of_the_user():
    """Whichever rank finds it first: the only cause that it names, in the last line but its border."""
    code = ("import os, sys, time; time.sleep(3 * (os.environ['RANK'] == '0'))\n"
            "from lightrft.cli.train import main; main(sys.argv[1:])")
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    rows = str(ROOT / "lightrft/tests/support/field/rows/prefill.jsonl")
    given = ["--pretrain", str(ROOT), "--prompt_data", rows, "--rollout_batch_siz", "8"]
    done = subprocess.run([*command, sys.executable, "-c", code, *given], capture_output=True, text=True, timeout=200,
                          cwd=ROOT)  # yapf: disable
    *above, line, border = done.stderr.rstrip().splitlines()
    said = "error: unknown flag --rollout_batch_siz (did you mean --rollout_batch_size?)"
    assert done.returncode == 1 and line.endswith(said) and set(border) == {"="}, done.stderr
    assert done.stderr.count(said) == 1, done.stderr


def test_the_launcher_passes_the_exit_code_on(tmp_path):
    (tmp_path / "ends.py").write_text("import os, sys; sys.exit(int(sys.argv[1]) * (os.environ['RANK'] == '1'))")
    (tmp_path / "launches.py"
     ).write_text("import sys; from lightrft.cli.main import launch; sys.exit(launch('2', 'ends', [sys.argv[1]]))")
    for number in (0, 3):
        done = subprocess.run([warm_python(), "launches.py", str(number)], cwd=tmp_path, capture_output=True, text=True,
                              timeout=200, env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"})  # yapf: disable
        assert done.returncode == number, done.stderr


def test_a_signal_to_the_launcher_ends_the_ranks_and_prints_nothing(tmp_path):
    """They save and exit by themselves; the exit code is that of an interrupted program."""
    (tmp_path /
     "waits.py").write_text("import os, signal, sys, time\n"
                            "def end(*args):\n    open('saved' + os.environ['RANK'], 'w')\n    sys.exit(130)\n"
                            "signal.signal(signal.SIGINT, end)\n"
                            "open('ready' + os.environ['RANK'], 'w')\ntime.sleep(200)\n")
    (tmp_path /
     "launches.py").write_text("import sys; from lightrft.cli.main import launch; sys.exit(launch('2', 'waits', []))")
    run = subprocess.Popen([warm_python(), "launches.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
                           env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"})
    while len(list(tmp_path.glob("ready*"))) < 2 and run.poll() is None:
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=200)[1]
    assert run.returncode == 130 and len(list(tmp_path.glob("saved*"))) == 2 and not said, said
