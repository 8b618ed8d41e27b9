"""How to build a tiny random model of a family that sees or hears, with its processor, from the public classes."""
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForMultimodalLM, GenerationConfig, PreTrainedModel
from transformers.video_utils import VideoMetadata

from lightrft.models.weight_files import name_as_published
from lightrft.tests.support import tiny

pytest.importorskip("torchvision", reason="processors need torchvision: make test installs it")
_TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.12,
         "bos_token_id": None}  # yapf: disable


def metadata(video: Any, rate: int = 24) -> VideoMetadata:
    """What a processor is told of a video of ``rate`` frames a second."""
    return VideoMetadata(len(video), rate, frames_indices=list(range(len(video))))


@dataclass(frozen=True)
class TinyFamily:
    """What is particular to one family.

    Attributes:
        config: arguments of the config of ``model_type``, without the sizes of the language model.
        processor: makes the processor from a tokenizer.
        placeholders: the text that stands for one medium, by kind.
        marks: special tokens, by the name of their id in the config.
        names: special tokens, by the name under which the processor asks the tokenizer for them.
        nested: the processor takes the pictures of a prompt as a list inside of a list.
        together: Hugging Face's own forward takes prompts with several kinds of media.
        process: makes tokens and tensors of a prompt where the processor itself does not.
        named: changes the tensors of a prompt of one video to those that the video processor makes.
        forwarded: changes the arguments of Hugging Face's own forward, with its model.
    """
    model_type: str
    config: dict[str, Any]
    processor: Callable[[Any], Any]
    placeholders: dict[str, str]
    marks: dict[str, str]
    names: dict[str, str] = field(default_factory=dict)
    nested: bool = False
    together: bool = True
    process: Callable[..., Any] | None = None
    named: Callable[[dict[str, Any]], dict[str, Any]] = dict
    forwarded: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda hf, given: given

    def tokenizer(self) -> Any:
        """The tokenizer of all tiny models, with the special tokens of the family."""
        tokenizer = tiny.tokenizer(**self.names)
        tokenizer.add_tokens([*self.marks.values(), *self.names.values()], special_tokens=True)
        return tokenizer

    def model(self, tied: bool, tokenizer: Any) -> PreTrainedModel:
        """A float32 model with random weights, always the same."""
        ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        text = _TEXT | ends | {"vocab_size": len(tokenizer), "tie_word_embeddings": tied} | self.config["text_config"]
        marks = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in self.marks.items()}
        given = self.config | {"text_config": text, "tie_word_embeddings": tied} | marks | ends
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            hf = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(self.model_type, **given),
                                                      dtype=torch.float32).eval()
            for name, weight in hf.named_parameters():
                if weight.ndim > 1 and not weight.any():  # Gemma's projector starts as zeros
                    torch.nn.init.normal_(weight, std=0.12)
                if self.model_type == "gemma4" and "q_norm" in name:  # its attention scales no scores
                    torch.nn.init.constant_(weight, len(weight)**-0.5)
        hf.generation_config = GenerationConfig(**ends)
        return hf

    def save(self, folder: Path | str, tied: bool) -> Path:
        """Write the model, its tokenizer and processor to ``folder``, as a download would look; returns it."""
        path, tokenizer = Path(folder), self.tokenizer()
        processor = self.processor(tokenizer)
        name_as_published(self.model(tied, processor.tokenizer)).save_pretrained(path)
        processor.save_pretrained(path)
        return path
