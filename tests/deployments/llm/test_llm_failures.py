import pytest
from pydantic import BaseModel, StrictInt, ValidationError

from cluster.errors import CapacityError, RequestError
from deployments.llm.failures import from_report, from_validation


@pytest.mark.parametrize(
    ("message", "status", "code", "param"),
    [
        ("This model's maximum context length is 8 tokens.", 400, "context_length_exceeded", "messages"),
        ("temperature must be non-negative, got -1.0.", 400, "invalid_value", "given"),
        ("The model `x` does not exist.", 404, "model_not_found", "given"),
    ],
)
def test_the_clients_fault_keeps_its_status_and_gets_openais_code(
    message: str, status: int, code: str | None, param: str
) -> None:
    report = {"message": f"{message} (parameter=given, value=[1, (2)])", "param": "given", "code": status}
    error = from_report(report, "chat")
    assert isinstance(error, RequestError)
    assert (error.status, error.code, error.message, error.param) == (status, code, message, param)


@pytest.mark.parametrize("code", [500, 503, None, "nonsense"])
def test_the_engines_fault_is_ours_and_passes(code: object) -> None:
    error = from_report({"message": "CUDA error at /path", "code": code}, "chat")
    assert isinstance(error, CapacityError)
    assert error.retry_after_s >= 1
    assert "/path" not in error.message


@pytest.mark.parametrize(
    "message",
    [
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
        'tool_choice="required" requires --tool-call-parser to be set',
    ],
)
def test_a_missing_tool_parser_is_named_by_our_setting(message: str) -> None:
    error = from_report({"message": message, "code": 400}, "chat")
    assert isinstance(error, RequestError)
    assert (error.status, error.code, error.param) == (400, "tools_not_supported", "tool_choice")
    assert "llm.tool_parser" in str(error.hint)
    assert "--" not in error.message + str(error.hint)


def test_a_wrong_type_is_named_by_the_clients_own_field() -> None:
    class Message(BaseModel):
        role: str
        count: StrictInt | list[int]

    class Body(BaseModel):
        messages: list[Message]

    for message, place in ({"role": "user", "count": "x"}, "messages.0.count"), ({"count": 1}, "messages.0.role"):
        body = {"messages": [message]}
        with pytest.raises(ValidationError) as caught:
            Body.model_validate(body)
        error = from_validation(caught.value, body)
        assert (error.status, error.param) == (400, place)
