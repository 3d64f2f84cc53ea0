"""What depends on values, on tensors that have none: numbers are ones, and everything is selected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

from lightning_chunkmbs.storages import StorageCounter
from lightning_chunkmbs.unknown_values import Answers


def values() -> tuple[Tensor, Tensor, Tensor]:
    """Floating numbers, integers that all differ, and a mask that selects everything."""
    return torch.arange(20.0).view(4, 5).requires_grad_(), torch.arange(20).view(4, 5), torch.ones(4, 5) > 0


def masked_loss(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return cross_entropy(x[mask[:, 0]], y[mask].view(4, 5)[:, 0] * 0)


def experts(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """A loop over experts as mixtures of experts write it."""
    out = torch.zeros_like(x)
    for expert in (0, 1):
        rows, _ = torch.where(mask)
        out.index_add_(0, rows, x[rows] * (expert + 1))
    return out


CASES: dict[str, Callable[..., Any]] = {
    "nonzero": lambda x, y, mask: mask.nonzero(),
    "where": lambda x, y, mask: torch.where(mask),
    "mask": lambda x, y, mask: x[mask],
    "mask of rows": lambda x, y, mask: x[mask[:, 0]],
    "mask of columns": lambda x, y, mask: x[:, mask[0]],
    "mask and index": lambda x, y, mask: x[mask[:, 0], y[0, 0]],
    "masked_select": lambda x, y, mask: x.masked_select(mask),
    "assigned": lambda x, y, mask: (x * 1).index_put((mask,), x[mask]),
    "unique": lambda x, y, mask: y.unique(),
    "unique, with counts": lambda x, y, mask: y.unique(return_inverse=True, return_counts=True),
    "unique rows": lambda x, y, mask: y.unique(dim=0, return_inverse=True),
    "unique_consecutive": lambda x, y, mask: y.flatten().unique_consecutive(return_counts=True),
    "unique_consecutive rows": lambda x, y, mask: y.unique_consecutive(dim=0),
    "bincount": lambda x, y, mask: torch.bincount(mask.flatten().long(), minlength=7),
    "weighted bincount": lambda x, y, mask: torch.bincount(mask.flatten().long(), x.detach().flatten()),
    "repeat_interleave": lambda x, y, mask: x.repeat_interleave(mask[:, 0].long(), dim=0),
    "equal": lambda x, y, mask: torch.equal(x, x) and torch.allclose(x, x),
    "masked loss": masked_loss,
    "experts": experts,
}


def shapes(run: Callable[..., Any]) -> list[Any]:
    x, y, mask = values()
    result = run(x, y, mask)
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape
    return [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(result)]


@pytest.mark.parametrize("name", CASES)
def test_shapes_are_those_of_real_tensors_that_are_selected_whole(name):
    with FakeTensorMode(), StorageCounter() as counter:
        found = shapes(CASES[name])
    assert found == shapes(CASES[name])
    assert counter.peak > 0


QUESTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "value": lambda x, y, mask: x[0, 0].item(),
    "values": lambda x, y, mask: y[0].tolist(),
    "nan": lambda x, y, mask: bool(x.sum().isnan()),
    "any nan": lambda x, y, mask: bool(torch.isnan(x).any()),
    "nan or infinite": lambda x, y, mask: bool((x.isnan() | x.isinf()).any()),
    "all finite": lambda x, y, mask: bool(torch.isfinite(x).all()),
    "not finite": lambda x, y, mask: bool((~torch.isfinite(x)).any()),
    "no label": lambda x, y, mask: bool((y != -100).sum() == 0),
    "number of labels": lambda x, y, mask: int((y != -100).sum() > 0),
    "out of range": lambda x, y, mask: bool(torch.cat([y < 0, y > 5]).any() or not (y >= 0).all()),
    "nans counted": lambda x, y, mask: bool(x.isnan().sum() > 0 or x.isnan().sum() != 0 or x.isnan().detach().any()),
    "nans as numbers": lambda x, y, mask: bool(x.isnan().float().mean() > 0 or torch.count_nonzero(x.isnan()) > 0),
    "zeros": lambda x, y, mask: bool(torch.zeros(3).any() or torch.zeros(()) > 0 or torch.full((), 0) == 1),
    "zeros, then written to": lambda x, y, mask: bool(torch.zeros(()).add_(x.detach().sum()) > 0),
    "numbers of the program": lambda x, y, mask: (
        bool(torch.tensor(False)),
        bool(torch.tensor(0) > 0),
        bool(torch.tensor(3) == 3),
    ),
    "expert": lambda x, y, mask: bool(y[0, 0] == 8),
    "same": lambda x, y, mask: bool((x[0, 0] <= x[0, 1]) & (x[0, 0] >= x[0, 1])),
    "printed": lambda x, y, mask: f"{x.sum() / 20:.3f} {y.sum() // 20} {(y[0, 0] == 8)}",
    "different": lambda x, y, mask: bool(x[0, 0] != x[0, 1]),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_answers_are_those_of_ones(name):
    ones = torch.ones(4, 5, requires_grad=True), torch.ones(4, 5, dtype=torch.int64), torch.ones(4, 5) > 0
    with FakeTensorMode(), StorageCounter(), Answers():
        found = QUESTIONS[name](*values())
    assert found == QUESTIONS[name](*ones)


def test_some_of_many_integers_are_a_certain_one():
    _, y, _ = values()
    with FakeTensorMode() as mode, StorageCounter():
        y = mode.from_tensor(y)
        padding = y == 0
        assert padding.any()
        assert not padding.all()
        assert (~padding).any()
        assert not (~padding).all()
        assert padding.sum() > 0
        assert not (y == -100).all()
