"""Flags of other manuals on the command line set the options here that mean the same, and say so."""
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.cli import parse_config, parse_keywords
from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.inference_schema import ChatConfig
from lightrft.config.openrlhf_words import OPENRLHF
from lightrft.config.options import ConfigError
from lightrft.config.schema import Config
from lightrft.config.serve_schema import ServeConfig
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.synonyms import synonyms
from lightrft.config.tests.test_cli import fails
from lightrft.config.tree import check_ranges, flatten, options

VLLM = {"engine_type": "vllm"}
IDLE = {"offload_during_rollout": True}


def changed(words: str, tree: type = Config) -> dict[str, Any]:
    """The options that a command line sets, without their defaults."""
    known = options(tree)
    return {name: value for name, value in flatten(parse_config(words.split(), tree=tree).config).items()
            if value != known[name].default}  # yapf: disable


@pytest.mark.parametrize("words,expected", [
    ("--vllm_num_engines 4", VLLM | {"engine_count": 4}),
    ("--vllm.num_engines 4", VLLM | {"engine_count": 4}),
    ("--vllm_tensor_parallel_size=2", VLLM | {"engine_tp_size": 2}),
    ("--vllm_gpu_memory_utilization 0.6", VLLM | {"engine_mem_util": 0.6}),
    ("--vllm_gpu_memory_utilization 0.6 --engine_type sglang", {"engine_type": "sglang", "engine_mem_util": 0.6}),
    ("--vllm_enable_sleep", VLLM),
    ("--vllm_enable_sleep false", VLLM | {"engine_sleep": False}),
    ("--enforce_eager", VLLM | {"engine_args": ["enforce_eager=true"]}),
    ("--engine_args a=1 b=2 --vllm.enforce_eager", VLLM | {"engine_args": ["enforce_eager=true", "a=1", "b=2"]}),
    ("--enforce_eager --engine_args=a=1", VLLM | {"engine_args": ["a=1", "enforce_eager=true"]}),
    ("--deepspeed_enable_sleep", IDLE),
    ("--ds.enable_sleep", IDLE),
    ("--ref_reward_offload", IDLE),
    ("--ref_reward_offload --reward_pretrain m/n", IDLE | {"reward_offload": True, "reward_pretrain": ["m/n"]}),
    ("--ref_reward_offload false --reward_pretrain m/n", {"reward_pretrain": ["m/n"]}),
    ("--enforce_eager true", VLLM | {"engine_args": ["enforce_eager=true"]}),
    ("--vllm_enforce_eager=true --seed 2", VLLM | {"engine_args": ["enforce_eager=true"], "seed": 2}),
    ("--data.tokenizer_chat_template x", {"chat_template": "x"}),
    ("--model_name_or_path m/n --ckpt_save_path out", {"pretrain": "m/n", "save_path": "out"}),
    ("--max_epoch 3 --max_epoch 3", {"max_epochs": 3}),
    ("--rollout_micro_batch_size 2", {"micro_rollout_batch_size": 2}),
    ("--train.micro_batch_size 2", {"micro_train_batch_size": 2}),
    ("--tokenizer_chat_template {{messages}}", {"chat_template": "{{messages}}"}),
    ("--max_epoch 3", {"max_epochs": 3}),
    ("--fsdp.enable_sleep", {"offload_during_rollout": True}),
    ("--eval_dataset a --eval_n_samples_per_prompt 4", {"eval_data": ["a"], "eval_n_samples": 4}),
])
def test_a_flag_of_openrlhf_sets_the_option_that_means_the_same(words: str, expected: dict[str, Any],
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    assert changed(words) == expected
    spelt = ((word, word.lstrip("-").removeprefix("data.").replace(".", "_"))
             for word in words.replace("=", " ").split())
    flag = next(word for word, name in spelt if name in OPENRLHF)
    assert capsys.readouterr().err.count(f"{flag} is read as --") == 1, "one line of notice"


@pytest.mark.parametrize("rank,lines", [("0", 2), ("1", 0)])
def test_notices_are_of_the_first_rank(rank: str, lines: int, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    parse_config("--dataset a --max_epoch 2".split(), tree=SFTConfig)
    assert capsys.readouterr().err.count(" is read as --") == lines


def test_the_words_that_follow_are_named_in_the_notice(capsys: pytest.CaptureFixture[str]) -> None:
    parse_config("--vllm_num_engines 1 --enforce_eager --greedy_sampling".split(), tree=GenerateConfig)
    said = capsys.readouterr().err
    assert "--vllm_num_engines is read as --engine_type vllm --engine_count\n" in said
    assert "--enforce_eager is read as --engine_type vllm --engine_args enforce_eager=true\n" in said
    assert "--greedy_sampling is read as --temperature 0\n" in said


@pytest.mark.parametrize("words", ["--greedy_sampling false --enforce_eager=False", "--vllm.enforce_eager false"])
def test_a_switch_that_is_turned_off_sets_nothing(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not changed(words, GenerateConfig)
    assert "false has no effect: it asks for the default\n" in capsys.readouterr().err.lower()


def test_a_chat_takes_the_words_of_interactive_chat(capsys: pytest.CaptureFixture[str]) -> None:
    assert changed("--pretrain m/n --apply_chat_template --greedy_sampling", ChatConfig)["temperature"] == 0.0
    assert "--apply_chat_template has no effect: a chat always uses" in capsys.readouterr().err
    assert "it always uses the chat template" in fails(capsys, ["--apply_chat_template", "false"], tree=ChatConfig)


def test_probabilities_of_a_newer_version_are_those_of_the_training_data() -> None:
    words = "--data.dataset a,b --data.dataset_probs 0.5,0.5"
    assert changed(words, SFTConfig) == {"train_data": ["a", "b"], "train_data_probs": [0.5, 0.5]}


@pytest.mark.parametrize("words,said", [
    ("--repetition_penalty 1.2", "--repetition_penalty is not an option here: in training responses are drawn"),
    ("--vllm.sync_backend mpi", "--vllm.sync_backend is not an option here: weights are sent to the engine in buck"),
    ("--vllm_sync_backend mpi", "--vllm_sync_backend is not an option here: weights are sent to the engine in buck"),
])
def test_what_asks_for_something_else_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in fails(capsys, words.split())


@pytest.mark.parametrize("words,expected", [
    ("--freeze_prefix --lora_rank 4", {"lora_rank": 4}),
    ("--freeze_prefix", {"freeze_prefix": ["visual?"]}),
    ("--freeze_prefix audio --lora_rank 4", {"freeze_prefix": ["audio"], "lora_rank": 4}),
    ("--freeze_prefix --lora_rank 4 --target_modules visual", {"freeze_prefix": ["visual?"], "lora_rank": 4,
                                                               "target_modules": ["visual"]}),
])  # yapf: disable
def test_frozen_parts_that_are_not_named_are_those_without_adapters(words: str, expected: dict[str, Any],
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """The usual adapters are those of the decoder; a part that is named beside them is still an error."""
    assert changed(words) == expected
    assert ("--freeze_prefix without a part has no effect with --lora_rank" in capsys.readouterr().err) == (
        expected == {"lora_rank": 4})


def test_no_engine_is_another_engine() -> None:
    problem = next(check_ranges(parse_config(["--vllm_num_engines", "0"]).config))
    assert problem.startswith("--engine_count 0: ") and "--engine_type hf generates without such an engine" in problem


@pytest.mark.parametrize("words,flag", [
    ("--vllm_sync_backend nccl", ""), ("--repetition_penalty 1.0", ""), ("--enable_prefix_caching", ""),
    ("--vllm_enable_prefix_caching true", ""), ("--opd.topk 0", "--opd_topk"),
    ("--opd.kl_estimator k3", "--opd_kl_estimator"),
    ("--actor.num_nodes 2", "--actor_num_nodes"),
    ("--fsdp.attn_implementation=flash_attention_2", "--attn_implementation"),
    ("--ds.use_universal_ckpt", "--use_universal_ckpt"),
])  # yapf: disable
def test_what_always_holds_is_granted(words: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With dots too: the notice names the flag without the group that the option here does not have."""
    assert changed(words) == {}
    assert capsys.readouterr().err.count(f"{flag or words.split()[0]} has no effect: ") == 1


@pytest.mark.parametrize("tree", [GenerateConfig, ServeConfig])
def test_the_name_of_a_head_is_taken(tree: type) -> None:
    assert changed("--value_head_prefix score", tree) == {"value_head_prefix": "score"}


def test_synonyms_are_of_the_options_of_a_tree_and_of_no_option() -> None:
    for tree in (Config, SFTConfig, GenerateConfig):
        assert not {*synonyms(tree)} & {*options(tree)}
    assert "max_epoch" in synonyms(SFTConfig) and "vllm_num_engines" not in synonyms(SFTConfig)
    assert {*OPENRLHF} <= {*synonyms(Config)}


def test_in_python_and_yaml_the_error_names_the_option() -> None:
    with pytest.raises(ConfigError, match="vllm_num_engines is an .* here: engine_count, with engine_type vllm"):
        parse_keywords({"vllm_num_engines": 2})


def test_a_python_file_in_place_of_a_server_is_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside rewards and servers that are given too; from Python and YAML as on the command line."""
    config = parse_config("--remote_rm_url a.py http://h:1 --reward math=0.5".split()).config.reward
    assert (config.remote_rm_url, config.reward) == (["http://h:1"], ["math=0.5", "a.py"])
    assert capsys.readouterr().err.count("--remote_rm_url with a Python file means --reward a.py") == 1
    (tmp_path / "c.yaml").write_text("remote_rm_url: [b.py]\n")
    for parsed in (parse_config(["--config", str(tmp_path / "c.yaml")]), parse_keywords({"remote_rm_url": ["b.py"]})):
        assert (parsed.config.reward.remote_rm_url, parsed.config.reward.reward) == ([], ["b.py"])
        assert (parsed.provenance["remote_rm_url"], parsed.provenance["reward"]) == ("default", "--remote_rm_url")
