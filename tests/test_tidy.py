"""Walls, sizes, names and docstrings.  Each check is tried on a bad sample first: it can fail."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("actors", "codecs", "runtime")
FILE_LINES, FILE_LINES_EVER, FUNCTION_LINES, WIDTH = 300, 400, 60, 100
ENTRY_POINTS = {"runtime/cli.py", "runtime/__main__.py", "runtime/api.py"}
FILE_MODULES = {"io", "os", "pathlib", "shutil", "tempfile"}
UNFINISHED = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Wall:
    """One row of the table: what a file that matches ``pattern`` may import and do."""

    pattern: str
    ours: frozenset[str]
    anyio: bool
    mlx: bool
    files: bool


# -- what the checks read


def code_files() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def all_files() -> list[Path]:
    more = [path for name in ("tests", "scripts") for path in (ROOT / name).rglob("*.py")]
    return code_files() + sorted(more)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def table(document: str, heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading of ``docs/architecture.md``."""
    section = document.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def walls_of(document: str) -> list[Wall]:
    found = []
    for pattern, ours, anyio, mlx, files in table(document, "Walls"):
        flags = [{"yes": True, "no": False}[cell] for cell in (anyio, mlx, files)]
        found.append(Wall(pattern, frozenset(ours.split()), *flags))
    return found


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere, ``from a import b`` giving both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours_of(module: str) -> str:
    """``millpond.actors.store`` → ``actors``; empty for what is not ours."""
    parts = module.split(".")
    return parts[1] if parts[0] == "millpond" and len(parts) > 1 else ""


# -- the checks: each gives the faults of one file


def wall_faults(name: str, source: str, walls: list[Wall]) -> list[str]:
    matching = [wall for wall in walls if fnmatch(name, wall.pattern)]
    if not matching:
        return [f"{name}: no row of the walls table matches"]
    wall, tree = matching[-1], ast.parse(source)
    faults = []
    for module in imports_of(tree):
        top, ours = module.split(".")[0], ours_of(module)
        if module.startswith("."):
            faults.append(f"{name}: relative import")
        elif top in PACKAGES and top != "codecs":
            faults.append(f"{name}: {module} is imported without millpond")
        elif ours and ours not in wall.ours and not is_own(name, module, wall):
            faults.append(f"{name}: may not import {module}")
        elif (
            (top == "anyio" and not wall.anyio)
            or (top == "mlx" and not wall.mlx)
            or (top in FILE_MODULES and not wall.files and name.startswith("codecs/"))
        ):
            faults.append(f"{name}: may not import {top}")
    if not wall.files and any(is_open(node) for node in ast.walk(tree)):
        faults.append(f"{name}: may not open files")
    return faults


def is_own(name: str, module: str, wall: Wall) -> bool:
    """An actor may import its own files: ``engine.py``, ``engine_*.py``, or all of ``http/``."""
    parts = module.split(".")
    mine = name.split("/")[1].removesuffix(".py").split("_")[0]
    return "own" in wall.ours and len(parts) > 2 and parts[2].split("_")[0] == mine


def is_open(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    return called in ("open", "os.open", "io.open") or called.endswith(
        (".read_bytes", ".read_text")
    )


def size_faults(name: str, source: str, excused: set[str]) -> list[str]:
    lines = source.splitlines()
    limit = FILE_LINES if name.startswith(PACKAGES) and name not in excused else FILE_LINES_EVER
    faults = [f"{name}: {len(lines)} lines, at most {limit}"] if len(lines) > limit else []
    for number, line in enumerate(lines, 1):
        if len(line) > WIDTH and not name.startswith("tests/"):
            faults.append(f"{name}:{number}: {len(line)} characters, at most {WIDTH}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function) and (count := body_lines(node)) > FUNCTION_LINES:
            faults.append(f"{name}: {node.name} has {count} lines, at most {FUNCTION_LINES}")
    return faults


def body_lines(node: Function) -> int:
    """Lines of a function, decorators and docstring not counted."""
    assert node.end_lineno is not None
    count = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None and first.end_lineno is not None:
        count -= first.end_lineno - first.lineno + 1
    return count


def style_faults(name: str, source: str, excused: set[str]) -> list[str]:
    faults = [
        f"{name}: {word.group()} in the text"
        for word in re.finditer(
            r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|NotImplemented" r"Error)\b", source
        )
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and not is_narrow(node) and name not in excused:
            faults.append(f"{name}:{node.lineno}: catches everything")
        if isinstance(node, Function | ast.ClassDef) and is_vague(node.name):
            faults.append(f"{name}:{node.lineno}: {node.name} says too little")
    if any(is_vague(part) for part in Path(name).with_suffix("").parts):
        faults.append(f"{name}: a name that says too little")
    return faults


def is_narrow(handler: ast.ExceptHandler) -> bool:
    """No ``except Exception``; ``except BaseException`` only where it re-raises at its end."""
    if handler.type is None:
        return False
    caught = {ast.unparse(part) for part in ast.walk(handler.type) if isinstance(part, ast.expr)}
    last = handler.body[-1]
    re_raises = isinstance(last, ast.Raise) and last.exc is None
    return "Exception" not in caught and ("BaseException" not in caught or re_raises)


def is_vague(name: str) -> bool:
    plain = name.strip("_").lower()
    return (
        plain.startswith("handle_")
        or plain.endswith("manager")
        or plain in ("util", "utils", "common", "helpers", "misc")
    )


def docstring_faults(name: str, source: str) -> list[str]:
    """Fields that the docstring of their class does not name."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            words = set(re.findall(r"\w+", ast.get_docstring(node) or ""))
            fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            missing = [field.id for field in fields if isinstance(field, ast.Name)]
            missing = [field for field in missing if field not in words]
            if missing:
                faults.append(f"{name}: {node.name} does not explain {', '.join(missing)}")
    return faults


def dead_files(sources: dict[str, str]) -> list[str]:
    """Files that no other file of the packages imports, and that are no entry point."""
    used = set()
    for name, source in sources.items():
        for module in imports_of(ast.parse(source)):
            if module != module_of(name):
                used.add(module)
    return [
        name
        for name in sources
        if module_of(name) not in used
        and name not in ENTRY_POINTS
        and not name.endswith("__init__.py")
        and not name.startswith("runtime/testing/")
    ]


def module_of(name: str) -> str:
    return "millpond." + name.removesuffix(".py").replace("/", ".")


# -- each check on a bad sample

WALLS = walls_of((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("codecs/x.py", "import anyio"),
        ("codecs/x.py", "def f():\n    from millpond.runtime import config"),
        ("codecs/x.py", "from pathlib import Path"),
        ("codecs/x.py", "open('f')"),
        ("runtime/x.py", "from millpond.actors.store import Store"),
        ("runtime/x.py", "from millpond import actors"),
        ("runtime/x.py", "from mlx import core"),
        ("runtime/x.py", "from . import config"),
        ("runtime/x.py", "import actors.store"),
        ("runtime/scheduler.py", "from anyio.abc import TaskGroup"),
        ("actors/gateway.py", "import millpond.actors.store"),
        ("actors/gateway.py", "from millpond.actors import engine"),
        ("actors/engine_x.py", "import mlx.core as mx"),
        ("elsewhere/x.py", ""),
    ],
)
def test_a_broken_wall_is_found(name: str, source: str) -> None:
    assert len(wall_faults(name, source, WALLS)) >= 1


def test_an_allowed_import_is_no_fault() -> None:
    allowed = "from millpond.actors.engine_offers import Offers\nimport anyio\nimport codecs"
    assert wall_faults("actors/engine.py", allowed, WALLS) == []
    inside = "from millpond.actors.http.routes import Routes"
    assert wall_faults("actors/http/server.py", inside, WALLS) == []
    assert wall_faults("actors/engine.py", inside, WALLS) != []
    assert wall_faults("runtime/kv/cache.py", "import mlx.core as mx", WALLS) == []


def test_a_long_file_line_or_function_is_found() -> None:
    long_function = "def f():\n" + "    x = 1\n" * 60
    assert size_faults("runtime/x.py", long_function, set()) != []
    assert size_faults("runtime/x.py", 'def f():\n    """D."""\n' + "    x = 1\n" * 59, set()) == []
    assert size_faults("runtime/x.py", "x = 1\n" * 301, set()) != []
    assert size_faults("runtime/x.py", "x = 1\n" * 301, {"runtime/x.py"}) == []
    assert size_faults("runtime/x.py", "x = 1\n" * 401, {"runtime/x.py"}) != []
    assert size_faults("scripts/x.py", "# " + "x" * 99, set()) != []


@pytest.mark.parametrize(
    "source",
    [
        "try: f()\nexcept Exception: pass",
        "try: f()\nexcept: pass",
        "try: f()\nexcept (KeyError, BaseException): pass",
        "# TO" + "DO later",
        "def handle_it(): pass",
        "class CacheManager: pass",
    ],
)
def test_bad_style_is_found(source: str) -> None:
    assert style_faults("runtime/x.py", source, set()) != []


def test_clean_up_and_re_raise_is_no_fault() -> None:
    source = "try: f()\nexcept BaseException:\n  g()\n  raise"
    assert style_faults("runtime/x.py", source, set()) == []
    assert style_faults("runtime/utils.py", "", set()) != []


def test_an_unexplained_field_is_found() -> None:
    bad = (
        'class A(Struct):\n    """One.\n\n    count  of x\n    """\n    count: int\n    bytes: int'
    )
    assert docstring_faults("codecs/x.py", bad) == ["codecs/x.py: A does not explain bytes"]


def test_a_dead_file_is_found() -> None:
    files = {"runtime/a.py": "from millpond.runtime import b", "runtime/b.py": ""}
    assert dead_files(files) == ["runtime/a.py"]


# -- the tree itself

DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CODE = {name_of(path): path.read_text(encoding="utf-8") for path in code_files()}
ALL = {name_of(path): path.read_text(encoding="utf-8") for path in all_files()}


def excused_by(heading: str) -> set[str]:
    return {row[0] for row in table(DOCUMENT, heading)}


def test_no_import_crosses_a_wall() -> None:
    assert [f for name, source in CODE.items() for f in wall_faults(name, source, WALLS)] == []


def test_every_wall_has_a_file_behind_it() -> None:
    assert [w.pattern for w in WALLS if not any(fnmatch(name, w.pattern) for name in CODE)] == []


def test_files_lines_and_functions_keep_their_sizes() -> None:
    excused = excused_by("Sizes")
    assert [f for name, source in ALL.items() for f in size_faults(name, source, excused)] == []


def test_nothing_is_caught_blindly_left_undone_or_named_vaguely() -> None:
    excused = excused_by("Blind catches")
    assert [f for name, source in ALL.items() for f in style_faults(name, source, excused)] == []


def test_no_exception_to_a_rule_outlives_its_reason() -> None:
    assert all(size_faults(name, ALL[name], set()) for name in excused_by("Sizes"))
    assert all(style_faults(name, ALL[name], set()) for name in excused_by("Blind catches"))


def test_every_field_of_a_descriptor_is_explained() -> None:
    for name in ("codecs/messages.py", "codecs/descriptors.py"):
        assert docstring_faults(name, CODE[name]) == []


def test_no_file_is_dead() -> None:
    assert set(dead_files(CODE)) == excused_by("Not used yet")


def test_the_documentation_names_every_file_of_the_tree() -> None:
    section = DOCUMENT.split("\n## The tree\n", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))
    assert named == {name for name in CODE if not name.endswith("__init__.py")}


def test_our_packages_are_imported_under_one_name() -> None:
    assert {"actors", "runtime"} & set(sys.modules) == set()
