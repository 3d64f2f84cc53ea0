"""Packed sequences: cut between sequences, with metadata for each chunk; every contradiction is an error."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM

from lightning_chunkmbs import ChunkMBSPlan
from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.packed import KnownLengths
from tests import one_window
from tests.chunking import NAME, again, caught_warnings, chunk, chunks_of, gradients, leaf, max_error
from tests.models import chunked
from tests.one_window import Windowed, assert_close, train_window
from tests.ranks import run_on_ranks

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def rule(chunk_mbs: int = 1, **fields: Any) -> CutRule:
    return CutRule(chunk_mbs=chunk_mbs, packed_kwarg_names=PACKED, **fields)


def metadata(lengths: list[int], longest: Any = int) -> dict[str, Any]:
    cumulative = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative.clone(),
        "max_length_q": longest(max(lengths)),
        "max_length_k": longest(max(lengths)),
    }


def tokens(lengths: list[int]) -> Tensor:
    return torch.arange(sum(lengths), dtype=torch.float32).view(1, -1, 1)


def lengths_of(chunks: list[dict[str, Any]]) -> list[list[int]]:
    """Lengths of the sequences of each chunk, as its metadata says."""
    return [c["cu_seq_lens_q"].diff().tolist() for c in chunks]


# -- what a chunk gets ------------------------------------------------------------------------------------------------


def test_metadata_begins_anew_in_each_chunk() -> None:
    lengths = [3, 1, 4, 2, 5]
    chunks = chunks_of(rule(2), tokens(lengths), **metadata(lengths))
    assert [c["hidden_states"].flatten().tolist() for c in chunks] == [
        list(range(4)),
        list(range(4, 10)),
        list(range(10, 15)),
    ]
    assert [c["cu_seq_lens_q"].tolist() for c in chunks] == [[0, 3, 4], [0, 4, 6], [0, 5]]
    assert [c["cu_seq_lens_k"].tolist() for c in chunks] == [[0, 3, 4], [0, 4, 6], [0, 5]]
    assert [(c["max_length_q"], c["max_length_k"]) for c in chunks] == [(3, 3), (4, 4), (5, 5)]
    assert all(c["cu_seq_lens_q"].dtype == torch.int32 for c in chunks)


def test_longest_lengths_may_be_tensors() -> None:
    chunks = chunks_of(rule(2), tokens([3, 1, 4]), **metadata([3, 1, 4], torch.tensor))
    assert [c["max_length_q"].item() for c in chunks] == [3, 4]
    assert all(c["max_length_q"].ndim == 0 for c in chunks)


@pytest.mark.parametrize(
    ("chunk_tokens", "expected"),
    [
        (4, [[3, 1], [4], [2, 2]]),
        (7, [[3, 1], [4, 2], [2]]),
        (8, [[3, 1, 4], [2, 2]]),
        (100, [[3, 1, 4, 2, 2]]),
    ],
)
def test_chunks_of_so_many_tokens_at_most(chunk_tokens: int, expected: list[list[int]]) -> None:
    lengths = [3, 1, 4, 2, 2]
    assert lengths_of(chunks_of(rule(chunk_tokens=chunk_tokens), tokens(lengths), **metadata(lengths))) == expected


def test_a_sequence_longer_than_that_is_a_chunk_with_a_warning() -> None:
    with caught_warnings() as messages:
        chunks = chunks_of(rule(chunk_tokens=3), tokens([1, 5, 2, 1]), **metadata([1, 5, 2, 1]))
    assert lengths_of(chunks) == [[1], [5], [2, 1]]
    assert len([m for m in messages if "a packed sequence of 5 tokens is longer than chunk_tokens=3" in m]) == 1


def test_lengths_padded_with_empty_sequences() -> None:
    lengths = [0, 3, 2, 0, 0, 1, 0, 0]
    chunks = chunks_of(rule(), tokens(lengths), **metadata(lengths))
    assert [c["hidden_states"].shape[1] for c in chunks] == [3, 2, 1]
    assert [sum(found) for found in lengths_of(chunks)] == [3, 2, 1]
    assert [n for found in lengths_of(chunks) for n in found] == lengths


@pytest.mark.parametrize(("shape", "dims"), [((7, 1, 2), {}), ((7, 2), {"hidden_states": 0})])
def test_where_the_tokens_are(shape: tuple[int, ...], dims: dict[str, int]) -> None:
    batch_dim = 0 if dims else 1
    chunks = chunks_of(rule(batch_dim=batch_dim, batch_dims=dims), torch.randn(shape), **metadata([4, 3]))
    assert [tuple(c["hidden_states"].shape) for c in chunks] == [(4, *shape[1:]), (3, *shape[1:])]


def test_other_declared_arguments_are_cut_along_the_tokens_or_passed_whole() -> None:
    positions, mask = torch.arange(7)[None], torch.zeros(1, 1, 7)
    fields = {"kwarg_names": ("position_ids", "attention_mask")}
    chunks = chunks_of(rule(**fields), tokens([4, 3]), position_ids=positions, attention_mask=mask, **metadata([4, 3]))
    assert [c["position_ids"].tolist() for c in chunks] == [[[0, 1, 2, 3]], [[4, 5, 6]]]
    assert all(c["attention_mask"] is mask for c in chunks)


def test_a_call_without_metadata_is_cut_by_samples() -> None:
    chunks = chunks_of(rule(2), torch.randn(3, 5, 2), **dict.fromkeys(PACKED))
    assert [len(c["hidden_states"]) for c in chunks] == [2, 1]


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=9).filter(any), data=st.data())
def test_chunks_put_together_are_the_call(lengths: list[int], data: Any) -> None:
    size = data.draw(st.integers(1, 10))
    how = data.draw(st.sampled_from([rule(size), rule(chunk_tokens=size)]))
    x = tokens(lengths)
    with caught_warnings():
        chunks = chunks_of(how, x, **metadata(lengths))
    assert torch.equal(torch.cat([c["hidden_states"] for c in chunks], 1), x)
    assert [n for found in lengths_of(chunks) for n in found] == lengths
    for c, found in zip(chunks, lengths_of(chunks), strict=True):
        assert c["hidden_states"].shape[1] == sum(found) > 0
        assert c["max_length_q"] == max(found)
        if how.chunk_tokens:
            assert sum(found) <= size or len([n for n in found if n]) == 1


def test_lengths_are_read_from_the_device_once() -> None:
    known, cumulative = KnownLengths(), torch.tensor([0, 2, 5])
    assert known.of(cumulative) is known.of(cumulative)
    cumulative[1] = 3
    assert known.of(cumulative) == [0, 3, 5]


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seq_lens_q": torch.tensor([1, 4, 7])}, r"begin at 0 and never fall.*cu_seq_lens_q is \[1, 4, 7\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 4, 7])}, r"begin at 0 and never fall"),
        ({"cu_seq_lens_q": torch.tensor([0])}, r"one number more than there are sequences"),
        ({"cu_seq_lens_k": torch.tensor([0, 3, 7])}, r"cu_seq_lens_q is \[0, 4, 7\], cu_seq_lens_k is \[0, 3, 7\]"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 4, 8]), "cu_seq_lens_k": None},
            r"They end at 8, and positional argument 0 .* has 7 tokens",
        ),
        ({"max_length_q": 3}, r"max_length_q is the length of the longest packed sequence, 4 here, and .* given 3"),
        ({"cu_seq_lens_q": None, "cu_seq_lens_k": None}, r"given only \['max_length_k', 'max_length_q'\]"),
        ({"hidden_states": torch.randn(2, 7, 1)}, r"has 2 rows"),
        ({"hidden_states": torch.randn(1, 6, 1)}, r"has 6 tokens"),
    ],
)
def test_metadata_that_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    call = {**metadata([4, 3]), **changes}
    with pytest.raises(ValueError, match=rf"^{re.escape(NAME)}: .*{message}"):
        chunks_of(rule(), call.pop("hidden_states", tokens([4, 3])), **call)


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (torch.tensor([0.0, 4.0, 7.0]), r"torch.float32 \(3,\)"),
        (torch.tensor([[0, 4, 7]]), r"torch.int64 \(1, 3\)"),
        ([0, 4, 7], "list"),
        (True, "bool"),
    ],
)
def test_metadata_of_another_kind(value: Any, seen: str) -> None:
    with pytest.raises(TypeError, match=rf"cu_seq_lens_q is {seen}\. Take it out of packed_kwarg_names"):
        chunks_of(rule(), tokens([4, 3]), **{**metadata([4, 3]), "cu_seq_lens_q": value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk_tokens": 8}, "chunk_tokens is for packed sequences, but packed_kwarg_names is empty"),
        ({"chunk_tokens": 0, "packed_kwarg_names": ["cu"]}, "chunk_tokens must be at least 1"),
        ({"packed_kwarg_names": ["cu"], "chunk_kwarg_names": ["cu"]}, r"\['cu'\] are in both"),
        ({"packed_kwarg_names": ["cu"], "batch_dim": 2}, "first two dimensions, but batch_dim is 2"),
        ({"packed_kwarg_names": ["cu", "cu"]}, "must name everything once"),
    ],
)
def test_plans(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkMBSPlan(apply_modules=["a"], **fields)


# -- the same sequences unpacked --------------------------------------------------------------------------------------


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention inside each packed sequence, as kernels for packed sequences compute it."""
    if kwargs.get("cu_seq_lens_q") is None:
        parts = [slice(None)]
    else:
        bounds = kwargs["cu_seq_lens_q"].tolist()
        assert bounds[-1] == query.shape[2]
        assert kwargs["max_length_q"] == max(b - a for a, b in pairwise(bounds))
        parts = [slice(a, b) for a, b in pairwise(bounds) if b > a]
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = [
        nn.functional.scaled_dot_product_attention(query[:, :, p], key[:, :, p], value[:, :, p], is_causal=True)
        for p in parts
    ]
    return torch.cat(out, 2).transpose(1, 2), None


def qwen3() -> Qwen3ForCausalLM:
    AttentionInterface.register("packed_on_cpu", attend)
    AttentionMaskInterface.register("packed_on_cpu", lambda *_, **__: None)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        use_cache=False,
        attn_implementation="packed_on_cpu",
    )
    return Qwen3ForCausalLM(config)


def sequences(lengths: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(19, (1, n), generator=generator) for n in lengths]


def packed_batch(lengths: list[int], seed: int) -> dict[str, Any]:
    found = sequences(lengths, seed)
    labels = [torch.cat([torch.full((1, 1), -100), ids[:, 1:]], 1) for ids in found]
    return {
        "input_ids": torch.cat(found, 1),
        "labels": torch.cat(labels, 1),
        "position_ids": torch.cat([torch.arange(n)[None] for n in lengths], 1),
        **metadata(lengths),
    }


WINDOW = [[3, 5, 2, 4], [6, 2], [1, 3, 3]]


def train_packed(data: list[dict[str, Any]], **plan: Any) -> Windowed:
    plan = {
        "apply_modules": ["net.model.layers.{*}"],
        "chunk_kwarg_names": ["position_ids", "position_embeddings"],
        "packed_kwarg_names": list(PACKED),
        **plan,
    }
    return train_window(qwen3(), data, chunked(2, chunkmbs_plan=plan))


def packed_and_not() -> list[int]:
    data = [packed_batch(lengths, seed) for seed, lengths in enumerate(WINDOW)]
    plain = qwen3()
    for lengths, (seed, _) in zip(WINDOW, enumerate(WINDOW), strict=True):
        # One sequence at a time, each with its share of the packed loss, which is a mean over tokens.
        count = sum(n - 1 for n in lengths)
        for ids in sequences(lengths, seed):
            if ids.shape[1] > 1:
                (plain(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1) / count / len(WINDOW)).backward()
    expected = one_window.gradients(plain)
    chunks = []
    for options in ({}, {"chunk_tokens": 6}):
        for window in (data, data[:1]):
            if window is not data:
                expected = one_window.accumulate(qwen3(), [window])[0]
            module = train_packed(window, **options)
            assert_close(module.gradients, expected)
            chunks.append(module.report.chunks // 3)
        expected = one_window.gradients(plain)
    return chunks


def test_a_packed_model_equals_its_sequences_one_by_one() -> None:
    [chunks] = run_on_ranks(1, packed_and_not)
    assert chunks == [2 + 1 + 2, 2, 3 + 2 + 2, 3]


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, cu_seq_lens_q: Tensor) -> Tensor:
        means = [part.mean(1, keepdim=True) for part in x.split(cu_seq_lens_q.diff().tolist(), 1)]
        sizes = cu_seq_lens_q.diff()
        return torch.tanh(self.linear(x)) + torch.cat(means, 1).repeat_interleave(sizes, 1)


def test_gradients_of_a_block_that_uses_the_metadata() -> None:
    torch.manual_seed(0)
    plain, ours, x = Doubled(), Doubled(), leaf(1, 9, 6)
    ours.load_state_dict(plain.state_dict())
    chunk(ours, rule=rule(2))
    results = []
    for block in (plain, ours):
        (y,) = again(x)
        block(y, cu_seq_lens_q=torch.tensor([0, 2, 3, 7, 9])).square().sum().backward()
        results.append([*gradients(block), y.grad])
    assert max_error(results[1], results[0]) < 1e-5
