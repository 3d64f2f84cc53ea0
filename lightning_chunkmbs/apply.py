"""Applying the plans to a model, in the only order that works: recompute, offload, chunk, shard."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .agree import Agree, make_agree
from .block import block_settings, make_chunked, own_forward
from .block_buffers import BlockBuffers
from .checks import check_coupling, check_structure
from .chunk_runs import BlockSettings
from .chunked_tensor import Cuts
from .compiled import CompiledForwards
from .coverage import Names, Plans, brief, cut_rule, resolve
from .dtypes import Dtypes
from .fsdp2 import initialize, whole_groups
from .groups import gather_around, shard
from .kept_ties import check_ties
from .materialize import convert, materialize, move
from .meshes import Meshes, ranks_of
from .offload import ActivationStore, StoreSettings
from .out_of_memory import explained_in_backward
from .plans import FSDPPlan
from .prefetch import Prefetch
from .replicated import ReplicatedParameters
from .report import Notices, StepCounter
from .same_batch import SameBatch
from .selective import SaveOps, find_ops
from .sharding import ShardedModel
from .unused import Unused


class AppliedModel:
    """A model to which the plans were applied.

    Attributes:
        plans: what was asked for.
        meshes: what the dimensions of its devices are for.
        dtypes: dtypes of shards, gathered parameters and reduction.
        sharded: its FSDP2 groups, through which steps run.
        replicated: parameters that every rank holds whole.
        whole: names of the parameters that sharding left whole.
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
        names = resolve(root, plans)
        modules = dict(root.named_modules())
        self.blocks = {name: modules[name] for name in names.recompute}
        further = {name: modules[name] for name in (*names.further, *names.nested)}
        check_ties(root)
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
        self._unused = Unused()
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
        self.sharded = ShardedModel(root, list(self.blocks.values()), counter, self._prefetch, self._unused)
        self.replicated = ReplicatedParameters(root, meshes)
        self.whole = {name for name, p in root.named_parameters() if not isinstance(p, DTensor)}
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
            gather=partial(gather_around, self._prefetch, self._unused),
            buffers=BlockBuffers(block),
            cuts=self._cuts,
            # A group that the user made keeps its own policy, which FSDP2 applies.
            dtypes=Dtypes() if isinstance(block, FSDPModule) else self.dtypes,
            save_ops=self._save_ops,
            stream=store.put if store is not None and self._streams else None,
            # Ranks that share a layer compute it on the same chunks.
            may_halve=self.meshes.tensor.size() == 1,
            last=name == list(self.blocks)[-1],
        )
        make_chunked(block, settings)

    def _log(self, names: Names) -> None:
        parts = [f"{len(found)} {kind} ({brief(found)})" for kind, found in vars(names).items() if found]
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
                f"it: {brief(own)}. Pass mp_policy=MixedPrecisionPolicy(param_dtype={self.dtypes.param}, reduce_dtype="
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
        if self.meshes.data.size() > 1:
            self._unused.agree = agree = make_agree(ranks_of(self.meshes.data), self.meshes.timeout)
            self.agree = agree if len(stacks) > 1 else None
        if self.meshes.tensor.size() > 1:
            self._same_batch = SameBatch(make_agree(ranks_of(self.meshes.tensor), self.meshes.timeout))
        self._ready = True

    def set_chunk_mbs(self, chunk_mbs: int) -> None:
        """Cut blocks into chunks of ``chunk_mbs`` samples from now on."""
        for settings in map(block_settings, self.blocks.values()):
            if settings.rule is not None:
                settings.rule = replace(settings.rule, chunk_mbs=chunk_mbs)

    @contextmanager
    def back_propagating(self) -> Iterator[None]:
        """Context of a backward pass: what it leaves behind when it fails is cleaned, lack of memory is explained."""
        rules = (settings.rule for settings in map(block_settings, self.blocks.values()))
        with explained_in_backward(rules), self.sharded.cleaned_on_error():
            yield

    def forget_step(self) -> None:
        """After a step that failed: leave no group gathered and nothing counted."""
        self.sharded.reset(failed=True)
        self.counter.take()

    def check_batch(self, batch: object, loader: Hashable) -> None:
        """Refuse a batch that differs between ranks that share layers; the first of each ``loader`` by its values."""
        if self._same_batch is not None:
            self._same_batch.check(batch, loader)

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
            ValueError: no block received any of the plan's ``chunk_kwarg_names``, on any rank; raised on every rank.
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
        plan = self.plans.chunkmbs_plan
        if not self.plans.enable_chunk_mbs or plan is None or not plan.chunk_kwarg_names:
            return
        declared = plan.chunk_kwarg_names
        missing = self._not_received(declared)
        if len(missing) == len(declared):
            raise ValueError(
                f"chunk_kwarg_names declares {missing}, and no block was called with any of them in the first step. "
                f"Write the keywords with which the model calls its blocks, or leave chunk_kwarg_names out."
            )
        if missing:
            self._notices.log("not received", f"ChunkMBS: no block was called with the declared keywords {missing}.")

    def _not_received(self, names: list[str]) -> list[str]:
        """Return those of the keywords that no block received on any rank; all ranks must call this."""
        settings = map(block_settings, self.blocks.values())
        received = set().union(*(s.received for s in settings if s.rule is not None))
        absent = [int(name not in received) for name in names]
        # A tower that only some ranks call: the others must not end, and leave them waiting, because of it.
        by_all = absent if self._unused.agree is None else self._unused.agree(absent)
        return [name for name, missed in zip(names, by_all, strict=True) if missed]


def _inner_first(modules: Mapping[str, nn.Module], names: list[str]) -> list[nn.Module]:
    """Return modules by name, inner ones before outer ones: a name sorts before the names below it."""
    return [modules[name] for name in sorted(names, reverse=True)]
