"""The JSON bodies that clients send and get, as far as the gateway reads them.

Of a generation it reads the model and how to stream; everything else is the engine's to validate, so that a
parameter which vLLM learns tomorrow passes today. Types are strict: `"stream": "yes"` is an error, not true.
"""

import base64
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from cluster.errors import RequestError
from deployments.embedding.port import InputType
from deployments.llm.failures import from_validation

MAX_INPUTS = 2048
"""Inputs of one embeddings request, as OpenAI bounds it."""

Body = TypeVar("Body", bound=BaseModel)
Text = Annotated[StrictStr, Field(min_length=1)]
ModelName = Annotated[StrictStr, Field(min_length=1, max_length=512)]
"""The longest that can exist has half of it. A longer one would only come back whole in an error."""
TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1)]


class StreamOptions(BaseModel):
    """How to stream. Further keys go to the engine."""

    model_config = ConfigDict(extra="allow")

    include_usage: StrictBool | None = None


class SessionBody(BaseModel):
    """What says which requests belong together (`session.py`): OpenAI's names, the more telling ones first."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    prompt_cache_key: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    user: StrictStr | None = None


class GenerationBody(SessionBody):
    """What chat and text completions have in common."""

    model: ModelName
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def for_engine(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The client's body, with usage always asked for in streams: the gateway counts tokens by it."""
        if not self.stream:
            return raw
        return {**raw, "stream_options": {**(raw.get("stream_options") or {}), "include_usage": True}}


class ChatBody(GenerationBody):
    """`/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]


class CompletionBody(GenerationBody):
    """`/v1/completions`."""

    prompt: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]


class TokensBody(SessionBody):
    """`/tokenize` and `/detokenize`, as vLLM has them; without a model, the only base."""

    model: ModelName | None = None


class ScoreBody(BaseModel):
    """`/v1/score`: how near each document is to its query, or to the one query. vLLM's names, old and new."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: ModelName
    queries: Annotated[list[Text], Field(min_length=1, validation_alias=AliasChoices("queries", "text_1"))]
    documents: Annotated[list[Text], Field(min_length=1, validation_alias=AliasChoices("documents", "text_2"))]

    @field_validator("queries", "documents", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if len(self.queries) not in (1, len(self.documents)):
            raise ValueError(
                f"{len(self.queries)} queries and {len(self.documents)} documents make no pairs: "
                "give one query, or one for each document"
            )
        if len(self.documents) + len(self.queries) > MAX_INPUTS:
            raise ValueError(f"at most {MAX_INPUTS} texts in one request")
        return self


class EmbeddingsBody(BaseModel):
    """`/v1/embeddings`: OpenAI's, and `input_type` and `truncate` beside."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: ModelName
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    input_type: InputType | None = None
    """Before which of the model's prompts the inputs belong. Cohere's and Voyage's word."""
    truncate: StrictBool = False
    """Read only the beginning of an input that is too long."""

    @field_validator("input")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        inputs = value if isinstance(value, list) and not _is_token_ids(value) else [value]
        if not inputs:
            raise ValueError("give at least one text")
        if len(inputs) > MAX_INPUTS:
            raise ValueError(f"at most {MAX_INPUTS} inputs in one request, got {len(inputs)}")
        if all(isinstance(one, str) for one in inputs):
            if empty := [index for index, one in enumerate(inputs) if not one]:
                raise ValueError(f"input {empty[0]} is an empty string")
            return inputs
        if all(_is_token_ids(one) for one in inputs):
            return inputs
        raise ValueError("give a string, a list of strings, a list of token ids, or a list of such lists")


class RankedDocument(BaseModel):
    """A document to rank, where it is an object."""

    model_config = ConfigDict(extra="ignore")

    text: Text


class RerankBody(BaseModel):
    """`/v1/rerank`, as Cohere and Jina have it, and `truncate` beside."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: ModelName
    query: Text
    documents: Annotated[list[Text | RankedDocument], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[StrictInt, Field(ge=1)] | None = None
    return_documents: StrictBool = False
    truncate: StrictBool = False
    """Read only the beginning of what is too long."""

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


class DocumentBody(BaseModel):
    """One document to keep; without an id it gets one from its text."""

    model_config = ConfigDict(extra="forbid")

    id: Text | None = None
    text: Text
    metadata: dict[str, Any] = {}


class DocumentsBody(BaseModel):
    """`/v1/collections/{name}/documents`."""

    model_config = ConfigDict(extra="forbid")

    documents: Annotated[list[DocumentBody], Field(min_length=1)]


class SearchBody(BaseModel):
    """`/v1/collections/{name}/search`."""

    model_config = ConfigDict(extra="forbid")

    query: Text
    k: Annotated[StrictInt, Field(ge=1, le=1000)] = 10
    filter: dict[str, StrictBool | StrictInt | StrictFloat | StrictStr] | None = None
    """Equalities on metadata."""


def parse(body_class: type[Body], content: bytes) -> tuple[Body, dict[str, Any]]:
    """The body as a model and as it came. Raises `RequestError` for bad JSON and for wrong types."""
    try:
        raw = _loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise RequestError(f"The body is a JSON {type(raw).__name__}, not an object.", code="invalid_json")
    try:
        return body_class.model_validate(raw), raw
    except ValidationError as error:
        raise from_validation(error, raw) from None


def embeddings_content(
    model: str, vectors: NDArray[np.float32], tokens: Sequence[int], encoding_format: Literal["float", "base64"]
) -> bytes:
    """OpenAI's response, as JSON, for `vectors` [N, D] float32, in the order of the inputs.

    Written row by row: as one object, `json` would keep every other thread waiting until the last number.
    """
    total, packed = int(sum(tokens)), encoding_format == "base64"
    rows = (
        _json({"object": "embedding", "index": index, "embedding": encode(row) if packed else row.tolist()})
        for index, row in enumerate(vectors)
    )
    usage = {"prompt_tokens": total, "total_tokens": total}
    return f'{{"object":"list","model":{_json(model)},"data":[{",".join(rows)}],"usage":{_json(usage)}}}'.encode()


def score_response(
    model: str, scores: Sequence[float], tokens: int, *, request_id: str, created: int
) -> dict[str, Any]:
    """vLLM's response: one score for each document, in their order."""
    return {
        "id": request_id,
        "object": "list",
        "created": created,
        "model": model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
    }


def rerank_response(
    model: str,
    scores: NDArray[np.float32],
    tokens: int,
    *,
    request_id: str,
    top_n: int | None = None,
    documents: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The `top_n` best of `scores` [N], best first, equal ones in their order; with `documents`, each with its text."""
    best = np.argsort(-scores, kind="stable")[:top_n].tolist()
    results: list[dict[str, Any]] = [{"index": at, "relevance_score": float(scores[at])} for at in best]
    if documents is not None:
        results = [{**result, "document": {"text": documents[result["index"]]}} for result in results]
    return {
        "id": request_id,
        "model": model,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def encode(vector: NDArray[np.float32]) -> str:
    """Base64 of the vector's bytes as little-endian float32, whatever the machine: what the official SDK decodes."""
    return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode("ascii")


def _loads(content: bytes) -> Any:
    """pydantic's reader takes a tenth of `json`'s time for text, a fifth for token ids, and no other thread runs
    meanwhile. What it refuses, `json` decides: it takes half a surrogate pair, and names faults as it always has."""
    try:
        return from_json(content)
    except ValueError:
        return json.loads(content)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _is_token_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value)
    )
