"""Collectives inside steps that take turns: right values on two ranks, and an error where ranks differ."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import raises_on_ranks, run_on_ranks
from tests.state_models import LAYERS, WINDOW, Stepped, compare, living_greenlets, lockstep, train
from tests.strategy_models import all_sharded, build


class Gathering(Stepped):
    """Gathers from all ranks before, between and after the blocks; the loss goes through a gather."""

    def __init__(self):
        super().__init__()
        self.gathered = []

    def loss(self, x, y, batch_idx):
        rows, means = self.all_gather(x.mean((0, 1))), []
        out = self.net(x, lambda _, hidden: means.append(self.all_gather(hidden.detach().mean())))
        outs = self.all_gather(out.mean(), sync_grads=True)
        self.gathered.append((batch_idx, rows, *means, outs.detach()))
        total = torch.tensor(float(len(x)))
        dist.all_reduce(total)
        self.log("samples", total)
        loss = (out - y).square().mean() + 0.1 * outs.square().mean() + 0.01 * (out * means[1].mean()).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def gathering():
    ours, theirs = compare(Gathering)
    assert [found[0] for found in ours.gathered] == list(range(2 * WINDOW))
    for found, expected in zip(ours.gathered, theirs.gathered, strict=True):
        for a, b in zip(found[1:], expected[1:], strict=True):
            assert a.shape[0] == dist.get_world_size()
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    metrics, expected = ours.trainer.callback_metrics, theirs.trainer.callback_metrics
    assert metrics.keys() == expected.keys() >= {"samples", "loss_step", "loss_epoch"}
    for name in expected:
        torch.testing.assert_close(metrics[name], expected[name], rtol=0, atol=1e-5)
    return [(r.all_gathers, r.reduce_scatters) for r in ours.reports], metrics["loss_epoch"].item()


def test_collectives_inside_steps_give_what_stock_gives():
    first, second = run_on_ranks(2, gathering)
    assert first == second
    assert first[0] == [(2 * LAYERS + 1, LAYERS + 1)] * 2


class OtherStep(Stepped):
    """As many collectives on both ranks, but of another step."""

    def loss(self, x, y, batch_idx):
        if batch_idx == self.trainer.global_rank + 1:
            dist.all_reduce(torch.ones(2))
        return super().loss(x, y, batch_idx)


class OtherOrder(Stepped):
    """The same two collectives in another order, each over a group of its own so that none waits for the other."""

    def loss(self, x, y, batch_idx):
        calls = [lambda g: dist.all_reduce(torch.ones(2), group=g, async_op=True)]
        calls.append(lambda g: dist.broadcast(torch.ones(2), 0, group=g, async_op=True))
        pairs = list(zip(calls, self.groups, strict=True))
        works = [call(group) for call, group in (reversed(pairs) if self.trainer.global_rank else pairs)]
        for work in works:
            work.wait()
        return super().loss(x, y, batch_idx)


class OneMore(Stepped):
    """The first rank begins a collective more, which the second joins when the error has come."""

    def loss(self, x, y, batch_idx):
        loss = super().loss(x, y, batch_idx)
        dist.all_reduce(torch.ones(2), group=self.groups[0])
        if batch_idx == WINDOW - 1 and self.trainer.global_rank == 0:
            self.work = dist.all_reduce(torch.ones(3), group=self.groups[1], async_op=True)
        return loss


def differing(kind):
    module = build(kind)
    module.groups = [dist.new_group(), dist.new_group()]
    module.work = None
    try:
        train(module, lockstep())
    finally:
        if kind is OneMore:
            (module.work or dist.all_reduce(torch.ones(3), group=module.groups[1], async_op=True)).wait()
        assert living_greenlets() == []
        assert all_sharded(module)
        assert module.seen == []


CASES = {
    OtherStep: (0, (1, "all_reduce"), (2, "all_reduce")),
    OtherOrder: (0, (0, "all_reduce"), (0, "broadcast")),
    OneMore: (WINDOW, (WINDOW - 1, "all_reduce"), None),
}


@pytest.mark.parametrize("kind", CASES)
def test_ranks_that_differ_are_told_where_they_first_do(kind):
    number, first, other = CASES[kind]
    for error, message in raises_on_ranks(2, differing, kind):
        assert error == "RuntimeError"
        assert "Collectives inside training_step must be the same on all ranks in lockstep." in message
        assert f"Number {number} is [{first}] on rank 0 and {[other] if other else []} on rank 1" in message
        assert "max_lockstep: 1" in message


class Uneven(Stepped):
    """Collectives in a group of one's own rank need no other."""

    def loss(self, x, y, batch_idx):
        own = torch.ones(2)
        for _ in range(self.trainer.global_rank):
            dist.all_reduce(own, group=self.own_group)
        return super().loss(x, y, batch_idx)


def uneven():
    module = build(Uneven)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    module.own_group = groups[dist.get_rank()]
    train(module, lockstep())
    return len(module.seen)


def test_collectives_of_one_rank_alone_are_not_compared():
    assert run_on_ranks(2, uneven) == [2, 2]
