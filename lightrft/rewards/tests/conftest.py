"""Managers that are shut down whatever the test does."""
import pytest

from lightrft.config.schema import RewardConfig
from lightrft.rewards.manager import RewardManager


@pytest.fixture
def make_manager():
    managers = []

    def make(*reward, **options):
        managers.append(RewardManager(RewardConfig(reward=[str(entry) for entry in reward], **options)))
        return managers[-1]

    yield make
    for manager in managers:
        manager.shutdown()
