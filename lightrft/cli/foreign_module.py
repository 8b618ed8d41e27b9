"""The command here under a name that another trainer gives its module: ``python -m lightrft.cli.batch_inference``.

Python runs this file for each of those names: :class:`lightrft.cli.ForeignModules`.
"""
import sys
from importlib import import_module

from lightrft.cli.foreign_commands import of_another_trainer
from lightrft.cli.main import COMMANDS
from lightrft.utils.logging import get_logger

# name -> options whose defaults mean another algorithm there
DEFAULTS = dict.fromkeys(("train_ppo", "train_ppo_ray", "main_ppo"), {"advantage_estimator": "gae"})


def command_of(module: str) -> str:
    """Return the command of ``lightrft`` that does the work of ``lightrft.cli.NAME``, or an empty string. A name that
    means a command with an option, such as ``grpo``, has none."""
    name = module.rpartition(".")[2]
    command = name if name in COMMANDS else of_another_trainer(name)
    return command if command in COMMANDS else ""


def main(module: str) -> int | None:
    """Run that command with the words of this process; the first rank says which it is. A name that means a command
    with an option is refused: the words may lack the option."""
    command, defaults = command_of(module), DEFAULTS.get(module.rpartition(".")[2], {})
    if not command:
        sys.stderr.write(f"{module}: error: here: lightrft {of_another_trainer(module)}\n")
        return 2
    own = COMMANDS[command][0]
    told = "".join(f"; --{name} is {value}, unless it is given" for name, value in defaults.items())
    get_logger().info("%s is lightrft %s here, or python -m %s%s", module, command, own, told)
    code: int | None = import_module(own).main(sys.argv[1:], **({"defaults": defaults} if defaults else {}))
    return code


if __name__ == "__main__":
    sys.exit(main(__spec__.name))
