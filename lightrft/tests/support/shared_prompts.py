"""Packed sequences of which some begin with the same prompt."""
import torch

from lightrft.types import Experience

# tokens of a prompt, and of what follows it in each sequence: shorter and longer than the prompt, short and long rows
GROUPS = [(17, [3, 9, 40, 1, 70]), (5, [1, 2]), (30, [12]), (80, [6, 100, 33]), (20, [20, 21, 7, 3, 60])]


def experience(vocab: int = 260, seed: int = 0) -> Experience:
    """The sequences of ``GROUPS`` in random order; masks have several runs, and also cover some tokens of prompts."""
    rng = torch.Generator().manual_seed(seed)
    rows, masks, prompts = [], [], []
    for prompt, tails in GROUPS:
        head = torch.randint(4, vocab, (prompt, ), generator=rng).tolist()
        for length in tails:
            rows.append(head + torch.randint(4, vocab, (length, ), generator=rng).tolist())
            masks.append((torch.rand(len(rows[-1]), generator=rng) < 0.7).tolist())
            prompts.append(prompt)
    order = torch.randperm(len(rows), generator=rng).tolist()
    return Experience.pack(*([each[i] for i in order] for each in (rows, masks)),
                           prompt_lens=[prompts[i] for i in order])
