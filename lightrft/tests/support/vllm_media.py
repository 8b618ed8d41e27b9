"""Families that see or hear in vLLM, the real one on a CPU: log-probs are the trainer's, before and after an update.

    python -m lightrft.tests.support.vllm_media FOLDER [FAMILY ...]

prints the largest differences in nats, of text alone and of prompts with one medium, three, and none, in one batch;
the third row of a family is that of a folder which the trainer wrote and vLLM's own loader read.
test_vllm_ranks runs those that differ most, and with ``make chain`` all others (``OTHERS``); LLaVA and Mistral need
mistral_common, which ``make .venv/mistral/.installed`` installs.
"""
import sys
from copy import copy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

from vllm.config import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import registry

from lightrft.ops.rounding import Arithmetic
from lightrft.rollout import SamplingParams
from lightrft.rollout.tests import test_vllm_families
from lightrft.rollout.vllm import weights
from lightrft.rollout.vllm.engine import WITH_VIDEOS
from lightrft.tests.support import tiny_vision
from lightrft.tests.support.engine_rig import LARGEST, NEW, STOPS, requests
from lightrft.tests.support.vision_rig import Sees
from lightrft.trainer.checks.parity import check_parity
from lightrft.types import Prompt

DIFFERENT = ("gemma3", "gemma4_layers", "glm4v", "internvl", "qwen2_audio", "qwen3_vl_moe")
MISTRAL = ("llava", "llava_next", "llava_onevision", "llava_pixtral", "mistral3")  # need mistral_common
OTHERS = ("gemma4", "idefics3", "qwen2_5_vl", "qwen2_audio_long", "qwen2_vl", "qwen3_vl", "smolvlm", *MISTRAL)
_LAYERS = tiny_vision.FAMILIES["gemma4_layers"]
_WIDE = _LAYERS.config | {"text_config": _LAYERS.config["text_config"] | {"global_head_dim": 64}}  # as published ones
FAMILIES = tiny_vision.FAMILIES | {
    "gemma4_layers": replace(_LAYERS, config=_WIDE), "qwen2_audio_long": tiny_vision.LONG
}
ROOM = 512  # tokens of a prompt and its response, if the config says no other number


class Rig(Sees, test_vllm_families.Rig):
    """With the real vLLM; Gemma's pictures are causal, as vLLM's are on a CPU."""

    def __init__(self, folder, family):
        self.family, self.placeholders = FAMILIES[family], FAMILIES[family].placeholders
        room = self.family.config.get("text_config", {}).get("max_position_embeddings", ROOM)
        super().__init__(self.family.save(folder, False), f"max_model_len={room}", f"max_num_batched_tokens={room}")

    def load(self, folder):
        (kind, mark), *others = self.placeholders.items()
        family = self.family.model_type
        self.placeholders = dict([(kind, mark), *(others if family in WITH_VIDEOS else [])])
        actor = super().load(folder)
        actor.modality.causal_pictures = True
        most = 1 if family == "llava_onevision" else 3  # it expands several otherwise
        keys = tuple(f"{kind}:{i % 3}" for i in range(1, 1 + most))
        self.source.most = {kind: most}
        self.rows = [(f"a {mark} b?", (f"{kind}:0", )), ("nothing?", ()), (f"{mark * most} c", keys)]
        if video := self.placeholders.get("video"):
            row = f"{video} d {mark} e {video}", ("video:1", "image:0", "video:2")
            if family == "glm4v":  # vLLM takes no second video
                row = f"{video} d {mark}", ("video:1", "image:0")
            if self.family.process is None:  # whole seconds, which are written into prompts
                self.source.rate = 1
            self.source.most["video"] = row[0].count(video)
            self.rows.append(row)
        return actor

    def logprobs(self, request, response, params, begun=()):
        """The trainer's: Hugging Face's own forward takes a media token that was drawn for padding (Gemma-4)."""
        return self.scores([(request.token_ids, response, ())])[len(request.token_ids):].tolist()


def prompts_of(rig):
    """The rows of a rig as a data set has them."""
    return [Prompt(f"data:{i}", one.token_ids, "", media=one.media, unexpanded_ids=one.unexpanded)
            for i, one in enumerate(rig.asked([0]))]  # yapf: disable


def tensors_are_the_trainers(rig):
    """Bit for bit: vLLM computes features of what the trainer's processor made, one tensor per medium and name."""
    compared = set()
    for request in rig.asked([0]):
        given = rig.vllm.media_tensors(request.prompt) if request.media else {}
        for name in given:
            ours = [made.tensors[name] for made in map(rig.source.tensors, request.media) if name in made.tensors]
            if ours and len(ours) == len(given[name]):
                assert all(theirs.flatten().equal(own.flatten()) for theirs, own in zip(given[name], ours)), name
                compared |= {name} if ours[0].is_floating_point() else set()
    assert compared, "no pixels and no spectrum were compared"


def differences(rig):
    """The largest ones: of text, of media, and what the latter would be with other media; tensors, tokens, positions,
    grids and sizes are the same."""
    rig.sync()
    tensors_are_the_trainers(rig)
    check_parity(rig.strategy, rig.prepared, rig.vllm, prompts_of(rig), Arithmetic("cpu", "float32"))
    _, text = rig.gap(requests(2), SamplingParams(NEW, stop_token_ids=STOPS))
    return text, *rig.picture_gap()


def read_export(rig, folder):
    """Let vLLM read the trainer's export as ``vllm.LLM(folder)`` would."""
    rig.strategy.save_model(rig.prepared, folder)
    native, model = rig.vllm.native, rig.vllm.model
    for layer in model.modules():
        if hasattr(layer, "is_fused_checkpoint_transposed"):  # the trainer's updates are not
            layer.is_fused_checkpoint_transposed = rig.family.model_type == "qwen3_vl_moe"
    config = copy(native.model_config)
    config.model = str(folder)
    files = DefaultModelLoader(LoadConfig()).get_all_weights(config, model)
    with patch.object(weights, "under_native_names", lambda model, stream: stream):
        weights.load(native, model, files, plain=not rig.vllm._derived, whole=True)
    native.reset_encoder_cache()
    assert native.reset_prefix_cache()


def main(folder: str, *families: str) -> None:
    """Print a row per family, and fail if one differs. "others": all others that can start here."""
    registry._run_in_subprocess = lambda look: look()
    sys.path.append(f"{sys.prefix}/mistral")
    if families == ("others", ):
        families = tuple(one for one in OTHERS if one not in MISTRAL or find_spec("mistral_common"))
    print("family", "update", "text", "media", "with others", sep="\t")
    for family in families or (*DIFFERENT, *OTHERS):
        rig = Rig(Path(folder) / f"media_{family}", family)
        for update in range(2):
            text, media, others = differences(rig)
            print(family, update, *(f"{value:.1e}" for value in (text, media, others)), sep="\t", flush=True)
            assert max(text, media) < LARGEST and others > 1e-2, family
            rig.learn()
        read_export(rig, Path(folder) / f"export_{family}")
        _, text = rig.gap(requests(2), SamplingParams(NEW, stop_token_ids=STOPS))
        media, _ = rig.picture_gap()
        print(family, "export", f"{text:.1e}", f"{media:.1e}", sep="\t", flush=True)
        assert max(text, media) < LARGEST, family
        rig.vllm.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
