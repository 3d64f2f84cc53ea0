"""One rank of a run that fails: ``python -m tests.failing_job raise|kill|shape RANK [GRACE]``."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_chunkmbs import failures
from tests.models import WIDTH, Stack, Trained, batches, chunked, fit

TIMEOUT = 60  # seconds of the process group


class Failing(Trained):
    """Ends on rank ``who`` in the second window of two micro-batches."""

    kind = ""
    who = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ends = batch_idx == 2 and dist.get_rank() == self.who
        if ends and self.kind == "shape":
            return self.net.layers[0](torch.ones(WIDTH)).sum()  # without the dimension that is cut
        loss = super().training_step(batch, batch_idx)
        if ends and self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if ends and self.kind == "raise":
            raise ArithmeticError("the cause")
        return loss


def main(kind: str, who: int, grace: float = failures._GRACE) -> None:
    """``grace``: seconds that the other rank waits for the cause."""
    torch.set_num_threads(1)
    module = Failing(Stack())
    module.kind, module.who = kind, who
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", timeout=timeout)
    strategy = chunked(1, batch_dim=int(kind == "shape"), timeout=timeout)
    with patch.object(failures, "_GRACE", grace):
        fit(module, batches([2] * 8), strategy, accumulate_grad_batches=2)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:]))
