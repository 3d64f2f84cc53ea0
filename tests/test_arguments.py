"""Cutting a block's arguments: what sets the batch, what is cut, what is passed whole, what is refused."""

import collections
import dataclasses
import re
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.trees import map_tree, tree_leaves
from tests.chunking import NAME, Recorder, caught_warnings, chunk, chunks_of, join_outputs


class Pair(NamedTuple):
    cos: Any
    sin: Any


@dataclasses.dataclass
class Side:
    mask: Any
    scale: float = 2.0


def rows(b: int, *rest: int) -> Tensor:
    """A batch whose elements all differ."""
    return torch.arange(b * torch.Size(rest).numel(), dtype=torch.float32).view(b, *rest)


def declared(*kwarg_names: str, **fields: Any) -> CutRule:
    return CutRule(**{"chunk_mbs": 1, "kwarg_names": kwarg_names, **fields})


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_mbs", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("b", [1, 2, 5, 8])
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_batch_is_cut_in_order_with_a_shorter_rest(b: int, chunk_mbs: int, batch_dim: int) -> None:
    x = rows(b, 4, 3).transpose(0, batch_dim)
    pieces = [c["hidden_states"] for c in chunks_of(CutRule(chunk_mbs, batch_dim), x)]
    sizes = [piece.size(batch_dim) for piece in pieces]
    assert torch.equal(torch.cat(pieces, batch_dim), x)
    assert len(pieces) == -(-b // chunk_mbs)
    assert all(size == chunk_mbs for size in sizes[:-1])
    assert sizes[-1] == b - sum(sizes[:-1])


def test_a_batch_of_one_chunk_is_not_copied() -> None:
    x = rows(3, 4)
    (only,) = chunks_of(CutRule(3), x)
    assert only["hidden_states"].data_ptr() == x.data_ptr()


# -- which tensor sets the batch -------------------------------------------------------------------------------------


def test_first_declared_positional_sets_the_batch() -> None:
    rule = declared("a_first_keyword", arg_indexs=(0, 1))
    calls = chunks_of(rule, rows(4, 3), rows(1, 7), a_first_keyword=rows(1, 2))
    assert len(calls) == 4
    assert [c["attention_mask"].shape for c in calls] == [(1, 7)] * 4


def test_first_declared_positional_that_holds_a_tensor_sets_the_batch() -> None:
    calls = chunks_of(declared(arg_indexs=(0, 1)), None, rows(4, 3))
    assert [c["hidden_states"] for c in calls] == [None] * 4
    assert [c["attention_mask"].shape for c in calls] == [(1, 3)] * 4


def test_an_undeclared_positional_does_not_set_the_batch() -> None:
    calls = chunks_of(declared(arg_indexs=(1,)), rows(7, 3), rows(2, 3))
    assert [c["attention_mask"].shape for c in calls] == [(1, 3)] * 2
    assert [c["hidden_states"].shape for c in calls] == [(7, 3)] * 2


def test_first_declared_keyword_sets_the_batch_in_a_call_with_keywords_only() -> None:
    rule = declared("hidden_states", "attention_mask")
    calls = chunks_of(rule, attention_mask=rows(1, 5), hidden_states=rows(3, 5))
    assert [c["hidden_states"].tolist() for c in calls] == [[row] for row in rows(3, 5).tolist()]
    assert [c["attention_mask"].shape for c in calls] == [(1, 5)] * 3


# -- cut or whole ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_mbs", [1, 2, 3, 5])
def test_declared_keywords_are_cut_together(chunk_mbs: int) -> None:
    x, mask, ids = rows(5, 4, 3), rows(5, 1, 4, 4), rows(5, 4)
    rule = declared("attention_mask", "position_ids", chunk_mbs=chunk_mbs)
    calls = chunks_of(rule, x, attention_mask=mask, position_ids=ids)
    assert torch.equal(torch.cat([c["attention_mask"] for c in calls]), mask)
    assert torch.equal(torch.cat([c["position_ids"] for c in calls]), ids)
    assert all(len(c["attention_mask"]) == len(c["hidden_states"]) == len(c["position_ids"]) for c in calls)


@pytest.mark.parametrize("chunk_mbs", [1, 2, 3])
def test_broadcast_tables_and_masks_pass_whole(chunk_mbs: int) -> None:
    table = (rows(1, 4, 6), rows(1, 4, 6) + 1)
    rule = declared("position_embeddings", "attention_mask", "scale", chunk_mbs=chunk_mbs)
    calls = chunks_of(
        rule, rows(5, 4, 3), position_embeddings=table, attention_mask=rows(1, 1, 4, 4), scale=torch.tensor(2.0)
    )
    assert len(calls) == -(-5 // chunk_mbs)
    for call in calls:
        assert all(map(torch.equal, call["position_embeddings"], table))
        assert torch.equal(call["attention_mask"], rows(1, 1, 4, 4))
        assert call["scale"].item() == 2.0


CONTAINERS = {
    "tuple": lambda t: (t, None),
    "list": lambda t: [t, "name", 3],
    "dict": lambda t: {"full_attention": t, "window": 7},
    "ordered dict": lambda t: collections.OrderedDict(b=t, a=t),
    "default dict": lambda t: collections.defaultdict(list, a=t),
    "dataclass": lambda t: Side(mask=t, scale=0.5),
    "named tuple": lambda t: Pair(cos=t, sin=None),
    "ModelOutput": lambda t: BaseModelOutput(last_hidden_state=t, attentions=(t, t)),
    "nested": lambda t: {"a": [(t, None), Side(mask=Pair(t, {"b": t}))]},
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_are_entered_and_keep_their_type(kind: str) -> None:
    build, x = CONTAINERS[kind], rows(3, 2)
    calls = chunks_of(declared("side"), x, side=build(x))
    assert len(calls) == 3
    for call, expected in zip(calls, x.split(1), strict=True):
        assert type(call["side"]) is type(build(x))
        ours, theirs = tree_leaves(call["side"]), tree_leaves(build(expected))
        assert [path for path, _ in ours] == [path for path, _ in theirs]
        for (_, a), (_, b) in zip(ours, theirs, strict=True):
            assert torch.equal(a, b) if isinstance(b, Tensor) else a == b


def test_the_entry_may_be_in_a_container() -> None:
    calls = chunks_of(CutRule(2), {"hidden": rows(3, 2), "residual": rows(3, 4)})
    assert [c["hidden_states"]["hidden"].shape for c in calls] == [(2, 2), (1, 2)]
    assert [c["hidden_states"]["residual"].shape for c in calls] == [(2, 4), (1, 4)]


def test_none_and_values_without_tensors_pass_whole() -> None:
    given = {"flag": True, "text": "eager", "count": 3, "nothing": None, "sizes": [3, 3, 3]}
    for call in chunks_of(declared(*given), rows(3, 2), **given):
        assert {name: call[name] for name in given} == given
        assert call["sizes"] is given["sizes"]


def test_a_list_without_tensors_is_the_callers_own() -> None:
    class Appends(nn.Module):
        def forward(self, x: Tensor, log: list[int], nested: dict[str, list[int]]) -> Tensor:
            log.append(len(x))
            nested["log"].append(len(x))
            return x

    block, log, nested = Appends(), [], {"log": []}
    chunk(block, rule=CutRule(2))
    block(rows(5, 2), log, nested=nested)
    assert log == nested["log"] == [1, 2, 2]


# -- batch dimensions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", [1, 2, 3, 5])
def test_mrope_ids_are_cut_along_their_own_dimension(b: int) -> None:
    ids = rows(3, b, 4)
    rule = declared("position_ids", chunk_mbs=2, batch_dims={"position_ids": 1})
    pieces = [c["position_ids"] for c in chunks_of(rule, rows(b, 4, 8), position_ids=ids)]
    assert torch.equal(torch.cat(pieces, 1), ids)
    assert len(pieces) == -(-b // 2)


def test_batch_dims_of_a_positional_argument_go_by_its_name() -> None:
    rule = declared(arg_indexs=(0, 1), batch_dims={"attention_mask": 2})
    pieces = [c["attention_mask"] for c in chunks_of(rule, rows(2, 3), rows(4, 4, 2))]
    assert [piece.shape for piece in pieces] == [(4, 4, 1)] * 2


def test_batch_dims_apply_inside_containers_and_to_the_entry() -> None:
    rule = declared("side", batch_dims={"side": 1, "hidden_states": 2})
    calls = chunks_of(rule, rows(4, 4, 3), side=(rows(5, 3), [rows(6, 3)]))
    assert [c["hidden_states"].shape for c in calls] == [(4, 4, 1)] * 3
    assert [(c["side"][0].shape, c["side"][1][0].shape) for c in calls] == [((5, 1), (6, 1))] * 3


# -- undeclared tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("bias", torch.zeros(4, 7, 7)), ("cache_position", torch.arange(4)), ("seq_mask", torch.ones(4, 1))],
)
def test_undeclared_tensors_with_the_size_of_the_batch_pass_whole_with_one_warning(name: str, tensor: Tensor) -> None:
    block = Recorder()
    chunk(block, rule=CutRule(1))
    with caught_warnings() as messages, torch.no_grad():
        for _ in range(3):
            block(rows(4, 4, 2), **{name: tensor})
    assert all(torch.equal(kwargs[name], tensor) for _, kwargs in block.calls)
    assert len(block.calls) == 12
    (message,) = messages
    assert re.search(rf"{re.escape(NAME)}: {name} is not declared.*{re.escape(str(tuple(tensor.shape)))}", message)
    assert "chunk_kwarg_names" in message


def test_each_undeclared_tensor_is_named_by_where_it_is() -> None:
    with caught_warnings() as messages:
        chunks_of(CutRule(1), rows(4, 2), rows(4, 3), rope=(rows(4, 2), {"sin": rows(4, 2)}), other=rows(3, 4))
    assert len(messages) == 3
    places = [r"argument 1 \(attention_mask\)", r"rope\[0\]", r"rope\[1\]\['sin'\]"]
    for message, where in zip(messages, places, strict=True):
        assert re.search(rf"{where} is not declared", message)


def test_a_batch_of_one_warns_of_nothing() -> None:
    with caught_warnings() as messages:
        chunks_of(CutRule(1), rows(1, 2), table=rows(1, 2))
    assert messages == []


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "name", "value", "pattern"),
    [
        (2, "position_ids", rows(3, 2, 4), r"ids has shape \(3, 2, 4\), that is 3 along dimension 0, and B is 2"),
        (4, "mask", rows(2, 4), r"mask has shape \(2, 4\).* B is 4.*batch_dims: \{mask: <dimension>\}"),
        (1, "mask", rows(2, 4), r"mask has shape \(2, 4\).* B is 1"),
        (3, "mask", torch.zeros(0, 4), r"mask has shape \(0, 4\).* B is 3"),
        (3, "rope", (rows(3, 2), [rows(6, 2)]), r"rope\[1\]\[0\] has shape \(6, 2\).*batch_dims: \{rope: <dim"),
        (3, "side", Side(rows(2)), r"side\.mask has shape \(2,\)"),
    ],
)
def test_a_declared_tensor_of_another_size_is_refused(b: int, name: str, value: Any, pattern: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(NAME)}: .*{pattern}"):
        chunks_of(declared(name), rows(b, 5), **{name: value})


def test_a_declared_positional_of_another_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"positional argument 1 \(attention_mask\) has shape \(2,\).* B is 3"):
        chunks_of(declared(arg_indexs=(0, 1)), rows(3, 4), rows(2))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((None,), {}), ((), {"hidden_states": rows(2, 3)}), (("text", rows(2)), {"mask": None})],
    ids=["None", "undeclared keyword", "no tensor in the declared ones"],
)
def test_a_call_without_declared_tensor_is_refused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    called = re.escape(f"called with {len(args)} positional arguments and the keywords {sorted(kwargs)}")
    pattern = rf"{re.escape(NAME)}: .*chunk_arg_indexs=\[0\] and chunk_kwarg_names=\['mask'\]; the block was {called}"
    with pytest.raises(ValueError, match=pattern):
        chunks_of(declared("mask"), *args, **kwargs)


@pytest.mark.parametrize("field", [{"batch_dim": 2}, {"batch_dims": {"hidden_states": 5}}])
def test_a_batch_dimension_that_is_not_there_is_refused(field: dict[str, Any]) -> None:
    dim = field.get("batch_dim", 5)
    with pytest.raises(ValueError, match=rf"\(hidden_states\) has shape \(2, 3\) and no dimension {dim}.*batch_dims"):
        chunks_of(declared(**field), rows(2, 3))


# -- any tree --------------------------------------------------------------------------------------------------------

B = 5
LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.lists(st.integers(1, 3), max_size=2).map(lambda rest: rows(B, *rest)),
    st.just(rows(1, 2)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Side, inner, st.just(1.5)),
    ),
    max_leaves=8,
)


def _only(paths: set[str], tree: Any) -> Any:
    """``tree`` with None for every leaf that is not at one of ``paths``."""
    return map_tree(lambda leaf, path: leaf if path in paths else None, tree)


@settings(deadline=None, max_examples=60)
@given(tree=TREES, chunk_mbs=st.integers(1, B + 1))
def test_joining_undoes_cutting_for_any_tree(tree: Any, chunk_mbs: int) -> None:
    calls = chunks_of(declared("tree", chunk_mbs=chunk_mbs), rows(B, 1), tree=tree)
    sizes = [len(c["hidden_states"]) for c in calls]
    assert sum(sizes) == B
    for call in calls:
        for (path, whole), (other, given_) in zip(tree_leaves(tree), tree_leaves(call["tree"]), strict=True):
            assert path == other
            if not isinstance(whole, Tensor) or len(whole) == 1:
                assert given_ is whole
    cut = {path for path, whole in tree_leaves(tree) if isinstance(whole, Tensor) and len(whole) == B}
    joined = join_outputs([_only(cut, c["tree"]) for c in calls], sizes, 0)
    for (path, ours), (other, theirs) in zip(tree_leaves(joined), tree_leaves(_only(cut, tree)), strict=True):
        assert path == other
        assert torch.equal(ours, theirs) if path in cut else ours is None
