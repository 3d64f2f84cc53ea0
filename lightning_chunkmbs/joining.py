"""Joining what the chunks of a block call returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .chunked_tensor import Assembly, Cuts
from .host_functions import join, stash
from .host_tensor import HostTensor, Put
from .trees import leaves, map_tree, tree_leaves


class OutputJoin:
    """Joins the outputs of the chunks of one call.

    Batch tensors become one along ``batch_dim``; floating 0-dim tensors become the mean weighted by chunk size; None
    stays None. A tensor of size 1 that is the same in every chunk (a table of position biases) is returned once.
    Containers are those that :func:`~.trees.map_tree` enters. A single output is returned as is.

    Args:
        block: name of the block, for messages.
        sizes: samples of each chunk.
        batch_dim: dimension to join along.
        cuts: remembers of which chunks a batch was made; None: nobody will ask.
        stream: moves tensors that need a gradient to the host; None: they stay on the device.
    """

    def __init__(
        self,
        block: str,
        sizes: Sequence[int],
        batch_dim: int,
        cuts: Cuts | None = None,
        stream: Put | None = None,
    ) -> None:
        self._block, self._sizes, self._dim, self._cuts, self._stream = block, tuple(sizes), batch_dim, cuts, stream
        self._paths: list[str] | None = None
        self._assemblies: dict[str, Assembly] = {}
        self._tables: set[str] = set()  # paths of outputs that have size 1 in chunks of more

    def place(self, i: int, output: Any) -> Any:
        """Take the output of chunk ``i``, in any order, and return it with its batch tensors where they will be joined.

        Raises:
            TypeError: the chunks' outputs differ in structure, or hold something that cannot be joined.
            ValueError: an output tensor does not have its chunk's size along ``batch_dim``, or differs from other
                chunks' in another dimension, dtype or device.
        """
        if len(self._sizes) < 2:
            return output if self._stream is None else map_tree(self._put_away, output)
        paths = [path for path, _ in tree_leaves(output)]
        if self._paths is None:
            self._paths = paths
        elif paths != self._paths:
            raise TypeError(
                f"{self._block}: the chunks of one call returned outputs of different structure; they must agree."
            )
        return map_tree(lambda leaf, path: self._place(i, leaf, path), output)

    def _place(self, i: int, value: Any, path: str) -> Any:
        if value is None or _is_mean(value):
            return value
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{self._block}: a block that is cut returns tensors and None (in tuples, lists, dicts or "
                f"dataclasses); its output{path} is {type(value).__name__}, which cannot be joined. Return it from "
                f"outside the block, or take the block out of chunkmbs_plan."
            )
        size = self._sizes[i]
        if value.ndim > self._dim and value.size(self._dim) == 1 != size:
            self._tables.add(path)  # whether it is one is known when all chunks are there
            return value
        if value.ndim <= self._dim or value.size(self._dim) != size:
            raise ValueError(
                f"{self._block}: an output tensor of a block that is cut has its chunk's size along batch_dim="
                f"{self._dim}; output{path} ({value.dtype}) has shape {tuple(value.shape)} for a chunk of {size}."
            )
        if self._stream is not None and value.requires_grad:
            return stash(value, self._stream)
        assembly = self._assemblies.setdefault(path, Assembly(self._sizes, self._dim))
        if not assembly.fits(value):
            raise ValueError(
                f"{self._block}: the chunks of one call return tensors that differ in the batch dimension only; "
                f"output{path} of one chunk is {tuple(value.shape)} ({value.dtype}), which does not fit the others'."
            )
        return assembly.place(i, value)

    def _put_away(self, value: Any, _path: str) -> Any:
        if self._stream is None or not isinstance(value, Tensor) or not value.requires_grad or value.ndim == 0:
            return value
        return stash(value, self._stream)

    def join(self, outputs: Sequence[Any]) -> Any:
        """Return the joined output; ``outputs`` are those that :meth:`place` returned, in the order of the batch."""
        if len(outputs) == 1:
            return outputs[0]
        joined = iter(
            [
                self._join(path, list(values))
                for path, values in zip(self._paths or (), zip(*map(leaves, outputs), strict=True), strict=True)
            ]
        )
        return map_tree(lambda _leaf, _path: next(joined), outputs[0])

    def _join(self, path: str, values: list[Any]) -> Any:
        if all(value is None for value in values):
            return None
        if all(_is_mean(value) for value in values):
            weights = [size / sum(self._sizes) for size in self._sizes]
            return torch.stack([value * weight for value, weight in zip(values, weights, strict=True)]).sum()
        if any(value is None or _is_mean(value) for value in values):
            kinds = sorted({"0-dim Tensor" if _is_mean(v) else type(v).__name__ for v in values})
            raise TypeError(
                f"{self._block}: output{path} is {' and '.join(kinds)} in different chunks, which cannot be joined."
            )
        if path in self._tables:
            return self._table(path, values)
        if all(isinstance(value, HostTensor) for value in values):
            whole: Tensor = join(values, self._dim)
        elif path in self._assemblies:
            whole = self._assemblies[path].whole(values)
        else:
            whole = torch.cat(values, self._dim)
        if self._cuts is not None and whole.requires_grad:
            self._cuts.remember(whole, self._dim, values, self._assemblies.get(path))
        return whole

    def _table(self, path: str, values: list[Any]) -> Any:
        """Return the one table that all chunks made; its gradient is all in the chunk that it is taken from."""
        first = values[0]
        if not all(value.shape == first.shape and torch.equal(value, first) for value in values):
            shapes = ", ".join(str(tuple(value.shape)) for value in values)
            raise ValueError(
                f"{self._block}: an output tensor of a block that is cut has its chunk's size along batch_dim="
                f"{self._dim}, or size 1 and the same values in every chunk; output{path} ({first.dtype}) has shapes "
                f"{shapes} for chunks of {', '.join(map(str, self._sizes))}, and values that differ."
            )
        return first


def _is_mean(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()
