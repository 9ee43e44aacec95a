"""Runs of the suite that take a second."""

from dataclasses import replace

from naju.lab.diagnostic_run import DiagnosticRun, Examination
from naju.lab.diagnostics import QUICK, Budget, diagnostic_run

PROTOCOL = replace(
    QUICK,
    budgets={"T2": Budget(96, 4), "T4": Budget(96, 4)},
    settings={"naju": {"d_state": 4}, "coupled": {"d_state": 4}},
    d_model=8,
    n_layers=1,
    examination=Examination(test_lengths=(64, 128), test_sequences=50, validation_sequences=30),
)


def tiny_run(mixer="naju", task="T4", seed=1, **changes) -> DiagnosticRun:
    """Twelve steps."""
    return replace(diagnostic_run(PROTOCOL, mixer, task, seed, device="cpu"), **changes)
