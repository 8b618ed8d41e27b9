"""Models that see, in SGLang: for an environment with it, where test_sglang_engine runs this."""
import pytest
import torch
from sglang.srt.managers.io_struct import GenerateReqInput

from lightrft.rollout import get_engine
from lightrft.rollout.weight_sync.verify import WeightSyncError, get_weight_sync_verifier
from lightrft.tests.support import engine_rig, tiny_vision
from lightrft.tests.support.sglang_rig import CFG
from lightrft.tests.support.vision_rig import PROMPT, TOWER, Sees, weights_arrive
from lightrft.types import Prompt
from lightrft.utils.timer import Timer

PROMPTS = [Prompt(str(i), list(range(40 + i, 60 + 3 * i)), "") for i in range(4)]


class Rig(Sees, engine_rig.EngineRig):
    """With the real SGLang."""

    def __init__(self, folder):
        super().__init__(folder, self.load(folder))
        self.engine = get_engine(CFG, self.actor, self.strategy, self.tokenizer)
        self.proof = get_weight_sync_verifier(CFG, self.strategy, self.prepared, self.engine, PROMPTS, False, Timer())

    def continued(self, picture):
        """SGLang's own request, because the engine takes text only so far: a greedy response and its log-probs."""
        asked = GenerateReqInput(input_ids=self.processor.tokenizer(PROMPT).input_ids, image_data=[picture],
                                 sampling_params={"temperature": 0.0, "max_new_tokens": 8, "sampling_seed": -1},
                                 return_logprob=True)  # yapf: disable
        native = self.engine.native
        answer = native.run(lambda: anext(native.manager.generate_request(asked, None)))
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        return torch.tensor(answer["output_ids"]), torch.tensor(logprobs)


@pytest.mark.parametrize("family,tied", [("qwen2_5_vl", True), ("qwen3_vl", False)])
def test_a_model_that_sees(family, tied, tmp_path):
    """A fault in the tower, which no canary sees, is named."""
    rig = Rig(tiny_vision.save_model(tmp_path, family, tied))
    weights_arrive(rig)
    right = rig.engine.update_weights
    rig.engine.update_weights = lambda stream, version: right(
        ((name, tensor * (1 + 1e-3) if name == TOWER else tensor) for name, tensor in stream), version)
    with pytest.raises(WeightSyncError, match=f": {TOWER} differs between engine and trainer on rank 0"):
        rig.sync()
    rig.engine.shutdown()
