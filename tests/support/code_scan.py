"""Looks through Python source for what turns data into code: evaluation, unpickling, shells; and for unverified TLS.

    for finding in scan(ast.parse(source)):
        print(finding.line, finding.what)

A net for mistakes and for habits, not for malice: names are followed through imports, plain assignments, `getattr`
with a constant, `sys.modules` and `vars`, in a whole module at once, whatever the scope. Who means to hide something
can build a name at run time; where the module is one of `TELLING_MODULES`, that is a finding by itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

BANNED_MODULES = frozenset({
    "pickle", "_pickle", "cPickle", "pickletools", "dill", "cloudpickle", "joblib", "marshal", "shelve", "dbm",
    "copyreg", "code", "codeop", "runpy", "pty", "commands", "imp", "zipimport", "multiprocessing", "xml.etree",
    "xml.dom", "xml.sax", "xmlrpc", "telnetlib", "ftplib", "logging.config", "torch.package",
})  # fmt: skip
"""Those that turn data into objects or code (multiprocessing unpickles what its connections bring), hand it to a shell,
or read XML with entities."""

BANNED_BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
BANNED_CALLS = frozenset({"input"})
"""Builtins whose names are common for other things too, so that only a call tells."""

BANNED_NAMES = frozenset({
    "os.system", "os.popen", "os.popen2", "os.popen3", "os.startfile", "posix.system", "posix.popen",
    "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "yaml.load",
    "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all", "yaml.Loader",
    "yaml.UnsafeLoader", "yaml.FullLoader", "yaml.CLoader", "yaml.CUnsafeLoader", "yaml.CFullLoader", "torch.load",
    "torch.jit.load", "torch.hub.load", "pandas.read_pickle", "numpy.core.records.load", "types.CodeType",
    "importlib.util.spec_from_file_location", "tempfile.mktemp",
    "concurrent.futures.ProcessPoolExecutor", "concurrent.futures.process", "ssl._create_unverified_context",
    "ssl._create_stdlib_context", "ssl.CERT_NONE", "ssl.CERT_OPTIONAL", "ssl.VerifyMode.CERT_NONE",
    "ssl.VerifyMode.CERT_OPTIONAL", "random.seed",
})  # fmt: skip
BANNED_PREFIXES = ("os.exec", "os.spawn", "os.posix_spawn", "posix.exec", "posix.spawn", "posix.posix_spawn")
"""Programs that are started by a function with many endings."""

BANNED_ATTRIBUTES = frozenset({
    "unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "UnsafeLoader", "FullLoader", "read_pickle",
    "create_subprocess_shell", "subprocess_shell", "_create_unverified_context", "exec_module", "load_module",
})  # fmt: skip
"""Names that mean one thing whatever they are an attribute of."""

TELLING_MODULES = frozenset({"os", "posix", "builtins", "subprocess", "asyncio", "yaml", "torch", "ssl"})
"""Modules from which nothing is taken by a name that only a run can tell."""

SHELLS = frozenset({
    "sh", "ash", "bash", "csh", "dash", "fish", "ksh", "tcsh", "zsh", "busybox", "cmd", "cmd.exe", "powershell", "pwsh",
})  # fmt: skip
_TELLING_KEYWORDS = frozenset({"shell", "allow_pickle"})
_VERIFYING_KEYWORDS = frozenset({"verify", "check_hostname"})
_CERTIFICATE_NAMES = frozenset({"verify_mode", "cert_reqs", "ssl_cert_reqs"})
_NAMESPACES = frozenset({"globals", "locals", "vars"})


class Finding(NamedTuple):
    """Something that is not to be there.

    Args:
        line: Where.
        what: The name of it, whatever the module calls it.
    """

    line: int
    what: str


def scan(tree: ast.Module) -> list[Finding]:
    """Return what is found in a module, in the order of lines, once a line."""
    scanner = _Scanner(tree)
    return sorted({finding for node in ast.walk(tree) for finding in scanner.of_node(node)})


def is_banned(name: str) -> bool:
    """Return whether a full name, such as "os.system", or a module's, is one of what is looked for."""
    return _is_banned_member(name) or any(name == module or name.startswith(f"{module}.") for module in BANNED_MODULES)


def _is_banned_member(name: str) -> bool:
    if name in BANNED_NAMES or name.startswith(BANNED_PREFIXES):
        return True
    builtin = name.removeprefix("builtins.")
    return builtin in BANNED_BUILTINS or (builtin != name and builtin in BANNED_CALLS)


class _Scanner:
    """Knows what the names of one module stand for."""

    def __init__(self, tree: ast.Module) -> None:
        self._names: dict[str, str] = {}
        self._parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        for node in ast.walk(tree):
            self._note_import(node)
        for _ in range(2):  # an alias of an alias may stand before it
            for node in ast.walk(tree):
                self._note_assignment(node)

    def of_node(self, node: ast.AST) -> Iterator[Finding]:
        """Yield what a node is by itself, its children left out."""
        if isinstance(node, ast.Import):
            yield from (Finding(node.lineno, alias.name) for alias in node.names if is_banned(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (Finding(node.lineno, name) for name in names if is_banned(name))
        elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load):
            yield from self._of_reference(node)
        elif isinstance(node, ast.Call):
            yield from self._of_call(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from self._of_assignment(node)
        elif isinstance(node, ast.Dict):  # keywords of a call to come
            for key, value in zip(node.keys, node.values, strict=True):
                yield from self._of_keyword(node.lineno, _text(key) if key is not None else "", value)
        elif isinstance(node, ast.List | ast.Tuple):
            yield from self._of_command(node)

    def _note_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                self._names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _note_assignment(self, node: ast.AST) -> None:
        """Follow `a = b.c` where b is known from an import."""
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            meant = self._meant(node.value)
            root = meant.partition(".")[0] if meant else ""
            if meant and (root in {name.partition(".")[0] for name in self._names.values()} or root == "builtins"):
                for target in targets:
                    if isinstance(target, ast.Name):
                        self._names.setdefault(target.id, meant)

    def _meant(self, node: ast.expr) -> str:
        """Return the full name of what an expression refers to, or an empty text."""
        if isinstance(node, ast.Name):
            return "builtins" if node.id == "__builtins__" else self._names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return self._member(node.value, node.attr)
        if isinstance(node, ast.Subscript):
            return self._of_mapping(node)
        if isinstance(node, ast.Call) and node.args:
            called, first = self._meant(node.func), node.args[0]
            if called == "getattr" and len(node.args) > 1:
                name = _text(node.args[1])
                return self._member(first, name) if name else ""
            if called in ("importlib.import_module", "__import__", "builtins.__import__"):
                return _text(first)
        return ""

    def _member(self, owner: ast.expr, name: str) -> str:
        meant = self._meant(owner)
        return f"{meant}.{name}" if meant else ""

    def _of_mapping(self, node: ast.Subscript) -> str:
        """Return what `sys.modules["os"]`, `vars(os)["system"]` and `os.__dict__["system"]` refer to."""
        name, owner = _text(node.slice), node.value
        if not name:
            return ""
        if isinstance(owner, ast.Call) and self._meant(owner.func) in _NAMESPACES:
            return self._member(owner.args[0], name) if owner.args else self._names.get(name, name)
        meant = self._meant(owner)
        if meant == "sys.modules":
            return name
        return f"{meant.removesuffix('.__dict__')}.{name}" if meant.endswith(".__dict__") else ""

    def _of_reference(self, node: ast.Name | ast.Attribute | ast.Subscript) -> Iterator[Finding]:
        meant = self._meant(node)
        if isinstance(node, ast.Subscript):
            is_found = is_banned(meant)
        elif isinstance(node, ast.Name):
            is_found = _is_banned_member(meant) and node.id not in self._parameters
        else:  # of a module: where it is imported
            is_found = _is_banned_member(meant) or node.attr in BANNED_ATTRIBUTES
        if is_found:
            yield Finding(node.lineno, meant or node.attr if isinstance(node, ast.Attribute) else meant)

    def _of_call(self, node: ast.Call) -> Iterator[Finding]:
        called = self._meant(node.func)
        if called in BANNED_CALLS:
            yield Finding(node.lineno, called)
        if called == "importlib.import_module" and node.args:
            yield from self._of_dynamic_import(node)
        if called in ("getattr", "setattr") and len(node.args) > 1:
            yield from self._of_getattr(node, called)
        for keyword in node.keywords:
            yield from self._of_keyword(node.lineno, keyword.arg or "", keyword.value)

    def _of_keyword(self, line: int, name: str, value: ast.expr) -> Iterator[Finding]:
        if name in _TELLING_KEYWORDS and not _is_false(value):
            yield Finding(line, f"{name}=")
        yield from self._of_setting(line, name, value)

    def _of_dynamic_import(self, node: ast.Call) -> Iterator[Finding]:
        """Yield an import by a name that is banned, or that is not written here, at least how it begins."""
        name = node.args[0]
        if isinstance(name, ast.JoinedStr) and "." in _text(name.values[0]):
            name = name.values[0]
        if not _text(name) or is_banned(_text(name)):
            yield Finding(node.lineno, _text(name) or "importlib.import_module")

    def _of_getattr(self, node: ast.Call, called: str) -> Iterator[Finding]:
        owner, name = self._meant(node.args[0]), _text(node.args[1])
        if not name and called == "getattr" and owner in TELLING_MODULES:
            yield Finding(node.lineno, f"getattr({owner})")
        elif called == "getattr" and (is_banned(f"{owner}.{name}") or name in BANNED_ATTRIBUTES):
            yield Finding(node.lineno, f"{owner}.{name}")
        elif called == "setattr" and len(node.args) > 2:
            yield from self._of_setting(node.lineno, name, node.args[2])

    def _of_assignment(self, node: ast.Assign | ast.AnnAssign) -> Iterator[Finding]:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and node.value is not None:
                yield from self._of_setting(node.lineno, target.attr, node.value)

    def _of_setting(self, line: int, name: str, value: ast.expr) -> Iterator[Finding]:
        if name in _VERIFYING_KEYWORDS and _is_false(value):
            yield Finding(line, f"{name}=False")
        if name in _CERTIFICATE_NAMES and not self._verifies(value):
            yield Finding(line, f"{name}=")

    def _verifies(self, value: ast.expr) -> bool:
        """Return whether a certificate is asked for: anything that is not plainly so is a finding."""
        return self._meant(value) in ("ssl.CERT_REQUIRED", "ssl.VerifyMode.CERT_REQUIRED") or _text(value) == "required"

    def _of_command(self, node: ast.List | ast.Tuple) -> Iterator[Finding]:
        """Yield a shell that begins a command, or is told to read one."""
        words = [_text(element) for element in node.elts]
        for position, word in enumerate(words):
            following = words[position + 1] if position + 1 < len(words) else ""
            if PurePosixPath(word).name in SHELLS and (following.startswith("-") and "c" in following):
                yield Finding(node.lineno, f"{PurePosixPath(word).name} {following}")


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
