"""Plans: which modules to chunk, recompute, offload and shard, and how."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

__all__ = ["ActivationOffloadPlan", "ChunkMBSPlan", "FSDPPlan", "RecomputePlan", "coerce_plan"]

_Plan = TypeVar("_Plan")

DTYPES = ("bfloat16", "float32")  # those that a plan may name


@dataclass(frozen=True, kw_only=True)
class ChunkMBSPlan:
    """Which modules run their batch in chunks, and which of their arguments carry the batch.

    Args:
        apply_modules: patterns of the modules to chunk, e.g. ``model.layers.{*}``.
        chunk_mbs: samples per chunk, not the number of chunks; ``"auto"``: as many as
            the planner finds to fit on every device, decided in a run's first training step; on a CPU an error.
        batch_dim: batch dimension of the arguments and outputs: 0 for ``[b, s, h]``, 1 for ``[s, b, h]``.
        chunk_arg_indexs: positions of the positional arguments that carry the batch.
        chunk_kwarg_names: names of the keyword arguments that carry the batch.
        batch_dims: batch dimension of single arguments where it is another, e.g. ``{position_ids: 1}``.
        packed_kwarg_names: names of the keyword arguments that tell packed sequences apart (cumulative lengths, longest
            length), e.g. ``cu_seq_lens_q``. A call that is given them is cut between sequences, ``chunk_mbs`` of them a
            chunk; tensors are then cut along the other one of the first two dimensions, which holds the tokens.
        chunk_tokens: tokens of a chunk of packed sequences at most, in place of ``chunk_mbs`` sequences.
        max_lockstep: micro-batches of an optimizer step that run side by side at most; None: all of them. A longer
            window takes several passes, each with its own gathers; 1 is ordinary accumulation.
        lockstep_attributes: attributes below the LightningModule's direct children that belong to the micro-batch that
            assigns them, e.g. ``model.encoder.cache``.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has the right type but a value that it cannot have.
    """

    apply_modules: list[str]
    chunk_mbs: int | Literal["auto"] = 1
    batch_dim: int = 0
    chunk_arg_indexs: list[int] = field(default_factory=lambda: [0])
    chunk_kwarg_names: list[str] = field(default_factory=list)
    batch_dims: dict[str, int] = field(default_factory=dict)
    packed_kwarg_names: list[str] = field(default_factory=list)
    chunk_tokens: int | None = None
    max_lockstep: int | None = None
    lockstep_attributes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check_patterns(self, self.apply_modules)
        _check_chunk_mbs(self.chunk_mbs)
        _check_int("ChunkMBSPlan.batch_dim", self.batch_dim, least=0)
        _check_chunk_arg_indexs(self.chunk_arg_indexs)
        _check_names("ChunkMBSPlan.chunk_kwarg_names", self.chunk_kwarg_names)
        _check_batch_dims(self.batch_dims)
        _check_names("ChunkMBSPlan.packed_kwarg_names", self.packed_kwarg_names, "cu_seq_lens_q")
        _check_packed(self)
        if self.max_lockstep is not None:
            _check_int("ChunkMBSPlan.max_lockstep", self.max_lockstep, least=1)
        _check_names("ChunkMBSPlan.lockstep_attributes", self.lockstep_attributes)
        if not self.chunk_arg_indexs and not self.chunk_kwarg_names:
            raise ValueError(
                "ChunkMBSPlan must declare an argument that carries the batch, but chunk_arg_indexs and "
                "chunk_kwarg_names are both empty; write chunk_arg_indexs: [0] for the first positional argument."
            )


@dataclass(frozen=True, kw_only=True)
class RecomputePlan:
    """Which modules compute their activations again in backward instead of keeping them.

    Args:
        apply_modules: patterns of the modules to recompute, e.g. ``model.layers.{*}``.
        save_ops: operators whose results are kept (offloaded like entry activations) and not computed again, by their
            names under ``torch.ops``, e.g. ``aten._scaled_dot_product_flash_attention``.

    Raises:
        TypeError: a field is not a list of strings.
        ValueError: ``apply_modules`` is empty, or something is named twice.
    """

    apply_modules: list[str]
    save_ops: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check_patterns(self, self.apply_modules)
        _check_names("RecomputePlan.save_ops", self.save_ops, "aten.mm")


@dataclass(frozen=True, kw_only=True)
class ActivationOffloadPlan:
    """Which recomputed modules keep their entry activations in host memory until backward.

    Args:
        apply_modules: patterns of the modules to offload, e.g. ``model.layers.{*}``.
        host_memory_gb: most host memory that a rank uses for them, in GB of 10^9 bytes; None: no limit. What finds no
            room stays on the device.
        min_bytes: entry activations of fewer bytes stay on the device.
        prefetch_bytes: how many bytes are brought back ahead of the chunk that is recomputed, in whole entry
            activations; None: one of them, 0: none.
        pin_memory: pin the host memory, so that copies run beside computation.
        stream_hidden_states: keep hidden states of micro-batches on the host between blocks.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has the right type but a value that it cannot have.
    """

    apply_modules: list[str]
    host_memory_gb: float | None = None
    min_bytes: int = 0
    prefetch_bytes: int | None = None
    pin_memory: bool = True
    stream_hidden_states: bool = False

    def __post_init__(self) -> None:
        _check_patterns(self, self.apply_modules)
        _check_host_memory(self.host_memory_gb)
        _check_int("ActivationOffloadPlan.min_bytes", self.min_bytes, least=0)
        if self.prefetch_bytes is not None:
            _check_int("ActivationOffloadPlan.prefetch_bytes", self.prefetch_bytes, least=0)
        _check_bool("ActivationOffloadPlan.pin_memory", self.pin_memory)
        _check_bool("ActivationOffloadPlan.stream_hidden_states", self.stream_hidden_states)


@dataclass(frozen=True, kw_only=True)
class FSDPPlan:
    """How parameters are sharded, gathered and freed.

    Args:
        apply_modules: patterns of further modules that get an FSDP2 group of their own; the blocks always have one.
        reshard_after_forward: free a block's gathered parameters after its forward; backward gathers them again.
        forward_prefetch: how many blocks ahead of the running one are gathered, in forward and in backward.
        param_dtype: dtype in which parameters are gathered and computed with, ``"bfloat16"`` or ``"float32"``; None:
            that of the Trainer's precision.
        reduce_dtype: dtype in which gradients are reduced; None: that of the Trainer's precision. They are added up in
            float32 in any case.
        output_dtype: dtype of the outputs of blocks and further groups; None leaves them as they are.
        cast_forward_inputs: cast floating inputs of blocks and further groups, and floating tensors of batches, to the
            dtype of computation. Targets and rotary tables are cast too.
        cpu_offload: keep shards, their gradients and the optimizer's state in host memory; the optimizer steps there.
        replicate_size: how many copies of the sharded model there are. Each is sharded over ``data_parallel_size``
            divided by it; gradients are all-reduced between copies once per pass.
        compile_blocks: compile what each class of blocks does for one chunk with ``torch.compile``.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: ``forward_prefetch`` is negative, a dtype is none of those above, or ``apply_modules`` names a
            pattern twice.
    """

    apply_modules: list[str] = field(default_factory=list)
    reshard_after_forward: bool = True
    forward_prefetch: int = 1
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = False
    cpu_offload: bool = False
    replicate_size: int = 1
    compile_blocks: bool = False

    def __post_init__(self) -> None:
        _check_patterns(self, self.apply_modules, may_be_empty=True)
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            _check_dtype(f"FSDPPlan.{name}", getattr(self, name))
        _check_bool("FSDPPlan.cast_forward_inputs", self.cast_forward_inputs)
        _check_bool("FSDPPlan.cpu_offload", self.cpu_offload)
        _check_bool("FSDPPlan.reshard_after_forward", self.reshard_after_forward)
        _check_int("FSDPPlan.forward_prefetch", self.forward_prefetch, least=0)
        _check_bool("FSDPPlan.compile_blocks", self.compile_blocks)
        _check_int("FSDPPlan.replicate_size", self.replicate_size, least=1)


def coerce_plan(value: object, cls: type[_Plan], name: str) -> _Plan | None:
    """Return ``value`` as a plan: ``None`` and plans as they are, a mapping as the plan it describes.

    Args:
        value: ``None``, an instance of ``cls``, or a mapping of its fields.
        cls: the class of the plan.
        name: what error messages call the argument, e.g. ``chunkmbs_plan``.

    Raises:
        TypeError: ``value`` is anything else, or a field has the wrong type.
        ValueError: a key is unknown or missing, or a field has a value that it cannot have.
    """
    if value is None or isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name} must be a {cls.__name__}, a dict of its fields, or None, but got {value!r} "
            f"({type(value).__name__})."
        )
    _check_keys(value, cls, name)
    return cls(**value)


def _check_keys(value: Mapping[Any, Any], cls: type, name: str) -> None:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in value:
        if key not in fields:
            raise ValueError(_unknown_key(str(key), list(fields), name))
    for key, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and key not in value:
            raise ValueError(f"{name} must have the key {key!r}, but got only {sorted(value)}; add '{key}: …'.")


def _unknown_key(key: str, fields: list[str], name: str) -> str:
    nearest = difflib.get_close_matches(key, fields, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "remove it."
    return f"{name} has no key {key!r}; {hint} Its keys: {', '.join(fields)}."


def _check_patterns(plan: object, patterns: object, *, may_be_empty: bool = False) -> None:
    where = f"{type(plan).__name__}.apply_modules"
    if isinstance(patterns, str):
        raise TypeError(f"{where} must be a list of patterns, but got the string {patterns!r}; write ['{patterns}'].")
    if not isinstance(patterns, list):
        raise TypeError(f"{where} must be a list of patterns, but got {patterns!r} ({type(patterns).__name__}).")
    if not patterns and not may_be_empty:
        raise ValueError(f"{where} must name a module, but is empty; write for example ['model.layers.{{*}}'].")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"A pattern in {where} must be a string, but got {pattern!r}. In a YAML flow list, patterns with "
                "braces or stars must be quoted; write ['model.layers.{*}'], or one pattern per line after '- '."
            )
    _check_once(where, patterns)


def _check_chunk_mbs(value: object) -> None:
    if value != "auto":
        _check_int("ChunkMBSPlan.chunk_mbs (samples per chunk)", value, least=1)


def _check_chunk_arg_indexs(indexes: object) -> None:
    where = "ChunkMBSPlan.chunk_arg_indexs"
    if not isinstance(indexes, list):
        raise TypeError(f"{where} must be a list of positions, but got {indexes!r}; write for example [0].")
    for index in indexes:
        _check_int(f"A position in {where}", index, least=0)
    _check_once(where, indexes)


def _check_names(where: str, names: object, example: str = "attention_mask") -> None:
    if not isinstance(names, list):
        raise TypeError(f"{where} must be a list of names, but got {names!r}; write for example ['{example}'].")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"A name in {where} must be a string, but got {name!r} ({type(name).__name__}).")
    _check_once(where, names)


def _check_packed(plan: ChunkMBSPlan) -> None:
    twice = sorted({*plan.packed_kwarg_names} & {*plan.chunk_kwarg_names})
    if twice:
        raise ValueError(
            f"An argument carries the batch or tells packed sequences apart, but {twice} are in both chunk_kwarg_names "
            f"and packed_kwarg_names; delete them in chunk_kwarg_names."
        )
    if plan.packed_kwarg_names and plan.batch_dim > 1:
        raise ValueError(
            f"Packed sequences have batch and tokens in their first two dimensions, but batch_dim is "
            f"{plan.batch_dim}; write batch_dim: 0 for [1, tokens, h] or batch_dim: 1 for [tokens, 1, h]."
        )
    if plan.chunk_tokens is not None:
        _check_int("ChunkMBSPlan.chunk_tokens", plan.chunk_tokens, least=1)
        if not plan.packed_kwarg_names:
            raise ValueError(
                "ChunkMBSPlan.chunk_tokens is for packed sequences, but packed_kwarg_names is empty; write for example "
                "packed_kwarg_names: [cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k]."
            )


def _check_batch_dims(batch_dims: object) -> None:
    where = "ChunkMBSPlan.batch_dims"
    if not isinstance(batch_dims, dict):
        raise TypeError(f"{where} must map argument names to dimensions, but got {batch_dims!r}; write {{name: 1}}.")
    for name, dim in batch_dims.items():
        if not isinstance(name, str):
            raise TypeError(f"A key of {where} must be the name of an argument, but got {name!r}.")
        _check_int(f"The dimension of {name!r} in {where}", dim, least=0)


def _check_host_memory(value: object) -> None:
    what = "ActivationOffloadPlan.host_memory_gb"
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{what} must be a number of GB or null, but got {value!r} ({type(value).__name__}).")
    if not 0 <= value < math.inf:
        raise ValueError(f"{what} must be 0 or more, but got {value!r}; leave it out for no limit.")


def _check_int(what: str, value: object, *, least: int) -> None:
    # bool is a subclass of int, and True would be taken for 1.
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(
            f"{what} must be an integer, but got {value!r} ({type(value).__name__}); write {least} or more."
        )
    if value < least:
        raise ValueError(f"{what} must be at least {least}, but got {value}; write {least} or more.")


def _check_bool(what: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be true or false, but got {value!r} ({type(value).__name__}).")


def _check_dtype(what: str, value: object) -> None:
    names = " or ".join(map(repr, DTYPES))
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{what} must be the name of a dtype, {names}, but got {value!r}; write it as a string.")
    if value is not None and value not in DTYPES:
        raise ValueError(f"{what} must be {names}, but got {value!r}; float16 would need its loss scaled.")


def _check_once(where: str, items: list[Any]) -> None:
    for item in items:
        if items.count(item) > 1:
            raise ValueError(f"{where} must name everything once, but {item!r} is given twice; delete one of them.")
