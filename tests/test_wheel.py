"""The wheel a user would install: built, put into a clean environment, and tested there."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SELF_TEST = """
import naju, sys
from naju.doctor import run_doctor
assert naju.__file__.startswith(sys.prefix), naju.__file__
assert run_doctor()
assert naju.backends()["chunked"] is None
print("cpu_compiled:", naju.backends()["cpu_compiled"])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("naju-*.whl"))


def test_wheel_is_pure_and_complete(wheel: Path) -> None:
    assert wheel.name.endswith("py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(ROOT / "src")) for path in sources} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


def test_wheel_passes_its_self_test_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    zipfile.ZipFile(wheel).extractall(packages)
    # torch and the other dependencies come from here; a line in a .pth file does not bring the editable install along.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {**os.environ, "NAJU_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ""}
    done = subprocess.run(
        [python, "-c", SELF_TEST], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout
