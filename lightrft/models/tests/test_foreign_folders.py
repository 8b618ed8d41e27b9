"""Folders of other people: an adapter beside the model, an invalid generation config, code, pickles."""
import ast
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer, GenerationConfig

from lightrft import SFT
from lightrft.cli.export import export
from lightrft.cli.merge_lora import merge
from lightrft.config.rm_schema import RewardModelConfig
from lightrft.config.schema import ModelConfig
from lightrft.models.generation_config import fault, valid_part
from lightrft.models.loader import load_actor, load_critic, load_exported, load_reward_model, load_scorer
from lightrft.models.tokenizer import load_tokenizer
from lightrft.tests.support import tiny
from lightrft.tests.support.field import write_model
from lightrft.tests.support.launch import ROOT
from lightrft.tests.support.payload import Payload
from lightrft.tests.support.runs import no_picture  # noqa: F401  (a fixture)
from lightrft.utils.errors import UserError
from lightrft.utils.hub import read_pretrained
from lightrft.utils.logging import get_logger

INVALID = {"do_sample": False, "temperature": 0.6, "top_p": 0.95}
DATA = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(4)]
SMALL = {"max_steps": 1, "train_batch_size": 2, "max_len": 64}
LOADS = {
    "policy": lambda path: load_actor(ModelConfig(pretrain=path)),
    "deferred": lambda path: load_actor(ModelConfig(pretrain=path), deferred=True),
    "reference": lambda path: load_actor(ModelConfig(pretrain="other"), path, train=False),
    "critic": lambda path: load_critic(ModelConfig(critic_pretrain=path)),
    "reward model": lambda path: load_reward_model(RewardModelConfig(pretrain=path)),
    "scorer": load_scorer,
    "export": load_exported,
    "tokenizer": load_tokenizer,
}  # what every command and engine starts with


@pytest.fixture(name="both", scope="module")
def fixture_both(tmp_path_factory):
    """A model and its adapter in one folder, and each alone."""
    home = tmp_path_factory.mktemp("both")
    model = AutoModelForCausalLM.from_pretrained(tiny.save_model(home / "model"))
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    tuned.save_pretrained(home / "adapter")
    shutil.copytree(home / "model", home / "both")
    shutil.copytree(home / "adapter", home / "both", dirs_exist_ok=True)
    return home


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("folder", ["both", "adapter"])
def test_an_adapter_beside_a_model_is_refused_with_the_command_that_merges_it(both, load, folder):
    if folder == "adapter" and load is load_tokenizer:
        pytest.skip("it holds no tokenizer")
    with pytest.raises(UserError,
                       match=f"{folder}.* adapter.*lightrft merge_lora --model_path .* --lora_path .*/{folder}"):
        load(str(both / folder))


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("name,words", [("both", "holds a model and an adapter"),
                                        ("adapter", "is an adapter without its model")])
def test_an_adapter_of_the_hub_is_refused_before_weights_are_read(both, load, name, words, tmp_path, monkeypatch):
    """In the cache, whose weights here are no file of weights; beside a model, or alone."""
    if name == "adapter" and load is load_tokenizer:
        pytest.skip("it holds no tokenizer")
    snapshot = tmp_path / f"models--org--{name}" / "snapshots" / ("a" * 40)
    shutil.copytree(both / name, snapshot)
    (snapshot / "model.safetensors").write_text("never read")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("a" * 40)
    for constant, value in (("HF_HUB_CACHE", str(tmp_path)), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(huggingface_hub.constants, constant, value)
    with pytest.raises(UserError, match=f"^'org/{name}' {words}.*lightrft merge_lora"):
        load(f"org/{name}")


def test_that_command_merges_it_once(both, tmp_path):
    merge(str(both / "both"), both / "both", tmp_path / "merged")
    merge(str(both / "model"), both / "adapter", tmp_path / "expected")
    merged, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "expected"))
    assert merged.keys() == expected.keys() and all(merged[name].equal(expected[name]) for name in merged)
    load_actor(ModelConfig(pretrain=str(tmp_path / "merged")))
    assert len({file.stat().st_mode for file in (tmp_path / "merged").iterdir()}) == 1, "that of the umask"


def test_a_run_from_an_invalid_generation_config_ends_with_a_whole_model(tmp_path, caplog, monkeypatch,
                                                                         no_picture):  # noqa: F811
    """It says so at the start, and what it writes is valid; so is what export writes."""
    base = write_model(tmp_path / "base", "qwen2", INVALID | {"eos_token_id": 7})
    monkeypatch.setattr(get_logger(), "propagate", True)
    run = SFT(base, DATA, save_path=str(tmp_path / "run"), **SMALL).train()
    assert "is invalid (`temperature`: `do_sample` is not set" in caplog.text
    assert "exports leave out temperature, top_p" in caplog.text
    export(run.folder, tmp_path / "out")
    for folder in (run.folder / "hf", tmp_path / "out"):
        written = GenerationConfig.from_pretrained(folder)
        written.validate(strict=True)
        assert (written.do_sample, written.temperature, written.eos_token_id) == (False, None, 7)
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
            file.name for file in folder.iterdir()}  # yapf: disable
        assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "that of the umask"


@pytest.mark.parametrize("values,left", [
    (INVALID, {"do_sample": False}),
    ({"num_return_sequences": 2, "eos_token_id": [1, 2]}, {"eos_token_id": [1, 2]}),
    ({"early_stopping": True, "num_beams": 2, "pad_token_id": -1}, {"early_stopping": True, "num_beams": 2}),
    ({"temperature": 0.5, "do_sample": True}, {"temperature": 0.5, "do_sample": True}),
    ({"max_new_tokens": 0, "cache_implementation": "none of these"}, {}),
])  # yapf: disable
def test_as_much_of_a_generation_config_as_is_valid(values, left, tmp_path):
    """Also where transformers does not even load it."""
    config, names = valid_part(values)
    config.save_pretrained(tmp_path)
    assert set(names) == values.keys() - left.keys() and (fault(values) is None) == (not names)
    assert {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"} == left
    model = tiny.save_model(tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(values))
    load_exported(str(model)).save_pretrained(tmp_path / "out")


def test_a_generation_config_that_cannot_be_read_is_an_error(tmp_path):
    model = tiny.save_model(tmp_path)
    for content, told in (("[1]", "holds no JSON object"), ("{", "is no JSON")):
        (model / "generation_config.json").write_text(content)
        with pytest.raises(UserError, match=f"generation_config.json {told}"):
            load_tokenizer(str(model))


def test_settings_of_older_models_are_in_their_config(tmp_path):
    model = tiny.save_model(tmp_path / "model")
    (model / "generation_config.json").unlink()
    tiny.change_json(model / "config.json", **INVALID)
    load_exported(str(model)).save_pretrained(tmp_path / "out")


CODE = """from pathlib import Path
Path({file!r}).write_text("ran")
from transformers import {base} as Own
"""


@pytest.mark.parametrize("kind,file,base", [
    (AutoConfig, "config.json", "Qwen2Config"), (AutoModelForCausalLM, "config.json", "Qwen2ForCausalLM"),
    (AutoTokenizer, "tokenizer_config.json", "PreTrainedTokenizerFast"),
    (AutoProcessor, "processor_config.json", "ProcessorMixin"),
])  # yapf: disable
def test_code_of_a_model_never_runs(kind, file, base, tmp_path, monkeypatch):
    """Although somebody answers yes to everything; a tokenizer is then read without it."""
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    model, ran = tiny.save_model(tmp_path / "model"), tmp_path / "ran"
    (model / "own.py").write_text(CODE.format(file=str(ran), base=base))
    unknown = {"config.json": {"model_type": "own"}, "tokenizer_config.json": {"tokenizer_class": "Own"},
               "processor_config.json": {"processor_class": "Own"}}[file]  # yapf: disable
    (model / file).touch()
    content = json.loads((model / file).read_text() or "{}") | unknown
    (model / file).write_text(json.dumps(content | {"auto_map": {kind.__name__: "own.Own", "AutoConfig": "own.Own"}}))
    without = kind is AutoTokenizer
    with nullcontext() if without else pytest.raises((ValueError, OSError), match="lightrft never runs code|Unrecog"):
        read_pretrained(kind, model)
    assert not ran.exists()


def test_everything_is_loaded_without_code():
    """By the function that says so, or with the word; generation configs and adapters of PEFT have no code."""
    free = {"GenerationConfig", "PeftModel"}
    for file in sorted((ROOT / "lightrft").rglob("*.py")):
        if "tests" in file.parts or not re.search(r"from_(pretrained|config)\(", file.read_text()):
            continue
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if name not in ("from_pretrained", "from_config") or ast.unparse(
                    call.func) in (*(f"{one}.from_pretrained" for one in free), "MetricSinks.from_config"):
                continue
            words = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert words.get("trust_remote_code") == "False", f"{file}:{call.lineno}"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_a_pickle_beside_a_model_never_runs(name, both, tmp_path):
    folder, ran = tmp_path / "copy", tmp_path / "ran"
    shutil.copytree(both / ("model" if name == "pytorch_model.bin" else "adapter"), folder)
    (folder / name.replace("pytorch_", "").replace(".bin", ".safetensors")).unlink()
    torch.save({"weight": Payload(ran)}, folder / name)
    with pytest.raises(UserError, match="no plain pickle of tensors: reading it could run code"):
        if name == "pytorch_model.bin":
            load_actor(ModelConfig(pretrain=str(folder)))
        else:
            merge(str(both / "model"), folder, tmp_path / "out")
    assert not Path(ran).exists()
