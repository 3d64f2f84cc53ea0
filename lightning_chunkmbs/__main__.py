"""``python -m lightning_chunkmbs``."""

from lightning_chunkmbs.cli import main

if __name__ == "__main__":
    main()
