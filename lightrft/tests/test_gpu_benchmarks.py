"""``make gpu``: the reduced form of each measurement on the CPU, its options, and what it needs."""
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lightrft
from lightrft.config.cli import parse_config
from lightrft.models.activations import ModelShape
from lightrft.models.architectures import modality_of
from lightrft.preflight.base import preflight
from lightrft.preflight.cost import count_parameters
from lightrft.preflight.hardware import Machine
from lightrft.preflight.memory import memory, peak
from lightrft.preflight.planned import settle, settle_recomputation
from lightrft.tests.support import tiny
from lightrft.tests.support.gpu_measurements import MODULE, check_piece, piece
from lightrft.tests.support.launch import launch
from lightrft.tests.support.warm import warm_environ, warm_python

ROOT = Path(lightrft.__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="installed without its repository")
if (ROOT / "benchmarks").exists():
    sys.path.append(str(ROOT))
    from benchmarks.gpu import peers
    from benchmarks.gpu import store as gpu_store
    from benchmarks.gpu.catalog import MEASUREMENTS, Setting
    from benchmarks.gpu.page import INTROS
    from benchmarks.gpu.store import Store

# Measurements that other tests run in their reduced form, where a process has imported what they need already.
ELSEWHERE = {
    "quickstart": "lightrft/tests/test_examples.py", "run-vllm-0.5b": "lightrft/rollout/tests/test_vllm_ranks.py",
    "run-vllm-7b-tp2": "lightrft/rollout/tests/test_vllm_ranks.py",
    "run-sglang-0.5b": "lightrft/tests/support/sglang_experts.py", "step-hf-3b-vl": __file__,
    "update-0.5b-fsdp2": __file__
}  # yapf: disable


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.dist
@pytest.mark.timeout(1500)
def test_the_reduced_form_measures_all_and_resumes(tmp_path):
    folders = ["--out", str(tmp_path / "out"), "--models", str(tmp_path / "models")]
    chosen = [one.name for one in MEASUREMENTS if one.reduced and one.name not in ELSEWHERE]
    command = [warm_python(), "-m", "benchmarks.gpu", "--reduced", *folders, "--only", *chosen]
    oracles = Path(sys.prefix) / "oracles"  # as `make gpu-reduced` has it; TRL is there in CI
    environ = os.environ | warm_environ(nested=True) | {"PYTHONPATH": str(oracles)}
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400, env=environ)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["gpu.json", "gpu.md"]
    records = Store(tmp_path / "out" / "gpu.json").read()
    errors = {name: record.error for name, record in records.items() if record.status != "ok"}
    assert first.returncode == 0 and not errors, errors or first.stdout + first.stderr
    skipped = [] if (oracles / "trl").is_dir() else ["trl-0.5b"]
    assert re.findall(r"(\S+): skipped, trl is not installed", first.stdout) == skipped
    expected = {one.name: one for one in MEASUREMENTS if one.name in chosen and one.name not in skipped}
    assert set(records) == set(expected)
    assert records["tests"].tables["Tests on the GPU"][0]["skipped"] > 30, "the tests that need a GPU are collected"
    for name in records:
        assert set(records[name].tables) == set(expected[name].tables) and all(records[name].tables.values()), name
        assert records[name].machine["device"].startswith("CPU") and records[name].machine["torch"]
    page = (tmp_path / "out" / "gpu.md").read_text(encoding="utf-8")
    assert "wake to first token, s" in page and "## Errors" not in page
    assert "wake to first token, s" in first.stdout
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environ)
    assert again.returncode == 0 and "about" not in again.stdout, again.stdout
    assert Store(tmp_path / "out" / "gpu.json").read() == records


@pytest.mark.dist
@pytest.mark.parametrize("name", [name for name, file in ELSEWHERE.items() if file == __file__])
def test_the_reduced_form_of_a_measurement(name, tmp_path):
    """In processes that have imported everything."""
    one, options = piece(tmp_path / "piece", name)
    if reason := gpu_store.missing(one.needs, 1, True):
        pytest.skip(reason)
    run = launch(tmp_path / "piece", options, one.ranks, module=MODULE)
    assert run.wait(200) == [0] * one.ranks, run.output
    check_piece(tmp_path / "piece", one)


def test_every_measurement_has_a_reduced_form_that_a_test_runs():
    """Only those have none whose function runs, with an engine of the same kind, in another one that has."""
    for name, file in ELSEWHERE.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf'(?<!/ )"{name}"', text), f"{file} does not run {name}"  # not as the folder of an example
    reduced = [one for one in MEASUREMENTS if one.reduced]
    assert set(ELSEWHERE) <= {one.name for one in reduced}
    for one in MEASUREMENTS:
        alike = [
            other for other in reduced if other.setting.engine == one.setting.engine
            and one.setting.tp == other.setting.tp and set(one.tables) <= set(other.tables)
        ]
        assert alike, f"nothing like {one.name} runs in CI"


def test_trl_sees_one_gpu_of_several(monkeypatch, tmp_path):
    """Its trainer would put the model on every GPU that it sees, and refuses that."""
    given = []

    def run(command, env, **options):
        given.append(env["CUDA_VISIBLE_DEVICES"])
        Path(command[command.index("--out") + 1]).write_text("{}")

    monkeypatch.setattr(peers.subprocess, "run", run)
    for number, visible in enumerate((None, "3,1", "")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        peers.in_process("theirs", Setting(scratch=str(tmp_path)), number)
    assert given == ["0", "3", ""]


def test_attention_counts_the_flops_of_flash_attention(monkeypatch):
    """Its benchmark: 4 L^2 d per head forward, half of it if causal, and 2.5 times as many backward."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from benchmarks.gpu import kernels
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64}
    row = kernels.attention_row(sizes, torch.device("cpu"), length=16, sequences=3)
    flops = row["SDPA rows, TFLOP/s"] * 1e12 * row["SDPA rows, ms"] * 1e-3
    assert flops == pytest.approx((1 + 2.5) * 4 * 16**2 / 2 * 32 * 2 * 3)


@pytest.mark.parametrize("one", [one for one in MEASUREMENTS if one.function.startswith(("training", "rollout"))],
                         ids=lambda one: one.name)  # yapf: disable
def test_the_options_are_valid_and_fit_an_h100(one, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from benchmarks.gpu import models
    setting = replace(one.setting, scratch=str(tmp_path), models=str(tmp_path))
    model_config = models.build_config(setting, models.build_tokenizer(512))
    with torch.device("meta"):
        model = modality_of(model_config, one.name).auto_class.from_config(model_config)
    size = count_parameters({name: parameter.shape for name, parameter in model.named_parameters()})
    model_config.save_pretrained(tmp_path / "shape")
    for reduced in (False, True):
        chosen = replace(setting, reduced=reduced)
        flags = [*models.trainer_flags(chosen, 32, 8, 256, 1), "--prompt_data", str(models.write_prompts(chosen))]
        config = parse_config([*flags, "--pretrain", str(tiny.save_model(tmp_path / "model"))], "gpu").config
        machine = Machine.planned(f"{one.ranks}xH100")
        settle(config, {}, machine)
        config.model.pretrain = str(tmp_path / "shape")
        settle_recomputation(config, {}, machine)
        found = preflight(config).problems(one.ranks, True, one.ranks)
        assert [text for text in found if "is not installed" not in text] == []
        needed = peak(memory(config, one.ranks, size, machine.device, shape=ModelShape.of(model_config)))
        assert needed[1] < machine.device.total, needed


def test_every_measurement_has_its_tables():
    assert {title for one in MEASUREMENTS for title in one.tables} == set(INTROS)
    assert len({one.name for one in MEASUREMENTS}) == len(MEASUREMENTS)


def test_gpus_are_those_of_the_driver(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA H100, 580.1, 81559 MiB\\nNVIDIA H100, 580.1, 81559 MiB\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu_store.gpus.cache_clear()
    try:
        assert gpu_store.machine(False)["device"] == "2 x NVIDIA H100, 81559 MiB"
        assert gpu_store.missing((), 2, False) == "" and gpu_store.missing(("gpu", ), 1, False) == ""
        assert gpu_store.missing((), 4, False) == "needs 4 GPUs, here are 2"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        gpu_store.gpus.cache_clear()
        assert gpu_store.missing((), 2, False) == "needs 2 GPUs, here is 1"
        for hidden in ("", "-1", " -1", "-1,0"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
            gpu_store.gpus.cache_clear()
            assert gpu_store.missing(("gpu", ), 1, False) == "needs a GPU" and gpu_store.gpus() == ()
    finally:
        gpu_store.gpus.cache_clear()


@pytest.mark.parametrize("engine, folder", [("vllm", "venv-gpu"), ("sglang", "venv-gpu-sglang")])
def test_make_gpu_installs_what_it_measures(engine, folder, tmp_path):
    """All that any measurement needs, but the other engine."""
    words = ["make", "--no-print-directory", "-n", "gpu", f"VENV={tmp_path}/venv", "PYTHON=", f"ENGINE={engine}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    python, text = f"{tmp_path}/{folder}/bin/python", done.stdout.replace("\\\n", "")
    asked = re.search(rf'{python} -m pip install --quiet -c constraints/{engine}.txt -e "\.\[(.*)\]" (.*)', text)
    assert asked[1] == f"{engine},deepspeed,liger"
    named = {re.split("==", word)[0] for word in asked[2].split()} | {engine}
    named |= {"trl"} if f"{python} -m pip install --quiet --no-deps trl==" in text else set()
    pinned = (ROOT / "constraints" / f"{engine}.txt").read_text(encoding="utf-8")
    needs = {name for one in MEASUREMENTS for name in one.needs} - {"gpu", *({"vllm", "sglang"} - {engine})}
    assert [name for name in needs - named if f"\n{name}==" not in pinned] == []
    assert text.rstrip().splitlines()[-1].startswith(f"{python} -m benchmarks.gpu")


def test_make_gpu_installs_nothing_into_the_python_at_hand():
    words = [
        "make", "--no-print-directory", "-n", "gpu", "PYTHON=python3", "MINUTES=9", "OUT=results", "ARGS=--again doctor"
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == 'python3 -m benchmarks.gpu --minutes 9 --out "results" --again doctor'
    help_text = subprocess.run([sys.executable, "-m", "benchmarks.gpu", "--help"], cwd=ROOT, capture_output=True,
                               text=True, check=True, timeout=60).stdout  # yapf: disable
    assert "--minutes" in help_text
    whole = subprocess.run(words[:5], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert whole.strip() == "python3 -m benchmarks.gpu", "the number of GPUs decides how long it takes"
