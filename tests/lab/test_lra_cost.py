"""`naju bench lra` measures steps in processes of their own, and outlives those that memory does not suffice for."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace

import pytest
import torch

from naju.cli import main
from naju.lab.lra_cost import LraBench, Step, measured, step_cost, steps

ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux refuses memory beyond a limit")


def small(**options):
    return LraBench(**{"length": 8, "batches": (2,), "rounds": 1, "device": "cpu", **options})


def test_every_kind_of_step_has_a_row(tmp_path, capsys):
    options = ["--length", "8", "--batches", "2", "--rounds", "2", "--device", "cpu", "--out", str(tmp_path)]
    main(["bench", "lra", *options])
    rows = [json.loads(line) for line in (tmp_path / "lra.jsonl").read_text().splitlines()]
    assert [(row["mixer"], row["checkpointed"], row["dtype"]) for row in rows] == [
        ("naju", True, "float32"),
        ("naju", False, "float32"),
    ]
    for row in rows:
        assert (row["task"], row["batch"], row["sequences"], row["length"]) == ("retrieval", 2, 4, 8)
        assert (row["n_layers"], row["d_model"], row["d_state"], row["rounds"]) == (6, 128, 64, 2)
        assert row["median_s"] > 0
        assert row["processor_s"] > 0
    if sys.platform == "linux":
        assert all(10**8 < row["peak_bytes"] < row["most_bytes"] for row in rows)
    assert "checkpointed" in capsys.readouterr().out


def test_the_defaults_are_the_papers_step_in_the_precision_of_training():
    bench = LraBench(device="cpu", mixers=("naju", "mlstm"), memory=2.5)
    found = steps(bench)
    assert [(step.model.mixer, step.model.checkpoint_blocks) for step in found] == [
        ("naju", True),
        ("naju", False),
        ("mlstm", True),
        ("mlstm", False),
    ]
    assert {(step.batch, step.task.length, step.dtype) for step in found} == {(32, 4000, "float32")}
    assert {step.most_bytes for step in found} == {2_500_000_000}
    on_gpu = steps(replace(bench, device="cuda"))
    assert {(step.dtype, step.most_bytes) for step in on_gpu} == {("bfloat16", None)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("task", ["retrieval", "image"])
def test_a_step_of_every_precision_takes_time(task, dtype):
    checkpointed, _ = steps(small(task=task, dtypes=(dtype,)))
    assert step_cost(checkpointed).timing.median > 0


@ONLY_LINUX
def test_running_out_of_memory_is_a_result_and_leaves_this_process_as_it_was():
    _, plain = steps(small(length=4000, batches=(64,), memory=1.0))
    assert measured(plain) == "out of memory"
    assert torch.zeros(10**9, dtype=torch.uint8).sum() == 0


class Doomed(Step):
    """Killed as the system kills when memory runs out."""

    def __getattribute__(self, name):
        if name == "most_bytes":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)


class Broken(Step):
    """Fails for another reason."""

    def __getattribute__(self, name):
        if name == "most_bytes":
            raise RuntimeError("shapes do not fit")
        return super().__getattribute__(name)


def of_kind(kind):
    return kind(**{name: getattr(steps(small())[0], name) for name in Step.__dataclass_fields__})


def test_a_killed_process_is_a_result_and_another_error_is_not():
    assert measured(of_kind(Doomed)) == "out of memory: the system ended the process"
    with pytest.raises(ChildProcessError, match="the process of this bench died"):
        measured(of_kind(Broken))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--task", "cifar"], "task must be different ones of listops, text"),
        (["--mixers", "abc"], "mixers must be different ones of"),
        (["--batches"], "batches must hold at least one number, but is empty"),
        (["--batches", "0"], "batches must be at least 1, but is 0"),
        (["--memory", "0"], "memory must be a positive number of gigabytes, but is 0.0"),
        (["--memory", "nan"], "memory must be a positive number of gigabytes, but is nan"),
    ],
)
def test_bad_options_are_refused(options, told, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "lra", "--device", "cpu", "--out", str(tmp_path), *options])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
