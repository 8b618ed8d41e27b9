"""The attention of a decode step of the hf engine: products of PyTorch against one kernel in Triton."""
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.store import Row
from benchmarks.gpu.timing import replayed, takes_triton
from lightrft.rollout.hf.cache_plan import KVPlan, KVSpec
from lightrft.rollout.hf.kv_cache import Decode, KVCache

LAYERS = 8  # their keys and values together do not stay in the caches of a GPU
CHECKED = 4  # rows that are compared with float64


def decode_row(sizes: dict[str, Any], device: torch.device, prompts: int, samples: int, prompt: int, own: int) -> Row:
    """Time the attention of a layer both ways in bfloat16, and compare it with float64.

    Args:
        prompts, samples: prompts, and rows of each of them.
        prompt, own: tokens of each prompt and of each row.
    """
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    dim, rows = sizes["hidden_size"] // heads, prompts * samples
    cache = KVCache(KVSpec(tuple(range(LAYERS)), kv_heads, dim, torch.bfloat16), KVPlan(prompts, prompt, rows, own),
                    device)
    for store in (cache.prompts, cache.rows):
        store.data.normal_()
    packed = torch.randn(rows, kv_heads, heads // kv_heads + 2, dim, device=device, dtype=torch.bfloat16)
    row: Row = {
        "heads": f"{heads} / {kv_heads} x {dim}", "rows": f"{prompts} x {samples}", "tokens": f"{prompt} + {own}"
    }
    for name, one_kernel in {"products": False, "one kernel": True}.items():
        if one_kernel and not takes_triton(device):
            continue
        view = Decode(cache, one_kernel)
        view.arrange(
            np.arange(prompts).repeat(samples), np.full(rows, prompt), (rows, prompts, samples, prompt), stay=True)
        view.advance(torch.full((rows, ), own - 1, device=device), own, torch.ones(rows, device=device))
        seconds = replayed(lambda: [view.attend_packed(i, None, None, packed) for i in range(LAYERS)],
                           device)  # noqa: B023
        row |= {f"{name}, us": seconds / LAYERS * 1e6, f"{name}, error": error(view, packed, samples)}
    return row


@torch.no_grad()
def error(view: Decode, packed: Tensor, samples: int) -> float:
    """Return the largest difference of the first rows from float64, as a share of the largest number."""
    found = view.attend_packed(0, None, None, packed)[:CHECKED].double()
    stores, exact = (view.cache.prompts.data[0].double(), view.cache.rows.data[0, :, :CHECKED].double()), []
    for i in range(len(found)):
        keys, values = torch.cat([stores[0][:, i // samples], stores[1][:, i]], 2)
        scores = packed[i, :, :-2].double() @ keys.mT * keys.shape[-1]**-0.5
        exact.append((scores.softmax(-1) @ values).flatten())
    expected = torch.stack(exact)
    return ((found - expected).abs().max() / expected.abs().max()).item()
