"""Which part may import which, what `import naju` loads, and the names and signatures that others rely on."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import naju
from naju import Classifier, LanguageModel, ModelConfig, NajuMixer, NajuState, backends, naju_scan, naju_step
from naju.mixers import MIXERS, build_mixer
from naju.tasks import TASKS, build_task

SOURCE = Path(naju.__file__).parent
LAYER = {"scan", "layers", "mixers"}
MODEL = LAYER | {"models"}
# What each part may import beside itself; "naju" is the package's own __init__.
BELOW: dict[str, set[str]] = {
    "scan": set(),
    "layers": {"scan"},
    "mixers": {"layers", "scan"},
    "models": LAYER,
    "tasks": set(),
    "analysis": MODEL,
    "training": MODEL | {"tasks"},
    "bench": MODEL | {"naju"},
    "hf": MODEL,
    "lm": MODEL | {"tasks", "training", "hf"},
    "doctor": MODEL | {"bench", "naju"},
    "lab": MODEL | {"tasks", "training", "analysis", "bench", "lm", "naju"},
    "cli": MODEL | {"tasks", "training", "analysis", "bench", "doctor", "lab", "lm", "naju"},
    "naju": MODEL,
}
FILES = sorted(SOURCE.rglob("*.py"))


def part_of(module: str) -> str:
    """ "naju.scan.dispatch" is of "scan"."""
    return module.split(".")[1] if "." in module else "naju"


def module_of(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(file: Path) -> Iterator[str]:
    """Every module of this package that the file imports, at its top or inside a function."""
    package = module_of(file).split(".") if file.name == "__init__.py" else module_of(file).split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # `from naju import models` names a part, `from naju import LanguageModel` the package itself.
            yield from {f"{source}.{alias.name}" if alias.name in BELOW else source for alias in node.names}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_point_one_way(file):
    part = part_of(module_of(file))
    assert part in BELOW, f"{part} is new: say in BELOW what it may import"
    imported = {part_of(name) for name in imported_modules(file) if name.split(".")[0] == "naju"}
    upwards = imported - BELOW[part] - {part}
    assert not upwards, f"{part} must not import {', '.join(sorted(upwards))}"


def test_the_table_itself_has_no_cycle():
    done: set[str] = set()
    while rest := {part: needs - done for part, needs in BELOW.items() if part not in done}:
        ready = {part for part, needs in rest.items() if not needs}
        assert ready, f"these import each other: {sorted(rest)}"
        done |= ready


def test_the_test_reads_every_kind_of_import(tmp_path, monkeypatch):
    package = tmp_path / "naju" / "scan"
    package.mkdir(parents=True)
    (package / "some.py").write_text(
        "import naju.lab.demo as demo\nfrom . import other\nfrom .. import cli\n"
        "def late():\n    from naju import NajuMixer, bench\n    from ..training import loop\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path / "naju")
    found = set(imported_modules(package / "some.py"))
    assert found == {"naju.lab.demo", "naju.scan", "naju.cli", "naju", "naju.bench", "naju.training"}


def test_importing_naju_loads_nothing_heavy():
    code = (
        "import json, sys, torch; before = set(sys.modules); import naju;"
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert "naju" in loaded
    assert not {"transformers", "matplotlib", "tyro", "triton", "tqdm"} & set(loaded)


def test_the_public_names_are_few_and_all_there():
    assert {"Classifier", "LanguageModel", "ModelConfig", "NajuMixer", "NajuState"} <= set(naju.__all__)
    assert {"backends", "naju_scan", "naju_step"} <= set(naju.__all__)
    assert len(naju.__all__) <= 15
    assert all(hasattr(naju, name) for name in naju.__all__)


def bare(function: object) -> str:
    """The signature without annotations and without self."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    parameters = [p.replace(annotation=p.empty) for name, p in signature.parameters.items() if name != "self"]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


STREAM = "state=None, attention_mask=None, cu_seqlens=None)"


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (
            naju_scan,
            "(h, f_logit, i_logit, B, C, *, alpha=None, D=None, z=None, initial_state=None, cu_seqlens=None, "
            "reverse=False, backend='auto')",
        ),
        (naju_step, "(state, h, f_logit, i_logit, B, C, *, alpha=None, D=None, z=None)"),
        (backends, "()"),
        (
            NajuMixer.__init__,
            "(d_model, *, d_state=64, expand=2, d_conv=4, f_bias=5.0, i_bias=-2.0, D_init=0.01, alpha=None, "
            "gate_rank=None, gate_reparam=False, backend='auto')",
        ),
        (build_mixer, "(name, d_model, **options)"),
        (build_task, "(name, **options)"),
        (LanguageModel.__init__, "(config)"),
        (LanguageModel.forward, f"(tokens, {STREAM}"),
        (LanguageModel.step, "(token, state)"),
        (Classifier.__init__, "(config, n_classes)"),
        (Classifier.forward, "(tokens, attention_mask=None)"),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_a_fixed_signature(function, signature):
    assert bare(function) == signature


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_every_mixer_has_the_protocol(mixer):
    assert bare(mixer.forward) == f"(u, {STREAM}"
    assert list(inspect.signature(mixer.step).parameters)[2] == "state"
    assert bare(mixer.init_state) == "(batch)"
    assert isinstance(mixer.state_size, property)


def test_generation_takes_a_prompt_and_a_count_and_names_the_rest():
    parameters = list(inspect.signature(LanguageModel.generate).parameters.values())
    assert [p.name for p in parameters[:3]] == ["self", "tokens", "max_new_tokens"]
    assert {p.kind for p in parameters[3:]} == {inspect.Parameter.KEYWORD_ONLY}
    options = {"temperature", "top_k", "top_p", "eos_token", "seed", "attention_mask"}
    assert options <= {p.name for p in parameters}


def test_a_config_needs_three_sizes_only():
    config = ModelConfig(vocab_size=7, d_model=8, n_layers=2)
    assert (config.mixer, config.mixer_options, config.tie_embeddings) == ("naju", {}, True)


def test_the_operations_of_a_state_are_there():
    operations = ("clone", "detach", "to", "reorder", "snapshot", "restore", "save", "load", "__getitem__")
    assert all(callable(getattr(NajuState, name)) for name in operations)


def test_registries_know_their_names():
    assert {"naju", "coupled", "attention"} <= set(MIXERS)
    assert TASKS
    assert "chunked" in backends()
    assert all(reason is None or reason for reason in backends().values())
