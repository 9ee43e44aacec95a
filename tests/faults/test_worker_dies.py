"""A worker of a grid that is gone, at the two moments at which that is hard to notice."""

import multiprocessing
import struct
from types import SimpleNamespace

from tqdm import tqdm

from naju.lab.grid import Grid, Worker

CELL = SimpleNamespace(name="cell", steps=4)


def grid_with(line):
    process = SimpleNamespace(join=lambda: None, exitcode=-9)
    grid = Grid(train=None, jobs=1, finish=None)
    grid.workers, grid.bar = [Worker(process, line)], tqdm(disable=True)
    return grid


def test_a_worker_killed_while_it_speaks_is_one_that_died(capsys):
    here, there = multiprocessing.Pipe()
    grid = grid_with(here)
    worker = grid.workers[0]
    worker.give(CELL)
    there.recv()
    there._send(struct.pack("!i", 20_000) + b"the beginning of a long message")
    there.close()
    grid._hear(worker)
    assert [(outcome.name, outcome.kind) for outcome in grid.outcomes] == [("cell", "died")]
    assert "died with exit code -9" in capsys.readouterr().out
    assert grid.workers == []


def test_a_worker_that_died_before_it_was_given_a_cell_is_one_that_died(capsys):
    here, there = multiprocessing.Pipe()
    there.close()
    grid = grid_with(here)
    grid.workers[0].give(CELL)
    grid._hear(grid.workers[0])
    assert [(outcome.name, outcome.kind) for outcome in grid.outcomes] == [("cell", "died")]
    assert "the same command goes on with it" in capsys.readouterr().out
