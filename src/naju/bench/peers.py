"""Who is measured: Naju and its peers' best public kernels, each as a module from (b, l, m) to (b, l, m).

A peer's package is imported when it is built, never before; one that is missing says so in its `PeerMissingError`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from naju.mixers import build_mixer

N_HEADS = 4
HEAD = 64  # channels of a head of Mamba-2


class PeerMissingError(RuntimeError):
    """This peer cannot be built here; the message says why."""


class Peer(nn.Module):
    """A mixer that returns its output only. `d_state` is N: numbers kept a channel, None where that grows."""

    def __init__(self, mixer: nn.Module, d_state: int | None) -> None:
        super().__init__()
        self.mixer, self.d_state = mixer, d_state

    def forward(self, u: Tensor) -> Tensor:
        given = self.mixer(u)
        out: Tensor = given[0] if isinstance(given, tuple) else given
        return out


Build = Callable[[int, int], Peer]  # from d_model and d_state


def build_peer(name: str, d_model: int, d_state: int) -> Peer:
    """The peer called `name`; `d_state` is used by those whose published layer lets it be chosen."""
    check_names([name])
    return PEERS[name](d_model, d_state)


def check_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in PEERS:
            raise ValueError(f"unknown model {name!r}; expected one of {', '.join(PEERS)}")


def _package(name: str) -> Any:
    root = name.partition(".")[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(root)
            return importlib.import_module(name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == root
        reason = f"the package {root} is not installed" if missing else f"{root} cannot be imported: {error}"
        raise PeerMissingError(reason) from error


def _naju(**options: Any) -> Build:
    return lambda d_model, d_state: Peer(build_mixer("naju", d_model, d_state=d_state, **options), d_state)


def _mamba(kind: str, fixed_d_state: int | None = None) -> Build:
    def build(d_model: int, d_state: int) -> Peer:
        d_state = fixed_d_state or d_state
        return Peer(getattr(_package("mamba_ssm"), kind)(d_model, d_state=d_state), d_state)

    return build


def _mamba2_of_transformers(d_model: int, d_state: int) -> Peer:
    """The layer in plain torch: runs anywhere, slowly."""
    modeling = _package("transformers.models.mamba2.modeling_mamba2")
    return Peer(modeling.Mamba2Mixer(mamba2_config(d_model=d_model, d_state=d_state), layer_idx=0), d_state)


def mamba2_config(*, d_model: int, d_state: int, n_layers: int = 1, vocab_size: int = 1) -> Any:
    """transformers' configuration of the published Mamba-2 at these sizes."""
    if 2 * d_model % HEAD:
        raise ValueError(f"d_model must be a multiple of {HEAD // 2} for Mamba-2's heads of {HEAD}, but is {d_model}")
    return _package("transformers").Mamba2Config(
        vocab_size=vocab_size,
        hidden_size=d_model,
        num_hidden_layers=n_layers,
        state_size=d_state,
        expand=2,
        head_dim=HEAD,
        num_heads=2 * d_model // HEAD,
        n_groups=1,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )


def _fla(kind: str, keys_over_width: float | None = None, **options: Any) -> Build:
    """A layer of flash-linear-attention; its memory is one matrix a head, as deep as a head's keys."""

    def build(d_model: int, d_state: int) -> Peer:
        layers = _package("fla.layers")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer = getattr(layers, kind)(hidden_size=d_model, **options)
        return Peer(layer, 1 if keys_over_width is None else round(keys_over_width * d_model) // N_HEADS)

    return build


class MLSTM(nn.Module):
    """The mLSTM layer of xLSTM's large models around the chunkwise kernel of mlstm_kernels."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        backend = _package("mlstm_kernels.torch.backend_module")
        self.kernel = backend.mLSTMBackend(
            backend.mLSTMBackendConfig(
                chunkwise_kernel="chunkwise--triton_xl_chunk",
                sequence_kernel="native_sequence__triton",
                step_kernel="triton",
                mode="train",
                chunk_size=128,
                return_last_states=False,
            )
        )
        self.widths = [d_model // 2, d_model // 2, d_model, d_model, N_HEADS, N_HEADS]
        self.project_in = nn.Linear(d_model, sum(self.widths))
        self.norm = nn.RMSNorm(d_model // N_HEADS, eps=1e-6)
        self.project_out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        query, key, value, output, write, forget = self.project_in(u).split(self.widths, dim=-1)
        query, key, value = (t.unflatten(-1, (N_HEADS, -1)).transpose(1, 2) for t in (query, key, value))
        gates = {"i": _capped(write).transpose(1, 2), "f": _capped(forget).transpose(1, 2)}
        mixed = self.kernel(q=query, k=key, v=value, **gates)
        return self.project_out(output.sigmoid() * self.norm(mixed).transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


def _capped(logit: Tensor) -> Tensor:
    return 15 * (logit / 15).tanh()


class TransformerLayer(nn.Module):
    """Causal attention by one named kernel and an MLP of four times the width; no positions, which favours it."""

    def __init__(self, d_model: int, kernel: SDPBackend) -> None:
        super().__init__()
        self.kernel = kernel
        self.project_in = nn.Linear(d_model, 3 * d_model, bias=False)
        self.project_out = nn.Linear(d_model, d_model, bias=False)
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model, bias=False), nn.GELU(), nn.Linear(4 * d_model, d_model, bias=False)
        )

    def forward(self, u: Tensor) -> Tensor:
        query, key, value = self.project_in(u).unflatten(-1, (3, N_HEADS, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.kernel):
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.project_out(mixed.transpose(1, 2).flatten(-2))
        return attended + self.mlp(self.norm(u + attended))  # type: ignore[no-any-return]


def _transformer(kernel: SDPBackend) -> Build:
    return lambda d_model, d_state: Peer(TransformerLayer(d_model, kernel), None)


PEERS: Mapping[str, Build] = {
    "naju": _naju(),
    "naju-rank64": _naju(gate_rank=64),
    "naju-rank32": _naju(gate_rank=32),
    "mamba2": _mamba("Mamba2"),
    "mamba": _mamba("Mamba"),
    "mamba-16": _mamba("Mamba", fixed_d_state=16),
    "mamba3": _mamba("Mamba3"),
    "gla": _fla("GatedLinearAttention", keys_over_width=0.5, num_heads=N_HEADS),
    "hgrn": _fla("HGRNAttention"),
    "retnet": _fla("MultiScaleRetention", keys_over_width=1.0, num_heads=N_HEADS),
    "rwkv6": _fla("RWKV6Attention", keys_over_width=0.5, num_heads=N_HEADS),
    "mlstm": lambda d_model, d_state: Peer(MLSTM(d_model), d_model // 2 // N_HEADS),
    "transformer-math": _transformer(SDPBackend.MATH),
    "transformer-flash": _transformer(SDPBackend.FLASH_ATTENTION),
    "mamba2-transformers": _mamba2_of_transformers,
}
# What a comparison measures unasked.
USUAL = (
    "naju",
    "naju-rank64",
    "naju-rank32",
    "mamba2",
    "mamba",
    "mamba-16",
    "gla",
    "hgrn",
    "retnet",
    "mlstm",
    "transformer-math",
    "transformer-flash",
)
