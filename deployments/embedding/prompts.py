"""What stands before a text, by what the text is to its caller. Pure: a model's own prompts and the settings' in, one
answer out.

Many retrieval models are trained with one prompt before questions and another before what answers them, and lose
recall without. The names are sentence-transformers' (`config_sentence_transformers.json`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from deployments.embedding.config import PromptsConfig
from deployments.embedding.port import InputType

_DOCUMENT_NAMES = ("document", "passage", "corpus")
"""As `SentenceTransformer.encode_document` looks for them. Version 6.2 fills in an empty `document` by itself and so
never comes to the others; here the first that says something counts."""


@dataclass(frozen=True)
class Prompts:
    """`default` stands before a text of which nothing is said."""

    default: str = ""
    query: str = ""
    document: str = ""

    def before(self, input_type: InputType | None) -> str:
        """The prompt of such an input."""
        match input_type:
            case "query":
                return self.query
            case "document":
                return self.document
            case None:
                return self.default

    @property
    def all(self) -> tuple[str, str, str]:
        return (self.default, self.query, self.document)


def chosen(of_model: Mapping[str, str | None], default_name: str | None, settings: PromptsConfig) -> Prompts:
    """The model's prompts, each replaced by that of the settings where these have one (an empty one counts).

    Where neither has one for queries or documents, the default stands before these too, as it always has here:
    collections of such models were made with it.
    """
    own = of_model.get(default_name) if default_name else None
    default = (own or "") if settings.default is None else settings.default
    query = of_model.get("query") or default
    document = next((said for name in _DOCUMENT_NAMES if (said := of_model.get(name))), default)
    return Prompts(
        default=default,
        query=query if settings.query is None else settings.query,
        document=document if settings.document is None else settings.document,
    )
