"""The lock: one holder, takeover of the dead only, and no clock that could fool it."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from naju.lab.lock import BusyError, Claim, LockLostError, RunLock, _chain, _host, holder
from naju.training.files import clear_away

QUICK = {"heartbeat": 0.05, "stale_after": 1.0}
NOBODY = 2**22 + 1  # beyond the largest process number of Linux


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

    def while_another_wins(claim):
        verdict = judge(claim)
        path.write_text(json.dumps({"host": "elsewhere", "pid": 2, "token": "living"}))
        return verdict

    monkeypatch.setattr(late, "_is_stale", while_another_wins)
    with pytest.raises(BusyError, match="process 2 on elsewhere"), late:
        pass
    assert json.loads(path.read_text())["token"] == "living"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_place_that_another_was_faster_to_take_stays_its(tmp_path, monkeypatch, has_links):
    def refuse(source, target):
        raise PermissionError("no hard links here")

    path, looked = pretend(tmp_path), []

    def free_at_first(place):
        looked.append(place)
        return [] if len(looked) == 1 else _chain(place)

    monkeypatch.setattr("naju.lab.lock._chain", free_at_first)
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(BusyError, match="process 1 on elsewhere"), RunLock(tmp_path):
        pass
    assert json.loads(path.read_text())["token"] == "theirs"


def test_a_place_after_a_chain_that_is_gone_holds_nothing(tmp_path, monkeypatch):
    """The winner has released the lock meanwhile, and a third one has it."""
    dead = pretend(tmp_path, touched_ago=1000)
    late = RunLock(tmp_path, **QUICK)
    judge = late._is_stale

    def while_others_come_and_go(claim):
        verdict = judge(claim)
        dead.unlink()
        monkeypatch.setattr(late, "_is_stale", judge)
        return verdict

    monkeypatch.setattr(late, "_is_stale", while_others_come_and_go)
    with late:
        assert [claim.place.name for claim in _chain(dead)] == ["lock.json"]
        assert late.is_held()
    assert list(tmp_path.iterdir()) == []


def test_claims_of_the_dead_are_followed_at_once_however_many_there_are(tmp_path):
    """As they are left by processes that are killed while they take a lock over."""
    content = json.dumps({"host": _host(), "pid": NOBODY}).encode()
    place = tmp_path / "lock.json"
    for _ in range(3):
        place.write_bytes(content)
        place = Claim(place, content).next_place
    assert holder(tmp_path) is None
    began = time.monotonic()
    with RunLock(tmp_path) as lock:
        assert lock.is_held()
        assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]
    assert time.monotonic() - began < 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("started", [{}, {"started": -1}])
def test_a_number_that_another_process_has_now_holds_nothing(tmp_path, started):
    (tmp_path / "lock.json").write_text(json.dumps({"host": _host(), "pid": os.getpid(), **started}))
    if not started:
        assert holder(tmp_path) == f"process {os.getpid()} on {_host().split('/')[0]}"
    elif Path("/proc/self/stat").exists():
        assert holder(tmp_path) is None


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only there the system tells")
def test_a_process_that_has_ended_and_is_not_cleared_away_holds_nothing(tmp_path):
    command = (
        "import sys; from pathlib import Path; from naju.lab.lock import RunLock\n"
        "RunLock(Path(sys.argv[1])).__enter__()"
    )
    process = subprocess.Popen([sys.executable, "-c", command, str(tmp_path)])
    deadline = time.monotonic() + 30
    while holder(tmp_path) is not None or not (tmp_path / "lock.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with RunLock(tmp_path) as lock:
        assert lock.is_held()
    assert process.wait() == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"7",
        b"{}",
        b'{"host": 3, "pid": 1}',
        b'{"host": "a", "pid": "1"}',
        b'{"host": "a", "pid": -1}',
        b'{"host": "a", "pid": 2147483648}',
        b'{"host": "a"',
    ],
)
def test_a_lock_that_names_nobody_counts_by_its_age(tmp_path, content):
    path = tmp_path / "lock.json"
    path.write_bytes(content)
    with pytest.raises(BusyError, match="a process that has not said its name"), RunLock(tmp_path, **QUICK):
        pass
    os.utime(path, (0, 0))
    with RunLock(tmp_path, **QUICK) as lock:
        assert lock.is_held()


def test_where_files_have_no_hard_links_one_process_wins_all_the_same(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    with RunLock(tmp_path) as lock:
        assert lock.is_held()
        with pytest.raises(BusyError), RunLock(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []
    pretend(tmp_path, host=_host(), pid=NOBODY)
    with RunLock(tmp_path) as lock:
        assert lock.is_held()


@pytest.mark.parametrize("pid", [os.getpid(), NOBODY], ids=["its own", "nobody"])
def test_what_it_wrote_aside_may_be_cleared_away_by_the_holder(tmp_path, monkeypatch, pid):
    pretend(tmp_path, host=_host(), pid=pid)
    lock = RunLock(tmp_path)
    judge = lock._is_stale

    def cleared_away(claim):
        clear_away(tmp_path)
        return judge(claim)

    monkeypatch.setattr(lock, "_is_stale", cleared_away)
    with nullcontext() if pid == NOBODY else pytest.raises(BusyError), lock:
        assert lock.is_held()
    assert [path.name for path in tmp_path.iterdir()] == ([] if pid == NOBODY else ["lock.json"])


def test_claims_that_came_too_late_go_with_the_lock(tmp_path):
    with RunLock(tmp_path):
        (tmp_path / "lock.json.after-another").write_text("{}")
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_age_is_by_the_clock_of_the_file_system(tmp_path, monkeypatch, jump):
    wrong = time.time() + jump
    pretend(tmp_path, touched_ago=1000)
    monkeypatch.setattr(time, "time", lambda: wrong)
    with RunLock(tmp_path, heartbeat=0.05, stale_after=900) as lock:
        assert lock.is_held()
    monkeypatch.undo()
    pretend(tmp_path, touched_ago=800)
    monkeypatch.setattr(time, "time", lambda: wrong)
    with pytest.raises(BusyError), RunLock(tmp_path, heartbeat=0.05, stale_after=900):
        pass


def test_a_touch_from_the_future_does_not_hold_until_then(tmp_path):
    """The clock was a day ahead, was set right, and its process died on another machine."""
    pretend(tmp_path, touched_ago=-86_400)
    with RunLock(tmp_path, **QUICK) as lock:
        assert lock.is_held()


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
