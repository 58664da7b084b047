import pytest

from actors.data.examples import ChatExample
from actors.evaluation.suites import Case, cases, exact_match, most_frequent
from cluster.errors import ConfigError


def example(number: int) -> ChatExample:
    return ChatExample(
        id=f"row-{number}",
        messages=[{"role": "user", "content": f"text {number}"}, {"role": "assistant", "content": "ValueError"}],
        group="package",
    )


def test_a_case_asks_everything_but_the_answer() -> None:
    (case,) = cases([example(1)])
    assert case.prompt == [{"role": "user", "content": "text 1"}]
    assert (case.reference, case.group) == ("ValueError", "package")


def test_a_bigger_limit_only_adds_cases_whatever_the_order_of_the_examples() -> None:
    examples = [example(number) for number in range(50)]
    ten, twenty = cases(examples, limit=10), cases(examples[::-1], limit=20)
    assert twenty[:10] == ten


def test_an_example_without_an_answer_is_named() -> None:
    unanswered = ChatExample("row-9", [{"role": "user", "content": "why?"}], "package")
    with pytest.raises(ConfigError, match="row-9"):
        cases([unanswered])


@pytest.mark.parametrize("answer", ["ValueError", " ValueError.\n", "`ValueError`", '**"ValueError"**.', "ValueError."])
def test_form_is_forgiven(answer: str) -> None:
    assert exact_match(answer, "ValueError")


@pytest.mark.parametrize("answer", ["valueerror", "A ValueError", "ValueError or TypeError", "", "Value Error"])
def test_content_is_not(answer: str) -> None:
    assert not exact_match(answer, "ValueError")


def test_one_text_in_two_unicode_forms_is_one_text() -> None:
    assert exact_match("caf\u0065\u0301", "caf\u00e9")


def test_the_most_frequent_answer_is_counted_as_it_is_compared() -> None:
    references = ["ValueError", "`ValueError`", "KeyError", "TypeError", "KeyError."]
    asked = [Case(str(number), [], reference, "g") for number, reference in enumerate(references)]
    assert most_frequent(asked) == "KeyError"
    assert most_frequent(asked[:2] + asked[3:4]) == "ValueError"
