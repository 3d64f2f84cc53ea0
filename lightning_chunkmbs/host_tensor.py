"""HostTensor: stands for a device tensor whose values wait on the host.

[Note: hollow]
In streaming mode the outputs of chunks, and on the way back their gradients, wait on the host. Code between blocks and
autograd are given a HostTensor: a tensor with shape, strides, dtype, device, ``requires_grad`` and graph, but without
memory. Everything happens below autograd (``__torch_dispatch__``), so for autograd it is a tensor like any other.

[Note: joined for good]
The first operation that needs values loads them into one device tensor, which stays: later operations use it. With a
join for each operation, what is written in place to a view would be lost. Aliases share it for the same reason.
[Note: not compiled]
Under ``torch.compile`` every Python function that runs, also below an operation, is traced. What moves values must not
be, hence ``torch.compiler.disable``. A compiled function that is given a HostTensor runs uncompiled from where it uses
it (functions that it calls with plain tensors are compiled), and one with ``fullgraph=True`` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .trees import map_tree

_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default}
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default, _aten.expand.default}
# Only shape, dtype and device of their argument count.
_LIKE = {getattr(_aten, f"{name}_like") for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")}
_NEW = {getattr(_aten, f"new_{name}") for name in ("empty", "empty_strided", "zeros", "ones", "full")}


class Part(Protocol):
    """Values that wait on the host."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the values."""

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""

    @property
    def device(self) -> torch.device:
        """The device that they came from and are loaded to."""

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""

    def load(self, *, forward: bool = False) -> Tensor:
        """Return a new tensor on the device; called any number of times. Writing to it leaves the part as it is.

        Args:
            forward: the next to be loaded is what was put away next, and not what was put away before.
        """


Put = Callable[[Tensor], "Part | Tensor"]
"""Moves a tensor to the host, or returns it if it shall stay on its device (too small, no host memory left)."""


class _Kept:
    """A part that stays on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, _version(tensor)
        self.shape, self.dtype, self.device, self.nbytes = tensor.shape, tensor.dtype, tensor.device, tensor.nbytes

    def load(self, *, forward: bool = False) -> Tensor:
        if _version(self._tensor) != self._version:
            raise RuntimeError(
                f"A tensor of shape {tuple(self.shape)} that waits for a later block or for backward has been modified "
                f"by an inplace operation since. Write x = x + y in place of x += y where a block's output is changed."
            )
        return self._tensor.clone()


class _Values:
    """The values of a HostTensor and of its aliases: parts along ``dim``, and once joined the ``whole``."""

    __slots__ = ("dim", "parts", "put", "sizes", "whole", "written")

    def __init__(self, parts: Sequence[Part], dim: int, put: Put) -> None:
        self.parts, self.dim, self.put = list(parts), dim, put
        self.sizes = tuple(part.shape[dim] if part.shape else 1 for part in parts)
        self.whole: Tensor | None = None
        self.written = False

    @classmethod
    def of(cls, whole: Tensor, put: Put) -> _Values:
        """Return values that are joined already."""
        values = cls([], 0, put)
        values.whole = whole
        return values

    def pour(self, target: Tensor, *, drop: bool) -> None:
        """Copy the values into ``target``, a part at a time.

        Args:
            target: a tensor of the whole's shape.
            drop: free each part on the host after it is read; its values are then those in ``target``.
        """
        if self.whole is not None:
            target.copy_(self.whole)
            return
        places = [target] if len(self.parts) == 1 else target.split(self.sizes, self.dim)
        for i, place in enumerate(places):
            place.copy_(self.parts[i].load())
            if drop:
                # Not just forgotten: a hook may hold this tensor too, and loading the next part may fail. `data` has a
                # version counter of its own, so that writing the other places is no change of this one.
                self.parts[i] = _Kept(place.data)


class HostTensor(Tensor):
    """A tensor of one device whose values wait on the host, in one part or in several along a dimension.

    ``detach`` and views of the same shape stay hollow; operations that need values join the parts on the device for
    good and return plain tensors. Operations in place that change the shape (``t_``, ``resize_``) raise a RuntimeError.
    """

    _held: _Values

    @staticmethod
    def __new__(cls, values: _Values, shape: Sequence[int], strides: Sequence[int]) -> HostTensor:
        first = values.parts[0] if values.whole is None else values.whole
        self: HostTensor = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), strides=tuple(strides), dtype=first.dtype, device=first.device
        )
        self._held = values
        return self

    @classmethod
    @torch.compiler.disable  # see [Note: not compiled]
    def put_away(cls, tensor: Tensor, put: Put) -> HostTensor:
        """Return a HostTensor of one part: the values of ``tensor`` (any shape and dtype), moved by ``put``.

        It has no gradient. Its strides are those of ``torch.empty_like(tensor)``. Of an untouched HostTensor nothing is
        moved: the new one has the same parts.
        """
        if isinstance(tensor, HostTensor) and tensor.untouched:
            return cls(_Values(tensor.parts, tensor.parts_dim, put), tensor.shape, tensor.stride())
        # A copy of what was joined: torch does not count changes of it, so that none would be noticed if it is kept.
        tensor = tensor.load() if isinstance(tensor, HostTensor) else tensor.detach()
        part = put(tensor)
        values = _Values([_Kept(part) if isinstance(part, Tensor) else part], 0, put)
        return cls(values, tensor.shape, torch.empty_like(tensor, device="meta").stride())

    @classmethod
    def cat(cls, parts_of: Sequence[HostTensor], dim: int) -> HostTensor:
        """Return a HostTensor (without gradient) that holds the parts of several along ``dim``; nothing is loaded.

        Shapes must agree in all other dimensions, and tensors of several parts must have these along ``dim``.
        """
        given = [cls.put_away(h, h.put_fn) for h in parts_of]
        if len(given) == 1:
            return given[0]
        dim = dim % given[0].dim()
        assert all(len(h.parts) == 1 or h.parts_dim == dim for h in given), "parts along another dimension"
        shape = list(given[0].shape)
        shape[dim] = sum(h.shape[dim] for h in given)
        values = _Values([part for h in given for part in h.parts], dim, given[0].put_fn)
        return cls(values, shape, _contiguous(shape))

    @property
    def untouched(self) -> bool:
        """Whether the values are still those of the parts: nothing has joined them or written to them."""
        return self._held.whole is None and _version(self) == 0

    def same_values(self, other: Tensor) -> bool:
        """Whether ``other`` is an alias, and nothing has written its values past the version counter."""
        return isinstance(other, HostTensor) and self._held is other._held and not self._held.written

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts that wait on the host; none once they are joined."""
        return tuple(self._held.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the parts along :attr:`parts_dim`, also once they are joined."""
        return self._held.sizes

    @property
    def parts_dim(self) -> int:
        """The dimension along which the parts lie."""
        return self._held.dim

    @property
    def put_fn(self) -> Put:
        """What moves tensors to where the parts are."""
        return self._held.put

    def whole(self) -> Tensor:
        """Join the parts for good (see [Note: joined for good]) and return the plain tensor, without gradient."""
        values = self._held
        if values.whole is None:
            values.whole = self._loaded(drop=True)
            values.parts = []
        return values.whole

    def load(self, *, forward: bool = False) -> Tensor:
        """Return the values in a new plain tensor, without gradient, and stay as hollow as now.

        Args:
            forward: as in :meth:`Part.load`, for a tensor of one part.
        """
        return self._loaded(drop=False, forward=forward)

    def is_cut(self, sizes: Sequence[int], dim: int) -> bool:
        """Whether this is untouched and has parts of these ``sizes`` along ``dim``."""
        if len(self.parts) == 1:
            return self.untouched and tuple(sizes) == (self.shape[dim],)
        return self.untouched and self.parts_dim == dim % self.dim() and self.sizes == tuple(sizes)

    def pieces(self) -> list[HostTensor]:
        """Return one HostTensor (without gradient) for each part."""
        shapes = [torch.Size(part.shape) for part in self.parts]
        strides = [_contiguous(shape) for shape in shapes] if len(shapes) > 1 else [self.stride()]
        values = [_Values([part], 0, self.put_fn) for part in self.parts]
        return [HostTensor(*each) for each in zip(values, shapes, strides, strict=True)]

    def pour(self, target: Tensor) -> None:
        """Copy the values into ``target``, freeing each part on the host after it is read.

        Meant for a gradient that nothing else needs. For whoever still holds it, its values are then those in
        ``target``.
        """
        self._held.pour(target, drop=True)

    # Made outside inference mode, since it may be written to outside as well.
    @torch.compiler.disable
    @torch.inference_mode(False)
    @torch.no_grad()
    def _loaded(self, *, drop: bool, forward: bool = False) -> Tensor:
        values = self._held
        if len(values.parts) == 1:
            loaded = values.parts[0].load(forward=forward)
            if loaded.stride() == self.stride() and loaded.storage_offset() == 0:
                return loaded
        whole = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
        values.pour(whole, drop=drop)
        return whole

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and isinstance(args[0], HostTensor) else None
        if func is _aten.detach_.default:
            return first
        if first is not None and (func in _ALIASES or (func in _VIEWS and first.shape == tuple(args[1]))):
            return cls(first._held, first.shape, first.stride())
        if first is not None and torch.Tag.inplace_view in getattr(func, "tags", ()):
            raise RuntimeError(
                f"{func} changes the shape of a block's output in place, and this output waits on the host. Write "
                f"x = x.t() in place of x.t_(), x = x.unsqueeze(0) in place of x.unsqueeze_(0), and so on."
            )
        return _run_dense(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = "joined" if self._held.whole is not None else f"{len(self.parts)} parts on the host"
        return f"HostTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, {parts})"

    # What torch answers from a tensor's own memory, without an operation.

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        values = new._held if isinstance(new, HostTensor) else _Values.of(new.detach(), self.put_fn)
        # This sets shape, strides and dtype. As with any tensor, aliases keep the former values.
        Tensor.data.__set__(self, HostTensor(values, new.shape, new.stride()))  # type: ignore[attr-defined]
        self._held = values

    def _exposed(self) -> Tensor:
        self._held.written = True  # whoever has the memory may write to it
        return self.whole()

    def _plain(self) -> Tensor:
        return self._exposed().detach().requires_grad_(self.requires_grad)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else super().__format__(spec)

    def __deepcopy__(self, memo: Any) -> Tensor:
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # raises, as for every tensor
        if id(self) not in memo:
            copied = memo[id(self)] = self.load().requires_grad_(self.requires_grad)
            if self.grad is not None:
                copied.grad = self.grad.__deepcopy__(memo)
        return memo[id(self)]

    def __reduce_ex__(self, proto: Any) -> Any:
        return self._plain().__reduce_ex__(proto)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._plain().__dlpack__(**kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        return self._plain().numpy(force=force)

    def tolist(self) -> Any:
        return self.whole().tolist()

    def data_ptr(self) -> int:
        return self._exposed().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._exposed().untyped_storage()


def _version(tensor: Tensor) -> int:
    """Return how often ``tensor`` was changed in place; torch does not count it in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def _run_dense(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the joined values."""
    given: dict[int, HostTensor] = {}
    name = getattr(func, "overloadpacket", None)  # higher-order operators have none

    def dense(value: Any, _path: str) -> Any:
        if not isinstance(value, HostTensor):
            return value
        if name in _NEW:
            return torch.empty(0, dtype=value.dtype, device=value.device)
        if name in _LIKE:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        given.setdefault(id(value.whole()), value)
        value._held.written |= func._schema.is_mutable  # perhaps of an alias with a version counter of its own (`data`)
        return value.whole()

    result = func(*map_tree(dense, args), **map_tree(dense, kwargs))
    # What is written in place is returned itself.
    return map_tree(lambda value, _path: given.get(id(value), value), result)
