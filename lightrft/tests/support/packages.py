"""What tests do without a package that is not always there, such as on a machine for a short stay on its GPU."""
from importlib.metadata import distributions
from importlib.util import find_spec

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test where ``package``, the name of its import, is not installed."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None
needs_bitsandbytes, needs_deepspeed = needs("bitsandbytes"), needs("deepspeed")
needs_installed_lightrft = pytest.mark.skipif(not [*distributions(name="lightrft")],
                                              reason="lightrft runs from its folder and is not installed")
