"""A trainer and the real SGLang on its weights, in one process, for :mod:`lightrft.tests.support.sglang_engine`."""
import gc
import logging
import multiprocessing
import os
import random
import signal
from contextlib import contextmanager
from importlib import import_module

import torch

from lightrft.config.schema import ModelConfig, RolloutConfig
from lightrft.models.loader import load_actor
from lightrft.ops.rounding import Arithmetic
from lightrft.rollout import get_engine
from lightrft.rollout.sglang.launch import isolated_environment
from lightrft.rollout.weight_sync.verify import get_weight_sync_verifier
from lightrft.tests.support import engine_rig
from lightrft.tests.support.engine_rig import LIMIT, NEW
from lightrft.types import Prompt
from lightrft.utils.timer import Timer

SIZES = engine_rig.SIZES | {"max_position_embeddings": 64}
CFG = RolloutConfig(engine_type="sglang", prompt_max_len=LIMIT - NEW, generate_max_len=NEW, engine_kv_mib=8,
                    sync_bucket_mib=1, sync_canary_every=1)  # yapf: disable
PROMPTS = [Prompt(str(i), list(range(40 + i, 60 + 3 * i)), "") for i in range(4)]


def verifier(cfg, strategy, prepared, engine):
    """The verifier of weights of an engine in float32; its canaries are ``PROMPTS``."""
    return get_weight_sync_verifier(cfg, strategy, prepared, engine, PROMPTS, Arithmetic("cpu", "float32"), Timer())


class Rig(engine_rig.EngineRig):
    """With the real SGLang."""
    title = "SGLang"

    def __init__(self, folder):
        super().__init__(folder, load_actor(ModelConfig(pretrain=str(folder))))
        self.cfg = CFG
        self.engine = get_engine(self.cfg, self.actor, self.strategy, self.tokenizer)
        self.engine.native.run(self.engine.native.manager.freeze_gc)  # half a second per update, on CPUs alone

    def unfinished(self):
        return len(self.engine.native.manager.rid_to_state)


def state():
    """State of this process that SGLang must not change."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return (environment, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT),
            multiprocessing.get_start_method(), logging.getLogger().handlers[:], logging.getLogger().level,
            torch.get_rng_state().tolist(), torch.get_num_threads(), random.getstate())  # yapf: disable


@contextmanager
def forked():
    """Fork schedulers from this process, which has imported all of SGLang's models: a start takes a second, not tens of
    them. Engines in other tests start as users' do."""
    right = multiprocessing.set_start_method
    import_models()
    multiprocessing.set_start_method = forking
    try:
        yield
    finally:
        multiprocessing.set_start_method = right


def import_models():
    """Import what each scheduler would, and hide it from its garbage collector, which an update of weights calls."""
    with isolated_environment(torch.device("cpu"), 1):
        import_module("sglang.srt.models.registry")
        llava = import_module("sglang.srt.models.llava").LlavaForConditionalGeneration
    llava._config_cls_name_to_arch_name_mapping = models_of_configs
    gc.collect()
    gc.freeze()


def models_of_configs(_, auto):
    """What SGLang's Llava looks up, name of a config class -> name of its model; SGLang itself imports every model of
    transformers for it, eight seconds in each scheduler."""
    mapping = auto._model_mapping
    return {mapping._config_mapping[kind]: name for kind, name in mapping._model_mapping.items()}


def forking(method, force=False, right=multiprocessing.set_start_method):
    """Stands for ``multiprocessing.set_start_method``, to which SGLang says "spawn"."""
    right("fork" if method == "spawn" else method, force)
