"""``chunk_mbs: auto`` in training, on CPU ranks that tell how much memory they have, as accelerators do."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric

from lightning_chunkmbs import ChunkMBSMixin, ChunkMBSPlan, ChunkMBSStrategy
from lightning_chunkmbs.block import block_settings
from lightning_chunkmbs.coverage import Plans
from lightning_chunkmbs.planner import Planner
from tests import model_zoo
from tests.models import LAYERS, Loader, Stack, Trained, batches, full, make_trainer
from tests.ranks import raises_on_ranks, run_on_ranks
from tests.storage_tracker import StorageTracker

TOTAL = 10**9
SAMPLES, WINDOW = 6, 2


class Busy(Trained):
    """Does in its step what users do beside computing: it logs, draws, gathers, counts and asks its Trainer."""

    def __init__(self) -> None:
        super().__init__(Stack(dropout=0.1))
        self.lock = threading.Lock()  # cannot be copied
        self.mean = MeanMetric()
        self.table = torch.full((1,), 2.0)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.trainer.max_epochs == 1
        self.steps += 1
        loss = self.net(batch) * self.table.to(self.device) + 0 * random.random()
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True)
        self.logger.log_metrics({"steps": self.steps})
        assert len(self.all_gather(loss.detach()).flatten()) == dist.get_world_size()
        self.record.losses.append(random.random() + torch.rand(()).item())
        return loss


class Fails(Trained):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if type(batch) is not Tensor and dist.get_rank() == 1:
            raise KeyError("no values here")
        return super().training_step(batch, batch_idx)


@contextmanager
def memory_told(usable: int, total: int = TOTAL) -> Iterator[None]:
    """Let the CPU tell its memory as accelerators do, so that ``usable`` bytes are left for a step's tensors."""
    told = {
        "mem_get_info": lambda _: (usable + total // 10, total),
        "memory_reserved": lambda _: 0,
        "memory_allocated": lambda _: 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in told.items():
            patch.setattr(torch.cpu, name, answer, raising=False)
        yield


def auto(chunk_mbs: Any = "auto", **options: Any) -> ChunkMBSStrategy:
    plan = ChunkMBSPlan(apply_modules=[LAYERS], chunk_mbs=chunk_mbs)
    return ChunkMBSStrategy(**{"chunkmbs_plan": plan} | options)


def planned_peaks(ranks: int, samples: int = SAMPLES, window: int = WINDOW, blocks: int = 3) -> list[int]:
    """Predicted peaks with 1, 2, … samples per chunk."""
    with torch.device("meta"):
        module = Trained(Stack(blocks=blocks))
    plans = Plans(chunkmbs_plan=ChunkMBSPlan(apply_modules=[LAYERS]))
    [batch] = batches([samples])
    planner = Planner(
        module,
        plans,
        batch,
        step=module.net,
        ranks=ranks,
        micro_batches=window,
        optimizers=module.configure_optimizers,
        foreach=False,
    )
    return [planner.bytes(n).peak for n in range(1, samples + 1)]


def between(chunk_mbs: int, ranks: int, **sizes: int) -> int:
    """Bytes with which ``chunk_mbs`` samples per chunk fit and one more do not."""
    fits, too_much = planned_peaks(ranks, **sizes)[chunk_mbs - 1 : chunk_mbs + 1]
    assert fits < too_much
    return (fits + too_much) // 2


def data(samples: int = SAMPLES, window: int = WINDOW) -> list[Tensor]:
    return batches([samples] * 2 * window, seed=dist.get_rank())


def chunk_sizes(module: nn.Module) -> set[int]:
    return {block_settings(layer).rule.chunk_mbs for layer in module.net.layers}


def trained(make: Any, strategy: ChunkMBSStrategy, usable: int, **options: Any) -> tuple[Trained, list[Any]]:
    torch.manual_seed(0)
    random.seed(0)
    module = make()
    with memory_told(usable):
        make_trainer(strategy, **{"accumulate_grad_batches": WINDOW} | options).fit(module, Loader(data()))
    return module, module.record.reports


# -- what is decided --------------------------------------------------------------------------------------------------


class Lean(LightningModule):
    """Keeps nothing of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack(blocks=2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def tracked(usable: int) -> tuple[int, int, set[int]]:
    module, strategy = Lean(), auto()
    with StorageTracker() as tracker, memory_told(usable):
        make_trainer(strategy, accumulate_grad_batches=WINDOW).fit(module, Loader(data(32)))
    report = strategy.step_report
    return tracker.peak, report.chunks // report.blocks, chunk_sizes(module)


@pytest.mark.parametrize("chunk_mbs", [4, 8, 16])
def test_training_takes_as_many_samples_as_fit(chunk_mbs):
    usable = between(chunk_mbs, 2, samples=32, blocks=2)
    for peak, chunks, sizes in run_on_ranks(2, tracked, usable):
        assert sizes == {chunk_mbs}
        assert chunks == WINDOW * -(-32 // chunk_mbs)
        assert peak <= 1.1 * usable  # the planner's accuracy, for which there is headroom


def same_as_number(usable: int, chunk_mbs: int, folder: Any) -> None:
    results = []
    for strategy in (auto(), auto(chunk_mbs)):
        logger = CSVLogger(folder, name=f"{dist.get_rank()}", flush_logs_every_n_steps=1)
        module, reports = trained(Busy, strategy, usable, logger=logger, log_every_n_steps=1)
        state = {name: full(p) for name, p in module.state_dict().items()}
        rows = Path(logger.log_dir, "metrics.csv").read_text() if dist.get_rank() == 0 else ""
        results.append((state, module.record, rows, module.steps, module.mean.compute(), module.mean.update_count))
        assert reports[-1].chunks == reports[-1].blocks * WINDOW * -(-SAMPLES // chunk_mbs)
    ours, theirs = results
    assert all(torch.equal(ours[0][name], theirs[0][name]) for name in theirs[0])
    assert ours[1].losses == theirs[1].losses
    assert ours[2:] == theirs[2:]
    assert ours[3] == 2 * WINDOW


def test_deciding_leaves_no_trace(tmp_path):
    """Parameters, random numbers, logs, metrics and attributes are those of a run with the number."""
    run_on_ranks(2, same_as_number, between(2, 2), 2, tmp_path)


def different_devices(usable: dict[int, int]) -> set[int]:
    module, _ = trained(lambda: Trained(Stack()), auto(), usable[dist.get_rank()])
    return chunk_sizes(module)


def test_the_fullest_device_decides():
    found = run_on_ranks(2, different_devices, {0: between(4, 2), 1: between(2, 2)})
    assert found == [{2}, {2}]


class Adapted(LightningModule):
    """A Hugging Face model built on the meta device, most of it frozen, with a loss over a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = model_zoo.build("qwen3")
            for name, p in self.net.named_parameters():
                p.requires_grad = "norm" in name

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
        mask = batch["input_ids"] > 2
        return cross_entropy(logits[mask], batch["input_ids"][mask])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def adapted() -> tuple[set[Any], list[int]]:
    module, found = Adapted(), set()
    strategy = model_zoo.strategy("qwen3", chunk_mbs="auto")
    data = [model_zoo.batch("qwen3", SAMPLES, 8, seed) for seed in range(WINDOW)]
    with memory_told(TOTAL):
        trainer = make_trainer(strategy, accumulate_grad_batches=WINDOW, precision="bf16-mixed")
        trainer.fit(module, Loader(data))
    found = {block_settings(layer).rule.chunk_mbs for layer in module.net.model.layers}
    return found, [strategy.step_report.chunks // strategy.step_report.blocks]


def test_models_from_the_meta_device_are_planned_for():
    assert run_on_ranks(2, adapted) == [({SAMPLES}, [WINDOW])] * 2


def not_even_one() -> set[int]:
    with pytest.warns(UserWarning, match="tries one sample per chunk, which is not expected to fit.*Shard over more"):
        module, _ = trained(lambda: Trained(Stack()), auto(), planned_peaks(1)[0] - 1)
    return chunk_sizes(module)


def test_a_step_that_cannot_fit_is_tried_with_one_sample():
    assert run_on_ranks(1, not_even_one) == [{1}]


def each_run() -> list[set[int]]:
    module, loader, larger = Trained(Stack()), Loader(data()), Loader(batches([2 * SAMPLES] * 4))
    found = []
    trainer = make_trainer(auto(), accumulate_grad_batches=WINDOW)
    with memory_told(between(2, 1)):
        trainer.validate(module, loader, verbose=False)
        found.append(chunk_sizes(module))
        trainer.fit(module, loader)
        found.append(chunk_sizes(module))
        trainer.validate(module, loader, verbose=False)
        found.append(chunk_sizes(module))
    with memory_told(between(3, 1, samples=2 * SAMPLES)):
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, larger)
        found.append(chunk_sizes(module))
    return found


def test_each_run_that_trains_decides_anew():
    [found] = run_on_ranks(1, each_run)
    assert found == [{1}, {2}, {2}, {3}]


class Merging(ChunkMBSMixin, LightningModule):
    """Merges the window, with a step that does not take the number of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()

    def merge_micro_batches(self, batches: list[Tensor]) -> Tensor:
        return torch.cat(batches)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def merged() -> set[int]:
    module = Merging()
    with memory_told(between(4, 1, samples=WINDOW * SAMPLES, window=1)):
        make_trainer(auto(), accumulate_grad_batches=WINDOW).fit(module, Loader(data()))
    return chunk_sizes(module)


def test_a_window_that_is_merged_is_planned_for_as_one_batch():
    assert run_on_ranks(1, merged) == [{4}]


def scheduled() -> set[int]:
    callback = GradientAccumulationScheduler({0: 1, 1: 4})
    module = Trained(Stack())
    with memory_told(between(2, 1, window=4)):
        make_trainer(auto(), max_epochs=2, callbacks=[callback]).fit(module, Loader(data()))
    return chunk_sizes(module)


def test_the_longest_window_of_a_schedule_decides():
    assert run_on_ranks(1, scheduled) == [{2}]


def beside_others() -> list[set[int]]:
    found = []
    for others in (0, 10**6):
        module = Trained(Stack())
        with memory_told(between(3, 1)), pytest.MonkeyPatch.context() as patch:
            expected = sum(p.nbytes for p in module.parameters()) + data()[0].nbytes
            patch.setattr(torch.cpu, "memory_allocated", lambda _, n=expected + others: n)
            make_trainer(auto(), accumulate_grad_batches=WINDOW).fit(module, Loader(data()))
        found.append(chunk_sizes(module))
    return found


@pytest.mark.filterwarnings("ignore:chunk_mbs. auto tries one sample")
def test_what_else_is_on_the_device_is_left_there():
    assert run_on_ranks(1, beside_others) == [[{3}, {1}]]


def in_part() -> set[int]:
    with pytest.MonkeyPatch.context() as patch:
        part = between(2, 1) / 0.9 / TOTAL
        patch.setattr(torch.cpu, "get_per_process_memory_fraction", lambda _: part, raising=False)
        module, _ = trained(lambda: Trained(Stack()), auto(), between(4, 1))
    return chunk_sizes(module)


def test_a_process_with_a_part_of_its_device_uses_that():
    assert run_on_ranks(1, in_part) == [{2}]


# -- what is refused --------------------------------------------------------------------------------------------------


def fitted(make: Any, options: dict[str, Any], told: bool = True) -> None:
    strategy = auto(**options)
    if told:
        trained(make, strategy, TOTAL, accumulate_grad_batches=1)
    else:
        make_trainer(strategy).fit(make(), Loader(data()))


class Manual(Trained):
    def __init__(self) -> None:
        super().__init__(Stack())
        self.automatic_optimization = False


class Sharded(Trained):
    def __init__(self) -> None:
        super().__init__(Stack())

    def configure_model(self) -> None:
        fully_shard(self.net.norm, mesh=self.device_mesh["data_parallel"])


REFUSED = [
    (partial(Trained, Stack()), {}, 1, False, "asks a device for its free memory, and cpu tells none"),
    (Manual, {}, 1, True, "returns its loss, and automatic_optimization is False"),
    (partial(Trained, Stack()), {"tensor_parallel_size": 2}, 2, True, "and tensor_parallel_size is above 1"),
    (
        partial(Trained, Stack()),
        {"chunkmbs_plan": ChunkMBSPlan(apply_modules=[LAYERS], chunk_mbs="auto", packed_kwarg_names=["lengths"])},
        1,
        True,
        "packed_kwarg_names cut by lengths",
    ),
    (Sharded, {}, 1, True, "configure_model calls fully_shard itself"),
]


@pytest.mark.parametrize(("make", "options", "ranks", "told", "says"), REFUSED)
def test_auto_is_refused_where_nobody_can_plan(make, options, ranks, told, says):
    for error, message in raises_on_ranks(ranks, fitted, make, options, told):
        assert error == "ValueError"
        assert says in message
        assert "lightning_chunkmbs plan --config" in message


def test_a_step_that_fails_without_values_ends_all_ranks():
    first, second = raises_on_ranks(2, fitted, partial(Fails, Stack()), {})
    assert first[0] == second[0] == "RuntimeError"
    assert "failed on another rank" in first[1]
    assert "failed with KeyError: 'no values here'" in second[1]
    assert "write that number, or chunk_mbs: 1" in second[1]


@functools.lru_cache
def causal(n: int) -> Tensor:
    return torch.ones(n, n).tril()


class Caches(Trained):
    """Keeps a tensor that a step makes where a copy of the module finds it too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * causal(batch.shape[1])[0, 0]


def test_tensors_without_values_that_a_step_has_cached_end_all_ranks():
    for error, message in raises_on_ranks(2, fitted, partial(Caches, Stack()), {}):
        assert error == "RuntimeError"
        assert "in a cache of a function (lru_cache)" in message
        assert "write that number" in message


class Later(Trained):
    """Uses in its step what its hooks set once it has been sharded."""

    def on_train_start(self) -> None:
        self.scale = 1.0

    def on_train_epoch_start(self) -> None:
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * self.scale
        self.losses.append(loss.detach())
        return loss


def set_later() -> tuple[set[int], int]:
    module, _ = trained(partial(Later, Stack()), auto(), TOTAL)
    return chunk_sizes(module), len(module.losses)


def test_attributes_that_hooks_set_are_there():
    assert run_on_ranks(2, set_later) == [({SAMPLES}, 2 * WINDOW)] * 2


def number_in_plain_training() -> set[int]:
    module = Trained(Stack())
    make_trainer(
        ChunkMBSStrategy(chunkmbs_plan={"apply_modules": [LAYERS], "chunk_mbs": "auto"}, enable_chunk_mbs=False)
    ).fit(module, Loader(data()))
    return {block_settings(layer).rule for layer in module.net.layers}


def test_auto_asks_for_nothing_where_nothing_is_cut():
    assert run_on_ranks(1, number_in_plain_training) == [{None}]
