"""Batch inference: real runs of a tiny model, its options, and a run that is killed."""
import json
import os
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightrft.cli.generate import generate, main
from lightrft.config.cli import parse_config
from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.schema import Config
from lightrft.config.tree import options
from lightrft.inference import batch
from lightrft.models.tokenizer import load_tokenizer
from lightrft.rewards import remote
from lightrft.rewards.base import Outcome, RewardInput
from lightrft.rewards.remote import RequestFailed
from lightrft.tests.support import field, launch, tiny_task
from lightrft.tests.support.generate_flips import GENERATE_FLIPS
from lightrft.tests.support.runs import read_lines
from lightrft.tests.support.scorers import plain, save_other_scorer, save_scorer
from lightrft.utils.errors import UserError

SMALL = {"generate_max_len": 8, "prompt_max_len": 64, "engine_kv_mib": 4}


@dataclass
class Run:
    """A run that is over."""
    out: Path

    @property
    def rows(self):
        return read_lines(self.out)

    @property
    def summary(self):
        return json.loads(self.out.with_name(f"{self.out.name}.summary.json").read_text())


@pytest.fixture(name="home", scope="module")
def fixture_home(tmp_path_factory):
    folder = tiny_task.write_home(tmp_path_factory.mktemp("home"))
    save_scorer(folder / "rm", seed=1)
    save_other_scorer(folder / "heads", ("value_head", "v_head"))
    given = [{"input": "?" * (1 + 4 * i), "output": f"\\boxed{{{i}}}", "other": "\\boxed{1}", "reference": "1"}
             for i in range(4)]
    tiny_task.write_rows(folder / "given.jsonl", given)
    return folder


def run(home, save, **given):
    """One run to its end, in this process."""
    places = {"@home": str(home), "@given": str(home / "given.jsonl"), "@save": str(save)}
    values = {"pretrain": str(home / "model"), "prompt_data": [str(home / "test.jsonl")],
              "output_path": str(save / "out.jsonl"), **SMALL, **given}  # yapf: disable
    if values.get("eval_task") == "rm":
        values = {name: value for name, value in values.items() if name not in (*SMALL, "pretrain", "best_of_n")}
    text = re.sub("@[a-z]+", lambda found: places.get(found[0], found[0]), json.dumps(values))
    parsed = parse_config([], defaults=json.loads(text), tree=GenerateConfig)
    generate(parsed, exits=False)
    return Run(parsed.config.out)


@pytest.fixture(scope="module")
def scorer(home):
    """A tiny reward model."""
    return str(home / "rm")


@pytest.fixture(scope="module")
def observe(home, tmp_path_factory):
    """``observe(options)``; equal runs are made once."""
    made = {}

    def once(values):
        key = json.dumps(values, sort_keys=True)
        if key not in made:
            made[key] = run(home, tmp_path_factory.mktemp("run"), **values)
        return made[key]

    return once


@pytest.mark.parametrize("name", list(GENERATE_FLIPS))
def test_flipping_an_option_changes_something(name, observe):
    flip = GENERATE_FLIPS[name]
    before, after = (flip.watch(observe(values)) for values in (flip.base, {**flip.base, name: flip.value}))
    assert before != after, f"--{name} {flip.value} changes nothing that was looked at: {before}"


def test_every_option_is_shown_here_or_in_training():
    own = set(options(GenerateConfig)) - set(options(Config))
    assert own <= set(GENERATE_FLIPS) <= set(options(GenerateConfig)), own ^ set(GENERATE_FLIPS)


def test_rows_have_the_prompt_the_response_and_its_score(home, observe):
    found = observe({"score": ["@home/reward.py"], "best_of_n": 2})
    assert len(found.rows) == 12 and not found.out.with_name("out.jsonl.parts").exists()
    assert found.rows[3] == {
        "input": "What is 51+51?", "prompt_id": "0:1", "sample": 1, "data_source": "sums", "reference": "102", "output":
        found.rows[3]["output"], "reward": found.rows[3]["reward"], "reward_parts": found.rows[3]["reward_parts"],
        "tokens": found.rows[3]["tokens"], "finish_reason": found.rows[3]["finish_reason"]
    }
    assert 0 <= found.rows[3]["reward"] <= 1.1
    facts = found.summary
    assert facts["prompts"] == 6 and facts["responses"] == facts["rows"] == 12 and facts["unscored responses"] == 0
    assert facts["reward mean"] == pytest.approx(sum(row["reward"] for row in found.rows) / 12)


def test_best_responses_are_those_of_the_scored_rows(observe):
    scored = observe({"score": ["@home/reward.py"], "best_of_n": 2}).rows
    best = observe({"score": ["@home/reward.py"], "best_of_n": 2, "post_processor": "rs"}).rows
    whole = [row for row in scored if row["finish_reason"] == "stop"]
    assert [row["reward"]
            for row in best] == [max(row["reward"] for row in whole if row["input"] == one["input"]) for one in best]
    assert len(best) == len({row["input"] for row in whole})
    assert all(set(row) == {"input", "output", "reward", "finish_reason"} for row in best)


def test_chats_are_scored_too_and_a_reward_that_is_there_needs_no_score(home, tmp_path):
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "\\boxed{2}"}]
    tiny_task.write_rows(tmp_path / "chats.jsonl", [{"chosen": turns, "reference": "2"}])
    given = {"eval_task": "rm", "pretrain": None, "prompt_data": [str(tmp_path / "chats.jsonl")]}
    (row, ) = run(home, tmp_path, input_key="chosen", score=["exact"], **given).rows
    assert (row["input"], row["output"], row["reward"]) == ("1+1?", "\\boxed{2}", 1.0)
    others = [row | {"output": "x", "reward": 0.5}, row | {"output": "", "reward": 0.0}]  # one as generated
    again = tiny_task.write_rows(tmp_path / "scored.jsonl", [*others, row])
    (pair, ) = run(home, tmp_path, **(given | {"prompt_data": [str(again)]}), post_processor="iter_dpo").rows
    assert (pair["chosen"], pair["rejected_reward"]) == ("\\boxed{2}", 0.5)


def test_chats_keep_the_template_of_the_reward_model(tmp_path, scorer):
    """In the input of the rows that post-processors write; without a model, their turns are in the prompt."""
    rows = Path(field.__file__).parent / "rows" / "scored_chats.jsonl"
    chats = [json.loads(line)["chosen"][:-1] for line in rows.read_text().splitlines()]
    tokenizer = load_tokenizer(scorer)
    wanted = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    given = {"eval_task": "rm", "prompt_data": [str(rows)], "input_key": "chosen"}
    for name, changed in (("rs", lambda row: row["input"]), ("csft", lambda row: row["input"].split(" <rm_score>")[0])):
        out = tmp_path / f"{name}.jsonl"
        main(launch.flags({**given, "pretrain": scorer, "post_processor": name, "output_path": out}))
        assert [changed(row) for row in read_lines(out)] == wanted
    main(launch.flags({**given, "score": ["format"], "output_path": tmp_path / "plain.jsonl"}))
    found = read_lines(tmp_path / "plain.jsonl")
    assert found[0]["prompt"] == chats[0] and found[1]["input"] == "say word 3" and "prompt" not in found[1]


def test_rewards_may_be_text(home, tmp_path):
    """As in a CSV whose column has a text too, and compared as numbers: 10 is more than 9.5."""
    (tmp_path / "scored.csv").write_text('input,output,reward,unscored\nq,a," 9.5",\nq,b,10,\nq,c,,timeout\n')
    given = {"eval_task": "rm", "prompt_data": [str(tmp_path / "scored.csv")], "post_processor": "iter_dpo"}
    found = run(home, tmp_path, **given)
    assert (found.rows[0]["chosen"], found.rows[0]["chosen_reward"], found.rows[0]["rejected_reward"]) == ("b", 10, 9.5)
    assert found.summary["unscored responses"] == 1
    for bad, told in (("good", "the reward 'good' is not a finite number"), ("nan", "not a finite number"),
                      ("", "the row has no reward")):
        tiny_task.write_rows(tmp_path / "bad.jsonl", [{"input": "q", "output": "a", "reward": value}
                                                      for value in ("1", bad)])  # yapf: disable
        with pytest.raises(UserError, match=f"bad.jsonl.*2.*{told}"):
            run(home, tmp_path, **given | {"prompt_data": [str(tmp_path / "bad.jsonl")]})


SLOW = '''
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.1 * os.path.exists(__file__ + ".slow"))
    return len(solution_str) / 100
'''


@pytest.mark.dist
def test_a_killed_run_resumes_with_any_number_of_ranks_and_writes_the_same_file(home, tmp_path):
    """Nothing is generated or scored twice, and two ranks make what one makes."""
    (home / "slow.py").write_text(SLOW)
    flags = {"pretrain": home / "model", "prompt_data": home / "train.jsonl", "score": home / "slow.py",
             "best_of_n": 2, **SMALL}  # yapf: disable
    straight = launch.finish(tmp_path, flags | {"output_path": "straight.jsonl"}, module="lightrft.cli.generate")
    assert "resumed" not in straight.output
    (home / "slow.py.slow").touch()
    killed = launch.launch(tmp_path, flags | {"output_path": "killed.jsonl"}, module="lightrft.cli.generate")
    parts = tmp_path / "killed.jsonl.parts" / "rank_00000.jsonl"
    end = time.monotonic() + 60
    while (not parts.exists() or parts.read_bytes().count(b"\n") < 3) and time.monotonic() < end:
        time.sleep(0.01)
    killed.kill()
    (home / "slow.py.slow").unlink()
    before = parts.read_text().count("\n")
    assert 3 <= before < 20 and not (tmp_path / "killed.jsonl").exists()
    resumed = launch.finish(tmp_path, flags | {"output_path": "killed.jsonl"}, ranks=2, module="lightrft.cli.generate")
    assert f"resumed: {before} of 20 rows are done" in resumed.log(0)
    assert (tmp_path / "killed.jsonl").read_text() == (tmp_path / "straight.jsonl").read_text()
    assert len(read_lines(tmp_path / "killed.jsonl")) == 40


def test_a_finished_run_whose_output_was_not_written_generates_nothing(home, tmp_path, monkeypatch):
    """A post-processor that fails leaves the responses for the next one."""
    given = {"score": ["exact"], "best_of_n": 2}
    with pytest.raises(UserError, match="no row is left of 12 responses .6 prompts without a pair: equal rewards"):
        run(home, tmp_path, post_processor="iter_dpo", **given)
    monkeypatch.setattr(batch.LoadedModel, "start", lambda self: pytest.fail("the engine is started"))
    assert len(run(home, tmp_path, post_processor="rs", keep_truncated=True, **given).rows) == 6


def test_responses_whose_server_did_not_answer_are_scored_again(home, tmp_path, monkeypatch):
    """And nothing is generated again; without any score the command fails, whatever it writes."""
    up = []

    def ask(session, url, batch, limit_s):
        if not up:
            raise RequestFailed("unreachable", url)
        return [Outcome(float(len(item.response))) for item in batch]

    monkeypatch.setattr(remote, "ask_server", ask)
    given, folder = {"score": ["http://127.0.0.1:9/reward"], "best_of_n": 2}, tmp_path / "out.jsonl.parts"
    with pytest.raises(UserError, match=f"12 of 12 responses are unscored .12 unreachable.* {folder} keeps the resp"):
        run(home, tmp_path, **given)
    monkeypatch.setattr(batch.LoadedModel, "start", lambda self: pytest.fail("the engine is started"))
    with pytest.raises(UserError, match=f"no row is left of 12 responses .12 unscored.* {folder} keeps the responses"):
        run(home, tmp_path, post_processor="rs", keep_truncated=True, **given)
    first = read_lines(tmp_path / "out.jsonl")
    up.append(True)
    found = run(home, tmp_path, **given)
    assert [row["reward"] for row in found.rows] == [len(row["output"]) for row in first]
    assert "unscored" not in found.rows[0] and found.summary["unscored responses"] == 0 and not folder.exists()


def test_rows_of_a_changed_reward_or_model_are_refused(home, tmp_path):
    """A file that is edited, weights that are written again, in place."""
    reward, model = tmp_path / "reward.py", shutil.copytree(home / "model", tmp_path / "model")
    reward.write_text("def reward(prompts, completions, **columns):\n    return [1.0] * len(completions)\n")
    given = {"score": [str(reward)], "best_of_n": 2, "pretrain": str(model), "post_processor": "iter_dpo"}
    with pytest.raises(UserError, match="no row is left"):
        run(home, tmp_path, **given)
    text = reward.read_text()
    reward.write_text(text.replace("1.0", "2.0"))
    with pytest.raises(UserError, match="an unfinished run with other options or data: the content of .*reward.py"):
        run(home, tmp_path, **given)
    reward.write_text(text)
    os.utime(model / "model.safetensors")
    with pytest.raises(UserError, match="an unfinished run with other options or data: the files of .*model"):
        run(home, tmp_path, **given)


def test_a_reward_model_scores_what_is_generated_and_what_is_there(home, tmp_path, scorer):
    """The numbers of Hugging Face, of chats by the model's own template; and of the rows that were written, again."""
    made = run(home, tmp_path, score=[f"{scorer}=0.5", "exact"], best_of_n=2, apply_chat_template=True).rows
    chats = [[{"role": "user", "content": f"What is {i}+{i}?"}] for i in range(50, 56) for _ in range(2)]
    wanted = plain(scorer, [RewardInput("", row["output"], chat) for row, chat in zip(made, chats)])
    assert [row["reward_parts"]["rm"] for row in made] == pytest.approx(wanted, abs=1e-4)
    assert [row["reward"] for row in made] == pytest.approx([0.5 * value for value in wanted], abs=1e-4)
    asked = {"eval_task": "rm", "prompt_data": [str(tmp_path / "chats.jsonl")], "pretrain": scorer}
    tiny_task.write_rows(tmp_path / "chats.jsonl",
                         [{"prompt": chat[0]["content"], "output": row["output"]} for row, chat in zip(made, chats)])
    main(launch.flags({**asked, "apply_chat_template": True, "output_path": tmp_path / "again.jsonl"}))
    assert [row["reward"] for row in read_lines(tmp_path / "again.jsonl")] == pytest.approx(wanted, abs=1e-4)


def test_a_server_of_reward_models_scores_as_the_model_itself(home, tmp_path, scorer):
    """``--score URL``, beside another reward, of what is generated and of rows that are there."""
    server = launch.launch(tmp_path, {"reward_pretrain": scorer, "port": 0}, module="lightrft.cli.serve_rm")
    server.until("get_reward")
    url = re.search(r"http://127.0.0.1:\d+/get_reward", server.log(0))[0]
    for name, model in (("near", scorer), ("far", url)):
        (tmp_path / name).mkdir()
        run(home, tmp_path / name, score=[model, "exact"], best_of_n=2, apply_chat_template=True)
    near, far = (read_lines(tmp_path / name / "out.jsonl") for name in ("near", "far"))
    assert [row["output"] for row in far] == [row["output"] for row in near] and len(near) == 12
    rewards = [row["reward"] for row in near]
    assert len({*rewards}) > 1 and [row["reward"] for row in far] == pytest.approx(rewards, abs=1e-5)
    answers = [{"input": f"What is {50 + i}+{50 + i}?", "output": near[2 * i + j]["output"]} for i in range(6)
               for j in range(2)]  # yapf: disable
    given = tiny_task.write_rows(tmp_path / "given.jsonl", answers)
    again = run(home, tmp_path, eval_task="rm", prompt_data=[str(given)], score=[url], apply_chat_template=True).rows
    assert [row["reward"] for row in again] == pytest.approx(rewards, abs=1e-5)
    server.signal(signal.SIGINT)
    assert server.wait(20) == [0], server.output


BAD = [
    ({"best_of_n": 2, "temperature": 0}, "greedy responses to one prompt are all the same"),
    ({"post_processor": "rs"}, "--post_processor rs: needs rewards; add --score"),
    ({"post_processor": "iter_dpo", "score": "exact"}, "a pair needs two responses"),
    ({"score": "nothing.py"}, "--score nothing.py: no such file"),
    ({"score": "./nothing=2"}, "--score ./nothing: no such folder"),
    ({"score": "recipe,math"}, "recipe means the recipe of each row"),
    ({"post_processor": "csft", "score": "exact", "reward_template": "{input}"}, "must hold {reward}"),
    ({"csft_prompt": "good"}, "has no effect without --enable_csft"),
    ({"eval_task": "rm", "temperature": 0.5}, "has no effect with --eval_task rm, which generates nothing"),
    ({"eval_task": "rm", "overlong_prompt": "error"}, "--overlong_prompt error: has no effect with --eval_task rm"),
    ({"eval_task": "rm", "fps": 1.0, "images_key": "photo"}, "--images_key photo: has no effect with --eval_task rm"),
    ({"prompt_data": "own/a,own/b", "dataset_probs": "0.9,0.1"}, "--prompt_data_probs 0.9,0.1: has no effect, ev"),
    ({"output_key": "answer"}, "has no effect without --eval_task rm"),
    ({"value_head_prefix": "v", "score": "exact"}, "--value_head_prefix v: has no effect without a reward model"),
    ({"max_len": 8}, "--max_len 8: has no effect without --eval_task rm"),
    ({"eval_task": "rm", "pretrain": "none", "score": "exact", "max_len": 8}, "has no effect without a reward model"),
    ({"output_path": "."}, "is a folder; give a file"),
    ({"prompt_data": "absent.jsonl"}, "absent.jsonl"),
    ({"normalize_reward": True}, "--normalize_reward true: has no effect without --score"),
]  # yapf: disable


@pytest.mark.parametrize("given,told", BAD, ids=[told for _, told in BAD])
def test_options_that_do_not_fit_are_refused(given, told, home, tmp_path, capsys):
    data = home / "test.jsonl"
    if given.get("eval_task") == "rm":
        data = tiny_task.write_rows(tmp_path / "answered.jsonl", [{"input": "1+1?", "output": "2"}])
    flags = {"pretrain": home / "model", "prompt_data": data, "output_path": tmp_path / "out.jsonl"}
    with pytest.raises(SystemExit) as done:
        main(launch.flags(flags | given))
    assert done.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize("given,told", [
    ({"iter": 4, "rollout_batch_size": 2}, "begins at row 8, and the data has 6; .* the last one is --iter 2"),
    ({"prompt_max_len": 4}, "all 6 prompts are longer"),
    ({"eval_task": "rm", "prompt_data": ["@home/train.jsonl"], "score": ["exact"]}, "has no response to score"),
    ({"eval_task": "rm", "prompt_data": ["@given"]}, "has no reward, and nothing scores it; add --score"),
    ({"score": ["recipe"]}, "no reward recipe for label"),
])
def test_rows_that_do_not_fit_are_refused(given, told, home, tmp_path):
    with pytest.raises(UserError, match=told):
        run(home, tmp_path, **given)
    assert not (tmp_path / "out.jsonl").exists()


# the commands of OpenRLHF's manual, with other paths and lengths, without the flags that are refused
MANUAL = {
    "generate": "--eval_task generate --pretrain @home/model --max_new_tokens 8 --prompt_max_len 64 --dataset "
    "@home/train.jsonl --input_key prompt --apply_chat_template --temperature 0.9 --tp_size 1 --best_of_n 4 "
    "--max_num_seqs 64 --iter 1 --rollout_batch_size 8 --max_samples 128 --output_path @save/generate.jsonl",
    "rm": "--eval_task rm --score @home/reward.py --dataset @save/generate.jsonl --dataset_probs 1.0 "
    "--post_processor iter_dpo --output_path @save/rm.jsonl",
    "csft": "--eval_task rm --score @home/reward.py --dataset @save/generate.jsonl --post_processor csft "
    "--normalize_reward --output_path @save/csft.jsonl",
    "reward model": "--eval_task rm --pretrain @home/rm --bf16 false --max_len 64 --dataset @save/generate.jsonl "
    "--dataset_probs 1.0 --zero_stage 0 --micro_batch_size 16 --output_path @save/scored.jsonl",
    "conditioned": "--eval_task generate --pretrain @home/model --max_new_tokens 8 --prompt_max_len 64 --dataset "
    "@home/test.jsonl --greedy_sampling --enable_csft --output_path @save/conditioned.jsonl",
}  # yapf: disable


def test_the_commands_of_the_manual_run(home, tmp_path, capsys):
    for words in MANUAL.values():
        main(words.replace("@home", str(home)).replace("@save", str(tmp_path)).split())
    made = {name: read_lines(tmp_path / f"{name}.jsonl") for name in ("generate", "rm", "csft", "conditioned")}
    assert len(made["generate"]) == 32 and made["generate"][0]["prompt_id"] == "0:8", "the second eight of the prompts"
    assert set(made["rm"][0]) == {"prompt", "chosen", "rejected", "chosen_reward", "rejected_reward"}
    assert all(row["chosen_reward"] > row["rejected_reward"] for row in made["rm"])
    assert re.search(r" <rm_score>: -?\d\.\d\d $", made["csft"][0]["input"])
    assert made["conditioned"][0]["input"] == "What is 50+50? <rm_score>: 5.00 "
    with pytest.raises(SystemExit):
        main([*MANUAL["rm"].split(), "--enable_prefix_caching", "--micro_batch_size", "none"])
    told = capsys.readouterr().err
    assert all(f"--{name} has no effect" in told
               for name in ("enable_prefix_caching", "zero_stage", "micro_batch_size"))
    assert "--micro_batch_size is not an option here" in told
    assert all(row["reward"] is not None for row in read_lines(tmp_path / "scored.jsonl"))
