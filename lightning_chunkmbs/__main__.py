"""``python -m lightning_chunkmbs``: Lightning's own CLI, and ``plan`` for what a configuration needs."""

import sys

from lightning_chunkmbs.cli import main

if __name__ == "__main__":
    if sys.argv[1:2] == ["plan"]:
        from lightning_chunkmbs.plan_command import main as plan

        plan(sys.argv[2:])
    else:
        main()
