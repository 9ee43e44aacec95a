"""The command with options from its own help and values from everywhere: it works or says why not, in exit code 2."""

import contextlib
import io
import itertools
import os
import re
import time
from typing import get_args

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from parser_targets import TARGETS, model

from naju import cli
from naju.lm.folder import save_model
from naju.lm.tokenizer import load_tokenizer

SUBCOMMANDS = {
    "bench": cli.Benches,
    "tasks": cli.Tasks,
    "reproduce": cli.Experiments,
    "runs": cli.Runs,
    "lm": cli.LanguageCommands,
}


def name_of(subcommand):
    return next(mark.name for mark in subcommand.__metadata__ if hasattr(mark, "name"))


LEAVES = (
    *(("demo",), ("doctor",), ("report",), ("inspect",)),
    *((name, name_of(one)) for name, union in SUBCOMMANDS.items() for one in get_args(union)),
)
# All others train, measure or start processes: their options are parsed and checked, and that is all.
QUICK = {"run_prepare", "run_evaluate", "run_generate", "run_export", "run_inspect"}
HEAVY = {name for name in vars(cli) if name.startswith("run_")} - QUICK
LEFT_OUT = {"--help", "--processes"}
NUMBERS = ("0", "1", "-1", "3", "2.5", "nan", "inf", "-inf", "1e400", "99999999999999999999999", "0x10", "1_0")
WORDS = (
    "",
    "x",
    "T4",
    "naju",
    "auto",
    "cpu",
    "cuda",
    "meta",
    "bytes",
    "sample",
    "a b",
    "é",
    "\x00",
    "\udcff",
    "-",
    "--",
    "=",
)
PATHS = ("model", "tokens", "runs", "missing", "model/config.json", "/proc/none", "../..", "~", "a" * 300, "/dev/null")


def run(*arguments: str) -> tuple[int, str]:
    """The exit code and what was said on stderr; an exception that is no exit goes through."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
            cli.main(arguments)
    except SystemExit as stop:
        return (stop.code if isinstance(stop.code, int) else int(bool(stop.code))), told.getvalue()
    return 0, told.getvalue()


def options_of(leaf: tuple[str, ...]) -> list[str]:
    """As the help of a command has them."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), pytest.raises(SystemExit):
        cli.main([*leaf, "--help"])
    return sorted(set(re.findall(r"--[a-z][a-z-]*[a-z]", told.getvalue())) - LEFT_OUT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with a model, token files and runs, and no way to the network."""
    place = tmp_path_factory.mktemp("work")
    for name, target in (("tokens", "token-files"), ("store", "run-store")):
        (place / name).mkdir()
        TARGETS[target].write(place / name)
    (place / "store" / "runs").rename(place / "runs")
    save_model(model(), place / "model")
    load_tokenizer("bytes").save(place / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("COLUMNS", "200")
        patch.setattr("naju.lm.prepare._cores", lambda: 1)
        for name in HEAVY:
            patch.setattr(cli, name, lambda *given: True)
        patch.setattr(cli, "run_experiment", lambda options: 0 if options.cells() else 1)
        yield place


@pytest.fixture(scope="module")
def tables(folder):
    return {leaf: options_of(leaf) for leaf in LEAVES}


values = st.sampled_from((*NUMBERS, *WORDS, *PATHS)) | st.text(max_size=6)


@st.composite
def command_lines(draw, tables):
    leaf = draw(st.sampled_from(LEAVES))
    words = draw(st.lists(st.sampled_from(PATHS), max_size=1))
    for option in draw(st.lists(st.sampled_from(tables[leaf] or ["--x"]), max_size=4)):
        words += [option, *draw(st.lists(values, max_size=2))]
    return (*leaf, *words)


def check(arguments):
    code, told = run(*arguments)
    assert code in (0, 1, 2), arguments
    assert "Traceback" not in told, arguments
    if code == 2:
        assert told.strip(), arguments
    if told.startswith("naju: "):
        assert told.count("\n") == 1, told


def test_the_tables_hold_every_command_and_its_options(tables):
    assert sum(map(len, tables.values())) > 150
    assert {"--temperature", "--state", "--max-new-tokens"} <= set(tables["lm", "generate"])
    assert {"--seeds", "--plan"} <= set(tables["reproduce", "diagnostics"])


def test_any_command_line_works_or_is_refused(folder, tables):
    """150 lines, always the same; with NAJU_FUZZ_MINUTES=10 others after them, for that long."""
    ends = time.monotonic() + 60 * float(os.environ.get("NAJU_FUZZ_MINUTES", "0"))
    checked = 0

    def search(arguments):
        nonlocal checked
        check(arguments)
        checked += 1

    lines = given(command_lines(tables))
    settings(max_examples=5 * settings.default.max_examples)(lines(search))()
    for number in itertools.takewhile(lambda _: time.monotonic() < ends, itertools.count()):
        seed(number)(settings(derandomize=False)(lines(search)))()
    print(f"{checked:,} command lines")


@pytest.mark.parametrize("value", ["nan", "-1", "99999999999999999999999", "x", "\x00", "é"])
@pytest.mark.parametrize(
    "leaf", [("tasks", "show"), ("lm", "eval"), ("lm", "generate"), ("runs", "show"), ("inspect",)]
)
def test_every_option_of_the_quick_commands_with_a_bad_value(leaf, value, folder, tables):
    first = {("tasks", "show"): "T4", ("runs", "show"): "one", ("inspect",): "runs/diagnostics/one"}.get(leaf, "model")
    data = ("--data", "tokens") if leaf == ("lm", "eval") else ()
    for option in tables[leaf]:
        check((*leaf, first, *data, option, value))
