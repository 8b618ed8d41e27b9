"""Reward models: a decoder whose head scores whole packed sequences, or a language model that judges every step."""
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import log
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn, Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from lightrft.config.options import show
from lightrft.config.rm_schema import JudgeFormat, StepFormat
from lightrft.models.actor_modality import ActorModality, config_value
from lightrft.models.head_names import checked_head, HEAD, heads_among, replaces_tokens, tensor_names
from lightrft.models.kept_layers import keep_layers
from lightrft.models.lora import ADAPTER, has_adapters
from lightrft.models.packed_model import critic_class, named_head, PackedModel
from lightrft.ops.logprobs import Read, read_logprobs
from lightrft.ops.segment import segment_softmax, seq_ids
from lightrft.types import Experience
from lightrft.utils.errors import first_line, UserError
from lightrft.utils.tensors import keep_float32

SCORES = "reward_model"  # entry of config.json
STEPS = "process_reward_model"  # entry of config.json, the fields of StepFormat
JUDGE = "generative_reward_model"  # entry of config.json, the fields of JudgeFormat
SPEAKS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")  # ends of the names of language models
START = log(1 / 0.07)  # of the learnt scale, as in CLIP


@dataclass(frozen=True)
class RewardKind:
    """Kind of a reward model, from its config.json.

    Attributes:
        steps: format of a process reward model.
        judge: format of the requests to a judge of ``lightrft grm``.
        language: another causal language model; False, with no format: a model with a head, or none that scores.
        measured: mean and std of the rewards of a model with a head are known.
    """
    steps: StepFormat | None = None
    judge: JudgeFormat | None = None
    language: bool = False
    measured: bool = False

    @classmethod
    def of(cls, config: PretrainedConfig, path: str = "") -> "RewardKind":
        """Read the kind of the model of ``config``, and of a language model from its files at ``path``: with a head for
        scores in the place of that for tokens it is a reward model of another program."""
        name = (config.architectures or [""])[0]
        if (steps := config_value(config, STEPS, None)) is not None:
            return cls(steps=StepFormat(**steps))
        if (head := config_value(config, SCORES, None)) is not None or not name.endswith(SPEAKS):
            return cls(measured=RewardHead(**head or _moments(config)).measured)
        judge = config_value(config, JUDGE, None)
        if judge is None and path and replaces_tokens(tensor_names(path)):
            return cls(measured=RewardHead(**_moments(config)).measured)
        return cls(language=True) if judge is None else cls(judge=JudgeFormat(**judge))

    @property
    def generates(self) -> bool:
        """True if the model generates its judgement as text."""
        return self.judge is not None or self.language


@dataclass
class RewardHead:
    """Shape of the head of a reward model.

    Attributes:
        names: one score each; the first one is the reward.
        pooling: "last": of the last token of a sequence; "attn": of a learnt average over its tokens.
        prefix: name of the head in the checkpoint.
        mean, std: of the rewards of the last evaluation, or of training rows; std 0: they are not known.
    """
    names: list[str] = field(default_factory=lambda: ["preference"])
    pooling: str = "last"
    prefix: str = "score"
    mean: float = 0.0
    std: float = 0.0

    @classmethod
    def of(cls, config: PretrainedConfig, path: str, prefix: str | None = None) -> "RewardHead":
        """Read the shape of a trained reward model, of any sequence classifier of Hugging Face with one score, or of a
        reward model of OpenRLHF.

        Args:
            prefix: name of the head where config.json has none.

        Raises:
            UserError: the model has no head that scores sequences, or has another name for it.
        """
        stored = config_value(config, SCORES, None)
        if stored is not None:
            head = cls(**stored)
            if prefix not in (None, "score", head.prefix):
                raise UserError(f"--value_head_prefix {prefix}: the head of {path!r} is {head.prefix}; give "
                                f"--value_head_prefix {head.prefix}, or drop the option")
            return head
        if _is_classifier(config) and config.num_labels != 1:
            raise UserError(
                f"reward model {path!r} has {config.num_labels} scores; give a sequence classifier with one")
        names = tensor_names(path)
        heads = heads_among(names)
        if _is_classifier(config) and prefix is None and (not heads or "score" in heads):
            return cls()
        return cls._of_other(config, path, prefix, names)

    @classmethod
    def _of_other(cls, config: PretrainedConfig, path: str, prefix: str | None, names: set[str]) -> "RewardHead":
        """Read a head of another program, by its name in the files; config.json may have that name, and mean and std.

        Raises:
            UserError: there is none, or there are several and neither ``prefix`` nor config.json names one.
        """
        name = (config.architectures or [""])[0]
        heads, prefix = heads_among(names), prefix or config_value(config, "value_head_prefix", None)
        if not heads and (names or not name or name.endswith(SPEAKS)):
            raise UserError(f"reward model {path!r} has no head ({name or 'no architecture'} in its config.json scores "
                            "nothing): train one with lightrft rm, or give a sequence classifier with one score")
        if prefix is None and len(heads) > 1:
            raise UserError(f"reward model {path!r} has the heads {show(heads)}: name one with --value_head_prefix")
        moments = _moments(config)
        if {"mean", "std"} & names and not moments:
            raise UserError(f"reward model {path!r} has mean and std of its rewards as tensors, which are not read: "
                            "write them into its config.json, as the numbers mean and std")
        return cls(prefix=checked_head(path, names, prefix or (heads or ["score"])[0]), **moments)

    def check_read(self, missing: set[str], unread: set[str], path: str) -> None:
        """Refuse a scorer whose files, perhaps of a hub, have no head of this name; as :meth:`check_new`."""
        if "score.weight" in missing:
            raise UserError(f"--value_head_prefix {self.prefix}: {path!r} has no {self.prefix}.weight; its heads: "
                            f"{show(heads_among(unread)) or 'none'}")

    def check_continues(self, config: PretrainedConfig, path: str) -> None:
        """Refuse to continue the training of a reward model with a head of another shape, which would replace its own.

        Raises:
            UserError: the model at ``path`` has another head.
        """
        known = config_value(config, SCORES, None)
        if known is None:
            self._check_labels(config, path)
            return
        flags = ("heads_types", "pooling_method", "value_head_prefix")
        for flag, mine, stored in zip(flags, self._shape, RewardHead(**known)._shape):
            if mine != stored:
                raise UserError(f"--{flag} {show(mine)}: the reward model {path!r} has {show(stored)}, and keeps its "
                                f"own head in further training; give --{flag} {show(stored)}")

    def _check_labels(self, config: PretrainedConfig, path: str) -> None:
        """Refuse other heads than those of a sequence classifier that another program trained."""
        if not _is_classifier(config):
            return
        labels = [label for _, label in sorted((config.id2label or {}).items())]
        named = len(labels) > 1 and not all(re.fullmatch(r"LABEL_\d+", label) for label in labels)
        if len(labels) != len(self.names) or named and labels != self.names:
            raise UserError(f"--heads_types {show(self.names)}: the classifier {path!r} has the scores {show(labels)}, "
                            "and keeps its own head in further training; name as many, in this order")

    def check_new(self, missing: set[str], unread: set[str], path: str) -> None:
        """Refuse a head of zeros for a model that has one of another name.

        Args:
            missing: parameters that the checkpoint lacks.
            unread: its tensors that the model does not read.

        Raises:
            UserError: names the head to give with ``--value_head_prefix``.
        """
        heads = heads_among(unread)
        if "score.weight" in missing and heads:
            raise UserError(
                f"--value_head_prefix {self.prefix}: {path!r} has no {self.prefix}.weight, but {heads[0]}.weight, "
                f"and a new head would replace it. Give --value_head_prefix {heads[0]}, or remove that head")

    @property
    def _shape(self) -> tuple[list[str], str, str]:
        return self.names, self.pooling, self.prefix

    @property
    def measured(self) -> bool:
        """True if mean and std are known."""
        return self.std > 0

    def write(self, config: PretrainedConfig) -> None:
        """Describe the head in the config of its model."""
        setattr(config, SCORES, asdict(self))
        config.id2label = dict(enumerate(self.names))
        config.label2id = {name: i for i, name in enumerate(self.names)}

    @property
    def new(self) -> tuple[str, ...]:
        """Parameters that a language model lacks."""
        return ("score.weight", "pool.weight") if self.pooling == "attn" else ("score.weight", )


def _moments(config: PretrainedConfig) -> dict[str, Any]:
    """Return mean and std of the rewards in the config.json of OpenRLHF; empty if they are not known."""
    moments = {key: config_value(config, key, None) for key in ("mean", "std")}
    return {key: float(value) for key, value in moments.items()} if None not in moments.values() else {}


def check_language(config: PretrainedConfig, unread: set[str], path: str) -> None:
    """Refuse a scoring model where a generating one is needed: its head would be dropped.

    Args:
        unread: tensors of the checkpoint that the language model does not read.

    Raises:
        UserError: by its config.json, or a head that it has, the model at ``path`` is a reward model or a classifier.
    """
    name = (config.architectures or [""])[0]
    heads = [] if name.endswith(SPEAKS) else [each for each in sorted(unread) if HEAD.match(each)]
    if heads or _is_classifier(config) or config_value(config, SCORES, None) is not None:
        raise UserError(f"{path!r} scores texts and does not generate ({heads[0] if heads else name or SCORES} says "
                        "so): its head would be dropped. Give the language model that it was trained from; lightrft "
                        "rm trains a reward model further")


def check_critic(config: PretrainedConfig, path: str) -> None:
    """Refuse a reward model or classifier whose head is not that of a critic, one score of a token, and forget the
    entry of a reward model: its mean is not that of values.

    Raises:
        UserError: it has several scores, or pools over tokens.
    """
    if config_value(config, SCORES, None) is None and not _is_classifier(config):
        return
    head = RewardHead.of(config, path)
    if len(head.names) > 1 or head.pooling != "last":
        raise UserError(
            f"--critic_pretrain {path!r}: a reward model with the scores {show(head.names)} and the pooling "
            f"{head.pooling}; a critic has one score per token. Give one that was trained with one of "
            "--heads_types and --pooling_method last, or a policy, from which a critic starts at 0")
    vars(config).pop(SCORES, None)


def _is_classifier(config: PretrainedConfig) -> bool:
    return (config.architectures or [""])[0].endswith("ForSequenceClassification")


def cut_layers(config: PretrainedConfig, layer: int) -> None:
    """Keep the decoder layers up to ``layer`` (0: the embeddings alone, -1: all), as :func:`numbered` has it.

    Raises:
        UserError: there is no such layer, or the family cannot do with these alone.
    """
    text: Any = config.get_text_config()
    count = text.num_hidden_layers
    kept = count + 1 + layer if layer < 0 else layer
    if not 0 <= kept <= count:
        raise UserError(
            f"--probing_layer {layer}: the model has {count} layers; give 0 (the embeddings) to {count}, or "
            f"-1 (the last) to {-count - 1}")
    keep_layers(text, range(kept))
    try:
        text.validate()
    except StrictDataclassError as error:
        raise UserError(f"--probing_layer {layer}: model type {text.model_type!r} has no such copy of {kept} layers: "
                        f"{first_line(error.__cause__ or error)} Give a higher layer") from error


def reward_class(modality: ActorModality, config: PretrainedConfig, pooling: str) -> Any:
    """Return the class that loads a reward model: Hugging Face's sequence classifier where it has one, with ``score``
    for one value per entry of ``config.num_labels``, or :class:`PooledScore` for the pooling "attn"."""
    family = critic_class(modality, config)
    return _with_pool(family) if pooling == "attn" else family


class PooledScore(nn.Linear):
    """Head behind an attention pooling. Its weight [1, K, H] has a dimension more than that of a classifier, so that
    the classifiers of Hugging Face, which read the last token, refuse it, whatever labels they are asked for."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__(width, count, bias=False)
        self.weight = nn.Parameter(self.weight.detach()[None])

    def forward(self, pooled: Tensor) -> Tensor:
        """Return the scores [B, K] of pooled states [B, H]."""
        return F.linear(pooled, self.weight[0])


def _with_pool(family: type[PreTrainedModel]) -> type[PreTrainedModel]:

    class Pooled(family):  # type: ignore[valid-type, misc]

        def post_init(self) -> None:
            width = self.config.get_text_config().hidden_size
            self.score, self.pool = PooledScore(width, self.config.num_labels), nn.Linear(width, 1, bias=False)
            super().post_init()

    Pooled.__name__, Pooled.__qualname__, Pooled.__module__ = family.__name__, family.__qualname__, family.__module__
    return Pooled


class Scale(nn.Module):
    """Learnt positive factors of ``count`` scores."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.full((count, ), START))

    def forward(self, scores: Tensor) -> Tensor:
        """Scale the scores [B, count]."""
        return scores * self.log.exp()


class RewardModel(PackedModel):
    """A decoder whose head scores every packed sequence, in float32.

    Args:
        model: of :func:`reward_class`, perhaps in a PEFT model.
        scale: multiply scores in training mode by ``exp`` of a learnt number per head, as LightRFT's
            ``--scale_for_train`` does; evaluations and exports do not have it.
    """

    def __init__(self, model: nn.Module, head: RewardHead, modality: ActorModality | None = None,
                 scale: bool = False) -> None:
        super().__init__(model, modality)
        self.head = head
        self.scale = Scale(len(head.names)) if scale else None
        own = [name.removesuffix(".weight") for name in head.new]
        trained = any(each.requires_grad for each in model.parameters())
        for module in (*map(self.hf_model.get_submodule, own), *([self.scale] if self.scale else [])):
            keep_float32(module)
            module.requires_grad_(trained)
        if has_adapters(model):  # they are made already; this is for the exported ones
            peft: Any = model.peft_config[ADAPTER]
            peft.modules_to_save = own

    def forward(self, exp: Experience) -> Tensor:
        """Return the scores [B, K], float32, of the sequences by each of the K heads."""
        pooled = self._pooled(self.hidden_states(exp).float(), exp)
        hf = cast(Any, self.hf_model)
        scores: Tensor = hf.score(pooled)
        return self.scale(scores) if self.training and self.scale is not None else scores

    def _pooled(self, hidden: Tensor, exp: Experience) -> Tensor:
        """Reduce hidden states [T, H] to one per sequence, [B, H]."""
        if self.head.pooling == "last":
            return hidden.index_select(0, exp.cu_seqlens[1:].long() - 1)
        hf = cast(Any, self.hf_model)
        weights = segment_softmax(hf.pool(hidden)[:, 0], exp.cu_seqlens)
        empty = hidden.new_zeros(exp.num_seqs, hidden.shape[1])
        return empty.index_add(0, seq_ids(exp.cu_seqlens, exp.num_tokens), weights[:, None] * hidden)

    def export_params(self, stream: Iterator[tuple[str, Tensor]], merge: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Override :meth:`PackedModel.export_params` by :func:`named_head`; the scale is left out."""
        own = (each for each in super().export_params(stream, merge) if not each[0].startswith("scale."))
        yield from named_head(own, self.head.prefix)


def _first(logprobs: Tensor, part: slice) -> tuple[Tensor]:
    return (logprobs[:, 0], )


class ProcessRewardModel(PackedModel):
    """A causal language model; its prediction after the placeholder of a step is its judgement of the step.

    Args:
        model: as of :class:`~lightrft.models.actor_language.ActorLanguage`.
        form: format of steps.
        classes: ids of the reward tokens; empty: the whole vocabulary.
        chunk_mib: MiB of float32 logits alive at once.
    """

    def __init__(self, model: nn.Module, form: StepFormat, classes: list[int], chunk_mib: int = 256,
                 modality: ActorModality | None = None) -> None:
        super().__init__(model, modality)
        self.form, self.classes, self.chunk_mib = form, classes, chunk_mib
        setattr(self.hf_model.config, STEPS, vars(form))

    def forward(self, exp: Experience, read: Read = _first) -> tuple[Tensor, ...]:
        """Return what ``read`` makes of the log-probs [N, K] of the classes at the N placeholders, float32; by default
        those of the first class.

        The placeholders are the tokens in the loss of ``exp`` (``exp.actions``). N may be 0; the graph still reaches
        every parameter.
        """
        hidden, head = self.hidden_states(exp, exp.host.actions), self.modality.head(self.hf_model)
        weight, bias = head.weight.to(hidden.dtype), head.bias
        if self.classes:  # so few logits cost nothing in float32; a list as index would wait for the device
            hidden, weight = hidden.float(), torch.stack([weight[i] for i in self.classes]).float()
            bias = None if bias is None else torch.stack([bias[i] for i in self.classes]).float()
        return read_logprobs(hidden * head.scale, weight, read, None, bias, self.chunk_mib, head.soft_cap)
