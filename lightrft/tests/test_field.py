"""Cases of the field through the commands: the first row as each trainer's dry run shows it, and short whole runs."""
import json
import re

import pytest

from lightrft.cli import main as command
from lightrft.tests.support import field
from lightrft.tests.support.launch import flags
from lightrft.tests.support.runs import no_picture

no_picture = no_picture  # the module draws no curve

RL = {"reward": "exact", "rollout_batch_size": 1, "train_batch_size": 4, "n_samples_per_prompt": 4}
FIXED, ASKS = {"max_len": 500}, {"prompt_max_len": 400, "generate_max_len": 100}
OPTIONS = {
    "sft": FIXED, "kd": FIXED | {"teacher_model": "{home}/model"}, "dpo": FIXED, "rm": FIXED,
    "kto": FIXED | {"train_batch_size": 2}, "prm": FIXED | {"placeholder_token": "#", "reward_tokens": ["+", "-"]},
    "train": ASKS | RL, "generate": ASKS, "evaluate": ASKS | {"score": "exact"}
}  # yapf: disable
DATA = {"train": "prompt_data", "generate": "prompt_data", "evaluate": "eval_data"}
SCHEMA = json.dumps(field.rows("tools_prompt")[0]["tools"][0])
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
WEATHER = f"<|im_start|>system\n{SCHEMA}\n<|im_end|>\n" + ASKED.format("Weather in Oslo?")
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>'
END = "<|im_end|>"
OTHER, NOT_THAT = [{"role": "user", "content": "other"}], [{"role": "assistant", "content": "not that"}]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the model of most cases."""
    folder = tmp_path_factory.mktemp("home")
    field.write_model(folder / "model", "qwen2")
    return folder


@pytest.fixture
def plan(home, tmp_path, capfd):
    """Return a function that plans a command on rows, and returns what it shows of the first: «learnt» texts."""

    def planned(name, rows, **options):
        file = rows
        if isinstance(rows, list):
            file = tmp_path / "rows.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        values = {
            "pretrain": home / "model",
            DATA.get(name, "train_data"): file, "train_batch_size": 1, "dry_run": True
        }
        if name in ("generate", "evaluate"):
            del values["train_batch_size"]
        own = {key: value.format(home=home) if isinstance(value, str) else value
               for key, value in OPTIONS[name].items()}  # yapf: disable
        capfd.readouterr()
        try:
            code = command.main([name, *flags(values | own | options)])
        except SystemExit as stop:
            code = stop.code
        said = capfd.readouterr()
        planned.out, planned.err = said.out, said.err
        assert not code, said.err
        return shown(said.out)

    return planned


def shown(out):
    """Return the texts below each heading of a preview."""
    texts = []
    for line in out.splitlines():
        if line.startswith("the first "):
            texts.append("")
        elif texts and line.startswith(("  | ", "  > ")):
            piece = line[4:].replace("\\n", "\n").replace("\\\\", "\\")
            texts[-1] += f"«{piece}»" if line[2] == ">" else piece
    return [text.replace("»«", "") for text in texts]


def judged(row, side="chosen"):
    """The row of a pair as one of KTO, with another one."""
    rest = {key: value for key, value in row.items() if key not in ("chosen", "rejected")}
    return [rest | {"completion": row[side], "label": True},
            rest | {"prompt": OTHER, "completion": NOT_THAT, "label": False}]  # yapf: disable


def demonstrated(name):
    return {"sft": field.rows(name), "kd": field.rows(name)}


def pair_of(row, said=None):
    """A pair for DPO and RM, and its first answer for KTO, from a demonstration of messages."""
    *asked, answer = row["messages"]
    pair = {"prompt": asked, "chosen": [answer], "rejected": NOT_THAT}
    return {"dpo": [pair], "rm": [pair], "kto": judged(pair)}


TOOLS = {name: field.rows("tools_prompt") for name in DATA} | demonstrated("tools_sft") | {
    "dpo": field.rows("tools_pair"), "rm": field.rows("tools_pair"), "kto": judged(field.rows("tools_pair")[0]),
    "prm": [field.rows("tools_prompt")[0] | {"completions": ["2"], "labels": [1.0]}]}  # yapf: disable


@pytest.mark.parametrize("name", TOOLS)
def test_tools_are_in_the_tokens_and_calls_are_learnt(name, plan, tmp_path):
    first, *others = plan(name, TOOLS[name])
    assert first.startswith(WEATHER), "the schema before the turn of the user"
    rest = first.removeprefix(WEATHER)  # a line break behind the end token is not learnt
    if name in ("sft", "kd"):
        assert rest == f"«{CALL}»\n<|im_start|>tool\n4 C{END}\n<|im_start|>assistant\n«It is 4 C.{END}»\n"
        assert plan(name, field.rows("sharegpt_tools")) == [first]
    if name in ("dpo", "rm", "kto"):
        assert rest.rstrip("\n") == f"«{CALL}»" and others in ([], [f"{WEATHER}«No idea.{END}»"])
    template = tmp_path / "plain.jinja"
    template.write_text(re.sub(r"(?s){% if tools %}.*?{% endif %}", "", field.TEMPLATE, count=1), encoding="utf-8")
    with pytest.raises(AssertionError, match="shows no tools"):
        plan(name, TOOLS[name], chat_template=template)


@pytest.mark.parametrize("name", ["sft", "kd", "dpo", "rm", "kto"])
@pytest.mark.parametrize("case", ["turn_loss_false", "turn_weight_zero"])
def test_turns_that_are_not_to_be_learnt(name, case, plan):
    (row, ) = field.rows(case)
    if name in ("dpo", "rm", "kto"):  # they cannot weigh their last answer, and say so
        row["messages"][-1].pop("weight", None)
    rows = pair_of(row).get(name, [row])
    assert plan(name, rows)[0].rstrip("\n") == (ASKED.format("1+1?") + f"5{END}\n" + ASKED.format("no") + f"«2{END}»")


@pytest.mark.parametrize("name", ["sft", "kd", "dpo", "kto"])
def test_keys_of_other_rows_are_absent(name, plan, tmp_path):
    import pyarrow.parquet as pq
    file = field.write_padded_arguments(tmp_path / "calls.parquet")
    padded = pq.read_table(file).to_pylist()
    rows = {name: file} | pair_of(padded[0]) if name in ("dpo", "kto") else {name: file}
    assert '"arguments": {"city": "Oslo"}}' in plan(name, rows[name])[0]
    assert '"arguments": {"a": 1, "b": 2}}' in plan(name,
                                                    (pair_of(padded[1]) | {"sft": padded[1:]}).get(name, padded[1:]))[0]


@pytest.mark.parametrize("name", ["train", "generate", "evaluate", "sft", "kd"])
def test_keyword_arguments_of_the_template(name, plan):
    opened = ASKED.format("1+1?") + "<think>\n\n</think>\n\n"
    (text, ) = plan(name, field.rows("template_kwargs"))
    assert text == opened if name in DATA else text.rstrip("\n") == f"{opened}«2{END}»"


@pytest.mark.parametrize("name", [name for name in OPTIONS])
def test_hidden_files_of_a_folder(name, plan, tmp_path):
    folder = field.write_folder(tmp_path / "folder")
    more = {"dpo": {"chosen": "1", "rejected": "2"}, "kto": {"completion": "1"},
            "prm": {"completions": ["1"], "labels": [1.0]}}  # yapf: disable
    for file in folder.rglob("*.jsonl"):
        rows = [json.loads(line) | more.get("dpo" if name == "rm" else name, {}) for line in file.open()]
        rows = [row | {"label": i % 2 == 0} if name == "kto" else row for i, row in enumerate(rows)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = {"eval_split": "train"} if name == "evaluate" else {}
    assert plan(name, folder, **options)[0].startswith("new 0") and f"data: 3 rows of {folder}" in plan.out


@pytest.mark.parametrize("reward", ["exact", "math", "answer"])
@pytest.mark.parametrize("case", ["reference_object", "reference_json_text", "extra_info_json_text"])
def test_references_are_readable(reward, case, plan):
    plan("train", field.rows(case), reward=reward)
    answer = "<answer>Oslo</answer>" if reward == "answer" else r"\boxed{Oslo}"
    assert re.search(rf"row 1, answered with its reference .*{re.escape(answer)}.*{reward} 1 x 1; total 1", plan.out)


def test_extra_info_is_an_object(plan, tmp_path):
    file = tmp_path / "reads.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                    "    return float(extra_info['index'] + 1 == 1 and ground_truth == 'Oslo')\n")
    plan("train", field.rows("extra_info_json_text"), reward=file)
    assert "total 1" in plan.out


@pytest.mark.parametrize("name", DATA)
def test_a_prefill_is_the_end_of_the_prompt(name, plan):
    assert plan(name, field.rows("prefill")) == [ASKED.format("1+1?") + "<think>Let me"]


def test_rows_that_are_learnt_beside_the_prompts_are_shown_too(plan, tmp_path):
    beside = tmp_path / "beside.jsonl"
    beside.write_text(json.dumps(field.rows("newline_answer")[1]) + "\n", encoding="utf-8")
    prompt, row = plan("train", field.rows("prefill"), pretrain_data=beside, ptx_batch_size=1)
    assert prompt.endswith("<think>Let me"), "nothing of it is learnt"
    assert row == ASKED.format("1+1?").replace("start|>user", "start|>«user") + f"\n2{END}\n»", "all but its start"


@pytest.mark.parametrize("name", ["sft", "kd", "dpo", "rm", "kto"])
def test_line_breaks_and_the_end_are_learnt(name, plan):
    row, other = field.rows("newline_answer")
    assert plan(name, pair_of(row).get(name, [row]))[0].rstrip("\n") == ASKED.format("1+1?") + f"«\n\n2{END}»"
    if name in ("sft", "kd"):
        assert plan(name, [other])[0].rstrip("\n") == ASKED.format("1+1?") + f"«\n2{END}»"


@pytest.mark.parametrize("name", ["sft", "kd", "dpo", "rm", "kto"])
def test_lists_of_texts_are_joined(name, plan):
    (row, ) = field.rows("text_parts")
    assert plan(name, pair_of(row).get(name, [row]))[0].rstrip("\n") == ASKED.format("1+1?") + f"«2{END}»"


@pytest.mark.parametrize("name", ["train", "sft"])
def test_stablelm_trains(name, plan, tmp_path):
    assert plan(name, field.rows("prefill" if name == "train" else "tools_sft"),
                pretrain=field.write_model(tmp_path / "model", "stablelm"))  # yapf: disable
