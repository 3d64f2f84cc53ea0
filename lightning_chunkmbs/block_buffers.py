"""Buffers that a block writes while it runs: recomputation must not write them a second time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_Mark = tuple[Tensor | None, int]


class BlockBuffers:
    """The buffers of one block, looked up live.

    Args:
        block: the block.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._any = any(True for _ in block.buffers())

    def marks(self) -> dict[str, _Mark]:
        """Return for each buffer what :meth:`written` compares with."""
        found = self.block.named_buffers() if self._any else ()
        return {name: (buffer, buffer._version) for name, buffer in found}

    def written(self, marks: dict[str, _Mark]) -> list[str]:
        """Return the names of buffers that were changed or replaced since ``marks`` were taken."""
        nothing: _Mark = (None, 0)
        now = self.marks().items()
        return [n for n, (b, version) in now if marks.get(n, nothing)[0] is not b or marks[n][1] != version]

    @contextmanager
    def kept(self, names: Iterable[str]) -> Iterator[None]:
        """Leave the buffers ``names`` as they are, whatever is written inside."""
        saved = [(name, self.block.get_buffer(name)) for name in names]
        values = [buffer.clone() for _, buffer in saved]
        try:
            yield
        finally:
            with torch.no_grad():
                for (name, buffer), value in zip(saved, values, strict=True):
                    owner, _, key = name.rpartition(".")
                    self.block.get_submodule(owner)._buffers[key] = buffer.copy_(value)
