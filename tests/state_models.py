"""A small LightningModule whose training steps tests rewrite, its data, and runs with lockstep and with stock."""

import contextvars
import gc

import torch
import torch.distributed as dist
from greenlet import getcurrent, greenlet
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_chunkmbs import ChunkMBSStrategy
from tests.strategy_models import apart, build, gradients, parameters, stock, trainer_of

LAYERS = 3
WINDOW = 4
SIZES = (2, 3, 1, 2, 3, 2, 2, 1)  # samples of each micro-batch: two windows
CHUNKS = 1 + 2 + 1 + 1  # of at most two samples, in the first window
CLOSE = 2e-6

step_number: contextvars.ContextVar[int] = contextvars.ContextVar("step_number", default=-1)


def in_backward():
    return torch._C._current_graph_task_id() != -1


class Layer(nn.Module):
    """A block; ``watch`` is called in every run of it, recomputation included."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)
        self.watch = None

    def forward(self, x, y=None):
        if self.watch is not None:
            self.watch()
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x, between=None):
        hidden = self.embed(x)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if between is not None:
                between(i, hidden)
        return self.head(self.norm(hidden))


class Stepped(LightningModule):
    """Subclasses override ``loss(x, y, batch_idx)``; records the gradients and reports of optimizer steps."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.seen = []
        self.reports = []

    def configure_model(self):
        if type(self.trainer.strategy) is ModelParallelStrategy:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def loss(self, x, y, batch_idx):
        return (self.net(x) - y).square().mean()

    def training_step(self, batch, batch_idx):
        step_number.set(batch_idx)
        return self.loss(*batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(gradients(self))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if isinstance(self.trainer.strategy, ChunkMBSStrategy) and (batch_idx + 1) % WINDOW == 0:
            self.reports.append(self.trainer.strategy.step_report)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def micro_batches(sizes=SIZES):
    """This rank's micro-batches of (x, y)."""
    generator = torch.Generator().manual_seed(7 + (dist.get_rank() if dist.is_initialized() else 0))
    return [
        (torch.randn(n, 3, 4, generator=generator), torch.randn(n, 3, 2, generator=generator).sigmoid()) for n in sizes
    ]


def lockstep(**plan):
    """The strategy, two samples to a chunk."""
    return ChunkMBSStrategy(chunkmbs_plan={"apply_modules": ["*.layers.{*}"], "chunk_mbs": 2, **plan})


def oracle():
    """Lightning's own accumulation."""
    return stock() if dist.get_world_size() > 1 else "auto"


def one_by_one():
    """Our strategy with the steps of a window run one after the other."""
    return lockstep(max_lockstep=1)


def train(module, strategy, sizes=SIZES, ckpt_path=None, **options):
    trainer = trainer_of(strategy, **{"accumulate_grad_batches": WINDOW, "use_distributed_sampler": False, **options})
    trainer.fit(module, DataLoader(micro_batches(sizes), batch_size=None), ckpt_path=ckpt_path)
    return trainer


def assert_engaged(module, calls=LAYERS, windows=2):
    """Every window ran each block once for all its micro-batches."""
    counts = [r.blocks for r in module.reports]
    assert counts == [calls] * windows, counts
    assert all(r.chunks > LAYERS for r in module.reports)


def assert_same(ours, theirs, close=CLOSE):
    """Equal gradients of every step, and equal parameters in the end."""
    assert len(ours.seen) == len(theirs.seen) > 0
    assert max(map(apart, ours.seen, theirs.seen)) < close
    assert apart(parameters(ours), parameters(theirs)) < 10 * close


def compare(kind, *args, calls=LAYERS, close=CLOSE, plan=None, against=oracle, **options):
    """Train in lockstep and with stock; returns both modules, which have seen the same gradients."""
    ours, theirs = build(kind, *args), build(kind, *args)
    train(ours, lockstep(**(plan or {})), **options)
    train(theirs, against(), **options)
    assert_engaged(ours, calls)
    assert_same(ours, theirs, close)
    return ours, theirs


def living_greenlets():
    """Greenlets that have begun and not ended, this one and its parents left out."""
    gc.collect()
    mine, current = [], getcurrent()
    while current is not None:
        mine.append(current)
        current = current.parent
    found = [g for g in gc.get_objects() if isinstance(g, greenlet)]
    return [g for g in found if g and not g.dead and all(g is not m for m in mine)]
