"""All flags of the option tree for scripts that use plain ``argparse``."""
from argparse import ArgumentParser
from pkgutil import resolve_name


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add every flag of :class:`lightrft.config.schema.Config` to ``parser`` and return it.

    The groups are built from the parsed namespace with ``StrategyConfig.from_args(args)`` or
    :func:`lightrft.config.tree.group_from_args`. A flag that the parser already has is left unchanged::

        args = add_arguments(argparse.ArgumentParser()).parse_args()
        strategy = get_strategy(StrategyConfig.from_args(args))
    """
    return resolve_name("lightrft.config.flags:add_arguments")(parser)  # by name: this layer is below the config's
