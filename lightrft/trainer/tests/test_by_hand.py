"""Scripts with the calls of LightRFT: parser, strategy, actor, trainer, fit; the run is that of the command line."""
import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.namespace import config_of
from lightrft.config.options import ConfigError
from lightrft.config.schema import Config
from lightrft.models import ActorLanguage, ActorVL
from lightrft.strategy import FakeStrategy, get_strategy
from lightrft.tests.support import runs
from lightrft.tests.support.launch import flags, ROOT, torchrun
from lightrft.trainer import SPMDPPOTrainer, SPMDPPOTrainerVL
from lightrft.types import Experience
from lightrft.utils import add_arguments
from lightrft.utils.errors import UserError

SCRIPT = ROOT / "examples" / "gsm8k_geo3k" / "train_by_hand.py"
NO = ("reward_probe", "self_test")


@pytest.fixture(name="home", scope="module")
def fixture_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_home(tmp_path_factory.mktemp("home"))


def words_of(home: Path, save: Path, **options: Any) -> list[str]:
    values = {**runs.BASE, "pretrain": home / "model", "prompt_data": home / "train.jsonl", "save_path": save,
              "save_trajectories": True, **options}  # yapf: disable
    return [*flags(values), *(f"--no_{name}" for name in NO)]


def parse(*words: object, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    return add_arguments(parser or argparse.ArgumentParser()).parse_args([*map(str, words)])


def rewards_of(query: str, cost: float = 0.5) -> float:
    return -cost * len(query) / 1000


def numbers(folder: Path) -> list[float]:
    lines = runs.read_lines(folder / "metrics.jsonl")
    return [
        line[name] for line in lines for name in ("reward/mean", "policy/loss", "policy/grad_norm", "policy/kl_ref")
    ]


@pytest.mark.dist
@pytest.mark.skipif(not SCRIPT.exists(), reason="installed without its repository")
def test_the_script_trains_alone_and_under_torchrun_as_the_command_does(home: Path, tmp_path: Path) -> None:
    (tmp_path /
     "cost.py").write_text("def reward_fn(queries):\n    return [-0.5 * len(query) / 1000 for query in queries]")
    own: dict[str, Any] = {"init_kl_coef": 0.01, "seed": 3, "advantage_estimator": "group_norm", "max_steps": 2}
    runs.run(home, tmp_path / "c", reward=[f"{tmp_path}/cost.py:reward_fn"], **own)
    for ranks in (1, 2):
        torchrun(str(SCRIPT), *words_of(home, tmp_path / str(ranks), **own), "--length_cost", 0.5, ranks=ranks)
        assert numbers(tmp_path / str(ranks)) == pytest.approx(numbers(tmp_path / "c"), rel=1e-4)
        trained = ActorLanguage(tmp_path / str(ranks) / "hf").model.state_dict()
        assert any(not torch.equal(trained[name], value)
                   for name, value in ActorLanguage(home / "model").model.state_dict().items())
    rows = runs.read_lines(tmp_path / "1" / "rollouts" / "step_1.jsonl")
    assert [row["reward"]
            for row in rows] == pytest.approx([rewards_of(row["prompt"] + row["response"]) for row in rows])
    assert len({row["reward"] for row in rows}) > 1 and numbers(tmp_path / "1")[2] > 0


def test_own_flags_come_before_or_after(home: Path) -> None:
    """A flag that both have is the script's, wherever it is added."""
    before = argparse.ArgumentParser()
    before.add_argument("--gamma", type=float, default=0.5)
    args = parse("--gamma", "0.25", "--mine", "3", parser=_with(before, "--mine"))
    after = _with(add_arguments(argparse.ArgumentParser()), "--mine", "--eps_clip")
    later = after.parse_args(["--mine", "3", "--fsdp", "--eps_clip", "0.3"])
    assert args.mine == later.mine == "3" and args.gamma == 0.25 and later.fsdp and not args.fsdp
    assert config_of(args).config.algorithm.gamma == 0.25 and config_of(later).config.strategy.strategy == "fsdp"
    assert config_of(later).config.algorithm.eps_clip == 0.3


def _with(parser: argparse.ArgumentParser, *names: str) -> argparse.ArgumentParser:
    for name in names:
        parser.add_argument(name)
    return parser


def test_the_options_are_those_of_the_namespace() -> None:
    """What was written, edited, or is a default of the script: each has its place, also beside a preset."""
    args = parse("--recipe", "dapo", "--loss_agg_mode", "seq-mean-token-mean", "--zero_stage", "2", "--seed", "42")
    args.kl_target, args.micro_train_batch_size = 0.1, 4
    parsed = config_of(args, {"gamma": 0.5, "seed": 42})
    algorithm, source = parsed.config.algorithm, parsed.provenance
    assert algorithm.eps_clip_high == 0.28 and algorithm.loss_agg_mode == "seq-mean-token-mean"
    assert parsed.config.strategy.strategy == "deepspeed" and source["strategy"] == "--zero_stage"
    assert (source["seed"], source["gamma"], source["micro_train_batch_size"]) == ("flag", "keyword", "script")
    assert config_of(argparse.Namespace()).config == Config() == config_of(parse()).config
    with pytest.raises(ConfigError) as error:
        config_of(argparse.Namespace(seed="x", gamma="y", rm_use_engine=True, reward_pretrain="m"))
    assert len(error.value.problems) == 3


def test_defaults_of_a_script_for_what_nothing_reads_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    """LightRFT's script has its 120 flags itself."""
    theirs = argparse.Namespace(overlong_buffer=False, overlong_buffer_len=1024, freezing_actor_steps=-1, ptx_coef=0.05,
                                freeze_prefix=True, target_modules="all-linear", adam_betas=(0.9, 0.95),
                                enable_ema=True, fsdp=True, strategy="auto", use_wandb=None,
                                prompt_data_probs="1.0")  # yapf: disable
    config = config_of(theirs).config
    assert config.reward.overlong_buffer_len != 1024 and config.train.freezing_actor_steps == 0
    assert config.model.freeze_prefix == ["visual?"] and config.strategy.strategy == "fsdp"
    assert "--enable_ema is a flag of this script" in caplog.text


def test_an_actor_is_made_of_a_path(home: Path) -> None:
    actor = ActorVL(home / "model", use_flash_attention_2=True, bf16=True, load_in_4bit=False, lora_rank=2)
    assert sum(p.numel() for p in actor.parameters() if p.requires_grad) < sum(p.numel() for p in actor.parameters())
    logprobs, _ = actor(runs_batch())
    torch.testing.assert_close(logprobs, ActorLanguage(home / "model")(runs_batch())[0])
    for arguments, said in (({"load_in_4bit": True}, "4-bit"), ({"lora_rnk": 2}, "did you mean lora_rank")):
        with pytest.raises(ConfigError, match=said):
            ActorLanguage(home / "model", **arguments)


def runs_batch() -> Experience:
    return Experience(token_ids=torch.tensor([3, 4, 5, 6]), cu_seqlens=torch.tensor([0, 4]),
                      loss_mask=torch.tensor([False, True, True, True]))


def test_strategies_have_defaults() -> None:
    assert FakeStrategy().cfg == FakeStrategy(None, False).cfg and FakeStrategy().args is None
    args = parse("--adam_offload")
    strategy = get_strategy(args)
    assert strategy.args is args and strategy.cfg.adam_offload and strategy.is_main


@pytest.mark.parametrize("arguments,said", [
    ({"reward_model": [1]}, "reward_model: name it in --reward_pretrain"),
    ({"actor_optim": 1}, "actor_optim: the trainer makes it, from --actor_learning_rate"),
    ({"ema_model": 1}, "not part of this release"),
    ({"use_gspo": True}, "use --policy_loss gspo"),
    ({"eps_clp": 0.1}, "unknown argument eps_clp.*did you mean eps_clip"),
    ({"temprature": 1.0, "gama": 1}, "2 problems"),
    ({"strategy": 3}, "the first arguments are get_strategy"),
    ({"actor": "PATH"}, "the first arguments are get_strategy"),
])
def test_an_argument_that_is_not_ours_is_an_error_that_names_ours(home: Path, arguments: dict[str, Any],
                                                                  said: str) -> None:
    given = {"strategy": FakeStrategy(), "actor": ActorLanguage(home / "model"), **arguments}
    with pytest.raises(UserError, match=f"(?s){said}"):
        SPMDPPOTrainer(**given)  # type: ignore[arg-type]


def test_the_arguments_of_the_original_are_taken(home: Path, tmp_path: Path) -> None:
    """All of them by position and by name; those that are options win over the namespace. The data are its flags."""
    args = parse(*words_of(home, tmp_path, max_steps=1, micro_train_batch_size=8))
    trainer = SPMDPPOTrainerVL(
        get_strategy(args), ActorVL(home / "model"), None, [], None, None, None, None, None, None, max_epochs=2,
        micro_train_batch_size=4, tokenizer=object(), processor=None, use_gspo=False, normalize_advantages=True,
        ema_beta=0.992, do_sample=True, max_new_tokens=args.generate_max_len, max_length=None, pad_token_id=0,
        reward_fn=lambda queries: [0.0] * len(queries), reward_fn_label_map={},
        reward_recipe={"a": []}, disable_ds_ckpt=True, packing_samples=args.packing_samples)  # yapf: disable
    assert trainer.config.train.max_epochs == 2 and trainer.config.train.micro_train_batch_size == 4
    with pytest.raises(UserError, match="prompts_dataloader: name the data in --prompt_data"):
        trainer.fit(args, [1])
    assert isinstance(trainer, SPMDPPOTrainer)


def test_an_actor_without_what_the_options_ask_for(home: Path, tmp_path: Path) -> None:
    args = parse(*words_of(home, tmp_path, lora_rank=4))
    with pytest.raises(UserError, match="the actor was made without it"):
        SPMDPPOTrainer(get_strategy(args), ActorLanguage(home / "model"), reward_fn=lambda queries: [])
    args.pretrain = "other"
    with pytest.raises(UserError, match="--pretrain other: the actor is of"):
        SPMDPPOTrainer(get_strategy(args), ActorLanguage(home / "model"))
