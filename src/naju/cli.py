"""The `naju` command. Each subcommand is a config and a function, which imports what not every machine has."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import tyro

import naju
from naju.bench.compare import check_sizes
from naju.bench.decode import DecodeBench, run_decode_bench
from naju.bench.errors import ErrorsBench, run_errors_bench
from naju.bench.forward import ForwardBench, run_forward_bench
from naju.bench.mixers import MixersBench, run_mixers_bench
from naju.bench.model import ModelBench, run_model_bench
from naju.bench.profile import ProfileBench, run_profile_bench
from naju.bench.rows import RESULTS as BENCHMARKS
from naju.bench.scan import ScanBench, run_scan_bench
from naju.bench.soak import SoakBench, run_soak_bench
from naju.bench.stress import StressBench, run_stress_bench
from naju.bench.training import TrainingBench, run_training_bench
from naju.doctor import run_doctor
from naju.lab.ablations import BiasF, BiasI, GateRank, MambaFactorial, Readout
from naju.lab.catalogue import ListExperiments, list_experiments
from naju.lab.demo import DemoConfig, run_demo
from naju.lab.inspect import InspectConfig, run_inspect
from naju.lab.inspect.fading import FadingConfig, run_fading
from naju.lab.language_layers import LayersConfig, run_layers
from naju.lab.lra import Lra
from naju.lab.lra_cost import LraBench, run_lra_bench
from naju.lab.manage_runs import ListRuns, RemoveRuns, ShowRun, list_runs, remove_runs, show_run
from naju.lab.mqar import Mqar
from naju.lab.report import write_report
from naju.lab.reproduce import Diagnostics
from naju.lab.reproduce import reproduce as run_experiment
from naju.lab.show_task import ListTasks, ShowTask, list_tasks, show_task
from naju.lab.steps import StepsBench, run_steps_bench
from naju.lab.throughput import Throughput, run_throughput
from naju.lab.train_language_model import TrainCommand, run_train
from naju.lab.wikitext import LanguageGateRank, LrPilot, WikitextContext, WikitextEfficiency, WikitextWidth
from naju.lm.evaluate import EvaluateConfig, run_evaluate
from naju.lm.export import ExportConfig, run_export
from naju.lm.generate import GenerateConfig, run_generate
from naju.lm.prepare import PrepareConfig, run_prepare
from naju.models.device import usable_device
from naju.training.files import check_writable


def demo(config: tyro.conf.OmitArgPrefixes[DemoConfig]) -> None:
    """Train Naju and its single-gate twin side by side on this CPU, and resume a stream from a saved state."""
    run_demo(config)


def doctor() -> None:
    """Print versions, devices and every scan backend with its reason, and test each that can run."""
    if not run_doctor():
        sys.exit(1)


Benches = (
    Annotated[ScanBench, tyro.conf.subcommand("scan", prefix_name=False)]
    | Annotated[ErrorsBench, tyro.conf.subcommand("errors", prefix_name=False)]
    | Annotated[ModelBench, tyro.conf.subcommand("model", prefix_name=False)]
    | Annotated[MixersBench, tyro.conf.subcommand("mixers", prefix_name=False)]
    | Annotated[ForwardBench, tyro.conf.subcommand("forward", prefix_name=False)]
    | Annotated[TrainingBench, tyro.conf.subcommand("training", prefix_name=False)]
    | Annotated[ProfileBench, tyro.conf.subcommand("profile", prefix_name=False)]
    | Annotated[DecodeBench, tyro.conf.subcommand("decode", prefix_name=False)]
    | Annotated[StressBench, tyro.conf.subcommand("stress", prefix_name=False)]
    | Annotated[SoakBench, tyro.conf.subcommand("soak", prefix_name=False)]
    | Annotated[StepsBench, tyro.conf.subcommand("steps", prefix_name=False)]
    | Annotated[LraBench, tyro.conf.subcommand("lra", prefix_name=False)]
)


def bench(config: tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[Benches]]) -> None:
    """Measure the scan or a model against its peers; results are rows in benchmarks/results."""
    runners: dict[type, Callable[..., None]] = {
        ScanBench: run_scan_bench,
        ErrorsBench: run_errors_bench,
        ModelBench: run_model_bench,
        MixersBench: run_mixers_bench,
        ForwardBench: run_forward_bench,
        TrainingBench: run_training_bench,
        ProfileBench: run_profile_bench,
        DecodeBench: run_decode_bench,
        StressBench: run_stress_bench,
        SoakBench: run_soak_bench,
        StepsBench: run_steps_bench,
        LraBench: run_lra_bench,
    }
    check_sizes(config)
    usable_device(getattr(config, "device", "auto"))
    check_writable(config.out)
    runners[type(config)](config)


Tasks = (
    Annotated[ShowTask, tyro.conf.subcommand("show", prefix_name=False)]
    | Annotated[ListTasks, tyro.conf.subcommand("ls", prefix_name=False)]
)


def tasks(
    config: tyro.conf.PositionalRequiredArgs[tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[Tasks]]],
) -> None:
    """Print an example of a task with its answer, or list the tasks."""
    if isinstance(config, ShowTask):
        show_task(config)
    else:
        list_tasks()


def report(
    runs: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="folder of runs, or of their result files")],
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], help="folder for index.html")] = Path("report"),
    benchmarks: Annotated[Path, tyro.conf.arg(help="folder with the rows of `naju bench`")] = BENCHMARKS,
) -> None:
    """Write pages with the results of finished runs beside the paper's."""
    write_report(runs, output, benchmarks)


def inspect(config: tyro.conf.PositionalRequiredArgs[tyro.conf.OmitArgPrefixes[InspectConfig]]) -> None:
    """Write a page that shows what a trained model keeps and overwrites in one example."""
    run_inspect(config)


Experiments = (
    Annotated[Diagnostics, tyro.conf.subcommand("diagnostics", prefix_name=False)]
    | Annotated[Mqar, tyro.conf.subcommand("mqar", prefix_name=False)]
    | Annotated[Lra, tyro.conf.subcommand("lra", prefix_name=False)]
    | Annotated[BiasF, tyro.conf.subcommand("bias-f", prefix_name=False)]
    | Annotated[BiasI, tyro.conf.subcommand("bias-i", prefix_name=False)]
    | Annotated[Readout, tyro.conf.subcommand("readout", prefix_name=False)]
    | Annotated[MambaFactorial, tyro.conf.subcommand("mamba-factorial", prefix_name=False)]
    | Annotated[GateRank, tyro.conf.subcommand("gate-rank-recall", prefix_name=False)]
    | Annotated[WikitextContext, tyro.conf.subcommand("wikitext-context", prefix_name=False)]
    | Annotated[WikitextWidth, tyro.conf.subcommand("wikitext-width", prefix_name=False)]
    | Annotated[WikitextEfficiency, tyro.conf.subcommand("wikitext-efficiency", prefix_name=False)]
    | Annotated[LanguageGateRank, tyro.conf.subcommand("gate-rank", prefix_name=False)]
    | Annotated[LrPilot, tyro.conf.subcommand("lr-pilot", prefix_name=False)]
    | Annotated[Throughput, tyro.conf.subcommand("throughput", prefix_name=False)]
    | Annotated[ListExperiments, tyro.conf.subcommand("ls", prefix_name=False)]
)


def reproduce(config: tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[Experiments]]) -> None:
    """Fill an experiment's grid of runs, going on where it was left, and print its tables; `ls` shows them all."""
    if isinstance(config, ListExperiments):
        list_experiments(config)
    elif isinstance(config, Throughput):
        run_throughput(config)
    else:
        sys.exit(run_experiment(config))


Runs = (
    Annotated[ListRuns, tyro.conf.subcommand("ls", prefix_name=False)]
    | Annotated[ShowRun, tyro.conf.subcommand("show", prefix_name=False)]
    | Annotated[RemoveRuns, tyro.conf.subcommand("rm", prefix_name=False)]
    | Annotated[FadingConfig, tyro.conf.subcommand("fading", prefix_name=False)]
)


def runs(
    config: tyro.conf.PositionalRequiredArgs[tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[Runs]]],
) -> None:
    """List the runs of a run store, show one, remove some, or find out why one's accuracy fades with the length."""
    commands: dict[type, Callable[..., None]] = {
        ListRuns: list_runs,
        ShowRun: show_run,
        RemoveRuns: remove_runs,
        FadingConfig: run_fading,
    }
    commands[type(config)](config)


LanguageCommands = (
    Annotated[PrepareConfig, tyro.conf.subcommand("prepare", prefix_name=False)]
    | Annotated[TrainCommand, tyro.conf.subcommand("train", prefix_name=False)]
    | Annotated[tyro.conf.PositionalRequiredArgs[EvaluateConfig], tyro.conf.subcommand("eval", prefix_name=False)]
    | Annotated[tyro.conf.PositionalRequiredArgs[LayersConfig], tyro.conf.subcommand("layers", prefix_name=False)]
    | Annotated[tyro.conf.PositionalRequiredArgs[GenerateConfig], tyro.conf.subcommand("generate", prefix_name=False)]
    | Annotated[tyro.conf.PositionalRequiredArgs[ExportConfig], tyro.conf.subcommand("export", prefix_name=False)]
)


def lm(config: tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[LanguageCommands]]) -> None:
    """Language models: prepare text, train a model on it, measure it, look into its layers, and have it write."""
    commands: dict[type, Callable[..., None]] = {
        PrepareConfig: run_prepare,
        TrainCommand: run_train,
        EvaluateConfig: run_evaluate,
        LayersConfig: run_layers,
        GenerateConfig: run_generate,
        ExportConfig: run_export,
    }
    commands[type(config)](config)


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit codes: 0 done, 1 something is wrong here, 2 bad input, 130 interrupted, 141 nobody reads the output."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(f"naju {naju.__version__}")
        return
    if list(arguments[:2]) == ["reproduce", "--list"]:  # an option in the place of a subcommand
        arguments = ["reproduce", "ls", *arguments[2:]]
    commands: dict[str, Callable[..., None]] = {
        "demo": demo,
        "doctor": doctor,
        "bench": bench,
        "tasks": tasks,
        "reproduce": reproduce,
        "runs": runs,
        "report": report,
        "inspect": inspect,
        "lm": lm,
    }
    try:
        try:
            _parsed(commands, arguments)()
        finally:
            print(end="", flush=True)  # here a pipe that nobody reads is an error that can be caught
    except BrokenPipeError:
        _end_like_a_pipe()
    except (ValueError, TypeError, OSError, FloatingPointError, OverflowError, ImportError) as error:
        _refuse(_told(error))
    except (MemoryError, RuntimeError) as error:
        if not _wants_too_much_memory(error):
            raise
        _refuse(f"not enough memory for these sizes: {error}")
    except KeyboardInterrupt:
        print("naju: interrupted", file=sys.stderr)
        sys.exit(130)


def _parsed(commands: Mapping[str, Callable[..., None]], arguments: Sequence[str]) -> Callable[[], None]:
    """The command with its options. Where a config refuses their values, its own sentence is the answer: tyro would
    show it behind the name of a field that no command line has."""
    told = io.StringIO()
    later = {name: _later(command) for name, command in commands.items()}
    try:
        with contextlib.redirect_stderr(told):
            command: Callable[[], None] = tyro.extras.subcommand_cli_from_dict(
                later, prog="naju", description=naju.__doc__, args=list(arguments) or ["--help"]
            )
    except SystemExit as stop:
        refusal = _refusal(stop)
        if refusal is not None:
            told = io.StringIO()
            raise refusal from None
        raise
    finally:
        print(told.getvalue(), end="", file=sys.stderr)
    return command


def _later(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """With the options of `command`, and only begun by the one who calls what it returns."""

    @functools.wraps(command)
    def prepared(*arguments: object, **options: object) -> Callable[[], None]:
        return functools.partial(command, *arguments, **options)

    return prepared


def _refusal(stop: SystemExit) -> ValueError | None:
    """The error behind an exit, where it came from this package and not from reading an option's text."""
    error = stop.__context__
    while error is not None:
        modules = (frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__))
        if isinstance(error, ValueError) and any(module.startswith("naju.") for module in modules):
            return error
        error = error.__context__
    return None


def _end_like_a_pipe() -> NoReturn:
    """As a program does whose reader, such as `head`, has had enough: what is left of its output goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)  # 128 + SIGPIPE


def _told(error: Exception) -> str:
    """Without the number of a system's error."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _refuse(sentence: str) -> NoReturn:
    """One line: torch adds where in its sources it noticed."""
    print(f"naju: {sentence.partition(chr(10))[0]}", file=sys.stderr)
    sys.exit(2)


def _wants_too_much_memory(error: Exception) -> bool:
    told = ("can't allocate memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in told)


if __name__ == "__main__":
    main()
