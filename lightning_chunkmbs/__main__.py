"""``python -m lightning_chunkmbs``: Lightning's own CLI, and ``plan`` for what a configuration needs."""

import os
import sys

from lightning_chunkmbs.cli import main


def run() -> None:
    """Run the command line, also as the installed command ``lightning-chunkmbs``."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as ``python -m`` does: models and data are named by where they are
    if sys.argv[1:2] == ["plan"]:
        from lightning_chunkmbs.plan_command import main as plan

        plan(sys.argv[2:])
    else:
        main()


if __name__ == "__main__":
    run()
