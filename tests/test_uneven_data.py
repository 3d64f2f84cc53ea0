"""Ranks with different numbers of batches, samples and chunks: right gradients or one error on all, never a hang."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from tests.ranks import count_collectives, raises_on_ranks, run_on_ranks
from tests.strategy_models import LAYERS, Toy, apart, build, chunked, gradients, parameters, trainer_of

CLOSE = 2e-6
BLOCKS = 3


class Summed(Toy):
    """Its loss is a sum, which is zero for a batch without samples."""

    def loss(self, batch):
        x, y = batch
        return (self.model(x) - y).square().sum() / 10


class Batches:
    """Yields ready batches, of the given numbers of samples; each rank has its own."""

    def __init__(self, sizes, rank=None):
        generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
        self.data = [
            (torch.randn(n, 3, 4, generator=generator), torch.randn(n, 3, 2, generator=generator)) for n in sizes
        ]

    def __iter__(self):
        return iter(self.data)


class Sized(Batches):
    def __len__(self):
        return len(self.data)


def loader_of(sizes_of_ranks, sized, rank=None):
    sizes = sizes_of_ranks[dist.get_rank() if rank is None else rank]
    return (Sized if sized else Batches)(sizes, rank)


def train(sizes_of_ranks, n, sized=True, kind=Summed, epochs=1, trainer=None, **plan):
    """Fit this rank's batches; return the module and the Trainer."""
    module = build(kind)
    options = {"use_distributed_sampler": False, "accumulate_grad_batches": n, "max_epochs": epochs}
    strategy = chunked(chunkmbs_plan={"apply_modules": [LAYERS], "chunk_mbs": 2, **plan})
    trainer = trainer_of(strategy, **options, **(trainer or {}))
    trainer.fit(module, loader_of(sizes_of_ranks, sized))
    return module, trainer


def train_plainly(windows, n, kind=Summed):
    """The oracle: for each optimizer step the micro-batches of each rank."""
    module = build(kind)
    optimizer = module.configure_optimizers()
    for window in windows:
        optimizer.zero_grad()
        for batch in (batch for batches in window for batch in batches):
            (module.loss(batch) / n / dist.get_world_size()).backward()
        module.seen.append(gradients(module))
        optimizer.step()
    return module


def windows_of(sizes_of_ranks, n, steps):
    data = [loader_of(sizes_of_ranks, True, rank).data for rank in range(len(sizes_of_ranks))]
    return [[batches[i * n : (i + 1) * n] for batches in data] for i in range(steps)]


def compare(sizes_of_ranks, n, steps):
    """Train as plain torch does; return the chunks of the last step, rounds, and counts of collectives."""
    module, trainer = train(sizes_of_ranks, n)
    plain = train_plainly(windows_of(sizes_of_ranks, n, steps), n)
    assert trainer.global_step == len(module.seen) == steps
    assert max(map(apart, module.seen, plain.seen)) < CLOSE
    assert apart(parameters(module), parameters(plain)) < CLOSE
    report = trainer.strategy.step_report
    return report.chunks, trainer.strategy.even_data.rounds, (report.all_gathers, report.reduce_scatters)


# -- batches of other sizes --------------------------------------------------------------------------------------------

ONCE = (2 * BLOCKS + 1, BLOCKS + 1)


@pytest.mark.parametrize("n", [1, 2])
def test_ranks_with_other_numbers_of_chunks(n):
    first, second = run_on_ranks(2, compare, [[5, 1], [1, 4]], n, 2 // n)
    assert (first[0], second[0]) == ((3 * 1, 3 * 2) if n == 1 else (3 * 4, 3 * 3))
    assert first[2] == second[2] == ONCE
    assert first[1] == second[1] == 2, "one round before each of the batches"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("sizes", [[[4, 0], [4, 4]], [[0, 3], [2, 0]], [[3, 0], [3, 0]]])
def test_a_batch_without_samples_takes_part_and_counts_for_nothing(sizes, n):
    for chunks, _, collectives in run_on_ranks(2, compare, sizes, n, 2 // n):
        assert chunks > 0
        assert collectives == ONCE


# -- other numbers of batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batches", "n"), [([2, 3], 1), ([5, 8], 4)])
def test_other_numbers_of_batches_are_one_error_before_the_first(batches, n):
    sizes = [[2] * count for count in batches]
    errors = raises_on_ranks(2, train_counting, sizes, n, True, {})
    assert errors[0] == errors[1]
    assert errors[0][0] == "ValueError"
    assert re.search(rf"as many batches on each; by rank it has {re.escape(str(batches))}", errors[0][1]), errors
    assert "limit_train_batches" in errors[0][1]


def train_counting(sizes, n, sized, plan):
    """Train, and make the error tell whether a block was gathered before."""
    with count_collectives() as counted:
        try:
            train(sizes, n, sized, **plan)
        except ValueError as error:
            assert (counted.all_gathers, counted.reduce_scatters) == (0, 0)
            raise error


def test_a_loader_that_is_empty_on_one_rank_is_one_error():
    errors = raises_on_ranks(2, train_counting, [[2, 2], []], 2, True, {})
    assert errors[0] == errors[1]
    assert re.search(r"empty on some ranks only; its lengths by rank are \[2, 0\]", errors[0][1])


# -- loaders without a length ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "n", "plan"),
    [([3, 5], 1, {}), ([8, 4], 4, {}), ([7, 5], 4, {}), ([5, 7], 4, {"max_lockstep": 2}), ([4, 4], 2, {})],
)
def test_without_a_length_the_epoch_ends_on_all_ranks_with_the_first(batches, n, plan):
    shortest = min(batches)
    results = run_on_ranks(2, without_length, [[2] * count for count in batches], n, plan)
    for rank, (ended, rounds, collectives) in enumerate(results):
        assert len(ended) == (batches[rank] > shortest)
        assert rounds == shortest
        assert collectives == ONCE


def without_length(sizes, n, plan):
    """The shortest rank's batches of each rank, as plain torch trains them."""
    shortest = min(map(len, sizes))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, trainer = train(sizes, n, False, **plan)
    data = [loader_of(sizes, True, rank).data[:shortest] for rank in range(len(sizes))]
    windows = [[batches[i : i + n] for batches in data] for i in range(0, shortest, n)]
    plain = train_plainly(windows, n)
    assert len(module.seen) == trainer.global_step == len(windows)
    assert max(map(apart, module.seen, plain.seen)) < CLOSE
    assert apart(parameters(module), parameters(plain)) < CLOSE
    report = trainer.strategy.step_report
    ended = [str(w.message) for w in caught if "another rank's has ended" in str(w.message)]
    return ended, trainer.strategy.even_data.rounds, (report.all_gathers, report.reduce_scatters)


def epochs_of(sizes, n, plan):
    module, trainer = train(sizes, n, False, epochs=3, trainer={"limit_val_batches": 2}, **plan)
    return trainer.global_step, trainer.current_epoch, len(module.seen)


def test_without_a_length_the_next_epoch_begins_anew():
    sizes = [[2] * 3, [2] * 7]
    assert run_on_ranks(2, epochs_of, sizes, 2, {}) == [(6, 3, 6)] * 2
    assert run_on_ranks(2, epochs_of, sizes, 2, {"max_lockstep": 1}) == [(6, 3, 6)] * 2


@pytest.mark.parametrize("counts", [(2, 0), (0, 0)])
def test_a_loader_without_length_that_yields_nothing_is_one_error(counts):
    errors = raises_on_ranks(2, train_counting, [[2] * count for count in counts], 2, False, {})
    assert errors[0] == errors[1]
    ranks = [rank for rank, count in enumerate(counts) if not count]
    assert re.search(rf"yields none on the ranks {re.escape(str(ranks))}", errors[0][1])


def train_mixed():
    sized = dist.get_rank() == 0
    trainer_of(chunked(), use_distributed_sampler=False).fit(build(), loader_of([[2]] * 2, sized))


def test_a_length_on_one_rank_only_is_one_error():
    errors = raises_on_ranks(2, train_mixed)
    assert errors[0] == errors[1]
    assert re.search(r"a length on all ranks or on none; by rank it is \[1, None\]", errors[0][1])


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluate(how, sizes, sized):
    trainer = trainer_of(chunked(), use_distributed_sampler=False, limit_val_batches=1.0)
    loader = loader_of(sizes, sized)
    if how == "fit":
        trainer.fit(build(), loader_of([[2]] * 2, True), loader)
    else:
        getattr(trainer, how)(build(), loader)


@pytest.mark.parametrize("how", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("sized", [True, False])
def test_evaluations_of_other_lengths_are_one_error(how, sized):
    errors = raises_on_ranks(2, evaluate, how, [[2, 2], [2, 2, 2]], sized)
    assert errors[0] == errors[1]
    message = r"by rank are \[\[2\], \[3\]\]" if sized else "ends on some of them now"
    assert re.search(message, errors[0][1]), errors


class TwoLoaders(Summed):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        super().test_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return super().predict_step(batch, batch_idx)


def evaluate_two(how, counts, sized):
    """``counts``: for each rank how many batches each loader has."""
    with count_collectives() as counted:
        trainer = trainer_of(chunked(), use_distributed_sampler=False, limit_val_batches=1.0)
        kind = Sized if sized else Batches
        loaders = [kind([2] * count) for count in counts[dist.get_rank()]]
        try:
            if how == "fit":
                trainer.fit(build(TwoLoaders), loader_of([[2]] * 2, True), loaders)
            else:
                getattr(trainer, how)(build(TwoLoaders), loaders)
        finally:
            refused_before = sized and how != "fit" and counts[0] != counts[1]
            assert (counted.all_gathers == 0) == refused_before
    return trainer.strategy.even_data.rounds


@pytest.mark.parametrize("how", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("sized", [True, False])
def test_each_of_several_loaders_has_the_same_length_on_all_ranks(how, sized):
    errors = raises_on_ranks(2, evaluate_two, how, [[2, 3], [3, 2]], sized)
    assert errors[0] == errors[1]
    message = r"by rank are \[\[2, 3\], \[3, 2\]\]" if sized else "every loader has .* one ends on some of them now"
    assert re.search(message, errors[0][1]), errors


@pytest.mark.parametrize("how", ["fit", "validate", "test", "predict"])
def test_several_loaders_of_the_same_lengths_run(how):
    fit = how == "fit"  # which has one batch, of a loader with a length of its own
    rounds = 5 + fit  # one before each batch
    assert run_on_ranks(2, evaluate_two, how, [[2, 3]] * 2, True) == [rounds + 1] * 2  # and one at the end
    more = rounds + 1 if fit else 0
    assert run_on_ranks(2, evaluate_two, how, [[2, 3]] * 2, False) == [rounds + more] * 2


class Short(Sized):
    """Has a length that it does not yield."""

    def __len__(self):
        return 5


def run_short(how, counts, n):
    loader = Short([2] * counts[dist.get_rank()])
    trainer = trainer_of(chunked(), use_distributed_sampler=False, accumulate_grad_batches=n, limit_val_batches=1.0)
    module = build(TwoLoaders)
    if how == "fit's validation":
        trainer.fit(module, Sized([2] * 2), loader)
    else:
        getattr(trainer, how)(module, loader)
    return trainer.global_step


SHORT = [("fit", 1), ("fit", 4), ("fit's validation", 1), ("validate", 1), ("test", 1), ("predict", 1)]


@pytest.mark.parametrize("counts", [[3, 5], [2, 0]], ids=["ended", "empty"])
@pytest.mark.parametrize(("how", "n"), SHORT)
def test_a_loader_that_ends_before_its_length_on_some_ranks_is_refused(how, n, counts):
    errors = raises_on_ranks(2, run_short, how, counts, n)
    assert errors[0] == errors[1]
    assert "one has ended now on some ranks while that of others goes on. Correct its __len__" in errors[0][1]


def test_a_loader_that_ends_before_its_length_on_all_ranks_ends_the_epoch():
    assert run_on_ranks(2, run_short, "fit", [3, 3], 1) == [3, 3]
    for how in ("validate", "test", "predict"):
        run_on_ranks(2, run_short, how, [3, 3], 1)


def rounds_of_torch():
    loader = DataLoader(Batches([2] * 4).data, batch_size=None)
    trainer = trainer_of(chunked(), use_distributed_sampler=False)
    trainer.fit(build(), loader, loader)
    return trainer.strategy.even_data.rounds


def test_a_loader_of_torch_with_a_length_costs_no_round():
    assert run_on_ranks(2, rounds_of_torch) == [0, 0]


def test_evaluations_of_the_same_length_run():
    for how in ("fit", "validate", "test", "predict"):
        for sized in (True, False):
            run_on_ranks(2, evaluate, how, [[2, 3], [1, 5]], sized)


class Stream(IterableDataset):
    def __init__(self, counts):
        self.count = counts[dist.get_rank()]

    def __iter__(self):
        return ((torch.zeros(3, 4), torch.ones(3, 2)) for _ in range(self.count))


def train_stream(counts, n):
    trainer = trainer_of(chunked(), accumulate_grad_batches=n)
    trainer.fit(build(), DataLoader(Stream(counts), batch_size=2))
    return trainer.global_step


def test_an_iterable_dataset_of_torch():
    assert run_on_ranks(2, train_stream, (8, 12), 2) == [2, 2]
