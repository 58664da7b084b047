"""What is found in Python source, and which findings become rows."""

from collections import Counter
from textwrap import dedent

import pytest

from actors.data import mining
from actors.data.mining import Finding, UnreadableSource, documented_functions, raised_messages


def _source(text: str) -> bytes:
    return dedent(text).encode()


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ('"the value must be positive"', "the value must be positive"),
        ('"the value " "must be positive"', "the value must be positive"),
        ('f"the value {value!r} must be positive"', "the value {…} must be positive"),
        ('"the value %r must be %-5.2f%% of it" % (a, b)', "the value {…} must be {…}% of it"),
        ('"the value {0:>5} must be {name}".format(a, name=b)', "the value {…} must be {…}"),
        ('"the value is " + str(value) + ", not text"', "the value is {…}, not text"),
        ('"the   value\\n  must be positive"', "the value must be positive"),
        ('f"the value {a} must" " be %s" % b', "the value {…} must be {…}"),
    ],
)
def test_the_message_is_what_a_user_would_read(expression: str, message: str) -> None:
    assert raised_messages(f"raise ValueError({expression})".encode()) == [Finding(1, message, "ValueError")]


@pytest.mark.parametrize(
    "statement",
    [
        "raise",
        "raise ValueError",
        "raise ValueError()",
        "raise ValueError(message)",
        'raise OSError(2, "there is no such file")',
        'raise ValueError("too short")',
        'raise ValueError("{…} {…} {…} {…} {…} {…} 12345")',
        f'raise ValueError("a long message {"x" * 300} here")',
        'raise error("the value must be positive")',
        'raise ValueError("a ValueError says its own name")',
        '"""raise ValueError(\'this is only text in a string\')"""',
    ],
)
def test_a_statement_without_a_telling_message_is_no_finding(statement: str) -> None:
    assert raised_messages(statement.encode()) == []


def test_statements_are_found_wherever_they_nest_in_source_order() -> None:
    source = _source("""
        class A:
            def f(self):
                try:
                    for x in y:
                        raise errors.KindError("raised in a loop") from None
                    else:
                        raise KindError("raised after a loop")
                except A:
                    raise KindError("raised in a handler")
                finally:
                    match x:
                        case 1:
                            raise KindError("raised in a case")
                    with x:
                        async def g():
                            raise KindError("raised in an inner function")
    """)
    assert [finding.line for finding in raised_messages(source)] == [6, 8, 10, 14, 17]
    assert {finding.answer for finding in raised_messages(source)} == {"KindError"}


FUNCTION = """
class A:
    @decorated
    def area(self, width, height):
        \"\"\"Return the area of the rectangle, e.g. a field. More is said here.

        And here.
        \"\"\"
        # width first
        product = width * height
        text = '''
  kept as it is'''
        return product
"""


def test_a_function_is_its_source_without_the_docstring() -> None:
    [finding] = documented_functions(FUNCTION.encode())
    assert finding.line == 4
    assert finding.text == "Return the area of the rectangle, e.g. a field."
    assert finding.answer.splitlines() == [
        "def area(self, width, height):",
        "    # width first",
        "    product = width * height",
        "    text = '''",
        "  kept as it is'''",
        "    return product",
    ]
    compile(finding.answer, "answer", "exec")


@pytest.mark.parametrize(
    "body",
    [
        '"""Return the area of the rectangle."""',
        '"""Return the area of the rectangle."""; return width * height',
        '"""Return the area of the rectangle."""\n    raise NotImplementedError("written by the subclasses")',
        '"""Area."""\n    return width * height * ' + " * ".join(["width"] * 20),
        '"""Return the area of the rectangle."""\n    return 1',
        "return 'Return the area of the rectangle.'",
    ],
    ids=["no body", "one line", "abstract", "says little", "too short", "no docstring"],
)
def test_a_function_that_teaches_nothing_is_no_finding(body: str) -> None:
    assert documented_functions(f"def area_of_rectangle(width, height):\n    {body}\n".encode()) == []


def test_inner_functions_belong_to_the_outer_one() -> None:
    source = FUNCTION.replace(
        "        # width first", '        def inner():\n            """Say what nobody asks."""\n'
    )
    assert [finding.line for finding in documented_functions(source.encode())] == [4]


@pytest.mark.parametrize("source", [b"raise ValueError(", b"raise \x00", b"def raise (x)"])
def test_what_does_not_parse_is_said_to_be_unreadable(source: bytes) -> None:
    with pytest.raises(UnreadableSource, match="Error"):
        raised_messages(source)


def test_windows_line_ends_and_form_feeds_do_not_shift_the_lines() -> None:
    source = ("x = 1\f\n" + FUNCTION).replace("\n", "\r\n").encode()
    [finding] = documented_functions(source)
    assert finding.answer.startswith("def area(")
    assert finding.answer.endswith("return product")


def test_a_text_with_two_answers_is_dropped_and_a_repeat_counts_once() -> None:
    texts = ["Bad input", "bad  INPUT", "no file", "no file", "empty"]
    answers = ["TypeError", "ValueError", "OSError", "OSError", "KeyError"]
    assert mining.without_ambiguous(texts, answers) == [2, 4]


def test_a_class_is_kept_only_if_many_rows_in_many_groups_raise_it() -> None:
    many, groups = mining.CLASS_ROWS, [f"g{number}" for number in range(mining.CLASS_GROUPS)]
    rows = [(name, groups[number % len(groups)]) for name in ("Common", "Exception") for number in range(many)]
    rows += [("Local", "g0")] * (2 * many) + [("Rare", group) for group in groups]
    assert mining.frequent_classes([name for name, _ in rows], [group for _, group in rows]) == {"Common"}


@pytest.mark.parametrize(
    ("counts", "share"), [([900, 50, 30, 20], 0.25), ([10, 10, 10, 10], 0.25), ([500, 400, 3, 2, 1, 1], 0.3)]
)
def test_the_cap_is_the_largest_that_keeps_the_share(counts: list[int], share: float) -> None:
    def largest_share(cap: int) -> float:
        kept = [min(count, cap) for count in counts]
        return max(kept) / sum(kept)

    cap = mining.share_cap(counts, share)
    assert largest_share(cap) <= share
    assert cap == max(counts) or largest_share(cap + 1) > share


def test_too_few_classes_for_the_share_are_left_alone() -> None:
    assert mining.share_cap([5, 3], 0.25) == 5


def test_caps_keep_the_first_of_each_key_by_rank() -> None:
    assert mining.at_most(1, ["a", "a", "b", "a"], ["3", "1", "9", "2"]) == [1, 2]
    kept = mining.balanced(["a"] * 50 + ["b"] * 5 + ["c"] * 5 + ["d"] * 5, 0.4, [f"{n:03}" for n in range(65)][::-1])
    assert kept[0] == 40  # the ranks run backwards: the last ten of "a" stay
    assert Counter("abcd"[min(3, (n >= 50) + (n >= 55) + (n >= 60))] for n in kept)["a"] == 10


def test_selection_counts_every_row_that_goes() -> None:
    groups = [f"g{number % mining.CLASS_GROUPS}" for number in range(300)]
    found = [Finding(1, f"message number {number}", "KindError") for number in range(300)]
    found[1] = Finding(1, "Message number 0", "OtherError")
    found[2] = Finding(1, "seldom raised by anyone", "RareError")
    selection = mining.select_errors(found, groups, [str(number) for number in range(300)])
    assert len(selection.kept) + sum(selection.dropped.values()) == 300
    assert selection.dropped["ambiguous-or-repeated"] == 2
    assert selection.dropped["rare-class"] == 1
