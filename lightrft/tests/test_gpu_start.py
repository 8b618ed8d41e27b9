"""The commands of the page "From zero to GRPO on a GPU machine" have the plans that it says; shipped scripts fit their
machines."""
import json
import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig

from lightrft.cli import train
from lightrft.models.config_json import parameter_shapes
from lightrft.models.state_sizes import StateLayers
from lightrft.preflight import engine_rules
from lightrft.preflight.hardware import Machine
from lightrft.strategy.host_buffers import Slabs
from lightrft.strategy.optimizers.adamw import MOMENTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/gpu_start.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```bash\n([^`]*lightrft\.cli\.train[^`]*)```\n\n`--dry_run --plan_gpus (\S+)`: (.+)\.\n", PAGE)
COMMANDS += [(COMMANDS[-1][0], *re.findall(r"On two machines .*\n\n`--dry_run --plan_gpus (\S+)`: (.+)\.\n", PAGE)[0])]
QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
        "max_position_embeddings": 32768}  # yapf: disable
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False
    },
}

SEEING = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "tie_word_embeddings": False,
    "text_config": QWEN | SHAPES["Qwen/Qwen2.5-7B-Instruct"] | {"model_type": "qwen2_5_vl_text"},
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584
    }
}  # yapf: disable
HEARING = {
    "architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio", "text_config": QWEN | {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "intermediate_size": 11008, "vocab_size": 156032
    }
}  # yapf: disable
_DELTA = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
          "linear_num_value_heads": 32, "num_attention_heads": 16, "vocab_size": 248320}  # yapf: disable
HYBRID = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": True,
    "text_config": _DELTA | {
        "model_type": "qwen3_5_text", "hidden_size": 2560, "num_hidden_layers": 32, "num_key_value_heads": 4,
        "intermediate_size": 9216, "tie_word_embeddings": True
    }, "vision_config": {"model_type": "qwen3_5", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096,
                         "out_hidden_size": 2560}
}  # yapf: disable
HYBRID_MOE = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "tie_word_embeddings": False,
    "text_config": _DELTA | {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "tie_word_embeddings": False
    }, "vision_config": {"model_type": "qwen3_5_moe", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
                         "out_hidden_size": 2048}
}  # yapf: disable
SCRIPTS = {
    "gsm8k_geo3k/run_grpo_gsm8k_qwen3.5_4b.sh": (HYBRID, "8xH100"),
    "gsm8k_geo3k/run_grpo_gsm8k_qwen3.5_35b_a3b.sh": (HYBRID_MOE, "8xH100"),
    "gsm8k_geo3k/run_grpo_gsm8k_qwen2.5_0.5b.sh": (QWEN | SHAPES["Qwen/Qwen2.5-0.5B-Instruct"], "8xH100"),
    "gsm8k_geo3k/run_grpo_geo3k_qwen2.5_vl_7b.sh": (SEEING, "8xH100"),
    "gsm8k_geo3k/run_ppo_geo3k_qwen2.5_vl_7b.sh": (SEEING, "8xH100"),
    "grm_vl_rl/run_grm_vl_rl.sh": (SEEING, "8xH100"),
    "r1_aqa/run_grpo_r1_aqa_qwen2_audio_7b.sh": (HEARING, "1xH100"),
}


def words_of(command: str, folder: Path) -> list[str]:
    """The flags of a command, with a folder that has only the config.json of the model, and with data of one row."""
    words = shlex.split(command.replace("\\\n", " "))
    words = words[words.index("lightrft.cli.train") + 1:]
    model = words[words.index("--pretrain") + 1]
    (folder / "config.json").write_text(json.dumps(QWEN | SHAPES[model]), encoding="utf-8")
    (folder / "data.jsonl").write_text('{"prompt": "1+1?", "reference": "2", "data_source": "openai/gsm8k"}\n',
                                       encoding="utf-8")
    places = {"--pretrain": folder, "--prompt_data": folder / "data.jsonl", "--eval_data": folder / "data.jsonl",
              "--save_path": folder / "run"}  # yapf: disable
    return [str(places.get(before, word)) for before, word in zip(["", *words], words)]


def plan(words: list[str], capsys: pytest.CaptureFixture[str],
         defaults: dict[str, object] | None = None) -> tuple[int, dict[str, float], str]:
    """Exit code, GiB by phase and all output of a dry run."""
    with pytest.raises(SystemExit) as ended:
        train.main([*words, "--dry_run"], defaults)
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    together = next(row[1:] for row in rows if row[:1] == ["together"])
    phases = ("generation", "log-probs", "backward", "optimizer", "weight sync")
    return int(ended.value.code or 0), dict(zip(phases, map(float, together))), out + err


@pytest.mark.parametrize("command, gpus, said", COMMANDS, ids=[gpus for _, gpus, _ in COMMANDS])
def test_the_plan_is_what_the_page_says(command: str, gpus: str, said: str, tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rules, "find_spec", lambda name: None)  # vLLM need not be installed here
    code, together, text = plan([*words_of(command, tmp_path), "--plan_gpus", gpus], capsys)
    verdict = "does not fit" if code else "fits by less than 10%" if "fits by less than 10%" in text else "fits"
    phase = max(together, key=lambda name: together[name])
    found = f"{verdict}, {together[phase]:.1f} of {gpus.rpartition('x')[2]} GiB in the phase {phase}"
    assert said == found
    assert ("--adam_offload --max_tokens_per_micro_batch 4096 brings it to" in text) is bool(code)
    assert "warning: --engine_type vllm: the package vllm is not installed" in text
    assert code or re.search(rf"fits.*: it takes {together[phase]:.2f} GiB .* in the phase {phase}",
                             text), "the verdict is said"
    recomputed = "false" if "0.5B" in command else "selective" if "lora" in command or gpus == "2x8x80" else "true"
    checkpointing = next(line for line in text.splitlines() if line.startswith("  gradient_checkpointing "))
    assert "[default: backward takes " in checkpointing and f" {recomputed} " in checkpointing


def test_what_the_page_says_of_gradient_checkpointing(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rules, "find_spec", lambda name: name)
    words = [*words_of(COMMANDS[0][0], tmp_path), "--plan_gpus", COMMANDS[0][1]]
    without, selective, recomputed = (plan([*words, *more], capsys)[1]["backward"]
                                      for more in ([], ["--gradient_checkpointing", "selective"],
                                                   ["--gradient_checkpointing"]))  # yapf: disable
    assert f"selective` reduces its plan by {without - selective:.1f} GiB" in PAGE
    assert f"and `--gradient_checkpointing` by {without - recomputed:.1f} GiB" in PAGE


def test_what_the_page_says_of_host_memory(tmp_path: Path) -> None:
    words_of(COMMANDS[1][0], tmp_path)
    moments = [torch.empty(shape, device="meta") for shape in parameter_shapes(str(tmp_path)).values() for _ in MOMENTS]
    taken: list[int] = []
    slabs = Slabs(lambda nbytes: taken.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8, device="meta"))
    for moment in moments:
        slabs.like(moment)
    plain, pinned = (sum(sizes) / 2**30 for sizes in ([moment.nbytes for moment in moments], taken))
    assert f"They take {plain:.0f} GiB,\nin {pinned:.0f} GiB of pinned host memory" in PAGE


def test_what_a_page_says_of_layers_with_state() -> None:
    layers = StateLayers.of(AutoConfig.for_model("qwen3_5")).costs(width=2)
    page = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    assert f"keeps {layers.kept / layers.layers / 1024:.0f} KiB of\n" in page


def test_every_machine_of_the_page_has_a_plan() -> None:
    assert [gpus for _, gpus, _ in COMMANDS] == ["1x24", "1x80", "1x80", "1x80", "8x80", "2x8x80"]
    assert len(COMMANDS) == len(re.findall("`--dry_run --plan_gpus", PAGE)), "a plan without its command"


@pytest.mark.parametrize("gpus, ranks", re.findall(r"^\| `(\S+)` \| (.+?) \|$", PAGE, re.MULTILINE)[:3])
def test_the_names_of_machines_mean_what_the_page_says(gpus: str, ranks: str) -> None:
    meant = {"8xH100": (8, "H100"), "1x24": (1, "24 GiB"), "2x8xH100": (16, "H100")}[gpus]
    machine = Machine.planned(gpus)
    assert machine.ranks == meant[0] and machine.device.name.endswith(meant[1])
    assert all(Machine.planned(f"1x{name}").device.cuda for name in re.findall("`([A-Z][A-Z0-9]+S?)`", ranks))


def recorded(script: Path, folder: Path, engine: str, *arguments: str, **places: str) -> tuple[list[str], str]:
    """What ``script`` gives to torchrun, and what it says before, where ``engine`` is what is installed."""
    installed = f'[ "$1" = -c ] && exit {int(engine == "hf")}'  # does Python find vLLM?
    (python := folder / "python").write_text(f'#!/bin/sh\n{installed}\nprintf "%s\\n" "$@" > "{folder}/words"\n',
                                             encoding="utf-8")
    python.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name != "ENGINE"}
    said = subprocess.run(["bash", script, *arguments], check=True, capture_output=True, text=True,
                          env=environ | {"SAVE": str(folder / "run"), "PYTHON": str(python)} | places).stderr
    return (folder / "words").read_text(encoding="utf-8").splitlines(), said


def words_of_script(script: Path, folder: Path, engine: str) -> list[str]:
    """What ``script`` gives to torchrun, for a model and data in ``folder``, where ``engine`` is what is installed."""
    rows = {"prompt": ["1+1?"] * 128, "reference": ["2"] * 128, "data_source": ["openai/gsm8k"] * 128}
    for split in ("train", "test"):
        pq.write_table(pa.table(rows), folder / f"{split}.parquet")
    words, said = recorded(script, folder, engine, MODEL=str(folder), DATA=str(folder))
    assert said.count("\n") == 1 and said.startswith(f"rollout engine: {engine}, ")
    return words


@pytest.mark.skipif(not (ROOT / "examples").exists(), reason="installed without its repository")
@pytest.mark.parametrize("engine", ["vllm", "hf"])
@pytest.mark.parametrize("name", SCRIPTS, ids=[Path(name).stem for name in SCRIPTS])
def test_a_shipped_script_fits_the_machine_that_it_is_for(name: str, engine: str, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture[str],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rules, "find_spec", lambda package: package)  # vLLM need not be installed here
    config, gpus = SCRIPTS[name]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = words_of_script(script := ROOT / "examples" / name, tmp_path, engine)
    assert words[words.index("--engine_type") + 1] == engine
    assert words[words.index("--nproc-per-node") + 1] == gpus.partition("x")[0]
    defaults = runpy.run_path(str(script.parent / "train_colocate.py"))["DEFAULTS"]
    code, _, text = plan([*words[words.index("--pretrain"):], "--plan_gpus", gpus], capsys, defaults)
    assert code == 0 and "fits" in text, text[-600:]


def test_the_script_of_a_hybrid_fits_one_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the README of the example says; its layers with state have no keys and values to store."""
    (tmp_path / "config.json").write_text(json.dumps(HYBRID), encoding="utf-8")
    words = words_of_script(ROOT / "examples/gsm8k_geo3k/run_grpo_gsm8k_qwen3.5_4b.sh", tmp_path, "hf")
    code, together, text = plan([*words[words.index("--pretrain"):], "--plan_gpus", "1xH100"], capsys)
    assert code == 0 and 60 < together["backward"] < 70, text[-600:]
