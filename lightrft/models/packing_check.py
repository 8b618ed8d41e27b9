"""Checks at load that a model runs on packed sequences: a small copy of it computes each sequence as if it were alone.

A family may drop the layout of a row on its way to attention, number positions over the whole row, mix tokens outside
attention, or scale its logits in a way of its own. Its own code says so: a copy of the config with a few narrow layers
and random weights, on the CPU, is asked for log-probs of two sequences, in one row and one by one.
"""
import contextlib
import copy
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, logging as hf_logging, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightrft.models.actor_language import ActorLanguage
from lightrft.models.attention import PACKED
from lightrft.models.rope import ORIGINAL
from lightrft.types import Experience
from lightrft.utils.errors import CaptureException, first_line

LENS = [9, 14]  # tokens of the two sequences
BETWEEN = 11  # a limit of length that only the second one crosses
WINDOW = 5  # tokens of a sliding window or a chunk: less than a sequence
VOCAB, WIDTH = 96, 64
MOST = 50_000_000  # parameters of a copy; a larger one takes seconds, and is not tried
TOLERANCE = 1e-3  # nats; faults are of tenths, rounding of the sharp weights of a copy is below 1e-5 in most families
_FAULTS: dict[str, str] = {}  # by config
_REACH = ("sliding_window", "attention_chunk_size", "local_attention", "window_size", "floor_scale")
_NOT_WIDTHS = ("position", "max", "vocab", "window", "token", "length", "theta", "expert", "layers", "heads")


class NoCopy(Exception):
    """No small copy of a config runs in the code of its family."""


def packing_fault(config: PretrainedConfig) -> str:
    """Say what is wrong with packed sequences in the decoder of ``config``; empty: nothing, or it cannot be tried (no
    causal language model of transformers, or a config of which no small copy runs).

    Neither the random state nor the default device or dtype changes. The answer is kept.
    """
    text = config.get_text_config()
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return ""
    values = json.dumps(text.to_dict(), default=str)
    if values not in _FAULTS:
        _FAULTS[values] = _fault(text)
    return _FAULTS[values]


def _fault(config: PretrainedConfig) -> str:
    gap = 0.0
    with CaptureException() as caught:  # the code of the family may raise whatever it likes
        gap = packing_gap(config)
    if isinstance(caught.cause, NoCopy):
        return ""
    if isinstance(caught.cause, Exception):
        return f"cannot run on packed sequences: {type(caught.cause).__name__}: {first_line(caught.cause)}"
    if caught.cause is not None:
        raise caught.cause
    return "" if gap <= TOLERANCE else ("has other log-probs for a sequence in a pack than for the same sequence alone "
                                        f"(by {gap:.2g} nats in a small copy with random weights)")


def packing_gap(config: PretrainedConfig) -> float:
    """Return the largest difference, in nats, between the log-probs of a token in a pack and alone, in a small copy.

    Raises:
        NoCopy: there is none.
    """
    with _aside():
        for widths in (True, False):
            with contextlib.suppress(Exception):  # of a config that does not fit the family: the next one may
                small = cut(config, widths)
                if _size(small) <= MOST:
                    model = _built(small, "eager")
                    alone = _alone(model)
                    break
        else:
            raise NoCopy(config.model_type)
        return float((_packed(small, model) - alone).abs().max())


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Context of quiet computations on the CPU in float32 whose random numbers leave no trace."""
    verbosity, dtype = hf_logging.get_verbosity(), torch.get_default_dtype()
    hf_logging.set_verbosity(hf_logging.CRITICAL)
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(dtype)
        hf_logging.set_verbosity(verbosity)


def cut(config: PretrainedConfig, widths: bool = True) -> PretrainedConfig:
    """Copy a text config with one layer of each kind, few tokens, short windows and, with ``widths``, few heads."""
    small: Any = copy.deepcopy(config)
    _cut_layers(small)
    if widths:
        _cut_widths(small)
    for name, value in list(vars(small).items()):
        if name.startswith("vocab_size"):
            setattr(small, name, VOCAB)
        elif name.endswith("token_id") and value is not None:
            setattr(small, name, 0)
        elif name in _REACH and isinstance(value, int) and value > WINDOW:
            setattr(small, name, WINDOW)
    _cut_lengths(small)
    return small


def _cut_layers(small: Any) -> None:
    """Keep the first layer of each kind, and at least two."""
    count = small.num_hidden_layers
    lists = {name: value for name, value in vars(small).items() if isinstance(value, list) and len(value) == count > 1}
    kinds: dict[str, int] = {}
    for index in range(count):
        kinds.setdefault(json.dumps([value[index] for value in lists.values()], default=str), index)
    chosen = [*kinds.values()][:6]
    chosen += [index for index in range(count) if index not in chosen][:max(0, 2 - len(chosen))]
    for name, value in lists.items():
        setattr(small, name, [value[index] for index in sorted(chosen)])
    small.num_hidden_layers = len(chosen)
    if "decoder_layers" in vars(small):  # of a family that also has an encoder
        small.decoder_layers = len(chosen)


def _cut_widths(small: Any) -> None:
    """Lower the number of heads, of the size that they have, and with it all other widths."""
    heads, hidden = small.num_attention_heads, small.hidden_size
    groups = getattr(small, "num_key_value_heads", None)
    shared = min(2, groups or 2)
    most = shared * min(2, heads // groups if groups else 1)
    new = {heads: most, hidden: hidden // heads * most}
    for name, value in list(vars(small).items()):
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if name == "num_key_value_heads":
            setattr(small, name, shared)
        elif name in ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                      "decoder_attention_heads"):
            setattr(small, name, most if value == heads else value)
        elif value == hidden and not any(word in name for word in _NOT_WIDTHS):
            setattr(small, name, new[hidden])
        elif ("intermediate" in name or "ffn" in name or "inner" in name) and value > WIDTH:
            setattr(small, name, WIDTH)


def _cut_lengths(small: Any) -> None:
    """Let limits of length, which RoPE types depend on, be between the two sequences."""
    parameters = getattr(small, "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):
        if isinstance(each, dict) and ORIGINAL in each:
            each[ORIGINAL] = BETWEEN
        if isinstance(each, dict) and "dynamic" in str(each.get("rope_type")):
            small.max_position_embeddings = BETWEEN
    if hasattr(small, ORIGINAL):
        setattr(small, ORIGINAL, BETWEEN)


def _size(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return sum(weight.numel()
                   for weight in AutoModelForCausalLM.from_config(config, trust_remote_code=False).parameters())


def _built(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Build a model with sharp weights, so that a wrong position shows."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False,
                                                              attn_implementation=attention,
                                                              dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(0, 1.5 * weight.shape[-1]**-0.5)
    return model


def _sequences() -> Experience:
    ids = [[(5 * n * n + 7 * i + 3) % (VOCAB - 4) + 2 for i in range(length)] for n, length in enumerate(LENS)]
    exp = Experience.pack(ids, prompt_lens=[1] * len(ids))
    exp.loss_mask[:] = True
    return exp


def _alone(model: PreTrainedModel) -> Tensor:
    """Log-probs [T] of each sequence by the whole model of the family, one by one; 0 at first tokens."""
    rows = []
    for ids in _sequences().token_ids.split(LENS):
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        rows += [torch.zeros(1), logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]]
    return torch.cat(rows)


def _packed(config: PretrainedConfig, model: PreTrainedModel) -> Tensor:
    """Log-probs [T] of both in one row, by a model with the weights of ``model``, as a trainer computes them."""
    packed = _built(config, PACKED)
    packed.load_state_dict(model.state_dict())
    logprobs = ActorLanguage(packed).eval()(_sequences())[0]
    assert logprobs is not None
    return logprobs
