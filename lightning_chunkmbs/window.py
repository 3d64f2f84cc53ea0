"""The window of an optimizer step: micro-batches wait under Lightning's untouched loop, then run in lockstep.

Touches the private parts of Lightning's loops, as ``even_data.py`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from .apply import AppliedModel
from .auto_chunks import AutoChunks
from .lockstep import Lockstep
from .mixin import ChunkMBSMixin
from .step_attributes import StepAttributes, named_attributes
from .step_logs import StepLogs
from .step_state import ThreadState
from .trees import map_tree


class MicroBatch(NamedTuple):
    """Arguments of one ``training_step``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Window:
    """Collects the micro-batches of an optimizer step and runs them.

    Args:
        trainer: the Trainer.
        module: its LightningModule.
        model: the module with its plans applied.

    Attributes:
        outputs: for each micro-batch of the last window what ``on_train_batch_end`` gets for a batch.
        state: ``"queued"`` after a micro-batch was put aside, ``"open"`` while block calls whose tails are done wait
            for :meth:`backward`, else ``""``.
    """

    def __init__(self, trainer: Any, module: pl.LightningModule, model: AppliedModel) -> None:
        self._trainer = trainer
        self._module = module
        self._model = model
        self._auto = AutoChunks.of(module)
        self._queue: list[MicroBatch] = []
        self._first = True
        self._complete = True
        self._lockstep: Lockstep | None = None
        self._ran: list[MicroBatch] = []
        self._logged = StepLogs(None)
        self._losses: dict[int, Tensor] = {}  # by micro-batch
        self.outputs: list[dict[str, Any]] = []
        self.state = ""

    # -- the queue ----------------------------------------------------------------------------------------------------

    def add(self, micro_batch: MicroBatch) -> list[MicroBatch]:
        """Put a micro-batch aside; return those to run now, none while more are to come."""
        if self._auto is not None:
            auto, self._auto = self._auto, None
            self._model.set_chunk_mbs(auto.decide(self._trainer, self._model, micro_batch.args[0]))
        if self._complete:
            self.outputs = []
        self._queue.append(micro_batch)
        self._complete = not self._trainer.fit_loop._should_accumulate()
        if not self._complete and len(self._queue) != self._model.max_lockstep:
            self.state = "queued"
            return []
        self.state = ""
        ready, self._queue = self._queue, []
        return ready

    def start_batch(self, batch_idx: int) -> None:
        """Forget micro-batches of a window that was never completed when a new window starts."""
        if batch_idx % self._trainer.accumulate_grad_batches == 0:
            self.clear()

    def clear(self) -> None:
        """Forget everything that waits."""
        self._queue = []
        self._complete = True
        self._lockstep = None
        self._losses = {}
        self.state = ""

    # -- running ------------------------------------------------------------------------------------------------------

    def run_ready(self, batches: list[MicroBatch], step: Callable[..., Any]) -> Any:
        """Run micro-batches that :meth:`add` returned: merged, side by side, or the only one by ``step``."""
        module: Any = self._module
        merges = isinstance(module, ChunkMBSMixin) and module.merges_micro_batches
        if merges and self._trainer.accumulate_grad_batches > 1:
            batch = module.merge_micro_batches([b.args[0] for b in batches])
            merged = MicroBatch((batch, *batches[-1].args[1:]), batches[-1].kwargs)
            return self.run_alone(merged, step, stands_for=len(batches))
        if len(batches) > 1 or self.together:
            return self.run(batches)
        return self.run_alone(batches[0], step)

    def run(self, batches: list[MicroBatch]) -> Any:
        """Run the steps side by side and back-propagate their tails.

        Returns:
            What the last ``training_step`` returned, its loss detached.
        """
        self._ran = batches
        self._model.replicated.accumulate_in_fp32()
        with self._kept_on_error():
            return self._run(batches)

    @contextmanager
    def _kept_on_error(self) -> Iterator[None]:
        """When a window fails, put its micro-batches back but the last, which comes again with another try."""
        try:
            yield
        except BaseException:
            self.clear()
            self.outputs = []
            self._queue = self._ran[:-1]
            raise

    def _run(self, batches: list[MicroBatch]) -> Any:
        self._losses = {}
        outputs: dict[int, dict[str, Any]] = {}  # by micro-batch, since one may end before an earlier one
        last: list[Any] = []
        outside = ThreadState.now()

        def finish(i: int, output: Any) -> None:
            inside = ThreadState.now()
            outside.apply(inside)
            self._on_turn(batches, i)
            # A window of one may have gradients only after its `zero_grad`, so its tail waits for `backward` too.
            result = self._closure_result(output)
            outputs[i] = _outputs(result)
            returned = self._back_propagate_tail(i, output, result) if len(batches) > 1 else output
            if i == len(batches) - 1:
                last.append(returned)
            inside.apply()

        steps = [functools.partial(self._module.training_step, *b.args, **b.kwargs) for b in batches]
        self._lockstep = lockstep = self._new_lockstep(batches)
        plugin = self._trainer.precision_plugin
        with plugin.train_step_context(), self._named_profiling(lockstep):
            try:
                self._model.sharded.call(lockstep.forward, steps, finish, backward_follows=True)
            except Exception as error:
                _refuse_mixed(
                    self._attributes.mixed(), error
                )  # a step that read another's value may well have failed by it
                raise
        self._logged.settle()
        self._check_first(lockstep)
        self.outputs += [outputs[i] for i in range(len(batches))]
        self.state = "open" if len(batches) > 1 else ""
        if last[0] is None:  # without a loss Lightning calls no backward, and other steps have theirs
            self.backward()
            self.after_backward()
        return last[0]

    def run_alone(self, batch: MicroBatch, step: Callable[..., Any], stands_for: int = 1) -> Any:
        """Run one step in the ordinary way; its loss counts as the sum of ``stands_for`` micro-batches' losses."""
        self._logged = StepLogs(self._trainer._results)
        self._on_turn([batch], 0)
        output = step(*batch.args, **batch.kwargs)
        if stands_for > 1 and isinstance(output, Mapping) and output.get("loss") is not None:
            output = {**output, "loss": output["loss"] * stands_for}
        elif stands_for > 1 and isinstance(output, Tensor):
            output = output * stands_for
        return self._note(output)

    def _note(self, output: Any) -> Any:
        """Add what a step returned to the window's outputs and return it."""
        self.outputs.append(_outputs(self._closure_result(output)))
        return output

    def _closure_result(self, output: Any) -> ClosureResult:
        """Return what Lightning makes of a step's output."""
        return ClosureResult.from_training_step_output(output, self._trainer.accumulate_grad_batches)

    def _new_lockstep(self, batches: list[MicroBatch]) -> Lockstep:
        self._attributes = self._watched()
        self._logged = StepLogs(self._trainer._results)
        return Lockstep(
            self._model.sharded,
            self._attributes,
            on_turn=functools.partial(self._on_turn, batches),
            agree=self._model.agree,
            record_collectives=self._first and self._model.meshes.data.size() > 1,
        )

    def _on_turn(self, batches: list[MicroBatch], i: int) -> None:
        """What Lightning infers a logged value's batch size from belongs to the step that logs."""
        self._logged.turn(i)
        results = self._logged.results
        if results is not None:
            results.batch = batches[i].args[0] if batches[i].args else None
            results.batch_size = None

    def _back_propagate_tail(self, i: int, output: Any, result: ClosureResult) -> Any:
        """Do with a step's output what Lightning's closure does, up to its blocks; return it with a detached loss."""
        if output is None and self._trainer.world_size > 1:
            raise RuntimeError(
                "training_step returned None, which skips the step, and that is not possible with several processes. "
                "Return a loss; multiply it by 0 if this micro-batch is not to count."
            )
        if result.closure_loss is None:
            return None
        plugin, module = self._trainer.precision_plugin, self._module
        loss = plugin.pre_backward(result.closure_loss, module)
        plugin.backward(loss, module, self._trainer.optimizers[0])
        self._losses[i] = loss.detach()
        if isinstance(output, Mapping):
            return {**output, "loss": output["loss"].detach()}
        return output.detach()

    @property
    def together(self) -> bool:
        """Whether ranks may call different blocks, so that even a window of one runs with the other ranks."""
        return self._model.agree is not None

    def backward(self, tail: Callable[[], None] | None = None) -> None:
        """Back-propagate ``tail`` if it has not been, then the block calls; afterwards the gradients are complete."""
        lockstep, self._lockstep, self.state = self._lockstep, None, ""
        if lockstep is None:
            if tail is not None:
                self._model.sharded.back_propagate(tail)
            return
        if tail is not None:
            with lockstep.guarded():
                tail()
        with self._kept_on_error():
            lockstep.backward()

    def after_backward(self) -> None:
        """Call the hooks that follow backward, once for each micro-batch, now that gradients are complete."""
        losses, self._losses = self._losses, {}
        for i in sorted(losses):
            self._trainer.precision_plugin.post_backward(losses[i], self._module)

    @contextmanager
    def _named_profiling(self, lockstep: Lockstep) -> Iterator[None]:
        """Add the micro-batch to names that a step gives to the profiler, which refuses to start one twice."""
        profiler: Any = self._trainer.profiler

        def named(method: Callable[[str], None]) -> Callable[[str], None]:
            def call(action: str) -> None:
                step = lockstep.current
                method(action if step is None else f"{action} [micro-batch {step}]")

            return call

        profiler.start, profiler.stop = named(profiler.start), named(profiler.stop)
        try:
            yield
        finally:
            del profiler.start, profiler.stop

    # -- attributes and the first window ------------------------------------------------------------------------------

    def _watched(self) -> StepAttributes:
        module = self._module
        near = {type(module).__name__: module, **dict(module.named_children())}
        inside = {m for root in (*self._model.blocks.values(), *_metrics(module)) for m in root.modules()}
        near = {name: m for name, m in near.items() if m not in inside}
        named = named_attributes(module, self._model.lockstep_attributes)
        outside = {}
        if self._first:
            known = inside | set(near.values())
            outside = {n: m for n, m in module.named_modules() if m not in known and n not in named}
        further = {name: module.get_submodule(name) for name in named}
        return StepAttributes({**near, **further}, only=named, outside=outside)

    def _check_first(self, lockstep: Lockstep) -> None:
        if not self._first:
            return
        self._first = False
        own = self._attributes.mixed(), [(step, name) for step, name, _ in lockstep.collectives]
        everyone: list[Any] = [own]
        mesh = self._model.meshes.data
        if mesh.size() > 1:
            everyone = [None] * mesh.size()
            dist.all_gather_object(everyone, own, group=mesh.get_group())
        # What one rank alone found (its batches had images) is an error on all, or the others would wait for it.
        _refuse_mixed(list(dict.fromkeys(name for mixed, _ in everyone for name in mixed)))
        _refuse_mismatch([collectives for _, collectives in everyone])


def _refuse_mixed(mixed: list[str], cause: Exception | None = None) -> None:
    if mixed:
        raise RuntimeError(
            f"In lockstep a step keeps attributes that it assigns on the LightningModule and its direct children. "
            f"Several steps assigned others, each its own value: {', '.join(mixed)}. Write lockstep_attributes: "
            f"{mixed} in chunkmbs_plan, or max_lockstep: 1."
        ) from cause


def _outputs(result: ClosureResult) -> dict[str, Any]:
    """What Lightning hands to ``on_train_batch_end``: nothing for a skipped step."""
    outputs = {} if result.loss is None else result.asdict()
    return map_tree(lambda leaf, _: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)


def _refuse_mismatch(everyone: list[list[tuple[int, str]]]) -> None:
    for rank, others in enumerate(everyone):
        if others != everyone[0]:
            i = next(i for i in range(len(others) + 1) if others[i : i + 1] != everyone[0][i : i + 1])
            first, other = everyone[0][i : i + 1], others[i : i + 1]
            raise RuntimeError(
                f"Collectives inside training_step must be the same on all ranks in lockstep. Number {i} is {first} on "
                f"rank 0 and {other} on rank {rank} (micro-batch, collective). Call them (self.log(sync_dist=True), "
                f"self.all_gather) in every step of every rank, or write max_lockstep: 1 in chunkmbs_plan."
            )


def _metrics(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(m, (Metric, MetricCollection))]
