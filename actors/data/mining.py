"""Texts that Python source holds already: error messages with their exception, functions with their summary.

Owns what counts as a finding in one file's text and which findings are worth keeping once all are known.
Pure: text in, values out. Does not know which files are installed, Ray, Parquet or the split.
"""

import ast
import gc
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from actors.data.rows import Shape

PLACEHOLDER = "{…}"
"""Stands where a message has a value that is known only at run time."""

MESSAGE_CHARS = (16, 200)
MESSAGE_WORDS = 3
SUMMARY_CHARS = (20, 240)
SUMMARY_WORDS = 4
CODE_CHARS = (80, 500)
"""A function's source. MiniLM reads 256 tokens and cuts the rest; none of 17,000 functions of at most 500
characters has more, but 3 in 1,000 of those of at most 700."""

CLASS_ROWS = 100
CLASS_GROUPS = 12
"""An exception class is kept when this many rows in this many groups raise it: otherwise the held-out
packages would ask for classes that no training package knows."""
CLASS_SHARE = 0.25
"""No class may have a larger share of a split: half of all `raise` statements say ValueError, and a model
that gives no other answer would be right half of the time."""
CLASS_ROWS_PER_GROUP = 200
"""One class of one group: torch alone raises three quarters of the installed AssertionErrors."""
FUNCTIONS_PER_GROUP = 1500
SAYS_NOTHING = frozenset({"Exception", "BaseException"})
"""Never a wrong answer, so never a lesson."""

NAMELESS = "f"
"""What a function is called whose name is taken away."""

_FUNCTION_NAME = re.compile(r"^\s*(?:async\s+)?def\s+(\w+)", re.MULTILINE)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_FORMAT_FIELD = re.compile(r"\{[^{}]*\}")
_PERCENT_FIELD = re.compile(r"%(?:%|(?:\([^)]*\))?[-+ #0]*(?:\*|\d+)?(?:\.(?:\*|\d+))?[sdrifgxXoeEGcu])")
_WORD = re.compile(r"[^\W\d_]{2,}")
_SENTENCE_END = re.compile(r"(?<=[^\W\d_][\w)\]'\"`])[.!?](?=\s|$)")


@dataclass(frozen=True, slots=True)
class Finding:
    """What stands at `line` (1-based): a message and its exception class, or a summary and its function."""

    line: int
    text: str
    answer: str


@dataclass(frozen=True)
class Selection:
    """Positions that stay, and how many went by which rule."""

    kept: list[int]
    dropped: dict[str, int]


class UnreadableSource(ValueError):
    """A file that this interpreter cannot parse; the message says why."""


def raised_messages(source: bytes) -> list[Finding]:
    """Every `raise X("message …")` whose message says something; `UnreadableSource` if it does not parse."""
    if b"raise " not in source:
        return []
    found = []
    for statement in _statements(_parse(source).body, into_functions=True):
        if isinstance(statement, ast.Raise) and (raised := _raised(statement)) is not None:
            found.append(raised)
    return found


def documented_functions(source: bytes) -> list[Finding]:
    """Functions and methods with a docstring and a body; `UnreadableSource` if the file does not parse.

    Functions inside functions are left out: their text is part of the outer one already.
    """
    if b"def " not in source or (b'"""' not in source and b"'''" not in source):
        return []
    tree = _parse(source)
    try:
        text = source.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableSource(f"not UTF-8: {error.reason}") from None
    # The lines that ast counts: str.splitlines would also break at form feeds.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    found = []
    for statement in _statements(tree.body, into_functions=False):
        if isinstance(statement, _DEFINITIONS) and (function := _documented(statement, lines)) is not None:
            found.append(function)
    return found


def unnamed_functions(source: bytes) -> list[Finding]:
    """`documented_functions` without their names: whoever finds one has to have read its body.

    A name mostly says what the summary says, so that with it a search need only compare words.
    """
    return [replace(found, answer=without_name(found.answer)) for found in documented_functions(source)]


def without_name(code: str) -> str:
    """A function's source with `NAMELESS` in place of its own name: where it is defined, and where it calls itself or
    what it overrides. Another object's attribute of that name stays: it is part of the body."""
    named = _FUNCTION_NAME.search(code)
    if named is None:
        return code
    own = re.escape(named[1])
    return re.sub(rf"(?:(?<![\w.])|(?<=self\.)|(?<=cls\.)|(?<=super\(\)\.)){own}\b", NAMELESS, code)


def without_ambiguous(texts: Sequence[str], answers: Sequence[str]) -> list[int]:
    """Positions that stay when every text with several different answers is taken out, and repeats as well.

    For messages: if packages raise both TypeError and ValueError with the same words, neither answer is
    wrong, so an exact match would measure luck and training would pull both ways. For summaries: "Return the
    name." describes hundreds of functions, and a search can't tell which was meant. Both go on all sides.
    """
    keys = [" ".join(text.casefold().split()) for text in texts]
    seen: dict[str, set[str]] = defaultdict(set)
    first: dict[str, int] = {}
    for position, (key, answer) in enumerate(zip(keys, answers, strict=True)):
        seen[key].add(answer)
        first.setdefault(key, position)
    return sorted(position for key, position in first.items() if len(seen[key]) == 1)


def select_errors(found: Sequence[Finding], groups: Sequence[str], order: Sequence[str]) -> Selection:
    """Which of all error messages become rows; `order` ranks those that compete for a capped place."""
    kept = without_ambiguous([finding.text for finding in found], [finding.answer for finding in found])
    dropped = {"ambiguous-or-repeated": len(found) - len(kept)}
    frequent = frequent_classes([found[row].answer for row in kept], [groups[row] for row in kept])
    known = [row for row in kept if found[row].answer in frequent]
    dropped["rare-class"] = len(kept) - len(known)
    owners = [(found[row].answer, groups[row]) for row in known]
    spread = [known[place] for place in at_most(CLASS_ROWS_PER_GROUP, owners, [order[row] for row in known])]
    dropped["over-group-cap"] = len(known) - len(spread)
    return Selection(spread, dropped)


def select_functions(found: Sequence[Finding], groups: Sequence[str], order: Sequence[str]) -> Selection:
    """Which of all documented functions become rows; `order` ranks those that compete for a capped place."""
    kept = without_ambiguous([finding.text for finding in found], [finding.answer for finding in found])
    spread = [
        kept[place]
        for place in at_most(FUNCTIONS_PER_GROUP, [groups[row] for row in kept], [order[row] for row in kept])
    ]
    return Selection(
        spread, {"ambiguous-or-repeated": len(found) - len(kept), "over-group-cap": len(kept) - len(spread)}
    )


def frequent_classes(classes: Sequence[str], groups: Sequence[str]) -> set[str]:
    """Classes raised often enough, and in enough groups, to be learned in some and asked for in others."""
    rows = Counter(classes)
    spread: dict[str, set[str]] = defaultdict(set)
    for name, group in zip(classes, groups, strict=True):
        spread[name].add(group)
    return {
        name
        for name, count in rows.items()
        if count >= CLASS_ROWS and len(spread[name]) >= CLASS_GROUPS and name not in SAYS_NOTHING
    }


def at_most(limit: int, keys: Sequence[Hashable], order: Sequence[str]) -> list[int]:
    """Positions that stay when each key keeps at most `limit` of its own, first by `order`; ascending.

    `order` must have nothing to do with the order in which rows are published: otherwise the keys that were cut
    would crowd the beginning, and a prefix would not be a fair sample.
    """
    taken: Counter[Hashable] = Counter()
    stay = []
    for position in sorted(range(len(keys)), key=order.__getitem__):
        if taken[keys[position]] < limit:
            taken[keys[position]] += 1
            stay.append(position)
    return sorted(stay)


def balanced(classes: Sequence[str], share: float, order: Sequence[str]) -> list[int]:
    """Positions that stay when no class may have more than `share` of them; the first by `order` stay."""
    return at_most(share_cap(Counter(classes).values(), share), classes, order)


def share_cap(counts: Iterable[int], share: float) -> int:
    """The most rows a class may keep so that none has more than `share` of what stays.

    The largest c with c ≤ share · Σ min(count, c); the sum by c falls as c grows, so bisection finds it.
    With fewer than 1/share classes no cap can keep the promise, and nothing is cut.
    """
    counts = list(counts)
    low, high = 0, max(counts, default=0)
    while low < high:
        cap = (low + high + 1) // 2
        if cap <= share * sum(min(count, cap) for count in counts):
            low = cap
        else:
            high = cap - 1
    return low or max(counts, default=0)


def _parse(source: bytes) -> ast.Module:
    # A syntax tree holds no cycles; scanning it for some costs the collector 40 % of the parsing time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableSource(f"{type(error).__name__}: {str(error).splitlines()[0]}") from None
    finally:
        if enabled:
            gc.enable()


def _statements(body: Iterable[ast.stmt], *, into_functions: bool) -> Iterator[ast.stmt]:
    """All statements below `body` in source order; expressions hold none, so they are not visited."""
    pending = list(body)[::-1]
    while pending:
        statement = pending.pop()
        yield statement
        if isinstance(statement, _DEFINITIONS) and not into_functions:
            continue
        inner: list[ast.stmt] = list(getattr(statement, "body", ()))
        for block in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            inner += block.body
        inner += getattr(statement, "orelse", ())
        inner += getattr(statement, "finalbody", ())
        pending += inner[::-1]


def _raised(statement: ast.Raise) -> Finding | None:
    call = statement.exc
    if not isinstance(call, ast.Call) or not call.args:
        return None
    name = _last_name(call.func)
    text = _text(call.args[0])
    if name is None or text is None or not name[0].isupper():
        return None
    message = " ".join(text.split())
    shortest, longest = MESSAGE_CHARS
    if not shortest <= len(message) <= longest or len(_WORD.findall(message.replace(PLACEHOLDER, " "))) < MESSAGE_WORDS:
        return None
    # A message that names the class would give the answer away.
    return None if name in message else Finding(statement.lineno, message, name)


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _text(node: ast.expr) -> str | None:
    """The message an expression makes, with `PLACEHOLDER` for run-time values; None if there is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) or PLACEHOLDER for part in parts)
        case ast.BinOp(left=left, op=ast.Mod()):
            pattern = _text(left)
            return None if pattern is None else _PERCENT_FIELD.sub(_percent_value, pattern)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _text(left), _text(right)
            return None if first is None and second is None else (first or PLACEHOLDER) + (second or PLACEHOLDER)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
            return _FORMAT_FIELD.sub(PLACEHOLDER, text)
    return None


def _percent_value(field: re.Match[str]) -> str:
    return "%" if field[0] == "%%" else PLACEHOLDER


def _documented(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]) -> Finding | None:
    docstring = ast.get_docstring(function, clean=True)
    if not docstring or len(function.body) < 2 or function.name.startswith("__"):
        return None
    if all(_says_nothing(statement) for statement in function.body[1:]):
        return None
    text, following = function.body[0], function.body[1]
    text_end, end = text.end_lineno or text.lineno, function.end_lineno or function.lineno
    signature_end = text.lineno - 1
    if signature_end < function.lineno or following.lineno <= text_end:
        return None  # docstring and code share a line
    summary = first_sentence(docstring)
    kept = [*lines[function.lineno - 1 : signature_end], *lines[text_end:end]]
    margin = len(kept[0]) - len(kept[0].lstrip())
    code = "\n".join(line[margin:].rstrip() if not line[:margin].strip() else line.rstrip() for line in kept)
    fits = SUMMARY_CHARS[0] <= len(summary) <= SUMMARY_CHARS[1] and CODE_CHARS[0] <= len(code) <= CODE_CHARS[1]
    if not fits or len(_WORD.findall(summary)) < SUMMARY_WORDS:
        return None
    return Finding(function.lineno, summary, code)


def _says_nothing(statement: ast.stmt) -> bool:
    """`pass`, `...`, a bare string or `raise NotImplementedError`: a body to be written elsewhere."""
    match statement:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Raise(exc=ast.Name(id="NotImplementedError") | ast.Call(func=ast.Name(id="NotImplementedError"))):
            return True
    return False


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring's first paragraph, in one line."""
    paragraph = " ".join(docstring.strip().split("\n\n", 1)[0].split())
    end = _SENTENCE_END.search(paragraph)
    return paragraph[: end.end()] if end else paragraph


@dataclass(frozen=True)
class Miner:
    """A mined dataset: what finds its rows in one file, and what chooses among all that was found.

    `select` takes the findings, their groups and their ranks. `shape` is that of the rows. `class_share`: see
    `balanced`; None balances nothing.
    """

    find: Callable[[bytes], list[Finding]]
    select: Callable[[Sequence[Finding], Sequence[str], Sequence[str]], Selection]
    shape: Shape = "chat"
    class_share: float | None = None


MINERS = {
    "python-errors": Miner(raised_messages, select_errors, class_share=CLASS_SHARE),
    "python-functions": Miner(documented_functions, select_functions, "pairs"),
    "python-functions-unnamed": Miner(unnamed_functions, select_functions, "pairs"),
}
