"""A batch that stays cut between blocks: what later code sees, which gradients are made, and where it is cut anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.block import block_settings
from lightning_chunkmbs.chunked_tensor import Assembly, Cuts
from lightning_chunkmbs.joining import OutputJoin
from tests.chunking import NAME, again, chunk, gradients, leaf, max_error

B = 5


def batch() -> Tensor:
    return leaf(B, 3, 6, dtype=torch.float64)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Blocks with ``between`` applied after each of them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Mlp() for _ in range(blocks))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return x


def chunked_stack(like: Stack, chunk_mbs: int = 2, batch_dim: int = 0) -> Stack:
    stack = Stack(like.between, len(like.blocks))
    cuts = Cuts()
    for block in stack.blocks:
        chunk(block, rule=CutRule(chunk_mbs=chunk_mbs, batch_dim=batch_dim))
        block_settings(block).cuts = cuts
    return stack


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count how often blocks took the chunks of a batch as they were, and how often they had to cut it."""
    counts = {"taken": 0, "cut": 0}
    cut = Cuts.cut

    def counting(self: Cuts, whole: Tensor, sizes: tuple[int, ...], dim: int) -> Any:
        counts["cut" if self._known(whole, sizes, dim) is None else "taken"] += 1
        return cut(self, whole, sizes, dim)

    with patch.object(Cuts, "cut", counting):
        yield counts


def run(stack: nn.Module, x: Tensor) -> list[Tensor | None]:
    y = stack(x)
    (y.flatten() * torch.linspace(-1, 2, y.numel())).sum().backward()
    return [*gradients(stack), x.grad]


def compare(between: Callable[[Tensor], Tensor], taken: int, x: Tensor | None = None, **rule: int) -> None:
    plain, x = Stack(between), batch() if x is None else x
    with counted() as counts:
        ours = run(chunked_stack(plain, **rule), *again(x))
    assert max_error(ours, run(plain, *again(x))) < 1e-12
    assert counts == {"taken": taken, "cut": 3 - taken}


# -- what stays cut ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_mbs", [1, 2, 3, 4])
def test_a_batch_handed_from_block_to_block_stays_cut(chunk_mbs: int) -> None:
    compare(lambda x: x, taken=2, chunk_mbs=chunk_mbs)


def test_along_another_dimension() -> None:
    compare(lambda x: x, taken=2, x=leaf(3, B, 6, dtype=torch.float64), batch_dim=1)


def test_looking_at_it_does_not_cut_it_anew() -> None:
    def look(x: Tensor) -> Tensor:
        assert (x.shape, x.dtype, x.requires_grad, x.is_contiguous()) == ((B, 3, 6), torch.float64, True, True)
        assert type(x) is Tensor
        x.detach().mean().item(), x.norm(), repr(x), x[0], x.cpu().detach().numpy()
        return x

    compare(look, taken=2)


class Wholes(TorchDispatchMode):
    """Counts tensors of the whole batch that operations allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in tree_leaves(args) if isinstance(value, Tensor)}
        for value in tree_leaves(result):
            storage = value.untyped_storage() if isinstance(value, Tensor) else None
            if storage is not None and storage.nbytes() == B * 3 * 6 * 8 and storage._cdata not in given:
                self.storages[storage._cdata] = storage
        return result


@pytest.mark.parametrize("blocks", [1, 4])
def test_backward_makes_one_gradient_of_the_whole_batch_however_many_blocks(blocks: int) -> None:
    stack, x = chunked_stack(Stack(blocks=blocks)), batch()
    out = stack(x * 1.0)
    grad = torch.ones_like(out)
    with Wholes() as wholes:
        out.backward(grad)
    # Of what enters the first block, and `x * 1.0` makes another from it.
    assert len(wholes.storages) == 2


@pytest.mark.parametrize("blocks", [1, 4])
def test_forward_makes_one_buffer_for_each_block(blocks: int) -> None:
    stack, x = chunked_stack(Stack(blocks=blocks)), batch()
    with Wholes() as wholes:
        stack(x)
    assert len(wholes.storages) == blocks


# -- what is cut anew -------------------------------------------------------------------------------------------------


def in_place(x: Tensor) -> Tensor:
    x += 1.0
    return x


def with_hook(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 2)
    return x


def set_items(x: Tensor) -> Tensor:
    x[1, 0] = x[2, 0] * 2
    return x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x + 0.5,
        lambda x: x[torch.tensor([1, 0, 2, 4, 3])],
        lambda x: x.flip(0),
        lambda x: x.to(torch.float32).double(),
        lambda x: x.view(-1, 6).view(B, 3, 6),
        lambda x: x.clone(),
        lambda x: Doubled.apply(x),
        lambda x: nn.functional.layer_norm(x, (6,)) * 2,
        lambda x: x.detach().requires_grad_(),
        in_place,
        set_items,
        with_hook,
    ],
)
def test_what_changes_it_has_its_own_gradient(between: Callable[[Tensor], Tensor]) -> None:
    plain, x = Stack(between), batch()
    with counted() as counts:
        ours = run(chunked_stack(plain), *again(x))
    theirs = run(plain, *again(x))
    assert counts == {"taken": 0, "cut": 3}
    assert [g is None for g in ours] == [g is None for g in theirs]
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(ours, theirs, strict=True) if a is not None)


def test_retained_gradients_are_those_of_the_batch() -> None:
    def grads_between(stack: Stack, x: Tensor) -> list[Tensor]:
        kept: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            x.retain_grad()
            kept.append(x)
            return x

        stack.between = keep
        run(stack, x)
        return [x.grad for x in kept]

    plain, x = Stack(), batch()
    assert max_error(grads_between(chunked_stack(plain), *again(x)), grads_between(plain, *again(x))) < 1e-12


def test_a_batch_used_twice_gets_both_gradients() -> None:
    class Skip(Stack):
        def forward(self, x: Tensor) -> Tensor:
            first = self.blocks[0](x)
            return self.blocks[2](self.blocks[1](first) + first) * first

    plain, x = Skip(), batch()
    ours = Skip()
    cuts = Cuts()
    for block in ours.blocks:
        chunk(block, rule=CutRule(chunk_mbs=2))
        block_settings(block).cuts = cuts
    assert max_error(run(ours, *again(x)), run(plain, *again(x))) < 1e-12


def test_other_chunk_sizes_are_cut_anew() -> None:
    plain, x = Stack(blocks=2), batch()
    ours = chunked_stack(plain)
    block_settings(ours.blocks[1]).rule = CutRule(chunk_mbs=3)
    with counted() as counts:
        grads = run(ours, *again(x))
    assert counts == {"taken": 0, "cut": 2}
    assert max_error(grads, run(plain, *again(x))) < 1e-12


def test_a_second_backward_and_one_that_reaches_only_some_chunks() -> None:
    plain, x = Stack(blocks=2), batch()
    (ours_x,), (plain_x,) = again(x), again(x)
    ours, theirs = chunked_stack(plain)(ours_x * 2), plain(plain_x * 2)
    for part in (slice(0, 1), slice(None), slice(3, 5)):
        ours_x.grad = plain_x.grad = None
        ours[part].sum().backward(retain_graph=True)
        theirs[part].sum().backward(retain_graph=True)
        assert max_error([ours_x.grad], [plain_x.grad]) < 1e-12


def test_without_gradients() -> None:
    plain, x = Stack(), batch()
    with torch.no_grad():
        assert torch.allclose(chunked_stack(plain)(x), plain(x), atol=1e-12)


class AddsInPlace(Mlp):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x += 1
        return super().forward(x)


def test_a_block_that_changes_its_part_of_the_batch_is_refused() -> None:
    block = AddsInPlace()
    chunk(block, rule=CutRule(chunk_mbs=2))
    with pytest.raises(RuntimeError, match=rf"{NAME} modifies its input by an inplace operation\. Write x = x \+ y"):
        block(batch() * 1.0)


@pytest.mark.parametrize("late", [lambda x: x.retain_grad(), lambda x: x.register_hook(lambda g: g * 2)])
def test_hooks_that_come_too_late_are_refused(late: Callable[[Tensor], Any]) -> None:
    seen: list[Tensor] = []
    stack = chunked_stack(Stack(lambda x: seen.append(x) or x))
    out = stack(batch())
    late(seen[0])
    with pytest.raises(RuntimeError, match=r"after the next block had taken it.* Call them before the next block runs"):
        out.sum().backward()


def other_data(x: Tensor) -> Tensor:
    x.data = x.data * 2
    return x


@pytest.mark.parametrize("between", [other_data, lambda x: (x.data.mul_(2), x)[1]])
def test_values_changed_past_autograd_are_those_that_count(between: Callable[[Tensor], Tensor]) -> None:
    plain, x = Stack(between), batch()
    ours, theirs = run(chunked_stack(plain), *again(x)), run(plain, *again(x))
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(ours, theirs, strict=True))


class Biased(nn.Module):
    """Adds a vector that every chunk is given whole."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias


@pytest.mark.parametrize("chunks", [8, 512])
def test_gradients_of_what_chunks_share_are_added_up_in_fp32(chunks: int) -> None:
    block = Biased()
    chunk(block, rule=CutRule(chunk_mbs=1))
    weights = torch.rand(chunks, 1, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    (block(torch.zeros(chunks, 1, dtype=torch.bfloat16), bias) * weights).float().sum().backward()
    exact = weights.double().sum()
    assert bias.grad.dtype == torch.bfloat16
    assert abs(bias.grad.double() - exact) / exact < 2**-8  # one rounding


# -- nothing stays ----------------------------------------------------------------------------------------------------


def test_what_is_remembered_goes_with_the_batch() -> None:
    stack = chunked_stack(Stack())
    cuts = block_settings(stack.blocks[0]).cuts
    out = stack(batch())
    assert len(cuts._cuts) == 1
    del out
    assert len(cuts._cuts) == 0


def test_channels_last_chunks_make_a_channels_last_batch() -> None:
    chunks = [torch.randn(n, 3, 4, 4).to(memory_format=torch.channels_last) for n in (2, 1)]
    assembly = Assembly((2, 1), 0)
    placed = [assembly.place(i, chunks[i]) for i in (1, 0)][::-1]
    whole = assembly.whole(placed)
    assert torch.equal(whole, torch.cat(chunks))
    assert whole.stride() == torch.cat(chunks).stride()


def test_chunks_that_were_cast_after_they_were_placed() -> None:
    chunks = [leaf(2, 6), leaf(1, 6, seed=1)]
    join = OutputJoin(NAME, (2, 1), 0, Cuts())
    placed = [join.place(i, chunks[i]).double() for i in (1, 0)][::-1]
    whole = join.join(placed)
    assert torch.equal(whole, torch.cat(chunks).double())
    whole.sum().backward()
    assert torch.equal(chunks[0].grad, torch.ones(2, 6))
