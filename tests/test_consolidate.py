"""One file from a checkpoint: for Trainer, for a plain module, and for transformers."""

import os
import subprocess
import sys

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_chunkmbs.consolidate import consolidate
from tests.ranks import ROOT, run_on_ranks
from tests.strategy_models import Net, Sharding, Toy, apart, build, chunked, fit, loader, parameters, trainer_of
from tests.test_checkpoints import Scheduled


class Language(Toy):
    """A Hugging Face model as users hold one, with an embedding that is also the head."""

    def __init__(self):
        super().__init__()
        sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))

    def loss(self, batch):
        ids = (batch[0][..., 0].abs() * 5).long() % 11
        return self.model(input_ids=ids, labels=ids).loss


LLAMA = {"apply_modules": ["model.model.layers.{*}"], "chunk_mbs": 1}


def saved_both(kind, folder):
    for distributed, name in ((True, "sharded.ckpt"), (False, "whole.ckpt")):
        options = {"chunkmbs_plan": LLAMA} if kind is Language else {}
        module = build(kind)
        trainer = fit(module, chunked(save_distributed_checkpoint=distributed, **options), max_epochs=2)
        trainer.save_checkpoint(f"{folder}/{name}")
    return parameters(module)


def command(*arguments):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "lightning_chunkmbs.consolidate", *map(str, arguments)]
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False)


def inner(weights):
    return {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}


def same(found, expected):
    """Whether two nests agree in every key, its place, and every bit of the values."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


def resumed(kind, path, stock):
    module = kind()
    strategy = ModelParallelStrategy(2, 1) if stock else chunked()
    trainer_of(strategy, max_epochs=3).fit(module, loader(), ckpt_path=path)
    return module.seen[-1]


def test_everything_in_one_file_continues_as_the_shards_do(tmp_path):
    run_on_ranks(2, saved_both, Scheduled, str(tmp_path))
    one = tmp_path / "one.ckpt"
    consolidate(tmp_path / "sharded.ckpt", one)
    found, whole = torch.load(one, weights_only=True), torch.load(tmp_path / "whole.ckpt", weights_only=True)
    assert found.keys() == whole.keys()
    assert same(found["state_dict"], dict(whole["state_dict"]))
    (ours,), (numbered,) = found["optimizer_states"], whole["optimizer_states"]
    names = list(dict(Scheduled().named_parameters()))
    assert [names[number] for number in sorted(numbered["state"])] == names == list(ours["state"])
    for name, state in ours["state"].items():
        assert same(state, dict(numbered["state"][names.index(name)])), name
    expected = run_on_ranks(2, resumed, Scheduled, str(tmp_path / "sharded.ckpt"), False)[0]
    assert apart(run_on_ranks(2, resumed, Scheduled, str(one), False)[0], expected) == 0


def test_the_stock_strategy_continues_from_everything_in_one_file(tmp_path):
    run_on_ranks(2, saved_both, Toy, str(tmp_path))
    consolidate(tmp_path / "sharded.ckpt", tmp_path / "one.ckpt")
    expected = run_on_ranks(2, resumed, Toy, str(tmp_path / "sharded.ckpt"), False)[0]
    assert apart(run_on_ranks(2, resumed, Sharding, str(tmp_path / "one.ckpt"), True)[0], expected) < 2e-6


def test_one_line_gives_the_weights_of_a_plain_module(tmp_path):
    expected = inner(run_on_ranks(2, saved_both, Toy, str(tmp_path))[0])
    done = command(tmp_path / "sharded.ckpt", tmp_path / "sharded.pt", "--weights-of", "model")
    assert done.returncode == 0, done.stderr
    consolidate(tmp_path / "whole.ckpt", tmp_path / "whole.pt", weights_of="model")
    for file in (tmp_path / "sharded.pt", tmp_path / "whole.pt"):
        net = Net()
        net.load_state_dict(torch.load(file, weights_only=True), strict=True)
        assert apart(dict(net.state_dict()), expected) == 0
    consolidate(tmp_path / "sharded.ckpt", tmp_path / "all.pt", weights_of="")
    Toy().load_state_dict(torch.load(tmp_path / "all.pt", weights_only=True), strict=True)
    by_class = Toy.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    assert apart(inner(dict(by_class.state_dict())), expected) == 0


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_transformers_loads_the_file(name, tmp_path):
    expected = inner(run_on_ranks(2, saved_both, Language, str(tmp_path))[0])
    folder = tmp_path / "folder"
    consolidate(tmp_path / "sharded.ckpt", folder / name, weights_of="model")
    Language().model.config.save_pretrained(folder)
    model, about = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert apart(parameters(model), expected) == 0


def test_what_cannot_be_consolidated_is_said(tmp_path):
    torch.save({"state_dict": {"model.x": torch.zeros(1)}}, tmp_path / "some.ckpt")
    with pytest.raises(ValueError, match="no checkpoint at"):
        consolidate(tmp_path / "none.ckpt", tmp_path / "file.pt")
    with pytest.raises(ValueError, match="exists. Remove it"):
        consolidate(tmp_path / "some.ckpt", tmp_path / "some.ckpt")
    with pytest.raises(ValueError, match="--weights-of model"):
        consolidate(tmp_path / "some.ckpt", tmp_path / "file.safetensors")
    with pytest.raises(ValueError, match="no weights of 'encoder'"):
        consolidate(tmp_path / "some.ckpt", tmp_path / "file.pt", weights_of="encoder")
    assert not (tmp_path / "file.pt").exists()
