"""Measure what one pass of a tower per unique picture saves, against one pass per response.

    python benchmarks/vl_prefix.py [--rounds 3] [--group 8] [--prompts 2] [--patches 256] [--out FILE]

A random Qwen2.5-VL (8 tower layers, 4 decoder layers) runs forward and backward on ``prompts`` pictures with ``group``
responses of 64 tokens each, in one micro-batch, in a process of its own per way and round. ``tower`` is the CPU time in
the tower's forward passes, ``whole`` that of the step, ``peak`` the memory above that of the loaded model. The norms of
the gradients of both ways are compared. The store of media is that of a run, and counts what it decodes and processes.
``sent`` are the bytes of the samples when they move to another rank; they are searched for the pixels. Two minutes.
"""
import argparse
import json
import pickle
import resource
import statistics
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import machine, ROOT
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from transformers import (AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2_5_VLProcessor, Qwen2VLImageProcessor,
                          Qwen2VLVideoProcessor)

from lightrft.datasets.media import find_medium, MediaRules
from lightrft.datasets.media_store import MediaStore
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.actor_modality import FAMILIES, MediaModality
from lightrft.types import Experience, MediaTensors

sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
from common import build_tokenizer  # noqa: E402

PATCH, MERGE, RESPONSE, TEXT = 14, 2, 64, 16
IMAGE, START, END = 500, 501, 502


class CountedStore(MediaStore):
    """The store of a run, which counts its calls of the processor as well."""

    def __init__(self, side: int) -> None:
        options = {"patch_size": PATCH, "merge_size": MERGE, "min_pixels": 1, "max_pixels": side * side}
        tokenizer = build_tokenizer("<|vision_start|><|image_pad|><|vision_end|>", ("<|video_pad|>", ))
        super().__init__(Qwen2_5_VLProcessor(Qwen2VLImageProcessor(**options), tokenizer, Qwen2VLVideoProcessor()),
                         MediaRules())
        self.processed, process = 0, self.single.process

        def counted(*medium: Any) -> MediaTensors:
            self.processed += 1
            return process(*medium)

        self.single.process = counted  # type: ignore[method-assign]


def pictures(args: argparse.Namespace) -> tuple[MediaStore, list[tuple[str, ...]]]:
    """Return a store of drawn PNG files, and the keys of the responses' media: one file per prompt, or with ``each``
    one per response, which differ in a comment."""
    side = int(args.patches**0.5) * PATCH
    noise = torch.randint(256, (args.prompts, side, side, 3), dtype=torch.uint8,
                          generator=torch.Generator().manual_seed(0))
    store = CountedStore(side)
    files = [png(picture.numpy(), "" if args.way == "once" else str(copy)) for picture in noise
             for copy in range(args.group)]  # yapf: disable
    keys = [store.register([find_medium(file, "image", store.rules, f"row {i}")]) for i, file in enumerate(files)]
    store.keep(keys)
    return store, keys


def png(picture: np.ndarray, comment: str) -> bytes:
    """Encode a picture of shape [height, width, 3]."""
    file, info = BytesIO(), PngInfo()
    info.add_text("comment", comment)
    Image.fromarray(picture).save(file, format="PNG", pnginfo=info)
    return file.getvalue()


def build() -> ActorLanguage:
    """Return the actor, always with the same weights."""
    torch.manual_seed(0)
    text = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
            "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 4096, "pad_token_id": 0,
            "bos_token_id": None, "eos_token_id": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                "mrope_section": [16, 8, 8]}}  # yapf: disable
    tower = {"depth": 8, "hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "out_hidden_size": 512,
             "patch_size": PATCH, "spatial_merge_size": MERGE, "fullatt_block_indexes": [3, 7]}  # yapf: disable
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, image_token_id=IMAGE, vision_start_token_id=START,
                              vision_end_token_id=END)
    modality = MediaModality(FAMILIES["qwen2_5_vl"], config)
    hf = AutoModelForImageTextToText.from_config(config, attn_implementation=modality.attention(config))
    return ActorLanguage(hf, modality=modality)


def batch(prompts: int, group: int, patches: int, keys: list[tuple[str, ...]]) -> Experience:
    """Pack the responses with the keys of their media."""
    draw, sequences = torch.Generator().manual_seed(1), []
    for _ in range(prompts):
        head = [START, *[IMAGE] * (patches // MERGE**2), END, *range(10, 10 + TEXT)]
        sequences += [head + torch.randint(5, 400, (RESPONSE, ), generator=draw).tolist() for _ in range(group)]
    lens = torch.tensor([0] + [len(each) for each in sequences])
    mask = [False] * (len(sequences[0]) - RESPONSE) + [True] * RESPONSE
    return Experience(torch.tensor([token for each in sequences for token in each]),
                      lens.cumsum(0).to(torch.int32), torch.tensor(mask * len(sequences)),
                      prompt_lens=[len(mask) - RESPONSE] * len(sequences), media=keys)


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Run one way once to warm up, then once measured."""
    actor, spent = build(), []
    actor.modality.media, keys = pictures(args)
    tower: torch.nn.Module = actor.hf_model.model.visual
    tower.register_forward_pre_hook(lambda *_: spent.append(-time.thread_time()))
    tower.register_forward_hook(lambda *_: spent.append(time.thread_time()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    exp = batch(args.prompts, args.group, args.patches, keys)
    for _ in range(2):
        actor.zero_grad()
        spent.clear()
        start = time.process_time()
        actor(exp.to("cpu"))[0].sum().backward()
        whole = time.process_time() - start
    norms = {name: parameter.grad.norm().item() for name, parameter in actor.named_parameters()}
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    store, sent = actor.modality.media, pickle.dumps(exp)
    counted = {"decoded": store.decoded, "processed": store.processed}
    pixels = [store.tensors(key).tensors["pixel_values"].numpy().tobytes() for key in sorted({*sum(keys, ())})]
    return {"tower": sum(spent), "whole": whole, "peak": peak, "norms": norms, "sent": len(sent), **counted,
            "pixels": sum(map(len, pixels)), "found": sum(each[:64] in sent for each in pixels)}  # yapf: disable


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="pairs of processes")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompts", type=int, default=2, help="prompts, each with a picture of its own")
    parser.add_argument("--patches", type=int, default=256, help="patches of a picture, a square of an even number")
    parser.add_argument("--out", type=Path, help="JSON file of all results")
    parser.add_argument("--way", choices=("once", "each"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.way:
        sys.stdout.write(json.dumps(measure(args)))
        return
    found: dict[str, Any] = {"once": [], "each": []}
    for _ in range(args.rounds):
        for way, results in found.items():
            done = subprocess.run([sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--way", way], check=True,
                                  capture_output=True, text=True)
            results.append(json.loads(done.stdout[done.stdout.index('{"tower'):]))
    if args.out:
        figures = {way: [{name: value for name, value in one.items() if name != "norms"} for one in results]
                   for way, results in found.items()}  # yapf: disable
        args.out.write_text(json.dumps(machine() | figures, indent=1) + "\n")
    sys.stdout.write(f"{'way':6} {'tower s':>8} {'whole s':>8} {'peak MiB':>9}\n")
    for way, results in found.items():
        tower, whole, peak = (statistics.median(one[name] for one in results) for name in ("tower", "whole", "peak"))
        sys.stdout.write(f"{way:6} {tower:8.2f} {whole:8.2f} {peak:9.0f}\n")
    for name in ("tower", "whole", "peak"):
        ratios = [each[name] / once[name] for once, each in zip(found["once"], found["each"])]
        sys.stdout.write(f"{name}: each / once {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})\n")
    once, each = found["once"][0], found["each"][0]
    gap = max(abs(each["norms"][name] - norm) / max(norm, 1e-6) for name, norm in once["norms"].items()
              if not name.endswith("k.bias"))  # yapf: disable
    sys.stdout.write(f"largest difference of a gradient's norm: {gap:.1e}\n")
    for done in ("decoded", "processed"):
        sys.stdout.write(f"pictures {done}: each {each[done]}, once {once[done]}\n")
    sys.stdout.write(
        f"sent to another rank: {once['sent']:,} bytes, with pixels of {once['found']} pictures (per response "
        f"these have {each['pixels']:,} bytes)\n")


if __name__ == "__main__":
    main()
