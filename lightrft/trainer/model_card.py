"""Model card of a trained model: use, results, data and options of its run."""
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lightrft import __version__
from lightrft.config.rm_schema import StepFormat
from lightrft.config.schema import DataConfig
from lightrft.config.shared_schema import Tree
from lightrft.config.tree import flatten, options
from lightrft.datasets.rendering import Renderer
from lightrft.models.architectures import modality_of
from lightrft.models.config_json import media_kinds, read_config
from lightrft.models.reward_model import STEPS
from lightrft.strategy.mtp import mtp_files
from lightrft.utils.run_summary import RunSummary

_CARD = """---
library_name: transformers
base_model: {base}
{tags}---
# {title}

`{base}` after {steps} of {kind} with lightrft {version}.

## Use

```python
{use}
```

## Results

{changes}| last step | value |
|---|---|
{last}

## Training

| | |
|---|---|
{facts}

<details><summary>Options</summary>

```yaml
{options}```

</details>
"""
_CHANGES = """| metric | before | after | best | measured |
|---|---|---|---|---|
{rows}

The best value is that of its step; this is the model after the last one.

"""
_TEXT = """from transformers import AutoModelForCausalLM, AutoTokenizer

folder = {folder!r}  # or its name on the hub, once it is there
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
{inputs}
output = model.generate(**inputs, max_new_tokens={length}, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))"""
_RENDERED = """prompt = {prompt!r}  # as in training, after its template
inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")"""
_CHAT = """messages = {messages!r}
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""
_LOADED = """from transformers import {auto}, AutoProcessor

folder = {folder!r}  # or its name on the hub, once it is there
model = {auto}.from_pretrained(folder)
processor = AutoProcessor.from_pretrained(folder)"""
_SHOWN = """{imports}
{loaded}
{medium}
messages = [{{"role": "user", "content": [{{"type": {kind!r}, {kind!r}: medium}},
                                         {{"type": "text", "text": "What is it?"}}]}}]
inputs = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True,
                                       return_tensors="pt")
output = model.generate(**inputs, max_new_tokens={length}, do_sample=False)
print(processor.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))"""
_MEDIA = {
    "image": ("from PIL import Image", 'medium = Image.new("RGB", (224, 224), "red")  # or Image.open(a file)'),
    "audio": ("import numpy as np", "medium = np.zeros(processor.feature_extractor.sampling_rate)  # a second of your "
              "sound, at that rate"),
}  # by kind: what an example needs, and the example
_SCORES = """from transformers import AutoModelForSequenceClassification, AutoTokenizer

folder = {folder!r}  # or its name on the hub, once it is there
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder)
{text}
inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
print(dict(zip(model.config.id2label.values(), model(**inputs).logits[0].tolist())))"""
_SCORED_CHAT = """messages = [{{"role": "user", "content": "What is 12+30?"}}, {{"role": "assistant", "content": "42"}}]
text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip()  # the score is that of the end token"""
_SCORED_TEXT = """text = "What is 12+30? 42" + tokenizer.eos_token"""
_STEPS = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = {folder!r}  # or its name on the hub, once it is there
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
{head}
placeholder, ends = {placeholder!r}, []  # follows every step
for step in {steps!r}:
    ids += {step}
    ids += tokenizer.encode(placeholder, add_special_tokens=False)
    ends.append(len(ids) - 1)
with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0, ends]
{judged}"""
_STEP = "tokenizer.encode(step, add_special_tokens=False)"
_STEP_INSIDE = "tokenizer.encode({mark!r} + step, add_special_tokens=False)[{count}:]  # without a blank before it"
_STEPS_OF_CHAT = """messages = [{"role": "user", "content": "What is 12+30?"}]
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)"""
_STEPS_OF_TEXT = """ids = tokenizer.encode("What is 12+30? ")"""
_GOOD = """words = [tokenizer.encode(word, add_special_tokens=False)[0] for word in {words!r}]  # the first means good
print("probability that each step is good", logits[:, words].softmax(-1)[:, 0].tolist())"""
_LABELS = """print("label of each step", [tokenizer.decode(token) for token in logits.argmax(-1)])"""
_OWN_SCORES = """from lightrft.models.loader import load_scorer

model = load_scorer({folder!r})  # transformers has no such model; lightrft serve_rm scores texts with it"""
_LAST = ("reward/mean", "eval/", "policy/kl")
PROMPT = 1000  # characters of a prompt that is shown


def steps_of(count: int) -> str:
    """Return ``"1 step"``, ``"2 steps"``."""
    return f"{count} step" if count == 1 else f"{count} steps"


def model_card(config: Tree, folder: Path, title: str, rows: Sequence[dict[str, Any]], options: str,
               tokenizer: PreTrainedTokenizerBase, prompt: str | None) -> str:
    """Return the card of the model in ``folder``.

    Args:
        rows: lines of ``metrics.jsonl`` up to the step of the model, at least one.
        options: YAML of the options.
        prompt: a rendered training prompt, or None.
    """
    last, summary, wanted = rows[-1], RunSummary.of(rows), (*_LAST, f"{config.METRICS[0]}/loss")
    shown = [name for name in sorted(last) if name.startswith(wanted) and last[name] is not None]
    return _CARD.format(base=config.model.pretrain, title=title, steps=steps_of(last["step"]), kind=config.TRAINING,
                        version=__version__, use=_use(config, folder, tokenizer, prompt), changes=_changes(summary),
                        last="\n".join(f"| {name} | {last[name]:.4g} |" for name in shown), tags=_tags(config, folder),
                        facts="\n".join(f"| {name} | {value} |"
                                        for name, value in _facts(config) + _untrained(folder)), options=options)


def _facts(config: Tree) -> list[tuple[str, str]]:
    """Return the names and values of the options that a reader of the card asks for first."""
    known = options(config)
    found = [(known[name].card, value) for name, value in flatten(config).items()
             if known[name].card and value not in (None, "", [], 0)]
    return [(title, ", ".join(f"`{each}`" for each in (value if isinstance(value, list) else [value])))
            for title, value in found]  # yapf: disable


def _untrained(folder: Path) -> list[tuple[str, str]]:
    """Return the row about weights that were copied from the base model."""
    names = mtp_files(folder, read_config(str(folder)).get_text_config().num_hidden_layers)
    return [("multi-token prediction",
             f"{len(names)} tensors, such as `{min(names)}`, copied from the base model: they "
             "were not trained")] if names else []


def _tags(config: Tree, folder: Path) -> str:
    """Return the tags of the hub, and data sets by their hub ids; files have none."""
    values = flatten(config)
    data = [entry.partition("@")[0] for entry in values.get("prompt_data") or values.get("train_data") or []]
    ids = [entry for entry in data if re.fullmatch(r"[\w.-]+/[\w.-]+", entry) and not Path(entry).exists()]
    named = "datasets:\n" + "".join(f"- {each}\n" for each in ids) if ids else ""
    task = config.TASK or _task(media_kinds(str(folder)))
    return f"pipeline_tag: {task}\ntags:\n- lightrft\n- {config.TAG or config.METRICS[0]}\n{named}"


def _task(kinds: Sequence[str]) -> str:
    """Return the hub's name of what a model does that takes text and media of ``kinds``, and answers with text."""
    if not kinds:
        return "text-generation"
    if "audio" not in kinds:
        return "image-text-to-text"
    return "audio-text-to-text" if len(kinds) == 1 else "any-to-any"


def _changes(summary: RunSummary) -> str:
    """Return the table of the numbers before and after the run; empty without any."""
    rows = [f"| {each.name} | {'' if each.before is None else f'{each.before:.4g}'} | {each.after:.4g} | "
            f"{each.best:.4g} (step {each.best_step}) | {each.measured} |" for each in summary.changes]  # yapf: disable
    return _CHANGES.format(rows="\n".join(rows)) if rows else ""


def _scores(architecture: str, head: dict[str, Any], folder: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the code that loads a reward model and scores an answer; of one that transformers lacks, that loads it."""
    known = architecture.endswith("ForSequenceClassification") and head["pooling"] == "last"
    if not known:
        return _OWN_SCORES.format(folder=str(folder))
    text = _SCORED_CHAT.format() if tokenizer.chat_template else _SCORED_TEXT
    return _SCORES.format(folder=str(folder), text=text)


def _judgements(form: StepFormat, folder: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the code that loads a process reward model and judges the steps of a solution."""
    steps = ["2+0=2", f"{form.step_separator}1+3=4"]
    mark = Renderer(DataConfig(), tokenizer).mark_before(*steps)
    inside = _STEP_INSIDE.format(mark=mark, count=len(tokenizer.encode(mark, add_special_tokens=False)))
    return _STEPS.format(folder=str(folder), head=_STEPS_OF_CHAT if tokenizer.chat_template else _STEPS_OF_TEXT,
                         placeholder=form.placeholder_token, steps=steps, step=inside if mark else _STEP,
                         judged=_GOOD.format(words=form.reward_tokens) if form.reward_tokens else _LABELS)


def _media(folder: Path, kind: str, tokenizer: PreTrainedTokenizerBase, length: int) -> str:
    """Return the code that loads a model that takes media of ``kind``, and answers to one in ``length`` tokens; 0, or a
    template that has no place for it: that loads it."""
    path = str(folder)
    loaded = _LOADED.format(auto=modality_of(read_config(path), path).auto_class.__name__, folder=path)
    if not length or not _is_written(kind, tokenizer):
        return loaded
    imports, medium = _MEDIA[kind]
    return _SHOWN.format(imports=imports, loaded=loaded, medium=medium, kind=kind, length=length)


def _is_written(kind: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the chat template has a place for a medium of ``kind``."""
    parts: list[Any] = [{"type": kind}, {"type": "text", "text": "?"}]
    turns: list[Any] = [[{"role": "user", "content": content}] for content in (parts, parts[1:])]
    try:
        shown, plain = (str(tokenizer.apply_chat_template(turn, tokenize=False)) for turn in turns)
    except (TemplateError, TypeError, ValueError):
        return False
    return shown != plain and "'type'" not in shown  # which is a list of parts as text


def _use(config: Tree, folder: Path, tokenizer: PreTrainedTokenizerBase, prompt: str | None) -> str:
    """Return the code that loads the model and answers a prompt, or scores an answer or its steps; of a vision or
    audio process reward model, that loads it."""
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = described["architectures"][0]
    if config.TASK == "text-classification":
        return _scores(architecture, described["reward_model"], folder, tokenizer)
    judges = config.TASK == "token-classification"
    if judges and architecture.endswith("ForCausalLM"):
        return _judgements(StepFormat(**described[STEPS]), folder, tokenizer)
    length = 0 if judges else flatten(config).get("generate_max_len", 256)
    if kinds := media_kinds(str(folder)):
        return _media(folder, kinds[0], tokenizer, length)
    if prompt is not None and len(prompt) <= PROMPT:
        inputs = _RENDERED.format(prompt=prompt)
    elif tokenizer.chat_template:
        inputs = _CHAT.format(messages=[{"role": "user", "content": "What is 12+30?"}])
    else:
        inputs = _RENDERED.format(prompt="What is 12+30?").replace("  # as in training, after its template", "")
    return _TEXT.format(folder=str(folder), inputs=inputs, length=length)
