"""Base of the actor and the critic: one packed forward through the decoder body of a Hugging Face model; the critic."""
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PretrainedConfig, PreTrainedModel

from lightrft.models import rope, stateful
from lightrft.models.activations import ModelShape
from lightrft.models.actor_modality import ActorModality, MediaModality
from lightrft.models.lora import ADAPTER, apart_params, base_model, has_adapters, hf_name, merged_params, trained_names
from lightrft.models.routing import read_routing, Routing
from lightrft.models.shared_prompts import forward_row
from lightrft.models.weight_files import WeightFiles
from lightrft.ops.segment import RowGather
from lightrft.types import Experience
from lightrft.utils.errors import UserError


class PackedModel(nn.Module):
    """A Hugging Face (or PEFT) model, ``model``, that runs on packed sequences.

    The body and the head both run inside ``forward`` of this module, which therefore is the root for sharding.
    ``share_prompts``: a common prompt of several sequences is forwarded once (:func:`forward_row`); not with dropout,
    where every sequence has its own masks.
    """
    share_prompts = True
    routes = False  # forward passes leave the choices of the routers in ``routing``
    routing: Routing | None = None

    def __init__(self, model: nn.Module, modality: ActorModality | None = None) -> None:
        super().__init__()
        self.model = model
        self.modality = modality or ActorModality()
        self.modality.adapt(self.hf_model)
        self._by_length = any(True for _ in rope.ropes(self.hf_model))
        self._drops = any(isinstance(each, _DropoutNd) and each.p > 0 for each in model.modules())
        self._continues = stateful.continues(self.hf_model)
        self.files: WeightFiles | None = None  # of the weights that are on the meta device

    @property
    def hf_model(self) -> PreTrainedModel:
        """The Hugging Face model, without the PEFT wrapper."""
        return base_model(self.model)

    @property
    def config(self) -> object:
        """The Hugging Face config."""
        return self.hf_model.config

    @property
    def attention(self) -> float:
        """Cost of attention (:attr:`ModelShape.attention`); 0 for a config without the usual names."""
        shape = ModelShape.of(self.hf_model.config)
        return shape.attention if shape else 0.0

    def action_hidden_states(self, exp: Experience) -> tuple[Tensor, Tensor]:
        """Return ``(index [N], hidden [N, H])``: tokens of ``exp.drawn`` with a predecessor, and its hidden state.

        N may be 0; the graph still reaches every parameter, with zero gradients, so that sharded ranks stay in step.
        """
        return exp.actions, self.hidden_states(exp, exp.host.actions - 1)

    def hidden_states(self, exp: Experience, tokens: Tensor | None = None) -> Tensor:
        """Return the last hidden states of the ``tokens`` (int64 [N], on the host; None: all), [N, H]."""
        exp = exp.branches
        share = self.share_prompts and self._continues and not (self.training and self._drops)
        found = forward_row(exp, share, rope.choices(self.hf_model, exp.lens) if self._by_length else ())
        row, index = found
        inputs = self.modality.inputs(row, self.hf_model)
        body: Any = self.modality.body(self.hf_model)
        outputs = body(**inputs, **({"output_router_logits": True} if self.routes else {}))
        if self.routes:
            self.routing = read_routing(outputs, self.hf_model, exp, found)
        hidden = outputs.last_hidden_state[0]
        layers = stateful.mixing_layers(body.config)
        if inputs["packing"].calls < layers:
            raise UserError(
                f"{type(self.hf_model).__name__} called packed attention {inputs['packing'].calls} times in {layers} "
                "layers: some layers would mix packed sequences, so it cannot be used")
        if index is not None:
            tokens = index if tokens is None else index[tokens]
        return hidden if tokens is None else RowGather(tokens, len(hidden), hidden.device)(hidden)

    def read(self, name: str, at: tuple[slice, ...]) -> Tensor:
        """Return the block ``at`` of the tensor ``name`` of this module from the files of the model."""
        if self.files is None:
            raise ValueError(f"{name}: the weights of this model are in no files")
        return self.files.read(hf_name(name.removeprefix("model.")), at)

    @property
    def merges(self) -> bool:
        """True if :meth:`export_params` computes weights (LoRA) that this module does not hold."""
        return has_adapters(self.model)

    @property
    def lora_rank(self) -> int:
        """Rank of the LoRA adapters; 0 without."""
        config: Any = self.model.peft_config[ADAPTER] if has_adapters(self.model) else None
        return config.r if config else 0

    def export_params(self, stream: Iterator[tuple[str, Tensor]], merge: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Rename full tensors from the names in this module to Hugging Face names, with LoRA merged or apart."""
        own = ((name.removeprefix("model."), tensor) for name, tensor in stream)
        return merged_params(own, self.model) if merge else apart_params(own, self.model)

    def trained_names(self, merge: bool = True) -> set[str]:
        """Return the names, here, of the parameters from which the weights that training changes are made."""
        return {f"model.{name}" for name in trained_names(self.model, merge)}


def with_score(family: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Derive from the language model of a family, which may have towers, one whose head is ``score`` (Linear to
    ``num_labels`` values, no bias). Its name and module stay: transformers reads checkpoints by them."""

    class Scored(family):  # type: ignore[valid-type, misc]
        _tied_weights_keys = None

        def post_init(self) -> None:
            head = super().get_output_embeddings()
            delattr(self, next(name for name, child in self.named_children() if child is head))
            if "score" not in self._modules:  # else a derived class has made one
                self.score = nn.Linear(self.config.get_text_config().hidden_size, self.config.num_labels, bias=False)
            super().post_init()

        def get_output_embeddings(self) -> nn.Module | None:
            """None once the head of the family is gone; many families fail then."""
            return None if "score" in self._modules else super().get_output_embeddings()

    Scored.__name__, Scored.__qualname__, Scored.__module__ = family.__name__, family.__qualname__, family.__module__
    return Scored


def critic_class(modality: ActorModality, config: PretrainedConfig) -> Any:
    """The class that loads a decoder with a head ``score``: Hugging Face's for sequence classification where it has one
    for the family, else that of :func:`with_score`, as for models with towers."""
    known: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if isinstance(modality, MediaModality) or type(config) not in known:
        return with_score(modality.auto_class._model_mapping[type(config)])
    return known[type(config)]


def named_head(stream: Iterator[tuple[str, Tensor]], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the head of a model under the name ``prefix`` too; Hugging Face reads it as ``score``."""
    for name, tensor in stream:
        yield name, tensor
        if name.startswith("score.") and prefix != "score":
            yield f"{prefix}.{name[6:]}", tensor


class Critic(PackedModel):
    """A decoder with one scalar per token.

    Args:
        model: Hugging Face's sequence-classification model with one label, or one of :func:`with_score`.
        value_head_prefix: further name of the head in exported checkpoints.
    """

    def __init__(self, model: nn.Module, value_head_prefix: str = "score",
                 modality: ActorModality | None = None) -> None:
        super().__init__(model, modality)
        self.value_head_prefix = value_head_prefix

    def forward(self, exp: Experience) -> Tensor:
        """Values [T], float32: at t the value of the state before token t (the hidden state at t - 1).

        0 outside ``exp.drawn`` and at the first token of every sequence. Differentiable, also when nothing is kept.
        """
        index, hidden = self.action_hidden_states(exp)
        score: Any = self.hf_model.score
        values = score(hidden)[:, 0].float()
        return torch.zeros(exp.num_tokens, device=values.device).index_put((index, ), values)

    def export_params(self, stream: Iterator[tuple[str, Tensor]], merge: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Override :meth:`PackedModel.export_params` by :func:`named_head`."""
        yield from named_head(super().export_params(stream, merge), self.value_head_prefix)
