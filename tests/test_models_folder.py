"""A model that is built on the meta device is filled from a Hugging Face folder and saved to one, shard by shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from examples.huggingface_folder.folder import load_weights, save_weights
from tests.model_zoo import build, strategy, window
from tests.one_window import Windowed, accumulate, assert_close, train_window
from tests.ranks import raises_on_ranks, run_on_ranks

SIZES = ([3, 1], [2, 2])


class FromFolder(Windowed):
    """Holds nothing until the strategy asks for its model; reads its weights when training starts."""

    def __init__(self, config: Any, folder: Path, result: Path) -> None:
        super().__init__(torch.nn.Identity())
        self.config, self.folder, self.result = config, folder, result
        self.built = False

    def configure_model(self) -> None:
        if not self.built:
            with torch.device("meta"):
                self.net = transformers.AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
            self.built = True

    def on_fit_start(self) -> None:
        load_weights(self.net, self.folder)

    def on_train_end(self) -> None:
        save_weights(self.net, self.result)


def numbers_read(reads: list[int]) -> Any:
    original = HuggingFaceStorageReader._process_read_request

    def counting(self: Any, file: Any, request: Any, planner: Any) -> None:
        reads.append(request.lengths.numel())
        original(self, file, request, planner)

    return patch.object(HuggingFaceStorageReader, "_process_read_request", counting)


def fill_train_save(name: str, folder: Path, result: Path) -> tuple[int, dict[str, Tensor]]:
    rank, reads = dist.get_rank(), []
    net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    data = [window(name, sizes, seed=r) for r, sizes in enumerate(SIZES)]
    with numbers_read(reads):
        module = train_window(FromFolder(net.config, folder, result), data[rank], strategy(name))
    assert module.report.chunks == 2 * sum(-(-size // 2) for size in SIZES[rank])
    assert_close(module.gradients, accumulate(net, data)[0])
    trained = {n: (p - 0.1 * p.grad).detach() for n, p in net.named_parameters()}  # as SGD does
    return sum(reads), trained


@pytest.mark.parametrize(("name", "config"), [("qwen3", {}), ("gpt2", {"tie_word_embeddings": True})])
def test_a_folder_fills_the_shards_and_the_trained_ones_make_a_folder(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    before = build(name, **config)
    before.to(torch.bfloat16).save_pretrained(tmp_path / "before", max_shard_size="5KB")
    assert len(list((tmp_path / "before").glob("*.safetensors"))) > 1
    results = run_on_ranks(2, fill_train_save, name, tmp_path / "before", tmp_path / "after")
    whole = sum(p.numel() for p in before.parameters())
    reads = [read for read, _ in results]
    assert sum(reads) == whole  # nothing is read twice
    assert max(reads) < 0.6 * whole
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32)
    assert_close(dict(after.named_parameters()), results[0][1])


def fill_with_another(folder: Path) -> None:
    config = build("qwen3", num_hidden_layers=3).config
    train_window(FromFolder(config, folder, folder), window("qwen3", [1]), strategy("qwen3"))


def test_what_the_folder_lacks_is_named(tmp_path: Path) -> None:
    build("qwen3").save_pretrained(tmp_path)
    for kind, message in raises_on_ranks(2, fill_with_another, tmp_path):
        assert kind == "KeyError"
        assert "model.layers.2" in message
        assert "tensors are not there" in message
