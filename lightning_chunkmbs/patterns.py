"""Module name patterns: the one matcher that every plan uses."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence

__all__ = ["check_not_nested", "compile_pattern", "match_modules"]

_REGEX_PREFIX = "re:"
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(0|[1-9][0-9]*)-(0|[1-9][0-9]*)")
_LIST = re.compile(r"\w+(?:,\w+)*")
# A range becomes one alternative per integer, so it is kept to what a model can have.
_LONGEST_RANGE = 10_000
_INDEX = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_NEAREST = 3


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression whose ``fullmatch`` decides whether a module name matches ``pattern``.

    ``{*}`` is one integer, ``{a-b}`` an inclusive range, ``{a,b}`` and ``{a}`` lists of integers or words, ``*`` any
    text (dots included), ``?`` one character; everything else, ``.`` too, is literal. After the prefix ``re:`` the
    pattern is a Python regular expression.

    Raises:
        TypeError: ``pattern`` is not a string.
        ValueError: ``pattern`` is empty, has malformed braces, or is not a valid regular expression after ``re:``.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"A pattern must be a string, but got {pattern!r} ({type(pattern).__name__}).")
    if pattern.startswith(_REGEX_PREFIX):
        return _compile_regex(pattern)
    if not pattern:
        raise ValueError("A pattern must name modules, but got ''; write for example 'model.layers.{*}'.")
    # Splitting at a capturing group puts literal text at even places and the insides of braces at odd ones.
    parts = _BRACES.split(pattern)
    pieces = [_braces(part, pattern) if i % 2 else _text(part, pattern) for i, part in enumerate(parts)]
    return re.compile("".join(pieces), re.DOTALL)


def _compile_regex(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix(_REGEX_PREFIX))
    except re.error as error:
        raise ValueError(
            f"After the prefix 're:' a pattern must be a Python regular expression, but {pattern!r} is none: {error}."
        ) from error


def _text(text: str, pattern: str) -> str:
    if "{" in text or "}" in text:
        raise _malformed(pattern, "a brace that is not closed, not opened, or inside another")
    wildcards = {"*": ".*", "?": "."}
    return "".join(wildcards.get(char) or re.escape(char) for char in text)


def _braces(inside: str, pattern: str) -> str:
    if inside == "*":
        return "[0-9]+"
    if bounds := _RANGE.fullmatch(inside):
        return _range(int(bounds[1]), int(bounds[2]), pattern)
    if _LIST.fullmatch(inside):
        return f"(?:{'|'.join(inside.split(','))})"
    raise _malformed(pattern, f"{{{inside}}}")


def _range(first: int, last: int, pattern: str) -> str:
    if first > last:
        raise _malformed(pattern, f"{{{first}-{last}}}, which runs backwards; write {{{last}-{first}}}")
    if last - first >= _LONGEST_RANGE:
        raise _malformed(pattern, f"{{{first}-{last}}}, longer than {_LONGEST_RANGE}; write {{*}} for any integer")
    return f"(?:{'|'.join(map(str, range(first, last + 1)))})"


def _malformed(pattern: str, seen: str) -> ValueError:
    return ValueError(
        "Braces in a pattern must be {*} (one integer), {0-3} (an inclusive range), or {0,2}, {q,k} or {0} (a list, "
        f"no blanks), but {pattern!r} has {seen}."
    )


def match_modules(patterns: Sequence[str], names: Sequence[str], children: Sequence[str], *, plan: str) -> list[str]:
    """Return the module names that ``patterns`` match, in the order of ``names`` and each once.

    A pattern that matches no full name is tried relative to each direct child, so that a pattern written for a model
    works whatever attribute of the LightningModule holds the model.

    Args:
        patterns: the patterns of one plan.
        names: the names in ``named_modules()``, without the root's empty one.
        children: the names of the direct children.
        plan: what error messages call the plan.

    Raises:
        ValueError: a pattern is malformed, matches nothing, or matches relative to more than one child.
    """
    matched: set[str] = set()
    for pattern in patterns:
        matched.update(_match_one(pattern, names, children, plan))
    return [name for name in names if name in matched]


def _match_one(pattern: str, names: Sequence[str], children: Sequence[str], plan: str) -> list[str]:
    try:
        regex = compile_pattern(pattern)
    except ValueError as error:
        raise ValueError(f"{plan}: {error}") from error
    if direct := [name for name in names if regex.fullmatch(name)]:
        return direct
    by_child = {child: _match_below(regex, names, child) for child in children}
    by_child = {child: found for child, found in by_child.items() if found}
    if not by_child:
        raise ValueError(_no_match(pattern, names, children, plan))
    if len(by_child) > 1:
        raise ValueError(_ambiguous(pattern, by_child, plan))
    return next(iter(by_child.values()))


def _match_below(regex: re.Pattern[str], names: Sequence[str], child: str) -> list[str]:
    prefix = child + "."
    return [name for name in names if name.startswith(prefix) and regex.fullmatch(name.removeprefix(prefix))]


def _ambiguous(pattern: str, by_child: dict[str, list[str]], plan: str) -> str:
    seen = " and ".join(f"{child!r} (as {found[0]!r})" for child, found in by_child.items())
    full = " or ".join(f"'{_below(child, pattern)}'" for child in by_child)
    return (
        f"{plan}: a pattern that matches no full module name may match below one child of the module only, but "
        f"{pattern!r} matches below {seen}. Write the full name: {full}, or a pattern for each."
    )


def _below(child: str, pattern: str) -> str:
    if pattern.startswith(_REGEX_PREFIX):
        return f"{_REGEX_PREFIX}{re.escape(child)}\\.(?:{pattern.removeprefix(_REGEX_PREFIX)})"
    return f"{child}.{pattern}"


def _no_match(pattern: str, names: Sequence[str], children: Sequence[str], plan: str) -> str:
    message = f"{plan}: every pattern must match a module, but {pattern!r} matches none"
    if _matches_as_regex(pattern, names, children):
        return f"{message}. It does as a regular expression: write '{_REGEX_PREFIX}{pattern}'."
    if not names:
        return f"{message}: the module has no submodules. Build the model before the plan is applied."
    return f"{message}. The nearest names: {', '.join(_nearest(pattern, names))}."


def _matches_as_regex(pattern: str, names: Sequence[str], children: Sequence[str]) -> bool:
    if pattern.startswith(_REGEX_PREFIX):
        return False
    try:
        regex = re.compile(pattern)
    except re.error:
        return False
    return any(map(regex.fullmatch, names)) or any(_match_below(regex, names, child) for child in children)


def _nearest(pattern: str, names: Sequence[str]) -> Iterator[str]:
    # Names that differ in their indexes alone are one suggestion; otherwise the layers of one stack fill the list.
    families = Counter(_generalised(name) for name in names)
    wanted = _generalised(_BRACES.sub("{*}", pattern))
    for family in difflib.get_close_matches(wanted, families, n=_NEAREST, cutoff=0.0):
        count = families[family]
        yield f"{family!r} ({count} module{'s' if count > 1 else ''})"


def _generalised(name: str) -> str:
    return _INDEX.sub("{*}", name)


def check_not_nested(names: Sequence[str], *, plan: str) -> None:
    """Check that no module named in ``names`` is inside another one.

    Raises:
        ValueError: one is; the message names both.
    """
    known = set(names)
    for name in names:
        for end in (i for i, char in enumerate(name) if char == "."):
            if (outer := name[:end]) in known:
                raise ValueError(
                    f"{plan}: a block must not be inside another block, but {name!r} is inside {outer!r}. "
                    "Narrow the pattern so that it matches only one of the two ('{*}' is one integer, while '*' "
                    "matches any text, dots included)."
                )
