"""Every contender is a module from (b, l, m) to (b, l, m), or says why it cannot be."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from naju.bench.peers import PEERS, PeerMissingError, build_peer
from naju.bench.shells import LanguageShell, ResidualStack

PACKAGES = {"mamba2": "mamba_ssm", "mamba": "mamba_ssm", "gla": "fla", "hgrn": "fla", "retnet": "fla"}
PACKAGES |= {"rwkv6": "fla", "mlstm": "mlstm_kernels", "mamba2-transformers": "transformers"}


@pytest.mark.parametrize("name", ["naju", "naju-rank32", "transformer-math", "transformer-flash"])
def test_what_runs_anywhere_keeps_the_shape_and_looks_back_only(name: str) -> None:
    peer = build_peer(name, 64, 8)
    u = torch.randn(2, 10, 64, requires_grad=True)
    out = peer(u)
    assert out.shape == u.shape
    (du,) = torch.autograd.grad(out[:, 4].sum(), u)
    assert du[:, 4].any()
    assert not du[:, 5:].any()


def test_both_attention_kernels_compute_the_same() -> None:
    math, flash = build_peer("transformer-math", 64, 8), build_peer("transformer-flash", 64, 8)
    flash.load_state_dict(math.state_dict())
    u = torch.randn(2, 33, 64)
    torch.testing.assert_close(math(u), flash(u))


def test_mamba2_of_transformers_runs_on_a_cpu() -> None:
    pytest.importorskip("transformers")
    peer = build_peer("mamba2-transformers", 64, 8)
    assert peer(torch.randn(1, 12, 64)).shape == (1, 12, 64)
    assert peer.d_state == 8


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = PACKAGES[name]
    for module in [module for module in sys.modules if module.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PeerMissingError, match=f"the package {package} is not installed"):
        build_peer(name, 64, 8)


def test_a_broken_package_says_what_broke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mamba_ssm.py").write_text("raise ImportError('undefined symbol: scan')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mamba_ssm", raising=False)
    with pytest.raises(PeerMissingError, match="mamba_ssm cannot be imported: undefined symbol"):
        build_peer("mamba2", 64, 8)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown model 'nonsense'; expected one of naju, "):
        build_peer("nonsense", 64, 8)
    assert "naju" in PEERS


class Kernel(nn.Module):
    """Stands for mLSTM's: checks what it is given and returns the values."""

    def __init__(self, config: object) -> None:
        super().__init__()

    def forward(self, *, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        assert q.shape == k.shape == (2, 4, 10, 8)
        assert i.shape == f.shape == v.shape[:3] == (2, 4, 10)
        assert 14 < i.abs().max() <= 15
        return v


def test_the_mlstm_layer_hands_heads_to_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ModuleType("mlstm_kernels.torch.backend_module")
    vars(backend).update(mLSTMBackend=Kernel, mLSTMBackendConfig=SimpleNamespace)
    for name in ("mlstm_kernels", "mlstm_kernels.torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    peer = build_peer("mlstm", 64, 64)
    assert peer(100 * torch.randn(2, 10, 64)).shape == (2, 10, 64)
    assert peer.d_state == 8


def test_the_shells_add_norms_residuals_and_tied_logits_only() -> None:
    stack = ResidualStack("naju", n_layers=2, d_model=16, d_state=4)
    mixers = sum(p.numel() for peer in stack.peers for p in peer.parameters())
    shell = LanguageShell(stack, d_model=16, vocab_size=11)
    assert shell(torch.randint(11, (2, 5))).shape == (2, 5, 11)
    assert sum(p.numel() for p in shell.parameters()) == mixers + 2 * 16 + 16 + 11 * 16
    assert (stack.d_state, shell.d_state) == (4, 4)
    for peer in stack.peers:
        nn.init.zeros_(peer.mixer.project_out.weight)  # type: ignore[union-attr, arg-type]
    u = torch.randn(1, 3, 16)
    assert torch.equal(stack(u), u)
