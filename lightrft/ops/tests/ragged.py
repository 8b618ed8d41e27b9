"""Random ragged multi-turn batches: gaps, empty masks, one-token sequences, sequences without tokens."""
import torch
from hypothesis import strategies as st

SEEDS = st.integers(0, 10**6)


def batch(seed, max_len=9, max_seqs=6):
    """``(lens, cu_seqlens, mask [T], gen)``."""
    gen = torch.Generator().manual_seed(seed)
    seqs = int(torch.randint(1, max_seqs + 1, (), generator=gen))
    lens = torch.randint(0, max_len + 1, (seqs, ), generator=gen)
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lens.cumsum(0)]).int()
    density = torch.tensor([0.0, 0.5, 1.0])[torch.randint(3, (seqs, ), generator=gen)]
    mask = torch.rand(int(cu[-1]), generator=gen) < torch.repeat_interleave(density, lens)
    return lens.tolist(), cu, mask, gen


def spans(cu):
    """(start, end) of each sequence."""
    return list(zip(cu[:-1].tolist(), cu[1:].tolist()))
