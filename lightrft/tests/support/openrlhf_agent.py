"""An agent on OpenRLHF's own base class, for where its package is (``make oracles``)."""
from openrlhf.utils.agent import AgentInstanceBase

from lightrft.tests.support.foreign_environments import AgentInstance


class Agent(AgentInstance, AgentInstanceBase):
    """The typed agent, whose methods are those that the base class asks for."""

    def __init__(self, *args, **kwargs):
        """Keep nothing."""
