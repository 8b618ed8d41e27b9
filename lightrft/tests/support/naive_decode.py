"""What the kernel of ``--fused_decode`` computes, as a loop over queries and tokens in float64."""
import torch
from torch import Tensor


def attend(query: Tensor, prompts: Tensor, rows: Tensor, slots: Tensor, lengths: Tensor, newest: Tensor, scaling: float,
           window: int | None, softcap: float | None) -> Tensor:
    """Attend as :func:`lightrft.rollout.hf.attention_kernel.attend`."""
    out, heads = torch.zeros(query.shape, dtype=torch.float64), prompts.shape[2]
    sizes = [x.flatten().tolist() for x in (slots, lengths, newest)]
    for row, (slot, length, last) in enumerate(zip(*sizes)):
        for head in range(heads):
            keys, values = (torch.cat([prompts[i, slot, head, :length], rows[i, row, head, :last + 1]]).double()
                            for i in (0, 1))  # yapf: disable
            first = max(0, len(keys) - (window or len(keys)))
            for number, one in enumerate(query[row * heads + head].double()):
                scores = torch.stack([one @ key for key in keys[first:]]) * scaling
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                out[row * heads + head, number] = scores.softmax(0) @ values[first:]
    return out.view(len(slots), -1).to(query.dtype)
