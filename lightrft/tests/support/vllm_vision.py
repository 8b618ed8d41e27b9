"""Program of test_vllm_families in a separate process, where torchvision can be imported: models that see, in vLLM."""
import lightrft.tests.support.torchvision_on_cpu  # noqa: F401, before transformers
import sys
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams as NativeParams
from vllm.model_executor.models import registry

from lightrft.rollout.tests import test_vllm_families
from lightrft.rollout.tests.test_vllm_families import without
from lightrft.rollout.weight_sync.verify import WeightSyncError
from lightrft.tests.support import tiny_vision
from lightrft.tests.support.vision_rig import PROMPT, TOWER, Sees, weights_arrive


class Rig(Sees, test_vllm_families.Rig):
    """With the real vLLM."""

    def continued(self, picture):
        """vLLM's own request, because the engine takes text only so far: a greedy response and its log-probs."""
        ids = self.processor.tokenizer(PROMPT).input_ids
        params = NativeParams(temperature=0.0, max_tokens=8, logprobs=0, flat_logprobs=True, detokenize=False)
        engine = self.vllm.native
        engine.add_request("picture", {"prompt_token_ids": ids, "multi_modal_data": {"image": [picture]}}, params)
        output = next(one for _ in range(99) for one in engine.step() if one.finished).outputs[0]
        return torch.tensor(output.token_ids), torch.tensor(output.logprobs.logprobs)


def faults_are_named(rig):
    """In the tower, which no canary sees."""
    update, load = rig.vllm.update_weights, rig.vllm.model.load_weights
    rig.vllm.update_weights = lambda stream, version: update(
        ((name, tensor * (1 + 1e-3) if name == TOWER else tensor) for name, tensor in stream), version)
    with pytest.raises(WeightSyncError, match=f": {TOWER} differs between engine and trainer on rank 0"):
        rig.sync()
    rig.vllm.update_weights, rig.vllm.model.load_weights = update, without(TOWER, load)
    with pytest.raises(ValueError, match="vLLM has weights that the trainer has not, e.g. 'visual.blocks.1.attn.qkv"):
        rig.sync()
    rig.vllm.model.load_weights = load
    assert rig.sync() < 1e-5


def main(folder: str) -> None:
    """One family with a tied head, one without."""
    registry._run_in_subprocess = lambda look: look()
    for family, tied in (("qwen2_5_vl", True), ("qwen3_vl", False)):
        rig = Rig(tiny_vision.save_model(Path(folder) / family, family, tied), "mm_hasher_algorithm=sha256")
        assert ("lm_head.weight" in rig.vllm.shapes) != tied
        weights_arrive(rig)
        faults_are_named(rig)
        rig.vllm.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
