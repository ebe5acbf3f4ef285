"""Fixtures and hooks of all tests: a check for leaks, repeatable random choices, samples, and figures of proofs."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import tiered_kv

# Tests, and programs that they start, find `tests.support` in the checkout, and the package where it is installed.
sys.path.append(str(Path(__file__).parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [os.environ.get("PYTHONPATH"), str(Path(tiered_kv.__file__).parents[1]), sys.path[-1]])
)
os.environ.pop("PYTEST_ADDOPTS", None)  # options of this run, which a pytest that a test starts may not know

from tests.support.azurite import azurite
from tests.support.engine_runs import RUN, today, write
from tests.support.faulty import Gate
from tests.support.figures import FIGURES, Figures, Profile
from tests.support.footprint import Footprint, left_behind
from tests.support.patient_nvme import patient_nvme
from tests.support.places import place_of
from tests.support.redis_groups import redis_cluster, redis_sentinel, tls_redis_cluster, tls_redis_sentinel
from tests.support.redis_servers import redis_server, tls_redis_server
from tests.support.s3_servers import installed_server, moto_bucket, moto_server
from tests.support.sample import sample
from tests.support.server_process import fake_redis_url
from tests.support.stacks import Register, ReplaceModule, plugged_class
from tiered_kv.testing.control import ManualClock

# Fixtures of all tests. One that lasts for the session is made once, which an import into each module would not do.
__all__ = [
    "azurite",
    "fake_redis_url",
    "installed_server",
    "moto_bucket",
    "moto_server",
    "patient_nvme",
    "place_of",
    "redis_cluster",
    "redis_sentinel",
    "redis_server",
    "tls_redis_cluster",
    "tls_redis_sentinel",
    "tls_redis_server",
]

# "quick", of a run without the slow tests, and "repeatable", of all others, fail the same way on every machine;
# HYPOTHESIS_PROFILE=explore looks for what they miss. None fails because the machine is slow.
_PATIENT = hypothesis.settings(deadline=None, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("quick", _PATIENT, derandomize=True, max_examples=16)
hypothesis.settings.register_profile("repeatable", _PATIENT, derandomize=True, max_examples=40)
hypothesis.settings.register_profile("explore", _PATIENT, max_examples=1000)


_CASES = pytest.StashKey[Counter[str]]()
"""How many cases of each test that is marked `one_quick` have been collected."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("trust", "the proofs of docs/explanation/guarantees.md, pytest -m trust")
    group.addoption(
        "--trust",
        choices=[profile.value for profile in Profile],
        default=Profile.SHORT.value,
        help="how much the proofs try: short, as in continuous integration, or full",
    )
    group.addoption("--trust-table", type=Path, metavar="PATH", help="write the table of figures as JSON, too")
    parser.addoption(
        "--engine-runs",
        type=Path,
        metavar="PATH",
        help="add to this file which releases of engines the tests have run: tests/engines/runs.json",
    )
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="of each test's cases run the first and every N-th after it, and none that is marked `full`",
    )
    parser.addoption(
        "--one-test-in",
        type=int,
        default=1,
        metavar="N",
        help="of all tests, however many cases each has, run one in N; as .ci/run does",
    )
    parser.addoption(
        "--sample-seed",
        default="",
        metavar="TEXT",
        help="choose others for --one-in and --one-test-in, the same for the same text; .ci/run takes the commit",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = Figures()
    profile = "quick" if "not slow" in config.option.markexpr else "repeatable"  # before tests are imported
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", profile))


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the cases of a test that `one_quick` makes slow."""
    if (marker := item.get_closest_marker("one_quick")) is not None:
        seen = item.config.stash.setdefault(_CASES, Counter[str]())
        name = item.nodeid.partition("[")[0]
        if seen[name] % marker.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[name] += 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--one-in` and `--one-test-in` say, and tests that are marked `full`."""
    one_in, one_test_in = config.getoption("--one-in"), config.getoption("--one-test-in")
    if one_in == one_test_in == 1:
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    names = [(name, len(cases)) for name, cases in tests.items()]
    chosen = sample(names, one_in, one_test_in, config.getoption("--sample-seed"))
    kept = {tests[name][case] for name, case in chosen}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare what is imported for the tests from garbage collections: torch's modules take seconds of a run's time."""
    gc.disable()
    try:
        collected = yield
        _keep_what_boto3_parses()
        _start_obstore()
        _start_hypothesis()
        gc.collect()
        gc.freeze()
        return collected
    finally:
        gc.enable()


def _keep_what_boto3_parses() -> None:
    """Let botocore, if a test uses it, look for descriptions of services once, and not for each session: 0.1 s."""
    if (loaders := sys.modules.get("botocore.loaders")) is not None:
        begin, kept = loaders.Loader.__init__, dict[object, object]()

        def begin_with_kept(loader: Any, *arguments: object, **options: object) -> None:  # Any: botocore's
            begin(loader, *arguments, **options)
            loader._cache = kept

        loaders.Loader.__init__ = begin_with_kept


def _start_obstore() -> None:
    """Let obstore, if it is installed, open the descriptors that it has until the process ends: no test's leak."""
    if importlib.util.find_spec("obstore") is not None:
        import obstore.store

        list(obstore.list(obstore.store.MemoryStore()))


def _start_hypothesis() -> None:
    """Let Hypothesis register its random numbers: it warns where nothing but a frozen object seems to hold them."""

    @hypothesis.given(hypothesis.strategies.none())
    def nothing(_: None) -> None:
        pass

    nothing()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count a test that is marked `trust("some proof")` as one case of that proof, with a marker's `note`.

    An error before or after the test, such as a leak, counts as a failed case too.
    """
    report = yield
    if "plugins/transformers" in item.nodeid:
        RUN.used.add(sys.executable)
    RUN.note(report)
    if report.failed or (report.when == "call" and report.passed):
        markers = list(item.iter_markers("trust"))
        note = next((marker.kwargs["note"] for marker in markers if "note" in marker.kwargs), "")
        for proof in (proof for marker in markers for proof in marker.args):
            item.config.stash[FIGURES].add(proof, 1, int(report.passed), note)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send what a process of several (`-n`) counted to the one that prints it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["figures"] = session.config.stash[FIGURES].rows()
        session.config.workeroutput["engines"] = RUN.counts


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:  # Any: pytest-xdist's process, which may not be installed
    """Add what one of several processes counted; one that broke off has sent nothing."""
    counted = getattr(node, "workeroutput", {})
    node.config.stash[FIGURES].add_rows(counted.get("figures", {}))
    RUN.add(counted.get("engines", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the proofs of this run came to, if there were any; note which engines it ran, if that is asked."""
    if (runs := config.getoption("--engine-runs")) is not None:
        write(runs, RUN.runs(today()))
    figures = config.stash[FIGURES]
    if figures:
        terminalreporter.section(f"trust, {config.getoption('--trust')} profile")
        for line in figures.lines():
            terminalreporter.line(line)
        path = config.getoption("--trust-table")
        if path is not None:
            figures.write(path)


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Figures:
    """The figures of this run's proofs: how much each tried, and how much of that passed."""
    return pytestconfig.stash[FIGURES]


@pytest.fixture(scope="session")
def profile(pytestconfig: pytest.Config) -> Profile:
    """How much the proofs of this run try."""
    return Profile(pytestconfig.getoption("--trust"))


@pytest.fixture(scope="session")
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where `tempfile`, of this process and of those it starts, puts its files during the tests."""
    directory = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(directory))
        patch.setattr(tempfile, "tempdir", str(directory))
        yield directory


@pytest.fixture(autouse=True)
def _nothing_left_behind(temporary_directory: Path) -> Iterator[None]:
    """Fail a test that leaves a thread, a file descriptor, shared memory or a temporary file behind.

    It is set up before, and so torn down after, the other fixtures of a test. A test that makes threads hang
    lets them go through the fixture `gate`.
    """
    before = Footprint.take(temporary_directory)
    yield
    if sysconfig.get_config_var("Py_GIL_DISABLED"):  # it collects seldom: memory in cycles stays mapped
        gc.collect()
    left = left_behind(before, temporary_directory)
    if left:
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def _no_waits_for_disks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the quick tests flushes, and the pause before fs asks again for room, which it does for its first block.

    What a crash of the machine leaves is for slow tests.
    """
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(os, "fsync", lambda fd: None)
        monkeypatch.setattr(os, "fdatasync", lambda fd: None)
        if (grants := sys.modules.get("tiered_kv_fs.grants")) is not None:
            monkeypatch.setattr(grants, "_BUSY_PAUSE_S", 0.005)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate, open at first, that is opened at the end of the test."""
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Closes at the end of the test, the last first."""
    with ExitStack() as closing:
        yield closing


@pytest.fixture
def register(closing: ExitStack) -> Register:
    """Makes tier classes known for one test."""

    def register(name: str, tier: Any) -> None:
        closing.enter_context(plugged_class(name, tier))

    return register


@pytest.fixture
def replace_module(monkeypatch: pytest.MonkeyPatch) -> ReplaceModule:
    """Replaces a module for the rest of the test; None: its import fails."""
    return lambda name, module=None: monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def clock() -> ManualClock:
    """A clock that only the test moves."""
    return ManualClock()


@pytest.fixture(scope="session")
def drawing_library() -> None:
    """The library that draws, and the files of letters that it keeps open for the whole process."""
    from tiered_kv.cli.report.figures import draw

    def plot(axes: Any) -> None:  # Any: the library's axes
        axes.set_xlabel("letters")

    draw("letters", "letters", plot)
