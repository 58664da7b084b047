"""What a file of a token version has to hold, before anybody reads rows of it. Pure: Arrow schemas, no files."""

from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa

from actors.training.steps import COLUMNS, ROW, SAMPLES


def fault(schema: pa.Schema) -> str | None:
    """What a schema lacks to be that of training rows, to follow the file's name; None if it lacks nothing."""
    missing = [name for name in _KINDS if name not in schema.names]
    if missing:
        return f"has no {', '.join(missing)}"
    for name, fits in _KINDS.items():
        if not fits(schema.field(name).type):
            return f"has {schema.field(name).type} as {name}"
    return None


def _lists_of(fits: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    def check(kind: pa.DataType) -> bool:
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        return bool(lists) and fits(kind.value_type)

    return check


def _text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


_KINDS: Final[Mapping[str, Callable[[pa.DataType], bool]]] = {
    **dict.fromkeys(COLUMNS, _lists_of(pa.types.is_integer)),
    ROW: pa.types.is_integer,
    SAMPLES: _lists_of(_text),
}
