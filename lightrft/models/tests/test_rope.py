"""Frequencies that depend on the length of a sequence: each sequence of a pack has its own."""
import functools
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import AutoConfig

from lightrft.config.rm_schema import RewardModelConfig, StepFormat
from lightrft.config.schema import ModelConfig, RewardConfig, RolloutConfig
from lightrft.models import loader, rope
from lightrft.models.loader import load_actor
from lightrft.rewards.generative import GradingJudge
from lightrft.rewards.placement import ScorerSetup
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.engines import check_rope
from lightrft.rollout.hf.engine import HFEngine
from lightrft.tests.support import field, naive_model
from lightrft.tests.support.episodes import Group, generate
from lightrft.types import Experience
from lightrft.utils.errors import UserError

WRITERS = {"longrope": field.write_longrope, "dynamic": field.write_dynamic_rope}  # they change beyond 64 tokens
LENS = [20, 150, 64, 65, 40, 150]


@pytest.fixture(scope="module", params=WRITERS)
def path(request, tmp_path_factory):
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param))


@functools.lru_cache(maxsize=None)
def experience():
    """Sequences of one prompt of ten tokens."""
    rng = torch.Generator().manual_seed(0)
    ids = [torch.randint(4, 300, (n, ), generator=rng).tolist() for n in LENS]
    exp = Experience.pack([ids[0][:10] + each[10:] for each in ids], prompt_lens=[10] * len(LENS))
    exp.loss_mask[:] = True
    return exp


def as_alone(path, exp):
    """Log-probs and entropies of transformers; a new model for each sequence, because one remembers the longest."""
    alone = [naive_model.logprobs(loader.load_exported(str(path)), exp.select([i])) for i in range(exp.num_seqs)]
    return [torch.cat(each) for each in zip(*alone)]


@pytest.mark.parametrize("options, share", [({}, False), ({"gradient_checkpointing": True}, True)], ids=str)
def test_each_sequence_is_as_alone(path, options, share):
    model, exp = load_actor(ModelConfig(pretrain=str(path), **options)), experience()
    model.share_prompts = share
    with torch.no_grad():
        expected = as_alone(path, exp)
    for order in (list(range(len(LENS))), [1, 0], [5, 3, 4]):
        found = model(exp.select(order), entropy=True)
        for one, other in zip(found, expected):
            parts = other.split(LENS)
            torch.testing.assert_close(one, torch.cat([parts[i] for i in order]), atol=1e-5, rtol=0)
        found[0].sum().backward()


def test_gradients_are_the_sum_of_those_alone(path):
    model, exp = load_actor(ModelConfig(pretrain=str(path))), experience()
    grads = []
    for parts in ([exp], [exp.select([i]) for i in range(exp.num_seqs)]):
        model.zero_grad()
        for part in parts:
            model(part)[0].sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, atol=1e-5 * float(other.abs().max()), rtol=0)


def test_critics_and_reward_models(path):
    exp = experience()
    for model in (loader.load_critic(ModelConfig(pretrain=str(path))),
                  loader.load_reward_model(RewardModelConfig(pretrain=str(path)))):
        torch.nn.init.normal_(model.hf_model.score.weight)
        alone = torch.cat([model(exp.select([i])) for i in range(exp.num_seqs)])
        torch.testing.assert_close(model(exp), alone, atol=1e-4, rtol=1e-5)
        assert alone.abs().max() > 1


def test_critics_and_process_reward_models_are_those_of_transformers(path):
    """By the hidden states and logits of a new model for each sequence."""
    exp, critic = experience(), loader.load_critic(ModelConfig(pretrain=str(path)))
    torch.nn.init.normal_(critic.hf_model.score.weight)
    steps = loader.load_process_reward_model(ModelConfig(pretrain=str(path)), StepFormat("#", ["+", "-"], ""), [5, 6],
                                             False)
    values, good = list[torch.Tensor](), list[torch.Tensor]()
    with torch.no_grad():
        for ids in exp.token_ids.split(LENS):
            alone = loader.load_exported(str(path)).eval()(input_ids=ids[None], output_hidden_states=True)
            values += [critic.hf_model.score(alone.hidden_states[-1][0, :-1])[:, 0]]
            good += [alone.logits[0, 1:, [5, 6]].log_softmax(-1)[:, 0]]
        found = [each[1:] for each in critic(exp).split(LENS)]  # nothing comes before the first token
        torch.testing.assert_close(torch.cat(found), torch.cat(values), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(steps(exp)[0], torch.cat(good), atol=1e-5, rtol=0)


def test_judges_answer_with_the_frequencies_of_each_request(tmp_path):
    """Not with those of the longest request: the answers are the greedy ones of transformers."""
    path = str(field.write_longrope(tmp_path))
    judge = GradingJudge(path, RewardConfig(judge_max_len=12), ScorerSetup())
    asked = [("Rate 1", ()), ("Rate " * 60, ()), ("Rate it 7", ())]
    for ids, said in zip(judge.encoded(asked), judge.answers(asked), strict=True):
        tokens = loader.load_exported(path).generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False,
                                                     attention_mask=torch.ones(1, len(ids), dtype=torch.long))
        assert judge.reader.renderer.tokenizer.decode(tokens[0, len(ids):], skip_special_tokens=True) == said


def test_prompts_of_other_frequencies_are_not_shared(path):
    model = load_actor(ModelConfig(pretrain=str(path)))
    choices = rope.choices(model.hf_model, LENS)
    assert choices[0] == choices[2] == choices[4] != choices[1] == choices[5] != choices[2] != choices[3]
    rope.fix_length(model.hf_model, 100)
    assert len({*rope.choices(model.hf_model, LENS)}) == 1


@pytest.mark.parametrize("longest", [40, 90])
def test_the_engine_draws_from_the_fixed_frequencies(path, longest):
    """Also of responses that cross the limit; the trainer with the same length has the same log-probs."""
    model, ids = load_actor(ModelConfig(pretrain=str(path))).eval(), experience().token_ids
    engine = HFEngine(model.hf_model, {1}, 1 << 24, longest=longest)
    requests = [Group(ids[:n].tolist(), [n]) for n in (10, longest - 15)]
    done = [one for group in generate(engine, requests, SamplingParams(15)) for one in group]
    assert not any(each.fixed for each in rope.ropes(model.hf_model)), "the trainer of other data has its own lengths"
    exp = Experience.pack([request.token_ids + one.token_ids for request, one in zip(requests, done)],
                          prompt_lens=[len(request.token_ids) for request in requests])
    exp.loss_mask[:] = True
    rope.fix_length(model.hf_model, longest)
    with torch.no_grad():
        found = model(exp)[0].split(exp.lens)
    for one, logprobs in zip(done, found):
        torch.testing.assert_close(logprobs[-len(one.token_ids):], torch.tensor(one.logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("engine, kind, fits", [("vllm", "longrope", True), ("vllm", "dynamic", False),
                                                ("sglang", "longrope", False), ("hf", "dynamic", True)])
def test_engines_with_other_frequencies_are_refused(engine, kind, fits):
    with TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(WRITERS[kind](Path(folder)))
    cfg = RolloutConfig(engine_type=engine, prompt_max_len=30, generate_max_len=34)
    check_rope(cfg, config)
    cfg.generate_max_len = 35
    if fits:
        check_rope(cfg, config)
    else:
        with pytest.raises(UserError, match=f"{engine}.*more than 64 tokens.*{kind}.*to 64, or take --engine_type hf"):
            check_rope(cfg, config)
