"""Memory of the loss: a vocabulary of 150,000 and 1,024 tokens never cost what their logits would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

VOCABULARY, LENGTH = 150_000, 512
# A peak of resident memory is one of a whole process, so the growth of a training is measured in a process of its own.
MEASURE = f"""
import json, resource, sys
from pathlib import Path
import torch
from datasets import Dataset
from sft_toolkit import SFTTrainer
from sft_toolkit.data.token_dataset import RowsDataset
from tests.tiny import tiny_model
from tests.training import sgd_arguments

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

grown = {{}}
model = tiny_model(vocab_size={VOCABULARY}, max_position_embeddings={LENGTH})
for every in (20, 1):
    ids = torch.randint(5, {VOCABULARY}, (2, {LENGTH})).tolist()
    labels = [[token if i % every == 0 else -100 for i, token in enumerate(row)] for row in ids]
    rows = RowsDataset(Dataset.from_dict({{"input_ids": ids, "labels": labels}}))
    args = sgd_arguments(Path(sys.argv[1]), per_device_train_batch_size=2, max_length={LENGTH}, max_steps=2)
    trainer = SFTTrainer(model, args, None, rows)
    before = peak()
    trainer.train()
    grown[str(every)] = peak() - before
    labelled = trainer.state.log_history[0]["supervised_tokens"]
    assert labelled == sum(label != -100 for row in labels for label in row[1:]), labelled
print(json.dumps(grown))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no getrusage")
def test_the_peak_stays_under_two_tensors_of_logits_however_many_labels_there_are(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    grown = json.loads(done.stdout.splitlines()[-1])
    logits = 4 * 2 * LENGTH * VOCABULARY  # of all positions in fp32: 586 MiB
    assert grown["20"] < 0.5 * logits  # 5 % of the tokens carry a label; all logits and their gradients would be 3
    assert grown["1"] < 0.5 * logits  # every token does
