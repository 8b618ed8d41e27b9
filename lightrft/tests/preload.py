"""Imported once by the fork server of :mod:`lightrft.tests.launch`."""
import torch.distributed.checkpoint  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
from matplotlib.backends import backend_agg  # noqa: F401
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification  # noqa: F401

from lightrft.cli.train import main  # noqa: F401
from lightrft.models.lora import add_lora  # noqa: F401
from lightrft.strategy.fake_strategy import FakeStrategy  # noqa: F401
from lightrft.strategy.fsdp.fsdpv2_strategy import FSDPV2Strategy  # noqa: F401
