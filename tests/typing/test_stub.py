"""_core.pyi says what the built module has: names, bases, arguments and types, compared with a regenerated stub."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import unicron
from unicron import _core

STUB = Path(__file__).resolve().parents[2] / "python" / "unicron" / "_core.pyi"

# What pybind11 accepts is wider than what we promise; the promise is what is compared.
_SIMPLIFIED = (
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "int"),
    (r"typing\.SupportsFloat \| typing\.SupportsIndex", "float"),
    (r"collections\.abc\.Sequence\[", "list["),
    (r"typing\.Any", "object"),
)


def annotation(node: ast.expr | None) -> str:
    text = "None" if node is None else ast.unparse(node)
    for pattern, simple in _SIMPLIFIED:
        text = re.sub(pattern, simple, text)
    return text


def signature(node: ast.FunctionDef) -> str:
    arguments = [f"{a.arg}: {annotation(a.annotation)}" if a.annotation else a.arg for a in node.args.args]
    return f"({', '.join(arguments)}) -> {annotation(node.returns)}"


def described(body: list[ast.stmt]) -> dict[str, str]:
    """Each name with what the stub promises of it; a property with a setter is an attribute."""
    names: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            names[node.name] = f"class({bases})"
            names |= {f"{node.name}.{name}": text for name, text in described(node.body).items()}
        elif isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if f"{node.name}.setter" in decorators:
                names[node.name] = names[node.name].removeprefix("read-only ")
            elif "property" in decorators:
                names[node.name] = f"read-only {annotation(node.returns)}"
            else:
                names[node.name] = signature(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id != "__all__":
            names[node.target.id] = annotation(node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = type(ast.literal_eval(node.value)).__name__
    return names


def test_the_stub_is_the_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pybind11_stubgen", "unicron._core", "-o", str(tmp_path), "--exit-code"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert result.returncode == 0, result.stderr
    generated = described(ast.parse((tmp_path / "unicron" / "_core.pyi").read_text()).body)
    promised = described(ast.parse(STUB.read_text()).body)
    assert promised == generated


def test_the_version_is_one() -> None:
    pyproject = (STUB.parents[2] / "pyproject.toml").read_text()
    assert f'version = "{unicron.__version__}"' in pyproject
    assert _core.__version__ == unicron.__version__


def test_every_function_is_documented() -> None:
    plain = {"monotonic_ns"}  # the name says it all
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name not in plain:
            assert ast.get_docstring(node), node.name
