"""Pictures are written where they were asked for, and the page that shows the analysis runs as printed."""

from __future__ import annotations

import builtins
import re
from pathlib import Path

import pytest
import torch

from naju import NajuMixer
from naju.analysis import draw_memory, draw_reachable, observe_layer, observe_scan

PAGE = Path(__file__).parents[2] / "docs" / "analysis.md"
PNG = b"\x89PNG\r\n"


def test_the_picture_of_reachable_pairs(tmp_path):
    path = draw_reachable(tmp_path / "pairs.png")
    assert path == tmp_path / "pairs.png"
    assert path.read_bytes().startswith(PNG)


def test_the_picture_of_a_layers_memory(tmp_path):
    torch.manual_seed(0)
    run = observe_layer(NajuMixer(8, d_state=4), torch.randn(1, 40, 8))
    path = draw_memory(run, str(tmp_path / "memory.png"), channel=3)
    assert path.read_bytes().startswith(PNG)
    assert draw_memory(run, tmp_path / "default.png").read_bytes() != path.read_bytes()


@pytest.mark.parametrize(("length", "logit"), [(1, 0.0), (3, torch.inf)])
def test_a_memory_of_one_token_or_of_gates_that_never_write_can_be_drawn(tmp_path, length, logit):
    one = torch.ones(1, length, 2)
    run = observe_scan(one, logit * one, -logit * one, one, one)
    assert draw_memory(run, tmp_path / "memory.png").read_bytes().startswith(PNG)


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"path must lie in a folder that exists, but .*missing does not"):
        draw_reachable(tmp_path / "missing" / "pairs.png")
    run = observe_scan(*torch.randn(5, 1, 4, 2))
    with pytest.raises(ValueError, match=r"channels must name some of the channels .*, but is \[2\]"):
        draw_memory(run, tmp_path / "memory.png", channel=2)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without_matplotlib(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match=r"pictures need matplotlib; install it with: pip install 'naju\[report\]'"):
        draw_reachable(tmp_path / "pairs.png")


def test_the_page_runs_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert {path.name for path in tmp_path.iterdir()} == {"pairs.png", "memory.png"}
