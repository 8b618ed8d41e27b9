"""ActorVL of every family that sees or hears: packed as alone, as Hugging Face computes it; generation from media."""
import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT,
                                                    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
from lightrft.config.schema import ModelConfig
from lightrft.datasets.media import MediaRules
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.rows import DataError
from lightrft.models.actor_modality import FAMILIES
from lightrft.models.architectures import modality_of, REFUSED
from lightrft.models.freezing import freeze
from lightrft.models.loader import load_actor
from lightrft.models.lora import hf_name
from lightrft.models.shared_prompts import forward_row
from lightrft.models.stateful import stateful
from lightrft.models.towers import part_of, rope_of_grids
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.hf.cache_plan import check_decoder
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.hf.fused_layers import FusedCalls
from lightrft.tests.support import tiny_vision
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.media_rig import decoded, MediaRig
from lightrft.tests.support.recurrence import in_double
from lightrft.types import MediaTensors
from lightrft.utils.errors import UserError

EXACT = 1e-5
pytest.importorskip("torchvision")


@pytest.fixture(scope="module", params=tiny_vision.FAMILIES)
def rig(request, tmp_path_factory):
    family = tiny_vision.FAMILIES[request.param]
    return MediaRig(family.save(tmp_path_factory.mktemp(request.param), tied=False), family.placeholders, family)


def gradients(rig, batches):
    """Gradients by name, summed over ``batches``, which read the same parameters, or sharded ranks would not meet. A
    tower may have layers whose output is not read."""
    total = {}
    for samples in batches:
        rig.actor.zero_grad(set_to_none=True)
        rig.logprobs(samples).sum().backward()
        found = {name: one.grad for name, one in rig.actor.named_parameters() if one.grad is not None}
        assert found.keys() == (total or found).keys()
        total = {name: grad + total.get(name, 0) for name, grad in found.items()}
    return total


def assert_equal_up_to_rounding(gradients, others):
    """Compare norms, not elements: those of Gemma-4 are sums of terms up to 50, and each CPU rounds them differently.

    Measured: 7e-6 of the norm at most; another token in one response is off by 1e-2 and more.
    """
    for name, grad in gradients.items():
        if not name.endswith("k_proj.bias"):  # its true gradient is 0
            off, size = (grad - others[name]).norm().item(), others[name].norm().item()
            assert off <= 5e-5 * size + 1e-5, f"{name}: off by {off:.2e} of {size:.2e}"


def test_packed_is_alone_is_hugging_face(rig):
    samples = rig.samples()
    with torch.no_grad():
        packed = rig.logprobs(samples)
        alone = torch.cat([rig.logprobs([sample]) for sample in samples])
    assert (packed - alone).abs().max() < EXACT
    assert (packed - rig.plain(samples)).abs().max() < EXACT
    prompt, response, _ = samples[0]
    with pytest.raises(UserError, match="tokens for .* features"):
        rig.logprobs([(prompt, response, ()), *samples[1:]])


def test_gradients_do_not_depend_on_the_cut(rig):
    """Each tower runs once per unique picture; a batch without one passes a blank, which adds 0."""
    samples = rig.samples()
    whole, parts = gradients(rig, [samples]), gradients(rig, [[sample] for sample in samples])
    assert_equal_up_to_rounding(whole, parts)
    blank = gradients(rig, [samples[1:2]])
    assert blank.keys() == parts.keys() == whole.keys()
    paths = tuple(tower.path for tower in rig.actor.modality.family.towers.values())
    tower = [name for name in blank if name.removeprefix("model.").startswith(paths)]
    assert tower and not any(blank[name].any() for name in tower)
    assert all(whole[name].any() for name in tower if not name.endswith("k_proj.bias"))


def test_every_part_is_frozen_or_adapted_by_its_name(rig):
    """Parts cover the model, towers are where the table says, and adapters of each part have gradients."""
    actor, family = rig.actor, rig.actor.modality.family
    paths = {part_of(kind): tower.path for kind, tower in family.towers.items()}
    parts = actor.modality.parts(rig.hf, [name for name, _ in rig.hf.named_parameters()])
    assert parts.keys() == {"language", "projector", *paths} and all(parts.values())
    assert {name for names in parts.values() for name in names} == {name for name, _ in rig.hf.named_parameters()}
    for part, names in parts.items():
        freeze(actor.model, [part], actor.modality)
        assert {name for name, one in rig.hf.named_parameters() if not one.requires_grad} == {*names}
        actor.requires_grad_(True)
        assert all(name.startswith(paths[part]) for name in names) if part in paths else True
    adapted = load_actor(ModelConfig(pretrain=str(rig.folder), lora_rank=2, target_modules=[*parts]))
    adapted.modality.media = rig.source
    adapted(rig.pack(rig.samples()))[0].sum().backward()
    learns = [hf_name(name.removeprefix("model.")) for name, one in adapted.named_parameters()
              if "lora_B" in name and one.grad is not None and one.grad.any()]  # yapf: disable
    for part, names in parts.items():
        matrices = tuple(name.removesuffix("weight").removesuffix("mm_input_projection_") for name in names)
        assert any(name.startswith(matrices) for name in learns), part


@pytest.fixture(name="positions")
def positions_fixture(rig):
    """Positions of each pass of a tower, at its first layer."""
    seen, hooks = [], []
    for path in {tower.path for tower in rig.actor.modality.family.towers.values()}:
        named = rig.hf.get_submodule(path[:-1]).named_modules()
        layers = next(module for name, module in named if name.endswith(("layers", "blocks", "layer")))
        hooks.append(layers[0].register_forward_pre_hook(
            lambda _, args, given: seen.append((args or tuple(given.values()))[0].shape[:-1].numel()),
            with_kwargs=True))  # yapf: disable
    yield seen
    for hook in hooks:
        hook.remove()


def test_positions_for_each_token_are_those_of_the_table(rig, positions):
    """Up to what padding, classes and breaks between rows add."""
    for kind, tower in rig.actor.modality.family.towers.items():
        positions.clear()
        with torch.no_grad():
            found = tower.of(rig.hf, kind, [rig.source.tensors(f"{kind}:0")])
        share = sum(positions) / sum(map(len, found.each))
        per_token = tower.per_token(rig.hf.config)
        assert -0.5 <= share - per_token < max(1, 0.3 * per_token), kind


FIXED = {
    "gemma3": 16, "idefics3": 16, "internvl": 17, "llava": 17, "llava_next": 51, "llava_onevision": 48,
    "llava_pixtral": 2, "mistral3": 8, "qwen2_audio": 50, "smolvlm": 16, "voxtral": 100
}  # yapf: disable  # positions of the smallest input of a tower; of other families those of a token


def test_a_blank_is_as_small_as_its_tower_takes(rig, positions):
    """It goes through the tower where a step needs gradients, or ranks run the tower together; nowhere else."""
    (prompt, response, _), modality = rig.samples()[1], rig.actor.modality
    rig.logprobs([(prompt, response, ())])
    name = rig.folder.name.rstrip("0")
    least = [FIXED.get(name, tower.per_token(rig.hf.config)) for tower in modality.family.towers.values()]
    least[1:] = [16] if name == "llava_onevision" else least[1:]  # a frame
    assert positions == least
    with torch.no_grad():
        rig.logprobs([(prompt, response, ())])
        assert positions == least
        modality.passes = int
        rig.logprobs([(prompt, response, ())])
    modality.passes = None
    assert positions == 2 * least


@pytest.fixture(name="precise")
def precise_fixture(rig):
    """The rig, in float64 if its layers have a recurrence: one that begins after the prompt rounds at other tokens."""
    if not stateful(rig.hf):
        yield rig
        return
    experts = rig.hf.config.get_text_config()._experts_implementation
    rig.actor.double()
    rig.hf.set_experts_implementation("eager")  # the others have no float64
    with in_double(rig.hf):
        yield rig
    rig.hf.set_experts_implementation(experts)
    rig.actor.float()


def test_shared_prompts_are_as_alone(precise):
    """Positions, features, blocks and what layers read of tokens are those of every sample, in any order."""
    draw = torch.Generator().manual_seed(2)
    samples = [(prompt, torch.randint(5, 40, (length, ), generator=draw).tolist(), keys)
               for length in (7, 1, 40) for prompt, keys in zip(precise.prompts, precise.keys)]  # yapf: disable
    rig, exp = precise, precise.pack(samples)
    assert forward_row(exp).row.num_tokens == sum(map(len, rig.prompts)) + 48 * len(rig.prompts)
    whole = gradients(rig, [samples])
    with torch.no_grad():
        shared = rig.logprobs(samples)
        rig.actor.share_prompts = False
        apart = rig.logprobs(samples)
    assert (shared - apart).abs().max() < EXACT
    copied = gradients(rig, [samples])
    rig.actor.share_prompts = True
    assert_equal_up_to_rounding(whole, copied)


def test_a_drawn_media_token_is_text(rig):
    """Hugging Face's own forward fails of it; here only the prompt's tokens stand for media."""
    samples = rig.samples(media_token=True)
    with torch.no_grad():
        found = rig.logprobs(samples)
        alone = torch.cat([rig.logprobs([sample]) for sample in samples])
        embedding = rig.hf.get_input_embeddings().weight
        kept = embedding[rig.media_token].clone()
        embedding[rig.media_token] += 1
        moved = rig.logprobs(samples)
        embedding[rig.media_token] = kept
    assert (found - alone).abs().max() < EXACT
    for before, after in zip(found.view(len(samples), -1), moved.view(len(samples), -1)):
        assert torch.equal(before[:3], after[:3]), "a token of the prompt is read as text"
        assert not torch.equal(before[4:], after[4:]), "the drawn token is not read"


def test_the_engine_generates_what_the_trainer_scores(rig):
    engine = HFEngine(rig.hf, [], 1 << 24, modality=rig.actor.modality)
    engine.fuses = True  # as on a GPU; the outer model computes between the calls of its modules: none are fused
    requests = [
        Group(prompt, [10 * i + j for j in range(3)], keys)
        for i, (prompt, keys) in enumerate(zip(rig.prompts, rig.keys))
    ]
    params = SamplingParams(8)
    found = generate(engine, requests, params)
    assert not isinstance(engine._probed[1], FusedCalls)
    samples = [(request.token_ids, done.token_ids, request.media) for request, some in zip(requests, found)
               for done in some]
    with torch.no_grad():
        scored = rig.logprobs(samples)
    drawn = torch.tensor([value for some in found for done in some for value in done.logprobs])
    assert (scored - drawn).abs().max() < EXACT
    begun = [
        Group(request.token_ids, request.seeds, request.media, [done.token_ids[:5] for done in some])
        for request, some in zip(requests, found)
    ]
    resumed = generate(engine, begun, params)
    assert [[done.token_ids[5:] for done in some] for some in found] == [[done.token_ids for done in some]
                                                                         for some in resumed]
    room = 256 * rig.hf.config.get_text_config().num_hidden_layers * (max(map(len, rig.prompts)) + 24)  # bytes
    one_by_one = generate(HFEngine(rig.hf, [], room, modality=rig.actor.modality), requests, params)
    assert [[done.token_ids for done in some] for some in one_by_one] == [[done.token_ids for done in some]
                                                                          for some in found]


def test_the_store_makes_what_the_processor_makes(rig):
    """One medium at a time, what the tower reads and the tokens of its prompt, with one medium and several."""
    frames = max(tower.token_frames for tower in rig.actor.modality.family.towers.values())
    source, store = rig.source, MediaStore(rig.source.processor, MediaRules(None), token_frames=frames)
    store._open = lambda key: decoded(key.rstrip("+"), source.media)
    for text, keys in rig.rows:
        for key in keys:
            expected, found = source.tensors(key).tensors, store.tensors(key)
            for name in set(rig.actor.modality.family.towers[found.kind].reads) & expected.keys():
                assert torch.equal(found.tensors[name], expected[name]), (key, name)
        assert store.encode(text, keys) == source.prompt(text, keys)["input_ids"][0].tolist(), (text, keys)
    if len(keys) > 1 and rig.family.model_type in ("internvl", "smolvlm"):  # one token for both kinds
        with pytest.raises(DataError, match="order video, image, and the row has image, video, of which <.* stands"):
            store.encode(text, keys[::-1])


def test_media_are_refused_where_nothing_can_read_them(rig, tmp_path):
    modality = copy.copy(rig.actor.modality)
    modality.media = None
    with pytest.raises(ValueError, match="takes text only"):
        generate(HFEngine(rig.hf, [], 1 << 24, modality=modality), [Group(rig.prompts[0], [0], rig.keys[0])],
                 SamplingParams(2))
    exp = rig.pack(rig.samples()[:1])
    with pytest.raises(UserError, match="no source of media"):
        modality.inputs(exp, rig.hf)
    exp.media = [("taste:1", )]
    with pytest.raises(UserError, match="does not take"):
        rig.actor(exp)


def test_a_picture_is_causal_where_the_engine_computes_that(tmp_path):
    family = tiny_vision.FAMILIES["gemma3"]
    rig = MediaRig(family.save(tmp_path, tied=False), family.placeholders)
    samples, rig.actor.modality.causal_pictures = rig.samples(), True
    found = rig.logprobs(samples)
    assert (found - rig.plain(samples, without=("token_type_ids", ))).abs().max() < EXACT
    assert (found - rig.plain(samples)).abs().max() > 1000 * EXACT


@pytest.mark.parametrize("name, seconds, times", [("qwen2_vl", None, [0, 1, 2, 3, 4, 5]),
                                                  ("qwen2_5_vl", 0.7, [0, 2, 5, 8, 11, 13]),
                                                  ("qwen2_5_vl", 0.75, [0, 3, 6, 9, 12, 15]),
                                                  ("qwen2_5_vl", 1.1, [0, 4, 8, 13, 17, 22])])  # yapf: disable
def test_text_after_a_video_counts_on_from_its_last_frame(name, seconds, times, tmp_path):
    """And not from its height and width, as in transformers 5.3 and later, where it meets positions of frames."""
    folder = tiny_vision.FAMILIES[name].save(tmp_path, tied=False)
    hf = load_actor(ModelConfig(pretrain=str(folder))).hf_model
    hf.config.vision_config.tokens_per_second = 4
    given = {"video_grid_thw": torch.tensor([[6, 4, 6]])}
    given |= {} if seconds is None else {"second_per_grid_ts": torch.tensor([seconds])}
    kinds = torch.tensor([0] * 3 + [2] * 36 + [0] * 2)
    found = rope_of_grids(hf, torch.full((41, ), 5), kinds, [MediaTensors("video", given, "")]).T.tolist()
    patches = [[3 + t, 3 + y, 3 + x] for t in times for y in range(2) for x in range(3)]
    last = 3 + times[-1]
    assert found == [[i] * 3 for i in range(3)] + patches + [[last + 1] * 3, [last + 2] * 3]


@pytest.mark.parametrize("name", ["glm4v", "glm46v"])
def test_one_token_stands_for_pictures_and_videos(name, tmp_path):
    """Which it is follows from the tokens around it, in each sequence; the same as the processor says."""
    family = tiny_vision.FAMILIES[name]
    rig = MediaRig(family.save(tmp_path, tied=False), family.placeholders, family)
    image, video = family.placeholders["image"], family.placeholders["video"]
    given = rig.source.prompt(f"{image} x {video} y {image}", ("image:0", "video:0", "image:1"))
    ids = given["input_ids"][0]
    cut = torch.cat([ids[:len(ids) // 2], ids])  # the first sequence ends inside of its video
    cu_seqlens = torch.tensor([0, len(ids) // 2, len(cut)])
    for index, kind in ((1, "image"), (2, "video")):
        expected = given["mm_token_type_ids"][0] == index
        assert expected.any()
        found = rig.actor.modality.places.marked(cut, kind, cu_seqlens)
        assert torch.equal(found[len(ids) // 2:], expected)
    sample = (ids.tolist(), [5, 6, 7], ("image:0", "video:0", "image:1"))
    with torch.no_grad():
        packed, alone = rig.logprobs([*rig.samples()[:1], sample]), rig.logprobs([sample])
    assert (packed[-3:] - alone).abs().max() < EXACT


def test_the_hf_engine_refuses_layers_with_wider_heads(tmp_path):
    """As checkpoints of Gemma-4 of real size have."""
    family = tiny_vision.FAMILIES["gemma4"]
    text = family.config["text_config"] | {"global_head_dim": 64}
    wide = replace(family, config=family.config | {"text_config": text})
    rig = MediaRig(wide.save(tmp_path, tied=False), wide.placeholders, wide)
    samples = rig.samples()
    with torch.no_grad():
        assert (rig.logprobs(samples) - rig.plain(samples)).abs().max() < EXACT
    refused = "needs other keys in some layers than in others, .* Take --engine_type vllm"
    with pytest.raises(UserError, match=refused):
        check_decoder(rig.hf.config.get_text_config())  # in a dry run
    with pytest.raises(UserError, match=refused):
        generate(HFEngine(rig.hf, [], 1 << 24, modality=rig.actor.modality), [Group(rig.prompts[0], [0], rig.keys[0])],
                 SamplingParams(2))


def test_other_families_are_refused_by_name():
    with pytest.raises(UserError, match="'mllama' has a vision or audio tower of a family that is not supported"):
        modality_of(AutoConfig.for_model("mllama"), "m")
    with pytest.raises(UserError, match="does not support attention sinks"):
        modality_of(AutoConfig.for_model("internvl", text_config={"model_type": "gpt_oss"}), "m")
    for name, reason in REFUSED.items():
        assert name not in FAMILIES
        with pytest.raises(UserError, match=re.escape(f"model type '{name}' {reason}")):
            modality_of(AutoConfig.for_model(name), "m")


def test_the_reasons_of_refusals_are_true():
    for name, reason in REFUSED.items():
        config = AutoConfig.for_model(name)
        assert ("also generates speech" in reason) == ("talker_config" in config.to_dict()), name
        assert ("no auto class" in reason) == (name not in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES | IMAGE_TEXT), name
        assert ("of the batch" in reason) == ("qwen3_omni" in name), name
    with pytest.raises(UserError, match="'granite_speech' has a vision or audio tower of a family that is not"):
        modality_of(AutoConfig.for_model("granite_speech"), "m")


def test_docs_name_all_families_and_refusals():
    page = Path(__file__).parents[3] / "docs" / "modalities.md"
    if not page.exists():
        pytest.skip("installed without its repository")
    rows = [line.split("|") for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = {name.strip(" `") for row in rows for name in row[1].split(",")} - {"model_type"}
    named = {name for name in named if not name.startswith("quickstart")}  # the table of curves
    assert named == FAMILIES.keys() | REFUSED.keys()
    assert {family.model_type for family in tiny_vision.FAMILIES.values()} == FAMILIES.keys()
