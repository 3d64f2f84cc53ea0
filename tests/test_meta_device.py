"""Modules built on the meta device, filled after sharding."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_chunkmbs import ChunkMBSMixin
from tests.ranks import raises_on_ranks, run_on_ranks
from tests.strategy_models import (
    LAYERS,
    Net,
    Toy,
    all_sharded,
    apart,
    build,
    chunked,
    fit,
    live_bytes,
    loader,
    parameters,
    train_plainly,
)


class Late(Toy):
    """Builds its model on the meta device, once."""

    def __init__(self, make=Net):
        super().__init__()
        self.model = None
        self.make = make

    def configure_model(self):
        if self.model is None:
            with torch.device("meta"):
                self.model = self.make()


class LateByTrainer(Late):
    def configure_model(self):
        if self.model is None:
            with self.trainer.init_module(empty_init=True):
                self.model = self.make()
            assert self.model.head.weight.is_meta


class LateWithMixin(ChunkMBSMixin, Late):
    chunkmbs_plan = {"apply_modules": [LAYERS]}  # noqa: RUF012


class Own(nn.Module):
    """A parameter and buffers that its own reset_parameters fills; one more buffer from outside the meta device."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))
        self.register_buffer("shift", torch.empty(8))
        self.register_buffer("steps", torch.empty((), dtype=torch.long), persistent=False)
        self.register_buffer("kept", torch.ones(8, device="cpu"))

    def reset_parameters(self):
        nn.init.normal_(self.weight)
        self.shift.fill_(0.25)
        self.steps.zero_()

    def forward(self, x):
        return x * self.weight + self.shift * self.kept


class WithOwn(Net):
    def __init__(self):
        super().__init__()
        self.norm = Own()


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))
        self.register_buffer("table", torch.empty(4, dtype=torch.long))

    def forward(self, x):
        return x * self.weight


class WithForgetful(Net):
    def __init__(self):
        super().__init__()
        self.norm = Forgetful()
        self.layers[1].extra = Forgetful()


def filled(kind, make):
    module = kind(make)
    probe = InitialValues(module)
    trainer = fit(
        module, "chunkmbs" if kind is LateWithMixin else chunked(), max_epochs=2, callbacks=[probe.callback()]
    )
    assert all_sharded(module)
    assert not any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    for name, value in probe.values.items():
        assert value.isfinite().all(), name
    for name in ("model.embed.weight", "model.layers.0.up.weight", "model.layers.2.down.weight"):
        first, second = probe.values[name].chunk(2)
        assert (first - second).abs().min() > 0, f"both ranks drew the same values for {name}"
    # kaiming_uniform_ of nn.Linear(8, 16)
    assert probe.values["model.layers.0.up.weight"].abs().max() <= 8**-0.5
    assert apart(parameters(module), probe.values) > 1e-3
    assert all(seen.keys() == probe.values.keys() for seen in module.seen)
    assert trainer.strategy.step_report.chunks == 12
    assert live_bytes(trainer) == 0
    if make is WithOwn:
        assert module.model.norm.shift.tolist() == [0.25] * 8
        assert module.model.norm.steps == 0
        assert module.model.norm.kept.tolist() == [1.0] * 8
    before = parameters(module)
    trainer.validate(module, loader(), verbose=False)
    assert apart(parameters(module), before) == 0, "filled twice"


class InitialValues:
    def __init__(self, module):
        self.module = module

    def callback(self):
        return LambdaCallback(on_train_start=lambda *_: setattr(self, "values", parameters(self.module)))


@pytest.mark.parametrize(
    ("kind", "make"),
    [(Late, Net), (LateByTrainer, Net), (LateWithMixin, Net), (Late, WithOwn), (LateByTrainer, WithOwn)],
)
def test_a_module_on_the_meta_device_is_filled_shard_by_shard(kind, make):
    run_on_ranks(2, filled, kind, make)


def not_filled():
    fit(Late(WithForgetful))


def test_what_stays_uninitialised_is_listed_on_every_rank():
    names = ["model.layers.1.extra.weight", "model.norm.weight", "model.layers.1.extra.table", "model.norm.table"]
    for kind, message in raises_on_ranks(2, not_filled):
        assert kind == "RuntimeError"
        assert "these stayed uninitialised: " + ", ".join(names) in message
        assert "reset_parameters()" in message


def partly_meta():
    """Only the last block is on the meta device; the rest keeps the values it has."""
    module, plain = build(), build()
    module.model.layers[2] = module.model.layers[2].to("meta")
    probe = InitialValues(module)
    fit(module, callbacks=[probe.callback()])
    kept = {name: value for name, value in parameters(plain).items() if "layers.2" not in name}
    assert apart({name: probe.values[name] for name in kept}, kept) == 0
    assert all(value.isfinite().all() for value in parameters(module).values())


def test_what_is_not_on_the_meta_device_keeps_its_values():
    run_on_ranks(2, partly_meta)


# -- Hugging Face ------------------------------------------------------------------------------------------------------


class Causal(Toy):
    """A language model with tied embeddings."""

    def __init__(self, on_meta):
        super().__init__()
        self.on_meta = on_meta
        self.model = None if on_meta else self.make()

    def make(self):
        from transformers import Qwen3Config, Qwen3ForCausalLM

        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
        return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, use_cache=False, initializer_range=0.02))

    def configure_model(self):
        if self.model is None:
            with self.trainer.init_module(empty_init=True):
                self.model = self.make()

    def loss(self, batch):
        ids = (batch[0][..., 0].abs() * 10).long() % 32
        return self.model(input_ids=ids, labels=ids).loss


HF_PLAN = {"apply_modules": ["model.layers.{*}"], "chunk_kwarg_names": ["attention_mask", "position_ids"]}


def hugging_face():
    module = Causal(on_meta=True)
    probe = InitialValues(module)
    trainer = fit(module, chunked(chunkmbs_plan=HF_PLAN), callbacks=[probe.callback()])
    model = module.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, DTensor)
    held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(module.parameters()))
    assert {id(p) for p in held} == {id(p) for p in module.parameters()}
    table = probe.values["model.model.embed_tokens.weight"]
    assert 0.015 < table.std() < 0.025  # initializer_range
    first, second = table.chunk(2)
    assert (first != second).all()
    assert probe.values["model.model.layers.0.input_layernorm.weight"].tolist() == [1.0] * 16
    # What it computes is what a model built with these values computes.
    plain = Causal(on_meta=False)
    plain.load_state_dict(probe.values, strict=False)
    train_plainly(plain)
    assert max(map(apart, module.seen, plain.seen)) < 1e-6
    assert trainer.strategy.step_report.chunks == 8


def test_a_hugging_face_model_is_filled_by_its_init_weights():
    run_on_ranks(2, hugging_face)
