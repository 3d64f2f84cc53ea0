"""Packed sequences: several of them one after the other in place of a batch, and the metadata that tells them apart.

Kernels for packed sequences take hidden states ``[1, tokens, h]``, cumulative lengths (``cu_seqlens``, ``[sequences +
1]``, from 0 to the number of tokens) and the length of the longest sequence. Such a call is cut between sequences, and
each chunk gets cumulative lengths that begin at 0 and its own longest length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .report import Notices


class KnownLengths:
    """Cumulative lengths read from the device: once, and not by every block that is given the same tensor."""

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()

    def of(self, cumulative: Tensor) -> list[int]:
        """Return the values of ``cumulative``, integers ``[sequences + 1]``."""
        version = 0 if cumulative.is_inference() else cumulative._version
        found = self._known.get(cumulative)
        if found is None or found[0] != version or cumulative.is_inference():
            found = self._known[cumulative] = (version, cumulative.tolist())
        values: list[int] = found[1]
        return values


@dataclasses.dataclass(frozen=True)
class Packing:
    """The sequences of one packed call.

    Attributes:
        block: name of the block, for messages.
        lengths: tokens of each sequence.
        groups: first and last but one sequence of each chunk.
    """

    block: str
    lengths: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each chunk."""
        return tuple(sum(self.lengths[a:b]) for a, b in self.groups)

    def check_tokens(self, tokens: int, rows: int, path: str) -> None:
        """Refuse hidden states of another number of tokens, or of more than one row.

        Raises:
            ValueError: the sequences do not have ``tokens`` tokens in all, or there is more than one row of them.
        """
        if rows != 1:
            raise ValueError(
                f"{self.block}: packed sequences lie one after the other in one row, and {path} has {rows} rows. Pass "
                f"hidden states [1, tokens, ...]; without metadata in packed_kwarg_names a batch is cut by samples."
            )
        if sum(self.lengths) != tokens:
            raise ValueError(
                f"{self.block}: cumulative lengths of packed sequences end at the number of tokens. They end at "
                f"{sum(self.lengths)}, and {path} has {tokens} tokens. Pass hidden states [1, tokens, ...] without "
                f"padding, or say with batch_dims which dimension carries the tokens."
            )

    def metadata(self, key: str, value: Any) -> tuple[Any, ...]:
        """Return what each chunk gets in place of ``value``, which a packed keyword was given."""
        if isinstance(value, Tensor) and value.ndim == 1:
            return tuple(value[a : b + 1] - value[a] for a, b in self.groups)
        longest = [max(self.lengths[a:b], default=0) for a, b in self.groups]
        if isinstance(value, Tensor):
            return tuple(value.new_full((), n) for n in longest)
        if value < max(longest):
            raise ValueError(
                f"{self.block}: {key} is the length of the longest packed sequence, {max(longest)} here, and the block "
                f"was given {value}. Compute it from the same lengths as the cumulative ones."
            )
        return tuple(type(value)(n) for n in longest)


def find_packing(
    block: str,
    names: tuple[str, ...],
    kwargs: Mapping[str, Any],
    known: KnownLengths,
    *,
    chunk_mbs: int,
    chunk_tokens: int | None,
    notices: Notices,
) -> Packing | None:
    """Return how a call is packed; None if it was given none of the keywords ``names``.

    Args:
        block: name of the block, for messages.
        names: keywords that hold cumulative lengths (1-dimensional integer tensors) or longest lengths (numbers).
        kwargs: the call's keyword arguments.
        known: reads cumulative lengths.
        chunk_mbs: sequences per chunk, where ``chunk_tokens`` does not say.
        chunk_tokens: tokens per chunk at most; a longer sequence is a chunk by itself.
        notices: where warnings go.

    Raises:
        ValueError: the metadata contradicts itself.
        TypeError: a keyword holds something else.
    """
    given = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
    if not given:
        return None
    for name, value in given.items():
        _check_kind(block, name, value)
    cumulative = {name: known.of(v) for name, v in given.items() if isinstance(v, Tensor) and v.ndim == 1}
    if not cumulative:
        raise ValueError(
            f"{block}: a packed call has cumulative lengths, and of packed_kwarg_names={list(names)} the block was "
            f"given only {sorted(given)}. Declare the keyword that holds them, for example cu_seq_lens_q."
        )
    for name, values in cumulative.items():
        _check_cumulative(block, name, values)
    (first, values), *others = cumulative.items()
    for name, other in others:
        if other != values:
            raise ValueError(
                f"{block}: cumulative lengths of one call are the same, and {first} is {_brief(values)}, {name} is "
                f"{_brief(other)}. Sequences of keys that are not those of the queries cannot be cut along with them."
            )
    lengths = tuple(b - a for a, b in pairwise(values))
    groups = _by_sequences(lengths, chunk_mbs) if chunk_tokens is None else _by_tokens(lengths, chunk_tokens)
    groups = _without_empty(lengths, groups)
    longest = max(lengths, default=0)
    if chunk_tokens is not None and longest > chunk_tokens:
        notices.warn(
            "chunk_tokens",
            f"{block}: a packed sequence of {longest} tokens is longer than chunk_tokens={chunk_tokens}, and sequences "
            f"are not cut; it is a chunk by itself. Raise chunk_tokens, or shorten sequences.",
        )
    return Packing(block, lengths, tuple(groups))


def _check_kind(block: str, name: str, value: Any) -> None:
    number = isinstance(value, int) and not isinstance(value, bool)
    integers = isinstance(value, Tensor) and value.ndim <= 1 and value.dtype in (torch.int32, torch.int64)
    if not (number or integers):
        seen = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"{block}: a keyword of packed_kwarg_names holds cumulative lengths (int32 or int64, [sequences + 1]) or "
            f"the longest length (a number); {name} is {seen}. Take it out of packed_kwarg_names."
        )


def _check_cumulative(block: str, name: str, values: list[int]) -> None:
    ordered = all(a <= b for a, b in pairwise(values))
    if len(values) < 2 or values[0] != 0 or not ordered:
        raise ValueError(
            f"{block}: cumulative lengths of packed sequences begin at 0 and never fall, with one number more than "
            f"there are sequences; {name} is {_brief(values)}. For lengths 3 and 5 write [0, 3, 8]."
        )


def _brief(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, … {values[-1]}]"


def _by_sequences(lengths: tuple[int, ...], count: int) -> list[tuple[int, int]]:
    return [(a, min(a + count, len(lengths))) for a in range(0, len(lengths), count)]


def _by_tokens(lengths: tuple[int, ...], most: int) -> list[tuple[int, int]]:
    groups, start, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        if i > start and tokens + length > most:
            groups.append((start, i))
            start, tokens = i, 0
        tokens += length
    return [*groups, (start, len(lengths))]


def _without_empty(lengths: tuple[int, ...], groups: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join groups without tokens to their neighbours: lengths are padded with empty sequences at times."""
    kept: list[tuple[int, int]] = []
    for a, b in groups:
        if kept and (not any(lengths[a:b]) or not any(lengths[slice(*kept[-1])])):
            kept[-1] = (kept[-1][0], b)
        else:
            kept.append((a, b))
    return kept
