"""A trainer of models that see, for an engine on its weights."""
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from lightrft.models.actor_language import ActorLanguage
from lightrft.rollout import SamplingParams
from lightrft.tests.support import tiny_vision
from lightrft.tests.support.engine_rig import EXACT, NEW, STOPS, requests

TOWER = "model.visual.blocks.1.attn.qkv.weight"
PROMPT = f"<|im_start|>a {tiny_vision.PICTURE} b?"


class Sees:
    """For an :class:`~lightrft.tests.support.engine_rig.EngineRig`, which says by ``continued`` how its engine goes on
    from ``PROMPT`` and a picture: tokens and log-probs."""

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


def weights_arrive(rig):
    """Before and after all of them changed: text, pictures, and every fingerprint."""
    for _ in range(2):
        assert rig.sync() < 1e-5
        mean, largest = rig.gap(requests(2), SamplingParams(NEW, stop_token_ids=STOPS))
        assert mean < EXACT and largest < 2e-5, (mean, largest)
        seen, unseen = rig.picture_gap()
        assert seen < 2e-5 and unseen > 1e-2, (seen, unseen)
        assert set(rig.proof.fingerprints.trainer) == set(rig.engine.shapes), "not all weights are compared"
        rig.learn()
