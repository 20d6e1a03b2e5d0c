"""Reads source files and reports what breaks the rules of docs/architecture.md. Runs nothing of what it reads.

Each rule is a function from a source tree to a list of lines `file: what is wrong`; an empty list is a pass.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT_PACKAGE = "millpond"
FUNCTION_LINES = 60
NESTING = 3

NOUNS = frozenset({"types", "errors", "config", "sampling_params", "request", "outputs"})
_RANK_1 = frozenset({"runtime", "kvcache", "models", "lora"})
_RANK_2 = frozenset({"sampling", "scheduler", "spill", "speculative"})
_BELOW_WIRING = (
    _RANK_1
    | _RANK_2
    | {"text", "engine", "engine_client", "receipts", "telemetry", "hooks", "async_llm", "server", "console"}
)

MAY_IMPORT: dict[str, frozenset[str]] = {
    **dict.fromkeys(NOUNS, frozenset[str]()),
    **dict.fromkeys(_RANK_1, frozenset[str]()),
    "text": frozenset({"runtime.base"}),
    "sampling": frozenset({"runtime.base"}),
    "scheduler": frozenset({"kvcache"}),
    "spill": frozenset({"kvcache.payload"}),
    "speculative": frozenset({"runtime.base", "sampling"}),
    "engine": _RANK_1 | _RANK_2,
    "engine_client": frozenset({"engine.messages"}),
    **dict.fromkeys(
        ("receipts", "telemetry", "hooks"),
        frozenset({"engine.messages", "engine_client.observer", "engine_client.token_log"}),
    ),
    "watching": frozenset({"engine", "engine_client", "receipts", "telemetry", "hooks", "models"}),
    "async_llm": frozenset({"engine_client", "text"}),
    "server": frozenset({"async_llm", "console"}),
    "console": frozenset({"async_llm"}),
    "doctor": _RANK_1 | _RANK_2 | {"engine"},
    "wiring": _BELOW_WIRING | {"watching", "doctor"},
    **dict.fromkeys(("llm", "bench", "cli"), _BELOW_WIRING | {"doctor", "wiring", "llm", "bench", "cli"}),
    "__init__": frozenset({"llm", "async_llm"}),
    "__main__": frozenset({"cli"}),
}
"""Part of millpond -> what it may import besides the nouns and itself. A part is a package or a module at the root."""

PURE = ("scheduler", "kvcache", "speculative/verifier.py")
IMPURE_IMPORTS = frozenset(
    {"asyncio", "ctypes", "datetime", "logging", "multiprocessing", "os", "pathlib", "random"}
) | {
    "secrets",
    "shutil",
    "socket",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
FORBIDDEN_NAMES = frozenset({"utils", "util", "common", "helpers", "helper", "misc"})
EXCEPTION_EDGES = (
    "engine/worker.py",
    "server/edge.py",
    "server/streaming.py",
    "hooks/loading.py",
    "hooks/runner.py",
)
"""Files that may catch every Exception: the engine's worker, the HTTP edge, and where plugins' code is run."""


@dataclass(frozen=True, slots=True)
class Module:
    path: PurePosixPath
    """Relative to the package's folder."""
    tree: ast.Module

    @property
    def part(self) -> str:
        return self.path.parts[0].removesuffix(".py")

    @property
    def dotted(self) -> str:
        """Name without the root package; that of a package for its __init__.py."""
        parts = [*self.path.parts[:-1], self.path.stem]
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def read_modules(package: Path) -> list[Module]:
    """Every module below the folder of a package, or of tests and scripts."""
    paths = sorted(path for path in package.rglob("*.py") if "__pycache__" not in path.parts)
    return [Module(PurePosixPath(path.relative_to(package)), _parse(path)) for path in paths]


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_names(module: Module) -> Iterator[str]:
    """Dotted names that the module imports, anywhere in it; relative imports resolved. `from a import b` gives a.b."""
    package = [ROOT_PACKAGE, *module.path.parts[:-1]]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = package[: len(package) - node.level + 1] + base
            yield from (".".join([*base, alias.name]) for alias in node.names)


def rank_violations(modules: list[Module]) -> list[str]:
    """Imports that section 3 of the architecture does not allow."""
    parts = {module.part for module in modules}
    found = [f"{part}: has no rank; add it to the architecture" for part in sorted(parts - MAY_IMPORT.keys())]
    for module in modules:
        allowed = MAY_IMPORT.get(module.part, frozenset()) | NOUNS | {module.part}
        for name in imported_names(module):
            target = name.removeprefix(f"{ROOT_PACKAGE}.")
            if target == name or target.split(".")[0] not in parts:
                continue
            if not any(target == prefix or target.startswith(f"{prefix}.") for prefix in allowed):
                found.append(f"{module.path}: {module.part} may not import {target}")
    return found


def purity_violations(modules: list[Module]) -> list[str]:
    """Clocks, files, threads, randomness and the like in the pure packages."""
    return [
        f"{module.path}: a pure module may not import {name}"
        for module in modules
        if str(module.path).startswith(PURE)
        for name in imported_names(module)
        if name.split(".")[0] in IMPURE_IMPORTS or name.startswith("numpy.random")
    ]


def name_violations(modules: list[Module]) -> list[str]:
    """Packages and modules whose name says nothing."""
    return [
        f"{module.path}: no module or package is called {name}"
        for module in modules
        for name in [*module.path.parts[:-1], module.path.stem]
        if name in FORBIDDEN_NAMES
    ]


def docstring_violations(modules: list[Module]) -> list[str]:
    """Modules that do not start by saying what they know."""
    return [f"{module.path}: no module docstring" for module in modules if not ast.get_docstring(module.tree)]


def length_violations(modules: list[Module]) -> list[str]:
    """Functions over the hard limit, their decorators not counted."""
    return [
        f"{module.path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES}"
        for module in modules
        for node in _functions(module)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]


def nesting_violations(modules: list[Module]) -> list[str]:
    """Functions whose blocks lie deeper than the limit."""
    return [
        f"{module.path}:{node.lineno}: {node.name} is nested {depth} deep, at most {NESTING}"
        for module in modules
        for node in _functions(module)
        if (depth := max(map(_depth, node.body), default=0)) > NESTING
    ]


def broad_except_violations(modules: list[Module]) -> list[str]:
    """`except Exception`, `except BaseException` and bare `except` outside the edges."""
    return [
        f"{module.path}:{node.lineno}: catches everything; only {', '.join(EXCEPTION_EDGES)} may"
        for module in modules
        if str(module.path) not in EXCEPTION_EDGES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and _catches_everything(node.type)
    ]


def cycle_violations(modules: list[Module]) -> list[str]:
    """A cycle of imports between modules, wherever in the module the import stands."""
    known = {module.dotted for module in modules}
    graph = {module.dotted: _module_imports(module, known) for module in modules}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [f"import cycle: {' -> '.join(error.args[1])}"]
    return []


def _module_imports(module: Module, known: set[str]) -> set[str]:
    found: set[str] = set()
    for name in imported_names(module):
        target = name.removeprefix(f"{ROOT_PACKAGE}.")
        parent = target.rpartition(".")[0]
        if target != name and (target in known or parent in known):
            found.add(target if target in known else parent)
    return found - {module.dotted}


def _functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


def _depth(node: ast.stmt | ast.ExceptHandler | ast.match_case) -> int:
    """Blocks inside each other; `elif` counts as its `if`, and inner functions and classes for themselves."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return 0
    own = 1 if isinstance(node, _BLOCKS) else 0
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
            deepest = max(deepest, _depth(child) - (1 if is_elif else 0))
    return own + deepest


def _catches_everything(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(one is None or (isinstance(one, ast.Name) and one.id in ("Exception", "BaseException")) for one in kinds)
