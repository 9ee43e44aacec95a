"""Every dependency may be used and passed on; `make audit` also asks for known vulnerabilities."""

import pytest
from audit import ACCEPTED, dependencies, licence, verdict


def test_every_dependency_has_a_licence_that_allows_it():
    found = dependencies()
    assert {"torch", "numpy", "safetensors", "tqdm", "tyro"} <= set(found)
    kinds = {name: verdict(licence(installed)) for name, installed in found.items()}
    refused = {name for name, kind in kinds.items() if kind in ("copyleft", "unknown")}
    assert {name: licence(found[name]) for name in refused}.items() <= ACCEPTED.items()
    assert all(name.startswith(("nvidia-", "cuda-")) for name, kind in kinds.items() if kind == "a vendor's own")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("MIT", "permissive"),
        ("Apache-2.0 OR GPL-3.0-only", "permissive"),
        ("MPL-2.0 AND MIT", "weak copyleft"),
        ("MIT AND AGPL-3.0", "copyleft"),
        ("GNU General Public License v3", "copyleft"),
        ("LGPL-2.1", "copyleft"),
        ("LicenseRef-NVIDIA-Proprietary", "a vendor's own"),
        ("All rights reserved", "unknown"),
        ("unknown", "unknown"),
    ],
)
def test_licences_are_told_apart(words, kind):
    assert verdict(words) == kind
