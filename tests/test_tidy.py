"""House style as a test: layers, sizes, and words that must not be there.

The layers are those of docs/ARCHITECTURE.md. A rule that has to give way gives way here, with its reason, not silently.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "unicron"

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 700
COLUMNS_MAX = 120

# C++: layer -> layers whose headers it may include.
CSRC_LAYERS = {
    "base": set(),
    "gpu": {"base"},
    "planner": {"base"},
    "monitor": {"base", "gpu"},
    "state": {"base", "gpu"},
    "bindings": {"base", "gpu", "planner", "monitor", "state"},
}

# Python: part of the package -> what it may import of unicron. An entry with a dot allows only that module of a part.
_PURE = {"types", "messages"}
_MACHINES = {"coordinator", "agent", "healing"}
PYTHON_LAYERS = {
    "_core": set(),
    "types": set(),
    "messages": {"types"},
    # planner: its decisions, pure functions too; of the core its statistics, values without a world
    "coordinator": {*_PURE, "planner", "diagnosis", "_core"},
    "agent": {*_PURE, "_core"},
    "healing": _PURE,
    "diagnosis": {"types"},
    "planner": {*_PURE, "_core"},  # of the core its arithmetic: pure functions of their arguments
    "performance": {*_PURE, "planner"},
    "sim": {*_PURE, "coordinator", "agent", "healing", "planner", "performance"},
    "simulate": {"planner", "performance"},  # models of whole clusters; the machines themselves run in sim
    "faults": {"types"},
    "runtime": {*_PURE, "_core", *_MACHINES, "diagnosis", "planner", "performance", "faults"},
    # agent.interfaces: how NCCL reads what names its interface, a pure function that agent and worker must agree on
    "training": {
        *_PURE,
        "_core",
        "healing",
        "faults",
        "runtime.store_client",
        "runtime.framing",
        "runtime.log_role",
        "agent.interfaces",
    },
    "demo": {*_PURE, "_core", "coordinator.config", "coordinator.job", "faults", "runtime", "training"},
}
UNBOUND_PARTS = {"__init__", "cli"}  # may import everything

# A pure machine decides from its arguments: no clock, no chance, no world.
PURE_PARTS = {"coordinator", "agent", "healing", "planner", "diagnosis"}
WORLDLY_MODULES = {
    "asyncio", "logging", "multiprocessing", "os", "secrets", "select", "selectors", "shutil", "signal",
    "socket", "sqlite3", "subprocess", "tempfile", "threading", "time", "zmq",
}  # fmt: skip
TORCH_MODULES = {"torch", "megatron"}
TORCH_PARTS = {"training", "demo"}  # demo: its scripts are what a user would write

FORBIDDEN_WORDS = re.compile("TO" + "DO|FIX" + "ME|X" + "XX")
HOST_NAME = re.compile(r"\b(?:https?|ftp|git|ssh)://(?!127\.0\.0\.1|localhost|[{%<\[])[\w.-]+|\b[\w-]+\.(?:com|org)\b")
PICKLE_IMPORT = re.compile(r"^\s*(?:from|import)\s+(?:c?pickle|dill|cloudpickle|shelve)\b", re.MULTILINE)


def files(*patterns: str) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(path for path in ROOT.glob(pattern) if path.is_file())


def python_files() -> list[Path]:
    return [*files("python/**/*.py", "tests/**/*.py", "bench/**/*.py", "examples/**/*.py", "setup.py")]


def native_files() -> list[Path]:
    return [*files(*(f"{top}/**/*.{end}" for top in ("csrc", "tests/cpp", "tests/fakes") for end in ("h", "cc", "cu")))]


def build_files() -> list[Path]:
    return [*files("Makefile", "CMakeLists.txt", "cmake/*", "tests/cpp/CMakeLists.txt", "tests/gpu/run.sh", ".ci/run")]


def place(path: Path, line: int = 0) -> str:
    return f"{path.relative_to(ROOT)}:{line}" if line else str(path.relative_to(ROOT))


# ---------------------------------------------------------------- layers


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import, wherever it stands in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(path, node.lineno)}: relative import; write the whole name"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_allowed(module: str, part: str) -> bool:
    names = module.split(".")[1:]
    if not names or names[0] == "__version__":
        return True
    return bool({names[0], ".".join(names[:2])} & (PYTHON_LAYERS[part] | {part}))


def test_python_layers() -> None:
    wrong = []
    for path in files("python/unicron/**/*.py"):
        part = part_of(path)
        if part in UNBOUND_PARTS:
            continue
        assert part in PYTHON_LAYERS, f"{place(path)}: give the new part {part!r} its place in tests/test_tidy.py"
        for line, module in imports(path):
            if module.split(".")[0] == "unicron" and not is_allowed(module, part):
                wrong.append(f"{place(path, line)}: {part} must not import {module}")
    assert not wrong, "\n".join(wrong)


def test_pure_machines_touch_no_world() -> None:
    wrong = [
        f"{place(path, line)}: {module} in a pure machine; take it as an event or an argument"
        for path in files("python/unicron/**/*.py")
        if part_of(path) in PURE_PARTS
        for line, module in imports(path)
        if module.split(".")[0] in WORLDLY_MODULES
    ]
    for path in files("python/unicron/**/*.py"):
        if part_of(path) in PURE_PARTS:
            wrong += [
                f"{place(path, line)}: random.{name}; draw from a stream that was handed in"
                for line, name in chance(path)
            ]
    assert not wrong, "\n".join(wrong)


def chance(path: Path) -> Iterator[tuple[int, str]]:
    """Uses of the module `random` other than as the type of a seeded stream."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            if node.attr != "Random":
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "random":
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name != "Random")


def test_torch_only_in_training() -> None:
    wrong = [
        f"{place(path, line)}: {module}"
        for path in files("python/unicron/**/*.py")
        if part_of(path) not in TORCH_PARTS
        for line, module in imports(path)
        if module.split(".")[0] in TORCH_MODULES
    ]
    assert not wrong, "\n".join(wrong)


def test_native_layers() -> None:
    wrong = []
    for path in files("csrc/**/*.h", "csrc/**/*.cc", "csrc/**/*.cu"):
        layer = path.relative_to(ROOT / "csrc").parts[0]
        assert layer in CSRC_LAYERS, f"{place(path)}: give the new layer {layer!r} its place in tests/test_tidy.py"
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.match(r'\s*#include\s+[<"]([^>"]+)[>"]', line)
            if found is None:
                continue
            first = found[1].split("/")[0]
            outside = first in CSRC_LAYERS.keys() - CSRC_LAYERS[layer] - {layer}
            python = first in ("pybind11", "Python.h") and layer != "bindings"
            if outside or python or first in ("torch", "ATen", "c10", ".."):
                wrong.append(f"{place(path, number)}: {layer} must not include {found[1]}")
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------- sizes


def python_functions(path: Path) -> Iterator[tuple[int, str, int]]:
    """(line, name, length)"""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def native_functions(path: Path) -> Iterator[tuple[int, str, int]]:
    """Blocks at the left margin that are no namespace, type or table; clang-format puts their end at the margin too."""
    begin = 0
    name = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        is_opening = re.match(r"^[A-Za-z~].*\{$", line) or re.match(r"^ {4}.*\) (?:const )?\{$", line)
        if begin == 0 and is_opening and not re.match(r"^(?:namespace|class|struct|enum|extern|template)\b", line):
            begin, name = number, line.strip()
        elif begin and line.startswith("}"):
            yield begin, name, number - begin + 1
            begin = 0


def test_functions_fit_a_screen() -> None:
    functions = [(path, *found) for path in python_files() for found in python_functions(path)]
    functions += [(path, *found) for path in native_files() for found in native_functions(path)]
    wrong = [
        f"{place(path, line)}: {name} has {length} lines"
        for path, line, name, length in functions
        if length > FUNCTION_LINES_MAX
    ]
    assert not wrong, "\n".join(wrong)


def test_files_are_one_idea_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (*python_files(), *native_files(), *build_files())}
    wrong = [f"{place(path)} has {lines} lines" for path, lines in lengths.items() if lines > FILE_LINES_MAX]
    assert not wrong, "\n".join(wrong)


def test_lines_are_not_too_wide() -> None:
    wrong = [
        f"{place(path, number)}: {len(line)} columns"
        for path in (*python_files(), *native_files(), *build_files())
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > COLUMNS_MAX
    ]
    assert not wrong, "\n".join(wrong)


def test_setup_stays_short() -> None:
    assert len((ROOT / "setup.py").read_text().splitlines()) <= 60


# ---------------------------------------------------------------- words


def test_no_unfinished_marks_and_no_hosts() -> None:
    wrong = []
    for path in (*python_files(), *native_files(), *build_files()):
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if FORBIDDEN_WORDS.search(line):
                wrong.append(f"{place(path, number)}: unfinished: {line.strip()}")
            if HOST_NAME.search(line):
                wrong.append(f"{place(path, number)}: names a host: {line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_what_is_cited_of_mechanics_is_there() -> None:
    there = set(re.findall(r"^#+ (\d+(?:\.\d+)?)", (ROOT / "docs" / "MECHANICS.md").read_text(), re.MULTILINE))
    texts = (*python_files(), *native_files(), *files("docs/*.md"))
    cited = {
        (place(path), number)
        for path in texts
        for found in re.findall(
            r"MECHANICS(?:\]\(MECHANICS\.md\))? (\d+(?:\.\d+)?(?: and \d+\.\d+)*)", path.read_text()
        )
        for number in found.split(" and ")
    }
    assert len(cited) > 10
    wrong = [f"{where} cites MECHANICS {number}" for where, number in sorted(cited) if number not in there]
    assert not wrong, "\n".join(wrong)


def test_no_pickle() -> None:
    wrong = [place(path) for path in python_files() if PICKLE_IMPORT.search(path.read_text())]
    assert not wrong, "messages cross as msgpack, state as bytes: " + ", ".join(wrong)


def test_every_source_file_says_its_idea() -> None:
    wrong = [
        place(path)
        for path in python_files()
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    # A .cc file whose header of the same name says it does not say it again.
    headers = [path for path in native_files() if path.suffix == ".h"]
    wrong += [place(path) for path in headers if not path.read_text().startswith("//")]
    assert not wrong, "no header: " + ", ".join(wrong)


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest imports them by it: of two of one name it collects the first only, and a folder of them hides that."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_every_fault_point_is_met_in_training() -> None:
    """A point nobody passes is a fault that never goes off."""
    training = "".join(path.read_text() for path in (PACKAGE / "training").rglob("*.py"))
    points = ast.parse((PACKAGE / "faults" / "kinds.py").read_text())
    names = [
        target.id
        for node in ast.walk(points) if isinstance(node, ast.ClassDef) and node.name == "FaultPoint"
        for item in node.body if isinstance(item, ast.Assign)
        for target in item.targets if isinstance(target, ast.Name)
    ]  # fmt: skip
    assert names
    passed = r"\.(maybe|taken|enter|enter_passage|joint)\(\s*FaultPoint\.{}\b|int\(FaultPoint\.{}\)"
    missing = [name for name in names if not re.search(passed.format(name, name), training)]
    assert not missing, missing
