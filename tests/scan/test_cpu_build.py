"""The cache of the compiled CPU scan: built once, never stale, never damaged, never in two processes' way."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from naju.scan.cpu_compiled import build

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="the compiled scan needs POSIX"),
    pytest.mark.skipif(
        not any(map(shutil.which, [os.environ.get("CXX", "c++"), "g++", "clang++"])), reason="no C++ compiler was found"
    ),
]

TINY_SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("NAJU_CACHE", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles in no time, for tests of the cache alone."""
    path = tmp_path / "tiny.cpp"
    path.write_text(TINY_SOURCE)
    monkeypatch.setattr(build, "SOURCE", path)
    return path


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def works(library: Path) -> bool:
    return ctypes.CDLL(str(library)).answer() == 42


def test_the_real_source_compiles_in_seconds(cache: Path) -> None:
    start = time.perf_counter()
    library = build.compiled_library()
    elapsed = time.perf_counter() - start
    print(f"compiled in {elapsed:.2f} s")
    assert library.parent == cache
    assert ctypes.CDLL(str(library)).naju_tile() > 0
    assert elapsed < 10


@pytest.mark.usefixtures("source")
def test_it_is_compiled_once(cache: Path) -> None:
    first = build.compiled_library()
    made = first.stat()
    second = build.compiled_library()
    assert second == first
    assert (second.stat().st_mtime_ns, second.stat().st_ino) == (made.st_mtime_ns, made.st_ino)
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".sha256", ".so"]


def _truncate(library: Path) -> None:
    library.write_bytes(library.read_bytes()[:1000])


def _empty(library: Path) -> None:
    library.write_bytes(b"")


def _flip_a_byte(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 0xFF
    library.write_bytes(content)


def _fill_with_garbage(library: Path) -> None:
    library.write_bytes(os.urandom(5000))


def _lose_the_checksum(library: Path) -> None:
    library.with_suffix(".sha256").unlink()


def _spoil_the_checksum(library: Path) -> None:
    library.with_suffix(".sha256").write_bytes(b"\xff\xfe")


def _lose_the_library(library: Path) -> None:
    library.unlink()


DAMAGES = [
    _truncate,
    _empty,
    _flip_a_byte,
    _fill_with_garbage,
    _lose_the_checksum,
    _spoil_the_checksum,
    _lose_the_library,
]


@pytest.mark.usefixtures("cache", "source")
@pytest.mark.parametrize("damage", DAMAGES, ids=[damage.__name__.strip("_") for damage in DAMAGES])
def test_a_damaged_library_is_rebuilt(damage: Callable[[Path], None]) -> None:
    library = build.compiled_library()
    intact = library.read_bytes()
    damage(library)
    assert build.compiled_library() == library
    assert library.read_bytes() == intact
    assert works(library)


@pytest.mark.usefixtures("source")
def test_what_a_killed_build_leaves_behind_does_no_harm(cache: Path) -> None:
    """A checksum that was moved in place without its library, and a half-written build folder."""
    library = build.compiled_library()
    library.unlink()
    (cache / "build-dead").mkdir()
    (cache / "build-dead" / library.name).write_bytes(b"\x7fELF")
    assert works(build.compiled_library())


@pytest.mark.usefixtures("cache")
def test_a_changed_source_gives_another_library(source: Path) -> None:
    first = build.compiled_library()
    source.write_text(TINY_SOURCE.replace("42", "43"))
    second = build.compiled_library()
    assert second != first
    assert ctypes.CDLL(str(second)).answer() == 43
    assert works(first)


@pytest.mark.usefixtures("cache", "source")
def test_changed_flags_and_headers_give_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "part.h"
    header.write_text("// one")
    monkeypatch.setattr(build, "HEADERS", [header])
    libraries = [build.compiled_library()]
    header.write_text("// two")
    libraries.append(build.compiled_library())
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-g"])
    libraries.append(build.compiled_library())
    assert len(set(libraries)) == 3


def test_every_file_that_the_source_includes_is_a_known_header() -> None:
    sources = [build.SOURCE, *build.HEADERS]
    quoted = [
        line.split('"')[1]
        for path in sources
        for line in path.read_text().splitlines()
        if line.startswith('#include "')
    ]
    assert set(quoted) <= {header.name for header in build.HEADERS}


@pytest.mark.usefixtures("cache", "source")
def test_another_or_an_updated_compiler_gives_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build.find_compiler()
    libraries = [build.compiled_library()]
    wrapper = script(tmp_path / "other-c++", f'exec "{real}" "$@"')
    monkeypatch.setenv("CXX", str(wrapper))
    libraries.append(build.compiled_library())
    script(wrapper, "# a new release", f'exec "{real}" "$@"')
    libraries.append(build.compiled_library())
    assert len(set(libraries)) == 3
    assert all(map(works, libraries))


@pytest.mark.usefixtures("cache", "source")
def test_another_processor_gives_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder may be shared by machines on which -march=native means different things."""
    first = build.compiled_library()
    monkeypatch.setattr(build, "_processor", lambda: "another one")
    assert build.compiled_library() != first


@pytest.mark.usefixtures("cache", "source")
def test_a_compiler_that_goes_by_the_name_it_is_called_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiler caches stand in the path as links called c++ to one program, which looks at its own name."""
    real = build.find_compiler()
    folder = tmp_path / "bin"
    folder.mkdir()
    launcher = script(
        tmp_path / "launcher",
        'test "$(basename "$0")" = c++ || { echo "not called c++" >&2; exit 1; }',
        f'exec "{real}" "$@"',
    )
    (folder / "c++").symlink_to(launcher)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert works(build.compiled_library())


@pytest.mark.usefixtures("cache", "source")
def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-c++")
    with pytest.raises(build.BuildError, match="CXX='no-such-c\\+\\+' was not found"):
        build.compiled_library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.compiled_library()


@pytest.mark.usefixtures("source")
def test_a_compiler_that_fails_is_quoted(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = script(tmp_path / "broken-c++", 'echo "no licence today" >&2', 'echo "ask again tomorrow" >&2', "exit 3")
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.BuildError, match=r"broken-c\+\+ could not compile it: no licence today$"):
        build.compiled_library()
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


@pytest.mark.usefixtures("cache", "source")
def test_the_error_is_quoted_and_not_what_comes_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["In file included from cuda_runtime.h:82:", "host_config.h:143: error: unsupported GNU version!"]
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", *(f'echo "{line}" >&2' for line in lines), "exit 1")))
    with pytest.raises(build.BuildError, match=r"could not compile it: host_config\.h:143: error: unsupported GNU"):
        build.compiled_library()


@pytest.mark.usefixtures("cache", "source")
def test_a_compiler_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfit = script(tmp_path / "unfit-c++")
    unfit.write_bytes(b"\x7fELF and nothing else")
    monkeypatch.setenv("CXX", str(unfit))
    with pytest.raises(build.BuildError, match="unfit-c\\+\\+ could not be run"):
        build.compiled_library()


@pytest.mark.usefixtures("cache")
def test_a_source_that_does_not_compile_is_quoted(source: Path) -> None:
    source.write_text("this is not C++\n")
    with pytest.raises(build.BuildError, match=r"could not compile it: .*tiny\.cpp"):
        build.compiled_library()


@pytest.mark.usefixtures("cache", "source")
def test_a_library_that_cannot_be_loaded_is_a_reason_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that says it went well and writes something else."""
    liar = script(tmp_path / "liar-c++", 'while test "$1" != -o; do shift; done', 'echo nonsense > "$2"')
    monkeypatch.setenv("CXX", str(liar))
    reason = build.library.__wrapped__()
    assert isinstance(reason, str)
    assert reason


@pytest.mark.usefixtures("source")
def test_a_cache_that_cannot_be_written_falls_back_to_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NAJU_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = build.compiled_library()
    assert library.parent.parent == tmp_path
    assert library.parent.stat().st_mode & 0o077 == 0
    assert works(library)


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NAJU_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert build.cache_folder() == tmp_path / "home" / ".cache" / "naju"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_folder() == tmp_path / "xdg" / "naju"
    monkeypatch.setenv("NAJU_CACHE", str(tmp_path / "own"))
    assert build.cache_folder() == tmp_path / "own"


@pytest.mark.parametrize("named", [True, False], ids=["with NAJU_CACHE", "without"])
def test_a_user_without_a_home(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container under a user id that nobody knows: Path.home raises."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if named:
        monkeypatch.setenv("NAJU_CACHE", str(tmp_path / "own"))
        assert build.cache_folder() == tmp_path / "own"
    else:
        monkeypatch.delenv("NAJU_CACHE", raising=False)
        assert build.cache_folder().parent == tmp_path


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> object:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


WITHOUT_TORCH = """
import importlib.util, json
spec = importlib.util.spec_from_file_location("build", {path!r})
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
compiled = []
compile_it = build._compile
build._compile = lambda *arguments: (compiled.append(1), compile_it(*arguments))
library = build.library()
print(json.dumps([str(build.compiled_library()), len(compiled), library.naju_tile()]))
"""


def test_processes_that_arrive_together_share_one_build(cache: Path) -> None:
    code = WITHOUT_TORCH.format(path=build.__file__)
    answers = [answer(process) for process in [python(code) for _ in range(4)]]
    paths, builds, tiles = zip(*answers, strict=True)
    assert len(set(paths)) == len(set(tiles)) == 1
    assert sum(builds) == 1
    assert [path.name for path in cache.glob("*.so")] == [Path(paths[0]).name]


REPORT = """
import json, torch
from naju import backends, naju_scan
tensors = [torch.randn(1, 5, 3) for _ in range(5)]
refusal = None
try:
    naju_scan(*tensors, backend="cpu_compiled")
except ValueError as error:
    refusal = str(error)
same = torch.equal(naju_scan(*tensors)[0], naju_scan(*tensors, backend="chunked")[0])
print(json.dumps([backends(), same, refusal]))
"""


def test_without_a_compiler_auto_takes_chunked_and_backends_says_why(cache: Path) -> None:
    listed, same, refusal = answer(python(REPORT, CXX="no-such-c++"))  # type: ignore[misc]
    reason = "the compiler CXX='no-such-c++' was not found"
    assert listed["cpu_compiled"] == reason
    assert [listed[name] for name in ("chunked", "associative", "reference")] == [None] * 3
    assert same
    assert refusal == f"scan backend 'cpu_compiled' cannot run this: {reason}; use backend='chunked'"
    assert not cache.exists()
