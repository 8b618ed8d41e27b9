"""What the server of :mod:`launch` finds out before it forks, as each process would: how weights are read, the
options of a run, and that the usual tiny model can be packed. No thread may start, for a fork would lose it."""
from tempfile import TemporaryDirectory

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from lightrft.config.schema import Config
from lightrft.config.tree import options
from lightrft.models.config_json import media_kinds
from lightrft.tests.support import growth, tiny

growth.watch()
get_checkpoint_conversion_mapping("qwen2")
options(Config)
if torch.get_num_threads() == 1:
    with TemporaryDirectory() as _folder:
        _config = tiny.config(num_hidden_layers=1, initializer_range=0.5)
        _config.architectures, _config.dtype = ["Qwen2ForCausalLM"], "float32"
        _config.save_pretrained(_folder)
        media_kinds(_folder)
