"""The lock: one holder, takeover of the dead only, and no clock that could fool it."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from naju.lab.lock import BusyError, LockLostError, RunLock, holder, seconds_since_touch

QUICK = {"heartbeat": 0.05, "stale_after": 1.0}


def pretend(folder, *, host="elsewhere", pid=1, touched_ago=0.0):
    """A lock of another process, last touched some time ago."""
    path = folder / "lock.json"
    path.write_text(json.dumps({"host": host, "pid": pid, "token": "theirs"}))
    then = time.time() - touched_ago
    os.utime(path, (then, then))
    return path


def test_one_holder_at_a_time(tmp_path):
    with RunLock(tmp_path) as lock:
        assert lock.is_held()
        with pytest.raises(BusyError, match=f"by process {os.getpid()} on "), RunLock(tmp_path):
            pass
        assert lock.is_held()
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path):
        pass


def test_of_many_that_try_at_once_one_wins(tmp_path):
    results, gate = [], threading.Barrier(8)

    def attempt():
        gate.wait()
        try:
            with RunLock(tmp_path):
                results.append("held")
                time.sleep(0.3)
        except BusyError:
            results.append("busy")

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["busy"] * 7 + ["held"]


def test_of_many_that_take_a_dead_one_over_one_wins(tmp_path):
    """Also when one of them judged the old lock and comes to move it after another has replaced it."""
    pretend(tmp_path, touched_ago=1000)
    inside, most, gate = [], [], threading.Barrier(6)

    def attempt():
        gate.wait()
        try:
            with RunLock(tmp_path, **QUICK) as lock:
                inside.append(lock)
                most.append(len(inside))
                time.sleep(0.3)
                inside.remove(lock)
        except BusyError:
            pass

    threads = [threading.Thread(target=attempt) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert list(tmp_path.iterdir()) == []


def test_who_comes_late_to_a_takeover_leaves_the_winner_alone(tmp_path, monkeypatch):
    path = pretend(tmp_path, touched_ago=1000)
    late = RunLock(tmp_path, **QUICK)
    judge = late._is_stale

    def while_another_wins(held):
        verdict = judge(held)
        path.write_text(json.dumps({"host": "elsewhere", "pid": 2, "token": "living"}))
        return verdict

    monkeypatch.setattr(late, "_is_stale", while_another_wins)
    with pytest.raises(BusyError, match="process 2 on elsewhere"), late:
        pass
    assert json.loads(path.read_text())["token"] == "living"
    assert list(tmp_path.iterdir()) == [path]


def test_a_takeover_that_died_half_way_delays_the_next_but_does_not_prevent_it(tmp_path):
    pretend(tmp_path, touched_ago=1000)
    guard = tmp_path / "lock.json.takeover"
    guard.touch()
    with pytest.raises(BusyError), RunLock(tmp_path, **QUICK):
        pass
    assert guard.exists()
    os.utime(guard, (0, 0))
    with pytest.raises(BusyError), RunLock(tmp_path, **QUICK):
        pass
    with RunLock(tmp_path, **QUICK) as lock:
        assert lock.is_held()


def test_a_process_that_died_here_holds_nothing(tmp_path):
    command = (
        "import os, sys; from pathlib import Path; from naju.lab.lock import RunLock\n"
        "with RunLock(Path(sys.argv[1])): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", command, str(tmp_path)], check=False).returncode == 9
    assert (tmp_path / "lock.json").exists()
    assert holder(tmp_path) is None
    with RunLock(tmp_path) as lock:
        assert lock.is_held()


def test_a_recent_touch_on_another_machine_is_respected(tmp_path):
    pretend(tmp_path)
    began = time.monotonic()
    with pytest.raises(BusyError, match="by process 1 on elsewhere"), RunLock(tmp_path, heartbeat=5, stale_after=60):
        pass
    assert time.monotonic() - began < 2


def test_after_a_jump_of_the_clock_a_living_lock_shows_itself(tmp_path):
    """Its last touch looks ancient, but it is touched again while we watch."""
    path = pretend(tmp_path, touched_ago=100_000)
    timer = threading.Timer(0.05, os.utime, [path])
    timer.start()
    with pytest.raises(BusyError), RunLock(tmp_path, heartbeat=0.2, stale_after=1.0):
        pass
    timer.join()
    assert json.loads(path.read_text())["token"] == "theirs"


def test_age_is_by_the_clock_of_the_file_system(tmp_path, monkeypatch):
    path = pretend(tmp_path, touched_ago=100)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert seconds_since_touch(path) == pytest.approx(100, abs=5)
    assert list(tmp_path.iterdir()) == [path]


def test_a_holder_keeps_touching_its_lock(tmp_path):
    with RunLock(tmp_path, heartbeat=0.05):
        path = tmp_path / "lock.json"
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0


def test_a_lock_that_was_lost_is_noticed_and_not_removed(tmp_path):
    with RunLock(tmp_path, heartbeat=0.05) as lock:
        lock.check()
        path = pretend(tmp_path, pid=7)
        with pytest.raises(LockLostError, match="was taken over by process 7 on elsewhere"):
            lock.check()
        then = path.stat().st_mtime_ns
        time.sleep(0.2)
        assert path.stat().st_mtime_ns == then
    assert path.exists()


def test_a_lock_without_a_name_in_it_counts_by_its_age(tmp_path):
    """Between creating the file and writing to it, its process may be asleep or dead."""
    path = tmp_path / "lock.json"
    path.touch()
    with pytest.raises(BusyError, match="a process that has not said its name"), RunLock(tmp_path, **QUICK):
        pass
    os.utime(path, (0, 0))
    with RunLock(tmp_path, **QUICK) as lock:
        assert lock.is_held()
