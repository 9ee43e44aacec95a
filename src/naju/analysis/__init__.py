"""What a Naju layer remembers of an input, why it stays bounded, and which memories other gates cannot have.

`observe_layer` records a layer on an input as a `ScanRun`; the functions here say what it did. See docs/analysis.md.
"""

from naju.analysis.frozen_response import FrozenResponse, freeze, horizon_logit, horizon_pole
from naju.analysis.gates import (
    FAMILIES,
    Pair,
    ReadoutGrowth,
    complementary_excess,
    complementary_pair,
    gated_rnn_limit,
    largest_write,
    naju_logits,
    naju_pair,
    reachable,
    readout_growth,
    rg_lru_pair,
    zoh_pair,
    zoh_small_step,
)
from naju.analysis.layer_sizes import LayerSizes, Sources, layer_sizes
from naju.analysis.memory_kernel import (
    Decomposition,
    EffectiveMemory,
    decompose,
    effective_memory,
    lag_mass,
    memory_kernel,
    retention_products,
    retention_to_end,
    tau_e,
    tau_e_from_logit,
)
from naju.analysis.observe import ScanRun, layer_input, observe_layer, observe_scan
from naju.analysis.picture import draw_memory, draw_reachable
from naju.analysis.stability import StabilityReport, stability_report

__all__ = [
    "FAMILIES",
    "Decomposition",
    "EffectiveMemory",
    "FrozenResponse",
    "LayerSizes",
    "Pair",
    "ReadoutGrowth",
    "ScanRun",
    "Sources",
    "StabilityReport",
    "complementary_excess",
    "complementary_pair",
    "decompose",
    "draw_memory",
    "draw_reachable",
    "effective_memory",
    "freeze",
    "gated_rnn_limit",
    "horizon_logit",
    "horizon_pole",
    "lag_mass",
    "largest_write",
    "layer_input",
    "layer_sizes",
    "memory_kernel",
    "naju_logits",
    "naju_pair",
    "observe_layer",
    "observe_scan",
    "reachable",
    "readout_growth",
    "retention_products",
    "retention_to_end",
    "rg_lru_pair",
    "stability_report",
    "tau_e",
    "tau_e_from_logit",
    "zoh_pair",
    "zoh_small_step",
]
