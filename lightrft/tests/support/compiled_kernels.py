"""Compile the Triton kernels for an H100, without a GPU: their types fit, and a program has room for its blocks.

For an environment with Triton; :mod:`lightrft.models.tests.test_liger` runs it there. Prints what each compiled to.
"""
from typing import Any

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lightrft.ops import logits_kernels
from lightrft.rollout.hf import attention_kernel

ROOM = 99 << 10  # bytes that programs share, at most, on the GPUs that have the least since Ampere
compiled: list[tuple[str, Any]] = []


class H100:
    """The driver that Triton asks at a launch."""

    def get_current_target(self) -> GPUTarget:
        """Return the architecture that the kernels are for."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the index of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the stream of all launches."""
        return 0


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, run: Any = JITFunction.run,
                 **kwargs: Any) -> None:
    """Compile in place of a launch."""
    compiled.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))


def attend(dtype: torch.dtype, dim: int, queries: int, softcap: float | None) -> None:
    """Call the kernel of ``--fused_decode`` for two rows of one prompt."""
    prompts, rows = torch.zeros(2, 1, 2, 64, dim, dtype=dtype), torch.zeros(2, 2, 2, 32, dim, dtype=dtype)
    packed, numbers = torch.zeros(4, queries + 2, dim, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    attention_kernel.attend(packed[:, :-2], prompts, rows, numbers, numbers, numbers, 0.1, None, softcap)


def logprobs(out: torch.dtype) -> None:
    """Call the kernels of ``--fused_logprobs``."""
    logits, targets = torch.zeros(2, 151_936), torch.zeros(2, dtype=torch.int64)
    logprobs, norms, entropies = torch.zeros(3, 2)
    logits_kernels.read(logits, targets, 1.0, logprobs, norms, entropies)
    logits_kernels.slope(logits, logits.to(out), targets, 1.0, norms, entropies, logprobs, entropies)


if __name__ == "__main__":
    driver.set_active(H100())
    JITFunction.run = compile_only
    attend(torch.bfloat16, 64, 7, None)
    attend(torch.bfloat16, 256, 2, 50.0)
    attend(torch.float32, 256, 1, None)
    logprobs(torch.bfloat16)
    for name, kernel in compiled:
        products = "mma" in kernel.asm["ptx"]
        print(f"{name}: {kernel.metadata.shared >> 10} KiB, tensor cores {'used' if products else 'not used'}")
        assert kernel.metadata.shared <= ROOM, (name, kernel.metadata)
    print(f"{len(compiled)} compiled")
