"""Rules of process reward models."""
from collections.abc import Iterator

from lightrft.config.prm_schema import PRMConfig


def step_problems(c: PRMConfig) -> Iterator[str]:
    """Yield the problems of the tokens of steps and of their labels."""
    d = c.data
    if not d.placeholder_token:
        yield ("--placeholder_token is missing: name the token that follows every step of the solutions, e.g. a "
               "reserved one of the tokenizer")
    if len(d.reward_tokens) == 1:
        yield (f"--reward_tokens {d.reward_tokens[0]}: a judgement is a choice; name the token of a good step and that "
               "of a bad one, e.g. --reward_tokens + -")
    if not d.form.step_separator:
        yield "--step_separator '': steps would run into each other; nearest valid value: '\\n'"
