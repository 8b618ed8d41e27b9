"""A tiny wrapped HF model, its data, and plain-PyTorch training to compare strategies with."""
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightrft.config.shared_schema import OptimConfig, PolicyModelConfig
from lightrft.models.recomputation import recompute
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.sharding import ParamSlice

SPEC = OptimSpec(1e-3, OptimConfig(adam_betas=[0.9, 0.95], l2=0.1), lambda step: min(1.0, (step + 1) / 4))
EIGHT_BIT = replace(SPEC, options=replace(SPEC.options, optim="adamw_8bit"))
MICRO_BATCHES = 4
MAX_NORMS = [0.5, 0.0] * 5  # of ten steps
VOCAB = 65  # odd, as is the width of the MLP: shards of unequal size


class TinyLM(nn.Module):
    """An HF model inside a module of ours, as actors are."""

    def __init__(self, layers: int = 2, hidden: int = 32, tied: bool = True, seed: int = 0,
                 recomputing: bool | str = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = Qwen2ForCausalLM(
            Qwen2Config(vocab_size=VOCAB, hidden_size=hidden, intermediate_size=51, num_hidden_layers=layers,
                        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied, initializer_range=0.1))
        recompute(self.model, PolicyModelConfig(gradient_checkpointing=recomputing))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Log-probs of the masked tokens."""
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits[mask[:, 1:]].float()
        return logits.log_softmax(-1).gather(-1, ids[:, 1:][mask[:, 1:]][:, None]).squeeze(-1)

    def export_params(self, stream, merge=True):
        return ((name.removeprefix("model."), tensor) for name, tensor in stream)

    def trained_names(self, merge=True):
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}


def micro_batch(step: int, index: int, device: torch.device, empty: bool = False) -> tuple[Tensor, Tensor]:
    """Token ids and loss mask [2, 12]; of an empty one the mask is all False."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    ids = torch.randint(0, VOCAB, (2, 12), generator=generator)
    mask = torch.rand(2, 12, generator=generator) < (0.0 if empty else 0.7)
    return ids.to(device), mask.to(device)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], scale: float = 1.0) -> Tensor:
    """This micro-batch's share of the loss of the step."""
    return -model(*batch).sum() * (scale / 50)


def share(step: int, rank: int, world_size: int, device: torch.device, count: int = MICRO_BATCHES):
    """The micro-batches of ``rank``, padded with empty ones to the same number on all ranks."""
    mine = list(range(rank, count, world_size))
    rounds = -(-count // world_size)
    batches = [micro_batch(step, index, device) for index in mine]
    return batches + [micro_batch(step, 0, device, empty=True)] * (rounds - len(mine))


def placed(part: ParamSlice) -> Tensor:
    """The whole parameter, with zeros where other ranks hold it."""
    whole = torch.zeros(part.shape)
    for piece in part.pieces:
        whole[tuple(slice(first, first + size) for first, size in zip(piece.start, piece.tensor.shape))] = piece.tensor
    return whole


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of SPEC."""
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False)


class Reference:
    """Reference training, written with torch.optim and clip_grad_norm_ on one process."""

    def __init__(self, device: torch.device, tied: bool = True, build: Callable = adamw, lr: float = SPEC.lr) -> None:
        self.model = TinyLM(tied=tied).to(device)
        params = list(self.model.parameters())
        groups = [{"params": [p for p in params if p.ndim >= 2], "lr": lr, "weight_decay": SPEC.options.l2},
                  {"params": [p for p in params if p.ndim < 2], "lr": lr, "weight_decay": 0.0}]
        self.optimizer = build(groups)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, SPEC.schedule)
        self.device = device

    def backward(self, step: int, count: int = MICRO_BATCHES, scale: float = 1.0) -> None:
        for index in range(count):
            loss_of(self.model, micro_batch(step, index, self.device), scale).backward()

    def step(self, max_norm: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm or float("inf")).item()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norm

    def weights(self) -> dict[str, Tensor]:
        """The weights under the names that a strategy exports."""
        return dict(self.model.export_params((name, param.detach()) for name, param in self.model.named_parameters()))


@cache
def expected_gradients(device: torch.device, count: int) -> dict[str, Tensor]:
    """Gradients of the first ``count`` micro-batches in plain PyTorch."""
    reference = Reference(device)
    reference.backward(0, count)
    return {name: param.grad for name, param in reference.model.named_parameters() if param.grad is not None}


@cache
def expected_steps(device: torch.device) -> tuple[list[float], Reference]:
    """Norms of ten steps in plain PyTorch, and what they have trained."""
    reference, norms = Reference(device, tied=False), []
    for step, max_norm in enumerate(MAX_NORMS):
        reference.backward(step)
        norms.append(reference.step(max_norm))
    return norms, reference
