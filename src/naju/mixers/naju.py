"""The Naju mixer: projection, short convolution, two independent gates, one scan, readout.

| here            | paper                     | shape     |
| --------------- | ------------------------- | --------- |
| u               | u, residual-stream input  | (b, l, m) |
| u_tilde, z      | split(W_in u)             | (b, l, d) |
| h               | SiLU(DWConv(u_tilde))     | (b, l, d) |
| f_logit, i_logit| a, b: W h + DWConv(h) + bias | (b, l, d) |
| B, C            | split(W_BC h)             | (b, l, n) |
| x               | x, the memory             | (b, d, n) |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from naju.layers.causal_conv import DepthwiseConv, convolve, weighted_sum
from naju.layers.gate import Bias, GateLogit, check_bias, gate_logits
from naju.layers.layout import Layout, layout_of
from naju.layers.only_a_matrix import is_only_a_matrix
from naju.mixers.base import Mixer
from naju.mixers.state import State
from naju.scan import BACKENDS, PLAIN_BACKENDS, naju_scan, naju_step
from naju.scan.dispatch import check_alpha, state_dtype
from naju.scan.step import step_kernel
from naju.scan.step_operator import StepInputs
from naju.scan.triton_chunked.layer import layer, layer_refuses


@dataclass(frozen=True)
class NajuState(State):
    """The whole recurrent state of a Naju mixer: the memory and what the short convolutions still have to see."""

    x: Tensor  # (b, d, n), float32 or float64
    u_tail: Tensor  # (b, d_conv - 1, d): the content branch before its convolution
    h_tail: Tensor  # (b, d_conv - 1, d): h, which both gate convolutions read


torch.export.register_dataclass(NajuState, serialized_type_name="naju.NajuState")


class ScanArguments(NamedTuple):
    """What a mixer hands to `naju_scan`, in the order of its arguments, and the output modulation."""

    h: Tensor
    f_logit: Tensor
    i_logit: Tensor
    B: Tensor
    C: Tensor
    z: Tensor


class NajuMixer(Mixer):
    """`x_t = f_t * x_{t-1} + i_t * (h_t B_t^T)`, `y_t = alpha * x_t C_t + D * h_t`, modulated by silu(z) and projected.

    The biases start the layer as one that holds: f = sigmoid(5) = 0.993, i = sigmoid(-2) = 0.12. A pair as a bias is
    spread over the channels: `f_bias=(-1, 6)` starts with memories of one token to 400.
    """

    state_kind = NajuState
    worth_compiling = False

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        expand: float = 2,
        d_conv: int = 4,
        f_bias: Bias = 5.0,
        i_bias: Bias = -2.0,
        D_init: float = 0.01,
        alpha: float | None = None,
        gate_rank: int | None = None,
        gate_reparam: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.d_model, self.d_inner, self.d_state = d_model, round(expand * d_model), d_state
        for name, value in (("d_model", d_model), ("d_state", d_state), ("d_conv", d_conv), ("expand", self.d_inner)):
            if value < 1:
                raise ValueError(
                    f"{name} is too small: d_model {d_model}, d_state {d_state}, d_conv {d_conv}, "
                    f"expand {expand} give no layer"
                )
        for name, bias in {"f_bias": f_bias, "i_bias": i_bias}.items():
            check_bias(name, bias)
        if math.isnan(D_init):
            raise ValueError("D_init must be a number, but is nan")
        if backend != "auto" and backend not in BACKENDS:
            raise ValueError(f"unknown scan backend {backend!r}; expected 'auto' or one of {', '.join(BACKENDS)}")
        self.alpha, self.backend = check_alpha(alpha, d_state), backend
        self.tail_length = d_conv - 1
        self.project_in = nn.Linear(d_model, 2 * self.d_inner, bias=False)
        self.conv = DepthwiseConv(self.d_inner, d_conv, bias=True)
        self.project_BC = nn.Linear(self.d_inner, 2 * d_state, bias=False)
        self.D = nn.Parameter(torch.full((self.d_inner,), float(D_init)))
        self.project_out = nn.Linear(self.d_inner, d_model, bias=False)
        self._add_gates(d_conv, f_bias, i_bias, gate_rank, gate_reparam)

    def _add_gates(self, width: int, f_bias: Bias, i_bias: Bias, rank: int | None, reparam: bool) -> None:
        self.forget = GateLogit(self.d_inner, width, bias=f_bias, rank=rank, reparam=reparam)
        self.write = GateLogit(self.d_inner, width, bias=i_bias, rank=rank, reparam=reparam)

    def gates(self) -> tuple[GateLogit, ...]:
        return self.forget, self.write

    def forget_and_write(self, logits: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """f_logit and i_logit from the logits of `gates`; linear, so that it serves for what they are made of, too."""
        f_logit, i_logit = logits
        return f_logit, i_logit

    def forward(
        self,
        u: Tensor,
        state: NajuState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, NajuState]:
        self.check_input(u, 3)
        layout = layout_of(u, attention_mask, cu_seqlens)
        uz = self.project_in(layout.arrange(u))  # (b, l, 2d)
        fused = self._is_fused(uz)
        begins = state is None and fused and type(layout) is Layout and uz.shape[1] > 0
        before = None if begins else self._fitting(state, layout.rows)
        if before is None or fused:
            y, x, h = self._fused(uz, before, layout)
        else:
            y, x, h = self._unfused(uz, before, layout)
        out = layout.restore(self.project_out(y))
        return out, NajuState(x, *self._tails(uz[..., : self.d_inner], h, before, layout))

    def _tails(self, u_tilde: Tensor, h: Tensor, before: NajuState | None, layout: Layout) -> tuple[Tensor, ...]:
        """What the next stretch's convolutions have to see of this one, and of the one before it if this is short."""
        if before is None:
            first = max(0, u_tilde.shape[1] - self.tail_length)
            tails = torch.stack([u_tilde[:, first:], h[:, first:]])
            missing = self.tail_length - tails.shape[2]
            return (F.pad(tails, (0, 0, missing, 0)) if missing else tails).unbind()
        return layout.last(u_tilde, before.u_tail), layout.last(h, before.h_tail)

    def _unfused(self, uz: Tensor, before: NajuState, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """y, the state after it, and h: what the one operator computes, for every device, precision and derivative."""
        *drive, z = arguments = self._drive(uz, before, layout)
        y, x = naju_scan(
            *drive,
            z=z,
            D=self.D,
            alpha=self.alpha,
            initial_state=before.x,
            cu_seqlens=layout.cu_seqlens,
            backend=self.backend,
        )
        return y, x, arguments.h

    def _is_fused(self, uz: Tensor) -> bool:
        """Whether one operator can do all that lies between the outer projections."""
        wanted = self.backend in ("auto", "triton_chunked") and self._is_plain()
        return wanted and layer_refuses(uz, self.d_state, self.tail_length + 1) is None

    def _is_plain(self) -> bool:
        """Whether the inner projections are their matrices and nothing else: kernels call none of them."""
        inner = [self.project_BC, *(part for gate in self.gates() for part in (gate.weight, gate.reduce))]
        return all(map(is_only_a_matrix, inner))

    def _fused(self, uz: Tensor, before: NajuState | None, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """y, the state after it, and h; without a state before, every row is a sequence that begins."""
        gates = self.gates()
        matrices = self.forget_and_write([gate.matrix() for gate in gates])
        return layer(
            uz,
            None if before is None else before.u_tail,
            None if before is None else before.h_tail,
            self.conv.weight,
            self.conv.bias,
            torch.cat([*matrices, self.project_BC.weight]).to(uz.dtype),
            *self.forget_and_write([gate.scaled(gate.conv.weight) for gate in gates]),
            *self.forget_and_write([gate.scaled(gate.bias) for gate in gates]),
            self.D,
            None if before is None else before.x,
            layout.cu_seqlens,
            layout.lengths,
            self.alpha,
        )

    def scan_arguments(
        self,
        u: Tensor,
        state: NajuState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> ScanArguments:
        """What this layer scans on input u: its gates, drive, write and read directions, for analysis."""
        self.check_input(u, 3)
        layout = layout_of(u, attention_mask, cu_seqlens)
        return self._drive(self.project_in(layout.arrange(u)), self._fitting(state, layout.rows), layout)

    def _drive(self, uz: Tensor, state: NajuState, layout: Layout) -> ScanArguments:
        u_tilde, z = uz.chunk(2, dim=-1)  # (b, l, d) each
        plain = self.backend in PLAIN_BACKENDS
        (h,) = convolve(u_tilde, state.u_tail, layout, [self.conv.weight], [self.conv.bias], silu=True, plain=plain)
        f_logit, i_logit = self.forget_and_write(gate_logits(self.gates(), h, state.h_tail, layout, plain=plain))
        f_logit, i_logit = layout.hold(f_logit, i_logit)
        B, C = self.project_BC(h).chunk(2, dim=-1)  # (b, l, n) each
        return ScanArguments(h, f_logit, i_logit, B, C, z)

    def step(self, u: Tensor, state: NajuState) -> tuple[Tensor, NajuState]:
        self.check_input(u, 2)
        state = self._fitting(state, u.shape[0])
        uz = self.project_in(u)  # (b, 2d)
        inputs = self._step_inputs(uz, state)
        kernel = None if inputs is None else step_kernel(inputs)
        y, *after = self._torch_step(uz, state) if inputs is None or kernel is None else kernel(*inputs)
        return self.project_out(y), NajuState(*after)

    def _torch_step(self, uz: Tensor, state: NajuState) -> tuple[Tensor, ...]:
        """y (b, d) and the next state: what the kernels compute, for every device, precision and derivative."""
        u_tilde, z = uz.chunk(2, dim=-1)  # (b, d) each
        u_past = [*state.u_tail.to(u_tilde.dtype).unbind(1), u_tilde]
        h = F.silu(weighted_sum(u_past, self.conv.weight, self.conv.bias)).to(u_tilde.dtype)
        h_past = [*state.h_tail.to(h.dtype).unbind(1), h]
        f_logit, i_logit = self.forget_and_write([gate.step(h, h_past) for gate in self.gates()])
        B, C = self.project_BC(h).chunk(2, dim=-1)  # (b, n) each
        y, x = naju_step(state.x, h, f_logit, i_logit, B, C, alpha=self.alpha, D=self.D, z=z)
        return y, x, *(torch.stack(past, dim=1)[:, 1:] for past in (u_past, h_past))

    def _step_inputs(self, uz: Tensor, state: NajuState) -> StepInputs | None:
        """What the step kernels read; None where a projection is not one plain matrix."""
        gates = self.gates()
        full_rank = all(isinstance(gate.reduce, nn.Identity) for gate in gates)
        if not full_rank or not self._is_plain():
            return None
        return StepInputs(
            uz=uz,
            x=state.x,
            u_tail=state.u_tail,
            h_tail=state.h_tail,
            conv_taps=self.conv.weight,
            conv_bias=self.conv.bias,
            gate_weights=[gate.weight.weight for gate in gates],
            gate_taps=[gate.conv.weight for gate in gates],
            gate_biases=[gate.bias for gate in gates],
            W_BC=self.project_BC.weight,
            D=self.D,
            alpha=self.alpha,
            gate_scale=gates[0].scale,
        )

    def init_state(self, batch: int) -> NajuState:
        weight = self.conv.weight  # a quantised projection has none
        tails = weight.new_zeros(2, batch, self.tail_length, self.d_inner)
        dtype = state_dtype(weight.dtype)
        return NajuState(weight.new_zeros(batch, self.d_inner, self.d_state, dtype=dtype), *tails.unbind())

    @property
    def state_size(self) -> int:
        return self.d_inner * self.d_state

    def _fitting(self, state: NajuState | None, rows: int) -> NajuState:
        tail = (self.tail_length, self.d_inner)
        fitting: NajuState = self.fitting(state, rows, x=(self.d_inner, self.d_state), u_tail=tail, h_tail=tail)
        return fitting
