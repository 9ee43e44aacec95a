"""A process that dies under torchrun: the others end with a sentence, and the next start goes on."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from naju.cli import main
from naju.lm.token_files import Part, Vocabulary, write_token_files
from naju.training.metrics import read_metrics

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals are sent the POSIX way")
UPDATES = 400
SIZES = (("train", 500), ("validation", 40))
MODEL = ["--d-model", "8", "--n-layers", "1", "--options", "d_state=2", "--length", "16", "--device", "cpu"]
OPTIONS = ["--tokens-per-update", "32", "--log-every", "1", "--validations", "2", "--save-seconds", "0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, drawn = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    splits = {name: [Part(np.append(drawn.integers(6, size=size - 1), 6), np.array([size]))] for name, size in SIZES}
    write_token_files(folder, splits, Vocabulary(7, 6))
    return folder


def command(data, out):
    return ["lm", "train", *MODEL, *OPTIONS, "--data", data, "--out", out, "--tokens", str(32 * UPDATES)]


def launch(data, out):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    full = [*torchrun, "-m", "naju.cli", *command(data, out)]
    return subprocess.Popen(full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ranks(torchrun):
    """The process of each rank, as Linux tells it."""
    found = {}
    for number in _children(torchrun.pid):
        with open(f"/proc/{number}/environ", "rb") as file:
            settings = dict(part.split(b"=", 1) for part in file.read().split(b"\0") if b"=" in part)
        found[int(settings[b"RANK"])] = number
    return found


def _children(number):
    with open(f"/proc/{number}/task/{number}/children") as file:
        return [int(child) for child in file.read().split()]


def wait_for_lines(out, count, torchrun):
    deadline = time.monotonic() + 60
    while len(read_metrics(out)) < count:
        assert torchrun.poll() is None, torchrun.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="processes are found as Linux tells it")
def test_whichever_process_dies_the_other_says_so_and_the_run_goes_on(data, tmp_path):
    """In the end alone, which takes less time to start."""
    kept = []
    for victim in (1, 0):
        torchrun = launch(data, tmp_path)
        try:
            wait_for_lines(tmp_path, len(kept) + 3, torchrun)
            os.kill(ranks(torchrun)[victim], signal.SIGKILL)
            _, told = torchrun.communicate(timeout=40)
        finally:
            torchrun.kill()
        assert torchrun.returncode != 0
        assert f"naju: process {1 - victim} of 2 cannot reach another one, which may have died" in told
        assert "Traceback" not in told.split("torch/distributed/elastic")[0]
        assert not (tmp_path / "result.json").exists()
        rows = read_metrics(tmp_path)
        assert rows[: len(kept)] == kept
        kept = rows[:-1]  # the last one may be from after the last checkpoint
    main([str(word) for word in command(data, tmp_path)])
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, UPDATES + 1))
    assert read_metrics(tmp_path)[: len(kept)] == kept
    assert json.loads((tmp_path / "result.json").read_text())["processes"] == 1
