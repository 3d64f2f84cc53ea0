"""A block cut into chunks computes, and back-propagates, what the plain module does: for any tree of arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_chunkmbs.trees import leaves, map_tree, tree_leaves
from tests.chunking import make_twins

B, S, H = 5, 3, 4
DIMS = st.integers(0, 2)  # batch dimension of a declared tree


@dataclasses.dataclass
class Side:
    gate: Any
    name: str = "side"


@dataclasses.dataclass
class Output:
    y: Any
    rest: Any = None


class Leaf:
    """Stands for a tensor of a tree: whether it has the batch or size 1, its dtype, and whether it needs a gradient."""

    # No dataclass, which would be entered as a part of the tree.
    def __init__(self, whole: bool, dtype: torch.dtype, trained: bool) -> None:
        self.whole, self.dtype, self.trained = whole, dtype, trained


LEAVES = st.one_of(
    st.none(),
    st.sampled_from(["text", 3, 2.5, True]),
    st.builds(Leaf, st.booleans(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.booleans()),
    st.builds(Leaf, st.booleans(), st.sampled_from([torch.int64, torch.bool, torch.uint8]), st.just(False)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Side, inner),
    ),
    max_leaves=6,
)
OUTPUTS = ["tensor", "(t,)", "(t, None)", "dict", "dataclass", "nested"]


class Uses(nn.Module):
    """Every number in the tree ``side`` and the undeclared ``table`` changes what comes out; samples stay apart."""

    def __init__(self, output: str, batch_dim: int, side_dim: int) -> None:
        super().__init__()
        self.linear, self.output, self.batch_dim, self.side_dim = nn.Linear(H, H), output, batch_dim, side_dim
        self.sizes: list[int] = []

    def forward(self, x: Tensor, side: Any = None, *, table: Tensor | None = None) -> Any:
        self.sizes.append(x.size(self.batch_dim))
        y = torch.tanh(self.linear(x.transpose(0, self.batch_dim)))
        for i, (_, value) in enumerate(tree_leaves(side), 1):
            if isinstance(value, Tensor):
                rest = [d for d in range(value.ndim) if d != self.side_dim]
                gate = value.float().mean(rest) if rest else value.float()
                y = y * (1 + gate[:, None, None] / (5 * i))
            elif isinstance(value, (int, float)):
                y = y + value / 10
        y = (y if table is None else y @ table).transpose(0, self.batch_dim)
        mean = y.square().mean()
        return {
            "tensor": y,
            "(t,)": (y,),
            "(t, None)": (y, None),
            "dict": {"y": y, "mean": mean},
            "dataclass": Output(y),
            "nested": [{"y": (y, None)}, Output([y * 2, mean])],
        }[self.output]


def fill(tree: Any, dim: int, seed: int) -> Any:
    """Return ``tree`` with tensors for its leaves, of three dimensions with the batch at ``dim``."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(leaf: Any, _path: str) -> Any:
        if not isinstance(leaf, Leaf):
            return leaf
        shape = [2, 2, 2]
        shape[dim] = B if leaf.whole else 1
        values = torch.randn(shape, generator=generator) * 3
        return values.to(leaf.dtype).requires_grad_(leaf.trained)

    return map_tree(tensor, tree)


def total(output: Any) -> Tensor:
    """A loss in which every number of an output counts differently."""
    tensors = [leaf for _, leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return sum((t * torch.linspace(-1, 2, t.numel()).view(t.shape)).sum() for t in tensors)  # type: ignore[return-value]


def test_leaves_become_tensors():
    [whole, (one,)] = fill([Leaf(True, torch.float32, True), (Leaf(False, torch.int64, False),)], 1, 0)
    assert (whole.shape, whole.dtype, whole.requires_grad) == ((2, B, 2), torch.float32, True)
    assert (one.shape, one.dtype, one.requires_grad) == ((2, 1, 2), torch.int64, False)


@settings(deadline=None, derandomize=True)
@given(tree=TREES)
def test_leaves_are_those_that_have_paths(tree):
    assert [id(leaf) for leaf in leaves(tree)] == [id(leaf) for _, leaf in tree_leaves(tree)]


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    tree=TREES,
    chunk_mbs=st.integers(1, B + 1),
    batch_dim=st.integers(0, 1),
    side_dim=DIMS,
    output=st.sampled_from(OUTPUTS),
    positional=st.booleans(),
    table=st.sampled_from([None, False, True]),
    offload=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_outputs_and_gradients_are_those_of_the_plain_module(
    tree, chunk_mbs, batch_dim, side_dim, output, positional, table, offload, seed
):
    torch.manual_seed(seed)
    rule = {"batch_dim": batch_dim, "batch_dims": {"side": side_dim}}
    rule |= {"arg_indexs": (0, 1)} if positional else {"kwarg_names": ("side",)}
    module = Uses(output, batch_dim, side_dim)
    twins = make_twins(module, chunk_mbs=chunk_mbs, offload=offload, **rule)
    shape = (B, S, H) if batch_dim == 0 else (S, B, H)
    x, whole = torch.randn(shape), None if table is None else torch.randn(H, H)
    results = []
    for net in (twins.plain, twins.block):
        given_x, side = x.clone().requires_grad_(), fill(tree, side_dim, seed)
        keywords = {} if whole is None else {"table": whole.clone().requires_grad_(table)}
        out = net(given_x, side, **keywords) if positional else net(given_x, side=side, **keywords)
        total(out).backward()
        tensors = [leaf for _, leaf in tree_leaves((side, keywords)) if isinstance(leaf, Tensor)]
        grads = [t.grad for t in (given_x, *tensors, *net.parameters())]
        results.append((out, grads))
    (expected, plain), (found, ours) = results
    chunks = -(-B // chunk_mbs)
    assert twins.counter.take().chunks == chunks
    assert sorted(twins.block.sizes[:chunks]) == sorted(
        [chunk_mbs] * (B // chunk_mbs) + [B % chunk_mbs] * (B % chunk_mbs > 0)
    )
    assert [path for path, _ in tree_leaves(found)] == [path for path, _ in tree_leaves(expected)]
    for (_, a), (_, b) in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert a is b is None or torch.allclose(a, b, atol=1e-5)
    assert [g is None for g in ours] == [g is None for g in plain]
    for a, b in zip(ours, plain, strict=True):
        assert a is None or torch.allclose(a, b, rtol=2e-2 if a.dtype == torch.bfloat16 else 1e-4, atol=1e-4)
