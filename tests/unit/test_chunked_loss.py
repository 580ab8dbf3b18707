"""Scoring in chunks gives the sums and the gradients of scoring at once, and never holds all logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sft_toolkit import SFTTrainer
from sft_toolkit.loss import supervised
from sft_toolkit.loss.chunked import chunk_rows, score_in_chunks
from sft_toolkit.loss.objectives import dft, focal, label_smoothing
from sft_toolkit.loss.reduction import score
from sft_toolkit.loss.supervised import SupervisedForward, before_head, head_is_plain, head_of
from tests.architectures import build, lora_on_the_head, with_biased_head
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import largest_difference, logged, lora, rows_with_labels, sgd_arguments

VOCABULARY, HIDDEN, TOKENS = 50, 16, 11


def adapted() -> nn.Module:
    model: Any = get_peft_model(build("Llama", vocab_size=VOCABULARY, hidden_size=HIDDEN), lora_on_the_head())
    return head_of(model)


HEADS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(HIDDEN, VOCABULARY, bias=False),
    "bias": lambda: nn.Linear(HIDDEN, VOCABULARY),
    "frozen": lambda: nn.Linear(HIDDEN, VOCABULARY).requires_grad_(False),
    "adapter": adapted,
}


def inputs(learned: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=learned)
    return hidden, torch.randint(0, VOCABULARY, (TOKENS,)), torch.rand(TOKENS)


@pytest.mark.parametrize("rows", [1, 3, 11, 100])
@pytest.mark.parametrize("name", HEADS)
def test_sums_and_gradients_are_those_of_all_logits_at_once(name: str, rows: int) -> None:
    head = HEADS[name]()
    found = []
    for chunked in (True, False):
        hidden, targets, _ = inputs()
        totals = score_in_chunks(head, hidden, targets, rows=rows) if chunked else score(head(hidden), targets)
        trained = [p for p in head.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(totals.loss * 0.37, [hidden, *trained])
        found.append((totals, gradients))
    (ours, our_gradients), (theirs, their_gradients) = found
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    assert ours.nll.item() == pytest.approx(theirs.nll.item(), rel=1e-6)
    assert ours.correct.item() == theirs.correct.item()
    for one, other in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("objective", [None, label_smoothing, focal, dft])
def test_objectives_and_weights_go_through_chunks(objective: Any) -> None:
    head, (hidden, targets, weights) = HEADS["bias"](), inputs()
    ours = score_in_chunks(head, hidden, targets, weights, objective, rows=4)
    theirs = score(head(hidden), targets, weights, objective)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    assert ours.nll.item() == pytest.approx(theirs.nll.item(), rel=1e-6)
    learned = [hidden, *head.parameters()]
    pairs = zip(torch.autograd.grad(ours.loss, learned), torch.autograd.grad(theirs.loss, learned), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_without_gradients_it_only_adds_up() -> None:
    head, (hidden, targets, weights) = HEADS["bias"](), inputs(learned=False)
    with torch.no_grad():
        ours, theirs = score_in_chunks(head, hidden, targets, weights, rows=4), score(head(hidden), targets, weights)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    assert ours.correct.item() == theirs.correct.item()
    assert not ours.loss.requires_grad


def test_only_the_head_learns_where_all_below_is_frozen() -> None:
    head, (hidden, targets, _) = HEADS["linear"](), inputs(learned=False)
    score_in_chunks(head, hidden, targets, rows=4).loss.backward()
    expected = torch.autograd.grad(score(head(hidden), targets).loss, list(head.parameters()))[0]
    torch.testing.assert_close(head.weight.grad, expected)


def test_no_supervised_token_is_a_zero_with_a_graph() -> None:
    head, (hidden, targets, _) = HEADS["linear"](), inputs()
    totals = score_in_chunks(head, hidden[:0], targets[:0], rows=4)
    totals.loss.backward()
    assert (totals.loss.item(), totals.nll.item(), totals.correct.item()) == (0.0, 0.0, 0)
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))  # type: ignore[arg-type]
    assert torch.equal(head.weight.grad, torch.zeros(VOCABULARY, HIDDEN))  # type: ignore[arg-type]


def test_its_gradient_is_taken_once() -> None:
    head, (hidden, targets, _) = HEADS["linear"](), inputs()
    loss = score_in_chunks(head, hidden, targets, rows=4).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be taken once"):
        loss.backward()


def test_autocast_computes_in_its_own_dtype_and_sums_in_fp32() -> None:
    head, (hidden, targets, _) = HEADS["bias"](), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = score_in_chunks(head, hidden, targets, rows=4), score(head(hidden), targets)
    assert ours.loss.dtype is torch.float32
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    learned = [hidden, *head.parameters()]
    pairs = zip(torch.autograd.grad(ours.loss, learned), torch.autograd.grad(theirs.loss, learned), strict=True)
    for one, other in pairs:
        assert one.dtype is torch.float32
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


class Largest(TorchDispatchMode):
    """The most elements that any tensor had which an operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("tokens", [64, 512])
def test_no_tensor_grows_with_tokens_times_vocabulary(tokens: int) -> None:
    vocabulary, rows = 5_000, 8
    head = nn.Linear(HIDDEN, vocabulary)
    hidden, targets = torch.randn(tokens, HIDDEN, requires_grad=True), torch.randint(0, vocabulary, (tokens,))
    with Largest() as largest:
        score_in_chunks(head, hidden, targets, rows=rows).loss.backward()
    assert largest.elements == vocabulary * HIDDEN  # the gradient of the head; a chunk of logits is half of it


def test_a_chunk_is_64_mib_of_logits_but_never_few_rows() -> None:
    assert chunk_rows(49_152, on_cpu=True) == 341
    assert chunk_rows(150_000, on_cpu=True) == 128
    assert chunk_rows(150_000, on_cpu=False) == 1024


# ---- Which models take this path -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: build("Llama"), True),
        (lambda: build("Llama", tie_word_embeddings=True), True),
        (lambda: with_biased_head(build("Llama")), True),
        (lambda: get_peft_model(build("Llama"), lora_on_the_head()), True),
        (lambda: build("Llama").to(torch.bfloat16), True),
        (lambda: build("Gemma2"), False),  # its cap of 30 is far above these small logits
        (lambda: build("Gemma2", final_logit_softcapping=None), True),
        (lambda: build("Cohere"), False),
        (lambda: build("Granite", logits_scaling=8.0), False),
        (lambda: build("Granite", logits_scaling=1.0), True),
    ],
    ids=["plain", "tied", "bias", "adapter", "bf16", "cap", "no-cap", "scale", "scaling", "scaling-of-1"],
)
def test_a_head_is_plain_where_nothing_comes_behind_it(make: Callable[[], Any], plain: bool) -> None:
    model = make().train()
    assert head_is_plain(model, model) is plain
    assert model.training
    assert not head_of(model)._forward_pre_hooks


def test_the_hook_is_gone_whatever_ends_the_forward() -> None:
    model = tiny_model()

    def fail(_: Tensor) -> Tensor:
        raise RuntimeError("in the head")

    with pytest.raises(RuntimeError, match="in the head"), before_head(head_of(model), fail):
        model(torch.tensor([[5, 6]]))
    assert not head_of(model)._forward_pre_hooks
    assert model(torch.tensor([[5, 6]])).logits.shape == (1, 2, 261)


def test_outputs_hold_only_the_logits_that_were_computed() -> None:
    model = tiny_model()
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[-100, -100, 7, 8]])}
    forward = SupervisedForward(model, chunk=3)
    assert [forward.path] == ["supervised logits"]
    kept, outputs = forward(model, batch)
    assert outputs.logits.shape == (2, 261)
    assert SupervisedForward(model, kept_only=False).path == "all logits"
    forward.try_chunks(model)
    assert [forward.path] == ["chunked"]
    chunked, outputs = forward(model, batch)
    assert outputs.logits.shape == (1, 0, 261)
    assert chunked.loss.item() == pytest.approx(kept.loss.item(), rel=1e-6)
    kept, outputs = forward(model, {name: row[:, :3] for name, row in batch.items()})
    assert outputs.logits.shape == (1, 261)  # one chunk: nothing to gain
    everything, outputs = forward(model, batch, every_logit=True)
    assert outputs.logits.shape == (1, 4, 261)
    assert everything.loss.item() == pytest.approx(chunked.loss.item(), rel=1e-6)


def test_weights_stand_at_the_position_of_their_own_token() -> None:
    model = tiny_model()
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[-100, -100, 7, 8]])}
    alone = [SupervisedForward(model)(model, batch | {"labels": torch.tensor([labels])})[0].loss.item() for labels in
             ([-100, -100, 7, -100], [-100, -100, -100, 8])]  # fmt: skip
    batch["loss_weights"] = torch.tensor([[9.0, 9.0, 0.25, 2.0]])
    for chunked in (False, True):
        forward = SupervisedForward(model, chunk=1)
        if chunked:
            forward.try_chunks(model)
        totals, _ = forward(model, batch)
        assert totals.loss.item() == pytest.approx(0.25 * alone[0] + 2.0 * alone[1], rel=1e-6)
        assert totals.nll.item() == pytest.approx(totals.loss.item(), rel=1e-6)


# ---- In a training ---------------------------------------------------------------------------------------------------

ROWS = rows_with_labels(1, 15, 3, 25)


def trained(folder: Path, adapter: bool, **changes: Any) -> SFTTrainer:
    settings = sgd_arguments(folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, **changes)
    config = lora() if adapter else None
    trainer = SFTTrainer(tiny_model(), settings, None, ROWS, ROWS, tiny_tokenizer(), peft_config=config)
    trainer.train()
    return trainer


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("layout", [{}, {"packing": True, "max_length": 80}], ids=["padded", "packed"])
def test_chunks_of_four_tokens_make_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any], adapter: bool
) -> None:
    monkeypatch.setattr(supervised, "head_is_plain", lambda *_: False)
    kept = trained(tmp_path, adapter, **layout)
    monkeypatch.undo()
    chunked = trained(tmp_path, adapter, loss_chunk=4, **layout)
    assert (kept.loss_path, chunked.loss_path) == ("supervised logits", "chunked")
    assert largest_difference(kept, chunked) < 1e-6
    assert logged(chunked, "loss") == pytest.approx(logged(kept, "loss"), rel=1e-6)
    assert chunked.evaluate()["eval_loss"] == pytest.approx(kept.evaluate()["eval_loss"], rel=1e-6)


def test_after_training_the_model_is_what_it_was(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path, adapter=False, loss_chunk=4, activation_checkpointing=False
    )  # which leaves a hook of transformers
    model: Any = trainer.model
    copied = copy.deepcopy(model)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(copied(ids).logits, model(ids).logits)
    assert model(ids).logits.shape == (1, 3, 261)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in copied.modules())


@pytest.mark.parametrize("packing", [False, True])
def test_training_leaves_no_attribute_no_hook_and_no_forward_behind(tmp_path: Path, packing: bool) -> None:
    def inside(model: nn.Module) -> dict[str, Any]:
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        return {
            # accelerate marks what it has prepared, under stock Trainer too
            name: (
                type(module),
                vars(module).keys() - {"_is_accelerate_prepared"},
                [len(getattr(module, kind)) for kind in hooks],
            )
            for name, module in model.named_modules()
        }

    model: Any = tiny_model()
    before, config = inside(model), {**model.config.to_dict(), "use_cache": False}  # Trainer's use_cache
    settings = sgd_arguments(
        tmp_path, loss_chunk=4, packing=packing, max_length=128, activation_checkpointing=False, max_steps=2
    )
    SFTTrainer(model, settings, None, ROWS, ROWS, tiny_tokenizer()).train()
    assert inside(model) == before
    assert model.config.to_dict() == config
    assert model.forward.__func__ is type(model).forward


def test_what_speaks_against_chunks_is_told(tmp_path: Path) -> None:
    trainer = SFTTrainer(tiny_model(), sgd_arguments(tmp_path, torch_compile=True), None, ROWS, None, tiny_tokenizer())
    assert trainer.paths.facts() == {
        "objective": "nll",
        "loss_path": "supervised logits",
        "packed_attention": "as the model was loaded",
        "loss_not_chunked": "torch.compile would compile anew for each hook",
    }


def test_zero3_gathers_no_adapter_inside_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = SimpleNamespace(zero_stage=3)
    reasons = []
    for config in (None, lora(), lora_on_the_head()):
        settings = sgd_arguments(tmp_path)
        trainer = SFTTrainer(tiny_model(), settings, None, ROWS, None, tiny_tokenizer(), peft_config=config)
        with monkeypatch.context() as patched:
            patched.setattr(type(trainer.accelerator.state), "deepspeed_plugin", plugin)
            reasons.append(trainer.paths.facts().get("loss_not_chunked"))
    assert reasons == [None, None, "ZeRO-3 would gather an adapter on the head inside a chunk"]


def test_the_facts_of_a_packed_run_say_what_was_proven(tmp_path: Path) -> None:
    trainer = trained(tmp_path, adapter=False, packing=True, max_length=128)
    assert trainer.paths.facts() == {
        "objective": "nll",
        "loss_path": "chunked",
        "packed_attention": "sft_per_document (proven on this model)",
    }
