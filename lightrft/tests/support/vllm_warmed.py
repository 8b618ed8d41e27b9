"""For the server of :mod:`lightrft.tests.support.launch`: forks start vLLM, whose kernels for a CPU are in place."""
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher

from lightrft.tests.support import young_garbage

young_garbage = young_garbage  # searches what was made lately
if not dispatcher._registry:
    current_platform.register_triton_kernel_overrides()
dispatcher.register_kernels = lambda overrides: None
