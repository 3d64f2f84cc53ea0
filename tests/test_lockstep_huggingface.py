"""Hugging Face models in lockstep: gradients bit for bit, and what a model records of its layers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from tests.models import chunked
from tests.one_window import Windowed, accumulate, assert_close, chunk_by_chunk, different, train_window
from tests.ranks import raises_on_ranks, run_on_ranks

VOCABULARY = 31
CHUNK = 2
IMAGE, VISION_START = 28, 29  # tokens
SIDES = ["position_embeddings", "attention_mask", "position_ids"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
COMMON = SIZES | {"vocab_size": VOCABULARY, "intermediate_size": 32, "pad_token_id": 0, "use_cache": False}
COMMON |= {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.2, "tie_word_embeddings": False}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON, head_dim=8)).train()
    if name == "qwen3_moe":
        experts = EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**COMMON, **experts, head_dim=8)).train()
    if name == "mixtral":
        experts = EXPERTS | {"num_local_experts": 4}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**COMMON, **experts)).train()
    return build_qwen3_5_moe().train()


def build_qwen3_5_moe() -> nn.Module:
    """One layer of linear attention, one of full attention, and a visual tower of two blocks."""
    linear = {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2}
    text = COMMON | linear | {"linear_num_value_heads": 2, "head_dim": 8, "layer_types": ["linear_attention"]}
    text["layer_types"] = ["linear_attention", "full_attention"]
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text["shared_expert_intermediate_size"] = 16
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text["rope_parameters"] |= {"partial_rotary_factor": 1.0, "mrope_interleaved": True}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 2}
    vision |= {"out_hidden_size": 16, "num_position_embeddings": 16, "temporal_patch_size": 1}
    config = transformers.Qwen3_5MoeConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=IMAGE + 2,
        vision_start_token_id=VISION_START,
        tie_word_embeddings=False,
    )
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


def plans(name: str, **plan: Any) -> Any:
    """The strategy with decoder layers cut; a visual tower is recomputed and offloaded."""
    if name != "qwen3_5_moe":
        modules = {"apply_modules": ["model.layers.{*}"], "chunk_kwarg_names": SIDES}
        return chunked(CHUNK, chunkmbs_plan=modules | plan)
    layers, tower = "model.language_model.layers.{*}", "model.visual.blocks.{*}"
    modules = {"apply_modules": [layers], "chunk_kwarg_names": SIDES}
    both = {"apply_modules": [tower, layers]}
    return chunked(CHUNK, chunkmbs_plan=modules | plan, recompute_plan=both, activation_offload_plan=both)


def text_batch(size: int, length: int, seed: int, padded: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(1, 28, (size, length), generator=torch.Generator().manual_seed(seed))
    if not padded:
        return {"input_ids": ids, "labels": ids}
    mask = (torch.arange(length) < (torch.arange(size) % 3 + length - 2)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def image_batch(size: int, length: int, seed: int) -> dict[str, Tensor]:
    """One image of 4 x 4 patches in each sample; it stands for 4 tokens."""
    batch = text_batch(size, length + 5, seed)
    batch["input_ids"][:, 1] = VISION_START
    batch["input_ids"][:, 2:6] = IMAGE
    pixels = torch.randn(size * 16, 3 * 2 * 2, generator=torch.Generator().manual_seed(seed))
    kinds = (batch["input_ids"] == IMAGE).int()
    return batch | {
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]] * size),
        "mm_token_type_ids": kinds,
    }


def window(kind: str, sizes: list[int], seed: int = 0) -> list[dict[str, Tensor]]:
    make = {"text": text_batch, "padded": lambda *a: text_batch(*a, padded=True), "image": image_batch}
    kinds = ["image", "text"] if kind == "mixed" else [kind]
    return [make[kinds[i % len(kinds)]](size, 6 + i % 3, 10 * seed + i) for i, size in enumerate(sizes)]


# -- gradients -------------------------------------------------------------------------------------------------------


def decoder_layers(net: nn.Module) -> nn.ModuleList:
    return getattr(net.model, "language_model", net.model).layers


def differing(name: str, kind: str, sizes: list[int]) -> tuple[list[str], int]:
    """Train a window; return which gradients differ from chunk after chunk, and how many there are."""
    net, data = build(name), window(kind, sizes)
    attributes = ["net.model.rope_deltas"] if kind in ("image", "mixed") else []
    module = train_window(deepcopy(net), data, plans(name, lockstep_attributes=attributes))
    assert len(module.seen.runs) == 1
    layers = len(decoder_layers(net))
    chunks = layers * sum(-(-size // CHUNK) for size in sizes)
    tower = sum("pixel_values" in batch for batch in data) * 2
    assert module.report.chunks == chunks + tower
    assert_close(module.gradients, accumulate(deepcopy(net), [data])[0])
    chunk_by_chunk(decoder_layers(net), CHUNK)
    expected, losses = accumulate(net, [data])
    assert [module.losses[i] for i in range(len(data))] == pytest.approx(losses[0], abs=1e-6)
    return sorted(different(module.gradients, expected)), len(expected)


@pytest.mark.parametrize("sizes", [[2, 2, 2], [2, 1, 2, 1], [4, 1, 5]], ids=["equal", "ragged", "ragged and cut"])
@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3", "text"), ("qwen3", "padded"), ("qwen3_5_moe", "text"), ("qwen3_5_moe", "padded")]
)
def test_gradients_are_bit_for_bit_those_of_micro_batches_one_after_the_other(name, kind, sizes):
    [(names, of)] = run_on_ranks(1, differing, name, kind, sizes)
    assert of > 20
    assert [n for n in names if "embed_tokens" not in n] == []


@pytest.mark.parametrize("kind", ["image", "mixed"])
def test_images_go_through_the_visual_tower_in_lockstep(kind):
    [(names, _)] = run_on_ranks(1, differing, "qwen3_5_moe", kind, [2, 1, 3, 2])
    outside_blocks = ("embed_tokens", "visual.patch_embed", "visual.pos_embed", "visual.merger")
    assert [n for n in names if not any(part in n for part in outside_blocks)] == []


def train_with_positions_mixed() -> None:
    train_window(build("qwen3_5_moe"), window("image", [2, 1]), plans("qwen3_5_moe"))


def test_an_attribute_that_the_model_assigns_deep_inside_is_named():
    [(kind, message)] = raises_on_ranks(1, train_with_positions_mixed)
    assert kind == "RuntimeError"
    assert "net.model.rope_deltas" in message
    assert "lockstep_attributes" in message


def images_on_one_rank() -> tuple[int, int, int]:
    rank = dist.get_rank()
    data = [window("mixed", [2, 1, 3, 2]), window("text", [1, 3, 2, 2], seed=1)]
    net = build("qwen3_5_moe")
    module = train_window(
        deepcopy(net), data[rank], plans("qwen3_5_moe", lockstep_attributes=["net.model.rope_deltas"])
    )
    assert_close(module.gradients, accumulate(net, data)[0])
    return module.report.all_gathers, module.report.reduce_scatters, len(module.seen.runs)


def test_images_on_one_rank_only():
    blocks = 4
    assert run_on_ranks(2, images_on_one_rank) == [(2 * blocks + 1, blocks + 1, 1)] * 2


# -- what a model records --------------------------------------------------------------------------------------------


class Recording(Windowed):
    """Keeps what the model records of its layers, for each micro-batch."""

    def __init__(self, net: nn.Module, kind: str) -> None:
        super().__init__(net)
        self.kind = kind
        self.recorded: dict[int, list[Tensor]] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.net(**batch, **{f"output_{self.kind}": True})
        self.losses[batch_idx] = output.loss.item()
        self.recorded[batch_idx] = [tensor.detach() for tensor in output[self.kind]]
        # A use of them besides the model's own.
        return output.loss + 0.1 * torch.stack([tensor.square().mean() for tensor in output[self.kind]]).sum()


def compare_recorded(name: str, kind: str, form: str, sizes: list[int]) -> tuple[int, int, int]:
    """Train a window in which the model records; returns how much there was, the runs of autograd and the chunks."""
    rank, net = dist.get_rank(), build(name)
    data = [window(form, sizes, seed=r) for r in range(dist.get_world_size())]
    if kind == "attentions":
        net.set_attn_implementation("eager")
    plain = Recording(deepcopy(net), kind)
    for r, batches in enumerate(data):
        for i, batch in enumerate(batches):
            loss = plain.training_step(batch, i if r == rank else -1)
            (loss / len(sizes) / len(data)).backward()
    module = train_window(Recording(deepcopy(net), kind), data[rank], plans(name))
    assert_close(module.gradients, {name: p.grad for name, p in plain.net.named_parameters() if p.grad is not None})
    for i in range(len(sizes)):
        assert module.losses[i] == pytest.approx(plain.losses[i], abs=1e-6)
        for ours, theirs in zip(module.recorded[i], plain.recorded[i], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert len(module.seen.runs) == 1
    return len(module.recorded[0]), module.report.all_gathers, module.report.chunks


@pytest.mark.parametrize(("form", "sizes"), [("text", [2, 2, 1]), ("padded", [5, 1, 3])], ids=["whole", "padded, cut"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3_moe", "router_logits"),
        ("mixtral", "router_logits"),
        ("qwen3_moe", "hidden_states"),
        ("qwen3", "hidden_states"),
        ("qwen3", "attentions"),
    ],
)
def test_what_a_model_records_is_of_the_micro_batch_and_carries_gradients(name, kind, sizes, form):
    results = run_on_ranks(2, compare_recorded, name, kind, form, sizes)
    recorded = SIZES["num_hidden_layers"] + (kind == "hidden_states")
    assert results == [(recorded, 5, 2 * sum(-(-size // CHUNK) for size in sizes))] * 2
