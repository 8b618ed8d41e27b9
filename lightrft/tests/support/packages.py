"""What tests do without a package that is not always there, such as on a machine for a short stay on its GPU."""
from importlib.util import find_spec

import pytest

HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None
needs_bitsandbytes = pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed")
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
