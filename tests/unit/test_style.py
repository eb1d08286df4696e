"""The house's style, kept by a test: sizes, honest tests, no swallowed errors, links that lead."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "src",
    "flows",
    "workers",
    "trainer",
    "tests",
    "examples",
    "infra",
    "benchmarks",
    "alembic",
    "web",
)
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500
LINE_COLUMNS_MAX = 100
NOT_OURS = {"__pycache__", "node_modules", "static", "dist"}
# Spelled in two parts, so that this file does not hold them.
MARKS = re.compile("|".join(rf"\b{a}{b}\b" for a, b in (("TO", "DO"), ("FIX", "ME"), ("XX", "X"))))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def walk(*suffixes: str) -> list[Path]:
    """Our files with one of `suffixes`; links are not followed, so each file comes once."""
    found: list[Path] = []
    for folder in FOLDERS:
        for directory, folders, names in os.walk(CHECKOUT / folder):
            folders[:] = [name for name in folders if name not in NOT_OURS]
            paths = (Path(directory, name) for name in names if name.endswith(suffixes))
            found += [path for path in paths if not path.is_symlink()]
    return sorted(found)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(parse(path)) if isinstance(node, Function))


# Written by a program, which a test compares it with.
GENERATED = frozenset({"web/src/api/schema.ts"})


def at(path: Path, line: int) -> str:
    return f"{path.relative_to(CHECKOUT)}:{line}"


def test_there_is_something_to_look_at() -> None:
    names = {path.relative_to(CHECKOUT).parts[0] for path in walk(".py")}
    assert {"src", "flows", "workers", "trainer", "tests", "examples"} <= names


def test_functions_fit_on_a_screen() -> None:
    long = [
        f"{at(path, node.lineno)}: {node.name} has {lines} lines"
        for path in walk(".py")
        for node in functions(path)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not long, "\n".join([f"expected {FUNCTION_LINES_MAX} or fewer:", *long])


def test_files_and_lines_are_short() -> None:
    long = []
    for path in walk(".py", ".ts", ".tsx", ".sh"):
        if path.relative_to(CHECKOUT).as_posix() in GENERATED:
            continue
        lines = path.read_text().splitlines()
        if len(lines) > FILE_LINES_MAX:
            long.append(f"{at(path, 1)}: {len(lines)} lines, expected {FILE_LINES_MAX} or fewer")
        long += [
            f"{at(path, number)}: {len(line)} columns, expected {LINE_COLUMNS_MAX} or fewer"
            for number, line in enumerate(lines, 1)
            if len(line) > LINE_COLUMNS_MAX
        ]
    assert not long, "\n".join(long)


def test_nothing_is_left_for_later() -> None:
    texts = walk(".py", ".ts", ".tsx", ".sh", ".md", ".toml", ".yaml", ".yml")
    texts += [*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md"), CHECKOUT / "Makefile"]
    left = [
        f"{at(path, number)}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MARKS.search(line)
    ]
    assert not left, "\n".join(left)


def is_empty(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Pass):
        return True
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def is_broad(handler: ast.ExceptHandler) -> bool:
    named = handler.type
    caught = named.elts if isinstance(named, ast.Tuple) else [named]
    names = {name.id for name in caught if isinstance(name, ast.Name)}
    return named is None or bool(names & {"Exception", "BaseException"})


def test_no_error_is_swallowed() -> None:
    """A handler does something; a broad one raises again or says in a comment why it does not."""
    swallowed = []
    for path in walk(".py"):
        lines = path.read_text().splitlines()
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            if all(map(is_empty, node.body)):
                swallowed.append(f"{at(path, node.lineno)}: does nothing; contextlib.suppress?")
            # The reason may stand above the handler or inside it.
            own = lines[node.lineno - 2 : node.body[-1].end_lineno]
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            if is_broad(node) and not raises and not any("# " in line for line in own):
                swallowed.append(f"{at(path, node.lineno)}: broad, and no comment says why")
    assert not swallowed, "\n".join(swallowed)


def test_nothing_is_a_stub() -> None:
    """A body of `...` belongs to a Protocol or an overload; nothing raises NotImplementedError."""
    stubs = []
    for path in walk(".py"):
        tree = parse(path)
        declared = {
            id(node)
            for parent in ast.walk(tree)
            if isinstance(parent, ast.ClassDef)
            and any("Protocol" in ast.unparse(base) for base in parent.bases)
            for node in ast.walk(parent)
        }
        for node in functions(path):
            decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
            is_declared = id(node) in declared or re.search("overload|abstract", decorators)
            text = ast.unparse(node.body[-1])
            if not is_declared and ("NotImplementedError" in text or text == "..."):
                stubs.append(f"{at(path, node.lineno)}: {node.name} is a stub")
    assert not stubs, "\n".join(stubs)


def test_every_module_says_its_purpose() -> None:
    silent = [
        at(path, 1)
        for path in walk(".py")
        if path.read_text().strip() and not ast.get_docstring(parse(path))
    ]
    assert not silent, "\n".join(["no docstring:", *silent])


def test_public_classes_and_functions_of_the_package_are_annotated() -> None:
    bare = [
        f"{at(path, node.lineno)}: {node.name}"
        for path in walk(".py")
        for node in functions(path)
        if node.returns is None
    ]
    assert not bare, "\n".join(["no return annotation:", *bare])


def calls_of(node: ast.AST) -> set[str]:
    called = {inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)}
    names = {func.id for func in called if isinstance(func, ast.Name)}
    return names | {func.attr for func in called if isinstance(func, ast.Attribute)}


def helpers_that_check() -> set[str]:
    """Names of functions anywhere in tests/ that assert, themselves or through another."""
    known = [node for path in walk(".py") if "tests" in path.parts for node in functions(path)]
    checking = {"raises", "warns"}
    bodies = {id(node): calls_of(node) for node in known}
    asserting = {
        node.name for node in known if any(isinstance(i, ast.Assert) for i in ast.walk(node))
    }
    checking |= {name for name in asserting if not name.startswith("test_")}
    for _ in range(3):
        checking |= {
            node.name
            for node in known
            if not node.name.startswith("test_") and bodies[id(node)] & checking
        }
    return checking


def test_every_test_asserts_and_none_is_skipped() -> None:
    """Tests on a GPU may be passed over where there is none; all others run or fail."""
    wrong = []
    checking = helpers_that_check()
    skipping = re.compile(r"\b(pytest\.skip|mark\.skip|skipif|xfail|importorskip)\b")
    for path in walk(".py"):
        if not path.name.startswith("test_"):
            continue
        for node in functions(path):
            asserts = any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
            if node.name.startswith("test_") and not asserts and not calls_of(node) & checking:
                wrong.append(f"{at(path, node.lineno)}: {node.name} asserts nothing")
        if "gpu" not in path.parts and path != Path(__file__):
            wrong += [
                f"{at(path, number)}: {line.strip()}"
                for number, line in enumerate(path.read_text().splitlines(), 1)
                if skipping.search(line)
            ]
    assert not wrong, "\n".join(wrong)


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md"), *walk(".md")]
    broken = [
        f"{at(page, 1)}: {link}"
        for page in pages
        for link in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
        if not link.startswith(("http://", "https://", "#", "mailto:"))
        and not (page.parent / link.partition("#")[0]).exists()
    ]
    assert pages
    assert not broken, "\n".join(broken)


def test_make_targets_named_in_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (page.name, target)
        for page in [*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md")]
        for target in re.findall(r"`make ([a-z][a-z-]*)", page.read_text())
    }
    assert {"demo", "test", "bench", "check"} <= targets
    assert not {(page, target) for page, target in named if target not in targets}
