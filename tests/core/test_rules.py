"""The project's own rules about its code: who imports whom, how long things are, what is packaged."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = ("data", "hidden_state_capture", "train", "eval", "export")
PUBLIC = ("draftsmith.hidden_state_capture.reader", "draftsmith.data.batching")
SOURCES = sorted(f for package in ("core", "configs", *STAGES) for f in (ROOT / package).rglob("*.py"))
OURS = [*SOURCES, *sorted(f for d in ("tests", "benchmarks") for f in (ROOT / d).rglob("*.py"))]


def name(file):
    return str(file.relative_to(ROOT))


def imports(tree):
    """Every module of ours that the code imports, as dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            found = ["a relative import"]
        elif isinstance(node, ast.ImportFrom):
            # `from draftsmith import train` imports draftsmith.train.
            top = node.module == "draftsmith"
            found = [f"{node.module}.{a.name}" if top else str(node.module) for a in node.names]
        else:
            continue
        yield from (m for m in found if m.split(".")[0] in ("draftsmith", "a relative import"))


def parse(file):
    return ast.parse(file.read_text(encoding="utf-8"))


def within(module, package):
    return module == package or module.startswith(f"{package}.")


def test_the_walk_sees_every_way_of_importing():
    code = "import draftsmith.a, os\nfrom draftsmith import b\ndef f():\n  from draftsmith.c import d\nfrom . import e"
    found = set(imports(ast.parse(code)))
    assert found == {"draftsmith.a", "draftsmith.b", "draftsmith.c", "a relative import"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_only_core_and_itself(stage):
    allowed = ("draftsmith.core", f"draftsmith.{stage}", *PUBLIC)
    wrong = {
        (name(file), module)
        for file in (ROOT / stage).rglob("*.py")
        for module in imports(parse(file))
        if not any(within(module, a) for a in allowed)
    }
    assert not wrong


def test_core_imports_no_stage_and_the_cli_does_so_lazily():
    wrong = set()
    for file in (ROOT / "core").rglob("*.py"):
        tree = parse(file)
        if file.name.startswith("cli"):
            # What is imported inside a function is imported when a stage is asked for.
            tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
        wrong |= {(name(file), m) for m in imports(tree) if not within(m, "draftsmith.core")}
    assert not wrong


def test_no_function_is_longer_than_60_lines():
    functions = (
        (name(file), node.name, node.end_lineno - node.lineno + 1)
        for file in OURS
        for node in ast.walk(parse(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert not [f for f in functions if f[2] > 60]


def test_no_file_is_longer_than_400_lines():
    lengths = {name(file): len(file.read_text(encoding="utf-8").splitlines()) for file in OURS}
    assert not {file: n for file, n in lengths.items() if n > 400}


def test_no_folder_shadows_the_package():
    assert not (ROOT / "draftsmith").exists()


def packages():
    """Import name -> folder of every package in the repository."""
    folders = {f.parent.relative_to(ROOT) for f in SOURCES if f.name == "__init__.py"}
    return {"draftsmith" if str(f) == "core/root" else ".".join(["draftsmith", *f.parts]): str(f) for f in folders}


def test_pyproject_lists_every_package():
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert tables["package-dir"] == packages()
    assert sorted(tables["packages"]) == sorted(packages())


def test_every_folder_of_code_is_a_package():
    assert not [name(f) for f in SOURCES if not (f.parent / "__init__.py").is_file()]


def test_the_type_checker_sees_every_top_level_package():
    links = {p.name: p.resolve() for p in (ROOT / ".typecheck/draftsmith").iterdir() if p.is_dir()}
    assert links == {p: ROOT / p for p in ("core", "configs", *STAGES)}


def test_every_shipped_data_file_is_packaged():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {
        p for package, globs in data.items() for glob in globs for p in (ROOT / packages()[package]).glob(glob)
    }  # fmt: skip
    kept = {
        p
        for folder in packages().values()
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".j2", ".jsonl", ".yaml", ".json", ".typed")
    }
    assert kept == shipped


def test_the_readme_names_every_file():
    tree = (ROOT / "README.md").read_text()
    files = [p.name for package in ("core", *STAGES) for p in (ROOT / package).glob("*.py") if p.name != "__init__.py"]
    assert not [name for name in files if f"      {name}" not in tree]
