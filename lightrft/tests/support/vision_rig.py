"""A trainer of models that see or hear, for an engine on its weights."""
import torch

from lightrft.config.schema import ModelConfig
from lightrft.models.loader import load_actor
from lightrft.rollout import SamplingParams
from lightrft.tests.support import tiny_vision
from lightrft.tests.support.engine_rig import EXACT, LARGEST, NEW, STOPS, names_a_fault, requests
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.faulty_sync import OF_STREAMS
from lightrft.tests.support.media_rig import decoded, MediaRig, ProcessedMedia

TOWER = "model.visual.blocks.1.attn.qkv.weight"
PROJECTORS = {"qwen2_5_vl": "model.visual.merger.mlp.2.weight", "qwen3_vl": "model.visual.merger.linear_fc2.weight"}
TWINS = {  # of the same shape; the projector of Qwen2.5-VL has a bias alone that is exchanged
    TOWER: (TOWER, TOWER.replace("1", "0")),
    PROJECTORS["qwen2_5_vl"]: ("model.visual.merger.mlp.2.bias",
                               "model.language_model.layers.0.input_layernorm.weight"),
    PROJECTORS["qwen3_vl"]: (PROJECTORS["qwen3_vl"], "model.visual.deepstack_merger_list.0.linear_fc2.weight"),
}  # yapf: disable
PROMPT = f"<|im_start|>a {tiny_vision.PICTURE} b?"
ROWS = [(PROMPT, ("image:0", )), (f"{tiny_vision.PICTURE}{tiny_vision.PICTURE} c", ("image:1", "image:2")),
        ("no picture?", ())]  # yapf: disable


class RawMedia(ProcessedMedia):
    """For engines that process media themselves; ``opened`` counts the media that they asked for."""
    most, opened = {"image": 2}, 0

    def open(self, key):
        self.opened += 1
        return decoded(key, self.media, self.rate)


class Sees:
    """For an :class:`~lightrft.tests.support.engine_rig.EngineRig`. ``rows``: texts of prompts and their media."""
    rows, placeholders, family = ROWS, {"image": tiny_vision.PICTURE}, None

    def load(self, folder):
        actor = load_actor(ModelConfig(pretrain=str(folder)))
        self.source = actor.modality.media = RawMedia(folder, self.placeholders, self.family)
        return actor

    def naive(self, ids, positions=None):
        hf = self.actor.hf_model
        hf.set_attn_implementation("eager")
        logits = hf(input_ids=ids, position_ids=positions, use_cache=False).logits
        hf.set_attn_implementation(self.actor.modality.attention(hf.config))
        self.actor.modality.adapt(hf)
        return logits

    @torch.no_grad()
    def scores(self, samples):
        """The trainer's log-probs of each token of packed samples (prompt, response, keys of media)."""
        return self.actor(MediaRig.pack(samples))[0]

    def asked(self, seeds, prefixes=()):
        """Requests for ``rows``."""
        tokenizer = self.source.processor.tokenizer
        return [Group(self.source.prompt(text, media)["input_ids"][0].tolist(), list(seeds), media, list(prefixes),
                      tokenizer(text).input_ids if media else []) for text, media in self.rows]  # yapf: disable

    def answers(self):
        """Samples as :meth:`MediaRig.pack` takes them, and the engine's log-probs of each."""
        asked = self.asked(range(3))
        found = generate(self.engine, asked, SamplingParams(NEW, stop_token_ids=STOPS))
        return [((request.token_ids, one.token_ids, request.media), one.logprobs)
                for request, some in zip(asked, found) for one in some]  # yapf: disable

    @torch.no_grad()
    def picture_gap(self):
        """Largest difference of log-probs after ``rows``, and what it would be with other media."""
        found = self.answers()
        drawn = torch.tensor([value for _, logprobs in found for value in logprobs])

        def gap(samples):
            exp = MediaRig.pack(samples)
            return (self.actor(exp)[0][exp.loss_mask] - drawn).abs().max().item()

        right = self.source.tensors
        seen = gap([sample for sample, _ in found])
        self.source.tensors = lambda key: type(one := right(key))(
            one.kind, {name: -t if t.is_floating_point() else t for name, t in one.tensors.items()}, one.text)
        unseen = gap([sample for sample, _ in found])
        self.source.tensors = right
        return seen, unseen


def weights_arrive(rig):
    """Before and after all of them changed: text, pictures, and every fingerprint."""
    for _ in range(2):
        assert rig.sync() < 1e-5
        mean, largest = rig.gap(requests(2), SamplingParams(NEW, stop_token_ids=STOPS))
        assert mean < EXACT and largest < LARGEST, (mean, largest)
        seen, unseen = rig.picture_gap()
        assert seen < LARGEST and unseen > 1e-2, (seen, unseen)
        assert set(rig.proof.fingerprints.trainer) == set(rig.engine.weights.shapes), "not all weights are compared"
        rig.learn()


def parts_change_apart(rig):
    """Tower, projector and text, one after another; the others keep their weights."""
    named = dict(rig.actor.hf_model.named_parameters())
    parts = rig.actor.modality.parts(rig.actor.hf_model, named)
    assert {*parts} == {"visual", "projector", "language"}
    for names in parts.values():
        for name, parameter in named.items():
            parameter.requires_grad_(name in names)
        rig.learn()
        rig.actor.requires_grad_(True)
        assert rig.sync() < 1e-5
        seen, unseen = rig.picture_gap()
        assert seen < LARGEST and unseen > 1e-2, (names[0], seen, unseen)


def faults_are_named(rig, name):
    """Those of text, in the weight ``name`` of the tower or of the projector; no canary has media. The engine ends with
    the right weights."""
    rig.sync()
    rig.learn()
    for kind in OF_STREAMS:
        names_a_fault(rig, kind, *(TWINS[name] if kind == "swapped" else (name, )))
    assert rig.sync() < 1e-5
