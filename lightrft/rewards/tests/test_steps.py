"""Process reward models as rewards: the judgements of Hugging Face, step by step, and what is made of them."""
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightrft.config.rm_schema import StepFormat
from lightrft.config.schema import RewardConfig
from lightrft.models.reward_model import STEPS
from lightrft.models.tokenizer import load_tokenizer
from lightrft.rewards.base import RewardInput
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.placement import ScorerSetup
from lightrft.rewards.reward_models import check_models
from lightrft.tests.support import tiny
from lightrft.tests.support.scorers import save_judge
from lightrft.utils.errors import UserError

CHAT = [{"role": "user", "content": "1+1?"}]
ITEMS = [RewardInput("", "2\n\n  2.0\nso 2", CHAT), RewardInput("", "3", CHAT), RewardInput("", "a#b\nc", CHAT)]
TEXTS = [["2", "\n  2.0", "\nso 2"], ["3"], ["ab", "\nc"]]


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return save_judge(tmp_path_factory.mktemp("judge"), reward_tokens=["+", "-"])


def scores(path, items, setup=None, **options):
    manager = RewardManager(RewardConfig(reward_pretrain=[path], **options), setup=setup)
    return manager.collect(manager.submit(items))


@pytest.fixture(scope="module")
def plain(judge):
    """Probabilities that the steps of :data:`TEXTS` are good, by Hugging Face, one step of one response at a time."""
    hf, tokenizer = AutoModelForCausalLM.from_pretrained(judge), load_tokenizer(judge)
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    good, bad = tokenizer.convert_tokens_to_ids(["+", "-"])

    def judged(text):
        with torch.no_grad():
            logits = hf(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0, -1].double()
        return torch.sigmoid(logits[good] - logits[bad]).item()

    return [[judged(prompt + "".join(f"{each}#" for each in steps[:i + 1])) for i in range(len(steps))]
            for steps in TEXTS]  # yapf: disable


@pytest.mark.parametrize("name,reduced", [("min", min), ("mean", lambda p: sum(p) / len(p)),
                                          ("product", lambda p: torch.tensor(p).prod().item()),
                                          ("last", lambda p: p[-1]), ("per_step", sum)])
def test_rewards_are_those_of_hugging_face(name, reduced, judge, plain):
    """Blank steps, and the placeholder in a response, are no steps. Cut into passes of few tokens, too."""
    found = scores(judge, ITEMS, ScorerSetup(max_tokens=60), step_reward=name)
    assert [score.total for score in found] == pytest.approx([reduced(steps) for steps in plain], rel=1e-4)
    assert [score.parts["rm/steps"] for score in found] == [3, 1, 2]
    assert len({round(score.total, 4) for score in found}) == 3
    apart = [[1, 8, 13], [1], [3, 5]] if name == "per_step" else [[], [], []]
    assert [[end for end, _ in score.steps] for score in found] == apart, "after the last visible character"
    for score, steps in zip(found, plain):
        assert [reward for _, reward in score.steps] == pytest.approx(steps * (name == "per_step"), rel=1e-4)


def test_another_separator_and_no_step_at_all(judge, plain):
    """Steps are joined as in training, whatever parts them in a response."""
    several = [RewardInput("", "2;  2.0;so 2", CHAT), RewardInput("", " ;\n", CHAT)]
    found = scores(judge, several, step_separator=";")
    assert [score.total for score in found] == [pytest.approx(min(plain[0]), rel=1e-4), 0.0]
    assert found[1].parts["rm/steps"] == 0
    broken = scores(judge, ITEMS[:1], step_separator="\\n")
    assert broken[0].total == pytest.approx(min(plain[0]), rel=1e-4), "as a shell passes a line break"


def test_what_cannot_be_a_reward_is_refused(judge, tmp_path):
    with pytest.raises(UserError, match="was trained without --reward_tokens"):
        scores(save_judge(tmp_path / "free", reward_tokens=[]), ITEMS)
    with pytest.raises(UserError, match="--normalize_reward: .* is a process reward model"):
        scores(judge, ITEMS, normalize_reward=True)
    for option, value in (("step_reward", "mean"), ("step_separator", ";")):
        with pytest.raises(UserError, match=f"--{option} {value}: no model of --reward_pretrain is a process reward"):
            check_models(RewardConfig(**{option: value}), [str(tiny.save_model(tmp_path / f"plain_{option}"))])
    picture = RewardInput("", "a", [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}])
    with pytest.raises(UserError, match="reads text only, and a prompt has image"):
        scores(judge, [picture])
    long = scores(judge, [ITEMS[0], RewardInput("", "4" * 600, CHAT)])
    assert long[0].total is not None and long[1].error == "too_long"
    assert StepFormat(**getattr(AutoConfig.from_pretrained(judge), STEPS)) == StepFormat("#", ["+", "-"])
