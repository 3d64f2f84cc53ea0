"""ChunkMBSStrategy: FSDP2, recomputation, activation offload and chunking under Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from .apply import AppliedModel
from .auto_chunks import AutoChunks
from .checkpoints import CheckpointingStrategy
from .declared import DeclaredPlans
from .even_data import ComparesData
from .failures import Failures
from .guards import single_step
from .host_parameters import backend_for
from .kept_ties import note_ties
from .meshes import Meshes, check_tensor_parallel_size
from .one_trainer import OneTrainer
from .plans import ActivationOffloadPlan, ChunkMBSPlan, FSDPPlan, RecomputePlan
from .precision import dtypes_for, precision_plugin_for, set_input_dtype, total_norm
from .report import StepCounter, StepReport
from .setup_checks import check_callbacks, check_parameters, refuse_windows
from .window import MicroBatch, Window

_APPLIED = "_chunkmbs_applied"


class ChunkMBSStrategy(OneTrainer, ComparesData, CheckpointingStrategy):
    """Trains with FSDP2 and runs the work of an optimizer step through each gathered block in micro-chunks.

    Each block named by the plans becomes an FSDP2 group, recomputed in backward from entry activations that wait in
    host memory. A block named by ``chunkmbs_plan`` is gathered once per pass for all chunks of a batch. Plans are
    dataclasses or dicts of their fields; one that is None is taken from a module with
    :class:`~lightning_chunkmbs.ChunkMBSMixin`, and otherwise covers what ``chunkmbs_plan`` covers.

    Args:
        recompute: recompute the blocks of ``recompute_plan`` in backward.
        recompute_plan: which blocks are recomputed.
        enable_activation_offload: keep entry activations of recomputed blocks on the host.
        activation_offload_plan: which blocks' entry activations are offloaded.
        enable_chunk_mbs: cut the batch inside the blocks of ``chunkmbs_plan``.
        chunkmbs_plan: which blocks are cut, into chunks of how many samples, and what carries the batch.
        fsdp_plan: further FSDP2 groups, resharding, prefetching and parallelism.
        data_parallel_size: ranks that share the data; ``"auto"``: all devices divided by ``tensor_parallel_size``.
        tensor_parallel_size: ranks that share each layer, by the plan that the module's ``configure_model`` applies.
        save_distributed_checkpoint: write a folder with each rank's shards; False: one file with everything.
        process_group_backend: backend of torch.distributed; None: the device's default.
        timeout: timeout of collectives.

    Raises:
        ValueError, TypeError: an argument is impossible. Plans are checked against the model in :meth:`apply`.
    """

    def __init__(
        self,
        recompute: bool = True,
        recompute_plan: RecomputePlan | None = None,
        enable_activation_offload: bool = True,
        activation_offload_plan: ActivationOffloadPlan | None = None,
        enable_chunk_mbs: bool = True,
        chunkmbs_plan: ChunkMBSPlan | None = None,
        fsdp_plan: FSDPPlan | None = None,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            data_parallel_size, tensor_parallel_size, save_distributed_checkpoint, process_group_backend, timeout
        )
        check_tensor_parallel_size(tensor_parallel_size)
        self._declared = DeclaredPlans(
            recompute=recompute,
            recompute_plan=recompute_plan,
            enable_activation_offload=enable_activation_offload,
            activation_offload_plan=activation_offload_plan,
            enable_chunk_mbs=enable_chunk_mbs,
            chunkmbs_plan=chunkmbs_plan,
            fsdp_plan=fsdp_plan,
        )
        self._failures: Failures | None = None
        self._meshes: Meshes | None = None
        self._applied: AppliedModel | None = None
        self._window: Window | None = None
        self._window_outputs: list[dict[str, Any]] = []
        self._accumulating = False
        self._step_report = StepReport()

    # -- what users call ---------------------------------------------------------------------------------------------

    def apply(self, module: pl.LightningModule) -> None:
        """Apply the plans to ``module`` in place; does nothing when they already are.

        Called by the strategy right after ``configure_model``, and by the mixin's ``configure_model``.

        Raises:
            ValueError, TypeError: the plans do not fit the module.
            RuntimeError: called before processes have started, or other plans were applied to the module before.
        """
        plans = self._declared.plans_for(module)
        dtypes = dtypes_for(self.precision_plugin, self._declared.fsdp_plan)
        applied: AppliedModel | None = module.__dict__.get(_APPLIED)
        meshes = self._meshes or Meshes(self.device_mesh, self.device_mesh)  # raises before processes have started
        if applied is None:
            AutoChunks.prepare(module, plans, meshes, self.root_device)
            applied = AppliedModel(module, plans, meshes, StepCounter(), dtypes)
            module.__dict__[_APPLIED] = applied
        elif (applied.plans, applied.meshes, applied.dtypes) != (plans, meshes, dtypes):
            raise RuntimeError(
                f"A module keeps the plans, devices and precision it was first run with; {type(module).__name__} was "
                f"given others now. Build a new module for the new Trainer (and load the checkpoint into it)."
            )
        self._applied = applied

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep parameters outside blocks gathered, for calls of the model outside the four steps.

        A direct child of the LightningModule may be called (``self.model.generate(...)`` in a hook) without this; then
        each call gathers. All ranks must enter. Nothing run inside may be back-propagated afterwards.
        """
        with self._ready_model.sharded.gathered():
            yield

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm over all gradients of the module (0-dim, the same on every rank); all ranks must call this.

        For ``on_before_optimizer_step``, where gradients are complete and not clipped yet.
        """
        return total_norm(self._module.parameters(), norm_type=norm_type)

    @property
    def step_report(self) -> StepReport:
        """What the last optimizer step did on this rank; zeros before the first."""
        return self._step_report

    @property
    def window_outputs(self) -> list[dict[str, Any]]:
        """For each micro-batch of the last window what ``on_train_batch_end`` gets for it with stock accumulation."""
        return self._window_outputs if self._window is None else self._window.outputs

    # -- setup -------------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """The precision plugin, always one that this strategy supports."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin_for(plugin)

    def setup_environment(self) -> None:
        """Start processes' communication and make the device mesh, once for all runs of this strategy."""
        check_callbacks(self._module.trainer)
        note_ties(self._module)
        self._setup_distributed()
        # The model is sharded on the mesh of the first run; another mesh would be another set of process groups.
        if self._device_mesh is None:
            sizes = (self._data_parallel_size, self._declared.fsdp_plan.replicate_size, self._tensor_parallel_size)
            self._meshes = Meshes.make(self.root_device.type, *sizes, timeout=self._timeout)
            self._device_mesh = self._meshes.whole
        self._module._device_mesh = self._device_mesh
        self._failures = Failures()
        self.compare_in(self._module.trainer)  # before configure_optimizers, which may ask for loaders

    def setup(self, trainer: pl.Trainer) -> None:
        """Apply the plans, fill the model and build optimizers."""
        module = self._module
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        self.apply(module)
        self._ready_model.make_ready(self.root_device)
        self.model = self.precision_plugin.convert_module(module)
        set_input_dtype(self.precision_plugin, self._ready_model.dtypes)
        self.barrier()
        # NCCL would otherwise run these loops in inference mode, whose tensors the next fit cannot use.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
            self._ready_model.sharded.follow_steps(self.optimizers)
            check_parameters(module, self.optimizers, self._ready_model.whole)
            if self._ready_model.plans.enable_chunk_mbs and module.automatic_optimization:
                refuse_windows(trainer, module)
                self._window = Window(trainer, module, self._ready_model)
        self.setup_precision_plugin()
        if fitting and not self._declared.fsdp_plan.cpu_offload:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        offload = self._declared.fsdp_plan.cpu_offload
        return backend_for(self._process_group_backend, backend, self.root_device) if offload else backend

    @property
    def _ready_model(self) -> AppliedModel:
        if self._applied is None:
            raise RuntimeError("The plans have not been applied yet; this is possible once Trainer.fit has set up.")
        return self._applied

    # -- steps -------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` with the root group gathered, or put it aside for its window.

        Returns:
            What the module's ``training_step`` returned; NaN (0-dim) for a micro-batch that was put aside.
        """
        self._ready_model.check_batch((args, kwargs), ("training", self._module.current_epoch))
        if self._window is None or not self._module.automatic_optimization:
            output = self._single_step(*args, **kwargs)
        else:
            batches = self._window.add(MicroBatch(args, kwargs))
            if not batches:
                return torch.full((), torch.nan, device=self.root_device)
            output = self._window.run_ready(batches, self._single_step)
        self._ready_model.check_received()
        return output

    def _single_step(self, *args: Any, **kwargs: Any) -> Any:
        module, sharded = self._module, self._ready_model.sharded
        self._ready_model.replicated.accumulate_in_fp32()
        with self.precision_plugin.train_step_context(), single_step(sharded.gather_again):
            return sharded.call(module.training_step, *args, **kwargs, backward_follows=module.automatic_optimization)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``validation_step`` with the root group gathered."""
        with self.precision_plugin.val_step_context():
            return self._evaluate(self._module.validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``test_step`` with the root group gathered."""
        with self.precision_plugin.test_step_context():
            return self._evaluate(self._module.test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``predict_step`` with the root group gathered."""
        with self.precision_plugin.predict_step_context():
            return self._evaluate(self._module.predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # After the batch and its number comes that of its loader, if there are several.
        loader = self._module.trainer.state.stage, self._module.current_epoch, args[2:]
        self._ready_model.check_batch((args, kwargs), loader)
        self.before_evaluation_batch(args[1:])
        with self._ready_model.counter.paused():
            return self._ready_model.sharded.call(step, *args, **kwargs, backward_follows=False)

    @property
    def _module(self) -> pl.LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("The strategy works for a Trainer that was given a LightningModule.")
        return self.lightning_module

    # -- backward and optimizer --------------------------------------------------------------------------------------

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Back-propagate the loss; gradients are complete before ``on_after_backward``."""
        plugin, module, model = self.precision_plugin, self._module, self._ready_model
        state = self._window.state if self._window is not None else ""
        if state == "queued":
            return closure_loss
        with model.back_propagating():
            if self._window is not None and state == "open":
                self._window.backward()
                self._average_replicated()
                self._window.after_backward()
                return closure_loss
            self.pre_backward(closure_loss)
            loss = plugin.pre_backward(closure_loss, module)
            model.sharded.before_backward(loss)
            backward = partial(plugin.backward, loss, module, optimizer, *args, **kwargs)
            model.sharded.back_propagate(backward) if self._window is None else self._window.backward(backward)
            self._average_replicated()
            model.sharded.after_backward()
            loss = plugin.post_backward(loss, module)
            self.post_backward(loss)
        return loss

    def _average_replicated(self) -> None:
        if not self._accumulating:
            self._ready_model.replicated.average_gradients()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Entered by Lightning around micro-batches that no optimizer step follows."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer and make the step's report."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._ready_model.sharded.after_optimizer_step()
        self._step_report = self._ready_model.counter.take()
        return output

    def on_exception(self, exception: BaseException) -> None:
        """Leave no group gathered when a run ends by an exception, and tell the other ranks of it."""
        super().on_exception(exception)
        if self._failures is not None:
            self._failures.explain(exception)
        if self._window is not None:
            self._window.clear()
        if self._applied is not None:
            self._applied.forget_step()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Forget a window that was not completed."""
        super().on_train_batch_start(batch, batch_idx)
        if self._window is not None:
            self._window.start_batch(batch_idx)

    def on_train_start(self) -> None:
        """Refuse what hooks have added to the module since it was sharded."""
        check_parameters(self._module, self.optimizers, self._ready_model.whole)
        super().on_train_start()

    def teardown(self) -> None:
        """Forget what waits and end the run."""
        self._window_outputs, self._window = self.window_outputs, None
        super().teardown()


StrategyRegistry.register("chunkmbs", ChunkMBSStrategy, description="FSDP2, gathered once per pass for all chunks")
