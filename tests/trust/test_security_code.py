"""Nothing in the project evaluates, unpickles or hands to a shell what it reads: looked for in every line of it.

What is looked for, and how names are followed, is in `tests.support.code_scan`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.code_scan import scan

pytestmark = pytest.mark.trust("security")

ROOT = Path(__file__).parents[2]
TREES = ("tiered_kv", "plugins", "examples", "tests/support")

OWN_NAMES = "of this package's own modules, from a table in the same file"
NAMED_CLASS = "the class that the owner of the stack names as 'module:Class', which is code that he installed"
ALLOWED = {
    ("tiered_kv/config/reading.py", "yaml.load"): "with a subclass of SafeLoader, which test_the_one_loader checks",
    ("tiered_kv/__init__.py", "importlib.import_module"): OWN_NAMES,
    ("tiered_kv/integrations/vllm/__init__.py", "importlib.import_module"): OWN_NAMES,
    ("tests/support/crash_server.py", "importlib.import_module"): OWN_NAMES,
    ("tiered_kv/config/stack_config.py", "importlib.import_module"): NAMED_CLASS,
    ("tiered_kv/cpu/policies/__init__.py", "importlib.import_module"): NAMED_CLASS,
    ("tiered_kv/hooks.py", "importlib.import_module"): NAMED_CLASS,
    ("tests/support/mounts.py", "sh -c"): "for tests, with commands that are written in the same file",
    ("tests/support/short_writes.py", "getattr(os)"): "for tests: the calls that it replaces, from its own table",
    ("plugins/tiered_kv_redis/endpoint.py", "ssl_cert_reqs="): "the setting tls_verify, which is on by default",
}
"""What may stand where, and why."""


def sources() -> list[Path]:
    return sorted(path for tree in TREES for path in (ROOT / tree).rglob("*.py"))


def test_no_module_evaluates_unpickles_or_calls_a_shell() -> None:
    assert len(sources()) > 150
    found = []
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        for line, what in scan(ast.parse(path.read_text())):
            if (name, what) not in ALLOWED:
                found.append(f"{name}:{line}: {what}")
    assert found == []


PLANTED = [
    "import pickle",
    "import pickle as p",
    "from pickle import loads",
    "def f():\n    import marshal",
    "import shelve, os",
    "from xml.etree import ElementTree",
    "import xml.dom.minidom",
    "eval('1')",
    "builtins.exec('1')",
    "compile('1', '', 'exec')",
    "__import__('os')",
    "os.system('ls')",
    "from os import system",
    "x = os.popen",
    "subprocess.run('ls', shell=True)",
    "subprocess.Popen('ls', shell=flag)",
    "yaml.load(text)",
    "yaml.load(text, yaml.SafeLoader)",
    "yaml.unsafe_load(text)",
    "from yaml import full_load",
    "class L(yaml.Loader): pass",
    "torch.load(path)",
    "numpy.loadtxt; numpy.load(path, allow_pickle=True)",
    "requests.get(url, verify=False)",
    "context = ssl._create_unverified_context()",
    "context.verify_mode = ssl.CERT_NONE",
    "tempfile.mktemp()",
    # By another name.
    "import os as o\no.system('ls')",
    "import os as o\np = o\np.system('ls')",
    "from os import popen as p",
    "import torch as t\nt.load(path)",
    "import yaml as y\ny.unsafe_load(text)",
    "import yaml as y\ny.load(text, y.SafeLoader)",
    "self.yaml.unsafe_load(text)",
    "f = eval",
    "f = eval\nf('1')",
    "map(exec, lines)",
    "import builtins as b\nb.eval('1')",
    "__builtins__.eval('1')",
    "from builtins import eval as e",
    "getattr(os, 'system')('ls')",
    "import os as o\ngetattr(o, 'sys' + 'tem')('ls')",
    "getattr(os, name)",
    "import sys\nsys.modules['os'].system('ls')",
    "import sys\nsys.modules['pickle'].loads(data)",
    "import os\nvars(os)['system']('ls')",
    "import os\nos.__dict__['system']('ls')",
    "globals()['eval']('1')",
    "importlib.import_module('pickle').loads(data)",
    "import importlib as i\ni.import_module('os').system('ls')",
    "from importlib import import_module\nimport_module(name)",
    # Programs and shells.
    "asyncio.create_subprocess_shell('ls')",
    "from asyncio import create_subprocess_shell as run",
    "loop.subprocess_shell(Protocol, 'ls')",
    "os.execve(path, arguments, environment)",
    "from os import execlp",
    "os.posix_spawn(path, arguments, environment)",
    "os.posix_spawnp(path, arguments, environment)",
    "os.spawnvpe(os.P_WAIT, path, arguments, environment)",
    "subprocess.run(['sh', '-c', x])",
    "subprocess.run(('/bin/bash', '-ec', x))",
    "command = ['env', 'sh', '-c', x]",
    "subprocess.run(x, **{'shell': True})",
    "options = {'shell': True}",
    # Code and objects from data.
    "import runpy\nrunpy.run_path(path)",
    "import multiprocessing",
    "from multiprocessing.connection import Listener",
    "import multiprocessing.shared_memory",
    "from concurrent.futures import ProcessPoolExecutor",
    "spec.loader.exec_module(module)",
    "import importlib.util as u\nu.spec_from_file_location('x', path)",
    "frame.read_pickle(path)",
    "types.CodeType(*fields)",
    "yaml.full_load_all(text)",
    # TLS that does not verify.
    "context.verify_mode = VerifyMode(0)",
    "context.verify_mode = ssl.VerifyMode.CERT_NONE",
    "context.verify_mode = mode",
    "setattr(context, 'verify_mode', 0)",
    "context.check_hostname = False",
    "ssl.wrap_socket(sock, cert_reqs=0)",
    "redis.Redis(ssl_cert_reqs='none')",
    "options = {'ssl_cert_reqs': None}",
    "session.verify = False",
]


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_found(planted: str) -> None:
    assert scan(ast.parse(planted))


@pytest.mark.parametrize(
    "harmless",
    [
        "subprocess.run(['ls'])",
        "subprocess.run([program, '-c', str(file)])",
        "['sh', 'script']",
        "re.compile('x')",
        "np.frombuffer(b, allow_pickle=False)",
        "{'shell': False}",
        "def f(code, commands):\n    return code.upper(), commands[0]",
        "code = error.code\ncode.upper()",
        "getattr(settings, name)",
        "getattr(os, 'replace')",
        "importlib.import_module('vllm')",
        "importlib.import_module(f'tiered_kv._cli.{verb}')",
        "import platform\nplatform.system()",
        "from . import code",
        "context.verify_mode = ssl.CERT_REQUIRED",
        "import ssl as s\ncontext.verify_mode = s.VerifyMode.CERT_REQUIRED",
        "redis.Redis(ssl_cert_reqs='required')",
        "model.eval()",
        "cursor.execute(text)",
    ],
)
def test_what_is_harmless_is_not(harmless: str) -> None:
    assert scan(ast.parse(harmless)) == []


@pytest.mark.parametrize(
    "text",
    [
        "model: !!python/object/apply:os.system ['true']",
        "model: !!python/name:os.system",
        "model: !!python/object/new:subprocess.Popen [['true']]",
        "a: &a [1]\nb: *a",
        "!!python/module:os {}",
    ],
)
def test_the_one_loader_makes_no_objects_and_no_copies(text: str) -> None:
    import yaml

    from tiered_kv.config.reading import _StackLoader, parse_stack_text
    from tiered_kv.errors import ConfigError

    assert issubclass(_StackLoader, yaml.SafeLoader)
    with pytest.raises(ConfigError):
        parse_stack_text(text)


def test_every_exception_still_stands_in_the_code() -> None:
    for name, what in ALLOWED:
        assert what in {found for _, found in scan(ast.parse((ROOT / name).read_text()))}
