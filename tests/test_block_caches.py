"""What models bring to their blocks: caches of keys and values, and their own gradient checkpointing."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lightning_chunkmbs.arguments import CutRule
from tests.chunking import (
    NAME,
    backward,
    caught_warnings,
    chunk,
    chunk_layers,
    count_calls,
    gradients,
    leaf,
    make_twins,
    max_error,
    tiny_qwen3,
)

# -- caches ----------------------------------------------------------------------------------------------------------


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def forward(
        self,
        x: Tensor,
        past_key_values: Any = None,
        layer_past: Any = None,
        cache: Any = None,
        use_cache: bool | None = None,
    ) -> Tensor:
        caches = {"past_key_values": past_key_values, "layer_past": layer_past, "cache": cache}
        self.calls.append({"b": len(x), "use_cache": use_cache, **caches})
        return x * 2


CACHES = ["past_key_values", "layer_past", "cache"]


def _call_with_cache(block: nn.Module, name: str, cache: Any, positional: bool, **kwargs: Any) -> None:
    if positional:
        block(leaf(3, 2), *[None] * CACHES.index(name), cache, **kwargs)
    else:
        block(leaf(3, 2), **{name: cache}, **kwargs)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("positional", [False, True])
def test_in_training_a_cache_is_dropped_with_one_warning(name: str, positional: bool) -> None:
    block = WithCache()
    chunk(block, rule=CutRule(1))
    with caught_warnings() as messages:
        for _ in range(2):
            _call_with_cache(block, name, DynamicCache(), positional, use_cache=True)
    assert len(block.calls) == 6
    assert all(call[cache] is None for call in block.calls for cache in CACHES)
    assert not any(call["use_cache"] for call in block.calls)
    (message,) = messages
    assert re.search(rf"{re.escape(NAME)}: in training .*no cache.*use_cache=False", message)


@pytest.mark.parametrize("positional", [False, True])
def test_use_cache_alone_is_switched_off_with_one_warning(positional: bool) -> None:
    block = WithCache()
    chunk(block, rule=CutRule(1))
    with caught_warnings() as messages:
        for _ in range(2):
            block(leaf(3, 2), None, None, None, True) if positional else block(leaf(3, 2), use_cache=True)
    assert [call["use_cache"] for call in block.calls] == [False] * 6
    assert len(messages) == 1


def test_a_cache_switched_off_already_warns_of_nothing() -> None:
    block = WithCache()
    chunk(block, rule=CutRule(1))
    with caught_warnings() as messages:
        block(leaf(3, 2), past_key_values=None, use_cache=False)
    assert messages == []


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("positional", [False, True])
def test_without_grad_a_cache_is_kept_and_the_call_stays_whole(name: str, positional: bool) -> None:
    block, cache = WithCache(), DynamicCache()
    chunk(block, rule=CutRule(1))
    with torch.no_grad(), caught_warnings() as messages:
        _call_with_cache(block, name, cache, positional, use_cache=True)
        block(leaf(3, 2), use_cache=True)
    assert [(call["b"], call["use_cache"]) for call in block.calls] == [(3, True)] + [(1, True)] * 3
    assert block.calls[0][name] is cache
    assert messages == []


def _rope(s: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(s)[None, :, None] / torch.arange(1, 5)
    return angles.cos(), angles.sin()


def test_a_decoder_layer_with_a_real_cache() -> None:
    rule = {"kwarg_names": ("position_embeddings",), "chunk_mbs": 2}
    twins, x, cache = make_twins(tiny_qwen3().model.layers[0], **rule), leaf(3, 5, 16), DynamicCache()
    with pytest.warns(UserWarning, match="cache"):
        backward(twins.block(x, cache=cache, use_cache=True, position_embeddings=_rope(5)))
    backward(twins.plain(x, position_embeddings=_rope(5)))
    assert twins.counter.take().chunks == 2
    assert cache.get_seq_length() == 0
    assert max_error(gradients(twins.block), gradients(twins.plain)) < 1e-6
    theirs = DynamicCache()
    with torch.no_grad():
        for _ in range(2):
            ours = twins.block(x, cache=cache, use_cache=True, position_embeddings=_rope(5))
            assert torch.equal(ours, twins.plain(x, cache=theirs, use_cache=True, position_embeddings=_rope(5)))
    assert cache.get_seq_length() == theirs.get_seq_length() == 10


# -- the model's own gradient checkpointing --------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_models_own_checkpointing_does_not_recompute_twice(when: str) -> None:
    model = tiny_qwen3()
    with caught_warnings() as messages:
        if when == "before":
            model.gradient_checkpointing_enable()
        counter = chunk_layers(model)
        if when == "after":
            model.gradient_checkpointing_enable()
        calls = [count_calls(layer.self_attn) for layer in model.model.layers]
        model(torch.arange(12).view(3, 4), use_cache=False).logits.sum().backward()
    assert [count() for count in calls] == [6, 6]
    assert counter.take().chunks == 6
    ours = [message for message in messages if "recompute_plan" in message]
    assert len(ours) == 1
    assert re.search(r"model\.layers\.0: .*gradient checkpointing.*gradient_checkpointing_enable\(\)", ours[0])


@pytest.mark.parametrize("chunk_mbs", [1, 2])
def test_a_model_called_with_its_defaults_trains(chunk_mbs: int) -> None:
    model, plain = tiny_qwen3(), tiny_qwen3()
    counter = chunk_layers(model, chunk_mbs)
    ids = torch.randint(32, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids).index_put((torch.tensor([1]), torch.tensor([0])), torch.tensor(0))
    assert model.config.use_cache
    with caught_warnings() as messages:
        output = model(input_ids=ids, attention_mask=mask, labels=ids)
        output.loss.backward()
    theirs = plain(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False)
    theirs.loss.backward()
    assert counter.take().chunks == 2 * -(-3 // chunk_mbs)
    assert output.loss.item() == pytest.approx(theirs.loss.item(), abs=1e-6)
    assert max_error(gradients(model), gradients(plain)) < 1e-6
    assert len([message for message in messages if "no cache" in message]) == 1


def test_a_model_generates_with_its_cache() -> None:
    model, plain = tiny_qwen3().eval(), tiny_qwen3().eval()
    chunk_layers(model)
    lengths: list[int] = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda _m, args, _out: lengths.append(args[0].shape[:2])
    )
    ids = torch.randint(32, (3, 6), generator=torch.Generator().manual_seed(0))
    ours, theirs = (m.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (model, plain))
    assert torch.equal(ours, theirs)
    assert lengths == [(3, 6), (3, 1), (3, 1), (3, 1)]
