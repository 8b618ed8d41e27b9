"""What test_vllm_families runs in a process of its own, where torchvision can be imported: models that see, in vLLM."""
import lightrft.tests.torchvision_on_cpu  # noqa: F401, before transformers
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from vllm import SamplingParams as NativeParams
from vllm.model_executor.models import registry

from lightrft.models.actor_language import ActorLanguage
from lightrft.rollout import SamplingParams
from lightrft.rollout.sync_proof import SyncProofError
from lightrft.rollout.tests import test_vllm_families
from lightrft.rollout.tests.engine_rig import EXACT, NEW, STOPS, requests
from lightrft.rollout.tests.test_vllm_families import without
from lightrft.tests import tiny_vision

TOWER = "model.visual.blocks.1.attn.qkv.weight"
PROMPT = f"<|im_start|>a {tiny_vision.PICTURE} b?"


class Rig(test_vllm_families.Rig):
    """Its trainer scores text and pictures."""

    def load(self, folder):
        hf = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="packed", dtype=torch.float32)
        self.processor = AutoProcessor.from_pretrained(folder)
        return ActorLanguage(hf)

    def naive(self, ids, positions=None, **media):
        hf = self.actor.hf_model
        hf.set_attn_implementation("eager")
        logits = hf(input_ids=ids, position_ids=positions, use_cache=False, **media).logits
        hf.set_attn_implementation("packed")
        return logits

    @torch.no_grad()
    def picture_gap(self):
        """Largest difference of log-probs after a picture, and what it would be with another."""
        noise = torch.randint(0, 256, (56, 84, 3), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
        picture = Image.fromarray(noise.numpy())
        response, logprobs = self.continued(picture)
        media = dict(self.processor(text=[PROMPT], images=[picture], return_tensors="pt"))
        prompt, kinds, _ = (media.pop(name) for name in ("input_ids", "mm_token_type_ids", "attention_mask"))
        ids = torch.cat([prompt, response[None]], 1)
        media["mm_token_type_ids"] = torch.cat([kinds, torch.zeros_like(response)[None]], 1)
        gaps = []
        pixels = media.pop("pixel_values")
        for seen in (pixels, torch.zeros_like(pixels)):
            logits = self.naive(ids, pixel_values=seen, **media)[0, prompt.shape[1] - 1:-1]
            scored = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
            gaps.append((scored - logprobs).abs().max().item())
        return gaps

    def continued(self, picture):
        """vLLM's own request, because the engine takes text only so far: a greedy response and its log-probs."""
        ids = self.processor.tokenizer(PROMPT).input_ids
        params = NativeParams(temperature=0.0, max_tokens=8, logprobs=0, flat_logprobs=True, detokenize=False)
        engine = self.vllm.native
        engine.add_request("picture", {"prompt_token_ids": ids, "multi_modal_data": {"image": [picture]}}, params)
        output = next(one for _ in range(99) for one in engine.step() if one.finished).outputs[0]
        return torch.tensor(output.token_ids), torch.tensor(output.logprobs.logprobs)


def weights_arrive(rig):
    """Before and after all of them changed: text, pictures, and every fingerprint."""
    for _ in range(2):
        assert rig.sync() < 1e-5
        mean, largest = rig.gap(requests(2), SamplingParams(NEW, stop_token_ids=STOPS))
        assert mean < EXACT and largest < 2e-5, (mean, largest)
        seen, unseen = rig.picture_gap()
        assert seen < 2e-5 and unseen > 1e-2, (seen, unseen)
        assert set(rig.proof.fingerprints.trainer) == set(rig.vllm.shapes), "not all weights are compared"
        rig.learn()


def faults_are_named(rig):
    """In the tower, which no canary sees."""
    update, load = rig.vllm.update_weights, rig.vllm.model.load_weights
    rig.vllm.update_weights = lambda stream, version: update(
        ((name, tensor * (1 + 1e-3) if name == TOWER else tensor) for name, tensor in stream), version)
    with pytest.raises(SyncProofError, match=f": {TOWER} differs between engine and trainer on rank 0"):
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
