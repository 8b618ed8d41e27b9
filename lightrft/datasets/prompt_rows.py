"""Reads rows as prompts; a row schema is recognised by its shape.

Known schemas: verl and LightRFT ``{data_source, prompt, reward_model, extra_info}``, TRL's prompt-only rows, ms-swift's
``{messages, solution}`` and ``{input, output, label}``, Alpaca's ``{instruction, input, output}``, ShareGPT's
``{conversations}``.
"""
from collections.abc import Iterable, Mapping
from typing import Any

from lightrft.config.schema import DataConfig
from lightrft.datasets.rows import DataError, Row, Rows, UnusableRow
from lightrft.datasets.template_kwargs import template_kwargs
from lightrft.datasets.turns import joined_calls, meant_role, normalised
from lightrft.utils.logging import get_logger
from lightrft.utils.prompt import Message, Prompt

PROMPT_COLUMNS = ("prompt", "messages", "input")
ANSWER_COLUMNS = ("reference", "solution", "ground_truth", "answer", "output")
_PROMPT_OPTIONS = {"input_key": (), "reference_key": ("extra_info", "reward_model"), "label_key": ("extra_info", )}
_BESIDE_CONTENT = ("tool_calls", "reasoning_content", "thinking")  # what an answer may have alone
WHOLE_CHATS = ("messages", "conversations", "chosen", "rejected")  # columns of chats with their answers


def text_of(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts; other parts stand as ``<image>`` etc."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = [part if isinstance(part, dict) else {"type": "text", "text": str(part)} for part in content]
    return "".join(f"<{part.get('type')}>" if part.get("text") is None else str(part["text"]) for part in parts)


def joined(content: Any) -> Any:
    """Return the text of a list of texts alone, as it is; any other content unchanged."""
    parts = content if isinstance(content, list) else [None]
    texts = all(isinstance(part, str) or isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(
        part.get("text"), str) for part in parts)  # yapf: disable
    return text_of(content) if texts else content


def missing(value: Any) -> bool:
    """Return True for an empty value: null, NaN, blank text, an empty list or object."""
    empty = isinstance(value, str) and not value.strip() or isinstance(value, float) and value != value
    return value is None or empty or isinstance(value, (list, dict)) and not value


def silent(turn: Message) -> bool:
    """Return True for a turn without text, media, thoughts or a call of a tool."""
    return missing(text_of(turn["content"])) and all(missing(turn.get(name)) for name in _BESIDE_CONTENT)


def truth(value: Any) -> bool | None:
    """Read true, false, 1 or 0; None for any other value, which a bare ``bool`` would take for true."""
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def first_value(*candidates: tuple[Any, str]) -> Any:
    """Return the first value present among ``(mapping or None, key)`` pairs, else None."""
    for mapping, key in candidates:
        if isinstance(mapping, dict) and not missing(mapping.get(key)):
            return mapping[key]
    return None


def as_chat(row: Row, input_key: str, where: str) -> Row:
    """Add ``messages`` to a row of Alpaca (``instruction, input, output``) or ShareGPT (``conversations``).

    A row that has a prompt, as ``input_key``, ``prompt`` or ``messages``, is left as it is.

    Raises:
        DataError: as :func:`_history`.
    """
    if not all(missing(row.get(name)) for name in (input_key, "prompt", "messages")):
        return row
    turns = row.get("conversations")
    if missing(turns) and not missing(row.get("instruction")):
        turns = _alpaca_turns(row, where)
    if not isinstance(turns, list) or not turns:
        return row
    return {**row, "messages": turns}


def _alpaca_turns(row: Row, where: str) -> list[Message]:
    """Return the turns of an Alpaca row."""
    asked = "\n".join(str(row[name]) for name in ("instruction", "input") if not missing(row.get(name)))
    answer = [] if missing(row.get("output")) else [{"role": "assistant", "content": row["output"]}]
    return [*_history(row, where), {"role": "user", "content": asked}, *answer]


def _history(row: Row, where: str) -> list[Message]:
    """Return the turns of the column ``history``, pairs of earlier questions and answers.

    Raises:
        DataError: it holds something else.
    """
    pairs = [] if missing(row.get("history")) else row["history"]
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise DataError(f"{where}: the column 'history' is {str(pairs)[:80]}: expected a list of pairs [question, "
                        "answer]. Correct or remove it")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(("user", "assistant"), pair)]


def with_system(value: Any, row: Row, where: str) -> Any:
    """Return a prompt or chat of a row after the text in its column ``system``; with that column, a text is a turn of
    the user, after those of ``history``.

    Raises:
        DataError: as :func:`_history`.
    """
    system = row.get("system")
    if "system" not in row or not isinstance(system, str | None):
        return value
    before = [] if missing(system) else [{"role": "system", "content": system}]
    if isinstance(value, str):
        return [*before, *_history(row, where), {"role": "user", "content": value}]
    turns = value if isinstance(value, list) else [value]
    has_system = any(isinstance(turn, dict) and "system" in (turn.get("role"), turn.get("from")) for turn in turns[:1])
    return value if has_system else [*before, *turns]


def prompt_column(row: Row, input_key: str) -> str | None:
    """Return the column that holds the prompt: ``input_key`` if the row has it, else the first known name."""
    for column in dict.fromkeys((input_key, *PROMPT_COLUMNS)):
        if not missing(row.get(column)):
            return column
    return None


def find_reference(row: Row, key: str) -> Any:
    """Find the reference answer: ``key`` > reward_model.ground_truth > extra_info > the usual columns, or None."""
    extra = row.get("extra_info")
    names = dict.fromkeys((key, *ANSWER_COLUMNS))
    return first_value((row, key), (row.get("reward_model"), "ground_truth"), *((extra, name) for name in names),
                       *((row, name) for name in names))


def find_label(row: Row, key: str) -> str:
    """Find the name of the reward recipe: column ``key``, else ``extra_info[key]``, else empty."""
    value = first_value((row, key), (row.get("extra_info"), key))
    return "" if value is None else str(value)


def to_message(turn: Any, where: str) -> Message:
    """Convert one chat turn to role / content form, see :func:`normalised`; ShareGPT's from / value is accepted.

    Raises:
        UnusableRow: a part of its content is null, or is a text that is null.
        DataError: it is no chat turn, its content is neither text nor a list of parts, or the content of another turn
            than an answer is null.
    """
    turn = normalised(turn, where) if isinstance(turn, dict) else turn
    if not isinstance(turn, dict) or missing(turn.get("role")) or "content" not in turn:
        raise DataError(f"{where}: a chat message must have role and content, not {str(turn)[:80]!r}")
    if meant := meant_role(str(turn["role"])):
        raise DataError(f"{where}: a chat message has the role {turn['role']!r}, which chat templates do not know. "
                        f"Write {meant!r}")
    if wrong := [part for part in _parts(turn["content"]) if not isinstance(part, (str, type(None)))]:
        raise DataError(f"{where}: a chat message of {turn['role']!r} has the content {str(wrong[0])[:80]} "
                        f"({type(wrong[0]).__name__}); expected a text, or a list of parts. Write it as text")
    if turn["content"] is None and turn["role"] != "assistant":  # what an answer lacks depends on who learns from it
        raise DataError(f"{where}: a chat message of {turn['role']!r} has null as its content. Write its text, or "
                        "remove it")
    if isinstance(turn["content"], list) and any(map(_null, turn["content"])):
        raise UnusableRow(f"{where}: a chat message of {turn['role']!r} has a part without text "
                          f"({str(turn['content'])[:80]}). Write its text, or remove it")
    return turn


def _parts(content: Any) -> list[Any]:
    """Return what should be texts or null in a content: itself, or its parts and their texts."""
    parts = content if isinstance(content, list) else [content]
    return [part.get("text") if isinstance(part, dict) and isinstance(content, list) else part for part in parts]


def _null(part: Any) -> bool:
    """Return True for a part of a content that is null, or a text that is."""
    if not isinstance(part, dict):
        return part is None
    given = {name for name, value in part.items() if value is not None}
    return not given or part.get("type") == "text" and "text" not in given


def to_messages(value: Any, where: str) -> list[Message]:
    """Convert a list of chat turns (or a single one) to role / content form."""
    turns = value if isinstance(value, list) else [value]
    return joined_calls(turns, [to_message(turn, where) for turn in turns], where)


def prefill_of(chat: list[Message]) -> str | None:
    """Return the text of the answer that a chat ends with, which a response continues; None: it ends with another turn,
    or with an answer that is more than text."""
    last = chat[-1] if len(chat) > 1 else {}
    content = joined(last.get("content"))
    text = isinstance(content, str) and all(missing(last.get(name)) for name in _BESIDE_CONTENT)
    return content if last.get("role") == "assistant" and text else None


def continued(chat: list[Message], said: list[Message]) -> tuple[list[Message], str, list[Message]]:
    """Join the prefill at the end of a prompt with the answer behind it: return the turns before both, the prefill, and
    the turns from the whole answer on."""
    prefill, first = prefill_of(chat), said[0] if said else {"role": ""}
    if prefill is None or first["role"] != "assistant":
        return chat, "", said
    content = joined(first["content"])
    whole = [{"type": "text", "text": prefill}, *content] if isinstance(content, list) else prefill + (content or "")
    return chat[:-1], prefill, [{**first, "content": whole}, *said[1:]]


def normalise_prompt(value: Any, where: str, column: str) -> str | list[Message]:
    """Normalise a prompt: text stays text; in a ``column`` of whole chats, messages lose the answers at their end, to
    which the model would reply. In others the answer at the end is a prefill.

    Raises:
        UnusableRow: nothing is left of the messages.
    """
    if isinstance(value, str):
        return value
    messages = to_messages(value, where)
    while column in WHOLE_CHATS and messages and messages[-1]["role"] == "assistant":
        messages.pop()
    asked = messages if prefill_of(messages) is None else messages[:-1]
    if all(missing(turn["content"]) or turn["role"] == "assistant" for turn in asked):
        raise UnusableRow(f"{where}: the row has no prompt, only empty or assistant messages. Remove it")
    if asked[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the prompt ends with an answer that is more than text (a call of a tool, say), which "
            "no response continues. Remove that turn, or add the one that follows it")
    return messages


def to_prompt(row: Row, cfg: DataConfig, where: str) -> Prompt:
    """Recognise one row. ``where`` names it in messages.

    Raises:
        DataError: the row has no prompt, or messages that are not valid.
    """
    row = as_chat(row, cfg.input_key, where)
    column = prompt_column(row, cfg.input_key)
    if column is None:
        names = ", ".join(dict.fromkeys((cfg.input_key, *PROMPT_COLUMNS)))
        raise DataError(f"{where}: the row has no prompt (looked in {names}; it has {', '.join(row)}). Name its column "
                        "with --input_key, or remove the row")
    row_id, asked = first_value((row, "id"), (row, "uid")), with_system(row[column], row, where)
    asked = normalise_prompt(asked, where, column)
    text, messages = (asked, []) if isinstance(asked, str) else ("", asked)
    others = {key: value for key, value in row.items() if key != column}
    return Prompt(uid="" if row_id is None else str(row_id), token_ids=[], text=text, messages=messages,
                  data_source=str(row.get("data_source") or ""), label=find_label(row, cfg.label_key),
                  reference=find_reference(row, cfg.reference_key), columns=others,
                  template_kwargs=template_kwargs(row, cfg.apply_chat_template or not text, where))


def check_named_columns(rows: Rows, cfg: Any, options: Iterable[str],
                        nested: Mapping[str, tuple[str, ...]] | None = None) -> None:
    """Refuse an option of ``options`` that names another column than by default, one that no row has.

    Args:
        cfg: data class with the options.
        nested: option -> objects of a row in which its column may be.

    Raises:
        DataError: names the option, the file and its columns.
    """
    for option in options:
        key, parts = getattr(cfg, option), (nested or {}).get(option, ())
        if key == getattr(type(cfg)(), option) or not rows.rows or any(key in _keys(row, parts) for row in rows.rows):
            continue
        columns = dict.fromkeys(name for row in rows.rows for name in _keys(row, parts))
        raise DataError(f"--{option} {key!r}: no row of {rows.origin(0)[0]} has it. Its columns: {', '.join(columns)}")


def no_reference(rows: Rows, cfg: DataConfig) -> str:
    """Explain that no row has a reference answer: the columns that were looked in, those there are, and the option."""
    looked = ", ".join(dict.fromkeys((cfg.reference_key, *ANSWER_COLUMNS)))
    return (
        f"{rows.origin(0)[0]}: no row has a reference answer, so rewards that compare with one cannot score (looked "
        f"in reward_model.ground_truth, extra_info and {looked}; the first row has {', '.join(rows.rows[0])}). Name "
        "its column with --reference_key; --label_key names the one with the reward recipe of a row")


def _keys(row: Row, nested: tuple[str, ...]) -> list[str]:
    """Return the names with a value in the row, then those in its ``nested`` objects."""
    parts = [row, *(row[name] for name in nested if isinstance(row.get(name), dict))]
    return [key for part in parts for key, value in part.items() if not missing(value)]


def to_prompts(rows: Rows, cfg: DataConfig) -> list[Prompt]:
    """Recognise all rows of one spec; they must share one shape, and all or none of them carry an answer.

    Raises:
        DataError: as in :func:`to_prompt` and :func:`check_named_columns`; also for text prompts mixed with chats, and
            for single rows without an answer.
    """
    check_named_columns(rows, cfg, _PROMPT_OPTIONS, _PROMPT_OPTIONS)
    prompts = [to_prompt(row, cfg, where) for row, where in rows.named]
    _report_answers(rows, prompts, cfg)
    for i, prompt in enumerate(prompts):
        _check_same_shape(rows, prompts[0], i, prompt)
    return prompts


def _report_answers(rows: Rows, prompts: list[Prompt], cfg: DataConfig) -> None:
    """Log how many prompts lost the answers at their end, and how many end with one that responses continue."""
    begun = sum(prefill_of(prompt.messages) is not None for prompt in prompts)
    columns = [prompt_column(as_chat(row, cfg.input_key, ""), cfg.input_key) for row in rows.rows]
    chats = [
        as_chat(row, cfg.input_key, "")[column] for row, column in zip(rows.rows, columns) if column in WHOLE_CHATS
    ]
    ended = sum(isinstance(chat, list) and to_message(chat[-1], "")["role"] == "assistant" for chat in chats)
    for count, text in ((ended, "end with an answer in a column of whole chats, which the prompt leaves out"),
                        (begun, "end with an answer that responses continue (a prefill)")):
        if count:
            get_logger().info("%s: %d of %d rows %s", rows.origin(0)[0], count, len(rows), text)


def _check_same_shape(rows: Rows, first: Prompt, i: int, prompt: Prompt) -> None:
    if bool(prompt.messages) != bool(first.messages):
        raise DataError(f"{rows.where(i)}: mixed schema: text and chat prompts in one data set (the first row is "
                        f"{'chat' if first.messages else 'text'}). Write all rows in one schema")
    if missing(prompt.reference) != missing(first.reference):
        bare = i if missing(prompt.reference) else 0
        raise DataError(f"{rows.where(bare)}: the row has no answer, others have one (looked in reward_model."
                        f"ground_truth, extra_info and {', '.join(ANSWER_COLUMNS)}). Complete or remove it, "
                        "or name its column with --reference_key")
