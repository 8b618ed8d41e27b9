"""Compare memory and time of chunked log-probs with log_softmax over the whole [N, V], forward and backward.

    python benchmarks/logprob_memory.py [--tokens 512] [--hidden 128] [--chunk_mib 32] [--vocabs 1024 8192 ...]

Each cell runs in a separate process. On CPU the peak is the process's (``ru_maxrss``) minus what it held before the
call; on CUDA ``torch.cuda.max_memory_allocated``, likewise. The gradient of the weight, [V, H], which anything must
return, is subtracted as well, so the column shows temporaries only. The chunked column stays at the chunk (and some
MiB of the matmul library); a V whose whole [N, V] fits into the chunk needs less. Times on CPU are CPU-seconds of one
thread, so that other work on the machine does not show.
"""
import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightrft.ops.logprobs import chunked_logprobs  # noqa: E402

VOCABS = (1024, 4096, 16384, 32768, 65536, 151936)


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_mib: float) -> tuple[Tensor, Tensor]:
    """Compute them as most trainers do: with several copies of the whole [N, V]."""
    logits = hidden @ weight.t()
    logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_mib: float) -> tuple[Tensor, Tensor]:
    """Compute them with the library's function."""
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, chunk_mib=chunk_mib)
    assert entropy is not None, "asked for by default"
    return logprobs, entropy


METHODS = {"naive": naive, "chunked": chunked}


def peak_bytes(device: str) -> int:
    """Peak memory of this process until now."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def once(method: str, inputs: list[Tensor], chunk_mib: float) -> float:
    """Time one forward and backward pass: CPU-seconds on CPU, wall time on CUDA."""
    clock = time.perf_counter if inputs[0].is_cuda else time.process_time
    start = clock()
    hidden, weight, targets = inputs
    logprobs, entropy = METHODS[method](hidden, weight, targets, chunk_mib)
    torch.autograd.grad(logprobs.sum() + 0.1 * entropy.sum(), (hidden, weight))
    if inputs[0].is_cuda:
        torch.cuda.synchronize()
    return clock() - start


def make(tokens: int, hidden: int, vocab: int, device: str) -> list[Tensor]:
    """Make hidden states, weight and targets."""
    x = torch.randn(tokens, hidden, device=device, requires_grad=True)
    weight = torch.randn(vocab, hidden, device=device).mul_(hidden**-0.5).requires_grad_()
    return [x, weight, torch.randint(vocab, (tokens, ), device=device)]


def cell(args: argparse.Namespace) -> dict[str, float]:
    """Measure one method at one V: MiB of temporaries and the best of the repeats in seconds."""
    torch.set_num_threads(1)
    once(args.cell, make(8, args.hidden, 64, args.device), args.chunk_mib)  # libraries and thread pools are there now
    inputs = make(args.tokens, args.hidden, args.vocabs[0], args.device)
    before = peak_bytes(args.device)
    seconds = [once(args.cell, inputs, args.chunk_mib)]
    extra = peak_bytes(args.device) - before - inputs[1].nbytes
    seconds += [once(args.cell, inputs, args.chunk_mib) for _ in range(args.repeats - 1)]
    return {"mib": max(extra, 0) / 2**20, "seconds": min(seconds)}


def measure(method: str, vocab: int, args: argparse.Namespace) -> dict[str, float]:
    """Run one cell in a fresh process."""
    options = ["tokens", "hidden", "chunk_mib", "repeats", "device"]
    flags = [text for name in options for text in (f"--{name}", str(vars(args)[name]))]
    command = [sys.executable, __file__, "--cell", method, "--vocabs", str(vocab), *flags]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def parse() -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="N, rows of hidden states")
    parser.add_argument("--hidden", type=int, default=128, help="H, width of the model")
    parser.add_argument("--chunk_mib", type=float, default=32, help="MiB of logits and temporaries alive at once")
    parser.add_argument("--vocabs", type=int, nargs="+", default=VOCABS, help="V, one row each")
    parser.add_argument("--repeats", type=int, default=3, help="runs per cell; the fastest counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--cell", choices=tuple(METHODS), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Print the table, or one cell of it as JSON."""
    args = parse()
    if args.cell:
        print(json.dumps(cell(args)))
        return
    print(
        f"N={args.tokens} H={args.hidden} chunk={args.chunk_mib:g} MiB, float32, {args.device}, forward + backward of "
        "log-probs and entropy;\npeak without inputs and the weight's gradient\n")
    print("| V | naive MiB | chunked MiB | naive s | chunked s | time |\n| ---: | ---: | ---: | ---: | ---: | ---: |")
    for vocab in args.vocabs:
        old, new = (measure(method, vocab, args) for method in ("naive", "chunked"))
        print(
            f"| {vocab} | {old['mib']:.0f} | {new['mib']:.0f} | {old['seconds']:.3f} | {new['seconds']:.3f} | "
            f"{new['seconds'] / old['seconds']:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
