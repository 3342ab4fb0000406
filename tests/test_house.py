"""The house rules, read off the source: import arrows, sizes, docstrings, words, pinned versions.

Nothing is imported from the packages but the page generator; what happens on import is in
test_bare_machine.py and what gets installed is in test_install.py.
"""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"kda_ops": ROOT, "kda_kernels": ROOT / "kernels"}
OPERATORS = ("packed_decode", "fused_decode", "packed_fused_decode")

KERNEL_ROOMS = ("kda_kernels._cute*", "kda_kernels.*.cute*", "kda_kernels._cpu*")

# From these modules, none of those may be imported. Lazy imports inside functions count too.
FORBIDDEN = [
    ("kda_kernels*", ["kda_ops*", "torch.library*", "torch.ops*"]),
    ("kda_kernels.errors", ["kda_kernels*"]),
    ("kda_kernels.contract*", ["kda_kernels.plan*", "kda_kernels.*.reference*", *KERNEL_ROOMS]),
    ("kda_kernels.*.contract", ["kda_kernels.plan*", "kda_kernels.*.reference*", *KERNEL_ROOMS]),
    ("kda_kernels.*.reference", ["kda_kernels.plan*", *KERNEL_ROOMS]),
    ("kda_kernels.*.config", ["torch*", "kda_kernels.plan*", *KERNEL_ROOMS]),
    ("kda_kernels.*.cute", ["kda_kernels.plan*", "kda_kernels.*.reference*", "kda_kernels._cpu*"]),
    (
        "kda_kernels.*.launch",
        ["kda_kernels.plan*", "kda_kernels.*.reference*", "kda_kernels._cpu*"],
    ),
    ("kda_kernels._cute*", ["kda_kernels.plan*", "kda_kernels.*.reference*", "kda_kernels._cpu*"]),
    ("kda_kernels._cpu*", ["kda_kernels.plan*", "kda_kernels.*.reference*", "kda_kernels._cute*"]),
    ("kda_ops.library", ["kda_ops*"]),
    ("kda_ops.passes*", ["kda_kernels.plan*", "kda_kernels._cute*", "kda_kernels._cpu*"]),
]
MAY_IMPORT_CUTLASS = ("kda_kernels._cute*", "kda_kernels.*.cute")
OPS_MAY_IMPORT = ("kda_ops.library*",)
# The page of all operators needs the list of all operators, when it is written and not before.
ALLOWED = ["kda_kernels.contract.render -> kda_kernels.plan.CONTRACTS"]


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of both packages by its dotted name."""
    for package, folder in PACKAGES.items():
        for path in sorted((folder / package).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}


def imported(name: str, tree: ast.Module, *, is_package: bool = False) -> Iterator[str]:
    """Dotted names of what a module imports, by statement, by importlib or as torch.<attribute>."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".") if is_package else name.split(".")[:-1]
            base = parents[: len(parents) - node.level + 1] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in (
            "torch.ops",
            "torch.library",
        ):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield _text(node.args[0])


def _text(node: ast.expr) -> str:
    """A literal, with 'x' where an f-string has a value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) else "x"


def wrong_arrows(name: str, targets: Iterator[str]) -> Iterator[str]:
    """The arrows out of one module that the plan of the house forbids."""
    for target in targets:
        inside = target.startswith(("kda_ops", "kda_kernels"))
        forbidden = [p for source, ps in FORBIDDEN if fnmatchcase(name, source) for p in ps]
        if any(fnmatchcase(target, pattern) for pattern in forbidden):
            yield f"{name} -> {target}"
        if target.split(".")[0] == "cutlass" and not _matches(name, MAY_IMPORT_CUTLASS):
            yield f"{name} -> {target}"
        if name == "kda_ops.ops" and target.startswith("kda_ops"):
            if not _matches(target, OPS_MAY_IMPORT):
                yield f"{name} -> {target}"
        for operator in OPERATORS:
            other = _matches(target, [f"kda_kernels.{operator}.{k}*" for k in ("cute", "cpu")])
            if inside and other and _matches(name, [f"kda_kernels.{o}.*" for o in OPERATORS]):
                if not name.startswith(f"kda_kernels.{operator}."):
                    yield f"{name} -> {target}"


def _matches(name: str, patterns: object) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_arrows(name):
    is_package = MODULES[name].name == "__init__.py"
    wrong = set(wrong_arrows(name, imported(name, TREES[name], is_package=is_package)))
    assert not wrong.difference(ALLOWED)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kda_kernels.plan", "import kda_ops"),
        ("kda_kernels.plan", "def f():\n    from kda_ops import ops"),
        ("kda_kernels.plan", "x = torch.ops.kda.packed_decode"),
        ("kda_kernels.errors", "from .contract import spec"),
        ("kda_kernels.contract.check", "from kda_kernels import plan"),
        ("kda_kernels.fused_decode.reference", "from kda_kernels._cpu import build"),
        ("kda_kernels.fused_decode.cute", "from ..packed_decode import cute"),
        ("kda_kernels.fused_decode.cute", "from kda_kernels.fused_decode.reference import f"),
        ("kda_kernels.packed_decode.launch", "from kda_kernels.plan import launcher"),
        ("kda_kernels.packed_decode.launch", "import cutlass"),
        ("kda_kernels._cpu.build", "import kda_kernels._cute.target"),
        ("kda_kernels._cute.target", "importlib.import_module(f'kda_kernels.{op}.reference')"),
        ("kda_kernels.plan", "import cutlass.cute as cute"),
        ("kda_ops.library", "from kda_ops.ops import packed_kda_decode"),
        ("kda_ops.ops", "from kda_ops import passes"),
        ("kda_ops.passes.backend", "from kda_kernels.plan import launcher"),
    ],
)
def test_a_wrong_arrow_is_seen(name, source):
    assert list(wrong_arrows(name, imported(name, ast.parse(source))))


def test_the_kernels_folder_is_not_a_package():
    # A top-level module `kernels` would shadow the distribution of that name.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_tests_are_no_packages_and_have_unique_file_names():
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert "__init__.py" not in names
    assert sorted(names) == sorted(set(names))


def test_files_are_small_enough_to_be_read():
    kernels = [*(ROOT / "kernels" / "kda_kernels").rglob("*.h")]
    kernels += [p for p in (ROOT / "kernels").rglob("*") if p.name in ("cpu.cc", "cute.py")]
    folders = ("kda_ops", "kernels", "tests", "examples")
    others = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    too_long = [
        f"{path.relative_to(ROOT)}: {lines} lines, at most {limit}"
        for paths, limit in ((set(kernels), 500), (others - set(kernels), 300))
        for path in sorted(paths)
        if (lines := len(path.read_text("utf-8").splitlines())) > limit
    ]
    assert not too_long


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of a module, methods and nested ones too."""
    yield from (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of code: an operator's argument list and a docstring are as long as they must be."""
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return statements[-1].end_lineno - statements[0].lineno + 1 if statements else 0


@pytest.mark.parametrize("name", [n for n in MODULES if not n.endswith(".cute")])
def test_host_functions_are_at_most_fifty_lines(name):
    assert not [
        f"{function.name}: {_body_lines(function)} lines"
        for function in functions(TREES[name])
        if _body_lines(function) > 50
    ]


@pytest.mark.parametrize("name", MODULES)
def test_package_code_has_no_assert_statements(name):
    lines = [node.lineno for node in ast.walk(TREES[name]) if isinstance(node, ast.Assert)]
    assert not lines, "asserts vanish under python -O: raise an error instead"


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_what_they_make_public_have_docstrings(name):
    tree = TREES[name]
    missing = [] if ast.get_docstring(tree) else ["the module"]
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in tree.body:
        if isinstance(node, definitions) and not node.name.startswith("_"):
            missing += [] if ast.get_docstring(node) else [node.name]
    assert not missing


def texts() -> Iterator[Path]:
    """Every text file of the project that its authors wrote."""
    for folder in ("kda_ops", "kernels", "tests", "docs", "examples", ".ci"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".png":
                yield path
    for name in ("README.md", "pyproject.toml", "constraints.txt", ".pre-commit-config.yaml"):
        yield ROOT / name


def test_no_file_names_a_folder_of_one_machine_or_a_registry_host():
    # Spelled in pieces, so that this file passes its own test.
    words = re.compile(
        "|".join(["/wor" + "k/", "/ro" + "ot/", "pyp" + r"i\.org", "python" + "hosted"])
    )
    assert not [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in texts()
        if (match := words.search(path.read_text("utf-8")))
    ]


def pins(text: str) -> dict[str, str]:
    """Every `name==version` of a text."""
    return dict(re.findall(r"([A-Za-z0-9_.-]+)==([A-Za-z0-9_.+-]+)", text))


def test_pre_commit_pins_what_the_constraints_pin():
    constraints = pins((ROOT / "constraints.txt").read_text("utf-8"))
    hooks = pins((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert {"ruff", "mypy"} <= hooks.keys()
    assert hooks.items() <= constraints.items()


def test_constraints_pin_exact_public_versions():
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    wrong = [n for n in lines if not re.fullmatch(r"#.*|[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", n)]
    assert not wrong
    assert "torch==2.13.0" in lines


def test_ci_runs_the_two_commands_of_the_readme():
    readme = (ROOT / "README.md").read_text("utf-8")
    install = re.search(r"^python3 -m venv \.venv && .*kda-ops demo$", readme, re.MULTILINE)
    tests = re.search(r"^\.venv/bin/python -m pytest.*$", readme, re.MULTILINE)
    assert install and tests
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    assert "'python3 -m venv .venv'" in script
    assert "'.venv/bin/python -m pytest'" in script


def test_the_page_of_operators_is_what_the_contracts_say():
    render = pytest.importorskip("kda_kernels.contract.render")
    page = (ROOT / "docs" / "operators.md").read_text("utf-8")
    assert page == render.operators_page(), (
        "run: python -m kda_kernels.contract.render > docs/operators.md"
    )


def test_links_between_documents_lead_somewhere():
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "kernels/README.md"]
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken
