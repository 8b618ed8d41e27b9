"""The fixture that most tests of the trainer begin with."""
import pytest

from lightrft.tests.support import runs


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model and prompts; modules that need others have a fixture of this name."""
    return runs.write_home(tmp_path_factory.mktemp("home"))
