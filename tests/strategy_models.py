"""Small LightningModules, data and runs for the tests of the strategy."""

import gc

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_chunkmbs import ChunkMBSStrategy

LAYERS = "model.layers.{*}"
PARTS = 4  # samples of a rank's batch
SAMPLES = 24  # three steps of two ranks


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x, *, scale=None):
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden if scale is None else hidden * scale)


class Net(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class Toy(LightningModule):
    """Three blocks; records the gradients that each optimizer step saw."""

    def __init__(self):
        super().__init__()
        self.model = Net()
        self.seen = []  # gradients of each step
        self.reports = []  # the strategy's report of each step
        self.scores = []  # validation losses

    def loss(self, batch):
        x, y = batch
        return mse_loss(self.model(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.scores.append(self.loss(batch).item())

    def test_step(self, batch, batch_idx):
        self.scores.append(self.loss(batch).item())

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(gradients(self))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if isinstance(self.trainer.strategy, ChunkMBSStrategy):
            self.reports.append(self.trainer.strategy.step_report)


class Sharding(Toy):
    """A module written for ModelParallelStrategy."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def build(kind=Toy, *args):
    """A module with the same values on every rank and in every call."""
    torch.manual_seed(1)
    return kind(*args)


def dataset(samples=SAMPLES):
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.randn(samples, 3, 4, generator=generator), torch.randn(samples, 3, 2, generator=generator)
    )


def loader(samples=SAMPLES, batch=PARTS):
    """This rank's batches; those of all ranks together are consecutive samples, in every epoch."""
    data = dataset(samples)
    return DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, shuffle=False))


def stock():
    return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)


def chunked(**options):
    """The strategy with one sample per chunk in every layer."""
    plan = {"apply_modules": [LAYERS], "chunk_mbs": 1}
    return ChunkMBSStrategy(**{"chunkmbs_plan": plan, **options})


def trainer_of(strategy, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    devices = dist.get_world_size() if dist.is_initialized() else 1
    quiet |= {"accelerator": "cpu", "devices": devices}
    return Trainer(strategy=strategy, **{**quiet, **options})


def fit(module, strategy=None, data=None, **options):
    """Train and return the trainer."""
    trainer = trainer_of(strategy or chunked(), **options)
    trainer.fit(module, data or loader())
    return trainer


def whole_batches(samples=SAMPLES, batch=PARTS):
    """What all ranks together see in each step of :func:`fit`."""
    return DataLoader(dataset(samples), batch_size=batch * dist.get_world_size())


def train_plainly(module, batches=None, epochs=1, clip=None):
    """The oracle: one process, no strategy, whole batches; gradients are recorded in ``module.seen``."""
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        for batch in batches or whole_batches():
            optimizer.zero_grad()
            module.loss(batch).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            module.seen.append(gradients(module))
            optimizer.step()
    return module


def full(tensor):
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def parameters(module):
    return {name: full(p) for name, p in module.named_parameters()}


def gradients(module):
    return {name: full(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def apart(found, expected):
    """The largest difference between tensors of equal names; infinite when the names differ or a value is NaN."""
    if found.keys() != expected.keys() or not found:
        return float("inf")
    worst = max((found[name] - expected[name]).abs().max().item() for name in found)
    return worst if worst == worst else float("inf")


def all_sharded(module):
    return all(isinstance(p, DTensor) for p in module.parameters() if p.ndim)


def live_bytes(trainer):
    gc.collect()  # what an exception's frames held
    return trainer.strategy._applied.store.live_bytes
