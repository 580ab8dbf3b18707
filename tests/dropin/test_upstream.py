"""What is overridden of Trainer, and how it looked when it was: an upgrade that changes it fails here, by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from transformers import Trainer

from sft_toolkit import SFTTrainer

PINNED = {
    "__init__": "(self, model=None, args=None, data_collator=None, train_dataset=None, eval_dataset=None, "
    "processing_class=None, model_init=None, compute_loss_func=None, compute_metrics=None, callbacks=None, "
    "optimizers=(None, None), optimizer_cls_and_kwargs=None, preprocess_logits_for_metrics=None)",
    "train": "(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None)",
    "get_train_dataloader": "(self)",
    "get_eval_dataloader": "(self, eval_dataset=None)",
    "get_test_dataloader": "(self, test_dataset)",
    "get_batch_samples": "(self, epoch_iterator, num_batches, device)",
    "training_step": "(self, model, inputs, num_items_in_batch=None)",
    "compute_loss": "(self, model, inputs, return_outputs=False, num_items_in_batch=None)",
    "evaluation_loop": "(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, "
    "metric_key_prefix='eval')",
    "hyperparameter_search": "(self, hp_space=None, compute_objective=None, n_trials=20, direction='minimize', "
    "backend=None, hp_name=None, **kwargs)",
    "log": "(self, logs, start_time=None)",
    "floating_point_ops": "(self, inputs)",
    "save_model": "(self, output_dir=None, _internal_call=False)",
    "create_optimizer": "(self, model=None)",
    "set_initial_training_values": "(self, args, dataloader)",
    # private: Trainer has no public place around these
    "_get_output_dir": "(self, trial)",
    "_save_checkpoint": "(self, model, trial)",
    "_push_from_checkpoint": "(self, checkpoint_folder)",
    "_save": "(self, output_dir=None, state_dict=None)",
    "_save_optimizer_and_scheduler": "(self, output_dir)",
    "store_flos": "(self)",
    "_clip_grad_norm": "(self, model)",
    "_get_grad_norm": "(self, model, grad_norm=None)",
}
ATTRIBUTES = {"loss_is_scaled_for_ga": None}
NO_METHODS = {"__module__", "__doc__", "__annotations__", "__firstlineno__", "__static_attributes__"}


def overridden() -> set[str]:
    """Names that one of our classes defines and Trainer has too."""
    ours = SFTTrainer.__mro__[: SFTTrainer.__mro__.index(Trainer)]
    return {name for cls in ours for name in vars(cls) if hasattr(Trainer, name)} - NO_METHODS


def bare(function: Any) -> str:
    """A signature without its types."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_everything_overridden_is_pinned() -> None:
    assert overridden() <= PINNED.keys() | ATTRIBUTES.keys()


@pytest.mark.parametrize("name", PINNED)
def test_the_method_of_trainer_is_as_it_was(name: str) -> None:
    assert bare(getattr(Trainer, name)) == PINNED[name]


@pytest.mark.parametrize("name", sorted(PINNED.keys() - {"__init__"}))
def test_ours_takes_what_trainers_takes(name: str) -> None:
    for cls in SFTTrainer.__mro__[: SFTTrainer.__mro__.index(Trainer)]:
        if name not in vars(cls):
            continue
        signature = inspect.signature(vars(cls)[name])
        upstream = list(inspect.signature(getattr(Trainer, name)).parameters)
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
        assert takes_any or list(signature.parameters) == upstream, cls.__name__


def test_attributes_of_trainer_are_as_they_were() -> None:
    assert {name: inspect.getattr_static(Trainer, name) for name in ATTRIBUTES} == ATTRIBUTES
