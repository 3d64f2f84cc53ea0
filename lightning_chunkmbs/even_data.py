"""Ranks whose loaders have different numbers of batches: none waits in a collective for one that has ended.

[Note: what is compared, and when]
Every pass over the model gathers parameters, in which all ranks take part, and Lightning itself has a collective before
every batch. So all ranks need the same number of batches. Comparing that each time costs a round between hosts, so it
is done where the number is not known beforehand only:

- A loader with a length is compared once, when Lightning sets it up, and the batches of an epoch at its first one.
- A loader without a length is looked at before each batch: one all-reduce of a number on the host. Lightning fetches a
  batch ahead, so a rank knows at its last batch that it is the last. The epoch then ends on all ranks with this batch.
- A loader whose length may be wrong (its own ``__len__``, an iterable dataset's) costs such a round as well: before
  each batch ranks say that they have one, and one whose loader has ended too early says that before it goes on.

Touches the private parts of Lightning's loops, as ``window.py`` does.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, IterableDataset

from .agree import Agree, make_agree
from .signals import DeferredSignals, original

_GOES_ON, _HAS_ENDED = 1, 2

_CURE = (
    "Give every rank as many batches: leave the sampler to Lightning, use drop_last=True, or write limit_train_batches "
    "(limit_val_batches, …) as a number that every rank has."
)


class EvenData:
    """Compares how many batches the ranks have, for one Trainer.

    Args:
        trainer: the Trainer.
        agree: agrees with all ranks on numbers.

    Attributes:
        rounds: all-reduces on the host so far, for loaders without a length and for those whose length may be wrong.
    """

    def __init__(self, trainer: Any, agree: Agree) -> None:
        self._trainer, self._agree = trainer, agree
        self._unsized = self._inexact = False
        self._epoch: int | None = None
        self.rounds = 0
        evaluations = trainer.validate_loop, trainer.test_loop, trainer.predict_loop
        for loop in (trainer.fit_loop.epoch_loop.val_loop, *evaluations):
            loop.on_run_end = functools.partial(self._evaluation_ended, original(loop, "on_run_end"))

    # -- before an epoch ----------------------------------------------------------------------------------------------

    def check_loader(self, loader: object) -> None:
        """Compare a loader's length between ranks; all of them must call this.

        Raises:
            ValueError: it is empty on some ranks only, or has a length on some only; raised on every rank.
        """
        everyone = self._gathered((sized_len(loader), _is_exact(loader)))
        lengths = [length for length, _ in everyone]
        self._unsized |= None in lengths
        self._inexact |= None not in lengths and not all(exact for _, exact in everyone)
        if None in lengths and set(lengths) != {None}:
            raise ValueError(f"A loader has a length on all ranks or on none; by rank it is {lengths}. {_CURE}")
        if 0 in lengths and set(lengths) != {0}:
            raise ValueError(f"A loader is empty on some ranks only; its lengths by rank are {lengths}. {_CURE}")

    def check_start(self) -> None:
        """Refuse a fit whose loader yields nothing on some rank, where no length told so before.

        Raises:
            ValueError: raised on every rank.
        """
        fetcher = self._trainer.fit_loop._data_fetcher
        empty = self._gathered(fetcher.done and self._unsized)
        if any(empty):
            ranks = [rank for rank, is_empty in enumerate(empty) if is_empty]
            raise ValueError(
                f"Training needs batches, and the loader without a length yields none on the ranks {ranks}. Look at "
                f"what its dataset iterates over on these ranks. {_CURE}"
            )

    def check_evaluation(self) -> None:
        """Compare the numbers of batches of an evaluation between ranks; all of them must call this.

        Raises:
            ValueError: they differ; raised on every rank.
        """
        everyone = self._gathered(self._trainer._active_loop.max_batches)
        if any(others != everyone[0] for others in everyone):
            raise ValueError(
                f"In validation, test and prediction every batch gathers parameters on all ranks; the numbers of "
                f"batches by rank are {everyone}. {_CURE}"
            )

    # -- before a batch -----------------------------------------------------------------------------------------------

    def before_batch(self) -> None:
        """Compare the epoch's batches before its first; without lengths, end the epoch on all ranks where one ends.

        Raises:
            ValueError: the epoch has another number of batches on other ranks; raised on every rank.
        """
        trainer = self._trainer
        if trainer.world_size == 1:
            return
        self._meet(_GOES_ON)
        if self._epoch != trainer.current_epoch:
            self._epoch = trainer.current_epoch
            self._check_batches()
        if not self._unsized:
            return
        loop = trainer.fit_loop.epoch_loop
        ends = loop._num_ready_batches_reached()
        if self._some_rank(ends) and not ends:
            loop.batch_progress.is_last_batch = True
            self._warn(loop.batch_progress.current.ready)

    def ended(self) -> None:
        """Called where a loader has ended before the number of batches that was known.

        Raises:
            ValueError: another rank's goes on; raised on every rank.
        """
        self._meet(_HAS_ENDED)

    def _evaluation_ended(self, run_end: Callable[[], Any]) -> Any:
        self.ended()
        return run_end()

    def _meet(self, place: int) -> None:
        if self._inexact and self._trainer.world_size > 1 and not self._alike([place]):
            raise ValueError(
                f"A loader yields as many batches as its length says, and one has ended now on some ranks while that "
                f"of others goes on. Correct its __len__, or that of its dataset or sampler. {_CURE}"
            )

    def _warn(self, batches: int) -> None:
        warnings.warn(
            f"This rank's loader goes on after {batches} batches, and another rank's has ended: the epoch ends on all "
            f"ranks here.",
            UserWarning,
            stacklevel=2,
        )

    def before_evaluation_batch(self, place: Sequence[int]) -> None:
        """With a loader without length: refuse an evaluation in which one ends here on some ranks only.

        Args:
            place: the batch's number in its loader, and its loader's if there are several; those that the step takes.

        Raises:
            ValueError: raised on every rank.
        """
        self._meet(_GOES_ON)
        if not self._unsized or self._trainer.world_size == 1:
            return
        ends = int(self._trainer._active_loop.batch_progress.is_last_batch)
        if not self._alike([ends, *place]):
            raise ValueError(
                f"In an evaluation every loader has as many batches on all ranks, and one ends on some of them now. "
                f"{_CURE}"
            )

    def _check_batches(self) -> None:
        everyone = self._gathered(self._trainer.num_training_batches)
        if len(set(everyone)) > 1:
            raise ValueError(
                f"Every step gathers parameters on all ranks, so an epoch has as many batches on each; by rank it has "
                f"{everyone}. {_CURE}"
            )

    # -- what ranks say -----------------------------------------------------------------------------------------------

    def _gathered(self, own: Any) -> list[Any]:
        if self._trainer.world_size == 1:
            return [own]
        everyone: list[Any] = [None] * self._trainer.world_size
        dist.all_gather_object(everyone, own)
        return everyone

    def _some_rank(self, fact: bool) -> bool:
        return self._least([-int(fact)]) == [-1]

    def _alike(self, numbers: list[int]) -> bool:
        least = self._least([*numbers, *(-number for number in numbers)])
        return least[: len(numbers)] == [-greatest for greatest in least[len(numbers) :]]

    def _least(self, numbers: list[int]) -> list[int]:
        self.rounds += 1
        return self._agree(numbers)


def _is_exact(loader: object) -> bool:
    """Return whether a loader is known to yield as many batches as its length says."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    samplers = loader.sampler, loader.batch_sampler or loader.sampler
    return all(type(sampler).__module__.partition(".")[0] in ("torch", "lightning") for sampler in samplers)


class ComparesData(ModelParallelStrategy):
    """Asks :class:`EvenData` wherever Lightning tells a strategy about loaders and batches."""

    even_data: EvenData  # of the current run, as the other; set up before Lightning asks for loaders
    signals: DeferredSignals

    def compare_in(self, trainer: Any) -> None:
        """Begin a run; all ranks must call this."""
        agree = make_agree(range(trainer.world_size), self._timeout)
        self.even_data = EvenData(trainer, agree)
        self.signals = DeferredSignals(trainer, agree, self.even_data.ended)

    def process_dataloader(self, dataloader: object) -> object:
        """Refuse a loader of which only some ranks have batches."""
        self.even_data.check_loader(dataloader)
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        """Refuse a loader without length that yields nothing on some rank."""
        self.even_data.check_start()

    def on_validation_start(self) -> None:
        """Refuse other numbers of batches on other ranks."""
        self.even_data.check_evaluation()

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Refuse, or end, an epoch that has ended on another rank."""
        super().on_train_batch_start(batch, batch_idx)
        self.even_data.before_batch()

    def before_evaluation_batch(self, place: Sequence[int]) -> None:
        """Refuse an evaluation that has ended on another rank; ``place`` as of :class:`EvenData`."""
        self.even_data.before_evaluation_batch(place)
        self.signals.answer()

    def on_train_end(self) -> None:
        """Answer a signal that came after the last window, or the last batch, had begun."""
        self.signals.answer()

    on_test_end = on_predict_end = on_train_end

    def on_validation_end(self) -> None:
        """The same in a run that only validates: within a fit the next window answers, from a place to resume at."""
        module = self.lightning_module
        if module is None or module.trainer.state.fn != TrainerFn.FITTING:
            self.signals.answer()
