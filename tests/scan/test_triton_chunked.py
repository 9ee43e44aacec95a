"""The chunked Triton scan against the float64 loop: in the interpreter without a GPU, on the device with one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from interpreter import passes_under_the_interpreter
from naju.scan import BACKENDS
from naju.scan.dispatch import ScanInputs, check_inputs
from naju.scan.triton_chunked import TRITON_CHUNKED, launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # triton looks at this once, when it is imported
IN_ANY_PROCESS = (
    "test_under_the_interpreter",
    "test_every_kernel_compiles",
    "test_importing_the_backend",
    "test_wrong_boundaries",
    "test_boundaries",
)

# the interpreter computes both branches of a `where`, and says so when the one not taken overflows
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.fixture(autouse=True)
def _runs_kernels(request: pytest.FixtureRequest) -> None:
    if DEVICE == "cpu" and not INTERPRETED and not request.node.name.startswith(IN_ANY_PROCESS):
        pytest.skip("test_under_the_interpreter runs it")


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the tests run in this process")
def test_under_the_interpreter() -> None:
    passes_under_the_interpreter(__file__, "-m", "not slow", seconds=900)


HOLDING_WITH_OVERWRITES = {f"overwrites at {depth:g}": depth for depth in (-6, -12, -20, -100, -1e4)}
REGIMES = ["normal", *HOLDING_WITH_OVERWRITES, "forgetting at -8", "forgetting at -15", "holding at 10", "infinite"]
# error of outputs, error of gradients
TOLERANCE = {torch.float32: (2e-6, 1e-5), torch.bfloat16: (1e-2, 1e-2), torch.float16: (1e-3, 1e-3)}
GIVEN = ("h", "f_logit", "i_logit", "B", "C")


def relative_rms(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def gate_logits(regime, shape, generator):
    noise, chance = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    if regime == "normal":
        return noise
    if regime == "infinite":
        logits = torch.where(chance < 0.1, torch.tensor(-torch.inf), 6 + noise)
        return torch.where(chance > 0.9, torch.tensor(torch.inf), logits)
    if regime in HOLDING_WITH_OVERWRITES:
        return torch.where(chance < 0.05, torch.tensor(float(HOLDING_WITH_OVERWRITES[regime])), 6 + noise)
    return float(regime.split()[-1]) + noise


def make(b, l, d, n, *, regime="normal", dtype=torch.float32, sequences=None, seed=0):  # noqa: E741
    generator = torch.Generator().manual_seed(seed)
    shapes = {"h": (b, l, d), "i_logit": (b, l, d), "B": (b, l, n), "C": (b, l, n), "D": (d,), "z": (b, l, d)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["f_logit"] = gate_logits(regime, (b, l, d), generator)
    if regime == "infinite":
        tensors["i_logit"] = gate_logits(regime, (b, l, d), generator)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors["initial_state"] = torch.randn((sequences or b, d, n), generator=generator)
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def inputs_from(tensors, *, alpha=None, cu_seqlens=None, reverse=False) -> ScanInputs:
    optional = {name: tensors.get(name) for name in ("D", "z", "initial_state")}
    return check_inputs(
        *(tensors[name] for name in GIVEN), alpha=alpha, cu_seqlens=cu_seqlens, reverse=reverse, **optional
    )


def outputs_and_gradients(backend, tensors, dtype=None, **options):
    leaves = {name: tensor.detach().to(dtype or tensor.dtype).requires_grad_() for name, tensor in tensors.items()}
    y, state = backend.run(inputs_from(leaves, **options))
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(y.shape, generator=generator).to(tensors["h"].dtype).to(y)]
    cotangents += [torch.randn(state.shape, generator=generator).to(state)]
    gradients = torch.autograd.grad((y, state), list(leaves.values()), cotangents)
    return {"y": y, "state": state} | {f"d{name}": grad for name, grad in zip(leaves, gradients, strict=True)}


def check(tensors, **options):
    got = outputs_and_gradients(TRITON_CHUNKED, tensors, **options)
    want = outputs_and_gradients(BACKENDS["reference"], tensors, torch.float64, **options)
    for_outputs, for_gradients = TOLERANCE[tensors["h"].dtype]
    errors = {name: relative_rms(got[name], want[name]) for name in want if want[name].norm() > 0}
    too_large = {
        name: e for name, e in errors.items() if not e <= (for_outputs if name in "y state" else for_gradients)
    }
    assert not too_large
    assert all(bool((got[name] == 0).all()) for name in want if want[name].norm() == 0)
    assert got["y"].dtype == tensors["h"].dtype
    assert all(got[f"d{name}"].dtype == tensor.dtype for name, tensor in tensors.items())


@pytest.fixture(params=[0, 10_000], ids=["one segment", "many segments"])
def processors(request, monkeypatch):
    monkeypatch.setattr(launch, "_processors", lambda device: request.param)


@pytest.mark.parametrize("regime", REGIMES)
def test_float32_agrees_in_every_regime(regime, processors):
    check(make(1, 53, 5, 3, regime=regime))


@pytest.mark.parametrize("regime", REGIMES)
def test_bfloat16_agrees_in_every_regime(regime):
    check(make(1, 75, 6, 8, regime=regime, dtype=torch.bfloat16))


@pytest.mark.parametrize("regime", ["normal", "forgetting at -15", "infinite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_values_do_not_overflow(regime, dtype):
    """A write times B · C is about 2^22 here; where whole leaves forget, a factor of 2^115 was once too much for it."""
    tensors = make(1, 75, 6, 8, regime=regime, dtype=dtype)
    check(tensors | {name: 100 * tensors[name] for name in ("h", "B", "C")})


@pytest.mark.parametrize("shape", [(2, 1, 3, 1), (2, 33, 40, 24), (1, 16, 16, 16), (1, 20, 9, 130), (3, 17, 2, 5)])
@pytest.mark.parametrize("reverse", [False, True])
def test_any_shape_in_both_directions(shape, reverse, processors):
    check(make(*shape), reverse=reverse)


@pytest.mark.parametrize("left_out", [("D",), ("z",), ("D", "z"), ("initial_state",)])
def test_optional_arguments(left_out):
    tensors = {name: tensor for name, tensor in make(2, 20, 4, 3).items() if name not in left_out}
    got = TRITON_CHUNKED.run(inputs_from(tensors, alpha=0.3))
    want = BACKENDS["reference"].run(inputs_from({k: v.double() for k, v in tensors.items()}, alpha=0.3))
    assert all(relative_rms(g, w) < 2e-6 for g, w in zip(got, want, strict=True))
    if "initial_state" not in left_out:
        check(tensors, alpha=0.3)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_sequences(reverse, index_dtype, processors):
    boundaries = torch.tensor([0, 0, 7, 40, 41, 41, 60], dtype=index_dtype, device=DEVICE)
    check(make(1, 60, 5, 4, sequences=6), cu_seqlens=boundaries, reverse=reverse)


def test_a_poisoned_neighbour_changes_nothing(processors):
    boundaries = torch.tensor([0, 7, 30, 50], device=DEVICE)
    clean = make(1, 50, 5, 4, sequences=3)
    poisoned = {name: tensor.clone() for name, tensor in clean.items()}
    for name in (*GIVEN, "z"):
        poisoned[name][:, 7:30] = torch.nan
    poisoned["initial_state"][1] = torch.nan
    results = [outputs_and_gradients(TRITON_CHUNKED, tensors, cu_seqlens=boundaries) for tensors in (clean, poisoned)]
    for name in results[0]:
        if name == "dD":
            continue
        rows = [0, 2] if "state" in name else [*range(7), *range(30, 50)]
        first, second = (r[name] if "state" in name else r[name][0] for r in results)
        assert torch.equal(first[rows], second[rows]), name


def test_open_forget_and_closed_write_hold_the_state_bit_for_bit():
    tensors = make(1, 40, 5, 4)
    tensors["f_logit"].fill_(torch.inf)
    tensors["i_logit"].fill_(-torch.inf)
    _, state = TRITON_CHUNKED.run(inputs_from(tensors))
    assert torch.equal(state, tensors["initial_state"])


def test_a_closed_forget_gate_leaves_nothing_of_the_past():
    tensors = make(1, 40, 5, 4)
    tensors["f_logit"][:, 20] = -torch.inf
    other = tensors | {"initial_state": tensors["initial_state"] + 100, "h": tensors["h"].clone()}
    other["h"][:, :20] += 100
    first, second = (TRITON_CHUNKED.run(inputs_from(t | {"z": None})) for t in (tensors, other))
    assert relative_rms(second[1], first[1]) < 1e-6
    assert relative_rms(second[0][:, 20:], first[0][:, 20:]) < 1e-6


def test_strided_and_mixed_inputs():
    wide = make(2, 20, 8, 3)
    tensors = make(2, 20, 4, 3)
    tensors |= {"h": wide["h"][..., 4:], "z": wide["z"][..., ::2]}
    tensors["f_logit"] = wide["f_logit"].transpose(0, 1).contiguous().transpose(0, 1)[..., :4]
    check(tensors)
    half = make(2, 20, 4, 3, dtype=torch.bfloat16)
    check(half | {"D": half["D"].float(), "f_logit": half["f_logit"].float(), "B": half["B"].half()})


def test_one_token_of_a_batch_that_lies_time_first():
    """torch calls it contiguous whatever the stride of its one token is."""
    tensors = make(3, 1, 4, 2)
    for name in (*GIVEN, "z"):
        tensors[name] = torch.stack(list(tensors[name].unbind(1))).transpose(0, 1)
    assert tensors["h"].stride() == (4, 12, 1)
    check(tensors)


def test_two_runs_are_equal():
    tensors = make(1, 40, 5, 4)
    first, second = (outputs_and_gradients(TRITON_CHUNKED, tensors) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_operator_keeps_torchs_contract():
    tensors = make(1, 20, 3, 2)
    arguments = [tensors[name].requires_grad_() for name in (*GIVEN, "D", "z", "initial_state")]
    torch.library.opcheck(torch.ops.naju.triton_chunked.default, (*arguments, None, 0.5, False, True))


def test_another_number_of_packed_sequences_compiles_nothing():
    def packed(*tensors, cu_seqlens):
        return TRITON_CHUNKED.run(inputs_from(dict(zip(GIVEN, tensors, strict=True)), cu_seqlens=cu_seqlens))

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(packed, fullgraph=True, dynamic=True, backend=counter)
    try:
        for inner in ([3], [3, 8, 9], [1, 2, 5, 7, 11], [2, 4, 4, 6, 8, 10, 12]):
            tensors = make(1, 20, 4, 3)
            cu_seqlens = torch.tensor([0, *inner, 20], device=DEVICE)
            y, _ = compiled(*(tensors[name].requires_grad_() for name in GIVEN), cu_seqlens=cu_seqlens)
            y.sum().backward()
    finally:
        torch.compiler.reset()
    assert counter.frame_count <= 2  # a number that changes becomes a symbol


def test_a_scan_without_gradient_keeps_no_states(monkeypatch):
    monkeypatch.setattr(launch, "kept_states", lambda *arguments: pytest.fail("states were kept"))
    TRITON_CHUNKED.run(inputs_from(make(1, 20, 3, 2)))


def test_refusals_name_their_reason(monkeypatch):
    assert "float64" in TRITON_CHUNKED.refuses(inputs_from({k: v.double() for k, v in make(1, 2, 2, 2).items()}))
    assert "257" in TRITON_CHUNKED.refuses(inputs_from(make(1, 2, 2, 257)))
    assert TRITON_CHUNKED.refuses(inputs_from(make(1, 2, 2, 2))) is None
    on_meta = inputs_from({name: tensor.to("meta") for name, tensor in make(1, 2, 2, 2).items()})
    assert "NVIDIA" in TRITON_CHUNKED.refuses(on_meta)
    if DEVICE == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET")
        assert "NVIDIA GPU" in TRITON_CHUNKED.missing_here()


def test_importing_the_backend_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import naju.scan.triton_chunked as backend; print(backend)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("wrong", [[0, -5, 90, 10, 60], [70, 60, 50, 0, -1], [0, 2**40, 3, 60, 60], [5, 5, 5, 5, 5]])
def test_wrong_boundaries_stay_inside(wrong):
    """On a GPU nobody waits to look at them, so every piece must lie within the tensors whatever they are."""
    pieces = launch.cut(torch.empty(1, 60, 4), 4, torch.tensor(wrong), launch.Tile(channels=16), 16)
    tables = pieces.tables
    boundaries = tables["boundaries"]
    assert boundaries.min() >= 0
    assert boundaries.max() <= 60
    assert (boundaries.diff() >= 0).all()
    assert tables["firsts"][-1] <= pieces.n_segments
    assert tables["first_chunks"][-1] <= pieces.n_chunks


def test_boundaries_of_the_host_go_to_where_the_scan_is():
    h = torch.empty(1, 60, 4, device="meta")
    pieces = launch.cut(h, 2, torch.tensor([0, 20, 60]), launch.Tile(channels=16), 16)
    assert {table.device for table in pieces.tables.values()} == {h.device}


def kernels_of(d_state, dtype):
    """Every kernel that a scan and its backward launch, with its tile and the constants of its configuration."""
    from naju.scan.triton_chunked import backward, forward, gates

    config = launch.configuration(d_state, dtype)
    common = {
        "BN": launch.padded_state(d_state),
        "PRECISION": config.precision,
        "LEAF": config.leaf,
        "CHUNK": config.chunk,
        "KEPT": config.chunk // launch.BLOCK,
        "WIDTH": 4,
    }
    common |= dict.fromkeys(["HAS_GATE", "HAS_D", "HAS_Z", "KEEP", "PACKED", "HELD"], True) | {"REVERSE": False}
    yield gates.gates, launch.LOGARITHMS_TILE, config.chunk, common
    for kernel, tile in [
        (gates.convolve_silu, config.convolution),
        (gates.convolve_silu_backward, config.convolution_backward),
        (gates.convolved_gates, config.gates),
        (gates.convolved_gates_backward, config.gates_backward),
    ]:
        yield kernel, tile, config.chunk, common | {"STEP": tile.step}
    yield forward.states, config.states, config.chunk, common | {"ADJOINT": False}
    yield forward.states, config.states, config.chunk, common | {"ADJOINT": True}
    yield forward.carry, launch.CARRY_TILE, launch.CARRY_BLOCK, common | {"ADJOINT": False}
    yield forward.outputs, config.outputs, launch.BLOCK, common | {"KEEP": False}
    yield forward.outputs, config.outputs_keeping, launch.BLOCK, common
    yield backward.channel_gradients, config.channels, launch.BLOCK, common
    yield backward.key_gradients, config.keys, config.chunk, common


def signature_of(kernel, constants, dtype):
    half = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    gate = "*fp32" if dtype == torch.float32 else "*fp16"
    types = dict.fromkeys(
        ["ends", "decays", "initial", "entering", "leaving", "final", "dinitial", "dD", "partial"], "*fp32"
    )
    types |= dict.fromkeys(["boundaries", "owners", "firsts", "first_chunks", "chunk_owners", "lengths"], "*i64")
    types |= dict.fromkeys(["kept", "adjoints"], "*bf16" if dtype == torch.bfloat16 else "*fp32")
    types |= dict.fromkeys(["log_f", "log_i"], gate) | {"alpha": "fp32"}
    types |= dict.fromkeys(["f_taps", "i_taps", "f_bias", "i_bias", "weight", "bias"], "*fp32")
    tensors = ["h", "f_logit", "i_logit", "z", "B", "C", "D", "value", "keys", "y", "u", "tail", "out"]
    types |= dict.fromkeys(["gate", *tensors, *(f"d{name}" for name in tensors), "df", "di"], half) | {"dD": "*fp32"}
    if kernel.__name__ == "states" and not constants["ADJOINT"]:
        types["gate"] = gate
    return {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}


# a sequence that begins, and a state that nobody differentiates
ABSENT = {
    "convolve_silu": ["tail"],
    "convolved_gates": ["tail"],
    "convolved_gates_backward": ["tail", "dtail"],
    "convolve_silu_backward": ["tail", "dtail"],
    "carry": ["initial"],
    "channel_gradients": ["dinitial"],
}


def with_and_without(kernels):
    for kernel, tile, block, constants in kernels:
        yield kernel, tile, block, constants
        if kernel.__name__ in ABSENT:
            yield kernel, tile, block, constants | dict.fromkeys(ABSENT[kernel.__name__])


def compile_all(architecture, d_state, dtype):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, tile, block, constants in with_and_without(kernels_of(d_state, dtype)):
        constants = constants | {"BLOCK": block, "LEVELS": block.bit_length() - 1, "BD": tile.channels}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature_of(kernel, constants, dtype), constexprs=constants)
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
        options |= {} if tile.registers is None else {"maxnreg": tile.registers}
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        assert "cubin" in compiled.asm
        assert compiled.metadata.shared <= 99 * 1024, kernel.__name__


EVERY_CHIP = [(architecture, 64, "bfloat16") for architecture in (80, 89, 90, 100, 120)]
EVERY_CONFIGURATION = [
    (90, d_state, dtype) for dtype in ("bfloat16", "float16", "float32") for d_state in (8, 128, 256)
]
# The widest state on a chip with 99 KiB of shared memory, where products are laid out in another way than on sm_90.
WIDEST_IN_SMALL = [(89, 256, "bfloat16")]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "d_state", "dtype"), EVERY_CHIP + EVERY_CONFIGURATION + WIDEST_IN_SMALL)
def test_every_kernel_compiles_without_a_gpu(architecture, d_state, dtype):
    """In a process of its own: once the interpreter is on, nothing can be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, __file__, str(architecture), str(d_state), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    compile_all(int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3]))
