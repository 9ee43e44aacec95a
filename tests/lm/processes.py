"""A function on several processes of one gloo group, as torchrun would start them."""

import io
import multiprocessing
import tempfile
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

# The server imports torch once; the processes of every test are forked from it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed", "torch.distributed.fsdp", "naju.lm.train", "naju.cli"])
PATIENCE = 60


def together(count, function, *args, **kwargs):
    """What `function(*args, **kwargs)` returns on each of `count` processes, in the order of their ranks."""
    with tempfile.TemporaryDirectory() as folder:
        lines = [CONTEXT.Pipe(duplex=False) for _ in range(count)]
        work = partial(function, *args, **kwargs)
        children = [
            CONTEXT.Process(target=_serve, args=(rank, count, Path(folder) / "store", there, work), daemon=True)
            for rank, (_, there) in enumerate(lines)
        ]
        for child in children:
            child.start()
        try:
            answers = [_answer(here) for here, _ in lines]
        finally:
            for child in children:
                child.join(0 if child.exitcode is not None else 5)
                child.kill()
    failed = [text for done, text in answers if not done]
    if failed:
        raise AssertionError("\n".join(failed))
    return [value for _, value in answers]


def _answer(line):
    if not line.poll(PATIENCE):
        return False, f"no answer in {PATIENCE} s"
    return torch.load(io.BytesIO(line.recv_bytes()), weights_only=False)


def _send(line, done, value):
    """By value: a tensor that is pickled by a process belongs to it, and that may end before anyone looks."""
    content = io.BytesIO()
    torch.save((done, value), content)
    line.send_bytes(content.getvalue())


def _serve(rank, world, store, line, work):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        _send(line, True, work())
    except Exception:
        _send(line, False, f"process {rank}: {traceback.format_exc()}")
    finally:
        dist.destroy_process_group()
