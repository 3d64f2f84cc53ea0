"""What each process of two nodes runs: ``python -m tests.node_job '{"out": ..., ...}'``."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_chunkmbs import failures
from tests.collectives import Collectives, count_collectives
from tests.mesh_models import CLIP, data_of
from tests.models import Loader, chunked, full, optimizer_for
from tests.one_window import Windowed, build

WINDOW = 2  # micro-batches
EPOCHS = 2
HOLD_AT = (1, 0)  # epoch and micro-batch before which a job waits


@dataclass
class Job:
    """One training; results and signs of progress are files in ``out``."""

    out: str
    num_nodes: int = 2
    devices: int = 1
    replicas: int = 1
    timeout: int = 200  # of the process group, in seconds
    hold: bool = False  # wait in the middle until there is a file "go"
    grace: float = failures._GRACE  # seconds to wait for the error of another rank

    def __str__(self) -> str:
        return json.dumps(asdict(self))


class OnNodes(Windowed):
    """Records what each optimizer step saw and communicated."""

    def __init__(self, job: Job, counted: Collectives) -> None:
        super().__init__(build())
        self.job, self.counted, self.out = job, counted, Path(job.out)
        self.norms: list[float] = []
        self.reports: list[Any] = []

    def train_dataloader(self) -> Loader:
        return Loader(data_of("replicas")[self.global_rank])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.job.hold and (self.current_epoch, batch_idx) == HOLD_AT:
            self.sign("waiting")
            wait_for(self.out / "go")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.norms.append(self.trainer.strategy.gradient_norm().item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_for(self)

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if (args[-1] + 1) % WINDOW == 0:
            self.reports.append(self.report)
            if (self.current_epoch, args[-1] + 1 - WINDOW) == HOLD_AT:
                self.sign("passed")

    def sign(self, name: str) -> None:
        (self.out / f"{name}-{self.global_rank}").touch()

    def result(self) -> dict[str, Any]:
        gathering = self.trainer.strategy._meshes.shard.get_group(-1)
        return {
            "parameters": {name: full(p).detach().clone() for name, p in self.net.named_parameters()},
            "norms": self.norms,
            "reports": self.reports,
            "counted": (self.counted.all_gathers, self.counted.reduce_scatters),
            "gathering": dist.get_process_group_ranks(gathering),
        }


def wait_for(*files: Path) -> None:
    end = time.monotonic() + 200
    while not all(file.exists() for file in files):
        if time.monotonic() > end:
            raise RuntimeError(f"nobody made all of {[file.name for file in files]}")
        time.sleep(0.02)


def meet(out: Path) -> None:
    """Wait until both nodes are here, since on a busy machine one may take longer to start than a short timeout."""
    node = os.environ.get("NODE_RANK") or os.environ["GROUP_RANK"]
    (out / f"started-{node}").touch()
    wait_for(out / "started-0", out / "started-1")


def main(job: Job) -> None:
    strategy = chunked(2, fsdp_plan={"replicate_size": job.replicas}, timeout=timedelta(seconds=job.timeout))
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="cpu",
        devices=job.devices,
        num_nodes=job.num_nodes,
        strategy=strategy,
        accumulate_grad_batches=WINDOW,
        max_epochs=EPOCHS,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        **dict.fromkeys(quiet, False),
    )
    meet(Path(job.out))
    with count_collectives() as counted, patch.object(failures, "_GRACE", job.grace):
        module = OnNodes(job, counted)
        trainer.fit(module)
    torch.save(module.result(), Path(job.out) / f"rank-{trainer.global_rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Job(**json.loads(sys.argv[1])))
