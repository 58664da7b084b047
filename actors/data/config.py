"""Settings of the data stage. Read without ray, torch or transformers."""

from typing import Literal, Self

from pydantic import Field, model_validator

from cluster.config import Config

Split = Literal["train", "test"]


class SourceConfig(Config):
    """One dataset to read: a mined one by name, or a user's own file or folder by path."""

    source: str
    """`python-errors`, `python-functions`, `python-functions-unnamed`, or a path to JSONL, JSON, Parquet,
    CSV or a `datasets` folder."""
    split: Split = "train"
    limit: int | None = Field(default=None, gt=0)
    """Rows to keep of the split, chosen by a hash of the row, so that a bigger limit only adds rows."""


class NegativesConfig(Config):
    """How many documents each query of pairs is taught to be none of its answers, and which are left alone."""

    per_query: int = Field(default=2, ge=1)
    candidates: int = Field(default=50, ge=1)
    """Documents nearest to a query that are looked at."""
    margin: float = Field(default=0.05, ge=0, lt=1)
    """A document whose similarity to the query comes within this share of the positive's may well be right, too."""
    most_alike: float = Field(default=0.95, gt=-1, le=1)
    """Nor is one a negative that is more similar than this to the positive itself."""
    model: str | None = None
    """What mines: catalog name, Hugging Face id or folder. Unset: the base. For a second round what the first made."""


class DataConfig(Config):
    """What a run learns from and what it is measured on."""

    train: SourceConfig
    eval: SourceConfig | None = None
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share of groups (packages, or rows of a user's file without a `group` column) held out for test."""
    near_duplicate_similarity: float = Field(default=0.8, gt=0, le=1)
    """Jaccard similarity of word 3-grams from which two texts count as the same."""
    max_length: int = Field(default=512, ge=8)
    """Tokens per training sequence; a longer example is quarantined with its reason, not cut.

    Of pairs: tokens that are read of each text, in training and when the embedder is measured; what is longer is read
    as far as that. The made model keeps its base's own limit: serve.embedding.max_tokens sets what is served."""
    packing: bool = True
    """Put several chat examples into one sequence; they do not see each other."""
    seed: int = 0
    negatives: NegativesConfig | None = None
    """Of pairs: hard negatives to mine for the train side. Unset: those of the source, if it has some."""

    @model_validator(mode="after")
    def _eval_is_held_out(self) -> Self:
        if self.eval and (self.eval.source, self.eval.split) == (self.train.source, self.train.split):
            raise ValueError(
                f"eval reads the {self.train.split!r} split of {self.train.source!r}, which train reads; "
                f"set eval.split to {'test' if self.train.split == 'train' else 'train'!r}"
            )
        return self
