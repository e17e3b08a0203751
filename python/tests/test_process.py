"""What concerns the process: forks, errors, absent packages, the program, the stubs."""

from __future__ import annotations

import ast
import json
import logging
import os
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import config, geometry

import forebay
from forebay import _cli, _forebay, _logging
from forebay.connector import settings

BLOCK_NUMPY = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numpy", "torch"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocker())
"""


def in_child(work: object) -> str:
    """What `work` says in a forked child."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            said = work()  # type: ignore[operator]
        except BaseException as e:
            said = f"{type(e).__name__} {getattr(e, 'kind', None)}"
        os.write(write, str(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as out:
        said = out.read()
    assert os.waitpid(pid, 0)[1] == 0
    return said


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_a_clear_error_and_harms_nothing(cache: Path) -> None:
    buffers = [bytearray(2 * 2 * 32 * 2 * 64) for _ in range(3)]
    kv = [memoryview(b).cast("f", (2, 4, 16, 2, 16)) for b in buffers]
    with forebay.Engine(config(cache), geometry()) as eng, forebay.ObjectStore(config(cache)) as objects:
        store = eng.store(list(range(32)), kv, list(range(32)), by_layer=True, wait_for_staging=True)
        for call in (
            lambda: eng.lookup([1]),
            lambda: eng.load([1], kv, [0]),
            eng.flush,
            eng.stats,
            eng.close,
            store.wait,
            lambda: objects.put({"a": b"b"}),
            lambda: objects.count_prefix(["a"]),
            lambda: objects.pin(["a"], 1.0),
            lambda: objects.unpin(["a"]),
            lambda: objects.gone([]),
            lambda: objects.cancel(1),
            objects.drain_evicted,
            objects.drain_completions,
            objects.stats,
            objects.metrics,
        ):
            assert in_child(call) == "Forked forked"
        assert in_child(lambda: (eng.is_up, objects.is_up)) == "(False, False)"
        store.all_layers()
        assert store.wait().stored == 1 and eng.lookup(list(range(32))) == 32
        assert objects.put({"a": b"b"}) == [True]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_open_an_engine_where_its_parent_has_none_open(cache: Path) -> None:
    def opens() -> str:
        class Kept(logging.Handler):
            said: list[str] = []

            def emit(self, record: logging.LogRecord) -> None:
                self.said.append(record.getMessage())

        logging.getLogger("forebay").addHandler(Kept())
        with forebay.Engine(config(cache, enable_rdma=True), geometry()):
            pass
        _logging.flush()
        return " ".join(Kept.said)

    # A lock that a thread of the parent holds at the fork stays locked in the child.
    with forebay.Engine(config(cache), geometry()):
        assert in_child(opens) == "Forked forked"
        assert in_child(lambda: forebay.ObjectStore(config(cache))) == "Forked forked"
    assert "enable_rdma" in in_child(opens)


def test_errors_have_a_kind_and_advice(cache: Path) -> None:
    with pytest.raises(forebay.ConfigError, match="chunk_sise") as raised:
        forebay.Engine({"cache_dir": cache, "chunk_sise": 1}, geometry())
    assert raised.value.kind == "config" and raised.value.advice
    assert isinstance(raised.value, forebay.ForebayError)
    with pytest.raises(forebay.ConfigError, match="set in kv_connector_extra_config"):
        settings({"capacity": "lots"}, name="kv_connector_extra_config")
    with pytest.raises(forebay.ConfigError, match="tpu"):
        forebay.Engine(config(cache), geometry(), device="tpu")
    with pytest.raises(forebay.ConfigError, match='"False" is not a device'):
        forebay.Engine(config(cache), geometry(), device=False)
    with pytest.raises(forebay.ConfigError, match="the config is a list"):
        forebay.Engine([1], geometry())  # type: ignore[arg-type]
    with pytest.raises(forebay.InvalidInput, match="unknown KV dtype"):
        geometry(dtype="float7")
    with pytest.raises(forebay.InvalidInput, match="not below its size"):
        geometry(tp=(2, 2))
    with pytest.raises(forebay.InvalidInput, match="needs \"window\""):
        geometry(layers=None, layer_specs=[{"kind": "sliding"}])
    with pytest.raises(forebay.InvalidInput, match="\"windows\" is unknown"):
        geometry(layers=None, layer_specs=[{"kind": "sliding", "windows": 3}])
    for huge in ({"layers": 10**18}, {"planes": 10**18}, {"layers": None, "layer_specs": [{"planes": 10**18}]}):
        with pytest.raises(forebay.InvalidInput, match="1000000000000000000 (layers|planes)"):
            geometry(**huge)
    kinds = {forebay.Forked, forebay.TimedOut, forebay.Closed}
    assert all(issubclass(kind, forebay.ForebayError) for kind in kinds)


def test_a_closed_engine_misses(cache: Path) -> None:
    eng = forebay.Engine(config(cache), geometry())
    eng.close()
    assert not eng.is_up and eng.lookup([1] * 32) == 0
    with pytest.raises(forebay.Closed):
        eng.flush()


def test_a_cache_that_cannot_be_opened_is_disabled(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with forebay.Engine(config(tmp_path / "file" / "x", on_open_failure="disable"), geometry()) as eng:
        assert not eng.is_up and eng.why_disabled
    with forebay.ObjectStore(config(tmp_path / "file" / "x", on_open_failure="disable")) as store:
        assert not store.is_up and store.why_disabled


def test_a_scheduler_alone_in_its_process_has_the_engines_log(cache: Path) -> None:
    code = (
        "import sys, threading, forebay\n"
        "from forebay import _forebay\n"
        "_forebay.SchedulerSide.of_workers({'cache_dir': sys.argv[1]}, block_tokens=[16], num_blocks=8)\n"
        "print([thread.name for thread in threading.enumerate()])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(cache)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "forebay-log" in done.stdout, (done.stdout, done.stderr)


def test_it_works_where_numpy_and_torch_are_absent(cache: Path) -> None:
    code = BLOCK_NUMPY + (Path(__file__).parent / "without_numpy.py").read_text()
    done = subprocess.run([sys.executable, "-c", code, str(cache)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "64 tokens, all equal"


def test_a_program_installed_for_the_user_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = sysconfig.get_preferred_scheme("user")
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme="usual": str(tmp_path / scheme / name))
    with pytest.raises(SystemExit, match=f"none of {tmp_path}/usual/scripts, .*, {tmp_path}/{user}/scripts; install"):
        runpy.run_module("forebay", run_name="__main__")
    program = tmp_path / user / "scripts" / "forebay"
    program.parent.mkdir(parents=True)
    program.touch()
    assert _cli.program_path() == program


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120)


def test_the_program_comes_with_the_package(cache: Path) -> None:
    script = str(Path(sys.executable).parent / "forebay")
    for program in ([script], [sys.executable, "-m", "forebay"]):
        version = run_program(*program, "--version")
        assert version.returncode == 0 and version.stdout.strip() == f"forebay {forebay.__version__}"
        assert run_program(*program, "nonsense").returncode == 2
    with forebay.Engine(config(cache), geometry()) as eng:
        assert eng.is_up
        assert run_program(script, "stat", str(cache)).returncode == 0
        probe = run_program(script, "--json", "probe", str(cache))
    assert json.loads(probe.stdout), probe.stderr


def test_the_programs_own_children_are_the_program(tmp_path: Path) -> None:
    """`probe` tries cuFile in a program of its own: that one must be found without PATH, and must answer."""
    env = {"PATH": "/nonexistent", "FOREBAY_MIN_FREE": "0"}
    command = [sys.executable, "-m", "forebay", "--json", "probe", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert "no_program" not in done.stdout


def stub_names() -> dict[str, set[str]]:
    """Names of the stub file: of the module (under ""), and of each class."""
    tree = ast.parse((Path(_forebay.__file__).parent / "_forebay.pyi").read_text())
    names: dict[str, set[str]] = {"": set()}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names[""].add(node.name)
            names[node.name] = {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
            names[node.name] |= {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
        elif isinstance(node, ast.FunctionDef):
            names[""].add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names[""].add(node.target.id)  # type: ignore[union-attr]
    # What only the stubs need.
    names[""] -= {"_Stream", "_Memory", "_Config", "_Tokens", "_Slots", "_Kv", "_Extra", "_AnyStream", "_Value", "_Items"}
    return names


PLAIN = {"__doc__", "__module__", "__weakref__", "__new__", "__name__", "__file__", "__loader__", "__package__", "__spec__"}


def test_the_stubs_name_what_the_module_has() -> None:
    stubs = stub_names()
    shown = {n for n in vars(_forebay) if n not in PLAIN | {"__all__"}}
    assert stubs[""] == shown
    for name in shown:
        value = getattr(_forebay, name)
        if not isinstance(value, type) or issubclass(value, forebay.ForebayError):
            continue
        assert value.__doc__, name
        have = set(value._fields) if issubclass(value, tuple) else {n for n in vars(value) if n not in PLAIN}
        assert {n for n in stubs[name] if n != "__init__"} == have, name
        for attribute in have:
            if not attribute.startswith("_"):
                assert getattr(value, attribute).__doc__, f"{name}.{attribute} has no docstring"


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "python.md"
    example = page.read_text().split("```python\n", 1)[1].split("```", 1)[0]
    code = example.replace("/mnt/nvme/forebay", str(tmp_path / "cache"))
    env = {**os.environ, "FOREBAY_ALLOW_ANY_FILESYSTEM": "true", "FOREBAY_MIN_FREE": "0", "FOREBAY_CAPACITY": "64MiB"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0 and "512 of 600 tokens" in done.stdout, done.stderr + done.stdout


@pytest.mark.parametrize("place", ["cu13/lib", "cufile/lib"])
def test_the_libcufile_of_pytorchs_wheels_is_found(tmp_path: Path, place: str) -> None:
    library = tmp_path / "nvidia" / place / "libcufile.so.0"
    library.parent.mkdir(parents=True)
    library.touch()
    command = [sys.executable, "-c", "import os, forebay; print(os.environ['FOREBAY_CUFILE_PATH'])"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    for named in ("", "/named/by/the/user"):
        env = {**os.environ, "PYTHONPATH": path, "FOREBAY_CUFILE_PATH": named}
        said = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()
        assert said == (named or str(library))
