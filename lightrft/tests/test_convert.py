"""Checkpoints that DeepSpeed and torch.distributed.checkpoint wrote become Hugging Face models; adapters are merged."""
import json
import os
import shutil
import subprocess

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lightrft.cli.convert import convert, main
from lightrft.cli.merge_lora import main as merge_lora, merge
from lightrft.config.rm_schema import RewardModelConfig
from lightrft.models.loader import load_reward_model, load_scorer
from lightrft.models.tokenizer import load_tokenizer, save_tokenizer
from lightrft.strategy.foreign_checkpoints import match_names
from lightrft.tests.support import tiny, tiny_vision
from lightrft.tests.support.launch import ROOT
from lightrft.tests.support.warm import warm_environ, warm_python
from lightrft.types import Experience
from lightrft.utils.errors import UserError

STAGES = (0, 2, 3)
# one step of a DeepSpeed engine of every stage on two ranks, as another program would write it
DEEPSPEED = '''
import os, sys, torch, deepspeed
from transformers import AutoModelForCausalLM
base, out, *stages = sys.argv[1:]
os.environ["DS_ACCELERATOR"] = "cpu"
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, which takes a minute
deepspeed.init_distributed("gloo")
for stage in map(int, stages):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
              "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = torch.arange(8)[None] + 5
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(f"{out}/{stage}")
    if stage < 3:
        torch.save(engine.module.state_dict(), f"{out}/{stage}/now_{os.environ['RANK']}.pt")
'''


@pytest.fixture(name="base", scope="module")
def fixture_base(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("base") / "model", num_hidden_layers=1)


def changed(base):
    """The model with other weights, as after training."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.5
    return model


class Wrapper(nn.Module):
    """What a trainer wraps around a model."""

    def __init__(self, model):
        super().__init__()
        self.policy = model


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("nested", ["plain", "wrapped", "in a dict"])
def test_a_dcp_folder_becomes_a_model(base, tmp_path, nested):
    """Under any prefix, and without its optimizer."""
    model = changed(base)
    if nested == "wrapped":
        state = Wrapper(model).state_dict()
    else:
        state = model.state_dict() if nested == "plain" else {"app": {"model": model.state_dict()}}
    moments = {"optim": {"exp_avg": torch.zeros(3), "step": 7}} if nested != "plain" else {}
    dcp.save({**state, **moments}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    main([str(tmp_path / "dcp"), str(tmp_path / "out"), "--pretrain", str(base)])
    expected = model.state_dict()
    assert weights(tmp_path / "out") and all(
        value.equal(expected[name]) for name, value in weights(tmp_path / "out").items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight.equal(model.lm_head.weight), "the tied head follows"
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1, "that of the umask"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id is not None
    assert loaded.generation_config.eos_token_id == model.generation_config.eos_token_id


@pytest.fixture(scope="module")
def written(base, tmp_path_factory):
    """Folders that DeepSpeed wrote, by stage."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("deepspeed")
    (folder / "step.py").write_text(DEEPSPEED)
    environ = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, "step.py", str(base), str(folder), *map(str, STAGES)], cwd=folder, text=True,
                          capture_output=True, timeout=250,
                          env=os.environ | warm_environ() | environ)  # yapf: disable
    assert done.returncode == 0, done.stderr[-3000:]
    return {stage: folder / str(stage) for stage in STAGES}


@pytest.mark.dist
@pytest.mark.parametrize("stage", STAGES)
def test_a_deepspeed_folder_becomes_a_model(base, written, tmp_path, stage):
    """The float32 weights of its optimizer, which round to those that it computes with."""
    convert(written[stage], tmp_path / "out", str(base))
    tag = (written[stage] / "latest").read_text()
    convert(written[stage] / tag, tmp_path / "again", str(base))
    found, again, before = weights(tmp_path / "out"), weights(tmp_path / "again"), weights(base)
    assert found.keys() == before.keys() and all(found[name].equal(again[name]) for name in found)
    assert not all(found[name].float().equal(before[name].bfloat16().float()) for name in found), "it has learnt"
    if stage < 3:
        now = torch.load(written[stage] / "now_0.pt")
        assert all(found[name].bfloat16().equal(now[name].bfloat16()) for name in found)


def test_a_head_of_its_own_is_not_dropped_for_a_tied_one(base, tmp_path):
    """A copy of the model that ties nothing takes it."""
    state = changed(base).state_dict()
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(
            UserError, match="lm_head.weight differs from model.embed_tokens.weight there.*"
            'whose config.json has "tie_word_embeddings": false'):
        convert(tmp_path / "dcp", tmp_path / "out", str(base))
    shutil.copytree(base, tmp_path / "own")
    config = tmp_path / "own" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    convert(tmp_path / "dcp", tmp_path / "out", str(tmp_path / "own"))
    assert all(tensor.equal(state[name]) for name, tensor in weights(tmp_path / "out").items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").lm_head.weight.equal(state["lm_head.weight"])


WANTED = {"model.layers.0.mlp.weight": 0, "lm_head.weight": 0}


def test_names_are_matched_through_wrappers():
    names = [f"module._fsdp_wrapped_module.{name.replace('mlp', '_orig_mod.mlp')}" for name in WANTED]
    assert match_names(names, WANTED, []) == dict(zip(WANTED, names))
    assert match_names(list(WANTED)[:1], WANTED, ["lm_head.weight"]) == {list(WANTED)[0]: list(WANTED)[0]}


def test_names_that_no_model_reads_are_left_alone():
    """State of an optimizer, also with copies of the weights, and buffers."""
    beside = ["optim.exp_avg", "rng_state.cpu", *(f"optimizer.master.{name}" for name in WANTED), "lr_scheduler.last"]
    buffers = ["model.layers.0.rotary_emb.inv_freq", "model.mask"]
    assert match_names([*WANTED, *beside, *buffers], WANTED, [], ["^model.mask$"]) == {name: name for name in WANTED}
    with pytest.raises(UserError, match="does not have, the first is model.mask"):
        match_names([*WANTED, *buffers], WANTED, [])


@pytest.mark.parametrize("names,told", [
    (["model.layers.0.mlp.weight"], "lacks 1 tensors of the model, the first is lm_head.weight"),
    (["transformer.h.0.weight"], "no tensor that ends with model.layers.0.mlp.weight"),
    (["base_model.model.layers.0.mlp.lora_A.weight"], "it holds LoRA matrices"),
    ([f"{one}.{name}" for one in ("policy", "ref") for name in WANTED], "2 models, under policy., ref.: .* save only"),
    ([*WANTED, "model.layers.1.mlp.weight"], "1 tensors that the model does not have, the first is model.layers.1.mlp"),
])  # yapf: disable
def test_names_that_do_not_fit_are_refused(names, told):
    with pytest.raises(UserError, match=told):
        match_names(names, WANTED, [])


def test_what_cannot_be_converted_is_refused(base, tmp_path, capsys):
    dcp.save(changed(base).state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UserError, match="a DCP folder, which does not name its model"):
        convert(tmp_path / "dcp", tmp_path / "out")
    wide = tiny.save_model(tmp_path / "wide", num_hidden_layers=1, hidden_size=64)
    with pytest.raises(UserError, match="is of another model: .* has shape"):
        convert(tmp_path / "dcp", tmp_path / "out", str(wide))
    scorer = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    dcp.save(scorer.state_dict(), checkpoint_id=tmp_path / "scorer", no_dist=True)
    with pytest.raises(UserError, match="does not have, the first is score.weight. .* a sequence classifier"):
        convert(tmp_path / "scorer", tmp_path / "out", str(base))
    scorer.save_pretrained(tmp_path / "classifier")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "classifier")
    convert(tmp_path / "scorer", tmp_path / "scored", str(tmp_path / "classifier"))
    assert weights(tmp_path / "scored")["score.weight"].equal(scorer.score.weight)
    with pytest.raises(UserError, match="not empty"):
        convert(tmp_path / "dcp", tmp_path, str(base))
    with pytest.raises(UserError, match="holds the DCP folders dcp, scorer: give the one with the model"):
        convert(tmp_path, tmp_path / "out", str(base))
    (tmp_path / "verl" / "actor").mkdir(parents=True)
    (tmp_path / "verl" / "actor" / "model_world_size_2_rank_0.pt").write_bytes(b"x")
    with pytest.raises(UserError, match="actor/model_world_size_2_rank_0.pt is a shard of verl.*--local_dir .*/actor "):
        convert(tmp_path / "verl", tmp_path / "out", str(base))
    (data, ), states = (tmp_path / "dcp").glob("*.distcp"), tmp_path / "ds" / "mp_rank_00_model_states.pt"
    states.parent.mkdir()
    for file, content in ((data, data.read_bytes()[:1000]), (tmp_path / "dcp" / ".metadata", b"x"), (states, b"x")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"{file.parent.name} cannot be read: .* missing or damaged"):
            convert(file.parent, tmp_path / "out", str(base))
    with pytest.raises(SystemExit) as done:
        main([str(tmp_path / "absent"), str(tmp_path / "out")])
    assert done.value.code == 2 and "absent: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_CLS"])
def test_an_adapter_is_merged(base, tmp_path, task):
    is_rm = task == "SEQ_CLS"
    kind = AutoModelForSequenceClassification if is_rm else AutoModelForCausalLM
    model = kind.from_pretrained(base, **({"num_labels": 1} if is_rm else {}))
    model.save_pretrained(tmp_path / "start")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "start")
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type=task)).eval()
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    tuned.save_pretrained(tmp_path / "adapter")
    merge(str(tmp_path / "start"), tmp_path / "adapter", tmp_path / "out", is_rm)
    merged, ids = kind.from_pretrained(tmp_path / "out").eval(), torch.arange(8)[None] + 5
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, tuned(ids).logits, atol=1e-4)
        assert not torch.allclose(merged(ids).logits, kind.from_pretrained(tmp_path / "start")(ids).logits, atol=1e-2)
    folders = {"model_path": "start", "lora_path": "adapter", "output_path": "half"}  # OpenRLHF's lora_combiner
    merge_lora([*(word for name, folder in folders.items() for word in (f"--{name}", str(tmp_path / folder))),
                *(["--is_rm", "--bf16"] if is_rm else ["--ds.param_dtype", "bf16"])])  # yapf: disable
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(UserError, match="no adapter_config.json"):
        merge(str(base), tmp_path / "start", tmp_path / "other")
    wide = tiny.save_model(tmp_path / "wide", num_hidden_layers=1, hidden_size=64)
    if not is_rm:
        sizes = r"lora_A.*torch.Size\(\[\d+, 32\]\).*torch.Size\(\[\d+, 64\]\)"
        with pytest.raises(UserError, match=f"cannot be merged into .*size mismatch for .*{sizes}"):
            merge(str(wide), tmp_path / "adapter", tmp_path / "other")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("name, options", [
    ("head", {"target_modules": ["lm_head", "q_proj"]}), ("embedding", {"target_modules": ["embed_tokens"]}),
    ("saved head", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ("saved embedding", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]})])  # yapf: disable
def test_adapters_on_tied_weights(base, tmp_path, name, options):
    """They change one of the two uses: the merged model has two weights."""
    model = AutoModelForCausalLM.from_pretrained(base)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tuned, ids = get_peft_model(model, LoraConfig(r=2, **options)).eval(), torch.arange(8)[None] + 5
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight += 0.1 * torch.randn_like(weight) * weight.requires_grad
    tuned.save_pretrained(tmp_path / "adapter")
    merge(str(base), tmp_path / "adapter", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, tuned(ids).logits, atol=1e-4, rtol=1e-4)
    assert merged.lm_head.weight is not merged.model.embed_tokens.weight
    described = tmp_path / "adapter" / "adapter_config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"ensure_weight_tying": True}))
    if "modules_to_save" not in options:  # as PEFT writes them, with LoRA for both
        with pytest.raises(UserError, match="one LoRA is for model.embed_tokens and lm_head"):
            merge(str(base), tmp_path / "adapter", tmp_path / "other")


def test_a_reward_model_without_a_trained_head_is_refused(base, tmp_path):
    """PEFT gives the head of a classifier to its adapter, but not without a task."""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    for task in ("SEQ_CLS", None):
        tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type=task))
        tuned.save_pretrained(tmp_path / f"{task}")
        model = tuned.unload()
    merge(str(base), tmp_path / "SEQ_CLS", tmp_path / "out", is_rm=True)
    assert weights(tmp_path / "out")["score.weight"].equal(model.score.weight)
    with pytest.raises(UserError, match="has score.weight, so the scores would be random.* SAVE_PATH/hf is the merged"):
        merge(str(base), tmp_path / "None", tmp_path / "other", is_rm=True)


def test_the_head_of_another_program_on_a_model_that_sees(tmp_path):
    """One score beside the adapter becomes a reward model of lightrft: this family has no classifier."""
    pytest.importorskip("torchvision")
    base = tiny_vision.save_model(tmp_path / "base", "qwen2_5_vl", tied=True)
    save_tokenizer(load_tokenizer(str(base)), base, str(base))
    head = RewardModelConfig(pretrain=str(base))
    exp = Experience.pack([[5, 6, 7], [8, 9]], [[True] * 3, [True] * 2])
    for name, save in (("score", ["score"]), ("other", ["score", "norm"]), ("none", None)):
        scorer = load_reward_model(head)
        tuned = get_peft_model(scorer.hf_model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=save))
        with torch.no_grad():
            for weight in tuned.parameters():
                weight += weight.requires_grad * 0.1
        tuned.save_pretrained(tmp_path / name)
        if name != "score":
            with pytest.raises(UserError,
                               match="besides LoRA it has .*if lightrft rm made it, or if its head is score"):
                merge(str(base), tmp_path / name, tmp_path / "never", is_rm=True)
            continue
        merge(str(base), tmp_path / name, tmp_path / "out", is_rm=True)
        scorer.model = tuned.merge_and_unload()
        with torch.no_grad():
            expected, found = scorer.eval()(exp), load_scorer(str(tmp_path / "out"))(exp)
        assert torch.allclose(found, expected, atol=1e-5) and expected.abs().min() > 1e-3
