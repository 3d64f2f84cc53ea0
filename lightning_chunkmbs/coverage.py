"""What is asked for of a model: its plans, and which modules each of them covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .arguments import CutRule
from .patterns import check_not_nested, match_modules
from .plans import ActivationOffloadPlan, ChunkMBSPlan, FSDPPlan, RecomputePlan


@dataclass(frozen=True, kw_only=True)
class Plans:
    """What is asked for: the plans, and which of them are switched on.

    Raises:
        ValueError: the plans contradict each other, or none names a block.
    """

    recompute: bool = True
    recompute_plan: RecomputePlan | None = None
    enable_activation_offload: bool = True
    activation_offload_plan: ActivationOffloadPlan | None = None
    enable_chunk_mbs: bool = True
    chunkmbs_plan: ChunkMBSPlan | None = None
    fsdp_plan: FSDPPlan | None = None

    def __post_init__(self) -> None:
        if self.enable_chunk_mbs and not self.recompute:
            raise ValueError(
                "Chunks are recomputed in backward, so chunking needs recomputation; recompute is false and "
                "enable_chunk_mbs is true. Write recompute: true, or enable_chunk_mbs: false."
            )
        if self.enable_activation_offload and not self.recompute:
            raise ValueError(
                "Only entry activations of recomputed blocks are offloaded; recompute is false and "
                "enable_activation_offload is true. Write recompute: true, or enable_activation_offload: false."
            )
        if self.fsdp_plan and self.fsdp_plan.compile_blocks and self.recompute_plan and self.recompute_plan.save_ops:
            raise ValueError(
                "RecomputePlan.save_ops keeps results of single operators, which a compiled block does not run one by "
                "one; compile_blocks is true. Leave save_ops out, or write compile_blocks: false."
            )
        if self.enable_chunk_mbs and self.chunkmbs_plan is None:
            raise ValueError(
                "Nothing says which blocks are cut into chunks. Declare it in the strategy, for example "
                "ChunkMBSStrategy(chunkmbs_plan=ChunkMBSPlan(apply_modules=['model.layers.{*}'], chunk_mbs=1)), or on "
                "the module, for example class MyModule(ChunkMBSMixin, LightningModule): chunkmbs_plan = "
                "ChunkMBSPlan(apply_modules=['model.layers.{*}']). Without chunking write enable_chunk_mbs: false."
            )
        if not (self.recompute and (self.recompute_plan or self.chunkmbs_plan)):
            raise ValueError(
                "No plan that is switched on names a block. Write recompute: true and a recompute_plan or a "
                "chunkmbs_plan, or use Lightning's ModelParallelStrategy."
            )


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of the modules that each plan covers, in definition order; groups inside blocks are ``nested``."""

    chunk: list[str]
    recompute: list[str]
    offload: list[str]
    further: list[str]
    nested: list[str]


def cut_rule(plan: ChunkMBSPlan | None) -> CutRule | None:
    """Return how blocks of a plan are cut; ``auto`` stands for one sample until it is decided."""
    if plan is None:
        return None
    return CutRule(
        chunk_mbs=1 if plan.chunk_mbs == "auto" else plan.chunk_mbs,
        batch_dim=plan.batch_dim,
        arg_indexs=tuple(plan.chunk_arg_indexs),
        kwarg_names=tuple(plan.chunk_kwarg_names),
        batch_dims=dict(plan.batch_dims),
        packed_kwarg_names=tuple(plan.packed_kwarg_names),
        chunk_tokens=plan.chunk_tokens,
    )


def resolve(root: nn.Module, plans: Plans) -> Names:
    """Match the plans against the model and check that they cover each other."""
    names = [name for name, _ in root.named_modules() if name]
    children = [name for name, _ in root.named_children()]

    def match(plan: object, label: str) -> list[str] | None:
        patterns: Sequence[str] = getattr(plan, "apply_modules", ())
        return match_modules(patterns, names, children, plan=label) if patterns else None

    chunk = match(plans.chunkmbs_plan, "chunkmbs_plan") or []
    recompute = match(plans.recompute_plan, "recompute_plan") or chunk
    offload = match(plans.activation_offload_plan, "activation_offload_plan") or chunk or recompute
    further = match(plans.fsdp_plan, "fsdp_plan") or []
    if not plans.enable_chunk_mbs:
        chunk = []
    if not plans.enable_activation_offload:
        offload = []
    _check_covered("chunkmbs_plan", chunk, "recompute_plan", recompute)
    if plans.enable_activation_offload:
        _check_covered("chunkmbs_plan", chunk, "activation_offload_plan", offload)
    _check_covered("activation_offload_plan", offload, "recompute_plan", recompute)
    check_not_nested(recompute, plan="recompute_plan")
    nested = _nested(further, recompute)
    outside = [name for name in further if name not in nested]
    return Names(chunk=chunk, recompute=recompute, offload=offload, further=outside, nested=nested)


def _check_covered(plan: str, names: list[str], by: str, covering: list[str]) -> None:
    missing = [name for name in names if name not in covering]
    if missing:
        raise ValueError(
            f"Every module of {plan} must be in {by} too; {len(missing)} are not: {brief(missing)}. Add their "
            f"patterns to {by}.apply_modules, or leave {by} out: it then covers what chunkmbs_plan covers."
        )


def _nested(further: list[str], blocks: list[str]) -> list[str]:
    """Return the names of further groups that are inside a block."""
    twice = next((name for name in further if name in blocks), None)
    if twice is not None:
        raise ValueError(f"fsdp_plan names further groups; '{twice}' is a block and has a group. Delete it there.")
    return [name for name in further if any(name.startswith(f"{block}.") for block in blocks)]


def brief(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, … {names[-1]}"
