"""The `naju` command. Each subcommand is a config and a function; heavy imports wait until one is chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import tyro

import naju
from naju.bench.model import ModelBench, run_model_bench
from naju.bench.scan import ScanBench, run_scan_bench
from naju.doctor import run_doctor
from naju.lab.demo import DemoConfig, run_demo


def demo(config: tyro.conf.OmitArgPrefixes[DemoConfig]) -> None:
    """Train Naju and its single-gate twin side by side on this CPU, and resume a stream from a saved state."""
    run_demo(config)


def doctor() -> None:
    """Print versions, devices and every scan backend with its reason, and test each that can run."""
    if not run_doctor():
        sys.exit(1)


Benches = (
    Annotated[ScanBench, tyro.conf.subcommand("scan", prefix_name=False)]
    | Annotated[ModelBench, tyro.conf.subcommand("model", prefix_name=False)]
)


def bench(config: tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[Benches]]) -> None:
    """Measure the scan or a model against its peers; results are rows in benchmarks/results."""
    if isinstance(config, ScanBench):
        run_scan_bench(config)
    else:
        run_model_bench(config)


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit codes: 0 done, 1 something is wrong here, 2 bad input, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(f"naju {naju.__version__}")
        return
    commands: dict[str, Callable[..., None]] = {"demo": demo, "doctor": doctor, "bench": bench}
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands, prog="naju", description=naju.__doc__, args=list(arguments) or ["--help"]
        )
    except (ValueError, TypeError, OSError, FloatingPointError) as error:
        print(f"naju: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("naju: interrupted", file=sys.stderr)
        sys.exit(130)
