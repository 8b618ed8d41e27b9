"""Checks at load that a model runs on packed sequences: a small copy of it computes each sequence as if it were alone.

A family may drop the layout of a row on its way to attention, number positions over the whole row, mix tokens outside
attention, or scale its logits in a way of its own. Its own code says so: a copy of the config with a few narrow layers
and random weights, on the CPU, is asked for log-probs of three sequences, in one row, where two share their prompt, and
one by one. A family of which no copy runs is refused as well: nothing shows that it is right.
"""
import contextlib
import copy
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, logging as hf_logging, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightrft.models.actor_language import ActorLanguage
from lightrft.models.attention import PACKED
from lightrft.models.kept_layers import first_shared, keep_layers, lists_of_layers, set_apart
from lightrft.models.rope import ORIGINAL
from lightrft.types import Experience
from lightrft.utils.errors import CaptureException, first_line

LENS = [9, 14, 14]  # tokens of the sequences
PROMPT = 6  # tokens at the beginning of the last two, which they share
BETWEEN = 11  # a limit of length that the first one does not cross
WINDOW = 5  # tokens of a sliding window or a chunk: less than a sequence
CHUNK = 8  # tokens of a chunk of a recurrence, a power of two: less than a sequence
VOCAB, WIDTH = 96, 64
HEADS = (2, 4)  # of a copy: families split a width over heads that are a multiple of one or the other
MOST = 50_000_000  # parameters of a copy; a larger one takes seconds, and is not tried
TOLERANCE = 2e-5  # nats; faults are of tenths, rounding is below 1e-5 in most families
ROUNDINGS = 4  # how many times its own rounding a family may be off: those that repeat layers amplify each bit
_FAULTS: dict[str, str] = {}  # by config, wherever it lies
_REACH = ("sliding_window", "attention_chunk_size", "local_attention", "window_size", "floor_scale")
_NOT_WIDTHS = ("position", "max", "vocab", "window", "token", "length", "theta", "expert", "layers", "heads")


class NoCopy(Exception):
    """No small copy of a config runs in the code of its family; the message says why."""


class Gap(NamedTuple):
    """Largest differences between log-probs of a token, in nats: in a pack and alone (``packed``), and alone in float32
    and in float64 (``rounding``)."""
    packed: float
    rounding: float

    @property
    def is_rounding(self) -> bool:
        """True if packed sequences are right."""
        return self.packed <= max(TOLERANCE, ROUNDINGS * self.rounding)


def packing_fault(config: PretrainedConfig) -> str:
    """Describe what is wrong with packed sequences in the decoder of ``config``; empty: nothing.

    A decoder that only its multimodal family has is not tried: tests compare those families, which are few.
    Neither the random state nor the default device or dtype changes. The answer is stored.
    """
    text = config.get_text_config()
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return ""
    values = identity(text)
    if values not in _FAULTS:
        _FAULTS[values] = _fault(text)
    return _FAULTS[values]


def identity(text: PretrainedConfig) -> str:
    """Return the content of a text config, wherever it lies."""
    return json.dumps({**text.to_dict(), "_name_or_path": ""}, default=str)


def small_packed(text: PretrainedConfig) -> PreTrainedModel | None:
    """Return the small copy of a decoder with packed attention; None for one that only its multimodal family has.

    Raises:
        NoCopy: there is none.
    """
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    with _aside():
        return _built(_small(text)[0], PACKED)


def _fault(config: PretrainedConfig) -> str:
    gap = Gap(0.0, 0.0)
    with CaptureException() as caught:  # the code of the family may raise whatever it likes
        gap = packing_gap(config)
    if isinstance(caught.cause, NoCopy):
        return f"cannot be checked on packed sequences: {caught.cause}"
    if isinstance(caught.cause, Exception):
        return f"cannot run on packed sequences: {type(caught.cause).__name__}: {first_line(caught.cause)}"
    if caught.cause is not None:
        raise caught.cause
    return "" if gap.is_rounding else ("has other log-probs for a sequence in a pack than for the same sequence alone "
                                       f"(by {gap.packed:.2g} nats in a small copy with random weights)")


def packing_gap(config: PretrainedConfig) -> Gap:
    """Compare the log-probs of three sequences in a pack with those of each alone, in a small copy.

    Raises:
        NoCopy: there is none.
    """
    with _aside():
        small, model = _small(config)
        alone = _alone(model)
        packed = _packed(small, model) - alone
        rounding = torch.zeros(1)
        with contextlib.suppress(RuntimeError):  # of code that has float32 somewhere
            rounding = _alone(model.double()) - alone
        return Gap(float(packed.abs().max()), float(rounding.abs().max()))


def _small(config: PretrainedConfig) -> tuple[PretrainedConfig, PreTrainedModel]:
    """Return the narrowest copy of ``config`` that runs, with its model; the last to be tried is the config itself."""
    reason = ""
    for heads in (*HEADS, 0, None):
        small = model = None
        with CaptureException() as caught:  # of a config that does not fit the family: the next one may
            small = copy.deepcopy(config) if heads is None else cut(config, heads)
            model = _built_if_small(small)
            _alone(model)
        if small is not None and model is not None and caught.cause is None:
            return small, model
        if not isinstance(caught.cause, Exception):
            raise caught.cause  # type: ignore[misc]
        if not reason or not isinstance(caught.cause, NoCopy):
            reason = f"{type(caught.cause).__name__}: {first_line(caught.cause)}".removeprefix("NoCopy: ")
    raise NoCopy(f"no small copy of its config runs in the code of transformers ({reason})")


def _built_if_small(config: PretrainedConfig) -> PreTrainedModel:
    if (size := _size(config)) > MOST:
        raise NoCopy(f"the smallest copy has {size:,} parameters")
    return _built(config, "eager")


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


def cut(config: PretrainedConfig, heads: int = HEADS[0]) -> PretrainedConfig:
    """Copy a text config with one layer of each kind, few tokens, short windows and ``heads`` heads (0: all)."""
    small: Any = copy.deepcopy(config)
    _cut_layers(small)
    if heads:
        _cut_widths(small, heads)
        _cut_states(small)
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
    """Keep the first layer of each kind, and at least two; a layer that reads the keys of another one is of a kind of
    its own."""
    count, lists, own = small.num_hidden_layers, lists_of_layers(small), first_shared(small)
    apart = set_apart(small)
    kinds: dict[str, int] = {}
    for index in range(count):
        kind = [index >= own, apart.get(index), *(value[index] for value in lists.values())]
        kinds.setdefault(json.dumps(kind, default=str), index)
    chosen = [*kinds.values()][:6]
    chosen += [index for index in range(count) if index not in chosen][:max(0, 2 - len(chosen))]
    keep_layers(small, sorted(chosen))
    if "decoder_layers" in vars(small):  # of a family that also has an encoder
        small.decoder_layers = len(chosen)


def _cut_widths(small: Any, few: int) -> None:
    """Lower the number of heads, of the size that they have, to about ``few``, and with it all other widths."""
    heads, hidden = small.num_attention_heads, small.hidden_size
    groups = getattr(small, "num_key_value_heads", None) or getattr(vars(small).get("attn_config"), "kv_n_heads", None)
    shared = min(few, groups or few)
    most = shared * min(2, heads // groups if groups else 1)
    for config in (small, *filter(None, map(vars(small).get, small.sub_configs))):
        for name, value in list(vars(config).items()):
            if isinstance(value, list) and "intermediate" in name:  # one width per layer
                setattr(config, name, [min(width, WIDTH) for width in value])
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            if name in ("num_key_value_heads", "kv_n_heads"):
                setattr(config, name, shared)
            elif name in ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                          "decoder_attention_heads"):
                setattr(config, name, most if value == heads else value)
            elif name == "num_experts":
                setattr(config, name, min(value, WIDTH))
            elif name == "attention_hidden_size":  # of Zamba 2, whose attention reads two streams
                setattr(config, name, value // hidden * (hidden // heads * most))
            elif value == hidden and not any(word in name for word in _NOT_WIDTHS):
                setattr(config, name, hidden // heads * most)
            elif ("intermediate" in name or "ffn" in name or "inner" in name) and value > WIDTH:
                setattr(config, name, WIDTH)


def _cut_states(small: Any) -> None:
    """Fit the heads of layers with state to the width, keep few where they are apart from it, and shorten their chunks
    to less than a sequence."""
    values = vars(small)
    inner = int(values.get("mamba_expand") or 0) * small.hidden_size
    if inner and "mamba_n_heads" in values and not values.get("mamba_d_ssm"):
        small.mamba_n_heads = inner // small.mamba_d_head
    if inner and "n_mamba_heads" in values:
        small.mamba_headdim = inner // small.n_mamba_heads
    if values.get("linear_num_key_heads"):
        small.linear_num_value_heads = 2 * small.linear_num_value_heads // small.linear_num_key_heads
        small.linear_num_key_heads = 2
    if values.get("linear_num_heads"):
        small.linear_num_heads = 2
    for name in ("chunk_size", "mamba_chunk_size", "block_size"):
        if values.get(name):
            setattr(small, name, CHUNK)


def _cut_lengths(small: Any) -> None:
    """Move limits of length, which RoPE types depend on, between the two sequences."""
    parameters = getattr(small, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, dict) and ORIGINAL in rope:
            rope[ORIGINAL] = BETWEEN
        if isinstance(rope, dict) and "dynamic" in str(rope.get("rope_type")):
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
    ids[2][:PROMPT] = ids[1][:PROMPT]
    exp = Experience.pack(ids, prompt_lens=[1, PROMPT, PROMPT])
    exp.loss_mask[:] = True
    return exp


def _alone(model: PreTrainedModel) -> Tensor:
    """Log-probs [T] of each sequence by the whole model of the family, one by one; 0 at first tokens."""
    rows = []
    for ids in _sequences().token_ids.split(LENS):
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        rows += [logits.new_zeros(1), logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]]
    return torch.cat(rows)


def _packed(config: PretrainedConfig, model: PreTrainedModel) -> Tensor:
    """Log-probs [T] of all in one row, by a model with the weights of ``model``, as a trainer computes them."""
    packed = _built(config, PACKED)
    packed.load_state_dict(model.state_dict())
    logprobs = ActorLanguage(packed).eval()(_sequences())[0]
    assert logprobs is not None, "only a call with read= returns none"
    return logprobs
