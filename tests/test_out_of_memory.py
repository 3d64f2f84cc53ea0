"""Out of memory in a block: smaller chunks in forward, an explanation in backward."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_chunkmbs.block import block_settings
from lightning_chunkmbs.block_buffers import BlockBuffers
from tests.chunking import caught_warnings, leaf, make_twins
from tests.models import chunked
from tests.one_window import Windowed, accumulate, assert_close, build, micro_batches, train_window
from tests.ranks import raises_on_ranks, run_on_ranks
from tests.structure_models import WIDTH, Decoder

BLOCKS = len(Decoder().layers)
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Tight(nn.Module):
    """Raises, as a device does, when its block is given more samples than ``fits`` on ranks ``on``."""

    fits: int | None = None
    where = "forward"
    error: Any = torch.OutOfMemoryError
    tries = 0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        again = torch._C._current_graph_task_id() != -1
        if self.fits is not None and again == (self.where == "recomputation") and x.size(0) > self.fits:
            self.tries += 1
            # Written before it fails, as most of a block's work may be done.
            torch.zeros_like(x).add_(x)
            raise self.error(TEXT)
        return self.inner(x, *args, **kwargs)


def tight(fits: int | None = None, where: str = "forward", ranks: tuple[int, ...] = (0, 1)) -> Decoder:
    net = build(Decoder)
    for i, layer in enumerate(net.layers):
        block = net.layers[i] = Tight(layer)
        block.fits = fits if dist.get_rank() in ranks else None
        block.where = where
    return net


def windows(sizes: list[int] = [4, 3, 4]) -> list[list[Tensor]]:  # noqa: B006  (never changed)
    return [micro_batches(sizes, seed=rank) for rank in range(dist.get_world_size())]


def halving(fits: int, ranks: tuple[int, ...], sizes: list[int], options: dict[str, Any]) -> Any:
    data = windows(sizes)
    expected, losses = accumulate(tight(), data)
    module = Windowed(tight(fits, ranks=ranks))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_window(module, data[dist.get_rank()], chunked(4, **options))
    assert_close(module.gradients, expected)
    assert list(module.losses.values()) == pytest.approx(losses[dist.get_rank()], abs=1e-6)
    messages = [str(w.message) for w in caught if "out of memory" in str(w.message)]
    rules = [block_settings(layer).rule for layer in module.net.layers]
    report = module.report
    return (
        (report.all_gathers, report.reduce_scatters),
        report.chunks,
        [layer.tries for layer in module.net.layers],
        [rule.chunk_mbs for rule in rules if rule is not None],
        messages,
    )


STREAMED = {"activation_offload_plan": {"apply_modules": ["net.layers.{*}"], "stream_hidden_states": True}}


@pytest.mark.parametrize("options", [{}, STREAMED, {"enable_activation_offload": False}])
@pytest.mark.parametrize("sizes", [[4, 3, 4], [7]])
def test_one_rank_goes_on_with_half_the_chunk(sizes, options):
    first, second = run_on_ranks(2, halving, 2, (1,), sizes, options)
    whole, halves = {3: (3, 6), 1: (2, 4)}[len(sizes)]  # chunks of a block with 4 samples at most, and with 2
    collectives = (2 * BLOCKS + 1, BLOCKS + 1)
    assert first == (collectives, BLOCKS * whole, [0] * BLOCKS, [4] * BLOCKS, [])
    counts, chunks, tries, rules, [message] = second
    assert (counts, chunks, tries, rules) == (collectives, BLOCKS * halves, [1] * BLOCKS, [2] * BLOCKS)
    assert message.startswith("rank 1: net.layers.0 ran out of memory in forward")
    assert "write chunk_mbs: 2 or less in chunkmbs_plan" in message


def test_a_half_is_halved_again():
    [(_, chunks, tries, rules, messages)] = run_on_ranks(1, halving, 1, (0,), [4, 3], {})
    assert (chunks, tries, rules) == (BLOCKS * 7, [2] * BLOCKS, [1] * BLOCKS)
    assert len(messages) == 1


class TwoSteps(Windowed):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.tries = [layer.tries for layer in self.net.layers]


def later() -> Any:
    module = TwoSteps(tight(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_window(module, windows([4, 4])[0], chunked(4))
        first = [layer.tries for layer in module.net.layers]
        train_window(module, windows([4, 4])[0], chunked(4))
    return first, [layer.tries for layer in module.net.layers], module.report.chunks


def test_later_steps_are_cut_so_from_the_start():
    assert run_on_ranks(1, later) == [([1] * BLOCKS, [1] * BLOCKS, BLOCKS * 4)]


def too_large(fits: int, where: str, chunk_mbs: int, options: dict[str, Any]) -> None:
    train_window(Windowed(tight(fits, where)), windows([4, 3])[dist.get_rank()], chunked(chunk_mbs, **options))


@pytest.mark.parametrize(
    ("fits", "where", "chunk_mbs", "texts"),
    [
        (0, "forward", 1, ["net.layers.0 ran out of memory in forward", "Its chunks cannot be smaller"]),
        (0, "forward", 4, ["net.layers.0 ran out of memory in forward", "Its chunks cannot be smaller"]),
        (2, "recomputation", 4, ["The backward pass ran out of memory", "Write chunk_mbs: 2 in chunkmbs_plan"]),
        (0, "recomputation", 1, ["The backward pass ran out of memory", "Its chunks cannot be smaller"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*ran out of memory")
def test_what_does_not_fit_is_an_error_that_says_what_to_set(fits, where, chunk_mbs, texts):
    for kind, message in raises_on_ranks(2, too_large, fits, where, chunk_mbs, {}):
        assert kind == "OutOfMemoryError"
        assert all(text in message for text in [TEXT, *texts])


def not_halved() -> None:
    net = tight(2)
    module = Windowed(net)

    def forbid() -> None:
        for layer in net.layers:
            block_settings(layer).may_halve = False

    module.on_fit_start = forbid  # type: ignore[method-assign]
    train_window(module, windows([4])[0], chunked(4))


def test_ranks_that_share_layers_keep_their_chunks():
    [(kind, message)] = raises_on_ranks(1, not_halved)
    assert kind == "OutOfMemoryError"
    assert "net.layers.0 ran out of memory in forward. Write chunk_mbs: 2 in chunkmbs_plan" in message


class Counting(Tight):
    """Writes buffers as batch statistics are written, one of them in place of the old one; holds a table too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("table", torch.ones(3))
        self.fails_at: tuple[int, int] | None = None  # the number of samples seen before, and of those in the chunk

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        samples, before = x.size(0), int(self.seen)
        self.seen += samples
        self.mean = self.mean + x.detach().flatten(0, -2).sum(0)
        if self.fails_at == (before, samples):
            self.tries += 1
            raise self.error(TEXT)
        return self.inner(x, *args, **kwargs)


def counted(fails_at: tuple[int, int] | None, chunk_mbs: int, steps: int) -> Any:
    net = build(Decoder)
    for i, layer in enumerate(net.layers):
        block = net.layers[i] = Counting(layer)
        block.fails_at = fails_at
    module = Windowed(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(steps):
            train_window(module, windows([4, 3])[0], chunked(chunk_mbs))
    return [(int(b.seen), b.mean, b.table, b.tries) for b in net.layers]


@pytest.mark.parametrize(("fails_at", "steps"), [((0, 3), 1), ((3, 4), 1), ((10, 4), 2)])
def test_buffers_that_a_failed_try_wrote_are_put_back(fails_at, steps):
    # The last chunk runs first. The failed try had run it, and gotten as far as writing for the one that failed.
    [found] = run_on_ranks(1, counted, fails_at, 4, steps)
    [expected] = run_on_ranks(1, counted, None, 2, steps)
    assert len(found) == BLOCKS
    for (seen, mean, table, tries), (all_seen, all_mean, same_table, _) in zip(found, expected, strict=True):
        assert tries == 1
        assert seen == all_seen == 7 * steps
        torch.testing.assert_close(mean, all_mean)
        assert torch.equal(table, same_table)


class Copied(TorchDispatchMode):
    """The sizes of tensors that are cloned inside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_tables_are_copied_in_the_first_run_only():
    block = nn.BatchNorm1d(2)
    block.register_buffer("table", torch.ones(5))
    buffers, sizes = BlockBuffers(block), []
    for _ in range(2):
        with Copied() as copied, buffers.undone_if_failed():
            block(torch.ones(3, 2))
        sizes.append(sorted(copied.sizes))
    assert sizes == [[1, 2, 2, 5], [1, 2, 2]]


class Packed(nn.Module):
    """Sums each sequence's positions; takes at most ``fits`` tokens."""

    def __init__(self, fits: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(leaf(6, 6).detach())
        self.fits = fits

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        if self.fits is not None and x.size(1) > self.fits:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        lengths = cu_seqlens.diff()
        assert cu_seqlens[-1] == x.size(1)
        assert lengths.max() <= max_seqlen
        sums = torch.stack([part.sum(1) for part in x.split(lengths.tolist(), 1)], 1)
        return x @ self.weight + sums.repeat_interleave(lengths, 1)


@pytest.mark.parametrize("rule", [{"chunk_tokens": 12}, {"chunk_mbs": 4}])
def test_packed_sequences_are_halved_too(rule):
    twins = make_twins(Packed(None), arg_indexs=(0,), packed_kwarg_names=("cu_seqlens", "max_seqlen"), **rule)
    twins.block.fits = 7
    lengths = {"cu_seqlens": torch.tensor([0, 3, 7, 9, 12]), "max_seqlen": 4}
    x, y = leaf(1, 12, 6), leaf(1, 12, 6)
    with caught_warnings() as messages:
        out = twins.block(x, **lengths)
    expected = twins.plain(y, **lengths)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(twins.block.weight.grad, twins.plain.weight.grad)
    assert twins.counter.take().chunks == (3 if "chunk_tokens" in rule else 2)
    assert f"write {'chunk_tokens: 6' if 'chunk_tokens' in rule else 'chunk_mbs: 2'} or less" in messages[0]


def test_an_error_of_another_kind_is_raised_as_it_is():
    twins = make_twins(Tight(nn.Linear(6, 6)), chunk_mbs=4)
    twins.block.fits, twins.block.error = 2, ArithmeticError
    with pytest.raises(ArithmeticError, match="CUDA out of memory"):
        twins.block(leaf(4, 6))
    assert twins.block.tries == 1


def test_without_gradients_too():
    twins = make_twins(Tight(nn.Linear(6, 6)), chunk_mbs=4)
    twins.block.fits = 2
    with torch.no_grad(), caught_warnings() as messages:
        torch.testing.assert_close(twins.block(leaf(4, 6)), twins.plain(leaf(4, 6)))
    assert len(messages) == 1


class WithTable(nn.Linear):
    """Given a table that is not declared and has as many rows as the chunks have samples."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x) + table.sum(0)


def test_halves_are_not_warned_about_as_calls_of_their_own():
    twins = make_twins(Tight(WithTable(6, 6)), chunk_mbs=4)
    twins.block.fits = 2
    x, table = leaf(6, 6), leaf(4, 6)
    with caught_warnings() as messages:
        torch.testing.assert_close(twins.block(x, table), twins.plain(x, table))
    [message] = messages
    assert "ran out of memory in forward" in message
