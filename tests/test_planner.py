"""What the planner predicts beside what a step was seen to take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from examples.finetune_lm.module import CausalLM
from lightning_chunkmbs import ChunkMBSStrategy
from lightning_chunkmbs.planner import Planner
from tests import model_zoo
from tests.models import Loader, make_trainer
from tests.one_window import Windowed
from tests.ranks import run_on_ranks
from tests.storage_tracker import StorageTracker

RANKS = 2
LENGTH = 24
# Large enough for memory to be in tensors that grow with the model.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3},
    "gpt2": {"n_embd": 64, "n_layer": 3},
    "bert": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
    "vit": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
}


class Trained(Windowed):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Quickstart(CausalLM):
    """The model of configs/quickstart_cpu.yaml without its schedule, which asks for a Trainer's data."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def module_of(name: str) -> LightningModule:
    return Quickstart() if name == "quickstart" else Trained(model_zoo.build(name, **SIZES[name]))


def strategy_of(name: str, chunk_mbs: int) -> ChunkMBSStrategy:
    if name != "quickstart":
        return model_zoo.strategy(name, chunk_mbs=chunk_mbs)
    kwargs = ["position_embeddings", "position_ids", "attention_mask"]
    plan = {"apply_modules": ["model.layers.{*}"], "chunk_mbs": chunk_mbs, "chunk_kwarg_names": kwargs}
    return ChunkMBSStrategy(chunkmbs_plan=plan)  # type: ignore[arg-type]


def batch_of(name: str, size: int, seed: int) -> Any:
    if name == "quickstart":
        return torch.randint(256, (size, 128), dtype=torch.uint8)
    return model_zoo.batch(name, size, LENGTH, seed)


def tracked(name: str, size: int, n: int, chunk_mbs: int) -> tuple[int, int, int]:
    """Bytes on the device and on the host at the peaks of three optimizer steps, and chunks of a block call."""
    data = [batch_of(name, size, seed) for seed in range(3 * n)]
    module, strategy = module_of(name), strategy_of(name, chunk_mbs)
    trainer = make_trainer(strategy, max_steps=3, accumulate_grad_batches=n)
    with StorageTracker() as tracker:
        module.to(torch.device("cpu")).requires_grad_()
        trainer.fit(module, Loader(data))
    report = strategy.step_report
    assert report.offloaded_bytes > 0
    return tracker.peak, tracker.host_peak, report.chunks // report.blocks


def predicted(name: str, size: int, n: int, chunk_mbs: int) -> Any:
    with torch.device("meta"):
        module = module_of(name)
    plans = strategy_of(name, chunk_mbs)._declared.plans_for(module)
    batch = batch_of(name, size, 0)
    planner = Planner(
        module, plans, batch, ranks=RANKS, micro_batches=n, optimizers=module.configure_optimizers, foreach=False
    )
    assert planner.optimizer.assumed is None
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())
    return planner.bytes(chunk_mbs)


@pytest.mark.parametrize(("size", "n", "chunk_mbs"), [(8, 1, 1), (4, 2, 2), (8, 1, 8)])
@pytest.mark.parametrize("name", ["quickstart", *SIZES])
def test_the_peak_is_predicted_within_a_tenth(name, size, n, chunk_mbs):
    needed = predicted(name, size, n, chunk_mbs)
    found = run_on_ranks(RANKS, tracked, name, size, n, chunk_mbs)
    peak = max(peak for peak, _, _ in found)
    host = max(host for _, host, _ in found)
    print(name, size, n, chunk_mbs, "predicted", needed.peak, "tracked", peak, f"{needed.peak / peak:.3f}", needed.host, host, needed.peaks)
    assert found[0][2] == n * -(-size // chunk_mbs)
    assert needed.peak == pytest.approx(peak, rel=0.1)
    assert needed.host == pytest.approx(host, rel=0.1)
