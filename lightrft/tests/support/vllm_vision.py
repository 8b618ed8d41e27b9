"""Program of test_vllm_ranks in a separate process: models that see, in vLLM."""
import dataclasses
import sys
from functools import lru_cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import Qwen2VLImageProcessor
from vllm.model_executor.models import registry

from lightrft.models.freezing import freeze
from lightrft.ops.rounding import Arithmetic
from lightrft.rollout import SamplingParams
from lightrft.rollout.tests import test_vllm_families
from lightrft.rollout.tests.test_vllm_families import without
from lightrft.rollout.weight_sync.sync import manifest
from lightrft.rollout.weight_sync.verify import WeightSyncError
from lightrft.tests.support import tiny_vision, vllm_media
from lightrft.tests.support.engine_rig import frozen_weights_come_once, LARGEST, NEW, STOPS
from lightrft.tests.support.episodes import generate
from lightrft.tests.support.media_rig import MediaRig
from lightrft.tests.support.vision_rig import (faults_are_named, parts_change_apart, PROJECTORS, TOWER, Sees,
                                               weights_arrive)
from lightrft.trainer.checks.parity import check_parity
from lightrft.utils.errors import UserError


class Rig(Sees, test_vllm_families.Rig):
    """With the real vLLM."""


def prompts_are_processed_once(rig):
    """By trainer and engine together, for all responses of a group; also those that resume, one of them after a media
    token that the policy drew, and mixed with text."""
    rig.sync()
    processed, opened, asked = Qwen2VLImageProcessor.preprocess, rig.source.opened, rig.asked(range(8))
    rig.vllm.native.renderer._mm_processor_only_cache.clear_cache()
    rig.source.tensors, params = lru_cache(rig.source._process), SamplingParams(NEW, stop_token_ids=STOPS)
    with patch.object(Qwen2VLImageProcessor, "preprocess", autospec=True, side_effect=processed) as count:
        found = generate(rig.vllm, asked, params)
        rig.scores([(one.token_ids, [5], one.media) for one in asked])
        assert count.call_count == rig.source.opened - opened == 3
    _same_tensors(rig, asked)
    begun = [dataclasses.replace(request, prefixes=[one.token_ids[:4] for one in some])
             for request, some in zip(rig.asked(range(8)), found)]  # yapf: disable
    begun[0].prefixes[0].append(rig.actor.modality.tokens["image"])
    resumed = generate(rig.vllm, begun, params)
    samples = [(request.token_ids, prefix + one.token_ids, request.media) for request, some in zip(begun, resumed)
               for prefix, one in zip(request.prefixes, some)]
    exp = MediaRig.pack(samples)
    with torch.no_grad():
        scored = rig.actor(exp)[0]
    ends = exp.cu_seqlens[1:].tolist()
    drawn = [one for some in resumed for one in some]
    gap = max((scored[end - len(one.token_ids):end] - torch.tensor(one.logprobs)).abs().max().item()
              for end, one in zip(ends, drawn) if one.token_ids)  # yapf: disable
    assert gap < LARGEST, gap


def _same_tensors(rig, asked):
    """vLLM's are those of the trainer, and in the same memory."""
    for request in (one for one in asked if one.media):
        theirs = rig.vllm.media_tensors(request.prompt)
        assert {*theirs} == {"pixel_values", "image_grid_thw"}
        for name, tensors in theirs.items():
            ours = [rig.source.tensors(key).tensors[name] for key in request.media]
            assert [one.data_ptr() for one in tensors] == [one.data_ptr() for one in ours], name


def other_tokens_are_refused(rig):
    """A prompt that vLLM expands in another way than the trainer."""
    request = rig.asked([0])[0]
    with pytest.raises(UserError, match="differently; use --engine_type hf"):
        generate(rig.vllm, [dataclasses.replace(request, token_ids=request.token_ids + [7])], SamplingParams(2))


def prompts_are_compared(rig):
    """Row by row, before a run: the row and what differs are named."""
    rows = vllm_media.prompts_of(rig)
    compare = partial(check_parity, rig.strategy, rig.prepared, rig.vllm, arithmetic=Arithmetic("cpu", "float32"))
    rig.sync()
    compare(rows)
    with pytest.raises(UserError, match="row data:1: vLLM makes .* use --engine_type hf"):
        compare([rows[0], dataclasses.replace(rows[1], token_ids=rows[1].token_ids + [7])])
    modality, right = rig.actor.modality, rig.actor.modality._rope
    modality._rope = lambda *args: (right(*args)[0].flip(0), right(*args)[1])
    with pytest.raises(UserError, match=r"row data:0: the position of token \d+ is \[.*\] for the engine and"):
        compare(rows)
    modality._rope = right
    made = rig.source.tensors
    rig.source.tensors = lambda key: dataclasses.replace(
        made(key), tensors=made(key).tensors | {"image_grid_thw": made(key).tensors["image_grid_thw"][:, [0, 2, 1]]})
    with pytest.raises(UserError,
                       match=r"data:0: image_grid_thw is \[\[1, 4, 6]] for the engine and \[\[1, 6, 4]] for"):
        compare(rows)
    rig.source.tensors = made
    rig.learn()
    with pytest.raises(UserError, match="row data:0: the log-prob of the first token is .* for the engine and"):
        compare(rows)


def old_and_missing_weights_are_named(rig, name):
    """In a weight of the tower or of the projector, which no canary sees."""
    update, load = rig.vllm.update_weights, rig.vllm.model.load_weights
    rig.sync()
    before = rig.actor.hf_model.get_parameter(name).detach().clone()
    rig.learn()
    rig.vllm.update_weights = lambda stream, version: update(
        ((one, before if one == name else tensor) for one, tensor in stream), version)
    with pytest.raises(WeightSyncError, match=f": {name} differs .* rank 0: it still has the values of the previous"):
        rig.sync()
    rig.vllm.update_weights = without(name, update)
    with pytest.raises(ValueError, match=f"1 weights did not arrive, the first is '{name}'"):
        rig.sync()
    rig.vllm.update_weights, rig.vllm.model.load_weights = update, without(name, load)
    with pytest.raises(ValueError, match=f"vLLM has weights that the trainer does not have, e.g. '{name[6:]}'"):
        rig.sync()
    rig.vllm.model.load_weights = load
    assert rig.sync() < 1e-5


def lost_weights_are_named(rig):
    """Of a tower that is not sent again."""
    freeze(rig.actor.model, ["visual"], rig.actor.modality)
    rig.vllm.weights = manifest(rig.actor)
    rig.sync()
    part = next(iter(rig.vllm.weight_map.held[TOWER].values())).view
    kept = part.clone()
    part.zero_()
    rig.learn()
    with pytest.raises(WeightSyncError, match=f": {TOWER} differs between engine and trainer on rank 0"):
        rig.sync()
    part.copy_(kept)
    assert rig.sync() < 1e-5


def main(folder: str) -> None:
    """One family with a tied head, one without."""
    registry._run_in_subprocess = lambda look: look()
    for family, tied in (("qwen2_5_vl", True), ("qwen3_vl", False)):
        rig = Rig(tiny_vision.save_model(Path(folder) / family, family, tied))
        assert ("lm_head.weight" in rig.vllm.weights.shapes) != tied
        weights_arrive(rig)
        parts_change_apart(rig)
        prompts_are_processed_once(rig)
        other_tokens_are_refused(rig)
        prompts_are_compared(rig)
        for name in (TOWER, PROJECTORS[family]):
            faults_are_named(rig, name)
            old_and_missing_weights_are_named(rig, name)
        frozen_weights_come_once(rig, "visual", TOWER)
        lost_weights_are_named(rig)
        rig.vllm.shutdown()
    vllm_media.main(folder, *vllm_media.DIFFERENT)


if __name__ == "__main__":
    main(sys.argv[1])
