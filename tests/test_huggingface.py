"""Hugging Face models, called with their defaults, train and generate as without the strategy."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from lightning_chunkmbs import StepReport
from tests.models import Record, Trained, chunked, fit, train_by_hand
from tests.ranks import run_on_ranks

VOCABULARY = 31
LENGTH = 6
BLOCKS = 3
CHUNK = 2
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZES = {"hidden_size": 16, "num_hidden_layers": BLOCKS, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
KEYWORDS = ["position_embeddings", "attention_mask", "position_ids"]
DECODER = {"apply_modules": ["model.layers.{*}"], "chunk_kwarg_names": KEYWORDS}

# Their plans name modules as in the Hugging Face model, whatever attribute of the LightningModule holds it.
PLANS: dict[str, dict[str, Any]] = {
    "qwen3": DECODER,
    "qwen3_moe": DECODER,
    "llama": DECODER,
    "gpt2": {"apply_modules": ["transformer.h.{*}"], "chunk_arg_indexs": [0, 2], "chunk_kwarg_names": ["position_ids"]},
    "bert": {"apply_modules": ["bert.encoder.layer.{*}"], "chunk_arg_indexs": [0, 1]},
    "vit": {"apply_modules": ["vit.layers.{*}"]},
}
WITH_CACHE = ["qwen3", "qwen3_moe", "llama", "gpt2"]


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "gpt2":
        rates = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_layer=BLOCKS, n_head=2, **TOKENS, **rates)
        )
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **TOKENS, **NO_DROPOUT))
    if name == "vit":
        image = {"image_size": 8, "patch_size": 4, "num_labels": 5}
        return transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, **image, **NO_DROPOUT))
    heads = {"num_key_value_heads": 1, "head_dim": 8}
    if name == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **TOKENS, **heads, **experts))
    prefix = {"qwen3": "Qwen3", "llama": "Llama"}[name]
    config = getattr(transformers, f"{prefix}Config")(**SIZES, **TOKENS, **heads)
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


def batch(name: str, form: str = "plain", size: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """A batch with labels: without padding, padded at the right or left, or padded and with position ids of its own."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        pixels = torch.randn(size, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(5, (size,), generator=generator)}
    ids = torch.randint(1, VOCABULARY, (size, LENGTH), generator=generator)
    if form == "plain":
        return {"input_ids": ids, "labels": ids}
    lengths = torch.arange(size) % 3 + LENGTH - 2  # 4, 5, 6, 4, 5
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    if form != "right":
        mask = mask.flip(1)
    padded = {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if form == "positions":
        padded["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return padded


def strategy(name: str, **options: Any) -> Any:
    return chunked(CHUNK, chunkmbs_plan=PLANS[name], **options)


def train(name: str, forms: list[str]) -> list[tuple[StepReport, list[str]]]:
    rank, results = dist.get_rank(), []
    for form in forms:
        net = build(name)
        data = [[batch(name, form, seed=2 * r + step) for step in range(2)] for r in range(dist.get_world_size())]
        _, expected = train_by_hand(net, data, rank)
        module = Trained(deepcopy(net))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(module, data[rank], strategy(name))
        module.record.assert_close(expected)
        assert all(gradients.keys() == dict(net.named_parameters()).keys() for gradients in module.record.gradients)
        ours = [str(w.message) for w in caught if "lightning_chunkmbs" in w.filename]
        results.append((module.record.reports[-1], ours))
    return results


@pytest.mark.parametrize("name", PLANS)
def test_a_model_called_with_its_defaults_trains_as_the_plain_one(name):
    forms = {"vit": ["plain"], "bert": ["plain", "right"]}.get(name, ["plain", "right", "left", "positions"])
    for rank, results in enumerate(run_on_ranks(2, train, name, forms)):
        for report, messages in results:
            assert (report.blocks, report.chunks) == (BLOCKS, BLOCKS * 3)
            assert report.offloaded_bytes == report.reloaded_bytes > 0
            assert (report.all_gathers, report.reduce_scatters) == (2 * BLOCKS + 1, BLOCKS + 1)
            expects_warning = name in WITH_CACHE and rank == 0
            assert len(messages) == expects_warning, messages
            assert all("in training a block gets no cache" in message for message in messages)


def prompt(**more: Any) -> dict[str, Any]:
    ids = batch("qwen3", size=3, seed=9)["input_ids"][:, :3]
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options, **more}


class Generating(Trained):
    """Generates after every validation, with and without ``gathered()``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.generated: list[Tensor] = []
        self.generated_inside: list[Tensor] = []

    def on_validation_epoch_end(self) -> None:
        self.generated.append(generated(self.net))
        with self.trainer.strategy.gathered():
            self.generated_inside.append(generated(self.net))
            self.generated_inside.append(generated(self.net, use_cache=False))


def generated(net: nn.Module, **more: Any) -> Tensor:
    """Logits of every generated token."""
    net.eval()
    with torch.no_grad():
        return torch.stack(net.generate(**prompt(**more)).logits)


def train_and_generate(name: str) -> tuple[int, float]:
    rank = dist.get_rank()
    net = build(name)
    data = [[batch(name, seed=2 * r + step) for step in range(2)] for r in range(dist.get_world_size())]
    expected = [generated(deepcopy(net))]
    for steps in (1, 2):
        trained, record = train_by_hand(net, [one[:steps] for one in data], rank)
        expected.append(generated(trained))
    module = Generating(deepcopy(net))
    fit(module, data[rank], strategy(name), val_check_interval=1, num_sanity_val_steps=1)
    module.record.assert_close(record)
    for i, theirs in enumerate(expected):
        for ours in (module.generated[i], *module.generated_inside[2 * i : 2 * i + 2]):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert [r.all_gathers for r in module.record.reports] == [2 * BLOCKS + 1] * 2
    return len(module.generated), (expected[-1] - expected[0]).abs().max().item()


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_generation_in_validation_uses_the_weights_of_the_last_step(name):
    for validations, moved in run_on_ranks(2, train_and_generate, name):
        assert validations == 3
        assert moved > 1e-2  # else stale weights would go unseen


class Recording(Trained):
    """Keeps what the model records of its layers in a training step."""

    def __init__(self, net: nn.Module, kind: str) -> None:
        super().__init__(net)
        self.kind = kind

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.net(**batch, **{f"output_{self.kind}": True})
        self.recorded = [tensor.detach() for tensor in output[self.kind]]
        self.record.losses.append(output.loss.item())
        return output.loss


def compare_recorded(name: str, kind: str, size: int) -> tuple[int, int]:
    """Train a step in which the model records and compare; returns how many tensors and chunks there were."""
    rank = dist.get_rank()
    net = build(name)
    if kind == "attentions":
        net.set_attn_implementation("eager")
    data = [batch(name, "right", size=size, seed=r) for r in range(dist.get_world_size())]
    plain = deepcopy(net)
    outputs = [plain(**one, **{f"output_{kind}": True}) for one in data]
    torch.stack([output.loss for output in outputs]).mean().backward()
    expected = Record(losses=[outputs[rank].loss.item()])
    expected.add_gradients(plain)
    module = Recording(deepcopy(net), kind)
    fit(module, data[rank : rank + 1], strategy(name))
    module.record.assert_close(expected)
    for ours, theirs in zip(module.recorded, outputs[rank][kind], strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-6)
    return len(module.recorded), module.record.reports[0].chunks


@pytest.mark.parametrize("size", [CHUNK, 5], ids=["one chunk", "cut"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3", "hidden_states"),
        ("llama", "hidden_states"),
        ("gpt2", "hidden_states"),
        ("bert", "hidden_states"),
        ("qwen3", "attentions"),
        ("qwen3_moe", "router_logits"),  # which enter the loss
    ],
)
def test_what_a_model_records_of_its_layers_is_of_the_whole_batch(name, kind, size):
    results = run_on_ranks(2, compare_recorded, name, kind, size)
    recorded = BLOCKS + 1 if kind == "hidden_states" else BLOCKS
    assert results == [(recorded, BLOCKS * -(-size // CHUNK))] * 2
