"""Training in chunks computes what the plain model computes."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.models import (
    BLOCKS,
    LENGTH,
    WIDTH,
    Stack,
    Trained,
    TwoTowers,
    batches,
    chunked,
    fit,
    full,
    train_by_hand,
)
from tests.ranks import run_on_ranks

SIZES = [8, 1, 5, 2, 8]
HIDDEN_BYTES = LENGTH * WIDTH * 4  # of one sample, in fp32


def assert_same_weights(net: torch.nn.Module, expected: torch.nn.Module) -> None:
    for (name, ours), theirs in zip(net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(full(ours), theirs, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def train_every_chunk_size(batch_dim: int, sizes_by_rank: list[list[int]]) -> list[tuple[int, int, int]]:
    """Train with each chunk size and compare; returns (chunk size, batch size, chunks of a block) of every step."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = Stack(batch_dim)
    data = [batches(sizes, seed=r) for r, sizes in enumerate(sizes_by_rank)]
    trained, expected = train_by_hand(net, data, rank)
    seen = []
    for chunk_mbs in (1, 2, 3, 8, 100):
        module = Trained(deepcopy(net))
        fit(module, data[rank], chunked(chunk_mbs, batch_dim))
        module.record.assert_close(expected)
        assert_same_weights(module.net, trained)
        for size, report in zip(sizes_by_rank[rank], module.record.reports, strict=True):
            assert report.blocks == BLOCKS
            travelled = BLOCKS * size - min(chunk_mbs, size)  # the chunk that backward needs first stays
            assert report.offloaded_bytes == report.reloaded_bytes == travelled * HIDDEN_BYTES
            seen.append((chunk_mbs, size, report.chunks // BLOCKS))
    return seen


@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize(
    "sizes_by_rank", [[SIZES], [SIZES, SIZES], [SIZES, SIZES[::-1]]], ids=["one rank", "two ranks", "unequal ranks"]
)
def test_losses_gradients_and_weights_equal_the_plain_models(batch_dim, sizes_by_rank):
    results = run_on_ranks(len(sizes_by_rank), train_every_chunk_size, batch_dim, sizes_by_rank)
    for sizes, seen in zip(sizes_by_rank, results, strict=True):
        assert seen == [(c, size, -(-size // c)) for c in (1, 2, 3, 8, 100) for size in sizes]


def one_chunk_after_the_other(net: Stack, tokens: Tensor, chunk_mbs: int) -> None:
    """Fill the gradients of ``net``, each plain block run forward and backward one chunk after the other."""
    x = net.embed(tokens)
    entries = [x.detach()]
    with torch.no_grad():
        for layer in net.layers:
            entries.append(torch.cat([layer(c) for c in entries[-1].split(chunk_mbs, net.batch_dim)], net.batch_dim))
    last = entries.pop().requires_grad_()
    net.loss(last, tokens).backward()
    gradient = last.grad
    for layer, entry in zip(reversed(net.layers), reversed(entries), strict=True):
        gradients = []
        for chunk, out in zip(
            entry.split(chunk_mbs, net.batch_dim), gradient.split(chunk_mbs, net.batch_dim), strict=True
        ):
            chunk = chunk.detach().requires_grad_()
            layer(chunk).backward(out)
            gradients.append(chunk.grad)
        gradient = torch.cat(gradients, net.batch_dim)
    x.backward(gradient)


def differing_gradients(batch_dim: int, size: int, chunk_mbs: int) -> tuple[list[str], int, int]:
    torch.manual_seed(2)
    net = Stack(batch_dim)
    data = batches([size])
    module = Trained(deepcopy(net))
    fit(module, data, chunked(chunk_mbs, batch_dim))
    one_chunk_after_the_other(net, data[0], chunk_mbs)
    gradients = module.record.gradients[0]
    assert gradients.keys() == dict(net.named_parameters()).keys()
    differ = [name for name, p in net.named_parameters() if not torch.equal(gradients[name], p.grad)]
    report = module.record.reports[0]
    return differ, report.chunks, report.offloaded_bytes


@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize(("size", "chunk_mbs"), [(8, 1), (8, 2), (8, 3), (7, 2)])
def test_gradients_are_bit_for_bit_those_of_chunks_one_after_the_other(batch_dim, size, chunk_mbs):
    [(differ, chunks, offloaded)] = run_on_ranks(1, differing_gradients, batch_dim, size, chunk_mbs)
    assert differ == []
    assert chunks == BLOCKS * -(-size // chunk_mbs) > BLOCKS
    travelled = BLOCKS * size - min(chunk_mbs, size)  # the chunk that backward needs first stays
    assert offloaded == travelled * HIDDEN_BYTES


def train_two_towers() -> dict[str, list]:
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = TwoTowers()
    data = [batches([5, 8, 2], seed=r) for r in range(dist.get_world_size())]
    trained, expected = train_by_hand(net, data, rank)
    reports = {}
    encoder, decoder = "net.encoder.{*}", "net.decoder.layers.{*}"
    both, cut = {"apply_modules": [encoder, decoder]}, {"apply_modules": [decoder]}
    for kind, options in {
        "encoder recomputed": {"recompute_plan": both, "activation_offload_plan": cut},
        "encoder offloaded": {"recompute_plan": both, "activation_offload_plan": both},
        "nothing cut": {"recompute_plan": both, "activation_offload_plan": both, "enable_chunk_mbs": False},
    }.items():
        module = Trained(deepcopy(net))
        fit(module, data[rank], chunked(2, pattern=decoder, **options))
        module.record.assert_close(expected)
        assert_same_weights(module.net, trained)
        reports[kind] = module.record.reports
    return reports


def test_blocks_outside_the_chunk_plan_are_one_chunk():
    for reports in run_on_ranks(2, train_two_towers):
        for kind, (cut, offloaded) in {
            "encoder recomputed": (True, 3),
            "encoder offloaded": (True, 5),
            "nothing cut": (False, 5),
        }.items():
            for size, report in zip([5, 8, 2], reports[kind], strict=True):
                assert report.blocks == 5
                assert report.chunks == (2 + 3 * -(-size // 2) if cut else 5)
                travelled = offloaded * size - (2 if cut else size)  # the chunk that backward needs first stays
                assert report.offloaded_bytes == report.reloaded_bytes == travelled * HIDDEN_BYTES
                assert (report.all_gathers, report.reduce_scatters) == (2 * 5 + 1, 5 + 1)


class DropoutStack(Stack):
    """Draws random numbers in its blocks; ``chunk_mbs`` runs plain blocks over chunks, last to first."""

    chunk_mbs: int | None = None

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.chunk_mbs is None:
            return super().forward(tokens)
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.cat([layer(chunk) for chunk in reversed(x.split(self.chunk_mbs))][::-1])
        return self.loss(x, tokens)


def train_with_dropout(chunk_mbs: int, seed: int) -> tuple[list[float], list[dict[str, Tensor]], int]:
    torch.manual_seed(4)
    module = Trained(DropoutStack())
    torch.manual_seed(seed)
    fit(module, batches([8, 5, 8], seed=dist.get_rank()), chunked(chunk_mbs))
    return module.record.losses, module.record.gradients, module.record.reports[0].chunks


def train_with_dropout_by_hand(chunk_mbs: int, seed: int) -> tuple[list[float], list[dict[str, Tensor]]]:
    torch.manual_seed(4)
    net = DropoutStack()
    net.chunk_mbs = chunk_mbs
    torch.manual_seed(seed)
    _, record = train_by_hand(net, [batches([8, 5, 8])])
    return record.losses, record.gradients


def largest_difference(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> float:
    return max((a[n] - b[n]).abs().max().item() for a, b in zip(ours, theirs, strict=True) for n in b)


@pytest.mark.parametrize("chunk_mbs", [1, 3, 8])
def test_dropout_draws_as_a_plain_loop_over_the_same_chunks(chunk_mbs):
    [(losses, gradients, chunks)] = run_on_ranks(1, train_with_dropout, chunk_mbs, 7)
    [(plain_losses, plain_gradients)] = run_on_ranks(1, train_with_dropout_by_hand, chunk_mbs, 7)
    assert chunks == BLOCKS * -(-8 // chunk_mbs)
    assert losses == pytest.approx(plain_losses, abs=1e-6)
    assert largest_difference(gradients, plain_gradients) <= 1e-6
    [(_, other, _)] = run_on_ranks(1, train_with_dropout, chunk_mbs, 8)
    assert largest_difference(other, plain_gradients) > 1e-3  # dropout was on


def test_dropout_on_two_ranks_is_finite_and_reproducible():
    first, second = run_on_ranks(2, train_with_dropout, 3, 7), run_on_ranks(2, train_with_dropout, 3, 7)
    for (losses, gradients, chunks), (losses_again, gradients_again, _) in zip(first, second, strict=True):
        assert chunks == BLOCKS * 3
        assert all(torch.isfinite(g).all() for step in gradients for g in step.values())
        assert losses == losses_again
        assert all(torch.equal(a[n], b[n]) for a, b in zip(gradients, gradients_again, strict=True) for n in b)
    assert first[0][0] != first[1][0]
    assert largest_difference(first[0][1], first[1][1]) == 0  # gradients are the mean over the ranks
