"""Environments: tools, games and users that answer the turns of a policy, in processes that can be killed."""
from lightrft.utils.registry import lazy_exports

__getattr__ = lazy_exports(
    __name__, {
        "ENVIRONMENTS": "lightrft.environments.base",
        "Environment": "lightrft.environments.base",
        "Step": "lightrft.environments.base",
        "ToolCall": "lightrft.environments.base",
        "Turn": "lightrft.environments.base",
    })
