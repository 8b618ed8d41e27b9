"""Processes one picture, video or sound as the processor of a model does within a prompt."""
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from transformers import processing_utils, ProcessorMixin
from transformers.video_utils import VideoMetadata

from lightrft.datasets.decoding import Video
from lightrft.datasets.media import shorten
from lightrft.datasets.rows import DataError
from lightrft.datasets.waveform import EXCESS_S, Waveform
from lightrft.types import MediaTensors
from lightrft.utils.errors import UserError

Decoded: TypeAlias = Image.Image | Waveform | Video
_BLANK = (56, 56)  # pixels of a blank picture; a blank sound lasts a second
_ENDLESS = 1 << 62  # samples
_PROBES = ((56, 56), (200, 320))  # sizes of pictures for which the processor's own function is tried
_OMNI = getattr(processing_utils, "OmniModalProcessorMixin", ())  # since transformers 5.23
_ARGUMENT = {"image": "images", "video": "videos", "audio": "audio"}  # of a processor


def check_order(processor: ProcessorMixin, text: str, keys: Sequence[str], texts: Mapping[str, list[str]],
                tokens: Iterable[str]) -> None:
    """Refuse a rendered prompt with media in another order than their ``keys``, where one of the special ``tokens``
    stands for features of several kinds: they take its places in the order of the keys.

    Args:
        texts: by kind what stands for each medium.

    Raises:
        DataError: the template has moved media.
    """
    kinds = [key.partition(":")[0] for key in keys]
    if len({*kinds}) < 2:
        return
    marks = {str(getattr(processor, f"{kind}_token", kind)): kind for kind in kinds}
    written = [marks[found] for found in re.findall("|".join(map(re.escape, marks)), text)]
    shared = [token for token in tokens if sum(any(token in one for one in found) for found in texts.values()) > 1]
    if written != kinds and shared:
        raise DataError(f"the chat template wrote media in the order {', '.join(written)}, and the row has "
                        f"{', '.join(kinds)}, of which {shared[0]} stands for all: {shorten(text)}. Order the row "
                        "so, or give another template with --chat_template")


class MediumProcessor:
    """Makes the tensors of one medium, and the text that takes the place of its placeholder.

    Args:
        token_frames: frames of a sound for each token, where the processor cuts sounds into whole windows and writes no
            tokens for them; 0: it writes them.

    Attributes:
        by_number: a picture beside others in a prompt has other tensors than alone (LLaVA-OneVision).
        rate: samples per second of sounds.
    """

    def __init__(self, processor: ProcessorMixin, token_frames: int = 0) -> None:
        self.processor: Any = processor
        self.token_frames = token_frames
        pictures = getattr(processor, "image_processor", None)
        self.by_number = "batch_num_images" in getattr(pictures, "model_input_names", ())
        self.rate = int(getattr(getattr(processor, "feature_extractor", None), "sampling_rate", 16000))

    def blank(self, kind: str) -> MediaTensors:
        """Process a small medium of ``kind``."""
        if kind == "audio":
            return self.process(kind, Waveform(np.zeros(self.rate, np.float32), self.rate))
        picture = Image.new("RGB", _BLANK, "gray")  # not black, which no scale of pixels changes
        return self.process(kind, picture if kind == "image" else Video([picture] * 2, 1.0, [0.0, 0.5]))

    def process(self, kind: str, medium: Decoded, several: bool = False) -> MediaTensors:
        """Process one medium; ``several``: a picture of a prompt with others, where :attr:`by_number` says so.

        Raises:
            ValueError, RuntimeError, ArithmeticError: the processor refuses the medium.
            UserError: the model's processor takes no media of this kind.
        """
        content, options = _content(medium), self._options(medium)
        if getattr(self.processor, f"{kind}_token", None) is None:
            raise UserError(f"{type(self.processor).__name__} takes no media of kind {kind}")
        cut_s = 0.0
        if isinstance(medium, Waveform):
            content = self.fit(medium).samples
            cut_s = medium.seconds - len(content) / self.rate
        if kind == "audio" and self.token_frames:
            tensors, text = self._windows(content)
        elif self._takes_prompts(kind):
            tensors, text = self._prompt(kind, content, options)
        else:
            given = [[content, content]] if several else [content]
            name = kind if kind == "audio" else f"{kind}s"
            tensors, (text, *_) = getattr(self.processor, f"_process_{name}")(given, **options)
        held = {name: torch.as_tensor(value) for name, value in tensors.items() if _is_numbers(value)}
        if "video_position_ids" in held:  # before 5.19, transformers has a dimension for videos around that of frames
            held |= {name: value.flatten(0, -3) for name, value in held.items() if value.dim() > 2}
        return MediaTensors(kind, {name: value[:1] for name, value in held.items()} if several else held, text, cut_s)

    def text_of_size(self, height: int, width: int) -> str | None:
        """Compute the text of a picture from its size; None: it takes the pixels, or the processor has no function for
        its own sizes.

        Raises:
            ValueError: the processor refuses this size.
        """
        if self._around is None:
            return None
        first, token, last, more = self._around
        return f"{first}{token * (self._count(height, width) - more)}{last}"

    def _count(self, height: int, width: int) -> int:
        """Number of tokens of a picture, by the processor's own function."""
        return int(self.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"][0])

    @cached_property
    def _around(self) -> tuple[str, str, str, int] | None:
        """Text before the tokens of a picture, the token, the text after them, and how many tokens of these texts the
        processor's function counts; all are the same for two sizes."""
        found = {self._split_text(*size) for size in _PROBES}
        return found.pop() if len(found) == 1 else None

    def _split_text(self, height: int, width: int) -> tuple[str, str, str, int] | None:
        if not hasattr(self.processor, "_get_num_multimodal_tokens"):
            return None
        text = self.process("image", Image.new("RGB", (width, height))).text
        ids = [index for index in self.processor.image_token_ids if index is not None]
        names = {self.processor.image_token, *self.processor.tokenizer.convert_ids_to_tokens(ids)}
        token = max(names, key=text.count)
        count = text.count(token)
        first, *rest = text.split(token * count)
        return (first, token, rest[0], self._count(height, width) - count) if rest else None

    def _options(self, medium: Decoded) -> dict[str, Any]:
        """Options of the processor, with the times of the frames of a video."""
        own, kind = self.processor, _option_group(medium)
        options = own._merge_kwargs(own.valid_processor_kwargs, tokenizer_init_kwargs=own.tokenizer.init_kwargs,
                                    return_tensors="pt")[kind]
        if isinstance(medium, Video):
            options |= {"video_metadata": [_metadata(medium)], "do_sample_frames": False}
        elif isinstance(medium, Waveform):
            options |= {"sampling_rate": self.rate}  # without it, extractors print a warning for each sound
        return options

    def _takes_prompts(self, kind: str) -> bool:
        """True if the processor takes whole prompts only, or its function for one medium asks for what a prompt has
        decided (Qwen2.5-Omni)."""
        name = f"replace_{kind}_token"
        return (isinstance(self.processor, _OMNI)
                or getattr(type(self.processor), name) is getattr(ProcessorMixin, name))

    def _prompt(self, kind: str, content: Any, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Process a prompt of one placeholder."""
        token, timed = getattr(self.processor, f"{kind}_token"), {}
        if kind == "video":
            metadata, = options["video_metadata"]
            timed = {"fps": metadata.sampled_fps, "do_sample_frames": False}
        elif kind == "audio":
            timed = {"sampling_rate": self.rate}
        found = dict(self.processor(text=[token], **{_ARGUMENT[kind]: [content]}, return_tensors="pt", **timed))
        ids, mark = found.pop("input_ids")[0], self.processor.tokenizer.convert_tokens_to_ids(token)
        found.pop("attention_mask", None)
        return found, token * int((ids == mark).sum())

    def fit(self, sound: Waveform) -> Waveform:
        """Cut a sound, at :attr:`rate`, to the window of the processor.

        Raises:
            ValueError: it is longer by more than :data:`EXCESS_S`, and the processor would keep only its start.
        """
        if len(sound.samples) > self._window + EXCESS_S * self.rate:
            raise ValueError(f"it lasts {sound.seconds:.2f} s, and the model processes only the first "
                             f"{self._window / self.rate:g} s of a sound. Cut it into pieces")
        return replace(sound, samples=sound.samples[:self._window])

    @cached_property
    def _window(self) -> int:
        """Samples of the longest sound that the processor does not truncate."""
        options = self._options(Waveform(np.zeros(1, np.float32), self.rate))
        most = getattr(self.processor.feature_extractor, "n_samples", _ENDLESS)
        return _ENDLESS if self.token_frames or not options.get("truncation", True) else most

    def _windows(self, samples: np.ndarray) -> tuple[dict[str, Any], str]:
        """Process a sound in whole windows, :attr:`token_frames` a token."""
        extractor = self.processor.feature_extractor
        mel = self.processor._retrieve_input_features([samples], extractor.nb_max_frames, sampling_rate=self.rate,
                                                      padding=True, truncation=False, return_tensors="pt",
                                                      pad_to_multiple_of=extractor.n_samples)
        tokens = len(mel) * extractor.nb_max_frames // self.token_frames
        return {"input_features": mel}, self.processor.audio_token * tokens


def host_bytes(medium: Decoded) -> int:
    """Return the bytes of a decoded medium."""
    if isinstance(medium, Video):
        return sum(map(host_bytes, medium.frames))
    return 3 * math.prod(medium.size) if isinstance(medium, Image.Image) else medium.samples.nbytes


def _is_numbers(value: Any) -> bool:
    """True for a tensor, and for the seconds that Qwen-VL's processors list per video."""
    return isinstance(value, torch.Tensor) or isinstance(value, list) and bool(value) and isinstance(value[0], float)


def _content(medium: Decoded) -> Any:
    """Return what a processor takes: a picture, frames or samples."""
    if isinstance(medium, Waveform):
        return medium.samples
    return medium.frames if isinstance(medium, Video) else medium


def _option_group(medium: Decoded) -> str:
    if isinstance(medium, Waveform):
        return "audio_kwargs"
    return "videos_kwargs" if isinstance(medium, Video) else "images_kwargs"


def _metadata(video: Video) -> VideoMetadata:
    """Times of the frames, as indices into a video of one frame a second, which need not be whole numbers."""
    seconds: Any = video.seconds
    times: list[Any] = list(video.times)
    return VideoMetadata(total_num_frames=seconds, fps=1.0, duration=seconds, frames_indices=times)
