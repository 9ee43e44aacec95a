"""`naju bench steps` counts the steps of real processes."""

import json

import pytest

from naju.cli import main
from naju.lab.steps import _rate


def test_every_count_of_jobs_has_a_row(tmp_path, capsys):
    main(
        ["bench", "steps", "--quick", "--jobs", "1", "2", "--seconds", "0.2", "--device", "cpu", "--out", str(tmp_path)]
    )
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(row["mixer"], row["jobs"], row["execution"]) for row in rows] == [
        ("naju", 1, "eager"),
        ("naju", 2, "eager"),
    ]
    assert all(0 < row["slowest"] <= row["steps_per_s"] for row in rows)
    assert "steps_per_s" in capsys.readouterr().out


def test_a_rate_is_steps_over_the_time_they_took(monkeypatch):
    now, done = [0.0], []
    monkeypatch.setattr("naju.lab.steps.time.perf_counter", lambda: now[0])

    def wait():
        now[0] = 0.01 * len(done)

    assert _rate(lambda: done.append(1), wait, 1.0) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--mixers", "abc"], "abc"),
        (["--seconds", "0"], "seconds"),
        (["--task", "T9"], "T9"),
        (["--jobs", "0"], "jobs"),
    ],
)
def test_bad_options_are_refused(options, told, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "steps", "--device", "cpu", "--out", str(tmp_path), *options])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
