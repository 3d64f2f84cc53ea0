"""The command line: ``python -m lightning_chunkmbs fit --config file.yaml`` is Lightning's own CLI, nothing more."""

from typing import NoReturn

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

__all__ = ["Parser", "main"]

_FLOW_LIST_HINT = """
A pattern with braces inside a YAML flow list must be quoted, since YAML reads the braces as a mapping and the star as
an alias. Write

    apply_modules: ["model.layers.{*}"]

or use a block list, which needs no quotes:

    apply_modules:
      - model.layers.{*}"""

# What YAML parsers say of `[a.{*}]` and of `[a.{0-3}]`.
_FLOW_LIST_ERRORS = ("while scanning an alias", "expected ',' or ']'")


class Parser(LightningArgumentParser):
    """Lightning's parser with a hint where YAML's own message does not tell what to write instead."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if any(known in f"{message}\n{ex}" for known in _FLOW_LIST_ERRORS):
            message = f"{message}\n{_FLOW_LIST_HINT}"
        super().error(message, ex)


def main(args: ArgsType = None, run: bool = True) -> LightningCLI:
    """Run one of ``fit``, ``validate``, ``test`` and ``predict`` from yaml files and command line arguments.

    With ``run=False`` there is no such subcommand: trainer, model and data are built and returned on the CLI object.
    """
    return LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=1,
        save_config_kwargs={"overwrite": True},
        parser_class=Parser,
        args=args,
        run=run,
    )
