"""Log-probs of the same tokens by two evaluations of one trained tiny model: healthy ones that round, and faults."""
import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads":
    2, "head_dim": 12, "tie_word_embeddings": False, "initializer_range": 0.05, "max_position_embeddings": 64,
    "eos_token_id": None, "pad_token_id": None, "bos_token_id": None
}
KINDS = {
    "dense": ("qwen3", {}),
    "experts": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
}
LETTERS, LENGTH = "0123456789+=;", 40
LEARNING_RATE = 2e-3  # of AdamW, near the largest with which the tiny models still learn


def model(kind: str) -> PreTrainedModel:
    """A random model of ``kind``, with eager attention, whose matmuls can be traced."""
    name, changes = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, vocab_size=len(LETTERS), **SIZES, **changes)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def _sums() -> Tensor:
    """Token ids of a long text of sums, so that the model is certain of some tokens and not of others."""
    rng = torch.Generator().manual_seed(1)
    text = "".join(f"{a}+{b}={a + b};" for a, b in torch.randint(0, 99, (4000, 2), generator=rng).tolist())
    return torch.tensor([LETTERS.index(letter) for letter in text])


def logprobs(found: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probs [N * (L - 1)] of ``ids`` [N, L]; the softmax is in float32."""
    logits = found(ids, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).flatten()


def train(found: PreTrainedModel, steps: int = 80) -> None:
    """Train ``found`` on sums, in place."""
    text, rng = _sums(), torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(found.parameters(), LEARNING_RATE)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - LENGTH, (16, 1), generator=rng)
        (-logprobs(found, text[starts + torch.arange(LENGTH)]).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def sample(found: PreTrainedModel, count: int = 80) -> Tensor:
    """Sample ``count`` sequences at temperature 1: token ids [count, LENGTH]."""
    rng = torch.Generator().manual_seed(3)
    ids = new = torch.randint(0, len(LETTERS), (count, 1), generator=rng)
    cache = None
    while ids.shape[1] < LENGTH:
        out = found(new, past_key_values=cache, use_cache=True)
        cache, new = out.past_key_values, torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=rng)
        ids = torch.cat([ids, new], 1)
    return ids


class TF32(TorchDispatchMode):
    """Rounds the operands of every float32 matmul to the 10 bits of mantissa that TF32 keeps."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            args = tuple(tf32(x) if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in args)
        return func(*args, **(kwargs or {}))


def tf32(x: Tensor) -> Tensor:
    """``x`` rounded to 10 bits of mantissa, ties away from zero."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def in_fp8(weight: Tensor) -> Tensor:
    """``weight`` rounded to float8 with one scale, as engines hold it."""
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


class Recording:
    """A trained policy of ``kind``, tokens that it sampled, and their log-probs in float32 (``trainer``)."""

    def __init__(self, kind: str) -> None:
        self.policy, self.untrained = model(kind), model(kind)
        train(self.policy)
        self.ids = sample(self.policy)
        self.trainer = self.of(self.policy)

    @torch.no_grad()
    def of(self, found: PreTrainedModel, bf16: bool = False) -> Tensor:
        """Log-probs of the tokens by ``found``, or by its copy in bfloat16."""
        return logprobs(copy.deepcopy(found).bfloat16() if bf16 else found, self.ids)

    @torch.no_grad()
    def apart(self) -> Tensor:
        """Log-probs of the policy, one sequence at a time: matmuls of other rows."""
        return torch.cat([logprobs(self.policy, row[None]) for row in self.ids])

    def in_tf32(self) -> Tensor:
        """Log-probs of the policy with TF32 matmuls."""
        with TF32():
            return self.of(self.policy)

    def changed(self, suffix: str, change: Callable[[Tensor], Tensor]) -> PreTrainedModel:
        """The policy with every weight whose name ends with ``suffix`` changed."""
        other = copy.deepcopy(self.policy)
        for name, weight in other.named_parameters():
            weight.data = change(weight.data) if name.endswith(suffix) and weight.ndim > 1 else weight.data
        return other

    def one_step_on(self, learning_rate: float) -> PreTrainedModel:
        """The policy after a policy-gradient step of AdamW on its samples: weights to which the engine's are stale."""
        other = copy.deepcopy(self.policy)
        advantages = torch.randn(len(self.ids), 1, generator=torch.Generator().manual_seed(5))
        (-(logprobs(other, self.ids).view(len(self.ids), -1) * advantages).mean()).backward()
        torch.optim.AdamW(other.parameters(), learning_rate, weight_decay=0.0).step()
        return other
