"""Licences and known vulnerabilities of what naju depends on: `make audit`.

Licences come from the installed packages. Vulnerabilities come from pip-audit, which is installed aside for the
occasion and asks the package index: without a network that part is skipped, and the reason is printed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement

EXTRAS = ("", "report", "triton", "hf", "peft", "lm", "export", "eval", "track", "slurm")
PERMISSIVE = ("apache", "bsd", "mit", "isc", "psf", "python software foundation", "python-2.0", "hpnd", "zlib", "0bsd")
PERMISSIVE += ("bsl-1.0", "cc0-1.0", "cnri-python", "unlicense")
# The runtime of a vendor's devices, which torch's own wheels bring along for them.
VENDOR = ("nvidia", "proprietary")
# Weak copyleft on files that are used as they are, without a change.
WEAK = ("mpl", "mozilla")
# Copyleft that was looked at: only the extra `eval` brings it, for lm-eval, which uses it unchanged.
ACCEPTED = {"chardet": "GNU Lesser General Public License v2 or later (LGPLv2+)"}


def dependencies() -> dict[str, Distribution]:
    """Everything that naju and its extras bring along and that is installed, by name."""
    found: dict[str, Distribution] = {}
    waiting = [("naju", extra) for extra in EXTRAS]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        found[re.sub(r"[-_.]+", "-", name).lower()] = installed
        for line in installed.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({**default_environment(), "extra": extra}):
                more = {(needed.name, one) for one in ("", *needed.extras)} - seen
                waiting += more
                seen |= more
    return {name: one for name, one in sorted(found.items()) if name != "naju"}


def licence(installed: Distribution) -> str:
    """In the package's own words: its SPDX expression, else its classifiers, else the first line of its text."""
    about = installed.metadata
    named = [line.split(" :: ")[-1] for line in about.get_all("Classifier", []) if line.startswith("License :: ")]
    text = (about.get("License") or "").strip().partition("\n")[0]
    return about.get("License-Expression") or ", ".join(dict.fromkeys(named)) or text[:60] or "unknown"


def verdict(words: str) -> str:
    """Of all parts of an expression the strictest; of alternatives the mildest."""
    kinds = ("permissive", "weak copyleft", "a vendor's own", "copyleft", "unknown")
    parts = [re.split(r"\s+OR\s+", part) for part in re.split(r"\s+AND\s+|, ", words)]
    return max((min(map(_kind, part), key=kinds.index) for part in parts), key=kinds.index)


def _kind(words: str) -> str:
    lower = words.lower()
    if re.search(r"\b[al]?gpl|gnu ", lower):
        return "copyleft"
    if any(name in lower for name in WEAK):
        return "weak copyleft"
    if any(name in lower for name in VENDOR):
        return "a vendor's own"
    return "permissive" if any(name in lower for name in PERMISSIVE) else "unknown"


def licences() -> int:
    """Print the table; how many are neither permissive nor weak copyleft."""
    wrong = 0
    print("| package | version | licence | kind |\n| --- | --- | --- | --- |")
    for name, installed in dependencies().items():
        words = licence(installed)
        kind = verdict(words)
        wrong += kind in ("copyleft", "unknown") and ACCEPTED.get(name) != words
        print(f"| {name} | {installed.version} | {words} | {kind} |")
    return wrong


def vulnerabilities() -> int:
    """How many are known, 0 where nobody could be asked."""
    with tempfile.TemporaryDirectory() as aside:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", aside, "pip-audit"]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return _skipped(done.stderr)
        audit = [sys.executable, "-m", "pip_audit", "--path", sysconfig.get_paths()["purelib"], "--format", "json"]
        asks = {**os.environ, "PYTHONPATH": aside}
        done = subprocess.run(audit, capture_output=True, text=True, check=False, env=asks)
    try:
        return _told(json.loads(done.stdout)["dependencies"])
    except (ValueError, KeyError):
        return _skipped(done.stderr)


def _told(packages: list[dict[str, Any]]) -> int:
    """An index that knows none of the packages has said nothing about them."""
    audited = [package for package in packages if "skip_reason" not in package]
    if not audited:
        return _skipped(str(packages[0]["skip_reason"]) if packages else "it looked at no package")
    found = [(package, one) for package in audited for one in package["vulns"]]
    print(f"vulnerabilities: {len(found)} known in {len(audited)} packages, {len(packages) - len(audited)} not audited")
    for package, one in found:
        print(
            f"  {package['name']} {package['version']}: {one['id']}, mended in {', '.join(one['fix_versions']) or '-'}"
        )
    return len(found)


def _skipped(told: str) -> int:
    reason = next((line for line in reversed(told.splitlines()) if line.strip()), "no reason given")
    print(f"vulnerabilities: skipped, as the package index could not be asked: {reason[:200]}")
    return 0


if __name__ == "__main__":
    wrong = licences()
    print(f"\n{wrong} licences are copyleft or unknown\n" if wrong else "\nevery licence allows use and distribution\n")
    sys.exit(min(1, wrong + vulnerabilities()))
