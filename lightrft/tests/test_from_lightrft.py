"""The commands, names and calls of LightRFT's own documents."""
import json
import os
import re
import runpy
import shlex
import sys
from collections import Counter
from collections import defaultdict
from importlib import import_module
from inspect import signature
from itertools import product
from pathlib import Path
from pkgutil import iter_modules, resolve_name

import pytest
import torch

from lightrft.cli.train import main
from lightrft.config.cli import parse_config
from lightrft.config.compat import ALIASES, GRANTED
from lightrft.config.rm_schema import RMConfig
from lightrft.config.schema import Config
from lightrft.config.tree import flatten, options
from lightrft.models.loss import PolicyLoss
from lightrft.rewards.base import RewardInput
from lightrft.rewards.workers.user_file import scorer_of
from lightrft.strategy import FakeStrategy
from lightrft.tests.support import tiny
from lightrft.tests.support.lightrft_flags import Asked, FLAGS
from lightrft.trainer.advantage_calculator import get_advantage_calculator
from lightrft.utils.lightrft_names import MODULES, NAMES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8").split("## LightRFT")[1].split("\n## ")[0]
ROWS = dict(re.findall(r"^\| `--(\w+).*?` \| (.+) \|$", PAGE.split("| why not")[1], re.MULTILINE))
# the launch line of run_grpo_gsm8k_qwen2.5_0.5b.sh, but for paths and the words of the system prompt
LINE = r"""--pretrain {home}/model --save_trajectories --advantage_estimator group_norm --fsdp --use_kl_loss
--flash_attn --rm_use_engine --reward_pretrain {{}}
--save_path {home}/run --ckpt_path {home}/run --micro_train_batch_size 4
--train_batch_size 128 --micro_rollout_batch_size 4 --rollout_batch_size 128 --max_epochs 1 --num_episodes 30
--lr_warmup_ratio 0.03 --n_samples_per_prompt 5 --prompt_max_len 1024 --generate_max_len 2048 --zero_stage 3 --bf16
--actor_learning_rate 1e-6 --init_kl_coef 0.01 --kl_estimator k3 --prompt_data {home}/data --input_key prompt
--label_key label --eval_steps 20 --eval_split test --max_eval_samples 1319 --apply_chat_template
--gradient_checkpointing --save_steps 20 --max_ckpt_num 3 --engine_type sglang --engine_mem_util 0.6
--engine_tp_size 2 --enable_engine_sleep --system_prompt 'Think in <think></think>, then answer in \\boxed{{}}.'
--l2 1.0e-2 --freeze_prefix --adam_offload --text_only --use_wandb SECRET_KEY --wandb_project P --wandb_run_name R"""
NOTICES = ("--flash_attn has no effect", "--rm_use_engine has no effect: there is no reward model",
           "--reward_pretrain {} has no effect", "--freeze_prefix without a value means --freeze_prefix visual?",
           "--text_only has no effect", "--use_wandb: its value is the key",
           "--eval_split without --eval_data: that split of --prompt_data is held out")


@pytest.fixture(name="line")
def line_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of the launch line, for a tiny model and a folder of two splits."""
    tiny.save_model(tmp_path / "model", max_position_embeddings=3072)
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "reward_model": {"ground_truth": str(n + 1)},
                 "extra_info": {"label": "gsm8k_rule"}} for n in range(128)]  # yapf: disable
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("WANDB_MODE", "offline")  # as in its script
    return shlex.split(LINE.format(home=tmp_path))


def test_the_launch_line_is_planned_as_it_is_printed(line: list[str], capsys: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag that asks for nothing has one line; the key of W&B reaches its client, and no record."""
    monkeypatch.setattr(sys, "argv", ["train.py", *line, "--use_wandb=SECRET_KEY"])
    defaults = runpy.run_path(str(ROOT / "examples" / "gsm8k_geo3k" / "train_colocate.py"))["DEFAULTS"]
    with pytest.raises(SystemExit) as end:
        main([*line, "--dry_run", "--plan_gpus", "8x80"], defaults)
    out, err = capsys.readouterr()
    assert end.value.code == 0, err
    for notice in NOTICES:
        assert err.count(notice) == 1, f"{notice}\n{err}"
    assert "--zero_stage 3: has no effect with --strategy fsdp" in out + err
    assert os.environ["WANDB_API_KEY"] == "SECRET_KEY" and "SECRET_KEY" not in f"{sys.argv}{out}{err}"


def test_one_message_has_all_refusals(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of flags that cannot be read, are unknown, belong to others, contradict the machine or lack a package."""
    wrong = "--seed x --sp_size 4 --load_in_4bit --num_generations 4 --nonsense --gamma 2 --recipe grpo --recipe dapo"
    with pytest.raises(SystemExit):
        main([*line, *wrong.split(), "--reward_pretrain", "./no"])
    err = capsys.readouterr().err
    for part in ("11 problems", "--seed: expected an integer", "--sp_size is not an option here",
                 "--load_in_4bit is not", "here: --n_samples_per_prompt", "unknown flag --nonsense",
                 "--gamma 2: must be in", "--recipe is given", "--rm_use_engine is not an option here",
                 "--reward_pretrain ./no: no such folder", "--engine_tp_size 2",
                 "--engine_type sglang: the package sglang"):
        assert part in err, f"{part}\n{err}"


def test_one_message_has_what_is_wrong_with_known_flags(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of rows, which are read before torch is imported, and of the machine."""
    with pytest.raises(SystemExit):
        main([*line, "--rollout_batch_size", "512", "--dry_run"])
    err = capsys.readouterr().err
    for part in ("3 problems", "--rollout_batch_size 512: a batch cannot be filled, the data has 128 rows",
                 "--engine_tp_size 2", "--engine_type sglang: the package sglang"):
        assert part in err, f"{part}\n{err}"


def test_what_follows_from_a_refused_flag_is_no_further_problem(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model.path", "m", "--gamma", "2"])
    err = capsys.readouterr().err
    assert "here: --pretrain" in err and "--gamma 2" in err and "--prompt_data is missing" in err
    assert "--pretrain is missing" not in err


@pytest.mark.parametrize("asked", FLAGS, ids=lambda asked: asked.name)
def test_each_of_its_flags_has_its_outcome(asked: Asked, capsys: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken without a word, accepted with one line, or refused with the words of the page."""
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = [f"--{asked.name}", *asked.words]
    if asked.outcome == "refused":
        err = refused(words, capsys)
        assert told(asked.name) in err and "unknown flag" not in err and "did you mean" not in err
        return
    parsed = parse_config(words)
    err = capsys.readouterr().err
    if asked.outcome == "notice":
        assert err.count("\n") == 1 and f" --{asked.name}" in err and f"`--{asked.name}" in PAGE
        return
    option, value = ALIASES.get(asked.name, (asked.name, None))
    assert parsed.provenance[option] == "flag" and not err
    assert value is None or flatten(parsed.config)[option] == value


@pytest.mark.parametrize("name", [asked.name for asked in FLAGS if asked.name in GRANTED])
def test_the_opposite_of_what_always_holds_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--{name} is not an option here: {GRANTED[name]}" in refused([f"--{name}", "false"], capsys)


def test_the_page_counts_its_flags_and_has_a_row_for_each_that_is_refused() -> None:
    outcomes = Counter(asked.outcome for asked in FLAGS)
    assert (
        f"Of {len(FLAGS)} flags of its `train_colocate.py`, {outcomes['taken']} are taken, {outcomes['notice']} are "
        f"accepted with a line, {outcomes['refused']} are refused") in PAGE
    assert set(ROWS) == {asked.name for asked in FLAGS if asked.outcome == "refused"}


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error of a command line that is refused."""
    with pytest.raises(SystemExit) as end:
        parse_config(words)
    assert end.value.code == 2
    return capsys.readouterr().err


def told(name: str) -> str:
    """What the page says of a refused flag."""
    return ROWS[name].replace("`", "")


@pytest.mark.parametrize("words,problem", [("--sp_size 2", True), ("--sp_size 1", False), ("--chunk_size 4096", False),
                                           ("--grad_accum_dtype bf16", True), ("--grad_accum_dtype fp32", False),
                                           ("--rm_use_engine", False), ("--rm_use_engine false", False),
                                           ("--rm_use_engine --reward_pretrain a/b", True)])
def test_a_flag_is_granted_if_its_value_asks_for_what_holds(words: str, problem: bool,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    if problem:
        with pytest.raises(SystemExit):
            parse_config(words.split())
        assert "is not an option here" in capsys.readouterr().err
    else:
        assert parse_config(words.split()).config == Config()


def test_its_reward_contract_is_read() -> None:

    def reward_fn(model_reward_list, labels, queries, refs, label_map):
        assert model_reward_list == [] and label_map == {} and labels == ["gsm8k_rule"] * len(queries)
        right = torch.tensor([float(query.endswith(ref)) for query, ref in zip(queries, refs)])
        return right, {"accuracy_reward": right}

    scorer, _, batched, *_ = scorer_of(reward_fn, "reward_fn")
    items = [RewardInput("1+1=", answer, reference="2", label="gsm8k_rule") for answer in ("2", "3")]
    outcomes = [outcome for outcome in scorer(items) if outcome is not None]
    assert batched and [outcome.value for outcome in outcomes] == [1.0, 0.0]
    assert outcomes[0].extra == {"accuracy_reward": 1.0}


def test_its_parts_are_made_with_defaults() -> None:
    assert PolicyLoss().cfg.policy_loss == "ppo"
    assert get_advantage_calculator("group_norm").cfg.advantage_estimator == "group_norm"


def name_rows() -> list[str]:
    """The rows of the tables of modules and of names, as the page has them."""
    modules, names = defaultdict(list), defaultdict(list)
    for theirs, ours in MODULES.items():
        modules[ours].append(f"`{theirs.removeprefix('lightrft.')}`")
    for home, own in NAMES.items():
        for name, ours in own.items():
            names[home, ours].append(f"`{name}`")
    code = {ours: ", ".join(f"`{each}`" for each in ours.split(", ")) for _, ours in names}
    return [f"| {', '.join(theirs)} | `{ours}` |" for ours, theirs in modules.items()
            ] + [f"| `{home}` | {', '.join(theirs)} | {code[ours]} |" for (home, ours), theirs in names.items()]


def test_the_page_has_the_python_names() -> None:
    assert [row for row in PAGE.split("### Python names")[1].splitlines() if row.startswith("| `")] == name_rows()


def test_names_of_ours_in_the_tables_resolve() -> None:
    for ours in MODULES.values():
        import_module(ours)
    for own in NAMES.values():
        for words in own.values():
            first, *others = [word for word in words.split(", ") if not word.startswith("--")]
            flags = [word for word in words.split(", ") if word.startswith("--")]
            for name in (first, *(f"{first.rpartition('.')[0]}.{other}" for other in others)):
                assert resolve_name(name) is not None
            assert {flag.split()[0][2:] for flag in flags} <= {*options(Config), *options(RMConfig)}


@pytest.mark.parametrize("home", [home for home in NAMES if home.startswith("lightrft.")])
def test_an_import_of_a_name_that_is_another_one_here_says_so(home: str) -> None:
    """From the package, from a module of it here, and from one that has another path here."""
    modules = [f"{home}.{module.name}" for module in iter_modules(import_module(home).__path__) if not module.ispkg][:1]
    modules += [module for module in MODULES if module.startswith(f"{home}.")][:1]
    for module, (name, ours) in product([home, *modules], NAMES[home].items()):
        if name in vars(import_module(module)):  # it imports that of ours
            continue
        with pytest.raises(ImportError, match=f"'{name}' from '{module}', a name of LightRFT; here: {re.escape(ours)}"):
            exec(f"from {module} import {name}")


@pytest.mark.parametrize("home", [home for home in NAMES if home.endswith("()")])
def test_a_keyword_that_is_another_one_here_says_so(home: str) -> None:
    owner = resolve_name(f"lightrft.{'strategy' if home.startswith('Strategy') else 'trainer'}.{home[:-2]}")
    for name, ours in NAMES[home].items():
        assert name not in signature(owner).parameters
        with pytest.raises(TypeError, match=rf"\({name}=...\) is a keyword of LightRFT; here: {re.escape(ours)}$"):
            owner(**{name: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        owner(nothing=1)


@pytest.mark.parametrize("home", [home for home in NAMES if home[0].isupper() and not home.endswith("()")])
def test_an_attribute_that_is_another_one_here_says_so(home: str) -> None:
    package = "lightrft.strategy" if home.startswith("Strategy") else "lightrft.trainer"
    classes = [resolve_name(f"{package}.{home}"), *([FakeStrategy()] if home == "StrategyBase" else [])]
    for owner, (name, ours) in product(classes, NAMES[home].items()):
        with pytest.raises(AttributeError, match=f".{name} is a name of LightRFT; here: {re.escape(ours)}$"):
            getattr(owner, name)


def test_a_module_that_has_another_path_here_imports_as_ours() -> None:
    for theirs, ours in MODULES.items():
        module = import_module(theirs)
        names = [name for name in vars(import_module(ours)) if name[0] != "_"]
        assert all(getattr(module, name) is getattr(import_module(ours), name) for name in names[:1])
    from lightrft.models.actor_language import ActorLanguage
    assert resolve_name("lightrft.models.actor_vl.ActorVL") is ActorLanguage
    assert resolve_name("lightrft.utils.ensure_video_input_available")() is None
    with pytest.raises(ImportError, match="a name of LightRFT; here: lightrft.models.reward_model.RewardModel"):
        exec("from lightrft.models.srm_vl import ScalarRewardModelVL")
    with pytest.raises(ImportError, match="'nothing' from 'lightrft.utils.processor', a module of LightRFT; here: lig"):
        exec("from lightrft.utils.processor import nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'lightrft.models.loss' .*loss.py"):
        exec("from lightrft.models.loss import nothing")
    with pytest.raises(ModuleNotFoundError, match="No module named 'lightrft.models.nosuch'"):
        import_module("lightrft.models.nosuch")


def test_names_with_the_same_path_import() -> None:
    exec("\n".join(re.findall(r"^from lightrft.+$", PAGE, re.MULTILINE)))
    assert PAGE.count("\nfrom lightrft") >= 5
