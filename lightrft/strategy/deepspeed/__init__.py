"""DeepSpeed ZeRO: constants for other modules, without importing torch or the package deepspeed."""
from dataclasses import dataclass

from lightrft.utils.errors import install_command

NO_DEEPSPEED = f"--strategy deepspeed: the package deepspeed is not installed; run: {install_command('deepspeed')}"
REDUCED_AT_ONCE = 50_000_000  # elements of gradients
LIVE_AT_ONCE = 1_000_000_000  # weights that stage 3 gathers ahead and keeps, unless activations are recomputed


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements. Gradients are reduced, and weights fetched ahead, ``reduce`` at a time; with stage 3 each
    rank keeps parameters of at most ``persist`` whole, because gathering them would cost more time than it saves
    memory."""
    reduce: int = REDUCED_AT_ONCE
    persist: int = 100_000
