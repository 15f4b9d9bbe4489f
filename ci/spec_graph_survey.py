"""Which speculative passes SGLang captures on SM120, read from its source by ``ast``.

``survey(sglang_dir)`` (the directory that holds ``srt``) imports nothing of SGLang: it
follows the branches that a CUDA device of compute capability 12.0 takes. Where the source
no longer has the shape that it reads it raises SurveyError, so that a test goes red.

usage: python -m ci.spec_graph_survey [--json] STOCK_CHECKOUT PATCHED_CHECKOUT
Prints the table of the README, or with --json the pin's in sglang_overlay/doctor/checks/.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

_OTHERS = ("is_cpu", "is_npu", "is_hip", "is_musa", "_is_npu", "_is_hip", "_is_musa")
SM120 = {"is_blackwell": True, "_is_cuda": True, "major": 12} | dict.fromkeys(_OTHERS, False)
SUBJECTS: tuple[tuple[str, str, bool], ...] = (  # label, --attention-backend, latent attention
    *(
        ("triton", "triton", True),
        ("flashinfer, MHA", "flashinfer", False),
        ("flashinfer, MLA", "flashinfer", True),
    ),
    *(
        ("trtllm_mha", "trtllm_mha", False),
        ("trtllm_mla", "trtllm_mla", True),
        ("flashmla", "flashmla", True),
        ("cutedsl_mla", "cutedsl_mla", True),
        ("dsa", "dsa", True),
    ),
    *(
        ("dsv4", "dsv4", True),
        ("hybrid linear", "hybrid_linear_attn", False),
        ("fa4", "fa4", False),
    ),
    *(
        ("fa3", "fa3", False),
        ("torch_native", "torch_native", False),
        ("flex_attention", "flex_attention", False),
    ),
    *(
        ("qsa", "qsa", False),
        ("hpc_ops", "hpc_ops", False),
        ("llada2_cfg_flashinfer", "llada2_cfg_flashinfer", False),
    ),
    *(
        ("minicpm_flashattn", "minicpm_flashattn", False),
        ("minicpm_flashinfer", "minicpm_flashinfer", False),
    ),
)
#: Choices of ``--attention-backend`` that have no row of their own.
ALIASES = frozenset({"nsa", "compressed", "tokenspeed_mla"})
ELSEWHERE = frozenset({"aiter", "wave", "intel_amx", "ascend", "intel_xpu"})  # no NVIDIA GPU
STEPS = {
    "draft": "create_decode_backend",
    "verify": "",
    "draft-extend": "create_draft_extend_backend",
}
CAPABILITY = "supports_draft_extend_cuda_graph"  # of the patch of ours that brings it
HYBRID = "srt.layers.attention.hybrid_linear_attn_backend"
REGISTRY = "srt.layers.attention.attention_registry"
FACTORY = "srt.speculative.draft_utils"
WORKER = "srt.speculative.eagle_worker_v2"
HOOK = "srt.arg_groups.attention_hook"
CHOICES = "srt.arg_groups.choices"
Node = TypeVar("Node", bound=ast.AST)
Class = tuple[str, ast.ClassDef]  # its module, its definition


class SurveyError(Exception):
    """The source no longer has the shape that this survey reads."""


class _Refused(Exception):
    """(fact, where): the server does not start with this backend and EAGLE."""


class Row(NamedTuple):
    backend: str
    step: str  # "draft", "verify" or "draft-extend"
    verdict: str  # "captured", "eager" or "refused"
    fact: str
    where: str  # file:line below sglang_dir


def _truth(test: ast.expr, mla: bool) -> bool | None:
    """What a condition yields on SM120; None when it asks about something else."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return {True: False, False: True, None: None}[_truth(operand, mla)]
        case ast.BoolOp(op=op, values=values):
            truths, decisive = [_truth(v, mla) for v in values], isinstance(op, ast.Or)
            return decisive if decisive in truths else None if None in truths else not decisive
        case ast.Attribute(attr="use_mla_backend"):
            return mla
        case ast.Compare(
            left=ast.Attribute(attr="speculative_algorithm"),
            ops=[ast.Is() | ast.IsNot() as asked],
            comparators=[ast.Constant(None)],
        ):
            return isinstance(asked, ast.IsNot)
        case ast.Call(func=ast.Name(id=name), args=[]) | ast.Name(id=name) if name in SM120:
            return bool(SM120[name])
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[ast.Constant(v)]) if (
            name in SM120
        ):
            return SM120[name] == v
    return None


def _taken(body: list[ast.stmt], mla: bool) -> Iterator[ast.stmt]:
    """The statements of a factory function that SM120 reaches, in order."""
    for stmt in body:
        if not isinstance(stmt, ast.If):
            yield stmt
        elif (truth := _truth(stmt.test, mla)) is not None:
            yield from _taken(stmt.body if truth else stmt.orelse, mla)


class _Source:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.trees: dict[str, ast.Module] = {}

    def tree(self, module: str) -> ast.Module:
        if module not in self.trees:
            path = self.root / f"{module.replace('.', '/')}.py"
            self.trees[module] = ast.parse(path.read_text(encoding="utf-8"))
        return self.trees[module]

    def where(self, module: str, node: ast.AST) -> str:
        return f"{module.replace('.', '/')}.py:{getattr(node, 'lineno', 0)}"

    def find(self, module: str, kind: type[Node], name: str) -> Node:
        for node in ast.walk(self.tree(module)):
            if isinstance(node, kind) and getattr(node, "name", None) == name:
                return node
        raise SurveyError(f"no {name} in {module}")

    def origin(self, module: str, name: str, local: list[ast.stmt]) -> tuple[str, str]:
        """The module that a name was imported from, and its name there."""
        for node in (*local, *self.tree(module).body):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt."):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return str(node.module).removeprefix("sglang."), alias.name
        return module, name

    def mro(self, cls: Class) -> Iterator[Class]:
        """The class and its bases, without the abstract AttentionBackend."""
        yield cls
        for base in cls[1].bases:
            if isinstance(base, ast.Name) and base.id != "AttentionBackend":
                module, name = self.origin(cls[0], base.id, [])
                if module.startswith("srt.layers.attention."):
                    yield from self.mro((module, self.find(module, ast.ClassDef, name)))

    def replay(self, cls: Class) -> str:
        """Where the class prepares a replay; SurveyError when it only has the abstract methods."""
        for name in ("init_cuda_graph_state", "init_forward_metadata_out_graph"):
            own = [
                (m, n) for m, c in self.mro(cls) for n in c.body if getattr(n, "name", "") == name
            ]
            if not own:
                raise SurveyError(f"{cls[1].name} has no {name}")
        return self.where(*own[0])

    def built(self, module: str, function: ast.FunctionDef, mla: bool) -> Class:
        """The class that a factory function returns on SM120."""
        path, value = list(_taken(function.body, mla)), None
        for stmt in path:
            if isinstance(stmt, ast.Raise) or (
                isinstance(stmt, ast.Assert) and _truth(stmt.test, mla) is False
            ):
                raise _Refused("refused by its factory", self.where(module, stmt))
            if isinstance(stmt, ast.Return | ast.Assign) and isinstance(
                stmt.value, ast.Call | ast.Tuple
            ):
                value = stmt.value  # returned at once, or under the name it is assigned to
            if isinstance(stmt, ast.Return):
                break
        match value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                return self.built(module, self.find(module, ast.FunctionDef, name), mla)
            case (
                ast.Call(func=ast.Name(id=name))
                | ast.Tuple(elts=[_, ast.Call(func=ast.Name(id=name))])
            ):
                module, name = self.origin(module, name, path)
                for node in self.tree(module).body:
                    if (
                        isinstance(node, ast.FunctionDef)
                        and node.name == name
                        and isinstance(node.returns, ast.Name)
                    ):
                        module, name = self.origin(
                            module, node.returns.id, []
                        )  # a factory: its common base
                return module, self.find(module, ast.ClassDef, name)
        raise SurveyError(f"cannot tell what {function.name} in {module} builds")

    def target(self, key: str, mla: bool) -> Class:
        if key == "hybrid_linear_attn":  # chosen by the model, around a full-attention backend
            return HYBRID, self.find(HYBRID, ast.ClassDef, "HybridLinearAttnBackend")
        registered = f"register_attention_backend('{key}')"
        for node in self.tree(REGISTRY).body:
            if isinstance(node, ast.FunctionDef) and registered in map(
                ast.unparse, node.decorator_list
            ):
                return self.built(REGISTRY, node, mla)
        raise SurveyError(f"{key} is not registered")

    def draft(self, maker: str, key: str, mla: bool) -> Class:
        for node in ast.walk(self.find(FACTORY, ast.FunctionDef, maker)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                entries = dict(
                    zip(
                        map(ast.unparse, filter(None, node.value.keys)),
                        node.value.values,
                        strict=True,
                    )
                )
                if not isinstance(method := entries.get(repr(key)), ast.Attribute):
                    raise _Refused(
                        "not in DraftBackendFactory's backend_map", self.where(FACTORY, node)
                    )
                return self.built(FACTORY, self.find(FACTORY, ast.FunctionDef, method.attr), mla)
        raise SurveyError(f"no backend_map in {maker}")

    def supported(self) -> dict[str, str]:
        """The classes whose draft-extend is captured on CUDA, and the line that says so."""
        found: dict[str, str] = {}
        for node in ast.walk(self.find(WORKER, ast.FunctionDef, "_capture_cuda_graphs")):
            match node:
                case (
                    ast.Assign(
                        targets=[ast.Name("graph_supported_backend_types")],
                        value=ast.List(elts=names),
                    )
                    | ast.Call(
                        func=ast.Attribute(value=ast.Name("graph_supported_backend_types")),
                        args=names,
                    )
                ):
                    found |= {n.id: self.where(WORKER, n) for n in names if isinstance(n, ast.Name)}
        if not found:
            raise SurveyError("graph_supported_backend_types is gone")
        return found

    def step(self, step: str, key: str, mla: bool) -> tuple[str, str, str]:
        target = self.target(key, mla)
        for node in ast.walk(
            self.find(HOOK, ast.FunctionDef, "handle_attention_backend_compatibility")
        ):
            if (
                isinstance(node, ast.If)
                and ast.unparse(node.test) == f"attention_backend == '{key}'"
            ):
                if "assert cfg.speculative_algorithm is None" in (text := ast.unparse(node)):
                    raise _Refused("speculative decoding is refused", self.where(HOOK, node))
                if step == "verify" and "Phase.DECODE, backend=Backend.DISABLED" in text:
                    return (
                        "eager",
                        f"{target[1].name}: decode graphs are switched off",
                        self.where(HOOK, node),
                    )
        cls = self.draft(STEPS[step], key, mla) if STEPS[step] else target
        if step != "draft-extend":
            return "captured", f"{cls[1].name} prepares its replay", self.replay(cls)
        for _, base in self.mro(cls):
            if base.name in (supported := self.supported()):
                return (
                    "captured",
                    f"{cls[1].name} is on graph_supported_backend_types",
                    supported[base.name],
                )
        for node in cls[1].body:  # the class's own answer: the method is not inherited in effect
            if getattr(node, "name", "") == CAPABILITY:
                return (
                    "captured",
                    f"{cls[1].name}.{CAPABILITY} answers",
                    self.where(cls[0], node),
                )
        return "eager", f"{cls[1].name} is not on graph_supported_backend_types", self.where(*cls)


def choices(sglang_dir: Path) -> set[str]:
    """The values of ``--attention-backend``, as the source lists them."""
    for node in _Source(sglang_dir).tree(CHOICES).body:
        match node:
            case ast.Assign(targets=[ast.Name("ATTENTION_BACKEND_CHOICES")], value=value):
                return set(ast.literal_eval(value))
    raise SurveyError("ATTENTION_BACKEND_CHOICES is gone")


def survey(sglang_dir: Path) -> list[Row]:
    """Every backend and pass of the source below ``sglang_dir``. Raises ``SurveyError``."""
    source, rows = _Source(sglang_dir), list[Row]()
    for label, key, mla in SUBJECTS:
        for step in STEPS:
            try:
                rows.append(Row(label, step, *source.step(step, key, mla)))
            except _Refused as refused:
                rows.append(Row(label, step, "refused", *refused.args))
    return rows


def markdown(stock: list[Row], patched: list[Row]) -> str:
    """The table of the README: what stock gives, and what the patches change."""
    lines = ["| backend | " + " | ".join(STEPS) + " |", "| --- |" + " --- |" * len(STEPS)]
    verdicts = {(row.backend, row.step): row.verdict for row in patched}
    cells: dict[str, list[str]] = {}
    for row in stock:
        after = verdicts[row.backend, row.step]
        same = after == row.verdict
        text = row.verdict if same else f"{row.verdict}, **{after} when patched**"
        cells.setdefault(row.backend, []).append(text)
    lines += [f"| {backend} | {' | '.join(found)} |" for backend, found in cells.items()]
    return "\n".join(lines) + "\n"


def as_json(stock: list[Row], patched: list[Row]) -> str:
    """The same table for ``sglang-overlay doctor``: backend, pass, verdicts stock and patched."""
    found: dict[str, dict[str, list[str]]] = {}
    for before, after in zip(stock, patched, strict=True):
        found.setdefault(before.backend, {})[before.step] = [before.verdict, after.verdict]
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    *flags, stock_folder, patched_folder = sys.argv[1:]
    trees = [survey(Path(folder) / "python/sglang") for folder in (stock_folder, patched_folder)]
    print((as_json if "--json" in flags else markdown)(*trees), end="")
