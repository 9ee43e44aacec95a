"""The standard harness runs a wrapped model on a task from a local file, without an adapter of its own."""

from __future__ import annotations

import json
import math

import pytest
import torch

from naju.hf import NajuForCausalLM
from naju.lm.tokenizer import load_tokenizer
from naju.models import LanguageModel, ModelConfig

QUESTIONS = [
    {"query": "To be, or not to", "choices": [" be", " have", " go there at once"], "gold": 0},
    {"query": "The king is", "choices": [" dead", " not in the garden"], "gold": 1},
    {"query": "Good", "choices": [" night, sweet prince", " morrow"], "gold": 1},
]
TASK = """
task: three_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: query
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def score(model: LanguageModel, query: list[int], choice: list[int]) -> float:
    """Log-probability of the choice after the query."""
    tokens = torch.tensor([query + choice])
    chances = model(tokens)[0].log_softmax(-1)[0, len(query) - 1 : -1]
    return chances.gather(1, tokens[0, len(query) :].unsqueeze(1)).sum().item()


@pytest.mark.filterwarnings("default")  # the harness has warnings of its own
def test_an_offline_task_scores_as_the_plain_model_does(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    pytest.importorskip("datasets", reason="lm-eval needs datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerFast

    tokenizer = load_tokenizer("bytes")
    plain = LanguageModel(ModelConfig(tokenizer.vocabulary.size, 16, 2, embedding_std=1.0)).eval()
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "task.yaml").write_text(TASK.format(file=tmp_path / "questions.jsonl"))
    tokenizer.save(tmp_path)
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>")

    results = simple_evaluate(
        HFLM(pretrained=NajuForCausalLM.from_plain(plain), tokenizer=fast, batch_size=2, device="cpu"),
        tasks=["three_questions"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    right = []
    for sample, question in zip(results["samples"]["three_questions"], QUESTIONS, strict=True):
        texts = [question["query"], *question["choices"]]
        query, *choices = [tokenizer.encode(text) for text in texts]
        want = [score(plain, query, choice) for choice in choices]
        got = [float(answer[0][0]) for answer in sample["resps"]]
        assert all(math.isclose(mine, theirs, rel_tol=1e-4) for mine, theirs in zip(got, want, strict=True))
        right.append(want.index(max(want)) == question["gold"])
    assert results["results"]["three_questions"]["acc,none"] == pytest.approx(sum(right) / len(right))
