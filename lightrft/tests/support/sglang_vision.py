"""Models that see, in SGLang: for an environment with it, where test_sglang_engine runs this.

    python -m lightrft.tests.support.sglang_vision FOLDER

prints the largest differences in nats, of text alone and of prompts with pictures and videos.
"""
import copy
import dataclasses
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

from lightrft.ops.rounding import Arithmetic
from lightrft.rollout import get_engine, SamplingParams
from lightrft.tests.support import engine_rig, media_runs, runs, tiny_vision, turns
from lightrft.tests.support.engine_rig import LARGEST, NEW, STOPS
from lightrft.tests.support.episodes import generate
from lightrft.tests.support.sglang_rig import CFG, forked, verifier
from lightrft.tests.support.vision_rig import (faults_are_named, parts_change_apart, PROJECTORS, TOWER, Sees,
                                               weights_arrive)
from lightrft.trainer.checks.parity import check_parity
from lightrft.types import Prompt
from lightrft.utils.errors import UserError

FAMILIES = {name: copy.deepcopy(tiny_vision.FAMILIES[name])
            for name in ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "llava_pixtral", "mistral3")
            }  # yapf: disable
FAMILIES["qwen3_vl_moe"].config["vision_config"].update(depth=3, deepstack_visual_indexes=[0, 1, 2])
SIZES = dataclasses.replace(CFG, prompt_max_len=480)


class Rig(Sees, engine_rig.EngineRig):
    """With the real SGLang. Prompts of all media that the family takes, alone and together, and of none."""

    def __init__(self, folder, family):
        self.placeholders = FAMILIES[family].placeholders
        super().__init__(folder, self.load(FAMILIES[family].save(folder, family == "qwen2_5_vl")))
        (image, *videos), self.source.family = self.placeholders.values(), FAMILIES[family]
        self.rows = [(f"a {image} b?", ("image:0", )), (f"{image * 2} c", ("image:1", "image:2")), ("nothing?", ())]
        self.rows += [(f"a {video} b {video}?", ("video:0", "video:1")) for video in videos]
        if videos and FAMILIES[family].together:
            self.rows.append((f"{videos[0]} x {image}", ("video:2", "image:0")))
        with forked():
            self.engine = get_engine(SIZES, self.actor, self.strategy, self.tokenizer)
        self.proof = verifier(CFG, self.strategy, self.prepared, self.engine)


@pytest.fixture(scope="module", name="towers")
def towers_fixture():
    """How many pictures SGLang's tower has seen, counted in the scheduler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")  # as isolated_environment does, before the first import
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Seeing
        seen, right = multiprocessing.Value("i"), Seeing.get_image_feature

        def counted(model, items):
            seen.value += len(items)
            return right(model, items)

        patch.setattr(Seeing, "get_image_feature", counted)
        yield seen


@pytest.fixture(scope="module", name="rig")
def rig_fixture(towers, tmp_path_factory):
    rig = Rig(tmp_path_factory.mktemp("model"), "qwen2_5_vl")
    yield rig
    rig.engine.shutdown()


def test_log_probs_are_the_trainers_and_all_weights_are_compared(rig):
    weights_arrive(rig)


def test_a_group_shares_media_and_an_update_drops_their_features(rig, towers):
    """Also for responses that resume, one of which begins with a media token that the policy drew."""
    for _ in range(2):
        rig.sync()
        before, asked = towers.value, rig.asked(range(8))
        found = generate(rig.engine, asked, SamplingParams(NEW, stop_token_ids=STOPS))
        drawn = [[*one.token_ids[:4], rig.actor.modality.tokens["image"]] for one in found[0]]
        begun = [dataclasses.replace(request, prefixes=[one.token_ids[:4] for one in some])
                 for request, some in zip(asked, found)]  # yapf: disable
        begun[0] = dataclasses.replace(begun[0], prefixes=drawn)
        resumed = generate(rig.engine, begun, SamplingParams(NEW))
        assert towers.value - before == 3, "three pictures for four prompts with 16 responses each"
        samples = [(request.token_ids, prefix + one.token_ids, request.media) for request, some in zip(begun, resumed)
                   for prefix, one in zip(request.prefixes, some)]  # yapf: disable
        scored, end = rig.scores(samples), 0
        for (prompt, response, _), one in zip(samples, (one for some in resumed for one in some)):
            end += len(prompt) + len(response)
            assert one.logprobs == pytest.approx(scored[end - len(one.token_ids):end].tolist(), abs=LARGEST)
        rig.learn()


def test_turns(rig):
    """Of responses to prompts with media."""
    rig.sync()
    asked = rig.asked(range(3))
    groups = turns.turns_are_those_by_hand(rig.engine, asked, turns.PARAMS)

    def score(request, ids):
        return rig.scores([(request.token_ids, ids, request.media)])[len(request.token_ids):].tolist()

    turns.turns_have_the_scores(asked, groups, score)


def test_features_of_an_old_tower_are_impossible(rig, monkeypatch):
    """Only the tower changes: with features of before, the canary of pictures would be the first to see it."""
    rig.sync()
    rig.picture_gap()
    with torch.no_grad():
        rig.actor.hf_model.get_parameter(TOWER).mul_(1.5)
    assert rig.sync() < 1e-5
    seen, unseen = rig.picture_gap()
    assert seen < LARGEST and unseen > 1e-2, (seen, unseen)


def test_the_first_rows_are_compared(rig, capfd):
    rows = [Prompt(f"data:{i}", one.token_ids, "", media=one.media) for i, one in enumerate(rig.asked([0]))]
    rig.sync()
    check_parity(rig.strategy, rig.prepared, rig.engine, rows, Arithmetic("cpu", "float32"))
    rig.learn()
    with pytest.raises(UserError, match="row data:0: the log-prob of the first token is .* for the engine and"):
        check_parity(rig.strategy, rig.prepared, rig.engine, rows, Arithmetic("cpu", "float32"))
    assert capfd.readouterr().err.count("engine and trainer agree on row") == 4


def test_a_frozen_tower_comes_once(rig):
    engine_rig.frozen_weights_come_once(rig, "visual", TOWER)


@pytest.mark.parametrize("name", [TOWER, PROJECTORS["qwen2_5_vl"]])
def test_faults_in_tower_and_projector_are_named(rig, name):
    faults_are_named(rig, name)


def test_parts_change_apart(rig):
    parts_change_apart(rig)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "glm4v", "mistral3"])
def test_families(family, tmp_path):
    """A faulty sync is noticed in each."""
    rig = Rig(tmp_path, family)
    weights_arrive(rig)
    rig.engine.shutdown()


def test_a_run(tmp_path, capfd):
    """Of the trainer, on pictures of at most 1,568 pixels, which the engine sees too."""
    options = media_runs.write_home(tmp_path, "qwen2_5_vl") | {"max_epochs": 1, "prompt_max_len": 160}
    with forked():
        lines = runs.run(tmp_path, tmp_path / "run", **options, engine_type="sglang", max_pixels=1568).lines
    assert len(lines) == 2 and max(line["rollout/mismatch/abs_logp_max"] for line in lines) < 1e-4
    assert lines[0]["rollout/canary_gap"] < 1e-5 and lines[0]["rollout/mismatch/tokens"] > 0
    said = [line for line in capfd.readouterr().err.splitlines() if "engine and trainer agree on row" in line]
    assert [" 2 of them for 1 media" in line for line in said] == [True, False], said


def main(folder: str) -> None:
    """Print a row per family."""
    for family in FAMILIES:
        rig = Rig(Path(folder) / family, family)
        rig.sync()
        _, text = rig.gap(engine_rig.requests(2), SamplingParams(NEW, stop_token_ids=STOPS))
        print(family, *(f"{value:.1e}" for value in (text, *rig.picture_gap())), sep="\t", flush=True)
        rig.engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
