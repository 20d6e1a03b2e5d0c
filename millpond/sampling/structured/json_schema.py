"""Which JSON schemas may be compiled, and what of them is left out first. Knows JSON schema; no compiler, no tokens.

Fails closed: a keyword that narrows what is valid and cannot be enforced is refused by name and path. What narrows
nothing (annotations, `uniqueItems: false`) is left out. Every walk is bounded: in depth, nodes and what a value costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeAlias, cast

import msgspec

from millpond.sampling.structured.regex import RegexError, check_regex

Schema: TypeAlias = dict[str, Any]

MAX_DEPTH = 64
MAX_NODES = 4000
MAX_VALUES = 10_000
"""Values in all enums together."""
MAX_REFERENCED_DEPTH = 1500
"""Sum of the depths of all referenced schemas: how deep a walk that follows references can get."""
MAX_MULTIPLE = 20_000
"""`multipleOf`, without its decimal point: the automaton has so many states."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "additionalItems")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
_ANNOTATED_FORMATS = frozenset(
    {"binary", "byte", "password", "path", "file-path", "directory-path", "int32", "int64", "float", "double"}
)
"""Formats that say how a value is used or stored, and nothing that a text could break."""
_OPTIONS = "x-guidance"
"""The compiler's own keyword: a client must not loosen the compiler."""


class SchemaError(Exception):
    """Caught in compiler.py. `str` is fit for the client; names the place as a path like $.properties.name."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"at {path}: {message}")


def _is_true(value: object) -> bool:
    return value is True or value == {}


_NOT_ENFORCED: Mapping[str, Callable[[object], bool]] = {
    "not": lambda value: value is False,
    "if": lambda value: False,
    "then": lambda value: False,
    "else": lambda value: False,
    "uniqueItems": lambda value: value is False,
    "contains": lambda value: False,
    "minContains": lambda value: value == 0,
    "maxContains": lambda value: False,
    "propertyNames": _is_true,
    "dependentRequired": lambda value: value == {},
    "dependentSchemas": lambda value: value == {},
    "dependencies": lambda value: value == {},
    "unevaluatedProperties": _is_true,
    "unevaluatedItems": _is_true,
    "$dynamicRef": lambda value: False,
    "$dynamicAnchor": lambda value: False,
    "$recursiveRef": lambda value: False,
    "$recursiveAnchor": lambda value: value is False,
}
"""Keywords that narrow what is valid -> whether a value of theirs does not."""


def parse_schema(text: str) -> Any:
    """Raises SchemaError for what is no JSON, or JSON that is no schema."""
    try:
        parsed = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SchemaError("$", f"this is not JSON: {error}") from error
    if not isinstance(parsed, dict | bool):
        raise SchemaError("$", "a schema is an object or a boolean")
    return cast("Any", parsed)


def checked_schema(text: str) -> Any:
    """The schema without what narrows nothing. Raises SchemaError, naming keyword and path."""
    root = parse_schema(text)
    schema = _Walk().copy(root, "$", 0)
    check_references(schema)
    return schema


class _Walk:
    """Copies a schema, checking each node of it once."""

    def __init__(self) -> None:
        self._nodes = 0
        self._values = 0

    def copy(self, node: Any, path: str, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise SchemaError(path, f"the schema has more than {MAX_NODES} subschemas")
        if depth > MAX_DEPTH:
            raise SchemaError(shortened(path), f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise SchemaError(path, "a schema is an object or a boolean")
        schema = cast("Schema", node)
        if depth and _is_true(schema.get("not")):
            return False  # what generators write for "never": nothing is valid here
        self._check_values(schema, path)
        kept: Schema = {}
        for key, value in schema.items():
            harmless = _NOT_ENFORCED.get(key)
            if harmless is not None and not harmless(value):
                raise SchemaError(path, f"the keyword {key!r} is not supported")
            if harmless is None and key != _OPTIONS and not (key == "format" and value in _ANNOTATED_FORMATS):
                kept[key] = self._copy_value(key, value, path, depth)
        return kept

    def _copy_value(self, key: str, value: Any, path: str, depth: int) -> Any:
        inner = f"{path}.{key}"
        if key in _SINGLES and not (key == "items" and isinstance(value, list)):
            return self.copy(value, inner, depth + 1)
        if key in _MAPS:
            if not isinstance(value, dict):
                raise SchemaError(inner, "must be an object")
            named = cast("dict[str, Any]", value)
            return {name: self.copy(one, f"{inner}.{name}", depth + 1) for name, one in named.items()}
        if key in _LISTS or key == "items":
            if not isinstance(value, list):
                raise SchemaError(inner, "must be an array")
            ones = cast("list[Any]", value)
            return [self.copy(one, f"{inner}[{place}]", depth + 1) for place, one in enumerate(ones)]
        return cast("Any", value)

    def _check_values(self, schema: Schema, path: str) -> None:
        _check_type(schema, path)
        for key in _NUMBERS:
            value = schema.get(key, 0)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SchemaError(path, f"{key!r} must be a number")
        for key in _COUNTS:
            value = schema.get(key, 0)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise SchemaError(path, f"{key!r} must be a whole number of at least 0")
        if "multipleOf" in schema:
            _check_multiple(schema["multipleOf"], path)
        named = schema.get("patternProperties")
        patterns = [*cast("dict[str, Any]", named)] if isinstance(named, dict) else []
        for pattern in [*patterns, schema["pattern"]] if "pattern" in schema else patterns:
            _check_pattern(pattern, path)
        enum = schema.get("enum")
        if isinstance(enum, list):
            self._values += len(cast("list[Any]", enum))
            if self._values > MAX_VALUES:
                raise SchemaError(path, f"'enum' has too many values, at most {MAX_VALUES} in a schema")


def _check_type(schema: Schema, path: str) -> None:
    given = schema.get("type")
    names = cast("list[Any]", given) if isinstance(given, list) else [given] if given is not None else []
    for name in names:
        if not isinstance(name, str) or name not in _TYPES:
            raise SchemaError(path, f"'type' must be one of {', '.join(sorted(_TYPES))}")


def _check_multiple(value: float, path: str) -> None:
    exact = Decimal(str(value)).normalize()
    exponent = exact.as_tuple().exponent
    unscaled = exact.scaleb(-exponent) if isinstance(exponent, int) and exponent < 0 else exact
    if value <= 0 or unscaled > MAX_MULTIPLE:
        raise SchemaError(path, f"'multipleOf' must be above 0 and, without its point, at most {MAX_MULTIPLE}")


def _check_pattern(pattern: object, path: str) -> None:
    if not isinstance(pattern, str):
        raise SchemaError(path, "'pattern' must be a string")
    try:
        check_regex(pattern)
    except RegexError as error:
        raise SchemaError(path, f"'pattern': {error}") from error


# -- references --------------------------------------------------------------------------------------------------------


def check_references(root: Any) -> None:
    """Every `$ref` leads to a schema here, walks that follow them stay shallow, and some finite value is valid."""
    if not isinstance(root, dict):
        return
    schema = cast("Schema", root)
    targets: dict[str, Any] = {}
    for path, node in subschemas(schema):
        reference = node.get("$ref")
        if reference is not None and reference not in targets:
            targets[_text(reference, path)] = resolve(schema, reference, path)
    deepest = sum(_depth(target) for target in targets.values())
    if deepest > MAX_REFERENCED_DEPTH:
        raise SchemaError("$", f"references lead more than {MAX_REFERENCED_DEPTH} levels deep")
    _check_finite(schema, targets)


def _text(reference: object, path: str) -> str:
    if not isinstance(reference, str):
        raise SchemaError(path, "'$ref' must be a string")
    return reference


def resolve(root: Schema, reference: object, path: str) -> Any:
    """The schema that a JSON pointer in this document names. Raises SchemaError."""
    text = _text(reference, path)
    if text == "#":
        return root
    if not text.startswith("#/"):
        raise SchemaError(path, f"'$ref': only references inside the schema are supported, not {text[:80]!r}")
    node: Any = root
    for part in text[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = cast("Schema", node).get(key)
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(cast("list[Any]", node)):
            node = cast("list[Any]", node)[int(key)]
        else:
            node = None
    if not isinstance(node, dict | bool):
        raise SchemaError(path, f"'$ref': {text[:80]!r} names no schema")
    return cast("Any", node)


def children(schema: Schema) -> Iterator[tuple[str, Any]]:
    """(path from the schema, subschema), one level down."""
    for key in _MAPS:
        for name, one in cast("dict[str, Any]", schema.get(key) or {}).items():
            yield f".{key}.{name}", one
    for key in (*_LISTS, *_SINGLES):
        value = schema.get(key)
        if isinstance(value, list):
            yield from ((f".{key}[{n}]", one) for n, one in enumerate(cast("list[Any]", value)))
        elif value is not None:
            yield f".{key}", value


def subschemas(root: Schema, path: str = "$") -> Iterator[tuple[str, Schema]]:
    """Every object among root's schemas, the outer ones first."""
    pending: list[tuple[str, Any]] = [(path, root)]
    while pending:
        place, node = pending.pop()
        if isinstance(node, dict):
            schema = cast("Schema", node)
            yield place, schema
            pending.extend((place + step, one) for step, one in children(schema))


def _depth(node: Any) -> int:
    if not isinstance(node, dict):
        return 1
    return 1 + max((_depth(one) for _, one in children(cast("Schema", node))), default=0)


# -- is there a finite value? ------------------------------------------------------------------------------------------


def _check_finite(root: Schema, targets: Mapping[str, Any]) -> None:
    """Least fixed point: a reference is finite once its target is, without going through itself."""
    finite: set[str] = set()
    while True:
        news = {ref for ref, target in targets.items() if ref not in finite and _is_finite(target, finite)}
        if not news:
            break
        finite |= news
    if not _is_finite(root, finite):
        endless = sorted(targets.keys() - finite)
        raise SchemaError("$", f"no value can be valid: these '$ref's lead back to themselves: {endless[:5]}")
    for path, node in subschemas(root):
        reference = node.get("$ref")
        if reference is not None and reference not in finite:
            raise SchemaError(path, f"'$ref': no finite value is valid for {reference!r}")


def _is_finite(node: Any, finite: set[str]) -> bool:
    if not isinstance(node, dict):
        return True  # false is the compiler's to refuse
    schema = cast("Schema", node)
    if "$ref" in schema and schema["$ref"] not in finite:
        return False
    for key, agree in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if key in schema and not agree(_is_finite(one, finite) for one in schema[key]):
            return False
    kinds = schema.get("type", sorted(_TYPES))
    kinds = cast("list[str]", kinds if isinstance(kinds, list) else [kinds])
    return any(_kind_is_finite(kind, schema, finite) for kind in kinds) or not kinds


def _kind_is_finite(kind: str, schema: Schema, finite: set[str]) -> bool:
    if kind == "object":
        needed = cast("list[Any]", schema.get("required") or [])
        properties = cast("dict[str, Any]", schema.get("properties") or {})
        return all(_is_finite(properties.get(name, True), finite) for name in needed if isinstance(name, str))
    if kind == "array":
        least = cast("int", schema.get("minItems", 0))
        first = cast("list[Any]", schema.get("prefixItems") or [])
        rest: Any = schema.get("items", True)
        return all(_is_finite(one, finite) for one in first[:least]) and (
            least <= len(first) or isinstance(rest, list) or _is_finite(rest, finite)
        )
    return True


def shortened(path: str, limit: int = 200) -> str:
    return path if len(path) <= limit else path[: limit // 2] + "…" + path[-limit // 2 :]
