"""Out of memory: a block call goes on with smaller chunks, and a backward pass says what to set.

[Note: halving]
Memory that a chunk's forward takes is mostly proportional to its size. So when it runs out, the chunks of that call are
dropped and each is cut in two, and later calls of the block are cut so from the start. All this is between the block's
gather and its end: other ranks see nothing of it, as collectives do not depend on chunks. In backward parts of the
gradient are there already, so the pass cannot be run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from .arguments import CutCall, CutRule, Template, fill

_T = TypeVar("_T")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that a device or the host has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


@dataclass(frozen=True)
class Chunks:
    """The chunks of one micro-batch's call, first to last.

    Attributes:
        parts: for each chunk the cut call that it is part of, and its index there.
        sizes: samples (tokens, if they are packed) of each chunk; empty when the call is handed on whole.
        dim: dimension along which outputs are joined.
    """

    parts: list[tuple[CutCall, int]]
    sizes: tuple[int, ...]
    dim: int

    @classmethod
    def of(cls, cut: CutCall) -> Chunks:
        """Return the chunks of a call as it was cut."""
        return cls([(cut, i) for i in range(cut.chunks)], cut.sizes, cut.dim)

    def cut_again(self, cut: Callable[[Template], CutCall]) -> Chunks:
        """Return these chunks, each of them cut as a call of its own."""
        again = [cut(fill(call.template, call.chunk(i), i)) for call, i in self.parts]
        parts = [(call, i) for call in again for i in range(call.chunks)]
        return Chunks(parts, tuple(size for call in again for size in call.sizes), self.dim)


class Fitting:
    """Runs the chunks of a block call, smaller ones when memory does not suffice.

    Args:
        block: name of the block, for messages.
        rule: how the block is cut; None: not at all.
        cut: cuts a call by a rule.
        may_halve: whether chunks may be cut in two.

    Attributes:
        rule: the rule with which the chunks fitted.
    """

    def __init__(
        self, block: str, rule: CutRule | None, cut: Callable[[CutRule, Template], CutCall], *, may_halve: bool
    ) -> None:
        self.rule = rule
        self._block = block
        self._cut = cut
        self._may_halve = may_halve

    def run(self, chunks: list[Chunks], run: Callable[[list[Chunks]], _T]) -> _T:
        """Return what ``run`` returned for chunks that it was able to run.

        Args:
            chunks: the chunks of each micro-batch.
            run: runs them.

        Raises:
            torch.OutOfMemoryError: chunks of one sample are too large too, or the block is not cut.
        """
        while True:
            try:
                return run(chunks)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                chunks = self._halved(chunks, error)
            # Only here, out of the handler, is what the failed try had computed free.

    def _halved(self, chunks: list[Chunks], error: Exception) -> list[Chunks]:
        most = max((size for c in chunks for size in c.sizes), default=0)
        rule = self.rule
        if rule is None or most < 2 or not self._may_halve:
            raise self._out_of_memory(error) from error
        tokens = None if rule.chunk_tokens is None else max(1, min(most, rule.chunk_tokens) // 2)
        self.rule = rule = replace(rule, chunk_mbs=max(1, min(most, rule.chunk_mbs) // 2), chunk_tokens=tokens)
        halved = [c.cut_again(lambda call: self._cut(rule, call)) for c in chunks]
        if [c.sizes for c in halved] == [c.sizes for c in chunks]:
            raise self._out_of_memory(error) from error
        return halved

    def _out_of_memory(self, error: Exception) -> Exception:
        rules = [] if self.rule is None or self._may_halve else [self.rule]
        return _explained(error, f"{self._block} ran out of memory in forward. {_advice(rules)}")


def smaller_chunks(block: str, rule: CutRule) -> str:
    """Return the warning that a block goes on with smaller chunks."""
    field, value = ("chunk_mbs", rule.chunk_mbs) if rule.chunk_tokens is None else ("chunk_tokens", rule.chunk_tokens)
    return (
        f"{block} ran out of memory in forward and goes on with half the chunk, {field}={value}. Backward needs more "
        f"memory than forward: write {field}: {value} or less in chunkmbs_plan."
    )


@contextmanager
def explained_in_backward(rules: Iterable[CutRule | None]) -> Iterator[None]:
    """Add to an out-of-memory error of a backward pass what to set; ``rules`` are those of the model's blocks."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        advice = _advice([rule for rule in rules if rule is not None])
        raise _explained(error, f"The backward pass ran out of memory. {advice}") from error


def _explained(error: Exception, text: str) -> Exception:
    """An error of the same type, since callers tell out-of-memory errors by type and text."""
    kind = type(error) if type(error) in (RuntimeError, MemoryError) else torch.OutOfMemoryError
    return kind(f"{error}\n{text}")


def _advice(rules: Sequence[CutRule]) -> str:
    """What to set; ``rules`` are those of blocks whose chunks may be made smaller."""
    others = "shorter sequences, activation offload, save_ops left out or more ranks"
    tokens = [rule.chunk_tokens for rule in rules if rule.chunk_tokens is not None]
    samples = [rule.chunk_mbs for rule in rules]
    if tokens and max(tokens) > 1:
        return f"Write chunk_tokens: {max(tokens) // 2} in chunkmbs_plan; else {others} help."
    if not tokens and samples and max(samples) > 1:
        return f"Write chunk_mbs: {max(samples) // 2} in chunkmbs_plan; else {others} help."
    return f"Its chunks cannot be smaller; {others} help."
