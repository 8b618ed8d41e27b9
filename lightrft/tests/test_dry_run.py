"""A dry run refuses what the run refuses before its first step, in the same words; it writes nothing."""
import json
import re
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from lightrft.cli.main import COMMANDS
from lightrft.datasets.waveform import write_wav
from lightrft.rollout.hf import engine as hf_engine
from lightrft.strategy.optimizers import OPTIMIZERS, optimizer
from lightrft.tests.support import runs, tiny
from lightrft.tests.support.launch import flags
from lightrft.tests.support.planned_too import UNPLANNED
from lightrft.tests.support.scorers import save_scorer
from lightrft.tests.support.tiny_task import rows, write_home, write_rows

Options = dict[str, Any]
Case = tuple[Callable[[Path, Path], Options], str]  # (home, folder) -> options besides those of the command; words
RL = runs.BASE | {"reward": "exact", "reward_probe": True}
PAIRS = [{"prompt": "1+1?", "chosen": "2", "rejected": "3"}] * 2
STEPS = [{"prompt": "1+1?", "completions": ["2"], "labels": [True]}] * 2


@pytest.fixture(name="home", scope="module")
def home_fixture(tmp_path_factory):
    """Models, rows, and a run with a checkpoint."""
    home = write_home(tmp_path_factory.mktemp("dry"))
    tiny.save_model(home / "narrow", hidden_size=16)
    tiny.tokenizer(extra="<|extra|>").save_pretrained(tiny.save_model(home / "foreign"))
    tiny.save_model(home / "small", vocab_size=259)
    tiny.save_model(home / "twice", "diffllama")
    save_scorer(home / "scorer", 0)
    judged = [{"prompt": f"{i}?", "response": "1", "label": bool(i)} for i in (0, 1)]
    contents_of = {
        "pairs": PAIRS, "steps": STEPS, "judged": judged, "demos": [{"prompt": "1+1?", "response": "2"}] * 2, "unknown":
        UNKNOWN
    }
    for name, content in contents_of.items():
        write_rows(home / f"{name}.jsonl", content)
    assert run("train", options_of("train", home, home / "trained", disable_ckpt=False, max_steps=1)) == 0
    return home


def options_of(command: str, home: Path, folder: Path, **more: Any) -> Options:
    """The options of a small run of ``command``."""
    fixed = {"train_batch_size": 2, "max_len": 128, "save_path": folder}
    prompts = {"prompt_data": home / "train.jsonl"}
    short = {"prompt_max_len": 64, "generate_max_len": 8, "engine_kv_mib": 1}
    known: dict[str, Options] = {
        "train": RL | prompts | {"save_path": folder}, "sft": fixed | {"train_data": home / "demos.jsonl"},
        "kd": fixed | {"train_data": home / "demos.jsonl", "teacher_model": home / "model"},
        "dpo": fixed | {"train_data": home / "pairs.jsonl"}, "rm": fixed | {"train_data": home / "pairs.jsonl"},
        "grm": fixed | {"train_data": home / "pairs.jsonl", "max_len": 400},
        "kto": fixed | {"train_data": home / "judged.jsonl"},
        "prm": fixed | {"train_data": home / "steps.jsonl", "placeholder_token": "#", "reward_tokens": "+,-"},
        "generate": short | prompts | {"output_path": folder / "out.jsonl"},
        "evaluate": short | {"eval_data": home / "test.jsonl", "output_path": folder / "out", "score": "exact"},
        "chat": short, "serve_rm": {"reward_pretrain": home / "scorer", "port": 0}
    }  # yapf: disable
    return ({} if command == "serve_rm" else {"pretrain": home / "model"}) | known[command] | more


def run(command: str, options: Options, *more: str) -> int:
    """Run a command in this process; return its exit code."""
    try:
        import_module(COMMANDS[command][0]).main([*flags(options), *more])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def copied(name: str, change: Callable[[Path], object]) -> Callable[[Path, Path], Options]:
    """A copy of a model of the home, changed."""

    def options(home: Path, folder: Path) -> Options:
        change(shutil.copytree(home / name, folder / "changed"))
        return {"pretrain": folder / "changed"}

    return options


def given(**options: Any) -> Callable[[Path, Path], Options]:
    """Options, the same everywhere; a value ``home:NAME`` is a path in the home."""
    return lambda home, folder: {
        name: home / value[5:] if str(value).startswith("home:") else value for name, value in options.items()
    }


def without(name: str) -> Callable[[Path], None]:
    """Remove a tensor from the weights of a folder."""

    def remove(folder: Path) -> None:
        kept = {key: tensor for key, tensor in load_file(folder / "model.safetensors").items() if key != name}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})

    return remove


def written(rows_of: list[dict[str, Any]], option: str = "prompt_data", **more: Any) -> Callable[[Path, Path], Options]:
    """Rows in a file of their own."""
    return lambda home, folder: {option: write_rows(folder / "rows.jsonl", rows_of)} | more


def resumed(**options: Any) -> Callable[[Path, Path], Options]:
    """Resume a copy of the run of the home."""

    def resume(home: Path, folder: Path) -> Options:
        shutil.copytree(home / "trained", folder / "run")
        return {"save_path": folder / "run", "disable_ckpt": False, "load_checkpoint": True} | given(**options)(home,
                                                                                                                folder)

    return resume


def begun(home: Path, folder: Path) -> Options:
    """Rows of an unfinished run of batch inference with another temperature."""
    (parts := folder / "run" / "out.jsonl.parts").mkdir(parents=True)
    (parts / "identity.json").write_text(json.dumps({"--temperature": 0.5}))
    (parts / "rank_00000.jsonl").write_text('{"number": 0, "rows": []}\n')
    return {}


MODEL: dict[str, Case] = {  # of every trainer of a policy
    "frozen tower": (given(freeze_prefix="visual"), "--freeze_prefix 'visual' matches no parameter"),
    "all frozen": (given(freeze_prefix="language"), "leaves nothing to train"),
    "no target": (given(lora_rank=4, target_modules="q_prj"), r"q_prj matches no module \(did you mean q_proj\?\)"),
    "head": (given(lora_rank=4, target_modules="embed_tokens"), "puts LoRA on"),
    "no weights": (copied("model", lambda folder: (folder / "model.safetensors").unlink()), "cannot load the weights"),
    "cut": (copied("model", lambda folder: (folder / "model.safetensors").write_bytes(b"12345678")), "header too"),
    "no tensor": (copied("model", without("model.norm.weight")), "lacks 1 tensors"),
    "other shape": (copied("model", lambda folder: tiny.change_json(folder / "config.json", intermediate_size=24)),
                    "is stored as"),
    "no tokenizer": (copied("model", lambda folder: [path.unlink() for path in folder.glob("*token*")]), "no token"),
    "no object": (copied("model", lambda folder: (folder / "config.json").write_text("[]")), "no JSON object"),
    "scores": (given(pretrain="home:scorer"), "scores texts and does not generate"),
}  # yapf: disable
UNKNOWN = [{"prompt": prompt, "reference": "2", "response": "2", "chosen": "2", "rejected": "3", "label": True,
            "completions": ["2"], "labels": [True]} for prompt in ("1+1?", "1+1<|extra|>?")] * 4  # yapf: disable
ROW = "row 2 of .* 1 has token 260 .'<.extra.>'.*embeddings of 260 tokens: the tokenizer with its 261 tokens"


def unknown(option: str, **more: Any) -> Case:
    """Rows of which the second has a token that the model lacks, and its tokenizer has."""
    return given(pretrain="home:foreign", **{option: "home:unknown.jsonl"} | more), ROW


UNREADABLE = [rows(1)[0] | {"reference": {"a": [1]}}] * 4
CASES: dict[str, dict[str, Case]] = {
    "train": MODEL | {
        "reference": (given(ref_pretrain="home:foreign", init_kl_coef=0.1), "--ref_pretrain .*its tokens are not"),
        "teacher": (given(teacher_model="home:foreign", kd_coef=0.5), "--teacher_model .*its tokens are not"),
        "checkpoint": (resumed(pretrain="home:narrow"), "is a checkpoint of another model"),
        "checkpoint frozen": (resumed(freeze_prefix="embed_tokens"), "is a checkpoint of another model"),
        "other rows": (resumed(prompt_data="home:test.jsonl"), "data sets of .20. rows, now they have .6."),
        "spread": (given(dynamic_sampling=True, zero_spread=2), "no batch would ever fill"),
        "long": (given(generate_max_len=1000), "more than the 512 positions"),
        "few rows": (written(rows(3)), "a batch cannot be filled"),
        "no reference": (written(UNREADABLE, reward="math"), "cannot read the reference"),
        "held-out": (written(UNREADABLE, "eval_data"), "cannot read the reference"),
        "template": (given(chat_template="chatmml"), "unknown chat template"),
        "engine": (given(engine_type="sglang"), "sglang"),
        "cache": (given(pretrain="home:twice"), "--engine_type hf: .*attends more than once .* Take --engine_type"),
        "critic": (given(advantage_estimator="gae", critic_pretrain="nosuch_dir"), "cannot load a model from 'nosuch"),
        "small critic": (given(advantage_estimator="gae", critic_pretrain="home:small"), "embeddings of 259 tokens"),
        "kernel": (given(save_path="/proc/sys/x"), "--save_path /proc/sys/x: .*cannot be"),
        "token": unknown("prompt_data"), "held-out token": unknown("eval_data"),
        "token of pretraining": unknown("pretrain_data", ptx_coef=0.1),
    },
    "sft": MODEL | {"few rows": (written(PAIRS[:1], "train_data", chosen_key="chosen"), ""),
                    "norm": (given(lora_rank=4, target_modules="norm"), "model.norm, a Qwen2RMSNorm, which cannot"),
                    "token": unknown("train_data"), "held-out token": unknown("eval_data")},
    "kd": {"frozen tower": MODEL["frozen tower"], "teacher": (given(teacher_model="home:foreign"), "tokens are not"),
           "no model": (given(teacher_model="nosuch_dir"), "cannot load a model from 'nosuch_dir'"),
           "token": unknown("train_data", teacher_model="home:foreign"),
           "top k": (given(kd_top_k=1000), "the models have 260 logits")},
    "dpo": MODEL | {"no model": (given(pretrain="nosuch_dir"), "cannot load .*'nosuch_dir'"),
                    "reference": (given(ref_pretrain="home:foreign"), "its tokens are not"),
                    "token": unknown("train_data"),
                    "cache": (given(ref_cache_dir="home:pairs.jsonl"), "--ref_cache_dir .*is a file; give a folder")},
    "kto": {"token": unknown("train_data"), "no target": MODEL["no target"],
            "reference": (given(ref_pretrain="home:foreign"), "its tokens are not")},
    "rm": {"token": unknown("train_data"), "frozen tower": MODEL["frozen tower"], "no target": MODEL["no target"],
           "twice": (given(heads_types="a,a"), "give each score its own name"),
           "pooling": (given(pretrain="home:scorer", pooling_method="attn"), "score.weight is stored as")},
    "prm": {"token": unknown("train_data"), "no target": MODEL["no target"],
            "tokens": (given(reward_tokens="good,bad"), "reward_tokens")},
    "grm": {"token": unknown("train_data"), "no target": MODEL["no target"], "scores": MODEL["scores"]},
    "generate": {name: MODEL[name] for name in ("no weights", "no tensor", "other shape", "scores")} | {
        "long": (given(generate_max_len=1000), "more than the 512 positions"), "token": unknown("prompt_data"),
        "iteration": (given(iter=9, rollout_batch_size=8), "--iter 9: begins at row 72"),
        "other run": (begun, "holds an unfinished run with other options"),
        "reward": (given(score="exatc"), "did you mean exact"),
        "scorer": (given(score="home:model"), "--score .*without a reward head"),
        "reference": (written(UNREADABLE, score="math"), "cannot read the reference"),
    },
    "evaluate": {name: MODEL[name] for name in ("no weights", "other shape", "scores")} | {
        "reward": (given(score="exatc"), "did you mean exact"),
        "scorer": (given(score="home:model"), "--score .*without a reward head"),
        "number": (given(accuracy_part="exact/nosuch"), "--accuracy_part exact/nosuch: .*they give: exact"),
        "token": unknown("eval_data"),
        "long name": (given(output_path="x" * 300), "cannot be created .File name too long"),
    },
    "chat": {name: MODEL[name] for name in ("no weights", "no tokenizer", "scores")},
    "serve_rm": {"no head": (given(reward_pretrain="home:model"), "it is a generative model"),
                 "moments": (given(normalize_reward=True), "no mean and std"),
                 "host": (given(host="203.0.113.1"), "--host 203.0.113.1 --port 0: cannot listen there")},
}  # yapf: disable


@pytest.mark.parametrize("command,name", [(command, name) for command, cases in CASES.items() for name in cases])
def test_a_dry_run_refuses_in_the_words_of_the_run(command, name, home, tmp_path, capfd):
    options, words = CASES[command][name]
    folder = tmp_path / "run"
    wanted = options_of(command, home, folder, **(given_ := options(home, tmp_path)))
    before = contents(tmp_path)
    assert run(command, wanted, "--dry_run") == 2, capfd.readouterr()
    planned = refusal(capfd)
    assert contents(tmp_path) == before, "a dry run writes nothing"
    assert run(command, wanted) == 2, capfd.readouterr()
    assert planned == refusal(capfd) and re.search(words, planned, re.S), (planned, given_)


@pytest.fixture(autouse=True)
def _is_planned_here(monkeypatch):
    """These tests compare the two themselves."""
    monkeypatch.setitem(UNPLANNED, "", "planned by the test")


ABSENT = {  # a package -> the command and the options that need it; the end of the line that installs it
    "vllm": ("train", {"engine_type": "vllm"}, "-e '.[vllm]'"),
    "sglang": ("generate", {"engine_type": "sglang"}, "-e '.[sglang]'"),
    "deepspeed": ("sft", {"strategy": "deepspeed"}, "-e '.[deepspeed]'"),
    "bitsandbytes": ("dpo", {"optim": "adamw_8bit"}, "-e '.[bitsandbytes]'"),
    "wandb": ("rm", {"use_wandb": True}, "-e '.[wandb]'"),
    "peft": ("sft", {"lora_rank": 4}, "-e ."),
    "math_verify": ("train", {"reward": "math"}, "-e ."),
    "trackio": ("kto", {"use_trackio": True}, "-e '.[trackio]'"),
    "mlflow": ("train", {"trackers": "mlflow"}, "mlflow"),
}  # yapf: disable


@pytest.mark.parametrize("package", ABSENT)
def test_an_absent_package_is_named_with_the_line_that_installs_it(package, home, tmp_path, monkeypatch, capfd):
    """No spec of it is found, and its import fails."""
    monkeypatch.setitem(sys.modules, package, None)
    command, more, install = ABSENT[package]
    options = options_of(command, home, tmp_path / "run", **more)
    said = []
    for words in (["--dry_run"], []):
        assert run(command, options, *words) == 2
        said.append(refusal(capfd))
    assert said[0] == said[1] and f"package {package} is not installed; run: pip install {install}" in said[0]


MEDIA: dict[str, tuple[str, bytes, str]] = {  # a package -> the kind of a file that needs it, the file, the extra
    "av": ("video", b"\0\0\0\x18ftypmp42" + bytes(9), "video"),
    "soundfile": ("audio", b"fLaC" + bytes(40), "audio"),
    "soxr": ("audio", write_wav(np.zeros(800, np.float32), 8000), "audio"),
}


@pytest.fixture(name="perceiving", scope="module")
def perceiving_fixture(home):
    """A model that sees and hears."""
    from lightrft.tests.support.tiny_sound import SOUNDS
    return SOUNDS["qwen2_5_omni_thinker"].save(home / "perceiving", tied=True)


@pytest.mark.parametrize("package", MEDIA)
def test_an_absent_package_of_media_is_named(package, perceiving, home, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, package, None)
    kind, content, extra = MEDIA[package]
    (tmp_path / "medium").write_bytes(content)
    row = {"messages": [{"role": "user", "content": [{"type": kind, kind: str(tmp_path / "medium")}]},
                        {"role": "assistant", "content": "2"}]}  # yapf: disable
    options = options_of("sft", home, tmp_path / "run", pretrain=perceiving,
                         train_data=write_rows(tmp_path / "rows.jsonl", [row] * 2))
    said = []
    for words in (["--dry_run"], []):
        assert run("sft", options, *words) == 2
        said.append(refusal(capfd))
    assert said[0] == said[1] and f" {package}" in said[0] and f"-e '.[{extra}]'" in said[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(capfd: Any) -> str:
    """The error of a command, without its name, the time and hints."""
    said = capfd.readouterr()
    found = re.findall(r"(?:error|ERROR): (.*?)(?:\nSee --help.*)?\s*\Z", said.err, re.S)
    assert len(found) == 1, said
    return str(found[0])


def test_a_dry_run_of_a_whole_command_says_what_it_has_not_tried(home, tmp_path, capfd):
    assert run("sft", options_of("sft", home, tmp_path, pretrain="org/absent"), "--dry_run") == 0
    assert "model: org/absent is not on this machine" in capfd.readouterr().out


@pytest.mark.parametrize("options, words", [
    ({}, "build_hf_engine of lightrft.rollout.hf.engine is not there"),
    ({"optim": "other"}, r"--optim other: its builder is called as \(groups, cfg\), and takes \(groups\)"),
    ({"environment": "nosuch"}, "unknown environment 'nosuch'"),
])
def test_a_missing_builder_is_known_without_the_model(options, words, home, tmp_path, monkeypatch, capfd):
    """What is chosen by name is found here, also for a model that another machine has."""
    monkeypatch.setattr(OPTIMIZERS, "_entries", dict(OPTIMIZERS._entries))
    optimizer("other", moments=())(lambda groups: None)
    if not options:
        monkeypatch.delattr(hf_engine, "build_hf_engine")
    wanted = options_of("train", home, tmp_path / "run", pretrain="org/absent", **options)
    assert run("train", wanted, "--dry_run") == 2
    assert re.search(words, refusal(capfd), re.S)


def test_the_form_of_a_key_is_known_before_the_run(home, tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    monkeypatch.setenv("WANDB_MODE", "online")
    for words in (["--dry_run"], []):
        assert run("rm", options_of("rm", home, tmp_path / "run", use_wandb=True), *words) == 2
        said = refusal(capfd)
        assert "--use_wandb: the tracker cannot start: API key must have 40+ characters, has 5." in said
