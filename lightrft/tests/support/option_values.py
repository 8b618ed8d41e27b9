"""Another valid value for every option of a tree, as the words after its flag and as a Python value."""
from typing import Any

from lightrft.config.options import Option, show
from lightrft.config.tree import options

SAMPLES = {bool: True, int: 7, float: 0.25, str: "other", dict: {"other": [1, None]}}


def other_value(option: Option) -> Any:
    """A value of the option's type that is not its default."""
    if option.name == "stages":
        return ["8:2", "7"]
    if option.choices:
        choice = next((choice for choice in option.choices if choice != option.default), option.default)
        return [choice] if option.many else choice
    value = not option.default if option.kind is bool else SAMPLES[option.kind]
    return [value, value] if option.many else value


def words(option: Option, value: Any) -> list[str]:
    """The command line that sets ``value``."""
    if isinstance(value, bool):
        return [option.flag if value else f"--no_{option.name}"]
    return [option.flag, *(map(str, value) if option.many else [show(value) if option.kind is dict else str(value)])]


def every_option(tree: type) -> list[Option]:
    """The options of ``tree`` in order."""
    return list(options(tree).values())
