"""fla's kernels, where installed, or Naju's in their place, against our own scan in float64 on the same GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from naju.layers import matrix_scan as ours
from naju.layers.head_scan import head_scan_refuses
from naju.layers.public_kernels import public_kernel
from naju.mixers import build_mixer
from numerics import TOLERANCE, relative_rms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# One decay a head or a channel, with a bonus or without: chunk_simple_gla, chunk_gla and chunk_rwkv6.
KINDS = {"per head": (1, False), "per channel": (32, False), "per channel with bonus": (32, True)}


@pytest.fixture(autouse=True)
def _needs_fla():
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")


def draw(length, channels, with_bonus):
    """bfloat16 queries, keys and values, float32 decays and state, as the mixers make them under autocast."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    q, k, v = normal(2, length, 4, 32) / 32**0.5, normal(2, length, 4, 32), normal(2, length, 4, 64)
    arguments = {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()}
    arguments |= {"log_decay": F.logsigmoid(normal(2, length, 4, channels) + 3), "state": normal(2, 4, 32, 64)}
    return arguments | ({"bonus": normal(4, 32)} if with_bonus else {})


def outcome(arguments):
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in arguments.items()}
    o, state = ours.matrix_scan(**leaves)
    generator = torch.Generator("cuda").manual_seed(1)
    cotangents = [torch.randn(t.shape, generator=generator, device="cuda").to(t.dtype) for t in (o, state)]
    gradients = torch.autograd.grad([o, state], list(leaves.values()), cotangents)
    named = zip(["o", "state", *(f"d{name}" for name in leaves)], [o, state, *gradients], strict=True)
    return {name: tensor.detach() for name, tensor in named}


@pytest.mark.parametrize("length", [63, 512, 1000])
@pytest.mark.parametrize(("channels", "with_bonus"), KINDS.values(), ids=KINDS)
def test_outputs_states_and_gradients_agree(channels, with_bonus, length):
    arguments = draw(length, channels, with_bonus)
    drive = [arguments[name] for name in ("q", "k", "v", "log_decay")]
    if public_kernel(*drive, arguments.get("bonus"), None) is None:  # fla refuses the gradient: then ours has to run
        q, _, v, log_decay = drive
        assert head_scan_refuses(q, v, log_decay, arguments.get("bonus"), None) is None
    got = outcome(arguments)
    want = outcome({name: tensor.double() for name, tensor in arguments.items()})
    errors = {name: relative_rms(got[name], tensor) for name, tensor in want.items()}
    kinds = {name: "forward" if name in ("o", "state") else "gradient" for name in errors}
    assert not {name: e for name, e in errors.items() if not e <= TOLERANCE[torch.bfloat16, kinds[name]]}, errors


@pytest.mark.parametrize("name", ["mamba2", "gla", "retnet", "mlstm", "rwkv"])
def test_a_mixer_is_the_same_with_and_without_them(name, monkeypatch):
    torch.manual_seed(0)
    mixer = build_mixer(name, 128).cuda()
    u = torch.randn(2, 300, 128, device="cuda", requires_grad=True)
    used = []

    def counted(*arguments):
        used.append(public_kernel(*arguments))
        return used[-1]

    results = []
    for choose in (counted, lambda *arguments: None):
        monkeypatch.setattr(ours, "public_kernel", choose)
        if choose is not counted:
            monkeypatch.setattr(ours, "head_scan_refuses", lambda *arguments: "plain torch is asked for")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out, _ = mixer(u)
        results.append([out.float(), *torch.autograd.grad(out.float().square().sum(), u)])
    assert used
    if name in ("gla", "rwkv"):
        assert None not in used
    for mine, theirs in zip(*results, strict=True):
        assert relative_rms(mine.detach(), theirs.detach()) <= 2e-2
