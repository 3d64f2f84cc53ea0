"""Buffers that a block writes while it runs: recomputation and second tries must not write them once more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_Mark = tuple[Tensor | None, int]
_Copies = dict[str, tuple[Tensor, Tensor]]  # by name the buffer and a copy of its values


class BlockBuffers:
    """The buffers of one block, looked up live.

    Args:
        block: the block.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._any = any(True for _ in block.buffers())
        self._norms = [(name, module) for name, module in block.named_modules() if isinstance(module, _NormBase)]
        self._writes: set[str] | None = None  # those that runs of the block have written; None before the first

    def marks(self) -> dict[str, _Mark]:
        """Return for each buffer what :meth:`written` compares with."""
        found = self.block.named_buffers() if self._any else ()
        return {name: (buffer, buffer._version) for name, buffer in found}

    def written(self, marks: dict[str, _Mark]) -> list[str]:
        """Return the names of buffers that were changed or replaced since ``marks`` were taken.

        Running statistics of norms in training mode are always among them.
        """
        if not self._any:
            return []
        nothing: _Mark = (None, 0)
        statistics = set(self._statistics())
        return [
            name
            for name, (buffer, version) in self.marks().items()
            if name in statistics or marks.get(name, nothing)[0] is not buffer or marks[name][1] != version
        ]

    def _statistics(self) -> Iterator[str]:
        # torch's kernels of batch statistics write them without a change of version.
        for name, module in self._norms:
            if module.training:
                yield from (f"{name}.{key}".lstrip(".") for key in ("running_mean", "running_var"))

    @contextmanager
    def kept(self, names: Iterable[str]) -> Iterator[None]:
        """Leave the buffers ``names`` as they are, whatever is written inside."""
        saved = self._copies(names)
        try:
            yield
        finally:
            self._put_back(saved)

    @contextmanager
    def undone_if_failed(self) -> Iterator[None]:
        """Put back what was written inside, if it ends with an exception.

        The first time all buffers are copied, later those that were written in an earlier run: copies of tables would
        cost memory for nothing. So of a buffer that is first written in a later run the values are not put back.
        """
        marks = self.marks()
        saved = self._copies(marks if self._writes is None else self._writes & marks.keys())
        try:
            yield
        except Exception:
            written = self.written(marks)
            self._put_back({name: both for name, both in saved.items() if name in written})
            raise
        self._writes = {*(self._writes or ()), *self.written(marks)}

    def _copies(self, names: Iterable[str]) -> _Copies:
        found = {name: self.block.get_buffer(name) for name in names}
        return {name: (buffer, buffer.clone()) for name, buffer in found.items()}

    def _put_back(self, saved: _Copies) -> None:
        with torch.no_grad():
            for name, (buffer, value) in saved.items():
                owner, _, key = name.rpartition(".")
                self.block.get_submodule(owner)._buffers[key] = buffer.copy_(value)
