"""Applying the plans to a model, in the only order that works: recompute, offload, chunk, shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .arguments import CutRule
from .block import BlockSettings, block_settings, make_chunked, own_forward
from .block_buffers import BlockBuffers
from .checks import check_coupling, check_structure
from .chunked_tensor import Cuts
from .compiled import CompiledForwards
from .dtypes import Dtypes
from .fsdp2 import initialize, whole_groups
from .groups import Agree, gather_around, make_agree, shard
from .materialize import convert, materialize, move
from .meshes import Meshes
from .offload import ActivationStore, StoreSettings
from .patterns import check_not_nested, match_modules
from .plans import ActivationOffloadPlan, ChunkMBSPlan, FSDPPlan, RecomputePlan
from .prefetch import Prefetch
from .replicated import ReplicatedParameters
from .report import Notices, StepCounter
from .same_batch import SameBatch
from .selective import SaveOps, find_ops
from .sharding import ShardedModel


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


class AppliedModel:
    """A model to which the plans were applied.

    Attributes:
        plans: what was asked for.
        meshes: what the dimensions of its devices are for.
        dtypes: dtypes of shards, gathered parameters and reduction.
        sharded: its FSDP2 groups, through which steps run.
        replicated: parameters that every rank holds whole.
        blocks: its blocks by name, in definition order.
        agree: agrees with the other ranks on the next block; None if they surely call the same ones.
    """

    def __init__(
        self, root: nn.Module, plans: Plans, meshes: Meshes, counter: StepCounter, dtypes: Dtypes | None = None
    ) -> None:
        self.plans = plans
        self.dtypes = dtypes = dtypes or Dtypes()
        self.meshes = meshes
        self.counter = counter
        self._root = root
        self._notices = Notices()
        refuse_auto(plans)
        names = resolve(root, plans)
        modules = dict(root.named_modules())
        self.blocks = {name: modules[name] for name in names.recompute}
        further = {name: modules[name] for name in (*names.further, *names.nested)}
        check_structure(root, self.blocks, further, meshes, dtypes)
        check_coupling({name: modules[name] for name in names.chunk}, self._notices)
        self._log(names)
        self._warn_sharding()
        store = ActivationStore(counter, self._notices, StoreSettings.of(plans.activation_offload_plan))
        self.store = store
        self._cuts = Cuts()
        offload_plan = plans.activation_offload_plan
        self._streams = offload_plan is not None and offload_plan.stream_hidden_states
        save_ops = plans.recompute_plan.save_ops if plans.recompute_plan else []
        self._save_ops = SaveOps(find_ops(save_ops)) if save_ops else None
        fsdp_plan = plans.fsdp_plan or FSDPPlan()
        self._prefetch = Prefetch(self.blocks, fsdp_plan.forward_prefetch)
        self._compiled = CompiledForwards() if fsdp_plan.compile_blocks else None
        for name, block in self.blocks.items():
            self._make_block(name, block, store if name in names.offload else None, name in names.chunk)
        shard(
            root,
            list(self.blocks.values()),
            _inner_first(modules, names.further),
            _inner_first(modules, names.nested),
            meshes.shard,
            reshard_after_forward=fsdp_plan.reshard_after_forward,
            dtypes=dtypes,
            cpu_offload=fsdp_plan.cpu_offload,
        )
        self.sharded = ShardedModel(root, list(self.blocks.values()), counter, self._prefetch)
        self.replicated = ReplicatedParameters(root, meshes)
        self.agree: Agree | None = None
        self._same_batch: SameBatch | None = None
        self._ready = self._received_checked = False

    def _make_block(self, name: str, block: nn.Module, store: ActivationStore | None, chunked: bool) -> None:
        forward, parameters = own_forward(block)
        if self._compiled is not None:
            forward = self._compiled.of(name, block)
        settings = BlockSettings(
            name=name,
            forward=forward,
            names=parameters,
            rule=cut_rule(self.plans.chunkmbs_plan) if chunked else None,
            store=store,
            counter=self.counter,
            notices=self._notices,
            gather=partial(gather_around, self._prefetch),
            buffers=BlockBuffers(block),
            cuts=self._cuts,
            # A group that the user made keeps its own policy, which FSDP2 applies.
            dtypes=Dtypes() if isinstance(block, FSDPModule) else self.dtypes,
            save_ops=self._save_ops,
            stream=store.put if store is not None and self._streams else None,
            last=name == list(self.blocks)[-1],
        )
        make_chunked(block, settings)

    def _log(self, names: Names) -> None:
        parts = [f"{len(found)} {kind} ({_brief(found)})" for kind, found in vars(names).items() if found]
        self._notices.log("applied", "ChunkMBS applied to modules: " + ", ".join(parts))
        if names.chunk and not names.offload:
            self._notices.warn(
                "no offload",
                "enable_activation_offload is false: the entry activation of every chunk of every block (one hidden "
                "state of the whole batch for each block) stays on the device until backward.",
            )

    def _warn_sharding(self) -> None:
        """Warn of a setting that has no effect here. Called before sharding, when groups are those of users."""
        plan = self.plans.fsdp_plan
        if plan is not None and plan.cpu_offload and self.meshes.data.device_type == "cpu":
            self._notices.warn("cpu offload", "fsdp_plan.cpu_offload has no effect on a CPU, where parameters are.")
        # With converted shards every group computes in their dtype anyway.
        own = [] if self.dtypes.shards or self.dtypes.param is None else whole_groups(self._root)
        if own:
            self._notices.warn(
                "own groups",
                f"Parameters are gathered in {self.dtypes.param}, except for groups that were sharded before without "
                f"it: {_brief(own)}. Pass mp_policy=MixedPrecisionPolicy(param_dtype={self.dtypes.param}, reduce_dtype="
                f"torch.float32, cast_forward_inputs=False) to their fully_shard, or delete these calls.",
            )

    def make_ready(self, device: torch.device) -> None:
        """Fill what is on the meta device and agree with the other ranks; the second time only agree."""
        if self._ready:
            self.replicated.broadcast()  # a configure_model may have set them anew
            return
        materialize(self._root, device)
        move(self._root, device)
        if self.dtypes.shards is not None:
            convert(self._root, self.dtypes.shards)
        initialize(self._root)
        self.replicated.broadcast()
        # Blocks of one stack are called by every step; those of a second one (a visual tower) perhaps not on all ranks.
        stacks = {name.rpartition(".")[0] for name in self.blocks}
        if len(stacks) > 1 and self.meshes.data.size() > 1:
            self.agree = make_agree(self.meshes.data)
        if self.meshes.tensor.size() > 1:
            self._same_batch = SameBatch(make_agree(self.meshes.tensor))
        self._ready = True

    def check_batch(self, batch: object) -> None:
        """Refuse a batch that differs between ranks that share layers."""
        if self._same_batch is not None:
            self._same_batch.check(batch)

    @property
    def max_lockstep(self) -> int | None:
        """How many micro-batches run side by side at most; None: all of a window."""
        return self.plans.chunkmbs_plan.max_lockstep if self.plans.chunkmbs_plan else None

    @property
    def lockstep_attributes(self) -> list[str]:
        """Attributes below the LightningModule's direct children that belong to the step that assigns them."""
        return self.plans.chunkmbs_plan.lockstep_attributes if self.plans.chunkmbs_plan else []

    def check_received(self) -> None:
        """After the first step: refuse a plan whose keywords no block was given, name what had no effect once.

        Raises:
            ValueError: no block received any of the plan's ``chunk_kwarg_names``.
        """
        if self._received_checked:
            return
        self._received_checked = True
        if self._save_ops is not None and self._save_ops.unused:
            self._notices.warn(
                "save_ops",
                f"RecomputePlan.save_ops had no effect for {', '.join(self._save_ops.unused)}: no block ran such an "
                f"operator in the first step. Under torch.profiler the names of those that run are seen.",
            )
        if self.plans.chunkmbs_plan is None:
            return
        declared = self.plans.chunkmbs_plan.chunk_kwarg_names
        settings = [block_settings(block) for block in self.blocks.values()]
        received = set().union(*(s.received for s in settings if s.rule is not None))
        missing = [name for name in declared if name not in received]
        if not self.plans.enable_chunk_mbs or not missing:
            return
        if not received:
            raise ValueError(
                f"chunk_kwarg_names declares {missing}, and no block was called with any of them in the first step. "
                f"Write the keywords with which the model calls its blocks, or leave chunk_kwarg_names out."
            )
        self._notices.log("not received", f"ChunkMBS: no block was called with the declared keywords {missing}.")


def refuse_auto(plans: Plans) -> None:
    """Refuse to train with a number of samples that was left to the planner."""
    if plans.enable_chunk_mbs and plans.chunkmbs_plan is not None and plans.chunkmbs_plan.chunk_mbs == "auto":
        raise ValueError(
            "Training needs chunk_mbs as a number, and chunkmbs_plan has chunk_mbs: auto. `python -m "
            "lightning_chunkmbs plan --config FILE --devices N --device_memory 80GiB` says how many samples fit; write "
            "that, or chunk_mbs: 1."
        )


def cut_rule(plan: ChunkMBSPlan | None) -> CutRule | None:
    """Return how blocks of a plan are cut; ``auto`` stands for one sample here."""
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
            f"Every module of {plan} must be in {by} too; {len(missing)} are not: {_brief(missing)}. Add their "
            f"patterns to {by}.apply_modules, or leave {by} out: it then covers what chunkmbs_plan covers."
        )


def _nested(further: list[str], blocks: list[str]) -> list[str]:
    """Return the names of further groups that are inside a block."""
    twice = next((name for name in further if name in blocks), None)
    if twice is not None:
        raise ValueError(f"fsdp_plan names further groups; '{twice}' is a block and has a group. Delete it there.")
    return [name for name in further if any(name.startswith(f"{block}.") for block in blocks)]


def _inner_first(modules: Mapping[str, nn.Module], names: list[str]) -> list[nn.Module]:
    """Return modules by name, inner ones before outer ones: a name sorts before the names below it."""
    return [modules[name] for name in sorted(names, reverse=True)]


def _brief(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, … {names[-1]}"
