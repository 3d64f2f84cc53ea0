"""Joining the outputs of a block's chunks: each form a block may return, the weighted mean, what is refused."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.trees import tree_leaves
from tests.chunking import NAME, again, chunk, gradients, join_outputs, leaf, make_twins, max_error


class Named(NamedTuple):
    hidden: Tensor
    weights: Any = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    hidden: Tensor
    extra: Any = None


class Returns(nn.Module):
    """A block that returns its hidden states in some form."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(torch.tanh(self.linear(x)))


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda h: h,
    "(t,)": lambda h: (h,),
    "(t, None)": lambda h: (h, None),
    "list": lambda h: [h, h * 2],
    "dict": lambda h: {"hidden": h, "attentions": None},
    "dataclass": lambda h: Outcome(h, extra=[h + 1]),
    "ModelOutput": lambda h: BaseModelOutputWithPast(last_hidden_state=h, attentions=(h * 3, None)),
    "named tuple": lambda h: Named(h),
    "nested": lambda h: ({"a": [h, (None, Named(h * 2, weights={"b": h}))]}, None),
    "integers and flags beside it": lambda h: (h, h.argmax(-1), h > 0),
    "other shapes": lambda h: (h, h.sum((1, 2)), h.unsqueeze(1)),
}


def _gradients_of(block: nn.Module, x: Tensor) -> tuple[Any, list[Tensor | None]]:
    output = block(x)
    floats = [t for _, t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    sum((t * torch.linspace(-1, 1, t.numel()).view(t.shape)).mean() for t in floats).backward()
    return output, [x.grad, *gradients(block)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk_mbs", [1, 2, 3, 8])
def test_joined_outputs_equal_the_plain_modules(form: str, chunk_mbs: int) -> None:
    twins, x = make_twins(Returns(FORMS[form]), chunk_mbs=chunk_mbs), leaf(5, 3, 6)
    ours, our_grads = _gradients_of(twins.block, *again(x))
    theirs, their_grads = _gradients_of(twins.plain, *again(x))
    assert twins.counter.take().chunks == -(-5 // chunk_mbs)
    assert type(ours) is type(theirs)
    assert [path for path, _ in tree_leaves(ours)] == [path for path, _ in tree_leaves(theirs)]
    for (_, a), (_, b) in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        assert a is b or (a.dtype == b.dtype and torch.allclose(a, b, atol=1e-6))
    assert max_error(our_grads, their_grads) < 1e-6


def test_a_model_output_is_whole_again() -> None:
    twins = make_twins(Returns(FORMS["ModelOutput"]), chunk_mbs=2)
    output = twins.block(leaf(3, 2, 6))
    assert twins.counter.take().chunks == 2
    assert list(output.keys()) == ["last_hidden_state", "attentions"]
    assert output[0] is output.last_hidden_state is output["last_hidden_state"]
    assert output.to_tuple()[0].shape == (3, 2, 6)


def test_outputs_are_joined_along_batch_dim() -> None:
    twins, x = make_twins(Returns(lambda h: (h, None)), chunk_mbs=2, batch_dim=1), leaf(4, 5, 6)
    output, grads = _gradients_of(twins.block, x)
    _, theirs = _gradients_of(twins.plain, *again(x))
    assert twins.counter.take().chunks == 3
    assert output[0].shape == (4, 5, 6)
    assert max_error(grads, theirs) < 1e-6


# -- 0-dim floats ----------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """A block with a loss of its own, a mean over its samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.linear(x)
        return {"hidden": hidden, "loss": hidden.square().mean()}


def _loss_gradients(block: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    loss = block(x)["loss"]
    (3 * loss).backward()
    return loss, [x.grad, *gradients(block)]


@pytest.mark.parametrize("chunk_mbs", [1, 2, 3, 4])
def test_a_0_dim_float_is_the_mean_weighted_by_chunk_size(chunk_mbs: int) -> None:
    twins, x = make_twins(WithLoss(), chunk_mbs=chunk_mbs), leaf(5, 3, 6)
    loss, grads = _loss_gradients(twins.block, *again(x))
    expected, expected_grads = _loss_gradients(twins.plain, *again(x))
    assert twins.counter.take().chunks == -(-5 // chunk_mbs)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert max_error(grads, expected_grads) < 1e-6


def test_unequal_chunks_weigh_by_their_samples() -> None:
    joined = join_outputs([torch.tensor(1.0), torch.tensor(5.0)], (3, 1), 0)
    assert joined.item() == 2.0


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (lambda h: (h, 3), r"output\[1\] is int, which cannot be joined"),
        (lambda h: {"h": h, "name": "x"}, r"output\['name'\] is str"),
        (lambda h: Outcome(h, extra=0.5), r"output\.extra is float"),
        (lambda h: (h, True), r"output\[1\] is bool"),
        (lambda h: (h, h.shape), r"output\[1\]\[0\] is int"),
        (lambda h: (h, {3}), r"output\[1\] is set"),
        (lambda h: nn.Identity(), r"output is Identity"),
        (lambda h: (h, h if len(h) > 1 else None), r"output\[1\] is NoneType and Tensor"),
    ],
)
def test_what_cannot_be_joined_is_refused_with_block_and_type(form: Callable[[Tensor], Any], pattern: str) -> None:
    twins = make_twins(Returns(form), chunk_mbs=2)
    with pytest.raises(TypeError, match=rf"^{re.escape(NAME)}: .*{pattern}"):
        twins.block(leaf(3, 2, 6))
    with pytest.raises(TypeError, match=pattern), torch.no_grad():
        twins.block(leaf(3, 2, 6))


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (lambda h: (h, h.mean(0)), r"output\[1\] \(torch.float32\) has shape \(2, 6\) for a chunk of 1"),
        (lambda h: (h, h.mean(0, keepdim=True)), r"has shapes \(1, 2, 6\), \(1, 2, 6\) for chunks of 2, 1, and values"),
        (lambda h: {"h": h, "n": h.argmax()}, r"output\['n'\] \(torch.int64\) has shape \(\) for a chunk of"),
        (lambda h: h.flatten(0, 1), r"output \(torch.float32\) has shape \(2, 6\) for a chunk of 1"),
    ],
)
def test_an_output_without_its_chunks_batch_size_is_refused(form: Callable[[Tensor], Any], pattern: str) -> None:
    twins = make_twins(Returns(form), chunk_mbs=2)
    with pytest.raises(ValueError, match=rf"^{re.escape(NAME)}: .*batch_dim=0.*{pattern}"):
        twins.block(leaf(3, 2, 6))


class WithTable(nn.Module):
    """A block that returns a learnt table beside its hidden states, as T5's first block does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(1, 2, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x + self.table), self.table * 2


@pytest.mark.parametrize("chunk_mbs", [1, 2, 3, 5])
def test_a_table_that_every_chunk_returns_is_one_table(chunk_mbs: int) -> None:
    twins = make_twins(WithTable(), chunk_mbs=chunk_mbs, offload=True)
    results = []
    for block in (twins.plain, twins.block):
        hidden, table = block(leaf(5, 2, 6))
        assert len(table) == (5 if block is twins.block and chunk_mbs == 1 else 1)
        (hidden * table).square().sum().backward()
        results.append((hidden, block.table.grad))
    assert twins.counter.take().chunks == -(-5 // chunk_mbs)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_output_without_the_batch_dimension_is_refused() -> None:
    twins = make_twins(Returns(lambda h: h[0, :, 0]), batch_dim=1)
    with pytest.raises(ValueError, match=r"batch_dim=1.*has shape \(1,\) for a chunk of 1"):
        twins.block(leaf(4, 3, 6))


@pytest.mark.parametrize(
    "form",
    [
        lambda h: (h, h) if len(h) > 1 else (h,),
        lambda h: {"a": h} if len(h) > 1 else {"b": h},
        lambda h: (h, (None,)) if len(h) > 1 else (h, None),
    ],
)
def test_chunks_with_outputs_of_different_structure_are_refused(form: Callable[[Tensor], Any]) -> None:
    twins = make_twins(Returns(form), chunk_mbs=2)
    with pytest.raises(TypeError, match=rf"^{re.escape(NAME)}: .*different structure"):
        twins.block(leaf(3, 2, 6))


def test_a_refused_call_leaves_the_block_usable() -> None:
    broken = [True]
    twins = make_twins(Returns(lambda h: (h, 3) if broken else h), chunk_mbs=2)
    with pytest.raises(TypeError):
        twins.block(leaf(3, 2, 6))
    broken.clear()
    assert twins.block(leaf(3, 2, 6)).shape == (3, 2, 6)


def test_a_block_that_is_not_cut_returns_what_it_likes() -> None:
    block = Returns(lambda h: (h, 3, "x"))
    chunk(block, rule=None)
    assert block(leaf(3, 2, 6))[1:] == (3, "x")


# -- any sizes -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(b=st.integers(1, 9), chunk_mbs=st.integers(1, 10), dim=st.integers(0, 2), rest=st.integers(0, 3))
def test_cut_and_join_of_an_identity_block_is_the_identity(b: int, chunk_mbs: int, dim: int, rest: int) -> None:
    shape = [rest + 1, rest + 2, 3]
    shape[dim] = b
    x = torch.randn(shape)
    block = nn.Identity()
    chunk(block, rule=CutRule(chunk_mbs, batch_dim=dim))
    assert torch.equal(block(x), x)
