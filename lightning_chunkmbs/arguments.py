"""Cutting a block call into chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .packed import KnownLengths, Packing, find_packing
from .report import Notices
from .trees import map_tree

# -- cutting ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CutRule:
    """How the calls of one kind of block are cut.

    Attributes:
        chunk_mbs: samples per chunk.
        batch_dim: batch dimension of arguments and outputs.
        arg_indexs: positional arguments that carry the batch.
        kwarg_names: keyword arguments that carry the batch.
        batch_dims: batch dimension by argument name where it differs from ``batch_dim``.
        packed_kwarg_names: keywords that tell packed sequences apart. A call that is given one is cut between these.
        chunk_tokens: tokens per chunk of packed sequences, in place of ``chunk_mbs`` sequences.
    """

    chunk_mbs: int
    batch_dim: int = 0
    arg_indexs: tuple[int, ...] = (0,)
    kwarg_names: tuple[str, ...] = ()
    batch_dims: Mapping[str, int] = dataclasses.field(default_factory=dict)
    packed_kwarg_names: tuple[str, ...] = ()
    chunk_tokens: int | None = None
    known_lengths: KnownLengths = dataclasses.field(default_factory=KnownLengths, compare=False)

    def dim_of(self, name: str, packed: bool) -> int:
        """Return the dimension along which a declared argument is cut."""
        # Packed hidden states are [1, tokens, h], or [tokens, 1, h] where the batch comes second.
        return self.batch_dims.get(name, 1 - self.batch_dim if packed else self.batch_dim)


class _Slot:
    """Stands in a call's arguments where a tensor goes."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _PerChunk:
    """Stands in a call's arguments where each chunk gets a value of its own that is no tensor."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values


@dataclasses.dataclass
class _Argument:
    """A tensor found in a call."""

    key: int | str  # index of the positional argument or keyword it was found in
    name: str  # that argument's name
    path: str  # where it was found, for messages
    tensor: Tensor
    batch_dim: int | None  # None: not declared to carry the batch
    pieces: tuple[Tensor, ...] = ()  # what each chunk gets, where that is no part of the tensor

    @property
    def size(self) -> int:
        """Size along the batch dimension; 1 for a tensor without dimensions, which broadcasts."""
        return 1 if self.tensor.ndim == 0 else self.tensor.size(self.batch_dim or 0)


Template = tuple[tuple[Any, ...], dict[str, Any]]

Rejoin = Callable[[int, Tensor], Tensor]
# Cuts a tensor along a dimension into pieces of the given sizes; without dimension it is one piece that all chunks
# share. With them comes what each piece, by its chunk's index, passes through when the chunk is run; None if nothing.
Cut = Callable[[Tensor, tuple[int, ...], "int | None"], tuple[tuple[Tensor, ...], "Rejoin | None"]]


def _split(tensor: Tensor, sizes: tuple[int, ...], dim: int | None) -> tuple[tuple[Tensor, ...], None]:
    return (tensor,) if dim is None else tensor.split(sizes, dim), None


def fill(template: Template, values: Sequence[Tensor], i: int = 0) -> Template:
    """Return a call's arguments for chunk ``i``, with ``values`` in place of its tensors."""

    def put(leaf: Any, _path: str) -> Any:
        if isinstance(leaf, _PerChunk):
            return leaf.values[i]
        return values[leaf.index] if isinstance(leaf, _Slot) else leaf

    return map_tree(put, template)


@dataclasses.dataclass
class CutCall:
    """One call of a block, cut into chunks.

    Attributes:
        template: positional and keyword arguments, for :func:`fill`.
        sizes: samples (tokens, if they are packed) of each chunk; empty when the call is handed on whole.
        pieces: for each tensor argument its chunks, or the one tensor that all chunks share.
        entry: index in ``pieces`` of the entry activation, the tensor that recomputation starts from; None if no
            tensor needs a gradient.
        dim: dimension along which outputs are joined.
        rejoins: for each tensor argument what a piece passes through when its chunk is run; None if nothing.
    """

    template: Template
    sizes: tuple[int, ...]
    pieces: list[tuple[Tensor, ...]]
    entry: int | None
    rejoins: list[Rejoin | None]
    dim: int = 0

    @property
    def chunks(self) -> int:
        """Number of chunks, at least one."""
        return max(1, len(self.sizes))

    @property
    def tensors(self) -> list[Tensor]:
        """Every piece once, argument by argument."""
        return [piece for pieces in self.pieces for piece in pieces]

    def replace(self, tensors: Iterator[Tensor]) -> None:
        """Take new pieces from ``tensors``, in the order of :attr:`tensors`."""
        self.pieces = [tuple(next(tensors) for _ in pieces) for pieces in self.pieces]

    def chunk(self, i: int) -> list[Tensor]:
        """Return the tensors of chunk ``i``, one for each tensor argument."""
        found = [pieces[i] if len(pieces) > 1 else pieces[0] for pieces in self.pieces]
        # Here and not for all pieces at once: autograd runs last what was made first.
        return [t if rejoin is None else rejoin(i, t) for t, rejoin in zip(found, self.rejoins, strict=True)]


def cut_call(
    block: str,
    rule: CutRule | None,
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    notices: Notices,
    cut: Cut = _split,
) -> CutCall:
    """Cut one call of a block into chunks of at most ``rule.chunk_mbs`` samples.

    Args:
        block: name of the block, for messages.
        rule: what carries the batch; None hands the call on whole.
        names: names of the positional parameters of the block's ``forward``.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        notices: where warnings go.
        cut: cuts one tensor.

    Raises:
        ValueError: no declared argument holds a tensor, or a declared tensor has neither the batch's size nor 1.
    """
    packing = None if rule is None else _find_packing(block, rule, kwargs, notices)
    found, template = _find_tensors(rule, names, args, kwargs, packing)
    sizes: tuple[int, ...] = ()
    batch: int | None = None
    dim = 0
    if rule is not None:
        main = _main_argument(block, rule, found, args, kwargs)
        batch, dim = main.size, rule.batch_dim if packing is None else main.batch_dim or 0
        if packing is None:
            full, rest = divmod(batch, rule.chunk_mbs)
            sizes = (rule.chunk_mbs,) * full + ((rest,) if rest or not full else ())
        else:
            rows = 1 if dim == rule.batch_dim else main.tensor.size(rule.batch_dim)
            packing.check_tokens(batch, rows, main.path)
            sizes = packing.sizes
        _warn_undeclared(block, rule, found, batch, dim, notices)
    pieces, rejoins = [], []
    for argument in found:
        parts, rejoin = _cut(argument, sizes, cut)
        pieces.append(parts)
        rejoins.append(rejoin)
    return CutCall(template, sizes, pieces, _entry(found, batch), rejoins, dim)


def _find_tensors(
    rule: CutRule | None,
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    packing: Packing | None,
) -> tuple[list[_Argument], Any]:
    """Return the tensors of a call and its arguments with slots in their places."""
    found: list[_Argument] = []
    metadata = rule.packed_kwarg_names if rule is not None and packing is not None else ()

    def visit(value: Any, key: int | str, name: str, label: str) -> Any:
        declared = rule is not None and (key in rule.arg_indexs or key in rule.kwarg_names)
        dim = rule.dim_of(name, packing is not None) if rule is not None and declared else None

        def leaf(x: Any, path: str) -> Any:
            pieces: tuple[Any, ...] = ()
            if packing is not None and key in metadata and x is not None:
                pieces = packing.metadata(str(key), x)
            if not isinstance(x, Tensor):
                return _PerChunk(pieces) if pieces else x
            found.append(_Argument(key, name, path, x, dim, pieces))
            return _Slot(len(found) - 1)

        return map_tree(leaf, value, label)

    positional = []
    for i, value in enumerate(args):
        name = names[i] if i < len(names) else f"args[{i}]"
        positional.append(visit(value, i, name, f"positional argument {i} ({name})"))
    keyword = {key: visit(value, key, key, key) for key, value in kwargs.items()}
    return found, (tuple(positional), keyword)


def _find_packing(block: str, rule: CutRule, kwargs: dict[str, Any], notices: Notices) -> Packing | None:
    return find_packing(
        block,
        rule.packed_kwarg_names,
        kwargs,
        rule.known_lengths,
        chunk_mbs=rule.chunk_mbs,
        chunk_tokens=rule.chunk_tokens,
        notices=notices,
    )


def _main_argument(
    block: str, rule: CutRule, found: list[_Argument], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Argument:
    """Return the argument whose size is B, and check every declared tensor against it."""
    declared = [a for a in found if a.batch_dim is not None]
    if not declared:
        raise ValueError(
            f"{block}: a block that is cut needs a declared argument that holds a tensor. Declared are "
            f"chunk_arg_indexs={list(rule.arg_indexs)} and chunk_kwarg_names={list(rule.kwarg_names)}; the block was "
            f"called with {len(args)} positional arguments and the keywords {sorted(kwargs)}. Declare the one that "
            f"holds the hidden states, for example chunk_kwarg_names: [hidden_states]."
        )
    for argument in declared:
        _check_dim(block, argument)
    order = (*rule.arg_indexs, *rule.kwarg_names)
    main = min(declared, key=lambda a: order.index(a.key))
    batch = main.size
    for argument in declared:
        if argument.size not in (batch, 1):
            raise ValueError(
                f"{block}: a declared tensor has the batch's size B along its batch dimension, or 1. {argument.path} "
                f"has shape {tuple(argument.tensor.shape)}, that is {argument.size} along dimension "
                f"{argument.batch_dim}, and B is {batch}. {_batch_dims_hint(argument)}"
            )
    return main


def _check_dim(block: str, argument: _Argument) -> None:
    dim = argument.batch_dim or 0
    if 0 < argument.tensor.ndim <= dim:
        raise ValueError(
            f"{block}: a declared tensor has its batch dimension. {argument.path} has shape "
            f"{tuple(argument.tensor.shape)} and no dimension {dim}. {_batch_dims_hint(argument)}"
        )


def _batch_dims_hint(argument: _Argument) -> str:
    return (
        f"If another dimension carries the batch, write batch_dims: {{{argument.name}: <dimension>}}; if none does, "
        f"take the argument out of chunk_arg_indexs or chunk_kwarg_names and it is passed whole to every chunk."
    )


def _warn_undeclared(block: str, rule: CutRule, found: list[_Argument], batch: int, dim: int, notices: Notices) -> None:
    for argument in found:
        tensor = argument.tensor
        undeclared = argument.batch_dim is None and not argument.pieces and tensor.ndim > dim
        if undeclared and batch > 1 and tensor.size(dim) == batch:
            notices.warn(
                f"undeclared {argument.path}",
                f"{block}: {argument.path} is not declared, so every chunk gets it whole, but its shape "
                f"{tuple(tensor.shape)} has the batch's size {batch} along dimension {dim}. If it carries "
                f"the batch, add it to chunk_kwarg_names (or its index to chunk_arg_indexs).",
            )


def _cut(argument: _Argument, sizes: tuple[int, ...], cut: Cut) -> tuple[tuple[Tensor, ...], Rejoin | None]:
    if argument.pieces:
        return argument.pieces, None
    dim, batch = argument.batch_dim, sum(sizes)
    if len(sizes) < 2:
        return (argument.tensor,), None
    shared = dim is None or argument.tensor.ndim == 0 or argument.size != batch
    return cut(argument.tensor, sizes, None if shared else dim)


def _entry(found: list[_Argument], batch: int | None) -> int | None:
    """The first tensor of the whole batch that needs a gradient; of a call that is not cut, its first float tensor."""
    floats = [i for i, a in enumerate(found) if a.tensor.is_floating_point()]
    if batch is None:
        candidates = floats[:1]
    else:
        candidates = [i for i in floats if found[i].batch_dim is not None and found[i].size == batch]
    wanted = (i for i in candidates if found[i].tensor.requires_grad and not _is_parameter(found[i].tensor))
    return next(wanted, None)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
