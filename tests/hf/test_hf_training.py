"""Training through transformers and PEFT against the same steps in plain torch."""

from __future__ import annotations

import pytest
import torch
from hf_cases import STACKS, plain_model, sentences, small_config, wrapped_model
from torch import Tensor, nn
from torch.nn import functional as F

from memories import EXACT, difference, unsettle
from naju import Classifier, LanguageModel
from naju.hf import NajuForCausalLM, NajuForSequenceClassification

FLOAT32_LOSS = 1e-5  # transformers computes the loss in float32, whatever the model's precision


def plain_loss(model: LanguageModel, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[0][:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stack", STACKS)
def test_gradients_are_the_plain_models(stack):
    plain, tokens = plain_model(stack), sentences(2, 9)
    model = NajuForCausalLM.from_plain(plain).train()
    got, want = gradients_of(model, model(tokens, labels=tokens).loss), gradients_of(plain, plain_loss(plain, tokens))
    assert len(got) == len(want)
    for name, gradient in want.items():
        assert difference(got[f"model.{name}"], gradient) <= FLOAT32_LOSS, name


@pytest.mark.parametrize("stack", ["naju", "hybrid"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_are_the_same_and_every_block_runs_twice(stack, reentrant):
    model, tokens, runs = wrapped_model(stack).train(), sentences(2, 9), []
    want = gradients_of(model, model(tokens, labels=tokens).loss)
    for block in model.model.backbone.blocks:
        block.norm.register_forward_hook(lambda *_: runs.append(1))
    # transformers 5.23 gave it another name
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")({"use_reentrant": reentrant})
    got = gradients_of(model, model(tokens, labels=tokens).loss)
    assert all(difference(got[name], gradient) <= EXACT for name, gradient in want.items())
    assert len(runs) == 2 * len(STACKS[stack])


def test_a_trainer_makes_the_steps_of_a_plain_loop(tmp_path):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    plain, tokens = plain_model(), sentences(4, 9)
    model = NajuForCausalLM.from_plain(plain)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    trainer.train()

    optimizer, losses = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0), []
    for _ in range(4):
        loss = plain_loss(plain, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    assert logged == pytest.approx(losses, rel=1e-4)
    held_out = sentences(2, 9, seed=5)
    assert trainer.evaluate([{"input_ids": row, "labels": row} for row in held_out])["eval_loss"] == pytest.approx(
        plain_loss(plain, held_out).item(), rel=1e-4
    )


LORA_TARGETS = ["project_in", "project_BC", "project_out", "forget.weight", "write.weight"]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks by that name
def test_lora_on_the_projections_is_a_low_rank_sum_with_them():
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    plain, tokens = plain_model(), sentences(2, 7)
    wrapped = NajuForCausalLM.from_plain(plain)
    settings = peft.LoraConfig(r=2, lora_alpha=6, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
    model = peft.get_peft_model(wrapped, settings).double()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * len(LORA_TARGETS) * len(plain.backbone.blocks)
    assert all("lora_" in name for name in trained)
    assert torch.equal(model(tokens).logits, plain(tokens)[0])  # it starts as no change

    adapters = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    with torch.no_grad():
        for name, module in adapters.items():
            down, up = module.lora_A["default"].weight, module.lora_B["default"].weight.normal_(std=0.1)
            plain.get_submodule(name.split("model.")[-1]).weight += 3 * up @ down
    want = plain(tokens)[0]
    assert difference(model(tokens).logits, want) <= EXACT
    out = model.generate(input_ids=tokens, max_new_tokens=6, do_sample=False)
    assert torch.equal(out, plain.generate(tokens, 6))

    model.train()
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained
    assert difference(model.merge_and_unload()(tokens).logits, want) <= EXACT


def one_step(folder, gathered):
    """The weights after one update by eight rows, in `gathered` batches."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    plain = Classifier(small_config(), 3)
    unsettle(plain)
    model = NajuForSequenceClassification.from_plain(plain)
    tokens = sentences(8, 6)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=8 // gathered,
        gradient_accumulation_steps=gathered,
        learning_rate=1e-2,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    rows = [{"input_ids": row, "labels": label % 3} for label, row in enumerate(tokens)]
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    return model.score.weight.detach()


def test_a_classifier_takes_the_same_step_from_one_batch_and_from_four_gathered_ones(tmp_path):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    assert difference(one_step(tmp_path / "four", 4), one_step(tmp_path / "one", 1)) <= 1e-5
