"""Chunked blocks: gradients, recomputation, what the graph keeps, and the class they get."""

import copy
import inspect
import math
import types

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.block import ChunkedBlock
from tests.chunking import (
    again,
    backward,
    chunk,
    count_calls,
    gradients,
    leaf,
    make_twins,
    max_error,
    tiny_qwen3,
)


class Layer(nn.Module):
    """A residual layer with a mask for each sample and a table for all of them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        hidden = torch.tanh(self.up(x))
        hidden = self.dropout(hidden if mask is None else hidden * mask)
        return x + self.down(hidden if table is None else hidden * table)


SIZES = pytest.mark.parametrize("b", [1, 2, 5, 8])
CHUNKS = pytest.mark.parametrize("chunk_mbs", [1, 2, 3, 8, 100])


# -- gradients -------------------------------------------------------------------------------------------------------


@SIZES
@CHUNKS
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_gradients_of_parameters_and_inputs_equal_the_plain_modules(b: int, chunk_mbs: int, batch_dim: int) -> None:
    rule = {"batch_dim": batch_dim, "kwarg_names": ("mask",)}
    twins = make_twins(Layer(), chunk_mbs=chunk_mbs, **rule)
    shape = (b, 4) if batch_dim == 0 else (4, b)
    tensors = leaf(*shape, 6), leaf(*shape, 12, seed=1), leaf(12, seed=2)
    x, mask, table = again(*tensors)
    ours = twins.block(x, mask=mask, table=table)
    backward(ours)
    other_x, other_mask, other_table = again(*tensors)
    theirs = twins.plain(other_x, mask=other_mask, table=other_table)
    backward(theirs)
    assert twins.counter.take().chunks == math.ceil(b / chunk_mbs)
    assert torch.allclose(ours, theirs, atol=1e-6)
    inputs, others = [x.grad, mask.grad, table.grad], [other_x.grad, other_mask.grad, other_table.grad]
    assert max_error(gradients(twins.block) + inputs, gradients(twins.plain) + others) < 1e-6


@pytest.mark.parametrize("chunk_mbs", [1, 2, 3, 8])
def test_parameter_gradients_are_those_of_sequential_accumulation_bit_for_bit(chunk_mbs: int) -> None:
    twins, x, weights = make_twins(Layer(), chunk_mbs=chunk_mbs), leaf(8, 4, 6), leaf(8, 4, 6, seed=1).detach()
    (twins.block(x) * weights).sum().backward()
    for part, weight in zip(x.detach().split(chunk_mbs), weights.split(chunk_mbs), strict=True):
        (twins.plain(part) * weight).sum().backward()
    assert twins.counter.take().chunks == math.ceil(8 / chunk_mbs)
    assert all(map(torch.equal, gradients(twins.block), gradients(twins.plain)))


def test_sequential_accumulation_in_another_order_rounds_otherwise() -> None:
    # Else the test above would not show that chunks are visited in order.
    plain, x, weights = Layer(), leaf(8, 4, 6), leaf(8, 4, 6, seed=1).detach()
    other = copy.deepcopy(plain)
    parts = list(zip(x.detach().split(1), weights.split(1), strict=True))
    for module, order in [(plain, parts), (other, parts[::-1])]:
        for part, weight in order:
            (module(part) * weight).sum().backward()
    assert not all(map(torch.equal, gradients(plain), gradients(other)))


@pytest.mark.parametrize("declared", [(), ("table",)])
@pytest.mark.parametrize("chunk_mbs", [1, 2])
def test_a_side_argument_of_all_chunks_gets_the_sum_of_their_gradients(chunk_mbs: int, declared: tuple[str]) -> None:
    twins = make_twins(Layer(), chunk_mbs=chunk_mbs, kwarg_names=declared)
    x, table = leaf(5, 4, 6).detach(), leaf(1, 4, 12, seed=1)
    (other,) = again(table)
    backward(twins.block(x, table=table))
    backward(twins.plain(x, table=other))
    assert twins.counter.take().chunks == math.ceil(5 / chunk_mbs)
    assert max_error([table.grad], [other.grad]) < 1e-6


def test_a_block_whose_input_needs_no_gradient_trains() -> None:
    twins, x = make_twins(Layer(), chunk_mbs=2), leaf(5, 4, 6).detach()
    backward(twins.block(x))
    backward(twins.plain(x))
    assert twins.counter.take().chunks == 3
    assert max_error(gradients(twins.block), gradients(twins.plain)) < 1e-6


@pytest.mark.parametrize("chunk_mbs", [1, 2])
def test_dropout_is_that_of_the_same_chunks_in_the_same_order_without_checkpoint(chunk_mbs: int) -> None:
    twins, x = make_twins(Layer(dropout=0.5), chunk_mbs=chunk_mbs), leaf(5, 4, 6)
    other = x.detach().clone().requires_grad_()
    torch.manual_seed(7)
    ours = twins.block(x)
    torch.rand(100)  # what comes after the block must not matter to recomputation
    backward(ours)
    torch.manual_seed(7)
    outputs = [twins.plain(part) for part in reversed(other.split(chunk_mbs))]
    theirs = torch.cat(outputs[::-1])
    backward(theirs)
    assert twins.counter.take().chunks == math.ceil(5 / chunk_mbs)
    assert torch.equal(ours, theirs)
    assert all(map(torch.equal, [x.grad, *gradients(twins.block)], [other.grad, *gradients(twins.plain)]))


# -- recomputation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "runs"), [(True, 3), (False, 1)])
def test_every_chunk_is_recomputed_exactly_once(cut: bool, runs: int) -> None:
    twins = make_twins(Layer(), chunk_mbs=2, cut=cut)
    calls = count_calls(twins.block.up)
    output = twins.block(leaf(5, 4, 6))
    assert calls() == runs
    (output.sum() + output.square().sum()).backward()
    assert calls() == 2 * runs
    assert twins.counter.take().chunks == runs


def test_flops_are_those_of_one_more_forward() -> None:
    twins, x = make_twins(Layer(), chunk_mbs=2), leaf(6, 4, 6)
    flops = {}
    for name, run in {
        "plain": lambda: twins.plain(x).sum().backward(),
        "up": lambda: twins.plain.up(x.detach()),
        "ours": lambda: twins.block(x).sum().backward(),
    }.items():
        with FlopCounterMode(display=False) as counter:
            run()
        flops[name] = counter.get_total_flops()
    # Recomputation stops early: nothing needs the output of the last linear layer.
    assert flops["ours"] == flops["plain"] + flops["up"]


def test_the_graph_keeps_entry_activations_alone() -> None:
    twins, x, table = make_twins(Layer(), chunk_mbs=2), leaf(5, 4, 6), leaf(12, seed=1)
    kept: dict[str, list[Tensor]] = {"ours": [], "theirs": []}
    for name, module in {"ours": twins.block, "theirs": twins.plain}.items():
        with saved_tensors_hooks(lambda t, name=name: kept[name].append(t) or t, lambda t: t):
            module(x, table=table)
    owners = [t.untyped_storage().data_ptr() for t in kept["ours"]]
    assert sorted(set(owners)) == sorted({x.data_ptr(), table.data_ptr()})
    chunks = [t for t, owner in zip(kept["ours"], owners, strict=True) if owner == x.data_ptr()]
    assert [len(t) for t in chunks] == [1, 2, 2]
    assert len({t.untyped_storage().data_ptr() for t in kept["theirs"]} - {x.data_ptr(), table.data_ptr()}) > 2


def test_without_grad_blocks_are_cut_and_keep_nothing() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        twins, x = make_twins(Layer(), chunk_mbs=2, offload=True), leaf(5, 4, 6)
        calls = count_calls(twins.block.up)
        with mode(), saved_tensors_hooks(lambda t: pytest.fail("a tensor was saved"), lambda t: t):
            output = twins.block(x)
            assert torch.allclose(output, twins.plain(x), atol=1e-6)
        assert calls() == 3
        assert not output.requires_grad
        assert twins.counter.take().offloaded_bytes == twins.store.live_bytes == 0


# -- the class -------------------------------------------------------------------------------------------------------


def test_names_and_class_stay() -> None:
    model = nn.Sequential(Layer(), nn.Identity(), Layer())
    plain = copy.deepcopy(model)
    for block in (model[0], model[2]):
        chunk(block, rule=CutRule(1))
    assert isinstance(model[0], Layer)
    assert isinstance(model[0], ChunkedBlock)
    assert type(model[0]) is type(model[2]) is not Layer
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    assert list(dict(model.named_modules())) == list(dict(plain.named_modules()))
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict(), strict=True)


def test_the_signature_of_forward_stays() -> None:
    twins, layers = make_twins(Layer()), make_twins(tiny_qwen3().model.layers[0])
    assert inspect.signature(twins.block.forward) == inspect.signature(Layer().forward)
    assert inspect.signature(layers.block.forward) == inspect.signature(layers.plain.forward)


def test_a_forward_patched_into_the_instance_is_used() -> None:
    def patched(self: Layer, hidden: Tensor, shift: Tensor) -> Tensor:
        return self.down(self.up(hidden)) + shift.T[:, None]

    block, plain = Layer(), Layer()
    for module in (block, plain):
        module.forward = types.MethodType(patched, module)
    chunk(block, rule=CutRule(1, arg_indexs=(0, 1), batch_dims={"shift": 1}))
    calls, x, shift = count_calls(block.up), leaf(3, 4, 6), leaf(6, 3, seed=1)
    ours, theirs = block(x, shift), plain(x, shift)
    backward(ours)
    backward(theirs)
    assert calls() == 6
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert max_error(gradients(block), gradients(plain)) < 1e-6


def test_keywords_of_any_order_and_defaults_reach_forward() -> None:
    twins, x, table = make_twins(Layer(), chunk_mbs=2, arg_indexs=(), kwarg_names=("x",)), leaf(3, 4, 6), leaf(12)
    assert torch.allclose(twins.block(table=table, x=x), twins.plain(x, None, table), atol=1e-6)
    assert twins.counter.take().chunks == 2
