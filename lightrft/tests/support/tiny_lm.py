"""A tiny wrapped HF model, its data, and plain-PyTorch training to compare strategies with."""
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.models.recomputation import recompute
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.sharding import ParamSlice

SPEC = OptimSpec(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, schedule=lambda step: min(1.0, (step + 1) / 4))
MICRO_BATCHES = 4
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


class Reference:
    """Reference training, written with torch.optim and clip_grad_norm_ on one process."""

    def __init__(self, device: torch.device, tied: bool = True) -> None:
        self.model = TinyLM(tied=tied).to(device)
        params = list(self.model.parameters())
        groups = [{"params": [p for p in params if p.ndim >= 2], "weight_decay": SPEC.weight_decay},
                  {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=SPEC.lr, betas=SPEC.betas, foreach=False)
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
