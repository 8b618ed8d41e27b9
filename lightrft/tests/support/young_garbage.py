"""For processes of tests alone, once it is imported: who searches for garbage searches what was made lately.

vLLM, when it starts and ends, and DeepSpeed, whenever it prepares a model, search all objects, of which most belong to
imported modules: half a second each time. vLLM also unfreezes what ``gc.freeze`` has hidden.
"""
import gc

from lightrft.tests.support.quick_starts import young

gc.collect = young  # type: ignore[assignment]
