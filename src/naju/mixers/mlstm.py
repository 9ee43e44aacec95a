"""xLSTM's mLSTM: a matrix memory with a forget gate and an exponential write gate a head, and a normaliser.

    C_t = f_t C_{t-1} + i_t k_t v_t^T     n_t = f_t n_{t-1} + i_t k_t     i_t = exp(i_logit_t), f_t = sigmoid(f_logit_t)
    o_t = C_t^T q_t / max(|n_t · q_t|, 1)

i can be any size, so C and n are kept divided by exp(m), with m_t = max(log f_t + m_{t-1}, i_logit_t). The outputs do
not depend on m, and no derivative is taken through it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from naju.layers.causal_conv import DepthwiseConv, convolve
from naju.layers.head_norm import HeadNorm
from naju.layers.layout import Layout, layout_of
from naju.layers.matrix_scan import matrix_scan, running_max
from naju.mixers.matrix import MatrixMixer, divided
from naju.mixers.state import State
from naju.scan.dispatch import state_dtype
from naju.scan.frame import without_autocast


@dataclass(frozen=True)
class MLSTMState(State):
    """Memory and normaliser divided by exp(m), and what the short convolution still has to see."""

    C: Tensor  # (b, heads, key, value), float32 or float64, as are n and m
    n: Tensor  # (b, heads, key)
    m: Tensor  # (b, heads)
    tail: Tensor  # (b, d_conv - 1, d)


torch.export.register_dataclass(MLSTMState, serialized_type_name="naju.MLSTMState")


class BlockLinear(nn.Module):
    """A linear map between groups of `block` neighbouring channels, its entries normal with `std` at first."""

    def __init__(self, width: int, block: int, *, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width // block, block, block).normal_(std=std))

    def forward(self, u: Tensor) -> Tensor:
        if u.device.type == "cuda":
            return u @ self.matrix().to(u.dtype)
        groups = u.reshape(*u.shape[:-1], *self.weight.shape[:2])
        return torch.einsum("blgi,gij->blgj", groups, self.weight.to(u.dtype)).flatten(-2)

    def matrix(self) -> Tensor:
        """All of the map, mostly zeros: a GPU multiplies with those sooner than with many tiny matrices."""
        groups, block, _ = self.weight.shape
        one = torch.eye(groups, dtype=self.weight.dtype, device=self.weight.device)
        return (self.weight.unsqueeze(2) * one[:, None, :, None]).reshape(groups * block, groups * block)


class MLSTMMixer(MatrixMixer):
    """The layer around the cell is xLSTM's: up-projection by two, a short convolution before queries and keys, queries,
    keys and values by blocks of four channels, layer norm a head, a learnable skip from the convolution, a swish gate.

    Four heads of 64 × 64 at d_model 128 hold 16,384 numbers (n and m aside), and a layer has 109,320 parameters.

    Every parameter starts as in xLSTM's code, but for the last projection: there its standard deviation is
    2 / (layers √d_model), and a mixer does not know the layers; torch's own start is that of five. The forget gates
    start between sigmoid(3) and sigmoid(6), no gate depends on the input at first, and the maps to queries, keys and
    values have entries as small as if all d_model channels entered each.
    """

    state_kind = MLSTMState

    def __init__(
        self, d_model: int, *, n_heads: int = 4, expand: float = 2, d_conv: int = 4, qkv_block: int = 4
    ) -> None:
        super().__init__()
        self.d_model, self.d_inner, self.n_heads = d_model, round(expand * d_model), n_heads
        self.d_key = self.d_value = divided("expand * d_model", self.d_inner, n_heads)
        if qkv_block < 1 or d_conv < 1 or self.d_inner % qkv_block != 0:
            raise ValueError(
                f"qkv_block must divide expand * d_model = {self.d_inner} and d_conv be positive, "
                f"but they are {qkv_block} and {d_conv}"
            )
        self.tail_shape = (d_conv - 1, self.d_inner)
        std = (2 / (5 * d_model)) ** 0.5
        self.project_in = nn.Linear(d_model, 2 * self.d_inner, bias=False)
        nn.init.normal_(self.project_in.weight, std=std)
        self.conv = DepthwiseConv(self.d_inner, d_conv, bias=True)
        self.project_q, self.project_k, self.project_v = (
            BlockLinear(self.d_inner, qkv_block, std=std) for _ in range(3)
        )
        self.gates = nn.Linear(3 * self.d_inner, 2 * n_heads, bias=False)
        nn.init.zeros_(self.gates.weight)
        forget_bias = torch.linspace(3, 6, n_heads)
        self.gate_bias = nn.Parameter(torch.cat([forget_bias, 0.1 * torch.randn_like(forget_bias)]))
        self.norm = HeadNorm(n_heads, self.d_value, center=True)
        self.skip = nn.Parameter(torch.ones(self.d_inner))
        self.project_out = nn.Linear(self.d_inner, d_model, bias=False)

    def forward(
        self,
        u: Tensor,
        state: MLSTMState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, MLSTMState]:
        self.check_input(u, 3)
        layout = layout_of(u, attention_mask, cu_seqlens)
        memory = (self.n_heads, self.d_key, self.d_value)
        state = self.fitting(state, layout.rows, C=memory, n=memory[:2], m=memory[:1], tail=self.tail_shape)
        u_tilde, z = self.project_in(layout.arrange(u)).chunk(2, dim=-1)
        (h,) = convolve(u_tilde, state.tail, layout, [self.conv.weight], [self.conv.bias], silu=True)
        qkv = self.project_q(h), self.project_k(h), self.project_v(u_tilde)
        with without_autocast(u.device):  # an error in these logits is one in the exponent
            logits = self.gates(torch.cat(qkv, dim=-1).to(self.gates.weight.dtype)).to(state.m.dtype) + self.gate_bias
        f_logit, i_logit = layout.hold(*logits.chunk(2, dim=-1))
        q, k, v = map(self.split_heads, qkv)
        o, C, n, m = mlstm_cell(q, k, v, f_logit, i_logit, state.C, state.n, state.m, layout, cu_seqlens)
        mixed = (self.norm(o).flatten(-2) + self.skip * h) * F.silu(z)
        out = self.project_out(mixed.to(h.dtype))
        return layout.restore(out), MLSTMState(C, n, m, layout.last(u_tilde, state.tail))

    def init_state(self, batch: int) -> MLSTMState:
        C = self.empty_memory(batch)
        tail = self.project_out.weight.new_zeros(batch, *self.tail_shape)
        return MLSTMState(C, C[..., 0].clone(), C[..., 0, 0].clone(), tail)


def mlstm_cell(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f_logit: Tensor,
    i_logit: Tensor,
    C: Tensor,
    n: Tensor,
    m: Tensor,
    layout: Layout,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The recurrence on q, k, v (b, l, heads, ·) and logits (b, l, heads) from the state C, n, m: outputs and state.

    The normaliser is the memory of one more value that is always 1, so one scan makes both.
    """
    log_f, tail = F.logsigmoid(f_logit), m.unsqueeze(1)
    level = running_max(i_logit, log_f, m, cu_seqlens)  # (b, l, heads)
    level_before, _ = layout.past(level, tail)
    q, k = q * q.shape[-1] ** -0.5, k * (i_logit - level).exp().unsqueeze(-1).to(k.dtype)
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    joined = torch.cat([C, n.unsqueeze(-1)], dim=-1)
    log_decay = (log_f + level_before - level).unsqueeze(-1)
    o, joined = matrix_scan(q, k, v, log_decay, joined, cu_seqlens=cu_seqlens)
    o = o.to(state_dtype(o.dtype))
    size = torch.maximum(o[..., -1:].abs(), (-level).exp().unsqueeze(-1)).clamp_min(torch.finfo(o.dtype).tiny)
    return o[..., :-1] / size, joined[..., :-1], joined[..., -1], layout.last(level, tail).squeeze(1)
