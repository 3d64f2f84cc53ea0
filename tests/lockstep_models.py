"""A small language model with sequences of many lengths, trained under Lightning's strategy and under ours."""

from __future__ import annotations

import csv
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_chunkmbs import ChunkMBSStrategy
from tests.models import VOCABULARY, WIDTH, Block, full

BLOCKS = 2
BATCH = 2  # samples of a micro-batch
BATCHES = 7  # micro-batches of a rank in an epoch: no multiple of a window
LAYERS = "net.layers.{*}"
PAD = 0
CLOSE = 1e-6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sample(index: int) -> dict[str, Any]:
    """Sample ``index``: between 3 and 9 tokens."""
    generator = torch.Generator().manual_seed(index)
    length = int(torch.randint(3, 10, (), generator=generator))
    return {"id": index, "tokens": torch.randint(1, VOCABULARY, (length,), generator=generator)}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = nn.utils.rnn.pad_sequence([s["tokens"] for s in samples], batch_first=True, padding_value=PAD)
    return {"tokens": tokens, "id": torch.tensor([s["id"] for s in samples])}


def loader(batches: int = BATCHES, world_size: int | None = None, **options: Any) -> DataLoader:
    """A loader of all ranks' samples, from which Lightning gives each rank ``batches`` micro-batches."""
    ranks = world_size or dist.get_world_size()
    samples = [sample(i) for i in range(batches * BATCH * ranks)]
    return DataLoader(samples, batch_size=BATCH, **{"collate_fn": collate, **options})  # type: ignore[arg-type]


class Lm(LightningModule):
    """Trains ``net``, logs, and notes what Lightning did."""

    frequency = 1
    total_steps: int | None = None  # of the learning rate schedule; None asks the Trainer

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.rates: list[float] = []  # of each optimizer step
        self.consumed: list[tuple[int, int]] = []  # epoch and id of each sample, in order
        self.progress: list[tuple[int, int]] = []  # batch index and global step after each micro-batch
        self.reports: list[Any] = []  # of each optimizer step
        self.estimated = 0.0
        self.steps = 0

    def loss(self, batch: dict[str, Any]) -> Tensor:
        tokens = batch["tokens"]
        logits = self.net(tokens)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.consumed += [(self.current_epoch, int(i)) for i in batch["id"]]
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("index", float(batch_idx), on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(2)

    def configure_optimizers(self) -> Any:
        if self.total_steps is None:
            self.estimated = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        steps = self.total_steps or int(self.estimated)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": self.frequency}]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_start(self) -> None:
        self.steps = self.trainer.global_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.progress.append((batch_idx, self.trainer.global_step))
        if isinstance(self.trainer.strategy, ChunkMBSStrategy) and self.trainer.global_step > self.steps:
            self.reports.append(self.trainer.strategy.step_report)
        self.steps = self.trainer.global_step


class Sharding:
    """What a module written for Lightning's strategy does."""

    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule):  # type: ignore[attr-defined]  # in another run of the module
            return
        mesh = self.device_mesh["data_parallel"]  # type: ignore[attr-defined]
        for layer in self.net.layers:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)  # type: ignore[attr-defined]


def build(kind: type[LightningModule], stock: bool = False) -> Any:
    """A module of ``kind`` with the same values on every rank and in every call."""
    torch.manual_seed(1)
    stock = stock and dist.get_world_size() > 1
    return type(f"Sharded{kind.__name__}", (Sharding, kind), {})() if stock else kind()


def stock_strategy() -> Any:
    """Lightning's strategy for these ranks.

    One process needs no FSDP2, which goes on with old weights after a step that nothing is back-propagated through.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return "auto"
    return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=False)


def our_strategy(**plan: Any) -> ChunkMBSStrategy:
    options = {key: plan.pop(key) for key in ("enable_chunk_mbs", "save_distributed_checkpoint") if key in plan}
    return ChunkMBSStrategy(
        chunkmbs_plan={"apply_modules": [LAYERS], "chunk_mbs": 1, **plan},  # type: ignore[arg-type]
        **{"save_distributed_checkpoint": False, **options},
    )


def trainer_of(strategy: Any, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    options = {**quiet, "log_every_n_steps": 1, "callbacks": [], **options}
    options["callbacks"] = deepcopy(options["callbacks"])
    return Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **options)


class Saving(Callback):
    """Saves a checkpoint after these micro-batches, numbered from the first epoch's first."""

    def __init__(self, *at: int) -> None:
        self.at = at
        self.folder: Path | None = None
        self.owned: Any = None  # by the first rank

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        if number in self.at:
            trainer.save_checkpoint(self.shared_folder() / str(number))

    def shared_folder(self) -> Path:
        if self.folder is None:
            self.owned = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
            name = [self.owned and self.owned.name]
            dist.broadcast_object_list(name)
            self.folder = Path(name[0])
        return self.folder

    def contents(self) -> list[Any]:
        """The checkpoints, when they are single files; on the first rank."""
        if self.folder is None or dist.get_rank():
            return []
        return [torch.load(self.folder / str(number), weights_only=False) for number in self.at]


class Run:
    """One training of a module."""

    def __init__(self, kind: type[LightningModule], stock: bool, plan: dict[str, Any], options: dict[str, Any]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        ckpt_path = options.pop("ckpt_path", None)
        options = {**options, "callbacks": [*options.get("callbacks", []), LearningRateMonitor("step")]}
        self.module = build(kind, stock)
        self.trainer = trainer_of(
            stock_strategy() if stock else our_strategy(**plan),
            logger=CSVLogger(self.folder.name, version=0),
            **options,
        )
        self.trainer.fit(self.module, ckpt_path=ckpt_path)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        self.saving = next((c for c in callbacks if isinstance(c, Saving)), Saving())
        self.parameters = {name: full(p).detach().clone() for name, p in self.module.named_parameters()}

    @property
    def rows(self) -> list[dict[str, str]]:
        """What the first rank's CSVLogger wrote."""
        if dist.get_rank():
            return []
        with open(Path(self.folder.name) / "lightning_logs" / "version_0" / "metrics.csv") as file:
            return list(csv.DictReader(file))

    @property
    def counts(self) -> dict[str, Any]:
        """What must be equal exactly."""
        trainer, module = self.trainer, self.module
        return {
            "global_step": trainer.global_step,
            "current_epoch": trainer.current_epoch,
            "num_training_batches": trainer.num_training_batches,
            "should_stop": trainer.should_stop,
            "optimizer steps": len(module.rates),
            "estimated_stepping_batches": module.estimated,
            "rates": module.rates,
            "progress": module.progress,
            "loops": trainer.fit_loop.state_dict(),
            "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        }


def side_by_side(
    kind: type[LightningModule], n: int, plan: dict[str, Any] | None = None, *, dropped: bool = False, **options: Any
) -> tuple[Run, Run]:
    """Train under our strategy and under Lightning's and assert that both did the same.

    Args:
        kind: the module.
        n: ``accumulate_grad_batches``.
        plan: options of our chunk plan.
        dropped: some micro-batches belong to a window that never steps; they are in stock's means of an epoch only.
        options: for the Trainer.
    """
    ours, stock = (Run(kind, s, plan or {}, {"accumulate_grad_batches": n, **options}) for s in (False, True))
    for name, value in stock.counts.items():
        assert ours.counts[name] == value, name
    assert_close(ours.parameters, stock.parameters)
    if not dropped:
        assert sorted(ours.module.consumed) == sorted(stock.module.consumed)
        assert_rows_alike(ours.rows, stock.rows)
    for ours_saved, stock_saved in zip(ours.saving.contents(), stock.saving.contents(), strict=True):
        assert_alike(ours_saved, stock_saved)
    return ours, stock


def assert_rows_alike(ours: list[dict[str, str]], stock: list[dict[str, str]]) -> None:
    assert [list(row) for row in ours] == [list(row) for row in stock]
    assert bool(stock) == (dist.get_rank() == 0)
    for i, (our_row, stock_row) in enumerate(zip(ours, stock, strict=True)):
        for key, value in stock_row.items():
            same = our_row[key] == value if "" in (our_row[key], value) else near(float(our_row[key]), float(value))
            assert same, f"row {i}, {key}: {our_row[key]!r} and {value!r}"


def assert_alike(ours: Any, stock: Any, at: str = "") -> None:
    """Two trees hold the same: tensors to rounding, anything else exactly."""
    assert type(ours) is type(stock), at
    if isinstance(stock, dict):
        assert list(ours) == list(stock), at
        for key in stock:
            assert_alike(ours[key], stock[key], f"{at}/{key}")
    elif isinstance(stock, (list, tuple)):
        assert len(ours) == len(stock), at
        for i, (a, b) in enumerate(zip(ours, stock, strict=True)):
            assert_alike(a, b, f"{at}/{i}")
    elif isinstance(stock, Tensor):
        assert ours.shape == stock.shape, at
        assert ours.dtype == stock.dtype, at
        torch.testing.assert_close(full(ours), full(stock), rtol=0, atol=CLOSE, equal_nan=True, msg=lambda m: at + m)
    else:
        assert ours == stock, f"{at}: {ours!r} and {stock!r}"


def near(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(1.0, abs(b))


def assert_close(ours: dict[str, Tensor], stock: dict[str, Tensor], tolerance: float = CLOSE) -> None:
    """Tensors of the same names agree."""
    assert ours.keys() == stock.keys() != {}.keys()
    differences = {name: (ours[name] - stock[name]).abs().max().item() for name in ours}
    assert all(d <= tolerance for d in differences.values()), differences  # NaN is no number that is small


def windows_of(batches: int, n: int) -> list[int]:
    """How many micro-batches each window of an epoch has."""
    return [min(n, batches - i) for i in range(0, batches, n)]


def assert_lockstep(run: Run, windows: list[int], max_lockstep: int | None = None, samples: int | None = BATCH) -> None:
    """Each optimizer step gathered each block once per pass, and ran all micro-batches of its window through it.

    Args:
        run: one of ours.
        windows: micro-batches of each optimizer step.
        max_lockstep: as in the plan.
        samples: of a micro-batch, which are as many chunks; None if they are not the same for all.
    """
    assert len(run.module.reports) == len(windows) > 0
    for report, window in zip(run.module.reports, windows, strict=True):
        passes = -(-window // (max_lockstep or window))
        assert report.blocks == passes * BLOCKS
        assert report.chunks > report.blocks
        assert samples is None or report.chunks == window * samples * BLOCKS
        assert report.all_gathers == passes * (2 * BLOCKS + 1)
        assert report.reduce_scatters == passes * (BLOCKS + 1)
