"""What the server of :mod:`launch` finds out before it forks, as each process would: how weights are read, the
options of a run, and that the usual tiny model can be packed. No thread may start, for a fork would lose it.

DeepSpeed is imported: transformers imports it, where it is installed, to save any model, and MLflow with it. The
launcher names the methods in its log by all modules of the process, of which there are many here.
"""
import os
import sys
import warnings
from contextlib import ExitStack, suppress
from tempfile import TemporaryDirectory

import torch
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from lightrft.config.schema import Config
from lightrft.config.tree import options
from lightrft.models.config_json import media_kinds
from lightrft.strategy.deepspeed.deepspeed_strategy import import_deepspeed
from lightrft.tests.support import growth, tiny
from lightrft.utils.env import frozen_objects

growth.watch()
dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
get_checkpoint_conversion_mapping("qwen2")
options(Config)
if not torch.backends.cuda.is_built():  # DeepSpeed asks CUDA, after which no fork can use it
    _environ = dict(os.environ)
    with suppress(ImportError), warnings.catch_warnings():
        import_deepspeed()
    for _name in os.environ.keys() - _environ.keys():  # each process finds out its own
        del os.environ[_name]
if torch.get_num_threads() == 1:
    with TemporaryDirectory() as _folder:
        _config = tiny.config(num_hidden_layers=1, initializer_range=0.5)
        _config.architectures, _config.dtype = ["Qwen2ForCausalLM"], "float32"
        _config.save_pretrained(_folder)
        media_kinds(_folder)
FREEZES = ExitStack()  # a run in a fork counts no frozen objects, which takes it 60 ms
FREEZES.enter_context(frozen_objects())
