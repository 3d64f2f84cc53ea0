"""What the planner predicts for each setting beside what a step was seen to take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from lightning_chunkmbs.planner import Hardware, Planner
from tests import test_packed
from tests.models import chunked
from tests.planner_cases import (
    LAYERS,
    LONG,
    Case,
    Manual,
    frozen,
    llama,
    lora,
    merging,
    planner_of,
    tracked,
    zoo,
)
from tests.ranks import run_on_ranks

ADAPTED = {"apply_modules": ["net.base_model.model.model.layers.{*}"]}
PLANS = ("chunkmbs_plan", "recompute_plan", "activation_offload_plan")
SAVE = {"apply_modules": [LAYERS], "save_ops": ["aten.mm"]}
SOME = {"apply_modules": ["net.model.layers.{0-1}"]}
STREAM = {"apply_modules": [LAYERS], "stream_hidden_states": True}
DEEP = 10  # layers: most memory is in what all of them keep
WIDE = 2000  # tokens: most memory is in what follows the blocks


def fsdp(**plan: Any) -> dict[str, Any]:
    return {"fsdp_plan": plan}


def offload(**plan: Any) -> dict[str, Any]:
    return {"activation_offload_plan": {"apply_modules": [LAYERS], **plan}}


def side_by_side(most: int, **plans: Any) -> dict[str, Any]:
    return {"chunkmbs_plan": {"max_lockstep": most}, **plans}


# A setting, and what it does: chunks, gathers and reductions of a step.
CASES: dict[str, tuple[Case, tuple[int, int, int]]] = {
    "bf16-mixed": (Case(precision="bf16-mixed"), (12, 7, 4)),
    "bf16-mixed, wide": (Case(precision="bf16-mixed", vocabulary=WIDE), (12, 7, 4)),
    "bf16-true": (Case(precision="bf16-true", length=LONG), (12, 7, 4)),
    "bf16-true, wide": (Case(precision="bf16-true", vocabulary=WIDE), (12, 7, 4)),
    "reduced in bf16": (Case(precision="bf16-mixed", plans=fsdp(reduce_dtype="bfloat16")), (12, 7, 4)),
    "param_dtype": (Case(plans=fsdp(param_dtype="bfloat16", cast_forward_inputs=True)), (12, 7, 4)),
    "two copies on two ranks": (Case(plans=fsdp(replicate_size=2)), (12, 0, 0)),
    "two copies on four ranks": (Case(plans=fsdp(replicate_size=2), ranks=4), (12, 7, 4)),
    "nothing offloaded": (Case(plans={"enable_activation_offload": False}, length=LONG), (12, 7, 4)),
    "results kept": (Case(plans={"recompute_plan": SAVE}, layers=DEEP), (40, 21, 11)),
    "results kept on the device": (
        Case(plans={"recompute_plan": SAVE, "enable_activation_offload": False}, layers=DEEP),
        (40, 21, 11),
    ),
    "results kept, streaming": (
        Case(plans={"recompute_plan": SAVE, "activation_offload_plan": STREAM}, layers=6, length=LONG),
        (24, 13, 7),
    ),
    "two passes": (Case(plans=side_by_side(2), n=4, vocabulary=WIDE), (24, 14, 8)),
    "a short last pass": (Case(plans=side_by_side(2), n=3), (18, 14, 8)),
    "one at a time": (Case(plans=side_by_side(1), n=3, vocabulary=WIDE), (18, 21, 12)),
    "streaming in two passes": (Case(plans=side_by_side(2, activation_offload_plan=STREAM), n=4), (24, 14, 8)),
    "a limit of host memory": (Case(plans=offload(host_memory_gb=5e-5), layers=8, length=LONG), (32, 17, 9)),
    "a limit below one chunk": (Case(plans=offload(host_memory_gb=5e-5), length=LONG), (12, 7, 4)),
    "a limit, streaming": (
        Case(plans={"activation_offload_plan": STREAM | {"host_memory_gb": 1e-4}}, length=LONG),
        (12, 7, 4),
    ),
    "small ones stay": (Case(plans=offload(min_bytes=10**6), length=LONG), (12, 7, 4)),
    "all brought back ahead": (Case(plans=offload(prefetch_bytes=10**9), layers=8, length=LONG), (32, 17, 9)),
    "none brought back ahead": (Case(plans=offload(prefetch_bytes=0), length=LONG), (12, 7, 4)),
    "frozen parts": (Case(make=frozen), (12, 6, 3)),
    "adapters": (Case(make=lora, plans=dict.fromkeys(PLANS, ADAPTED), vocabulary=WIDE), (12, 7, 3)),
    "further groups": (Case(plans=fsdp(apply_modules=["net.lm_head", "net.model.embed_tokens"])), (12, 9, 6)),
    "nested groups": (Case(plans=fsdp(apply_modules=["net.model.layers.{*}.mlp"])), (12, 13, 7)),
    "none gathered ahead": (Case(plans=fsdp(forward_prefetch=0), layers=DEEP), (40, 21, 11)),
    "two gathered ahead": (Case(plans=fsdp(forward_prefetch=2), layers=DEEP), (40, 21, 11)),
    "blocks stay gathered": (Case(plans=fsdp(reshard_after_forward=False), layers=DEEP), (40, 11, 11)),
    "blocks stay gathered, one batch": (Case(plans=fsdp(reshard_after_forward=False), layers=DEEP, n=1), (20, 11, 11)),
    "merged": (Case(make=merging, vocabulary=WIDE), (12, 7, 4)),
    "merged in two passes": (Case(make=merging, plans=side_by_side(2), n=4, vocabulary=WIDE), (24, 14, 8)),
    "not cut": (Case(plans={"enable_chunk_mbs": False}), (6, 14, 8)),
    "one block not cut": (
        Case(plans={"recompute_plan": {"apply_modules": [LAYERS]}, "chunkmbs_plan": SOME}),
        (10, 7, 4),
    ),
    "one block not offloaded": (
        Case(plans={"recompute_plan": {"apply_modules": [LAYERS]}} | dict.fromkeys(PLANS[::2], SOME), length=LONG),
        (10, 7, 4),
    ),
    "two stacks": (Case(make=zoo, config="t5"), (24, 13, 7)),
    "experts": (Case(make=zoo, config="mixtral"), (12, 7, 4)),
    "SGD": (Case(optimizer="SGD", options={"lr": 0.1}), (12, 7, 4)),
    "momentum": (Case(optimizer="SGD", options={"lr": 0.1, "momentum": 0.9}), (12, 7, 4)),
    "foreach": (Case(options={"foreach": True}), (12, 7, 4)),
    "fused": (Case(options={"fused": True}), (12, 7, 4)),
    "a short last chunk": (Case(size=5, length=LONG), (18, 7, 4)),
    "a short last chunk, one batch": (Case(size=5, n=1, chunk_mbs=3, vocabulary=WIDE), (6, 7, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_predicted_within_a_tenth(name):
    case, did = CASES[name]
    needed = planner_of(case).bytes(case.chunk_mbs)
    found = run_on_ranks(case.ranks, tracked, case)
    for seen in found:
        assert (seen.report.chunks, seen.report.all_gathers, seen.report.reduce_scatters) == did
    assert needed.peak == pytest.approx(max(seen.device for seen in found), rel=0.1)
    assert needed.host == pytest.approx(max(seen.host for seen in found), rel=0.02)


def _changes_the_plan(name: str) -> bool:
    """Whether a case has a setting that a plan without it can be compared with."""
    case, _ = CASES[name]
    as_many_bytes = name in ("further groups", "nested groups")
    return bool(case.plans or case.precision != "32-true") and case.make not in (lora, merging) and not as_many_bytes


@pytest.mark.parametrize("name", filter(_changes_the_plan, CASES))
def test_each_setting_changes_the_plan(name):
    case, _ = CASES[name]
    without = replace(case, plans={}, precision="32-true")
    assert planner_of(case).bytes(case.chunk_mbs) != planner_of(without).bytes(case.chunk_mbs)


def test_offloaded_shards_are_on_the_host():
    case = Case(plans=fsdp(cpu_offload=True))
    ours, without = (planner_of(c).bytes(c.chunk_mbs) for c in (case, replace(case, plans={})))
    found = run_on_ranks(case.ranks, tracked, case)
    # On a CPU both are the same memory.
    assert without.peak == pytest.approx(max(seen.device for seen in found), rel=0.1)
    moved = ours.parameters + ours.gradients + ours.optimizer
    assert ours.host == without.host + moved
    for moment, nbytes in ours.peaks.items():
        assert 0 < without.peaks[moment] - nbytes <= moved + ours.optimizer_step
    assert ours.peaks["optimizer"] < ours.block  # batches alone


# -- what is said rather than counted ----------------------------------------------------------------------------------


def assumptions(case: Case) -> str:
    planner = planner_of(case)
    planner.plan(Hardware(devices=2, memory=2**30), case.chunk_mbs)
    return "\n".join(planner.assumptions)


def test_assumptions_are_said():
    save = {"apply_modules": [LAYERS], "save_ops": ["aten.mm", "aten._scaled_dot_product_efficient_attention"]}
    said = assumptions(Case(plans={"recompute_plan": save, **fsdp(compile_blocks=False)}))
    assert "results that save_ops keeps are computed twice" in said
    assert "run none of save_ops' aten._scaled_dot_product_efficient_attention" in said
    assert assumptions(Case()) == ""
    assert "a window of 2 micro-batches is merged into one" in assumptions(Case(make=merging))
    assert "compiled blocks" in assumptions(Case(plans=fsdp(compile_blocks=True)))


def packed_planner() -> Planner:
    plan = {"chunk_kwarg_names": ["position_embeddings"], "packed_kwarg_names": list(test_packed.PACKED)}
    plans = chunked(2, chunkmbs_plan={"apply_modules": ["model.layers.{*}"], **plan})._declared.plans_for(None)
    with torch.device("meta"):
        net = test_packed.qwen3()
    batch = test_packed.packed_batch([3, 5], 0)
    return Planner(net, plans, batch, step=lambda batch: net(**batch).loss, ranks=1)


def test_packed_sequences_are_refused():
    with pytest.raises(ValueError, match="depends on their lengths; model.layers.0 was given cu_seq_lens_q"):
        packed_planner()


def manual(case: Case) -> Manual:
    return Manual(llama(case).net, case.optimizer, case.options)


def test_manual_optimization_is_refused():
    with pytest.raises(ValueError, match="Manual does that itself. Give --batch example"):
        planner_of(Case(make=manual))


def split_over_ranks() -> None:
    case = Case()
    module = llama(case)
    layer = module.net.model.layers[0].mlp.up_proj
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tensor_parallel",))
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"split by tensor parallelism: net.model.layers.0.mlp.up_proj.weight"):
        Planner(module, case.strategy()._declared.plans_for(module), case.batch(0), ranks=1)


def test_modules_that_are_split_are_refused():
    run_on_ranks(2, split_over_ranks)


def test_a_step_that_takes_its_batch_apart_is_planned_for():
    case = Case()
    module = llama(case)
    step = lambda batch: module.net(labels=batch.pop("labels"), **batch).loss  # noqa: E731
    plans = case.strategy()._declared.plans_for(module)
    ours = Planner(module, plans, case.batch(0), step=step, ranks=2, micro_batches=2, foreach=False)
    assert ours.bytes(2).peaks["outside"] == planner_of(case).bytes(2).peaks["outside"]
