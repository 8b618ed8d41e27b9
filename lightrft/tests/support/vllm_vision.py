"""Program of test_vllm_ranks in a separate process: models that see, in vLLM."""
import dataclasses
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from vllm.model_executor.models import registry

from lightrft.models.loader import freeze
from lightrft.ops.rounding import Arithmetic
from lightrft.rollout import SamplingParams
from lightrft.rollout.tests import test_vllm_families
from lightrft.rollout.tests.test_vllm_families import without
from lightrft.rollout.weight_sync.sync import manifest
from lightrft.rollout.weight_sync.verify import WeightSyncError
from lightrft.tests.support import tiny_vision, vllm_media
from lightrft.tests.support.engine_rig import frozen_weights_come_once, LARGEST, NEW, STOPS
from lightrft.tests.support.media_rig import MediaRig
from lightrft.tests.support.vision_rig import parts_change_apart, PROJECTORS, TOWER, Sees, weights_arrive
from lightrft.trainer.checks.parity import check_parity
from lightrft.utils.errors import UserError


class Rig(Sees, test_vllm_families.Rig):
    """With the real vLLM."""


def prompts_are_processed_once(rig):
    """Also for all responses of a group, those that resume, one of them after a media token that the policy drew, and
    mixed with text."""
    rig.sync()
    processor = rig.vllm.native.renderer.get_mm_processor()
    call, calls, opened = processor._call_hf_processor, [], rig.source.opened
    processor._call_hf_processor = lambda *args, **kwargs: calls.append(1) or call(*args, **kwargs)
    rig.vllm.native.renderer.clear_mm_cache()
    params = SamplingParams(NEW, stop_token_ids=STOPS)
    found = rig.vllm.generate(rig.asked(range(8)), params)
    processor._call_hf_processor = call
    assert rig.source.opened - opened == 3 and len(calls) <= 2
    begun = [dataclasses.replace(request, prefixes=[one.token_ids[:4] for one in some])
             for request, some in zip(rig.asked(range(8)), found)]  # yapf: disable
    begun[0].prefixes[0].append(rig.actor.modality.tokens["image"])
    resumed = rig.vllm.generate(begun, params)
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


def other_tokens_are_refused(rig):
    """A prompt that vLLM expands in another way than the trainer."""
    request = rig.asked([0])[0]
    with pytest.raises(UserError, match="another way; use --engine_type hf"):
        rig.vllm.generate([dataclasses.replace(request, token_ids=request.token_ids + [7])], SamplingParams(2))


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


def faults_are_named(rig, name):
    """In a weight of the tower or of the projector, which no canary sees."""
    update, load = rig.vllm.update_weights, rig.vllm.model.load_weights
    rig.sync()
    before = rig.actor.hf_model.get_parameter(name).detach().clone()
    rig.learn()
    stale, changed = "it still has the values of the previous sync", "it has neither the values of the previous sync"
    for said, change in ((stale, lambda _: before), (changed, lambda now: now *
                                                     (1 + 1e-3)), (changed, lambda now: now.roll(1, 0))):
        rig.vllm.update_weights = lambda stream, version, change=change: update(
            ((one, change(tensor) if one == name else tensor) for one, tensor in stream), version)
        with pytest.raises(WeightSyncError, match=f": {name} differs between engine and trainer on rank 0: {said}"):
            rig.sync()
    rig.vllm.update_weights = without(name, update)
    with pytest.raises(ValueError, match=f"1 weights did not arrive, the first is '{name}'"):
        rig.sync()
    rig.vllm.update_weights, rig.vllm.model.load_weights = update, without(name, load)
    with pytest.raises(ValueError, match=f"vLLM has weights that the trainer has not, e.g. '{name[6:]}'"):
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
        faults_are_named(rig, TOWER)
        faults_are_named(rig, PROJECTORS[family])
        frozen_weights_come_once(rig, "visual", TOWER)
        lost_weights_are_named(rig)
        rig.vllm.shutdown()
    vllm_media.main(folder, *vllm_media.DIFFERENT)


if __name__ == "__main__":
    main(sys.argv[1])
