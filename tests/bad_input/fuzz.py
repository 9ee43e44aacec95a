"""Read damaged files for as long as wanted: `python tests/bad_input/fuzz.py [TARGET ...] [--minutes N] [--seed N]`.

With atheris, and one target, the search is led by what the readers' own code does with an input; otherwise mutations
are blind.
The exit code is 1 if a reader raised anything but a refusal; the input is then kept in the working folder.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None
with atheris.instrument_imports(include=["naju"]) if atheris else contextlib.nullcontext():
    from mutations import mutated
    from parser_targets import TARGETS, Case


class Search:
    """Reads inputs of one target until the time is over, counts them and keeps those that break a reader."""

    def __init__(self, name: str, folder: Path, seconds: float) -> None:
        self.name, self.case, self.end = name, Case(name, folder), time.monotonic() + seconds
        self.files = list(self.case.good)
        self.executions = self.accepted = self.crashes = 0
        self.seen: set[str] = set()

    def packed(self, file: str, content: bytes) -> bytes:
        return bytes([self.files.index(file)]) + content

    def read(self, packed: bytes) -> None:
        """The first byte says which of the target's files the rest is to replace."""
        file = self.files[packed[0] % len(self.files)] if packed else self.files[0]
        self.executions += 1
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                self.accepted += self.case.read(file, packed[1:])
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self._keep(error, file, packed[1:])

    def _keep(self, error: BaseException, file: str, content: bytes) -> None:
        """One input for each place that breaks."""
        self.crashes += 1
        place = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
        if told not in self.seen:
            self.seen.add(told)
            path = Path(f"crash-{self.name}-{len(self.seen)}").resolve()
            path.write_bytes(content)
            print(f"{self.name}: {told}: {error}\n  {file} is kept as {path}", file=sys.__stderr__, flush=True)

    def over(self) -> bool:
        return time.monotonic() >= self.end

    def report(self) -> None:
        how = "atheris" if atheris else "blind mutations"
        print(
            f"{self.name}: {self.executions:,} executions with {how}, {self.accepted:,} of them taken for good, "
            f"{self.crashes:,} crashes at {len(self.seen)} places",
            flush=True,
        )


def blindly(search: Search, rng: random.Random) -> None:
    while not search.over():
        file = rng.choice(search.files)
        search.read(search.packed(file, mutated(search.case.good[file], rng)))


def led(search: Search, rng: random.Random) -> None:
    """libFuzzer owns the process from here on, and ends it."""

    def one_input(packed: bytes) -> None:
        search.read(packed)
        if search.over():
            search.report()
            os._exit(min(1, search.crashes))

    def mutator(packed: bytes, most: int, seed: int) -> bytes:
        chosen = random.Random(seed)
        if chosen.random() < 0.3:
            return bytes(atheris.Mutate(packed, most))
        return (packed[:1] + mutated(packed[1:], chosen))[:most]

    with tempfile.TemporaryDirectory() as corpus:
        for number, (file, content) in enumerate(search.case.good.items()):
            (Path(corpus) / str(number)).write_bytes(search.packed(file, content))
        most = 4 * max(map(len, search.case.good.values())) + 4096
        options = [f"-max_len={most}", f"-seed={rng.randrange(1, 2**31)}", "-verbosity=0", "-rss_limit_mb=0"]
        atheris.Setup([sys.argv[0], corpus, *options], one_input, custom_mutator=mutator)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; without any: all")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if set(options.targets) - set(TARGETS):
        parser.error(f"targets must be of {', '.join(TARGETS)}")
    warnings.simplefilter("ignore")
    crashes = 0
    for name in options.targets or TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            search = Search(name, Path(folder), 60 * options.minutes)
            if atheris and len(options.targets) == 1:
                led(search, random.Random(options.seed))
            blindly(search, random.Random(options.seed))
            search.report()
            crashes += search.crashes
    sys.exit(min(1, crashes))


if __name__ == "__main__":
    main()
