"""Settings for which the planner's numbers are held beside what a step was seen to take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import peft
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_chunkmbs import ChunkMBSMixin, ChunkMBSStrategy, StepReport
from lightning_chunkmbs.meshes import sharded_over
from lightning_chunkmbs.planner import Planner
from lightning_chunkmbs.precision import ChunkMBSPrecision, dtypes_for
from tests import model_zoo
from tests.models import Loader, make_trainer
from tests.storage_tracker import StorageTracker

LAYERS = "net.model.layers.{*}"
# Large enough for memory to be in tensors that grow with the model.
SIZES = {"hidden_size": 64, "intermediate_size": 192}
SHORT, LONG = 24, 128  # tokens: most memory is in parameters, or in activations


class Trained(LightningModule):
    """Trains a Hugging Face model with an optimizer of this name and options."""

    def __init__(self, net: nn.Module, optimizer: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.net = net
        self.optimizer, self.options = optimizer, options

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(trained, **self.options)
        return made


def llama(case: Case) -> LightningModule:
    return Trained(
        model_zoo.build("llama", **SIZES, num_hidden_layers=case.layers, vocab_size=case.vocabulary),
        case.optimizer,
        case.options,
    )


def frozen(case: Case) -> LightningModule:
    """The embedding and the first layer are frozen."""
    module = llama(case)
    module.net.model.embed_tokens.requires_grad_(False)
    module.net.model.layers[0].requires_grad_(False)
    return module


@dataclass(frozen=True)
class Case:
    """A step: what is trained, on what, and how.

    Attributes:
        make: builds the module.
        plans: what the strategy is given beside the plan of llama; plans are merged field by field.
        size: samples of a micro-batch.
        length: its tokens.
        n: micro-batches of a window.
    """

    make: Any = llama
    plans: dict[str, Any] = field(default_factory=dict)
    size: int = 4
    length: int = SHORT
    n: int = 2
    layers: int = 3
    vocabulary: int = 31
    chunk_mbs: int = 2
    precision: str = "32-true"
    ranks: int = 2
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)
    config: str = "llama"

    def strategy(self) -> ChunkMBSStrategy:
        arguments = model_zoo.init_args(self.config)
        arguments["chunkmbs_plan"]["chunk_mbs"] = self.chunk_mbs
        for name, plan in self.plans.items():
            arguments[name] = {**arguments.get(name, {}), **plan} if isinstance(plan, dict) else plan
        return ChunkMBSStrategy(**arguments)

    def batch(self, seed: int) -> Any:
        return model_zoo.batch(self.config, self.size, self.length, seed)


@dataclass(frozen=True)
class Seen:
    """What three optimizer steps took and did on a rank."""

    device: int
    host: int
    report: StepReport


def tracked(case: Case, tracker_class: Any = StorageTracker) -> Any:
    data = [case.batch(seed) for seed in range(3 * case.n)]
    module, strategy = case.make(case), case.strategy()
    trainer = make_trainer(strategy, max_steps=3, accumulate_grad_batches=case.n, precision=case.precision)
    with tracker_class() as tracker:
        trainer.fit(module, Loader(data))
    seen = Seen(tracker.peak, tracker.host_peak, strategy.step_report)
    return (seen, tracker.notes()) if hasattr(tracker, "notes") else seen


def planner_of(case: Case) -> Planner:
    with torch.device("meta"):
        module = case.make(case)
    strategy = case.strategy()
    fsdp_plan = strategy._declared.fsdp_plan
    plugin = ChunkMBSPrecision(case.precision, "cpu")
    ranks = sharded_over(case.ranks, fsdp_plan.replicate_size, strategy._tensor_parallel_size)
    return Planner(
        module,
        strategy._declared.plans_for(module),
        case.batch(0),
        ranks=ranks,
        micro_batches=case.n,
        dtypes=dtypes_for(plugin, fsdp_plan),
        context=plugin.forward_context,
        optimizers=module.configure_optimizers,
        foreach=False,
    )


def lora(case: Case) -> LightningModule:
    """Adapters are trained, everything else is frozen."""
    module = llama(case)
    adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"])
    return Trained(peft.get_peft_model(module.net, adapters), case.optimizer, case.options)


class Merging(ChunkMBSMixin, Trained):
    def merge_micro_batches(self, batches: list[Any]) -> Any:
        return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def merging(case: Case) -> LightningModule:
    return Merging(llama(case).net, case.optimizer, case.options)


class Manual(Trained):
    """Optimizes by hand, each micro-batch by itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def zoo(case: Case) -> LightningModule:
    sizes = {"t5": {"d_model": 64, "d_kv": 32, "d_ff": 192, "num_layers": case.layers}}
    sizes["bert"] = SIZES | {"num_hidden_layers": case.layers}
    sizes["qwen3_moe"] = sizes["mixtral"] = SIZES | {"num_hidden_layers": case.layers}
    return Trained(model_zoo.build(case.config, **sizes[case.config]), case.optimizer, case.options)
