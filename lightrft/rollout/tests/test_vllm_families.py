"""Every family on its way into vLLM, the real one on a CPU: right weights pass the proof, wrong ones do not."""
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightrft.config.schema import ModelConfig, RolloutConfig
from lightrft.models.loader import load_actor
from lightrft.ops.rounding import Arithmetic, BANDS
from lightrft.rollout import SamplingParams
from lightrft.rollout.tests import test_vllm_engine
from lightrft.rollout.vllm import weights as vllm_weights
from lightrft.rollout.vllm.engine import VLLMEngine
from lightrft.rollout.vllm.launch import engine_arguments, process_state_kept
from lightrft.rollout.vllm.media import VLLMMedia
from lightrft.rollout.weight_sync.verify import WeightSyncError, get_weight_sync_verifier
from lightrft.tests.support import tiny, tiny_vision
from lightrft.tests.support.engine_rig import (EXACT, NEW, STOPS, frozen_weights_come_once, names_a_fault,
                                               names_faults_of_experts, requests)
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.faulty_sync import OF_STREAMS, TARGET, TWIN
from lightrft.tests.support.hybrids import IN_FLOAT32, STORED, SYNCED
from lightrft.tests.support.quick_starts import quick_starts
from lightrft.tests.support.vision_rig import RawMedia
from lightrft.types import Prompt
from lightrft.utils.env import World
from lightrft.utils.errors import UserError
from lightrft.utils.timer import Timer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
         "initializer_range": 0.12}  # yapf: disable
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
WINDOW = {"sliding_window": 8}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = {
    "qwen2 tied": ("qwen2", TIED), "qwen2 untied": ("qwen2", UNTIED), "qwen3": ("qwen3", UNTIED),
    "llama": ("llama", UNTIED), "mistral": ("mistral", UNTIED | WINDOW), "gemma": ("gemma", TIED),
    "gemma2": ("gemma2", TIED | WINDOW), "gemma3": ("gemma3_text", TIED | WINDOW), "qwen3_moe": ("qwen3_moe", MOE),
}  # yapf: disable
STATES = {"hidden_size": 128, "head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
          "initializer_range": 0.06}  # yapf: disable
SMALL = SIZES | {"mamba_expand": 1, "initializer_range": 0.06}
LONE = TARGET.replace("q_proj", "o_proj")  # vLLM fuses it with no other
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
HEADS = {"A_log", "D", "dt_bias"}
STATE = re.compile(r"layers\.0\.(mamba|mixer|conv)\.")
SHORT = [Group([40 + i] * (1 + i), [i]) for i in range(3)]  # a prompt of one token begins without a state too
PROMPTS = [Prompt(str(i), list(range(40 + 5 * i, 80 + 6 * i)), "") for i in range(4)]  # longer than a block of 32


class Rig(test_vllm_engine.Rig):
    """Its syncs are proven, with fingerprints and canaries."""

    def __init__(self, folder, *engine_args):
        super().__init__(folder, "block_size=32", *engine_args)
        with pytest.raises(RuntimeError, match="has no weights yet"):
            generate(self.vllm, requests(), SamplingParams(NEW))

    def sync(self):
        if self.proof is None:
            cfg = RolloutConfig(sync_canary_every=1)
            self.proof = get_weight_sync_verifier(cfg, self.strategy, self.prepared, self.vllm, PROMPTS,
                                                  Arithmetic("cpu", self.kind), Timer())
        return super().sync()


class HalfRig(Rig):
    """In bfloat16."""
    kind = "bf16"


@pytest.fixture(scope="module", autouse=True)
def models_are_looked_at_here():
    """vLLM asks another process about a class of models that it sees for the first time, to keep CUDA out of this one:
    15 seconds for each family."""
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield


@pytest.fixture
def family(request, tmp_path, monkeypatch):
    """An engine that ends with the test."""
    model_type, changes = FAMILIES[request.param]
    monkeypatch.setitem(tiny.FAMILIES, request.param, (model_type, SIZES | changes))
    rig = Rig(tiny.save_model(tmp_path, request.param))
    yield rig
    with quick_starts():
        rig.vllm.shutdown()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One engine for all faults."""
    rig = Rig(tiny.save_model(tmp_path_factory.mktemp("model"), **SIZES))
    yield rig
    rig.vllm.shutdown()


@pytest.fixture
def rig(engine, monkeypatch):
    """After a right sync, with other weights for the next one; what a test patches is put back."""
    for owner, name in ((engine.vllm, "update_weights"), (engine.vllm.model, "load_weights")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    engine.proof = None
    engine.sync()
    engine.learn()
    return engine


def test_a_family_without_code_in_vllm_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(tiny.FAMILIES, "olmo2", ("olmo2", SIZES))
    with pytest.raises(UserError, match="does not implement this model.*--engine_type hf"):
        Rig(tiny.save_model(tmp_path, "olmo2"))


def without(name, call):
    """``call``, which takes a stream of weights, with a stream that lacks one."""
    return lambda stream, *args: call(((one, tensor) for one, tensor in stream if one != name), *args)


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_weights_arrive(family):
    """Before and after all of them changed; all can be read back."""
    params = SamplingParams(NEW, stop_token_ids=STOPS)
    for _ in range(2):
        assert family.sync() < 1e-5
        mean, largest = family.gap(requests(2), params)
        assert mean < EXACT and largest < 2e-5, (mean, largest)
        family.learn()
    assert set(family.vllm.weights.shapes) == set(family.vllm.weight_dtypes()) == set(family.proof.fingerprints.trainer)


@pytest.mark.parametrize("name", SYNCED)
def test_weights_of_layers_with_state_arrive(name, tmp_path):
    """In bfloat16: vLLM has no other kernel for them on a CPU, and only for heads of 128. All are compared, also those
    that it fuses; the canaries have the limits of that arithmetic. A router that rounds otherwise takes another expert,
    which has no limit at a single token, and moves the mean (0.058 was seen, with other weights)."""
    count, (mean_of_canaries, most) = SYNCED[name], (0.1, math.inf) if name == "qwen3_5_moe" else (0.05, 0.5)
    rig, noise = HalfRig(tiny.save_model(tmp_path, name, **STATES)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in rig.actor.named_parameters():
            if "linear_attn" in name and weight.ndim == 1:  # the same value everywhere would hide a wrong order
                weight.uniform_(0.5, 1.5, generator=noise)
    for _ in range(2):
        assert 1e-4 < rig.sync() < mean_of_canaries
        mean, largest = rig.gap(requests(2), SamplingParams(NEW, stop_token_ids=STOPS))
        assert mean < BANDS["bf16"].mean and largest < most, (mean, largest)
        rig.learn()
    compared = set(rig.proof.fingerprints.trainer)
    assert set(rig.vllm.weights.shapes) == set(rig.vllm.weight_dtypes()) == compared
    names = [name for name in compared if "linear_attn" in name]
    assert len(names) == count
    for name in names:
        names_a_fault(rig, "rows", name)
    rig.vllm.shutdown()


@pytest.mark.whole
def test_a_model_that_sees_and_has_layers_with_state(tmp_path, monkeypatch):
    """Qwen3.5 as it is published: all weights arrive, those of the tower too, and pictures are seen."""
    from lightrft.tests.support import vllm_media  # which imports this module

    class Seeing(vllm_media.Rig):
        kind = "bf16"

    family = vllm_media.FAMILIES["qwen3_5"]
    rope = family.config["text_config"]["rope_parameters"] | {"mrope_section": [8, 4, 4]}
    wide = {"text_config": family.config["text_config"] | STATES | {"rope_parameters": rope},
            "vision_config": family.config["vision_config"] | {"out_hidden_size": 128}}  # yapf: disable
    monkeypatch.setitem(vllm_media.FAMILIES, "qwen3_5", replace(family, config=family.config | wide))
    rig = Seeing(tmp_path, "qwen3_5")
    for _ in range(2):
        assert 1e-4 < rig.sync() < 0.05
        mean, _ = rig.gap(requests(2), SamplingParams(NEW, stop_token_ids=STOPS))
        seen, unseen = rig.picture_gap()
        assert mean < BANDS["bf16"].mean and seen < 0.5 < unseen, (mean, seen, unseen)
        rig.learn()
    assert set(rig.vllm.weights.shapes) == set(rig.proof.fingerprints.trainer)
    assert any(".visual." in name for name in rig.proof.fingerprints.trainer)
    rig.vllm.shutdown()


@pytest.mark.parametrize("name, changes", [
    ("granitemoehybrid", EXPERTS | {"time_step_limit": [0.5, 0.7]}),
    *[pytest.param(name, {}, marks=pytest.mark.whole) for name in IN_FLOAT32],
])  # yapf: disable
def test_weights_of_layers_with_state_arrive_in_float32(name, changes, tmp_path):
    """To its rounding. vLLM stores the decay of a head of Mamba 2 in place of its logarithm. Some heads have time steps
    below the limits, also of Nemotron-H."""
    mamba_2, rig = name in STORED, Rig(tiny.save_model(tmp_path, name, **SMALL, **changes))
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in rig.actor.named_parameters():
            if STATE.search(name) and weight.ndim == 1:
                weight.uniform_(0.5, 1.5, generator=noise)
            if name.endswith("dt_bias"):
                weight[::2] = -9
    for _ in range(2):
        assert rig.sync() < 1e-5
        for asked in (requests(2), SHORT):
            mean, largest = rig.gap(asked, SamplingParams(NEW, stop_token_ids=STOPS))
            assert mean < EXACT and largest < 2e-5, (mean, largest)
        rig.learn()
    compared = set(rig.proof.fingerprints.trainer)
    assert set(rig.vllm.weights.shapes) == set(rig.vllm.weight_dtypes()) == compared
    names = [name for name in compared if STATE.search(name)]
    assert {STATE.sub("", name).removeprefix("model.") for name in names} >= (HEADS if mamba_2 else {"conv.weight"})
    for name in names:
        names_a_fault(rig, "rows", name)
    with quick_starts():
        rig.vllm.shutdown()


@pytest.mark.parametrize("family", ["qwen3_moe"], indirect=True)
def test_a_wrong_expert_is_named(family, monkeypatch):
    """vLLM lays experts out for its kernel: they are compared there, and that is what the kernel reads."""
    names_faults_of_experts(family)
    load = family.vllm.model.load_weights
    family.vllm.model.load_weights = without("model.layers.0.mlp.experts.down_proj", load)
    with pytest.raises(ValueError, match="the trainer does not have, e.g. 'model.layers.0.mlp.experts.*w2_weight'"):
        family.sync()
    family.vllm.model.load_weights = load
    with monkeypatch.context() as patch:
        patch.setattr(vllm_weights, "are_experts", lambda layers: False)  # the layout would not be made anew
        with pytest.raises(WeightSyncError, match="layers.0.mlp.experts.gate_up_proj .* 4 of 24 weights differ"):
            family.sync()
    family.sync()
    before, _ = family.gap(requests(2), SamplingParams(NEW))
    next(iter(family.vllm.weight_map.held["model.layers.0.mlp.experts.down_proj"].values())).view.mul_(1.01)
    after, _ = family.gap(requests(2), SamplingParams(NEW))
    assert after > 1e-4 > before, "what is looked at is not what is computed with"


@pytest.mark.parametrize("kind", OF_STREAMS)
def test_a_faulty_sync_is_named(rig, kind):
    names_a_fault(rig, kind)


def test_frozen_weights_come_once(rig):
    """The first layer, which vLLM fuses."""
    frozen_weights_come_once(rig, "layers.0", TWIN)


def test_a_tensor_that_never_comes(rig):
    rig.vllm.update_weights = without(TARGET, rig.vllm.update_weights)
    with pytest.raises(ValueError, match=f"1 weights did not arrive, the first is '{re.escape(TARGET)}'"):
        rig.sync()


def test_a_tensor_that_vllm_passes_over(rig):
    rig.vllm.model.load_weights = without(LONE, rig.vllm.model.load_weights)
    with pytest.raises(ValueError, match=f"vLLM has weights that the trainer does not have, e.g. '{re.escape(LONE)}'"):
        rig.sync()


def test_a_part_of_a_fused_tensor_that_vllm_passes_over(rig):
    """It does not notice."""
    rig.vllm.model.load_weights = without(TARGET, rig.vllm.model.load_weights)
    with pytest.raises(WeightSyncError, match=re.escape(f"{TARGET} (layer 1) differs") + ".* still has the values"):
        rig.sync()


def test_no_engine_without_a_place_for_every_weight(rig):
    """It is refused before any weight is sent, whatever is proven later."""

    def started(**more):
        return VLLMEngine(rig.vllm.native, rig.vllm.weights._replace(shapes=rig.vllm.weights.shapes | more), ())

    with pytest.raises(UserError, match=r"cannot load model.layers.0.mlp.third.weight: There is no module"):
        started(**{"model.layers.0.mlp.third.weight": torch.Size([2, 2])})
    rig.vllm.model.load_weights = without(LONE, rig.vllm.model.load_weights)
    with pytest.raises(UserError, match=f"vLLM does not hold 4096 of the 4096 elements of {re.escape(LONE)}: "):
        started()


def test_a_prefix_cache_that_outlives_the_update(rig, monkeypatch):
    """All weights are right; keys and values of the canaries' prompts are those of the old ones."""
    monkeypatch.setattr(rig.vllm.native, "reset_prefix_cache", lambda: True)
    with pytest.raises(WeightSyncError, match="canaries differ .* a cache survived the update"):
        rig.sync()
    monkeypatch.undo()
    assert rig.sync() < 1e-5


def test_a_video_in_bfloat16_has_the_positions_of_the_trainer(tmp_path):
    """vLLM's processing, without an engine: it rounds pixels, and not the seconds that positions are computed of."""
    pytest.importorskip("torchvision", reason="needs torchvision: make test installs it")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.renderers import renderer_from_config
    actor = load_actor(ModelConfig(pretrain=str(tiny_vision.save_model(tmp_path, "qwen2_5_vl", True))))
    config, mark = actor.hf_model.config, tiny_vision.FAMILIES["qwen2_5_vl"].placeholders["video"]
    source = actor.modality.media = RawMedia(tmp_path, {"video": mark})
    source.most, source.rate = {"video":
                                1}, 2 / 0.3749  # in bfloat16 0.375 s between grids: at 4 a second another index
    ids = source.prompt(f"{mark} what", ("video:0", ))["input_ids"][0].tolist()
    unexpanded = source.processor.tokenizer(f"{mark} what").input_ids
    prompt = Prompt("", ids, "", media=("video:0", ), unexpanded_ids=unexpanded)
    with process_state_kept():
        given = engine_arguments(RolloutConfig(prompt_max_len=64, generate_max_len=8), config, torch.device("cpu"),
                                 True, World(), 9, source.most)
        of = EngineArgs(**given).create_engine_config()
        native = SimpleNamespace(renderer=renderer_from_config(of), model_config=of.model_config)
        found = VLLMMedia(native, source).rendered(prompt)
    (item, ), (at, ) = found["mm_kwargs"]["video"], found["mm_placeholders"]["video"]
    tensors = item.get_data()
    assert tensors["pixel_values_videos"].dtype == torch.bfloat16
    seconds = tensors["second_per_grid_ts"]
    assert seconds.dtype == torch.float32 and int(2 * 4 * seconds) != int(2 * 4 * seconds.bfloat16())
    model = Qwen2_5_VLForConditionalGeneration.__new__(Qwen2_5_VLForConditionalGeneration)
    vars(model)["config"] = of.model_config.hf_config
    theirs, _ = model.get_mrope_input_positions(ids, [MultiModalFeatureSpec(item, "video", "video:0", at)])
    assert torch.equal(theirs, actor.modality.prompt_positions(actor.hf_model, ids, prompt.media))
