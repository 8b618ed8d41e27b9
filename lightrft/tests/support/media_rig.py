"""Samples with media for tests of one tiny model: processed media by key, prompts, packed experiences."""
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor

from lightrft.config.schema import ModelConfig
from lightrft.datasets.decoding import Video
from lightrft.datasets.waveform import Waveform
from lightrft.models.loader import load_actor
from lightrft.tests.support.tiny_family import metadata
from lightrft.types import Experience, MediaTensors

_NOT_MEDIA = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
_ARGUMENT = {"image": "images", "video": "videos", "audio": "audio"}  # of a processor


def _media():
    """Random media of each kind, and the blank."""
    noise = np.random.default_rng(0)
    pixels = [noise.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((56, 84), (112, 56), (60, 60))]
    pixels.append(np.zeros((28, 28, 3), dtype=np.uint8))
    waves = [noise.standard_normal(size).astype(np.float32) for size in (16000, 7000, 11111)]
    waves.append(np.zeros(8000, dtype=np.float32))
    videos = [noise.integers(0, 256, (frames, 28, 56, 3), dtype=np.uint8) for frames in (6, 4, 4)]
    videos.append(np.zeros((4, 28, 28, 3), dtype=np.uint8))
    return {"image": [Image.fromarray(one) for one in pixels], "video": videos, "audio": waves}


def decoded(key, media, rate=24):
    """The medium ``key`` of the rig as the store decodes it; processors take 24 frames a second where nothing says
    more."""
    kind, _, index = key.partition(":")
    medium = media[kind][int(index)]
    if kind == "video":
        times = [i / rate for i in range(len(medium))]
        return Video([Image.fromarray(frame) for frame in medium], len(medium) / rate, times)
    return Waveform(medium, 16000) if kind == "audio" else medium


class ProcessedMedia:
    """A :class:`~lightrft.types.MediaSource` of random media ``image:0`` ..., with the plain processor; videos have
    ``rate`` frames a second."""
    rate = 24

    def __init__(self, folder, placeholders, family=None):
        self.processor, self.placeholders, self.media = AutoProcessor.from_pretrained(folder), placeholders, _media()
        self.kinds, self.family = tuple(placeholders), family
        self.tensors = lru_cache(self._process)

    def blank(self, kind):
        return self._process(f"{kind}:-1")

    def _process(self, key):
        kind = key.partition(":")[0]
        times = 2 if key.endswith("+") else 1  # as one of several
        found = self.prompt(self.placeholders[kind] * times, (key, ) * times)
        tensors = {name: value for name, value in found.items() if name not in _NOT_MEDIA}
        if kind == "video" and self.family is not None:
            tensors = self.family.named(tensors)
        if "video_position_ids" in tensors:  # Gemma-4: before transformers 5.19 videos are stacked
            tensors |= {name: value.flatten(0, -3) for name, value in tensors.items() if value.dim() > 2}
        text = self.processor.tokenizer.decode(found["input_ids"][0])
        return MediaTensors(kind, {name: value[:1] for name, value in tensors.items()} if times > 1 else tensors, text)

    def prompt(self, text, keys):
        """Token ids of ``text`` with its placeholders expanded, by the processor as users call it."""
        given = {}
        for kind, _, index in (key.rstrip("+").partition(":") for key in keys):
            given.setdefault(_ARGUMENT[kind], []).append(self.media[kind][int(index)])
        if self.family is not None and self.family.process is not None:
            return self.family.process(self.processor, text, **given)
        if "videos" in given:
            given["video_metadata"] = [metadata(video, self.rate) for video in given["videos"]]
            given["do_sample_frames"] = False
        if self.family is not None and self.family.nested and "images" in given:
            given["images"] = [given["images"]]
        return self.processor(text=[text], **given, return_tensors="pt")


class MediaRig:
    """A tiny model of ``folder`` on prompts of several media, one and none; ``placeholders``: their text by kind."""

    def __init__(self, folder, placeholders, family=None):
        self.folder, self.family = folder, family
        self.actor = load_actor(ModelConfig(pretrain=str(folder)))
        self.hf = self.actor.hf_model
        self.source = self.actor.modality.media = ProcessedMedia(folder, placeholders, family)
        self.rows = [row for kind in placeholders for row in self._rows(kind)]
        self.rows.insert(1, ("nothing here", ()))
        if len(placeholders) > 1 and (family is None or family.together):
            kinds = [*placeholders][::-1]  # another order than that in which their features are computed
            self.rows.append((" ".join(placeholders[kind] for kind in kinds), tuple(f"{kind}:2" for kind in kinds)))
        self.prompts = [self.source.prompt(*row)["input_ids"][0].tolist() for row in self.rows]
        self.keys = [keys for _, keys in self.rows]
        self.media_token = next(iter(self.actor.modality.tokens.values()))

    def _rows(self, kind):
        """Prompts with one medium, two, and the first one again."""
        mark, nested = self.source.placeholders[kind], self.family is not None and self.family.nested
        several = "+" * (kind == "image" and nested)
        return [(f"a {mark} b", (f"{kind}:0", )), (f"{mark} x {mark} y", (f"{kind}:1{several}", f"{kind}:2{several}")),
                (f"hi {mark} z", (f"{kind}:0", ))]

    def samples(self, media_token=False):
        """One response per prompt: tokens of prompt and response, keys. ``media_token``: the policy drew one."""
        draw = torch.Generator().manual_seed(1)
        found = []
        for prompt, keys in zip(self.prompts, self.keys):
            drawn = torch.randint(5, 40, (7, ), generator=draw).tolist()
            response = [5 if token == self.media_token else token for token in drawn]
            found.append((prompt, response[:3] + [self.media_token] * media_token + response[3:], keys))
        return found

    @staticmethod
    def pack(samples):
        """Pack samples into an Experience, as if moved to the device of the model."""
        return Experience.pack([prompt + response for prompt, response, _ in samples],
                               [[False] * len(prompt) + [True] * len(response) for prompt, response, _ in samples],
                               prompt_lens=[len(prompt)
                                            for prompt, *_ in samples], media=[keys for *_, keys in samples]).to("cpu")

    def logprobs(self, samples):
        """Log-probs of the responses, one after another, from one packed forward."""
        exp = self.pack(samples)
        return self.actor(exp)[0][exp.loss_mask]

    @torch.no_grad()
    def plain(self, samples, score=None, without=()):
        """The same from Hugging Face's own forward of each sample alone, with all that processors make except
        ``without``; with ``score``, values in place of log-probs.
        """
        self.hf.set_attn_implementation("sdpa")
        found = []
        for row, (prompt, response, _) in zip(self.rows, samples):
            given = dict(self.source.prompt(*row))
            for name in without:
                given.pop(name, None)
            ids = torch.tensor([prompt + response])
            given["attention_mask"] = torch.ones_like(ids)
            for name in given.keys() & {"mm_token_type_ids", "token_type_ids"}:
                given[name] = torch.cat([given[name], torch.zeros(1, len(response), dtype=torch.long)], 1)
            if self.family is not None:
                given = self.family.forwarded(self.hf, given)
            out = self.hf(**given | {"input_ids": ids}, use_cache=False, output_hidden_states=True)
            states, logits = out.hidden_states[-1][0, len(prompt) - 1:-1], out.logits[0, len(prompt) - 1:-1]
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
            found.append(score(states)[:, 0] if score else logprobs)
        self.hf.set_attn_implementation(self.actor.modality.attention(self.hf.config))
        self.actor.modality.adapt(self.hf)
        return torch.cat(found)
