"""One cell of the language-model experiments: a run of `naju lm train` in the run store, under a name that tells it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from naju.lab.lock import RunLock
from naju.lab.runs import RunFolder, carry_out, machine, versions
from naju.lm.config import LanguageRun
from naju.lm.token_files import read_manifest
from naju.training import Reporter

# Parts of the run store: the runs themselves, the short ones that choose a learning rate, those that are only timed.
LANGUAGE, PILOT, SPEED = "language", "lr-pilot", "language-speed"
WIKITEXT = "wikitext-103"
# In GPT-2's tokens, one end of text an article included, the paper counts 117.9 million to train on.
WIKITEXT_TOKENS, GPT2_VOCABULARY = range(117_400_000, 118_400_000), 50_257


@dataclass(frozen=True)
class Text:
    """What a run reads: `label` is its name in every table, `sha256` tells its files' content."""

    label: str
    sha256: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path) -> Text:
        manifest = read_manifest(folder)
        hashes = {name: str(facts["sha256"]) for name, facts in sorted(manifest["files"].items())}
        return cls(text_label(manifest, folder.resolve().name), hashes)


def text_label(manifest: Mapping[str, Any], folder: str) -> str:
    """The source's name, or the folder's where the manifest has none. `wikitext-103` is kept for the whole of it in the
    paper's tokens, whatever else bears that name."""
    name = str(manifest.get("source", {}).get("name") or folder).lower().replace(" ", "-")
    training = manifest["splits"].get("train", {}).get("tokens", 0)
    is_whole = training in WIKITEXT_TOKENS and manifest["vocab_size"] == GPT2_VOCABULARY
    if not name.startswith(WIKITEXT):
        return name
    return WIKITEXT if is_whole else f"part-of-{name}"


def millions(tokens: int) -> str:
    return f"{tokens / 1e6:g}M"


@dataclass(frozen=True, kw_only=True)
class WikitextRun:
    """`contender` is the model as the tables name it; `part` the part of the run store; `attention` "math" keeps fused
    attention kernels out."""

    part: str
    contender: str
    text: Text
    language: LanguageRun
    attention: str = "auto"

    @property
    def variant(self) -> str:
        protocol, execution = self.language.protocol, self.language.execution
        marks = [f"d{self.language.model.d_model}", f"l{protocol.length}", f"lr{protocol.lr:g}"]
        marks += ["pilot"] if self.part == PILOT else []
        if self.part == SPEED:
            ways = {"compiled": execution.compile, "graph": execution.cuda_graph == "on"}
            marks += ["timed", *(way for way, taken in ways.items() if taken), f"m{execution.micro_tokens}"]
        return "-".join([*marks, millions(protocol.tokens)])

    @property
    def name(self) -> str:
        return f"{self.contender}-{self.variant}-{self.text.label}-s{self.language.protocol.seed}"

    @property
    def steps(self) -> int:
        return self.language.protocol.updates

    @property
    def device(self) -> str:
        return self.language.execution.device

    def to_json(self) -> dict[str, Any]:
        """What determines the run, so nothing of how it is carried out, but where that is what it measures."""
        own = {"experiment": self.part, "task": self.text.label, "variant": self.variant, "contender": self.contender}
        found = {**own, **self.language.to_json(), "steps": self.steps, "text": dict(self.text.sha256)}
        if self.part == SPEED:
            execution = self.language.execution
            found |= {"compile": execution.compile, "micro_tokens": execution.micro_tokens, "attention": self.attention}
            found |= {"cuda_graph": True} if execution.cuda_graph == "on" else {}
        return found

    def kernels(self) -> AbstractContextManager[None]:
        return sdpa_kernel(SDPBackend.MATH) if self.attention == "math" else nullcontext()


def run_wikitext(run: WikitextRun, folder: RunFolder, reporter: Reporter) -> dict[str, Any]:
    """Begin a run or go on with it until it is finished; its result. A finished one is not touched."""
    return carry_out(folder, run.to_json(), lambda lock: _train(run, folder, reporter, lock))


def _train(run: WikitextRun, folder: RunFolder, reporter: Reporter, lock: RunLock) -> dict[str, Any]:
    from naju.lm.distributed import joined  # torch's distributed part takes a second to load: not for every command
    from naju.lm.train import train_language_model

    with joined(run.language.execution) as place, run.kernels():
        try:
            found = train_language_model(run.language, folder.path, place, reporter, allow=lock.check)
        except FloatingPointError as error:  # too high a rate is an outcome of a pilot
            found = {"diverged": error.args[0], "validation_perplexity": None, "test_perplexity": None}
        result = {**_about(run), "bf16": run.language.execution.uses_bf16(place.device), **found}
    lock.check()
    folder.finish(result)
    for checkpoint in folder.path.glob("checkpoint*.safetensors"):  # three times the model; best/ stays
        checkpoint.unlink()
    return result


def _about(run: WikitextRun) -> dict[str, Any]:
    return {
        "experiment": run.part,
        "mixer": run.contender,
        "task": run.text.label,
        "variant": run.variant,
        "seed": run.language.protocol.seed,
        "config": run.to_json(),
        "steps": run.steps,
        "machine": machine(),
        "versions": versions(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe_wikitext(result: Mapping[str, Any]) -> str:
    """A result in one line."""
    if "diverged" in result:
        return str(result["diverged"])
    speed, test = result["tokens_per_second"], result["test_perplexity"]
    tested = "" if test is None else f", test {test:.2f}"
    fast = "" if speed is None else f", {speed:,.0f} tokens/s"
    return f"validation perplexity {result['validation_perplexity']:.2f}{tested}{fast} | {result['seconds']:.0f} s"
