"""ChunkMBSMonitor: what each optimizer step gathered, cut and moved, in logs, progress bar and a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import MaxMetric, SumMetric

from .mixin import ChunkMBSMixin
from .report import Notices, StepReport
from .strategy import ChunkMBSStrategy
from .trees import leaves

_SHORT = {"all_gathers": "gathers", "reduce_scatters": "scatters"}
_STATES = ("host_bytes", "peak_device_bytes")  # not added up over steps


class ChunkMBSMonitor(Callback):
    """Logs what :class:`~lightning_chunkmbs.ChunkMBSStrategy` counted in each optimizer step.

    To every logger, at the steps that ``log_every_n_steps`` names: the fields of
    :class:`~lightning_chunkmbs.StepReport` (``all_gathers`` as ``gathers``, ``reduce_scatters`` as ``scatters``) on the
    first rank; ``peak_device_bytes`` of the run so far, on devices that count it; ``samples_per_second`` or
    ``tokens_per_second`` of all ranks together, since the steps logged before, time of validation left out. A part is
    in the progress bar, and a table over all steps is printed when training ends.

    Warns once where each micro-batch of a step is gathered for by itself, and where nothing is offloaded although
    offload is on.

    Args:
        tokens: the key of a batch whose tensor has one element for each token (``input_ids``), or a function that
            returns the number of tokens of a batch. None: samples are counted, by the size of the first tensor.
        prefix: comes before each name in the logs.

    Raises:
        TypeError: the Trainer has another strategy.
        ValueError: a batch has nothing to count by.
    """

    def __init__(self, tokens: str | Callable[[Any], int] | None = None, prefix: str = "chunkmbs/") -> None:
        self._tokens = tokens
        self._prefix = prefix
        self._unit = "samples" if tokens is None else "tokens"
        self._notices = Notices()
        self._reset(0)

    def _reset(self, step: int) -> None:
        self._seen = step  # the last optimizer step that was noted
        self._micro_batches = 0  # since then
        self._rows: list[tuple[int, dict[str, float]]] = []  # of steps, to be logged
        self._totals: dict[str, float] = {}
        self._steps = 0
        self._rate: _Rate | None = None

    @property
    def totals(self) -> dict[str, float]:
        """Sums over the optimizer steps since training began, by name; of ``..._bytes`` of memory the most."""
        return dict(self._totals)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse other strategies."""
        _chunkmbs(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to count."""
        self._reset(trainer.global_step)
        self._rate = _Rate(pl_module.device, _chunkmbs(trainer).device_mesh["data_parallel"].get_group())

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        if self._rate is not None:
            self._rate.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on with the clock."""
        if self._rate is not None:
            self._rate.go_on()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, _: int) -> None:
        """Count a micro-batch."""
        self._micro_batches += 1

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any) -> None:
        """Note a step that came before in the same batch (manual optimization)."""
        self._note(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the step that the batch has completed, and log."""
        assert self._rate is not None
        self._rate.add(self._count(batch))
        self._note(trainer)
        if self._rows:
            self._log(trainer, pl_module, self._rate)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the table."""
        if self._rate is not None:
            self._rate.pause()
            self._rate.take()
        pl_module.print(self.summary())

    # -- steps -------------------------------------------------------------------------------------------------------

    def _note(self, trainer: Any) -> None:
        step = trainer.global_step
        if step == self._seen:
            return
        strategy = _chunkmbs(trainer)
        row = self._row(strategy)
        self._steps += 1
        for name, value in row.items():
            before = self._totals.get(name, 0)
            self._totals[name] = max(before, value) if name in _STATES else before + value
        every = trainer.log_every_n_steps
        if every and step % every == 0:
            self._rows.append((step - 1, row))  # Lightning's own rows count from 0
        self._warn(trainer, strategy)
        self._seen, self._micro_batches = step, 0

    def _row(self, strategy: ChunkMBSStrategy) -> dict[str, float]:
        row = {_SHORT.get(name, name): value for name, value in asdict(strategy.step_report).items()}
        peak = getattr(torch.get_device_module(strategy.root_device), "max_memory_allocated", None)
        if peak is not None and strategy.root_device.type != "cpu":
            row["peak_device_bytes"] = peak(strategy.root_device)
        return row

    def _count(self, batch: Any) -> int:
        if callable(self._tokens):
            return int(self._tokens(batch))
        if self._tokens is not None:
            found = batch.get(self._tokens) if isinstance(batch, Mapping) else getattr(batch, self._tokens, None)
            if not isinstance(found, Tensor):
                raise ValueError(
                    f"ChunkMBSMonitor(tokens={self._tokens!r}) needs batches with a tensor of this name, and one is a "
                    f"{type(batch).__name__} without. Pass a function: tokens=lambda batch: batch[0].numel()."
                )
            return found.numel()
        sizes = [len(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
        if not sizes:
            raise ValueError(
                f"ChunkMBSMonitor counts samples by the first tensor of a batch, and a {type(batch).__name__} has "
                f"none. Pass a function that counts: tokens=lambda batch: ..."
            )
        return sizes[0]

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rate: _Rate) -> None:
        per_second = rate.take()
        for step, row in self._rows:
            named = {**row, f"{self._unit}_per_second": per_second}
            for logger in trainer.loggers:
                # Not by `self.log`, whose floats of 32 bits would round bytes.
                logger.log_metrics({self._prefix + name: value for name, value in named.items()}, step=step)
        row = self._rows[-1][1]
        self._rows = []
        line = {name: float(row[name]) for name in ("gathers", "chunks")}
        line |= {"offloaded_MB": row["offloaded_bytes"] / 1e6, f"{self._unit}/s": per_second}
        pl_module.log_dict(line, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)

    # -- warnings ----------------------------------------------------------------------------------------------------

    def _warn(self, trainer: pl.Trainer, strategy: ChunkMBSStrategy) -> None:
        report, model = strategy.step_report, strategy._ready_model
        module = trainer.lightning_module
        merged = isinstance(module, ChunkMBSMixin) and module.merges_micro_batches
        if not merged and _gathers_for_each(report, self._micro_batches, len(model.blocks)):
            self._notices.warn(
                "gathers",
                f"A step of {self._micro_batches} micro-batches gathered {report.all_gathers} times: each of its "
                f"{report.blocks} block calls ran a single micro-batch, so gathers grow with the chunks of a step. In "
                f"lockstep a block runs once for all micro-batches; delete enable_chunk_mbs: false or max_lockstep: 1 "
                f"if one is set, and under manual optimization cut one larger batch instead of accumulating.",
            )
        if model.plans.enable_activation_offload and report.blocks and not report.offloaded_bytes:
            self._notices.warn(
                "offload",
                f"Activation offload is on, and a step of {report.chunks} chunks in {report.blocks} block calls "
                f"offloaded nothing. Lower min_bytes or raise host_memory_gb in activation_offload_plan if one is set; "
                f"the chunk that the last block runs last never travels, so a single chunk has nothing to offload; "
                f"write enable_activation_offload: false to leave all on the device.",
            )

    # -- table -------------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """Return the table over all optimizer steps so far: mean of a step, and sum."""
        steps = max(1, self._steps)
        lines = [f"{f'ChunkMBS, {self._steps} optimizer steps':<32}{'a step':>14}{'in all':>14}"]
        lines.append("-" * len(lines[0]))
        for name, total in self._totals.items():
            mean, in_all = (_shown(name, v) for v in ((total, total) if name in _STATES else (total / steps, total)))
            lines.append(f"{name:<32}{mean:>14}{'' if name in _STATES else in_all:>14}")
        if self._rate is not None and self._rate.seconds:
            lines.append(f"{f'{self._unit} per second':<32}{self._rate.units / self._rate.seconds:>14,.1f}")
        return "\n".join(lines)


class _Rate:
    """Units per second over all ranks; each rank's data are its own.

    Attributes:
        units: of all ranks, taken so far.
        seconds: of the slowest rank, taken so far.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._units = SumMetric(process_group=group).to(device)
        self._seconds = MaxMetric(process_group=group).to(device)
        self._since: float | None = time.perf_counter()
        self._passed = 0.0
        self._added = False
        self.units = self.seconds = 0.0

    def add(self, units: int) -> None:
        self._units.update(units)
        self._added = True

    def pause(self) -> None:
        if self._since is not None:
            self._passed += time.perf_counter() - self._since
            self._since = None

    def go_on(self) -> None:
        self._since = time.perf_counter()

    def take(self) -> float:
        """Return units per second since the last time; all ranks must call this."""
        if not self._added:
            return 0.0
        running = self._since is not None
        self.pause()
        self._seconds.update(self._passed)
        units, seconds = float(self._units.compute()), float(self._seconds.compute())
        self._units.reset()
        self._seconds.reset()
        self._passed, self._added = 0.0, False
        self.units += units
        self.seconds += seconds
        if running:
            self.go_on()
        return units / seconds


def _chunkmbs(trainer: pl.Trainer) -> ChunkMBSStrategy:
    strategy = trainer.strategy
    if not isinstance(strategy, ChunkMBSStrategy):
        raise TypeError(
            f"ChunkMBSMonitor logs what ChunkMBSStrategy counts, and this Trainer has {type(strategy).__name__}. Write "
            f"Trainer(strategy=ChunkMBSStrategy(...)), or leave the monitor out."
        )
    return strategy


def _gathers_for_each(report: StepReport, micro_batches: int, blocks: int) -> bool:
    """Return whether each micro-batch of a step went through the blocks by itself."""
    alone = report.calls == report.blocks >= micro_batches * blocks
    return micro_batches > 1 and report.all_gathers > 0 and alone


def _shown(name: str, value: float) -> str:
    if name.endswith("bytes"):
        return f"{value / 1e6:,.2f} MB"
    if name.endswith("seconds"):
        return f"{value:,.4f} s"
    return f"{value:,.1f}".removesuffix(".0")
