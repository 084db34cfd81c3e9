"""Row: the columns of one JSON object of a trace, each checked when it is read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

INT32_MAX = 2**31 - 1
REQUIRED: Any = object()
_NUMBER_MAX = 2.0**63


class TraceError(ValueError):
    """A trace cannot be replayed. Attributes: `path`, `line` (from 1; 0 for the whole file) and `reason`."""

    def __init__(self, path: str, line: int, reason: str) -> None:
        self.path, self.line, self.reason = path, line, reason
        where = f"{path}, line {line}" if line else path
        super().__init__(f"{where}: {reason}")


def parse(path: str, line: int, text: bytes) -> Row:
    """The columns of an object that begins in this line. Raises TraceError."""
    try:
        found = json.loads(text)
    except UnicodeDecodeError as error:
        raise TraceError(path, line, f"not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise TraceError(path, line + error.lineno - 1, f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(path, line, f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TraceError(path, line, f"a JSON object is expected, found {_kind(found)}")
    return Row(path, line, found)


@dataclass(frozen=True)
class Row:
    """The columns of one line. Every accessor checks type and range, and names a wrong column in its error."""

    path: str
    line: int
    columns: dict[str, Any] = field(repr=False)
    place: str = ""
    """Of an object inside the line: which one."""

    def error(self, reason: str) -> TraceError:
        return TraceError(self.path, self.line, f"{self.place}{reason}")

    def part(self, place: str, columns: Any) -> Row:
        """The columns of an object inside this one."""
        found = Row(self.path, self.line, columns, f"{place}: ")
        if type(columns) is not dict:
            raise found.error(f"a JSON object is expected, found {_kind(columns)}")
        return found

    def integer(self, column: str, lowest: int, highest: int, *, default: Any = REQUIRED) -> int:
        value = self._value(column, default)
        if type(value) is not int:
            raise self.error(f"column {column!r} must be an integer, found {_kind(value)}")
        if not lowest <= value <= highest:
            raise self.error(f"column {column!r} must be within {lowest}..{highest}, found {value}")
        return value

    def integers(self, column: str, highest: int, dtype: type) -> npt.NDArray[Any]:
        values = self._value(column, REQUIRED)
        if type(values) is not list:
            raise self.error(f"column {column!r} must be a list of integers, found {_kind(values)}")
        if set(map(type, values)) - {int}:
            at = next(i for i, value in enumerate(values) if type(value) is not int)
            raise self.error(f"column {column!r} must hold integers, found {_kind(values[at])} at position {at}")
        if values and not 0 <= min(values) <= max(values) <= highest:
            at = next(i for i, value in enumerate(values) if not 0 <= value <= highest)
            raise self.error(f"column {column!r} must hold 0..{highest}, found {values[at]} at position {at}")
        return np.array(values, dtype=dtype)

    def items(self, column: str, length: int | None = None) -> list[Any]:
        """A list of anything, or of lists that are ``length`` long."""
        values = self._value(column, REQUIRED)
        accepted = "a list" if length is None else f"a list of lists of {length}"
        if type(values) is not list or length and any(type(one) is not list or len(one) != length for one in values):
            raise self.error(f"column {column!r} must be {accepted}, found {_kind(values)}")
        return values

    def text(self, column: str) -> str | None:
        value = self.columns.get(column)
        if value is not None and not isinstance(value, str):
            raise self.error(f"column {column!r} must be a string, found {_kind(value)}")
        if value is not None and not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value):
            raise self.error(f"column {column!r} must be Unicode text, found {_kind(value)}, with half a character")
        return value

    def seconds(self, column: str, default: Any) -> float | None:
        """A time, in the unit of the trace. It may be null where the default is None."""
        value = self._value(column, default)
        if value is None and default is None:
            return None
        if type(value) not in (int, float):
            raise self.error(f"column {column!r} must be a number, found {_kind(value)}")
        if not 0 <= value <= _NUMBER_MAX:
            raise self.error(f"column {column!r} must be finite and not negative, found {_kind(value)}")
        return float(value)

    def _value(self, column: str, default: Any) -> Any:
        value = self.columns.get(column, default)
        if value is REQUIRED:
            raise self.error(f"column {column!r} is missing")
        return value


def _kind(value: Any) -> str:
    """Describe a JSON value for a message: its kind, and the value if it is short."""
    names = {bool: "the boolean", int: "the integer", float: "the number", str: "the string"}
    if type(value) in names:
        text = json.dumps(value)
        return f"{names[type(value)]} {text if len(text) <= 40 else text[:37] + '...'}"
    return "a list" if type(value) is list else "an object" if type(value) is dict else "null"
