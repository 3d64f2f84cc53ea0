"""Patterns: every form, and every error with its text."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_chunkmbs.patterns import check_not_nested, compile_pattern, match_modules

HF_PATTERN = "model.language_model.layers.{*}"


def matches(pattern: str, name: str) -> bool:
    return compile_pattern(pattern).fullmatch(name) is not None


@pytest.mark.parametrize(
    ("pattern", "matched", "not_matched"),
    [
        ("net.layers.0", ["net.layers.0"], ["net.layers.00", "net.layers", "xnet.layers.0", "net_layers.0"]),
        ("layers.{*}", ["layers.0", "layers.10"], ["layers.10.mlp", "layers.x", "layers.", "layers", "layers.-1"]),
        ("layers.{0-11}", ["layers.0", "layers.9", "layers.11"], ["layers.12", "layers.111", "layers.00"]),
        ("layers.{3-3}", ["layers.3"], ["layers.2", "layers.33"]),
        ("layers.{0,2,10}", ["layers.0", "layers.2", "layers.10"], ["layers.1", "layers.02", "layers.0,2"]),
        ("layers.{4}", ["layers.4"], ["layers.44", "layers.{4}"]),
        ("mlp.{up_proj,down_proj}", ["mlp.up_proj", "mlp.down_proj"], ["mlp.gate_proj", "mlp.up_proj2"]),
        ("{encoder}.block{0-1}", ["encoder.block0", "encoder.block1"], ["decoder.block0", "encoder.block2"]),
        ("*.mlp", ["a.mlp", "a.b.0.mlp", ".mlp"], ["mlp", "a.mlp.up"]),
        ("net.*", ["net.a", "net.a.b"], ["net", "nets.a"]),
        ("layer?.a", ["layer1.a", "layers.a"], ["layer.a", "layer12.a"]),
        ("a.{*}.experts.{0-1}", ["a.12.experts.1"], ["a.12.experts.2", "a.experts.1"]),
        ("a+b$.[0-3]", ["a+b$.[0-3]"], ["aab.0"]),
        (r"re:.*\.layers\.[0-3]", ["net.layers.3"], ["net.layers.33", "net.layers.4", "net.layers.3.mlp"]),
        ("re:a|b", ["a", "b"], ["ab", "a.c"]),
    ],
)
def test_forms(pattern: str, matched: list[str], not_matched: list[str]) -> None:
    assert [name for name in matched if not matches(pattern, name)] == []
    assert [name for name in not_matched if matches(pattern, name)] == []


@given(first=st.integers(0, 200), length=st.integers(0, 60), value=st.integers(0, 300))
def test_a_range_is_inclusive(first: int, length: int, value: int) -> None:
    pattern = f"layers.{{{first}-{first + length}}}"
    assert matches(pattern, f"layers.{value}") == (first <= value <= first + length)


@given(st.text(string.ascii_letters + string.digits + "._-[]()+^$|\\", min_size=1).filter(lambda s: s != "re:"))
def test_text_without_wildcards_matches_itself_alone(name: str) -> None:
    assert matches(name, name)
    assert not matches(name, name + "x")
    assert not matches(name, "x" + name)


def refusal(pattern: str) -> str | None:
    try:
        compile_pattern(pattern)
    except ValueError as error:
        return str(error)
    return None


@given(st.text("{}-,*?0123ab ", min_size=1))
def test_a_pattern_compiles_or_is_refused_with_the_rule(pattern: str) -> None:
    message = refusal(pattern)
    assert message is None or ("Braces in a pattern must be" in message and repr(pattern) in message)
    assert message is not None or pattern.count("{") == pattern.count("}")


@pytest.mark.parametrize(
    ("pattern", "seen"),
    [
        ("layers.{3-1}", r"has {3-1}, which runs backwards; write {1-3}\."),
        ("layers.{0-999999}", r"has {0-999999}, longer than 10000; write {\*} for any integer\."),
        ("layers.{}", r"has {}\."),
        ("layers.{0,}", r"has {0,\}\."),
        ("layers.{0, 1}", r"has {0, 1}\."),
        ("layers.{a-b}", r"has {a-b}\."),
        ("layers.{00-03}", r"has {00-03}\."),
        ("layers.{0-3,7}", r"has {0-3,7}\."),
        ("layers.{**}", r"has {\*\*}\."),
        ("layers.{0", r"has a brace that is not closed"),
        ("layers.0}", r"has a brace that is not closed, not opened"),
        ("layers.{a{0}}", r"has a brace .* or inside another\."),
    ],
)
def test_malformed_braces(pattern: str, seen: str) -> None:
    rule = r"Braces in a pattern must be {\*} \(one integer\), {0-3} .* but '" + re.escape(pattern) + "' "
    with pytest.raises(ValueError, match=rule + seen):
        compile_pattern(pattern)


def test_other_malformed_patterns() -> None:
    with pytest.raises(ValueError, match="must name modules, but got ''; write for example"):
        compile_pattern("")
    with pytest.raises(ValueError, match=r"After the prefix 're:' .* but 're:a\(' is none: missing \)"):
        compile_pattern("re:a(")
    with pytest.raises(TypeError, match=r"must be a string, but got \{'0-3': None\} \(dict\)"):
        compile_pattern({"0-3": None})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^chunkmbs_plan: Braces in a pattern must be"):
        match_modules(["a.{}"], ["a.0"], ["a"], plan="chunkmbs_plan")


def module_names(*leaves: str) -> tuple[list[str], list[str]]:
    """Names as ``named_modules()`` gives them for a tree with these leaves, and the names of its direct children."""
    names: list[str] = []
    for leaf in leaves:
        parts = leaf.split(".")
        names += [".".join(parts[: i + 1]) for i in range(len(parts))]
    return list(dict.fromkeys(names)), list(dict.fromkeys(leaf.split(".")[0] for leaf in leaves))


def layers_under(*prefixes: str, count: int = 12) -> tuple[list[str], list[str]]:
    return module_names(*[f"{prefix}.layers.{i}.mlp" for prefix in prefixes for i in range(count)])


def match(patterns: list[str], tree: tuple[list[str], list[str]]) -> list[str]:
    return match_modules(patterns, *tree, plan="chunkmbs_plan")


@pytest.mark.parametrize("prefix", ["model.language_model", "net.model.language_model", "model.model.language_model"])
def test_a_pattern_for_a_model_works_under_any_attribute(prefix: str) -> None:
    found = match([HF_PATTERN], layers_under(prefix))
    assert found == [f"{prefix}.layers.{i}" for i in range(12)]


def test_a_regular_expression_works_under_any_attribute() -> None:
    assert match([r"re:layers\.[01]|norm"], layers_under("net")) == ["net.layers.0", "net.layers.1"]


def test_full_names_win_over_names_below_a_child() -> None:
    tree = layers_under("model.language_model", "net.model.language_model", count=2)
    assert match([HF_PATTERN], tree) == ["model.language_model.layers.0", "model.language_model.layers.1"]


def test_only_a_direct_child_is_skipped() -> None:
    with pytest.raises(ValueError, match="matches none"):
        match(["layers.{*}"], layers_under("net.model"))


def test_matches_come_in_module_order_and_once() -> None:
    found = match(["layers.{2,1}", "net.layers.{0-1}"], layers_under("net"))
    assert found == ["net.layers.0", "net.layers.1", "net.layers.2"]


def test_no_patterns_match_nothing() -> None:
    assert match([], layers_under("net")) == []


def test_two_children_that_match() -> None:
    tree = layers_under("student", "teacher", count=2)
    with pytest.raises(
        ValueError,
        match=r"chunkmbs_plan: .*below one child of the module only, but 'layers.{\*}' matches below 'student' \(as "
        r"'student.layers.0'\) and 'teacher' .* Write the full name: 'student.layers.{\*}' or 'teacher.layers.{\*}'",
    ):
        match(["layers.{*}"], tree)
    assert match(["student.layers.{*}"], tree) == ["student.layers.0", "student.layers.1"]


def test_two_children_that_match_a_regular_expression() -> None:
    tree = layers_under("student", "teacher", count=2)
    with pytest.raises(ValueError, match="Write the full name") as caught:
        match([r"re:layers\.0"], tree)
    fix = re.search(r"name: '(.*?)' or", str(caught.value))
    assert fix is not None
    assert match([fix[1]], tree) == ["student.layers.0"]


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("net.layer.{*}", r"The nearest names: 'net.layers.{\*}' \(12 modules\)"),
        ("layers.{12-20}", r"The nearest names: 'net.layers.{\*}' \(12 modules\)"),
        ("net.layers.{*}.mpl", r"The nearest names: 'net.layers.{\*}.mlp' \(12 modules\)"),
        ("nett", r"The nearest names: 'net' \(1 module\)"),
    ],
)
def test_no_match_names_the_nearest(pattern: str, nearest: str) -> None:
    rule = f"chunkmbs_plan: every pattern must match a module, but '{re.escape(pattern)}' matches none. "
    with pytest.raises(ValueError, match=rule + nearest):
        match([pattern], layers_under("net"))


@pytest.mark.parametrize("pattern", [r"net\.layers\.\d+", r"layers.[0-3]", "net.layers.(0|1)"])
def test_no_match_says_when_it_is_a_regular_expression(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"does as a regular expression: write '(re:.*)'\.") as caught:
        match([pattern], layers_under("net"))
    assert f"write 're:{pattern}'" in str(caught.value)
    assert match([f"re:{pattern}"], layers_under("net"))


def test_no_match_of_what_is_no_regular_expression_either() -> None:
    with pytest.raises(ValueError, match="The nearest names") as caught:
        match(["net.layers.[0"], layers_under("net"))
    assert "regular expression" not in str(caught.value)
    with pytest.raises(ValueError, match="The nearest names") as caught:
        match(["re:nothing"], layers_under("net"))
    assert "regular expression" not in str(caught.value)


def test_one_pattern_without_a_match_is_an_error_beside_others_that_match() -> None:
    with pytest.raises(ValueError, match=r"'visual.{\*}' matches none"):
        match(["layers.{*}", "visual.{*}"], layers_under("net"))


def test_a_module_without_submodules() -> None:
    with pytest.raises(ValueError, match=r"the module has no submodules\. Build the model before the plan"):
        match(["layers.{*}"], ([], []))


def test_nested_blocks() -> None:
    with pytest.raises(
        ValueError,
        match=r"recompute_plan: a block must not be inside another block, but 'a.b.c.d' is inside 'a.b'\. Narrow",
    ):
        check_not_nested(["a.b.c.d", "a.b"], plan="recompute_plan")
    with pytest.raises(ValueError, match=r"'net.layers.0' is inside 'net.layers'"):
        check_not_nested(match(["net.*"], layers_under("net")), plan="recompute_plan")


def test_names_that_only_begin_alike_are_not_nested() -> None:
    check_not_nested(["a.b", "a.bc", "a.c", "layers.1", "layers.10"], plan="recompute_plan")
    check_not_nested([], plan="recompute_plan")


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join), unique=True, max_size=6))
def test_nesting_is_found_by_comparing_every_pair(names: list[str]) -> None:
    nested = any(inner.startswith(outer + ".") for inner in names for outer in names)
    if not nested:
        check_not_nested(names, plan="plan")
        return
    with pytest.raises(ValueError, match="must not be inside another block"):
        check_not_nested(names, plan="plan")
