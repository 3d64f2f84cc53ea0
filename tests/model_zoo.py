"""The architectures of ``configs/models``, each in a small size, with ragged batches and the plan of its yaml file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor, nn

from lightning_chunkmbs import ChunkMBSStrategy

FOLDER = Path(__file__).resolve().parent.parent / "configs" / "models"
VOCABULARY = 31
IMAGE, VISION_START = 28, 29  # tokens
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.2}
DECODER = SIZES | TOKENS | {"num_key_value_heads": 1, "use_cache": False}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Blocks that each model runs in a step.
BLOCKS = dict.fromkeys(("qwen3", "llama", "gpt2", "bert", "vit", "qwen3_moe", "mixtral"), 2) | {
    "t5": 4,
    "qwen3_5_moe": 4,
}


def build(name: str, **config: Any) -> nn.Module:
    """A model in training mode without dropout; ``config`` changes its configuration."""
    torch.manual_seed(1)
    return _MAKERS[name](config).train()


def _llama(config: dict[str, Any]) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER | config))


def _qwen3(config: dict[str, Any]) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER | {"head_dim": 8} | config))


def _qwen3_moe(config: dict[str, Any]) -> nn.Module:
    experts = EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**DECODER | experts | config))


def _mixtral(config: dict[str, Any]) -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**DECODER | EXPERTS | {"num_local_experts": 4} | config)
    )


def _gpt2(config: dict[str, Any]) -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "use_cache": False}
    rates = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | TOKENS | rates | config))


def _bert(config: dict[str, Any]) -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES | TOKENS | NO_DROPOUT | config))


def _vit(config: dict[str, Any]) -> nn.Module:
    image = {"image_size": 8, "patch_size": 4, "num_labels": 5, "initializer_range": 0.2}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES | NO_DROPOUT | image | config))


def _t5(config: dict[str, Any]) -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2, "dropout_rate": 0.0}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes | tokens | {"relative_attention_num_buckets": 8, "use_cache": False} | config)
    )


def _qwen3_5_moe(config: dict[str, Any]) -> nn.Module:
    """One layer of linear attention, one of full attention, and a visual tower of two blocks."""
    text = DECODER | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    text |= dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 4)
    text |= dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads"], 2)
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text["shared_expert_intermediate_size"] = 16
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text["rope_parameters"] |= {"partial_rotary_factor": 1.0, "mrope_interleaved": True}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 2}
    vision |= {"out_hidden_size": 16, "num_position_embeddings": 16, "temporal_patch_size": 1}
    tokens = {"image_token_id": IMAGE, "video_token_id": IMAGE + 2, "vision_start_token_id": VISION_START}
    return transformers.Qwen3_5MoeForConditionalGeneration(
        transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision, **tokens, **config)
    )


_MAKERS = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
    "qwen3_5_moe": _qwen3_5_moe,
}


def init_args(name: str, attribute: str = "net") -> dict[str, Any]:
    """What the yaml file of an architecture passes to the strategy, for a module that holds it as ``attribute``."""
    config = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    arguments: dict[str, Any] = config["trainer"]["strategy"]["init_args"]
    plan = arguments["chunkmbs_plan"]
    if "lockstep_attributes" in plan:  # the one thing that depends on the attribute's name
        plan["lockstep_attributes"] = [n.replace("model.", f"{attribute}.", 1) for n in plan["lockstep_attributes"]]
    return arguments


def strategy(name: str, **plan: Any) -> ChunkMBSStrategy:
    """The strategy of an architecture's yaml file; ``plan`` changes fields of its ``chunkmbs_plan``."""
    arguments = init_args(name)
    return ChunkMBSStrategy(**arguments | {"chunkmbs_plan": arguments["chunkmbs_plan"] | plan})


def batch(name: str, size: int, length: int, seed: int) -> dict[str, Tensor]:
    """A batch with labels; samples of several lengths, padded at the right."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        pixels = torch.randn(size, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(5, (size,), generator=generator)}
    ids = torch.randint(1, 28, (size, length), generator=generator)
    mask = (torch.arange(length) < (torch.arange(size) % 3 + length - 2)[:, None]).long()
    padded = {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if name == "t5":
        labels = ids[:, : length - 1].masked_fill(mask[:, : length - 1] == 0, -100).flip(0)
        padded |= {"labels": labels, "decoder_attention_mask": (labels != -100).long()}
    return padded


def image_batch(sizes: list[int], length: int, seed: int) -> dict[str, Tensor]:
    """Text with as many images in each sample as ``sizes`` says; an image of 4 x 4 patches stands for 4 tokens."""
    made = batch("qwen3_5_moe", len(sizes), length + 5 * max(sizes), seed)
    ids, images = made["input_ids"], sum(sizes)
    for row, count in zip(ids, sizes, strict=True):
        for k in range(count):
            row[5 * k] = VISION_START
            row[5 * k + 1 : 5 * k + 5] = IMAGE
    pixels = torch.randn(images * 16, 3 * 2 * 2, generator=torch.Generator().manual_seed(seed))
    return made | {
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]] * images),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def window(name: str, sizes: list[int], seed: int = 0) -> list[dict[str, Tensor]]:
    """Micro-batches of ``sizes`` samples and of several lengths."""
    return [batch(name, size, 5 + i % 3, 10 * seed + i) for i, size in enumerate(sizes)]
