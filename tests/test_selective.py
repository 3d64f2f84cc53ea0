"""Selective recomputation: results of named operators are kept, offloaded, and not computed again."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_chunkmbs import RecomputePlan
from lightning_chunkmbs.block import block_settings
from lightning_chunkmbs.selective import SaveOps, find_ops
from tests.chunking import Twins, again, gradients, leaf, make_twins
from tests.models import Attention, Loader, chunked, make_trainer
from tests.one_window import Windowed, build, micro_batches
from tests.ranks import run_on_ranks
from tests.structure_models import Decoder

ATTENTION = "aten._scaled_dot_product_flash_attention"
ON_CPU = "aten._scaled_dot_product_flash_attention_for_cpu.default"


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def saving(module: nn.Module, *names: str, offload: bool = True) -> Twins:
    twins = make_twins(module, chunk_mbs=2, offload=offload)
    block_settings(twins.block).save_ops = SaveOps(find_ops(names))
    return twins


def step(block: nn.Module, x: Tensor) -> list[Tensor | None]:
    block.zero_grad()
    block(x).square().sum().backward()
    return [*gradients(block), x.grad]


@pytest.mark.parametrize("offload", [True, False])
def test_attention_is_not_run_again(offload: bool) -> None:
    torch.manual_seed(0)
    module, x = Attention(0), leaf(5, 7, 16)
    every, saved = make_twins(module, chunk_mbs=2, offload=offload), saving(module, ATTENTION, offload=offload)
    with Calls() as calls:
        expected = step(every.block, *again(x))
    assert calls.count[ON_CPU] == 6  # three chunks, twice
    with Calls() as calls:
        ours = step(saved.block, *again(x))
    assert calls.count[ON_CPU] == 3
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert saved.store.live_bytes == 0
    if offload:
        results = 5 * 7 * 16 * 4 + 5 * 2 * 7 * 4  # the output, and a logarithm for each sample, head and token
        assert saved.counter.take().offloaded_bytes == every.counter.take().offloaded_bytes + results


def flops(block: nn.Module, x: Tensor) -> tuple[int, int]:
    with FlopCounterMode(display=False) as counter:
        output = block(x)
        forward = counter.get_total_flops()
        output.sum().backward()
    return forward, counter.get_total_flops() - forward


class Mlp(nn.Module):
    """Two matrix products and an activation, whose output recomputation needs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.down(F.gelu(self.up(x))))


def test_recomputation_is_one_forward_and_less_by_what_is_saved() -> None:
    module, x = Mlp(), leaf(6, 8)
    plain = flops(module, *again(x))
    one = plain[0]
    assert one == 2 * 6 * 8 * 16 * 2
    assert plain[1] == 2 * one
    assert flops(make_twins(module, chunk_mbs=2).block, *again(x)) == (one, 3 * one)
    assert flops(saving(module, "aten.mm").block, *again(x)) == (one, 2 * one)


def test_early_stop_leaves_out_what_backward_does_not_need() -> None:
    module, x = nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False)), leaf(6, 8)
    one = 2 * 6 * 8 * 16 * 2
    assert flops(make_twins(module, chunk_mbs=2).block, *again(x)) == (one, 2 * one + one // 2)


def test_a_second_backward_through_a_kept_graph() -> None:
    torch.manual_seed(0)
    twins, x = saving(Attention(0), ATTENTION), leaf(5, 7, 16)
    loss = twins.block(x).square().sum()
    loss.backward(retain_graph=True)
    first = [g.clone() for g in gradients(twins.block)]
    twins.block.zero_grad()
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(twins.block), strict=True))


# -- what cannot be kept ---------------------------------------------------------------------------------------------


class ChangesResult(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mul_(2)


def test_a_result_changed_in_place_is_refused() -> None:
    twins = saving(ChangesResult(), "aten.mm")
    with pytest.raises(RuntimeError, match=r"layers\.0: a result that .*save_ops keeps was changed in place.*aten\.mm"):
        twins.block(leaf(4, 8))
    assert twins.store.live_bytes == 0


class Fickle(nn.Module):
    """Multiplies from its second run on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        if self.times > 1:
            with torch.no_grad():
                self.linear(x)
        return torch.tanh(x * 1.5)


def test_recomputation_that_runs_other_operations_is_refused() -> None:
    twins = saving(Fickle(), "aten.mm")
    with pytest.raises(RuntimeError, match="recomputation ran aten.mm where the first run did not"):
        twins.block(leaf(2, 8)).sum().backward()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aten.mmm", r"'aten.mmm' is none\. Near it: aten\.mm"),
        ("nowhere.mm", "'nowhere.mm' is none"),
        ("aten", "'aten' is none"),
        ("aten.mm.wrong", "'aten.mm.wrong' is none"),
        ("aten.view", r"'aten.view' share memory"),
        ("aten.mul_", r"'aten.mul_' share memory"),
    ],
)
def test_names_that_are_no_operator_to_keep(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_ops([name])


def test_an_overload_may_be_named() -> None:
    assert [str(op) for op in find_ops(["aten.mm.default"])] == ["aten.mm.default"]


class DrawsTwice(nn.Module):
    """A kept operator draws random numbers, and so does one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = y * torch.bernoulli(torch.full_like(y, 0.5).detach())
        return F.dropout(y.tanh(), 0.5)


def test_random_numbers_after_a_kept_operator_are_those_of_the_first_run() -> None:
    grads = []
    for names in ((), ("aten.bernoulli",)):
        torch.manual_seed(0)
        twins = saving(DrawsTwice(), *names)
        grads.append(step(twins.block, leaf(5, 8)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class ReturnsItsProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = self.linear(x)
        return product, product.sin() * product.detach()


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("rows", [2, 5])
def test_a_kept_result_that_leaves_the_block_may_be_changed(rows: int, offload: bool) -> None:
    torch.manual_seed(0)
    module, x = ReturnsItsProduct(), leaf(rows, 8)
    grads = []
    for block in (make_twins(module, chunk_mbs=2).block, saving(module, "aten.mm", offload=offload).block):
        (y,) = again(x)
        product, other = block(y)
        product += y
        (product.square().sum() + other.square().sum()).backward()
        grads.append([*gradients(block), y.grad])
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(*grads, strict=True))


# -- through the strategy --------------------------------------------------------------------------------------------


def train(save_ops: list[str], micro: int) -> tuple[dict[str, Tensor], int, int, list[str]]:
    module = Windowed(build(Decoder))
    plan = RecomputePlan(apply_modules=["net.layers.{*}"], save_ops=save_ops)
    trainer = make_trainer(chunked(1, recompute_plan=plan), max_steps=1, accumulate_grad_batches=micro)
    data = micro_batches([3] * micro)
    with Calls() as calls, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, Loader(data))
    messages = [str(w.message) for w in caught if "save_ops" in str(w.message)]
    return module.gradients, calls.count[ON_CPU], module.report.offloaded_bytes, messages


@pytest.mark.parametrize("micro", [1, 4])
def test_through_the_strategy(micro: int) -> None:
    [(expected, twice, fewer, _)] = run_on_ranks(1, train, [], micro)
    [(ours, once, more, messages)] = run_on_ranks(1, train, [ATTENTION], micro)
    assert twice == 2 * once == 2 * 3 * micro * 3  # blocks, micro-batches, chunks
    assert more > fewer
    assert messages == []
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_an_operator_that_no_block_runs_is_named_once() -> None:
    [(_, _, _, messages)] = run_on_ranks(1, train, [ATTENTION, "aten.cumsum"], 1)
    assert len(messages) == 1
    assert "save_ops had no effect for aten.cumsum" in messages[0]
