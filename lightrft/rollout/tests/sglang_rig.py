"""A trainer and the real SGLang on its weights, in one process, for :mod:`lightrft.rollout.tests.sglang_facts`."""
import logging
import multiprocessing
import os
import random
import signal

import torch

from lightrft.config.schema import ModelConfig, RolloutConfig, StrategyConfig
from lightrft.models.loader import load_actor, load_tokenizer
from lightrft.rollout import Request, get_engine
from lightrft.rollout.hf_engine import HFEngine, eos_ids
from lightrft.rollout.sampling import restrict
from lightrft.rollout.weight_sync import sync_weights
from lightrft.strategy.fake_strategy import FakeStrategy
from lightrft.strategy.strategy_base import OptimSpec

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.06,
         "max_position_embeddings": 64}  # yapf: disable
STOPS = tuple(range(40, 52))
NEW, LIMIT = 20, 64


class Rig:
    """A trainer in this process, SGLang with its weights, and the HF engine on the trainer's own."""

    def __init__(self, folder):
        self.strategy = FakeStrategy(StrategyConfig(), False)
        self.strategy.setup()
        self.prepared = self.strategy.prepare(load_actor(ModelConfig(pretrain=str(folder))), OptimSpec(1e-3))
        self.actor, tokenizer = self.prepared.model, load_tokenizer(str(folder))
        self.cfg = RolloutConfig(engine_type="sglang", prompt_max_len=LIMIT - NEW, generate_max_len=NEW,
                                 engine_kv_mib=8, sync_bucket_mib=1, sync_canary_every=1)  # yapf: disable
        self.engine = get_engine(self.cfg, self.actor, self.strategy, tokenizer)
        self.hf = HFEngine(self.actor.hf_model, eos_ids(self.actor.hf_model, tokenizer), 1 << 22)
        self.version, self.proof = 0, None

    def learn(self):
        """Weights as after training steps."""
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.actor.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.003)

    def sync(self):
        self.version += 1
        sync_weights(self.strategy, self.prepared, self.engine, self.version, proof=self.proof)
        return self.proof.check(self.version)["rollout/canary_gap"] if self.proof else None

    def ready(self):
        """Awake and with the trainer's weights, whatever the test before left."""
        self.engine.wake()
        self.sync()
        return self

    def logprobs(self, request, response, params, begun=()):
        """The trainer's, under the distribution that was sampled."""
        ids = torch.tensor([*request.token_ids, *begun, *response])
        with torch.no_grad():
            model = self.actor.hf_model
            model.set_attn_implementation("eager")
            logits = model(input_ids=ids[None], use_cache=False).logits[0, -len(response) - 1:-1].float()
            model.set_attn_implementation("packed")
        if params.temperature:
            logits = restrict(logits / params.temperature, params)
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()

    def gap(self, asked, params):
        """Mean and largest difference of log-probs between SGLang and the trainer."""
        gaps = [
            abs(a - b) for request, group in zip(asked, self.engine.generate(asked, params)) for done in group
            for a, b in zip(done.logprobs, self.logprobs(request, done.token_ids, params), strict=True)
        ]
        return sum(gaps) / len(gaps), max(gaps)


def state():
    """What SGLang is to leave as it is in this process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return (environment, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT),
            multiprocessing.get_start_method(), logging.getLogger().handlers[:], logging.getLogger().level,
            torch.get_rng_state().tolist(), torch.get_num_threads(), random.getstate())  # yapf: disable


def requests(samples=3, count=6):
    rng = random.Random(5)
    prompts = [[rng.randrange(4, 250) for _ in range(length)] for length in rng.sample(range(1, 24), count)]
    return [Request(prompt, [1000 * i + j for j in range(samples)]) for i, prompt in enumerate(prompts)]


def tokens(groups):
    return [[(done.token_ids, done.finish_reason) for done in group] for group in groups]
