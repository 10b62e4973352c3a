"""The real package lm_eval against `nemorl serve`: its loglikelihoods are those of transformers.

It runs with the interpreter in NEMORL_LM_EVAL_PYTHON (tools/libraries.sh).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.required import missing

PYTHON = os.environ.get("NEMORL_LM_EVAL_PYTHON")
if PYTHON is None:
    missing("lm_eval", "NEMORL_LM_EVAL_PYTHON names no interpreter with lm_eval (make libraries)")

ROWS = [
    {"question": "9 + 5 =", "choices": ["14", "15", "4"], "answer": 0},
    {"question": "20 - 3 =", "choices": ["23", "17"], "answer": 1},
    {"question": "1 + 1 =", "choices": ["2", "11", "3"], "answer": 0},
]
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.ci
def test_loglikelihoods_of_the_harness_are_those_of_transformers(served_model: Path, tmp_path: Path) -> None:
    data, tasks = tmp_path / "sums.json", tmp_path / "tasks"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tasks.mkdir()
    (tasks / "sums.yaml").write_text(TASK.replace("DATA", str(data)))
    command = [sys.executable, "-m", "nemorl.cli", "serve", str(served_model)]
    options = ["generation.endpoint={port: 0}", "generation.threads=1"]
    server = subprocess.Popen([*command, *options], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        told: dict[str, str] = {}
        while "key" not in told:
            line = server.stdout.readline()
            assert line, told
            name, _, value = line.strip().partition(": ")
            told[name] = value
        settings = [
            f"model={served_model.name}",
            f"base_url={told['endpoint']}/completions",
            "tokenizer_backend=huggingface",
            f"tokenizer={served_model}",
            "max_length=64",
        ]
        words = ["--model", "local-completions", "--model_args", ",".join(settings), "--tasks", "sums"]
        words += ["--include_path", str(tasks), "--batch_size", "4", "--log_samples"]
        words += ["--output_path", str(tmp_path / "out")]
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OPENAI_API_KEY": told["key"]}
        done = subprocess.run(
            [PYTHON or "", "-m", "lm_eval", *words],
            env=os.environ | offline,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        server.terminate()
        server.wait(60)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_sums_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(served_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(served_model)
    compared, right = 0, 0
    for sample in sorted(found, key=lambda sample: sample["doc_id"]):
        row = ROWS[sample["doc_id"]]
        sums = []
        for choice, answer in zip(row["choices"], sample["filtered_resps"], strict=True):
            start = tokenizer.encode(row["question"], add_special_tokens=False)
            whole = tokenizer.encode(f"{row['question']} {choice}", add_special_tokens=False)
            with torch.no_grad():
                logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            places = range(len(start) - 1, len(whole) - 1)
            own = sum(logprobs[place, whole[place + 1]].item() for place in places)
            is_greedy = all(logprobs[place].argmax() == whole[place + 1] for place in places)
            assert float(answer[0]) == pytest.approx(own, abs=1e-3), (row, choice)
            assert answer[1] in (is_greedy, str(is_greedy))
            sums.append(own)
            compared += 1
        right += sums.index(max(sums)) == row["answer"]
    assert compared == 8
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["sums"]["acc,none"] == pytest.approx(right / 3)
