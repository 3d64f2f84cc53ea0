"""Gradients in bf16 are no worse than those of one reduction per micro-batch, and what fp32 sums cost in memory."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.functional import cross_entropy

from examples.benchmarks.precision.run import error, measure
from tests.models import Loader, chunked, fit
from tests.one_window import accumulate, build, micro_batches, train_window
from tests.ranks import run_on_ranks
from tests.storage_tracker import StorageTracker
from tests.structure_models import DeepSupervision, Images, Tied, TwoPasses


def measured(precision, count, lockstep):
    return measure(precision, count, 2, lockstep=lockstep, only=("ours", "left in bf16", "same policy"))


@pytest.mark.parametrize(
    ("precision", "count", "lockstep", "naive"),
    [
        ("bf16-mixed", 24, False, 1.1),
        ("bf16-mixed", 16, True, 1.2),
        ("bf16-true", 24, False, 1.1),
        ("bf16-true", 16, True, 1.2),
    ],
    ids=["mixed, chunks", "mixed, micro-batches", "true, chunks", "true, micro-batches"],
)
def test_gradients_are_no_worse_than_with_a_reduction_each(precision, count, lockstep, naive):
    """The measured figures are in examples/benchmarks/precision; here the same with fewer chunks and seeds."""
    for result in run_on_ranks(2, measured, precision, count, lockstep):
        assert result["ratio"]["same policy"] <= 1.05
        assert result["mean"]["left in bf16"] > naive * result["mean"]["ours"], "the comparison shows nothing"
        assert result["mean"]["ours"] < 1e-2


# -- several runs of autograd, and blocks that only one rank needs -----------------------------------------------------

TOWERS = {"apply_modules": ["net.layers.{*}", "net.tower.{*}"]}


def structure(kind, sizes, plan, precision):
    net = build(kind)
    data = [micro_batches(of_rank, seed=rank) for rank, of_rank in enumerate(sizes)]
    module = train_window(deepcopy(net), data[dist.get_rank()], chunked(1, chunkmbs_plan=plan), precision=precision)
    expected, _ = accumulate(net, data)
    return error(module.gradients, expected)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    ("kind", "sizes", "plan"),
    [
        (DeepSupervision, [[2, 3, 1]] * 2, {}),
        (TwoPasses, [[2, 3, 1]] * 2, {}),
        (Tied, [[2, 3, 1]] * 2, {}),
        (Images, [[2, 2, 4, 4], [1, 3, 3, 1]], TOWERS),  # only the first rank has images
    ],
)
def test_gradients_of_every_structure(kind, sizes, plan, precision):
    assert max(run_on_ranks(2, structure, kind, sizes, plan, precision)) < 1.5e-2


# -- memory ------------------------------------------------------------------------------------------------------------

VOCABULARY, WIDTH, HIDDEN = 23, 48, 160
STEPS = 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.mix(x)).relu())


class Layers(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY + 2, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Measured(LightningModule):
    """Tracks what each optimizer step but the first holds, up to the end of the backward pass."""

    def __init__(self, net, keep):
        super().__init__()
        self.net, self.keep = net, keep
        self.peaks = []
        self.chunks = 0

    def training_step(self, batch, batch_idx):
        return self.net(batch)

    def on_train_batch_start(self, batch, batch_idx):
        n = self.trainer.accumulate_grad_batches
        if batch_idx >= n and batch_idx % n == 0:
            self.tracker = StorageTracker(self.keep)
            self.tracker.__enter__()

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step:
            self.tracker.__exit__(None, None, None)
            self.peaks.append(self.tracker.peak)

    def on_train_batch_end(self, *_):
        self.chunks = self.trainer.strategy.step_report.chunks

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def peak_of_gradients(precision, blocks, n):
    """Bytes: most of whole fp32 gradients and inputs of reductions at a time; those of a block, the root, a weight."""
    torch.manual_seed(1)
    net = Layers(blocks)
    block = [4 * p.numel() for p in net.layers[0].parameters()]
    root = [4 * p.numel() for p in (net.embedding.weight, net.head.weight)]
    root_input = 4 * 2 * sum(-(-p.shape[0] // 2) * p.shape[1] for p in (net.embedding.weight, net.head.weight))
    sizes = {*block, *root, sum(block), root_input}
    seen = set()

    def whole_gradient(tensor):
        size = tensor.untyped_storage().nbytes()
        found = tensor.dtype is torch.float32 and size in sizes
        seen.update([size] if found else [])
        return found

    module = Measured(net, whole_gradient)
    data = [torch.randint(VOCABULARY, (4, 6)) for _ in range(STEPS * n)]
    fit(module, Loader(data), chunked(1), precision=precision, accumulate_grad_batches=n)
    assert seen == sizes, "a gradient or an input of reduction was not seen"
    assert module.chunks == blocks * 4 * n
    assert len(module.peaks) == STEPS - 1
    # gloo's thread may hold an input for a moment after its reduction, so some steps see one more.
    return min(module.peaks), sum(block), root_input, max(block)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("n", [1, 3])
def test_whole_gradients_of_two_blocks_and_the_root_at_most(precision, n):
    few = run_on_ranks(2, peak_of_gradients, precision, 3, n)
    many = run_on_ranks(2, peak_of_gradients, precision, 6, n)
    for peak, block, root, weight in (*few, *many):
        # While a chunk's gradient of a weight is added there is its cast, and, since the tracker's dispatch mode keeps
        # autograd from adding in place, a second sum.
        assert block < peak <= root + 2 * block + 2 * weight
    assert few == many
