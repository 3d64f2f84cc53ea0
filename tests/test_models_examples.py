"""The examples on models: MiniLM's real weights gain on real text, and the large vocabulary's memory."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import AutoModel

from tests.test_examples import run
from tests.warm import python


def test_minilm_gains_on_real_text_and_is_saved_as_a_folder(tmp_path: Path) -> None:
    output = run(
        *(python(), "examples/huggingface_folder/train.py", f"--result={tmp_path / 'trained'}"),
        *("--steps=6", "--devices=1", "--batch-size=16", "--test-pairs=120"),
    )
    numbers = re.findall(r"after \d+ steps: right code found for ([\d.]+) of the sentences, loss ([\d.]+)", output)
    (found, before), (_, after) = [tuple(map(float, pair)) for pair in numbers]
    assert found > 0.2, output  # random weights find one in 120
    assert after < 0.97 * before, output
    assert "a step: 6 blocks, 12 chunks" in output  # 32 texts, 16 a chunk
    assert AutoModel.from_pretrained(tmp_path / "trained").config.num_hidden_layers == 6


def test_the_loss_of_a_large_vocabulary_needs_less_memory_without_the_logits() -> None:
    output = run(python(), "examples/large_vocabulary/train.py", "--batch=16")
    (logits,) = re.findall(r"logits of the batch in fp32 +(\d+) MB", output)
    rows = re.findall(r"^(.+?) +(\d+) MB +loss ([\d.]+) +gradient norm ([\d.]+) +8 chunks$", output, re.MULTILINE)
    peaks = {way: int(peak) for way, peak, _, _ in rows}
    assert len(rows) >= 2
    assert peaks.pop("logits") > 2 * int(logits)
    assert max(peaks.values()) < 1.2 * int(logits), output
    for column in (2, 3):
        values = [float(row[column]) for row in rows]
        assert max(values) - min(values) < 1e-4, output
