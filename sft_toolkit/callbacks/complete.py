"""`COMPLETE`: the file that a checkpoint folder gets when everything else in it is written."""

from __future__ import annotations

from typing import Any

from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from sft_toolkit.callbacks.files import in_output_dir
from sft_toolkit.checkpoints.marker import mark_complete, marked_as_it_is


class CompleteCallback(TrainerCallback):
    """Marks each checkpoint as complete, after every rank has written its part (random states, ZeRO shards).

    A stock Trainer writes straight into the final folder and sends `on_save` when it is done, so a folder without the
    mark is one that a crash or a full disk cut short. SFTTrainer has marked its folder already; here the mark is
    renewed where another callback has added to it. Put it last.
    """

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if distributed.is_available() and distributed.is_initialized():
            distributed.barrier()
        # With save_on_each_node every machine has a folder of its own, to be marked by its first process.
        writes = state.is_world_process_zero or (args.save_on_each_node and state.is_local_process_zero)
        folder = in_output_dir(args, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if writes and folder.is_dir() and not marked_as_it_is(folder):
            mark_complete(folder)
