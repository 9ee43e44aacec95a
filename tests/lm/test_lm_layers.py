"""What the layers of a language model add, by hand, and the command that prints it."""

import pytest
import torch
from tiny_language import prepare

from naju import LanguageModel, ModelConfig
from naju.analysis import layer_sizes, tau_e_from_logit
from naju.cli import main
from naju.lm.folder import save_model


def build(*mixers, **options):
    torch.manual_seed(0)
    return LanguageModel(
        ModelConfig(vocab_size=17, d_model=16, n_layers=len(mixers), mixer=list(mixers), mixer_options=options)
    ).eval()


def size(tensor):
    return tensor.square().mean().sqrt().item()


def test_each_layer_reads_what_the_ones_before_have_added():
    model, tokens = build("naju", "retnet"), torch.randint(17, (3, 20))
    with torch.no_grad():
        embedded = model.backbone.embedding(tokens)
        between, _ = model.backbone.blocks[0](embedded, None, None, None)
        after, _ = model.backbone.blocks[1](between, None, None, None)
    first, second = layer_sizes(model.backbone, tokens)
    assert first[:2] == pytest.approx((size(embedded), size(between - embedded)))
    assert second[:2] == pytest.approx((size(between), size(after - between)))
    assert first.sources is not None
    assert second.sources is None


def test_gates_and_sources_are_those_of_the_scan():
    """With constant gates and without memory, what is left is known."""
    model, tokens = build("naju"), torch.randint(17, (2, 12))
    mixer = model.backbone.blocks[0].mixer
    with torch.no_grad():
        for gate in mixer.gates():
            gate.weight.weight.zero_()
            gate.conv.weight.zero_()
        mixer.project_BC.weight.zero_()
        mixer.D.fill_(2.0)
        h = mixer.scan_arguments(model.backbone.blocks[0].norm(model.backbone.embedding(tokens))).h
    (layer,) = layer_sizes(model.backbone, tokens)
    memory, write, read, fed_through = layer.sources
    assert memory == pytest.approx(float(tau_e_from_logit(5.0)), rel=1e-5)
    assert write == pytest.approx(torch.tensor(-2.0).sigmoid().item(), rel=1e-5)
    assert read == 0.0
    assert fed_through == pytest.approx(2 * size(h.detach()), rel=1e-5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    save_model(build("naju", "retnet"), folder / "model")
    return str(folder / "model"), str(prepare(folder / "data"))


def test_the_command_prints_a_line_a_layer(folders, capsys):
    model, data = folders
    main(["lm", "layers", model, "--data", data, "--length", "16", "--device", "cpu"])
    head, naju, retnet, legend = capsys.readouterr().out.splitlines()
    assert len(naju.split()) == 7
    assert len(retnet.split()) == 3
    assert "memory" in head
    assert "root mean squares" in legend


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--length", "0"], "length must be a positive integer, but is 0"),
        (["--length", "300"], "sequences times length must be at most the split's 333 tokens, but is 1,200"),
    ],
)
def test_more_than_there_is_is_refused(folders, capsys, arguments, sentence):
    model, data = folders
    with pytest.raises(SystemExit) as ended:
        main(["lm", "layers", model, "--data", data, *arguments])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
