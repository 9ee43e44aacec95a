"""Whatever stands in a result, a config, a name or a row of a benchmark: a page shows it and never runs it."""

import json
import re
from html.parser import HTMLParser

import pytest

from naju.bench.rows import save_rows
from naju.lab.diagnostic_run import DiagnosticRun, Examination, ModelSettings
from naju.lab.inspect import InspectConfig, build_page
from naju.lab.pages.render import environment
from naju.lab.report import write_report
from naju.lab.report.results import read_results
from naju.lab.runs import RunFolder
from naju.tasks import build_task
from naju.training import TrainConfig
from naju.training.checkpoint import Checkpoints

SCRIPT = "<script>alert(1)</script>"
ATTRIBUTE = '"\' onload=alert(1) x="'
HOSTILE = (
    SCRIPT,
    ATTRIBUTE,
    "</style></title></svg><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}",
    "javascript:alert(1)",
)


class Opened(HTMLParser):
    """Tags and attributes as a browser would see them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.links = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attributes]
        self.links += [value for name, value in attributes if name in ("href", "src")]


def assert_harmless(page):
    opened = Opened(page)
    own_scripts = set(re.findall(r"<script[^>]*>", page)) - {"<script>"}
    assert not {"iframe", "object", "embed", "base"} & set(opened.tags)
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert not [name for name in opened.attributes if name.startswith("on")]
    assert not [link for link in opened.links if link.lower().startswith("javascript:")]
    assert not [tag for tag in own_scripts if "src=" in tag]


def hostile_result(text, experiment="diagnostics"):
    shares = dict.fromkeys(("all", *build_task("T4").groups), 0.5)
    config = {"mixer": text, "task": "T4", "d_model": 128, "length": 512, "epochs": 50, "lr": text, "batch_size": text}
    return {
        **{"experiment": experiment, "mixer": text, "task": "T4", "variant": text, "seed": 1, "config": config},
        **{"parameters": 1000, "state_size": 64, "steps": 100, "seconds": 9.5, "when": text, "diverged": text},
        **{"train_accuracy": 0.9, "best_validation": 0.8, "final_validation": 0.7},
        "accuracy": {"512": {**shares, text: 0.5}, "2048": shares},
        "growing": {"2048": shares},
        "curve": [[50, 1.5, None], [100, 1.0, 0.8]],
        "machine": {"accelerator": text, "processor": text, "cores": text},
    }


@pytest.mark.parametrize("text", HOSTILE)
def test_a_report_shows_hostile_results_as_text(text, tmp_path):
    runs, rows = tmp_path / "runs", tmp_path / "rows"
    runs.mkdir()
    for number, experiment in enumerate(("diagnostics", "mqar", "lra", text)):
        (runs / f"{number}.json").write_text(json.dumps(hostile_result(text, experiment)))
    (runs / f"{text.replace('/', '')}.json").write_text("no JSON")
    row = {"model": text, "mode": text, "n_layers": 4, "d_model": 256, "length": 1024, "batch": 8, "median_s": 1.0}
    path = save_rows("forward", [row], rows)
    path.write_text(path.read_text().replace('"accelerator": null', f'"accelerator": {json.dumps(text)}'))
    assert [result.mixer for result in read_results(runs).results] == [text]
    write_report(runs, tmp_path / "page", rows)
    written = sorted((tmp_path / "page").glob("*.html"))
    assert len(written) > 1
    for page in written:
        assert_harmless(page.read_text())
    if text == SCRIPT:
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in (tmp_path / "page" / "index.html").read_text()


@pytest.mark.parametrize("text", HOSTILE)
def test_an_inspection_shows_a_hostile_run_as_text(text, tmp_path):
    sizes = {"n_entities": 16, "n_values": 8, "n_events": 8, "min_updates": 2, "max_updates": 4}
    run = DiagnosticRun(
        task="T4",
        task_options=sizes,
        model=ModelSettings(mixer="naju", mixer_options={"d_state": 4}, d_model=8, n_layers=1),
        training=TrainConfig(steps=4, length=64, batch_size=4, sequences=16, seed=1),
        examination=Examination(test_lengths=(64,), test_sequences=8, validation_sequences=8),
    )
    path = tmp_path / text.replace("/", "")
    RunFolder(path).begin({**run.to_json(), "variant": text, "head_note": text})
    weights = run.model.build(run.build_task(), 1).state_dict()
    Checkpoints(path).save({f"model.{name}": weight for name, weight in weights.items()}, {})
    assert_harmless(build_page(InspectConfig(run=path)))


def test_the_test_sees_what_would_run():
    for page in (f"<p>{SCRIPT}</p>", f'<p title="{ATTRIBUTE}">', '<a href="javascript:alert(1)">x</a>'):
        with pytest.raises(AssertionError):
            assert_harmless(page)


def test_every_template_escapes_by_itself():
    """Autoescaping is on, no template turns it off, and no value stands in a script or an unquoted attribute."""
    assert environment().autoescape is True
    for template in environment().list_templates(extensions=["html"]):
        source, _, _ = environment().loader.get_source(environment(), template)
        assert "|safe" not in source.replace(" ", "")
        assert "autoescape" not in source
        assert not re.search(r"=\{\{", source), f"an attribute without quotes in {template}"
        for block in re.findall(r"<script.*?</script>", source, re.DOTALL):
            assert "{{" not in block, f"a value inside a script of {template}"
