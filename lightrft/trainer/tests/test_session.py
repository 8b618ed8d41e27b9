"""Around a run: what ends it before any process group exists, and what is left beside it."""
import json
import re
import shutil

import pytest
import torch

from lightrft.cli import generate, train, train_sft
from lightrft.cli.offline import OFFLINE
from lightrft.config.cli import parse_config
from lightrft.preflight.hardware import unlike_gpus
from lightrft.tests.support import runs, tiny
from lightrft.tests.support.fake_cuda import fake_cuda, SYNC
from lightrft.tests.support.launch import flags, launch
from lightrft.trainer import session
from lightrft.trainer.session import training_session
from lightrft.trainer.spmd_ppo_trainer import build_models


def words(home, folder, **options):
    values = {**runs.BASE, "pretrain": home / "model", "prompt_data": home / "train.jsonl", "save_path": folder}
    values["stop"] = "x"
    return [word for name, value in {**values, **options}.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def no_strategy(monkeypatch):
    """Fails the test when a strategy (and with it a process group) is set up."""

    def refuse(*args, **kwargs):
        raise AssertionError("a strategy was set up")

    monkeypatch.setattr(session, "get_strategy", refuse)


def test_models_of_a_run_leave_their_weights_in_the_files(home, tmp_path):
    """So that a rank holds one of them at a time, and of a model that ranks divide only its part."""
    config = runs.config_of(home, tmp_path, advantage_estimator="gae", init_kl_coef=0.1)
    models = build_models(config, runs.strategy_of(config))
    for build in (models.actor, models.critic, models.reference):
        waiting = {name for name, parameter in build().named_parameters() if parameter.is_meta}
        assert len(waiting) > 10 and any("embed_tokens" in name for name in waiting)


def test_dry_run_prints_and_leaves(home, tmp_path, capsys, no_strategy):
    with pytest.raises(SystemExit) as error:
        train.main([
            *words(home, tmp_path / "run", rollout_batch_size=6, train_batch_size=4, reward="exact,format=0.5"),
            "--dry_run"
        ])
    out = capsys.readouterr().out
    assert error.value.code == 0 and not (tmp_path / "run").exists()
    assert "rollout_batch_size" in out and "flag" in out and "6 prompts" in out and "12 samples" in out
    assert f"data: 6 rows of {home}/train.jsonl (training)\n" in out
    assert out.endswith(f"rewards: {home}/train.jsonl, row 1, answered with its reference "
                        "('<think></think>\\boxed{0}'): exact 1 x 1, format 1 x 0.5; total 1.5\n")


@pytest.mark.parametrize("condition,shown,total", [("== ground_truth", "0", 1), ("!= ground_truth", "<think>", 1),
                                                   ("== 'never'", "<think>", 0)])
def test_a_dry_run_tries_the_answer_alone_too(home, tmp_path, capsys, no_strategy, condition, shown, total):
    """A function that reads bare answers is no reward that gives 0; one that earns nothing is shown with the box."""
    (tmp_path / "own.py").write_text(f"def score(data_source, solution_str, ground_truth, extra_info=None):\n"
                                     f"    return float(solution_str {condition})\n")
    with pytest.raises(SystemExit):
        train.main([*words(home, tmp_path / "run", reward=f"{tmp_path}/own.py:score"), "--dry_run"])
    line = capsys.readouterr().out.splitlines()[-1]
    assert f"answered with its reference ('{shown}" in line and line.endswith(f"total {total}"), line


@pytest.mark.parametrize("reward,told", [
    ("accuracy", "unknown reward 'accuracy' (here: math); known: "), ("exatc", "(did you mean exact?)"),
    ("reward.py:zero", "could be scored: exception ("), ("", "no reward recipe for label ''"),
    ("reward.py:typo", "could be scored: wrong_type ("), ("reward.py:silent", "could be scored: none ("),
])  # yapf: disable
def test_a_dry_run_tries_the_rewards(home, tmp_path, capsys, caplog, no_strategy, monkeypatch, reward, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("".join(f"def {name}(solution_str, ground_truth):\n    return {value}\n"
                                                for name, value in (("zero", "1 / 0"), ("typo", "{'scor': 1.0}"),
                                                                    ("silent", "None"))))
    with pytest.raises(SystemExit) as error:
        train.main([*words(home, tmp_path / "run", reward=reward, reward_probe=True), "--dry_run"])
    said = capsys.readouterr()
    assert error.value.code == 2 and told in said.err, said
    assert "See --help" not in said.err, "no option helps"
    detail = {"reward.py:zero": "ZeroDivisionError", "reward.py:typo": "the dict has no 'score' (it has scor)"}
    assert detail.get(reward, "") in said.err + caplog.text


@pytest.mark.parametrize("chat", [False, True])
def test_a_dry_run_gives_a_reward_the_form_of_the_run(home, tmp_path, capsys, no_strategy, chat):
    """Texts, or messages where ``--apply_chat_template`` makes chats; an error of the boxed answer is not the end."""
    rows = [json.loads(line) for line in (home / "train.jsonl").read_text().splitlines()]
    texts = [{"prompt": "1+1?", "answer": "2"} for _ in rows]
    (tmp_path / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in texts))
    (tmp_path /
     "own.py").write_text("def f(prompts, completions, answer):\n"
                          f"    assert all(isinstance(one, {'list' if chat else 'str'}) for one in prompts)\n"
                          "    said = [one if isinstance(one, str) else one[-1]['content'] for one in completions]\n"
                          "    return [float(int(one) == int(gold)) for one, gold in zip(said, answer)]\n")
    flags = words(home, tmp_path / "run", prompt_data=tmp_path / "texts.jsonl", reward=f"{tmp_path}/own.py:f")
    with pytest.raises(SystemExit) as error:
        train.main([*flags, *["--apply_chat_template"] * chat, "--dry_run"])
    said = capsys.readouterr()
    assert error.value.code == 0 and said.out.splitlines()[-1].endswith("f 1 x 1; total 1"), said


@pytest.mark.parametrize("given,told", [
    ({"rollout_batch_size": 8, "train_batch_size": 16}, "--rollout_batch_size 8: a batch cannot be filled"),
    ({"generate_max_len": 10**6}, "tokens are more than the"),
    ({"pretrain_data": "train.jsonl"}, "--ptx_batch_size 8: a batch cannot be filled, the data has 6 rows"),
    ({"max_steps": 0, "advantage_estimator": "gae", "freezing_actor_steps": 1
      }, "the policy is never trained in 1 step"),
    ({"max_steps": 0, "generate_max_len": 8, "stages": "4:1,8"}, "begins after 1 steps, and the data gives 1"),
    ({}, ""),
])
def test_a_dry_run_ends_where_the_run_ends_at_its_start(home, tmp_path, capsys, monkeypatch, no_strategy, given, told):
    """A plan for another machine, which may have other rows and another model, warns of it."""
    monkeypatch.chdir(home)
    for plan, code in (([], 2 if told else 0), (["--plan_gpus", "1x80"], 0)):
        with pytest.raises(SystemExit) as error:
            train.main([*words(home, tmp_path / "run", reward="exact", **given), "--dry_run", *plan])
        said = capsys.readouterr()
        assert error.value.code == code and told in (said.err if code else said.out), said
        assert ("the run would end at its start" in said.out) is bool(told and plan)


@pytest.mark.parametrize("given,told", [
    ({"chat_template": "chatmml"}, "unknown chat template 'chatmml'"),
    ({"chat_template": "bad.jinja"}, "chat template 'bad.jinja' does not render"),
    ({"prompt_max_len": 1}, "all 6 prompts are longer than --prompt_max_len 1"),
    ({"pretrain": "model"}, "token 3000, which the model with its 260 tokens can neither draw nor read"),
])
def test_a_dry_run_has_the_errors_of_templates_and_prompts(home, tmp_path, capsys, no_strategy, monkeypatch, given,
                                                           told):
    """Those of the run; a tokenizer that is not on this machine is none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jinja").write_text("{% for m in %}")
    shutil.copytree(home / "model", tmp_path / "model")
    content = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    content["added_tokens"] = [one | {"id": 3000 if one["content"] == "<|im_end|>" else one["id"]}
                               for one in content["added_tokens"]]  # yapf: disable
    content["model"]["vocab"]["<|im_end|>"] = 3000
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit) as error:
        train.main([*words(home, tmp_path / "run", reward="exact", **given), "--dry_run"])
    assert error.value.code == 2 and told in capsys.readouterr().err


def test_a_dry_run_leaves_what_is_elsewhere_to_the_run(home, tmp_path, capsys, no_strategy):
    """Data of the hub is not fetched; rewards are resolved all the same, a server need not run yet, and a function may
    decline an answer."""
    (tmp_path / "picky.py").write_text("def f(completions):\n"
                                       "    return [None if 'think' in one else 0.0 for one in completions]\n")
    for data, more, told in ((f"{home}/train.jsonl", {"remote_rm_url": "http://127.0.0.1:9/"},
                              "format 1 x 1, remote unscored x 1; total unscored: unreachable"),
                             (f"{home}/train.jsonl", {"reward": f"{tmp_path}/picky.py"}, "total unscored: none"),
                             ("owner/name", {}, "data: owner/name is read from the hub when the run starts")):
        with pytest.raises(SystemExit) as error:
            more = {"prompt_data": data, "reward": "format", "reward_probe": True, **more}
            train.main([*words(home, tmp_path / "run", **more), "--dry_run"])
        assert error.value.code == 0 and told in capsys.readouterr().out


def test_a_dry_run_reads_local_suites(home, tmp_path, capsys, no_strategy):
    (tmp_path / "suite.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    for suites, code, told in ((f"math500={tmp_path}/suite.jsonl,aime24", 0,
                                "suite.jsonl (evaluation)\ndata: aime24 is"), (f"gpqa={tmp_path}/suite.jsonl", 2,
                                                                               "not a row of Idavidrein/gpqa")):
        with pytest.raises(SystemExit) as error:
            train.main([
                *words(home, tmp_path / "run", eval_suite=suites, reward="format", prompt_max_len=128), "--dry_run"
            ])
        said = capsys.readouterr()
        assert error.value.code == code and told in said.out + said.err, said


@pytest.mark.parametrize("name,answers,more", [
    ("sft", {"response": "2"}, {}), ("kd", {"response": "2"}, {"teacher_model": "model"}),
    ("rm", {"chosen": "2", "rejected": "3"}, {}), ("dpo", {"chosen": "2", "rejected": "3"}, {}),
    ("grm", {"chosen": "2", "rejected": "3"}, {}), ("kto", {"response": "2", "label": True}, {}),
    ("prm", {"completions": ["2"], "labels": [True]}, {"placeholder_token": "#", "reward_tokens": "+,-"}),
])  # yapf: disable
def test_a_dry_run_reads_rows_as_its_trainer_does(home, tmp_path, capsys, no_strategy, monkeypatch, name, answers,
                                                  more):
    """Of both splits, where they and the tokenizer are on this machine; of the model, names and shapes."""
    monkeypatch.chdir(home)
    for number, row in enumerate((answers, {"reference": "2"})):
        rows = [json.dumps({"prompt": prompt, **row}) for prompt in ("1+1=", "0+2=")]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(rows))
    options = {
        "pretrain": "model", "train_data": f"{tmp_path}/0.jsonl,org/name", "save_path": tmp_path / "run", "max_len": 400
    } | more
    for held_out, code, told in ((0, 0, f"data: 2 rows of {tmp_path}/0.jsonl (evaluation)"), (1, 2, "1.jsonl, row 1")):
        with pytest.raises(SystemExit) as error:
            OFFLINE[name].main([*flags(options | {"eval_data": tmp_path / f"{held_out}.jsonl"}), "--dry_run"])
        said = capsys.readouterr()
        assert error.value.code == code and told in said.out + said.err, said
        assert code or "learning_rate" in said.out and "data: org/name is read from the hub when the run" in said.out


def test_a_reference_with_other_tokens_is_refused(home, tmp_path, capsys):
    """Before a model is loaded; in reinforcement learning and in training on pairs."""
    foreign = tiny.save_model(tmp_path / "foreign")
    tiny.tokenizer(extra="<|extra|>").save_pretrained(foreign)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1?", "chosen": "2", "rejected": "3"}) + "\n")
    more = f"--ref_pretrain {foreign} --save_path {tmp_path}/run".split()
    pairs = f"--pretrain {home}/model --train_data {tmp_path}/rows.jsonl --max_len 64 --train_batch_size 1".split()
    prompts = words(home, tmp_path / "run", init_kl_coef=0.1, reward="exact")
    for main, given in ((OFFLINE["dpo"].main, pairs), (train.main, prompts)):
        with pytest.raises(SystemExit) as error:
            main([*given, *more])
        said = capsys.readouterr().err
        assert error.value.code == 2 and re.search("--ref_pretrain .*.<.extra.>.; vocabularies of .* same family", said)


def test_fine_tuning_is_planned_for_the_gpus_it_is_for(home, tmp_path, capsys, no_strategy):
    """As reinforcement learning is: a table, a verdict, and an error with the remedy for what does not fit."""
    sizes = {"hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152064}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads | {"model_type": "qwen2"}))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 8)
    sft = ["--pretrain", str(tmp_path), "--train_data", str(tmp_path / "rows.jsonl"), "--train_batch_size", "8",
           "--dry_run", "--plan_gpus"]  # yapf: disable
    for gpus, code in (("8xH100", 0), ("1xH100", 2)):
        with pytest.raises(SystemExit) as error:
            train_sft.main([*sft, gpus])
        said = capsys.readouterr()
        assert error.value.code == code and re.search("^ +log-probs +backward +optimizer$", said.out, re.M), said
        assert ("data: not tokenized, for lack of a tokenizer: " in said.out) == (code == 0)
        assert "fits: " in said.out if code == 0 else "--gradient_checkpointing" not in said.err, said
    assert "the run does not fit" in said.err and re.search("--.* brings it to ", said.err), said.err


@pytest.mark.parametrize("options,told",
                         [({"train_batch_size": 3}, "--train_batch_size 3"),
                          ({"advantage_estimator": "grop"}, "did you mean"),
                          ({"pretrain": "/nowhere/at/all"}, "no such folder"),
                          ({"n_samples_per_prompt": 1, "train_batch_size": 4}, "compares responses of one prompt")])
def test_an_impossible_configuration_exits_with_2(home, tmp_path, capsys, no_strategy, options, told):
    with pytest.raises(SystemExit) as error:
        train.main(words(home, tmp_path / "run", **options))
    assert error.value.code == 2 and told in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_responses_beyond_the_context_end_in_one_line(home, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        train.main(words(home, tmp_path, prompt_max_len=600, generate_max_len=12))
    told = capsys.readouterr().err
    assert error.value.code == 2 and "600" in told and "512 positions" in told and "Traceback" not in told


def test_rows_that_fit_are_trained_with_a_larger_limit(home, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}')
    train_sft.main([f"--pretrain={home}/model", f"--train_data={tmp_path}/rows.jsonl", f"--save_path={tmp_path}/run",
                    "--max_len=600", "--train_batch_size=1", "--disable_ckpt"])  # yapf: disable
    assert "--max_len 600: the model has 512 positions" in capsys.readouterr().err
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


def test_a_folder_that_cannot_be_made_exits_with_2(home, tmp_path, capsys, no_strategy):
    (tmp_path / "file").touch()
    for path, told in ((tmp_path / "file" / "run", "file is a file"), (tmp_path / ("x" * 300), "cannot be created"),
                       ("/proc/lightrft", "cannot be")):
        with pytest.raises(SystemExit) as error:
            train.main(words(home, path))
        said = capsys.readouterr().err
        assert error.value.code == 2 and f"--save_path {path}" in said and told in said and "give a folder" in said
    with pytest.raises(SystemExit):
        generate.main(["--pretrain", str(home / "model"), "--prompt_data", str(home / "train.jsonl"), "--output_path",
                       "/proc/lightrft/a.jsonl", "--prompt_max_len=64", "--generate_max_len=8"])  # yapf: disable
    assert "--output_path /proc/lightrft/a.jsonl.parts: cannot be created" in capsys.readouterr().err


@pytest.mark.parametrize("fault, told", [
    ("old_machine", "--bf16 true: Tesla T4 has no bfloat16 in hardware"),
    ("invalid", "--prompt_data train.jsonl: no such file or folder"),
    ("no_gpu", "2 processes on this machine (LOCAL_RANK 1), but torch sees 1 GPU"),
])  # yapf: disable
def test_what_one_machine_refuses_ends_the_ranks_of_all(home, tmp_path, fault, told):
    """Rank 1 has a GPU without bfloat16, lacks the data, or has no GPU of its own; rank 0 does not wait for it."""
    options = runs.BASE | {
        "pretrain": home / "model", "prompt_data": home / "train.jsonl", "save_path": tmp_path / "run", "reward":
        "format", "bf16": "True", "use_liger": "False", "plugin": "lightrft.tests.support.fault_plugin"
    }
    run = launch(tmp_path, options, 2, FAULT=f"{fault}@1")
    assert run.wait(60.0) == [2, 2] and "Traceback" not in run.output, run.output
    assert f"error: rank 1: {told}" in run.log(0) and run.output.count("error: ") == 1, run.output


@pytest.mark.dist
def test_ranks_that_were_started_by_hand(home, tmp_path):
    """Their variables are those of torchrun, but the first rank serves the store: it must not end before all have read
    what one refused, and the process group meets at the same port."""
    options = runs.BASE | {
        "pretrain": home / "model", "prompt_data": home / "train.jsonl", "save_path": tmp_path / "run", "reward":
        "format"
    }
    faulty = options | {"plugin": "lightrft.tests.support.fault_plugin"}
    for rank in (0, 1):
        run = launch(tmp_path / str(rank), faulty, 2, by_hand=True, FAULT=f"invalid@{rank}", LATE="1")
        assert run.wait(60.0) == [2, 2], run.output
        assert all(f"error: rank {rank}: --prompt_data" in run.log(reader) for reader in (0, 1)), run.output
    run = launch(tmp_path, options, 2, by_hand=True)
    assert run.wait(90.0) == [0, 0], run.output
    assert [line["step"] for line in runs.read_lines(tmp_path / "run" / "metrics.jsonl")] == [1]


def test_an_impossible_sft_configuration_exits_with_2(home, capsys, no_strategy):
    with pytest.raises(SystemExit) as error:
        train_sft.main(["--pretrain", str(home / "model")])
    assert error.value.code == 2 and "--train_data is missing" in capsys.readouterr().err


def test_a_session_keeps_its_options_and_seeds_everything(home, tmp_path):
    numbers = []
    for seed in (1, 1, 2):
        parsed = parse_config(words(home, tmp_path / "run", seed=seed))
        with training_session(parsed) as running:
            numbers.append(torch.rand(3).tolist())
            assert running.strategy.world_size == 1
        again = parse_config(["--config", str(tmp_path / "run" / "config.yaml")])
        assert again.config == parsed.config
    assert numbers[0] == numbers[1] != numbers[2]


def test_the_watchdog_of_a_session_has_its_limits(home, tmp_path, monkeypatch):
    made: list[session.Watchdog] = []

    class Noted(session.Watchdog):

        def __enter__(self):
            made.append(self)
            return super().__enter__()

    monkeypatch.setattr(session, "Watchdog", Noted)
    with training_session(parse_config(words(home, tmp_path, dist_timeout_s=77, silence_timeout_s=33))):
        assert [(watchdog.timeout_s, watchdog.silence_s) for watchdog in made] == [(77, 33)]


def test_a_session_on_a_gpu_measures_the_time_of_the_device(home, tmp_path):
    """Where seconds are read the host waits for the kernels whose time they are."""
    with fake_cuda() as ledger, training_session(parse_config(words(home, tmp_path))) as running:
        before = ledger.total(SYNC)
        running.timer.metrics()
        assert ledger.total(SYNC) > before


def test_a_session_warns_of_what_is_seldom_meant(home, tmp_path, capsys):
    for epochs in (1, 2):
        with training_session(parse_config(words(home, tmp_path, policy_loss="gpg", max_epochs=epochs))):
            assert ("has no ratio" in "".join(capsys.readouterr())) == (epochs == 2)


def test_a_session_warns_of_unlike_gpus(home, tmp_path, capsys, monkeypatch):
    for other in ("", "Tesla T4"):
        monkeypatch.setattr(session, "unlike_gpus", lambda names, other=other: unlike_gpus([*names, other]))
        with training_session(parse_config(words(home, tmp_path))):
            assert ("(a CPU on rank 0, Tesla T4 on rank 1)" in "".join(capsys.readouterr())) == bool(other)


def test_the_command_line_trains(home, tmp_path):
    train.main([*words(home, tmp_path / "run"), "--reward", "format"])
    assert [line["step"] for line in runs.read_lines(tmp_path / "run" / "metrics.jsonl")] == [1]
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()


@pytest.mark.parametrize("words", [["--pretrian", "x"], ["--pretrain", "org/model", "--prompt_data", "absent.jsonl"]])
def test_an_error_has_the_name_of_the_program_wherever_it_is_found(words, capsys):
    """In the command line, and in what it names."""
    for command, name in ((train.main, "lightrft train"), (train_sft.main, "lightrft sft")):
        with pytest.raises(SystemExit):
            command([word.replace("prompt_data", "train_data") if "sft" in name else word for word in words])
        assert capsys.readouterr().err.startswith(f"{name}: error: ")
