"""Write docs/python.md from the source of the public names: `python docs/make_python_page.py`.

    a package's __all__, or a list below ─► the file that defines each name ─► signature, first paragraph of its
                                                                               docstring, fields with their comments

Sources are parsed, not imported, so that the page is the same on every machine and comments can be read.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

PAGE = Path(__file__).with_name("python.md")
SOURCE = Path(__file__).resolve().parents[1] / "src"
WIDTH = 110

HEAD = """\
# Python

Every public name: its signature, what it does, the fields of values. This page is made from the code by
`python docs/make_python_page.py`. To learn by doing, read the [tutorial](tutorial.md).

`import stagewright as sw` is enough for `sw.capture`, `sw.profile`, `sw.split` and `sw.parallelize`; everything else is
imported from its package. Names that begin with an underscore, and modules that are not here, may change without
notice. Values are frozen dataclasses: `dataclasses.replace` makes another. Times end in `_s` and are seconds, sizes end
in `_bytes`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One section of the page."""

    # The package.
    package: str
    # What it is for, with a link to its page.
    about: str
    # Names by module, where the package itself exports none; otherwise all of its __all__.
    modules: dict[str, tuple[str, ...]] = field(default_factory=dict)


GROUPS = (
    Group(package="stagewright", about="The names that most programs need."),
    Group(package="stagewright.graph", about="A model as a graph of its units: [Capture](capture.md)."),
    Group(package="stagewright.profiler", about="What each unit costs: [Profile](profile.md)."),
    Group(
        package="stagewright.partition",
        about="Where to cut: [Split](split.md); [a policy of your own](how-to/add-a-split-policy.md).",
    ),
    Group(package="stagewright.spec", about="Everything that a run needs: [Plans](plans.md)."),
    Group(package="stagewright.cluster", about="Devices and links: [Clusters](plans.md#the-cluster)."),
    Group(
        package="stagewright.engine",
        about="Plans, run on this machine: [Compare](compare.md), [Train](train.md). `stagewright.parallelize` and "
        "`stagewright.Trainer` are at the top.",
        modules={
            "compare": ("strategy_plans", "compare", "run_plan"),
            "training_job": ("train", "TrainingOptions", "find_checkpoint"),
            "trainer": ("StepResult",),
            "evaluation": ("Evaluation",),
        },
    ),
    Group(
        package="stagewright.codecs",
        about="What crosses a link, compressed: [Codecs](codecs.md); [one of your own](how-to/add-a-codec.md).",
    ),
    Group(package="stagewright.simulator", about="A plan's step, predicted from costs: [Forecast](forecast.md)."),
    Group(
        package="stagewright.planner",
        about="Measures what a forecast needs, searches, explains: [Plan and fit](plan.md), [Explain](explain.md).",
        modules={
            "measure": ("measure_model", "MeasuredModel"),
            "forecasting": ("prepare", "Prepared"),
            "source": ("MeasuredSource",),
            "search": ("search", "Found", "Ranked", "Candidate"),
            "verify": ("verify", "Verified"),
            "explain": ("explain_plan", "explain_run", "Explanation", "Change"),
            "fit": ("fit_strategies", "Fit"),
        },
    ),
    Group(
        package="stagewright.fabric",
        about="Collectives over real sockets: [Fabric](fabric.md).",
        modules={
            "algorithms": ("collective", "ALGORITHMS"),
            "collective": ("Collective", "Move"),
            "simulate": ("faults", "bytes_sent", "ideal_s"),
            "from_model": ("from_model", "gradient_sizes"),
            "from_plan": ("from_plan",),
            "workload": ("Workload", "Message", "explicit"),
            "distribution": ("distribution_of", "Distribution", "Threshold"),
            "run_folder": ("FabricFolder",),
            "result": ("FabricResult", "LayerResult"),
            "verdict": ("judge", "Verdict"),
            "compare": ("compare_runs", "LayerChange"),
        },
    ),
    Group(
        package="stagewright.trace",
        about="What every worker of a run did: [Trace](trace.md).",
        modules={
            "read": ("read_trace",),
            "value": ("Trace", "WorkerTrace", "TraceEvent"),
            "breakdown": ("breakdown", "WorkerShare"),
            "memory": ("read_memory", "WorkerMemory", "MemoryMoment"),
            "operators": ("read_operators", "compare_workers", "Comparison"),
            "perfetto": ("write_perfetto",),
        },
    ),
    Group(
        package="stagewright.report",
        about="Figures and the page: [Report](report.md). Figures are .png, .svg or .pdf by the file's suffix.",
        modules={
            "page": ("build_report", "page_html", "page_markdown", "Report"),
            "split_figure": ("draw_split",),
            "timeline": ("forecast_timeline", "trace_timeline", "Timeline", "Bar"),
            "timeline_figure": ("draw_timeline",),
            "codec_figure": ("draw_codecs",),
            "fabric_figure": ("draw_fabric",),
        },
    ),
    Group(package="stagewright.studies", about="Whole studies: [Studies](studies/index.md)."),
    Group(package="stagewright.zoo", about="Models and tasks by name: [Your own model](how-to/my-own-model.md)."),
    Group(package="stagewright.runs", about="The run folder: [where to look](faults.md#where-to-look)."),
)

# Returned by functions; nobody calls their constructors.
MADE_FOR_YOU = ("UnitGraph", "Stage", "Trainer", "RunIndex")

_Node: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One public name."""

    # The name.
    name: str
    # The module to import it from, where that is not the group's package.
    module: str | None
    # Its definition, and the lines of the file that it is in.
    node: _Node
    lines: list[str]

    @property
    def rank(self) -> int:
        """Functions first, then values, then constants."""
        return 0 if isinstance(self.node, ast.FunctionDef) else 1 if isinstance(self.node, ast.ClassDef) else 2


def python_page() -> str:
    """The whole page."""
    parts = [HEAD]
    for group in GROUPS:
        parts.append(f"## {group.package}\n\n{_filled(group.about)}\n")
        again = [entry.name for entry in entries(group) if _is_above(group, entry)]
        if again:
            parts.append(
                _filled(f"Also here, and [above](#stagewright): {', '.join(f'`{one}`' for one in again)}.") + "\n"
            )
        parts += [_section(entry) for entry in entries(group) if entry.name not in again]
    return "\n".join(parts)


def _is_above(group: Group, entry: Entry) -> bool:
    """Whether a name of a package is one of the first section's."""
    return group is not GROUPS[0] and entry.module is None and entry.name in exported(GROUPS[0].package)


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def entries(group: Group) -> list[Entry]:
    """The names of a group, in the order of the page."""
    if group.modules:
        return [
            _entry(f"{group.package}.{at}", name, shown=True) for at, names in group.modules.items() for name in names
        ]
    return sorted(
        (_entry(group.package, name, shown=False) for name in exported(group.package)), key=lambda one: one.rank
    )


def exported(module: str) -> list[str]:
    """A module's __all__."""
    for node in _parse(module)[0].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found: list[str] = ast.literal_eval(node.value)
            return found
    raise ValueError(f"{module} has no __all__")


def _entry(module: str, name: str, *, shown: bool) -> Entry:
    if name not in exported(module):
        raise ValueError(f"{module} does not export {name}")
    home = module
    while True:
        tree, lines = _parse(home)
        node = _definition(tree, name)
        if node is not None:
            return Entry(name=name, module=module if shown else None, node=node, lines=lines)
        home = _imported_from(tree, name, home)


def _definition(tree: ast.Module, name: str) -> _Node | None:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and target.id == name:
            return node
    return None


def _imported_from(tree: ast.Module, name: str, module: str) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and any(one.name == name for one in node.names):
            return node.module
    raise ValueError(f"{module} neither defines nor imports {name}")


def _parse(module: str) -> tuple[ast.Module, list[str]]:
    path = SOURCE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines()


def _section(entry: Entry) -> str:
    parts = [f"### {entry.name}\n"]
    if entry.module is not None:
        parts.append(f"`from {entry.module} import {entry.name}`\n")
    node = entry.node
    if isinstance(node, ast.FunctionDef):
        parts += [_fenced(_signature(node, entry.name)), _paragraph(ast.get_docstring(node))]
    elif isinstance(node, ast.ClassDef):
        parts += _class_parts(node, entry.lines)
    else:
        parts += [_fenced(_constant(node)), _paragraph(_said_of(node, None, entry.lines, []))]
    return "\n".join(part for part in parts if part)


def _constant(node: ast.Assign | ast.AnnAssign) -> str:
    """A name with its type, or with what it stands for."""
    if isinstance(node, ast.AnnAssign) and _code(node.annotation) != "TypeAlias":
        return f"{_code(node.target)}: {_code(node.annotation)}"
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return f"{_code(target)} = {_code(node.value) if node.value is not None else '…'}"


def _class_parts(node: ast.ClassDef, lines: list[str]) -> list[str]:
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    made = next((one for one in methods if one.name == "__init__"), None)
    is_told = made is not None and node.name not in MADE_FOR_YOU
    parts = [_fenced(_signature(made, node.name, returns=False))] if made is not None and is_told else []
    parts.append(_paragraph(ast.get_docstring(node)))
    items = (
        _fields(node, lines)
        + (_attributes(made) if made is not None else [])
        + [_method(one) for one in methods if not one.name.startswith("_")]
    )
    if items:
        parts.append("\n".join(items) + "\n")
    return parts


def _attributes(made: ast.FunctionDef) -> list[str]:
    """What a constructor sets and says a word about."""
    found = []
    for one, behind in zip(made.body, made.body[1:], strict=False):
        target = one.targets[0] if isinstance(one, ast.Assign) else getattr(one, "target", None)
        is_text = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
        if isinstance(target, ast.Attribute) and is_text and not target.attr.startswith("_"):
            kind = f": {_code(one.annotation)}" if isinstance(one, ast.AnnAssign) else ""
            found.append(_item(f"`{target.attr}{kind}`", str(behind.value.value)))  # type: ignore[attr-defined]
    return found


def _fields(node: ast.ClassDef, lines: list[str]) -> list[str]:
    """One item a field; fields below one comment share an item."""
    found: list[tuple[list[str], str]] = []
    before: ast.stmt | None = None
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not one.target.id.startswith("_"):
            said = _said_of(one, before, lines, node.body)
            text = f"`{one.target.id}: {_code(one.annotation)}{_default(one.value)}`"
            if said is None and found and isinstance(before, ast.AnnAssign):
                found[-1][0].append(text)
            else:
                found.append(([text], said or ""))
        before = one
    return [_item(", ".join(texts), said) for texts, said in found]


def _default(value: ast.expr | None) -> str:
    """A default as it is written behind a field or a parameter."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        given = {one.arg: one.value for one in value.keywords}
        value = given.get("default")
        if "default_factory" in given:
            return f" = {_code(given['default_factory'])}()"
    if value is None:
        return ""
    return " = …" if isinstance(value, ast.Name) and value.id.startswith("_") else f" = {_code(value)}"


def _code(node: ast.AST) -> str:
    return ast.unparse(node).replace("'", '"')


def _said_of(node: ast.stmt, before: ast.stmt | None, lines: list[str], body: list[ast.stmt]) -> str | None:
    """The comment right above a definition, or the text right below it."""
    at = node.lineno - 2
    above: list[str] = []
    while at >= (before.end_lineno or 0 if before is not None else 0) and lines[at].strip().startswith("#"):
        above.insert(0, lines[at].strip().lstrip("# "))
        at -= 1
    if above:
        return " ".join(above)
    behind = next((one for one in body if one.lineno > (node.end_lineno or 0)), None)
    if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant) and isinstance(behind.value.value, str):
        return behind.value.value
    return None


def _method(node: ast.FunctionDef) -> str:
    decorators = {ast.unparse(one) for one in node.decorator_list}
    if "property" in decorators:
        shown = f"{node.name}: {_code(node.returns)}" if node.returns is not None else node.name
    else:
        shown = " ".join(_signature(node, f".{node.name}").split())
    return _item(f"`{shown}`", ast.get_docstring(node) or "")


def _item(shown: str, said: str) -> str:
    first = " ".join(said.strip().split("\n\n")[0].split()).replace("``", "`")
    return f"- {shown}" + (f": {first[0].lower() + first[1:] if _is_word(first) else first}" if first else "")


def _is_word(text: str) -> bool:
    """Whether a sentence begins with a plain word, which is small behind a colon."""
    return re.match(r"[A-Z][a-z]", text) is not None or text.startswith("A ")


def _signature(node: ast.FunctionDef, name: str, *, returns: bool = True) -> str:
    pieces = _parameters(node.args)
    result = f" -> {_code(node.returns)}" if returns and node.returns is not None else ""
    short = f"{name}({', '.join(pieces)}){result}"
    if len(short) <= WIDTH:
        return short
    return f"{name}(\n" + "".join(f"    {one},\n" for one in pieces) + f"){result}"


def _parameters(arguments: ast.arguments) -> list[str]:
    """The parameters one by one, without self."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    found = [_parameter(one, default) for one, default in zip(plain, defaults, strict=True)]
    if plain and plain[0].arg in ("self", "cls"):
        found = found[1:]
    if arguments.vararg is not None:
        found.append("*" + _parameter(arguments.vararg, None))
    elif arguments.kwonlyargs:
        found.append("*")
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [_parameter(one, default) for one, default in named]
    return found + (["**" + _parameter(arguments.kwarg, None)] if arguments.kwarg is not None else [])


def _parameter(one: ast.arg, default: ast.expr | None) -> str:
    return one.arg + (f": {_code(one.annotation)}" if one.annotation is not None else "") + _default(default)


def _fenced(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _paragraph(text: str | None) -> str:
    """The first paragraph."""
    if not text:
        return ""
    first = " ".join(text.strip().split("\n\n")[0].split()).replace("``", "`")
    return _filled(first) + "\n"


if __name__ == "__main__":
    PAGE.write_text(python_page(), encoding="utf-8")
