"""What the planner predicts beside what a step was seen to take."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from examples.finetune_lm.module import CausalLM
from lightning_chunkmbs import ChunkMBSStrategy
from lightning_chunkmbs.plan_command import main, size_in_bytes
from lightning_chunkmbs.planner import Planner
from lightning_chunkmbs.step_bytes import StepBytes
from lightning_chunkmbs.step_time import BlockWork, predict
from tests import model_zoo
from tests.models import Loader, make_trainer
from tests.ranks import run_on_ranks
from tests.storage_tracker import StorageTracker

RANKS = 2
LENGTH = 24
# Large enough for memory to be in tensors that grow with the model.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3},
    "gpt2": {"n_embd": 64, "n_layer": 3},
    "vit": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 3},
}


class Trained(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Quickstart(CausalLM):
    """The model of configs/quickstart_cpu.yaml without its schedule, which asks for a Trainer's data."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def module_of(name: str) -> LightningModule:
    return Quickstart() if name == "quickstart" else Trained(model_zoo.build(_model(name), **SIZES[_model(name)]))


def strategy_of(name: str, chunk_mbs: int) -> ChunkMBSStrategy:
    if name == "llama, streaming":
        arguments = model_zoo.init_args("llama")
        plan = arguments["chunkmbs_plan"] | {"chunk_mbs": chunk_mbs}
        offload = {"apply_modules": plan["apply_modules"], "stream_hidden_states": True}
        return ChunkMBSStrategy(**arguments | {"chunkmbs_plan": plan, "activation_offload_plan": offload})
    if name != "quickstart":
        return model_zoo.strategy(name, chunk_mbs=chunk_mbs)
    kwargs = ["position_embeddings", "position_ids", "attention_mask"]
    plan = {"apply_modules": ["model.layers.{*}"], "chunk_mbs": chunk_mbs, "chunk_kwarg_names": kwargs}
    return ChunkMBSStrategy(chunkmbs_plan=plan)  # type: ignore[arg-type]


def batch_of(name: str, size: int, seed: int) -> Any:
    if name == "quickstart":
        return torch.randint(256, (size, 128), dtype=torch.uint8)
    return model_zoo.batch(_model(name), size, LENGTH, seed)


def _model(name: str) -> str:
    return name.partition(",")[0]


def tracked(name: str, size: int, n: int, chunk_mbs: int) -> tuple[int, int, int]:
    """Bytes on the device and on the host at the peaks of three optimizer steps, and chunks of a block call."""
    data = [batch_of(name, size, seed) for seed in range(3 * n)]
    module, strategy = module_of(name), strategy_of(name, chunk_mbs)
    trainer = make_trainer(strategy, max_steps=3, accumulate_grad_batches=n)
    with StorageTracker() as tracker:
        trainer.fit(module, Loader(data))
    report = strategy.step_report
    assert report.offloaded_bytes > 0
    return tracker.peak, tracker.host_peak, report.chunks // report.blocks


def planner_of(name: str, size: int, n: int, chunk_mbs: int) -> Planner:
    with torch.device("meta"):
        module = module_of(name)
    plans = strategy_of(name, chunk_mbs)._declared.plans_for(module)
    batch = batch_of(name, size, 0)
    return Planner(
        module, plans, batch, ranks=RANKS, micro_batches=n, optimizers=module.configure_optimizers, foreach=False
    )


def predicted(name: str, size: int, n: int, chunk_mbs: int) -> StepBytes:
    planner = planner_of(name, size, n, chunk_mbs)
    assert planner.optimizer.assumed is None
    return planner.bytes(chunk_mbs)


CASES = [("quickstart", 8, 1, 1), ("llama", 4, 2, 2), ("gpt2", 8, 1, 8), ("gpt2", 8, 1, 1)]
CASES += [("vit", 16, 2, 4), ("qwen3_moe", 4, 2, 2), ("llama, streaming", 4, 1, 1)]
CASES += [("llama, streaming", 4, 3, 2)]


@pytest.mark.parametrize(("name", "size", "n", "chunk_mbs"), CASES)
def test_the_peak_is_predicted_within_a_tenth(name, size, n, chunk_mbs):
    needed = predicted(name, size, n, chunk_mbs)
    found = run_on_ranks(RANKS, tracked, name, size, n, chunk_mbs)
    assert found[0][2] == n * -(-size // chunk_mbs)
    assert needed.peak == pytest.approx(max(peak for peak, _, _ in found), rel=0.1)
    assert needed.host == max(host for _, host, _ in found)


def test_the_largest_number_of_samples_is_the_last_that_fits():
    planner = planner_of("quickstart", 4, 1, 1)
    peaks = {chunk_mbs: planner.bytes(chunk_mbs).peak for chunk_mbs in (1, 2, 3, 4)}
    assert sorted(peaks.values()) == list(peaks.values())
    assert planner.largest(peaks[3]) == 3
    assert planner.largest(peaks[3] - 1) == 2
    assert planner.largest(peaks[4]) == 4
    assert planner.largest(peaks[1] - 1) is None


# -- step time --------------------------------------------------------------------------------------------------------

BLOCKS = [BlockWork(forward_seconds=0.01, gathered_bytes=2e9, reduced_bytes=4e9)] * 3


def test_step_time_is_the_sum_of_what_does_not_overlap():
    # Half of the bytes come from the other rank: gathers of 1 s, reductions of 2 s, at 1 GB a second.
    time = predict(BLOCKS, micro_batches=4, ranks=2, link_bytes_per_second=1e9, overlap=False)
    assert time.compute == pytest.approx(4 * 3 * 0.04)
    assert time.chunkmbs_communication == pytest.approx(3 * (2 * 1 + 2))
    assert time.stock_communication == pytest.approx(4 * time.chunkmbs_communication)
    # Our gathers run beside computing, but for the first of a pass; so only the last block's computing shows.
    assert time.chunkmbs == pytest.approx((1 + 3) * 0.04 + time.chunkmbs_communication)
    assert time.stock == pytest.approx(time.compute + time.stock_communication)
    assert time.gain == pytest.approx(time.stock / time.chunkmbs - 1)


def test_communication_that_overlaps_costs_what_computation_does_not_hide():
    slow = predict(BLOCKS, micro_batches=4, ranks=2, link_bytes_per_second=1e9)
    assert slow.ratio == pytest.approx(1 / 4, rel=1e-2)  # the link takes longer than anything else
    assert slow.chunkmbs == pytest.approx(0.04 + slow.chunkmbs_communication)  # the last block of the forward pass
    fast = predict(BLOCKS, micro_batches=4, ranks=2, link_bytes_per_second=1e18)
    assert fast.ratio == pytest.approx(1)
    assert fast.chunkmbs == pytest.approx(fast.compute)


def test_the_first_gather_and_the_last_reduction_of_a_pass_are_exposed():
    blocks = [BlockWork(forward_seconds=4.0, gathered_bytes=2e9, reduced_bytes=4e9)] * 3
    time = predict(blocks, micro_batches=1, ranks=2, link_bytes_per_second=1e9)
    assert time.chunkmbs == time.stock == pytest.approx(time.compute + 1 + 1 + 2)


def test_what_a_gather_takes_of_the_processors_is_not_computed_in():
    blocks = [BlockWork(forward_seconds=4.0, gathered_bytes=2e9, reduced_bytes=4e9)] * 3
    times = [
        predict(blocks, micro_batches=2, ranks=2, link_bytes_per_second=1e9, overlap=False, gather_share=share)
        for share in (0.0, 0.5)
    ]
    # Two of three gathers of a second each have computation beside them, in forward and in backward.
    assert times[1].chunkmbs - times[0].chunkmbs == pytest.approx(2 * 2 * 0.5)
    assert times[1].stock == times[0].stock  # which gathers beside nothing


def test_offloading_slower_than_computation_costs_time():
    blocks = [BlockWork(forward_seconds=0.01, gathered_bytes=0, reduced_bytes=0, offloaded_bytes=1e9)]
    time = predict(blocks, micro_batches=2, ranks=2, link_bytes_per_second=1e9, pcie_bytes_per_second=1e9)
    assert time.chunkmbs == pytest.approx(2 + 2)  # out and in
    assert time.stock == pytest.approx(time.compute)


def test_what_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="link_bytes_per_second must be positive, but got 0"):
        predict(BLOCKS, micro_batches=1, ranks=2, link_bytes_per_second=0)


# -- the command ------------------------------------------------------------------------------------------------------

CONFIG = ["--config", "configs/quickstart_cpu.yaml", "--data.path=lightning_chunkmbs", "--devices", "2"]


def test_the_command_prints_json_for_a_batch_of_other_sizes(capsys):
    auto = "--trainer.strategy.init_args.chunkmbs_plan.chunk_mbs=auto"
    sizes = ["--micro_batch", "2", "--sequence_length", "32"]
    main([*CONFIG, "--device_memory", "80GiB", *sizes, auto, "--json"])
    made = json.loads(capsys.readouterr().out)
    assert made["micro_batch"] == made["chunk_mbs"] == made["largest"] == 2
    assert made["fits"] is True
    assert made["optimizer"]["assumed"] is None
    assert made["bytes"]["peak"] == max(made["bytes"]["peaks"].values())


def test_the_command_prints_a_table(capsys):
    main([*CONFIG, "--device_memory", "1MB", "--micro_batch", "2", "--sequence_length", "32"])
    printed = capsys.readouterr().out
    assert "does not fit; not even chunk_mbs: 1 does" in printed
    assert "usable, of 976.6 KiB" in printed
    assert "with stock accumulation of 2 micro-batches" in printed


def test_without_an_example_the_command_says_what_to_write():
    with pytest.raises(ValueError, match="CausalLM has none. Set it in __init__"):
        main([*CONFIG, "--device_memory", "80GiB", "--batch", "example"])


@pytest.mark.parametrize(("text", "nbytes"), [("80GiB", 80 * 2**30), ("1.5GB", 1_500_000_000), ("512", 512)])
def test_sizes_are_read_with_their_units(text, nbytes):
    assert size_in_bytes(text) == nbytes


# -- passes without gradients -----------------------------------------------------------------------------------------


class Taught(Trained):
    """Runs its blocks without gradients first."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.net(**batch).loss
        return super().training_step(batch, batch_idx) + 0 * target


def test_a_pass_without_gradients_is_not_planned_as_trained():
    plans = strategy_of("llama", 1)._declared.plans_for(nn.Module())
    peaks = []
    for make in (Trained, Taught):
        with torch.device("meta"):
            module = make(model_zoo.build("llama", **SIZES["llama"]))
        planner = Planner(module, plans, batch_of("llama", 4, 0), ranks=RANKS, micro_batches=2, foreach=False)
        peaks.append(planner.bytes(1).peak)
        assert len(planner.fake.calls) == (3 if make is Trained else 6)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.05)
