"""Random networks trained under the strategy, beside plain torch: gradients, losses, parameters.

::

    python -m tests.fuzz --count 500 --first 0      # make fuzz COUNT=500 FIRST=0
    python -m tests.fuzz --count 1 --first 17       # one case again

A case is all in its seed: the network, the data, the plans, the number of ranks.
"""

from __future__ import annotations

import argparse
import random
import sys
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_chunkmbs import ChunkMBSStrategy, StepReport
from tests.fuzz_models import BATCH_DIMS, LONGEST, SIDES, VOCABULARY, Net, NetSpec, draw_net
from tests.models import Loader, full, make_trainer
from tests.ranks import RankFailure, run_on_ranks, stop_all

SAVED = [["aten.addmm"], ["aten.tanh", "aten.mm"], ["aten._scaled_dot_product_flash_attention_for_cpu"]]
RATE = 0.02  # of learning
TOLERANCE = 2e-5
FRESH_RANKS = 100  # cases after which ranks are started anew: they keep the process groups of every case


@dataclass(frozen=True)
class Case:
    """What a seed stands for.

    Attributes:
        seed: of everything.
        ranks: data-parallel ranks.
        net: the network.
        shapes: for each rank and micro-batch of its epoch samples, length, and whether it does what only some do.
        n: ``accumulate_grad_batches``.
        options: of the strategy.
    """

    seed: int
    ranks: int
    net: NetSpec
    shapes: list[list[tuple[int, int, bool]]]
    n: int
    options: dict[str, Any]


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    ranks, net, n = rng.choice([1, 1, 1, 2]), draw_net(rng), rng.randint(1, 5)
    batches = n * rng.randint(1, 2) - (rng.randrange(n) if rng.random() < 0.3 else 0)  # the last window may be short
    shapes = [
        [(rng.randint(1, 5), rng.randint(2, LONGEST), rng.random() < 0.5) for _ in range(batches)] for _ in range(ranks)
    ]
    return Case(seed, ranks, net, shapes, n, _draw_options(rng, net))


def _draw_options(rng: random.Random, net: NetSpec) -> dict[str, Any]:
    stacks = [f"net.stack_{i}.{{*}}" for i in range(len(net.stacks))]
    cut = stacks if rng.random() < 0.8 else stacks[:1]
    plan = {
        "apply_modules": cut,
        "chunk_mbs": rng.randint(1, 3),
        "batch_dim": net.batch_dim,
        "chunk_arg_indexs": [0, 1],
        # Declared keywords that no block receives are an error.
        "chunk_kwarg_names": [s for s in SIDES if s != "shared"] if any(op.sides for op in net.program) else [],
        "batch_dims": BATCH_DIMS,
        "max_lockstep": rng.choice([None, None, None, 1, 2, 3]),
    }
    further = ["net.norm"] if rng.random() < 0.2 else []
    options = {
        "chunkmbs_plan": plan,
        "recompute_plan": {"apply_modules": stacks, "save_ops": rng.choice([[], [], *SAVED])},
        "enable_activation_offload": rng.random() < 0.75,
        "fsdp_plan": {
            "apply_modules": further,
            "reshard_after_forward": rng.random() < 0.8,
            "forward_prefetch": rng.randint(0, 2),
        },
    }
    if options["enable_activation_offload"]:
        options["activation_offload_plan"] = {
            "apply_modules": stacks,
            "stream_hidden_states": rng.random() < 0.5,
            "host_memory_gb": rng.choice([None, None, 1e-6]),
            "min_bytes": rng.choice([0, 0, 500]),
            "prefetch_bytes": rng.choice([None, 0, 4000]),
        }
    return options


def data_of(case: Case) -> list[list[tuple[Tensor, bool]]]:
    """Return each rank's micro-batches."""
    generator = torch.Generator().manual_seed(case.seed)
    return [
        [(torch.randint(VOCABULARY, (size, length), generator=generator), only) for size, length, only in shapes]
        for shapes in case.shapes
    ]


class Fuzzed(LightningModule):
    """Trains a network and records every optimizer step."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.losses: dict[int, float] = {}
        self.gradients: list[dict[str, Tensor]] = []
        self.reports: list[StepReport] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(*batch)
        self.losses[batch_idx] = loss.item()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients(self.net))

    def on_train_batch_end(self, *_: Any) -> None:
        if len(self.reports) < len(self.gradients):
            self.reports.append(self.trainer.strategy.step_report)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def gradients(net: Net) -> dict[str, Tensor]:
    """Return the gradients of all trained parameters, zeros where there is none."""
    trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    return {name: torch.zeros(p.shape) if p.grad is None else full(p.grad).clone() for name, p in trained}


def train_plainly(net: Net, case: Case) -> Fuzzed:
    """The oracle: one process, whole batches, one micro-batch after the other."""
    module, data = Fuzzed(net), data_of(case)
    optimizer = module.configure_optimizers()
    for start in range(0, len(data[0]), case.n):
        optimizer.zero_grad()
        for rank, batches in enumerate(data):
            for i, batch in enumerate(batches[start : start + case.n], start):
                loss = net(*batch)
                (loss / case.n / case.ranks).backward()
                if rank == (dist.get_rank() if dist.is_initialized() else 0):
                    module.losses[i] = loss.item()
        module.gradients.append(gradients(net))
        optimizer.step()
    return module


def check(seed: int) -> StepReport:
    """Run the case of ``seed`` on this rank; return the last step's report.

    Raises:
        AssertionError: something differs from plain torch, or chunking was not engaged.
    """
    case = draw(seed)
    torch.manual_seed(seed)
    net = Net(case.net)
    plain, ours = train_plainly(deepcopy(net), case), Fuzzed(net)
    data = data_of(case)[dist.get_rank()]
    trainer = make_trainer(ChunkMBSStrategy(**case.options), accumulate_grad_batches=case.n)
    trainer.fit(ours, Loader(data))
    check_engaged(case, ours)
    for step, (found, expected) in enumerate(zip(ours.gradients, plain.gradients, strict=True)):
        check_close(f"step {step}, gradient of", found, expected)
    check_close("loss of micro-batch", as_tensors(ours.losses), as_tensors(plain.losses))
    after = [{name: full(p).detach() for name, p in m.net.named_parameters()} for m in (ours, plain)]
    check_close("after training", *after)
    return ours.reports[-1]


def as_tensors(losses: dict[int, float]) -> dict[str, Tensor]:
    return {str(i): torch.tensor(loss) for i, loss in losses.items()}


def check_close(what: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), f"{what} {found.keys() ^ expected.keys()}"
    scale = max(1.0, *(t.abs().max().item() for t in expected.values()))
    for name, value in expected.items():
        difference = (found[name] - value).abs().max().item()
        assert difference <= TOLERANCE * scale, f"{what} {name}: {difference:.1e} of {scale:.1e}"  # NaN is not


def check_engaged(case: Case, module: Fuzzed) -> None:
    """Every step ran the chunks that its micro-batches have, and gathered each block call at most twice."""
    shapes = case.shapes[dist.get_rank()]
    windows = [shapes[i : i + case.n] for i in range(0, len(shapes), case.n)]
    assert len(module.reports) == len(windows) == len(module.gradients)
    for report, window in zip(module.reports, windows, strict=True):
        assert report.chunks == sum(chunks_of(case, *shape) for shape in window), (report, window)
        calls = len([op for op in case.net.program if op.kind == "call"]) + case.net.repeated
        most = case.options["chunkmbs_plan"]["max_lockstep"] or len(window)
        passes = -(-len(window) // most)
        straight = not any(op.only_some for op in case.net.program)
        assert not straight or report.blocks == passes * calls, (report, passes, calls)
        if case.ranks > 1:
            check_collectives(case, report, passes, calls)


def check_collectives(case: Case, report: StepReport, passes: int, calls: int) -> None:
    further = len(case.options["fsdp_plan"]["apply_modules"])
    without = len([op for op in case.net.program if op.kind == "no_grad"])
    blocks = len({(op.stack, op.block) for op in case.net.program if op.kind in ("call", "no_grad")})
    if not any(op.only_some for op in case.net.program):
        most = passes * (2 * calls + without + blocks + 2 * further + 2)
        assert 0 < report.all_gathers <= most, (report, most)
    assert report.reduce_scatters > 0, report


def chunks_of(case: Case, size: int, length: int, only: bool) -> int:
    """Return the chunks of all block calls with gradients of a micro-batch."""
    plan = case.options["chunkmbs_plan"]
    ops = [op for op in case.net.program if op.kind == "call" and (only or not op.only_some)]
    stacks = [op.stack for op in ops] + [0] * case.net.repeated
    cut = [f"net.stack_{stack}.{{*}}" in plan["apply_modules"] for stack in stacks]
    return sum(-(-size // plan["chunk_mbs"]) if c else 1 for c in cut)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="cases to run")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    args = parser.parse_args()
    failed = 0
    for done, seed in enumerate(range(args.first, args.first + args.count), 1):
        try:
            run_on_ranks(draw(seed).ranks, check, seed, timeout=60)
        except RankFailure as error:
            failed += 1
            print(f"{error}\ncase {seed} failed: {draw(seed)}\nonce more: make fuzz COUNT=1 FIRST={seed}", flush=True)
        if done % FRESH_RANKS == 0:
            print(f"{done} cases, {failed} failed", flush=True)
            stop_all()
    print(f"{args.count} cases from seed {args.first}, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    # By its real name, by which ranks import what they are to run.
    from tests.fuzz import main as fuzz

    sys.exit(fuzz())
