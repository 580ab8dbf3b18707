"""Which precision a run gets, on every kind of device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sft_toolkit.errors import ConfigError
from sft_toolkit.precision import Choice, Device, choose, current_device

CPU, FAST, SLOW = Device("cpu"), Device("cuda", fast_bf16=True), Device("cuda", fast_bf16=False)


@pytest.mark.parametrize(
    ("device", "choice"),
    [
        (CPU, Choice("fp32", "the run is on the CPU")),
        (FAST, Choice("bf16", "this cuda device is fast in it")),
        (Device("npu", True), Choice("bf16", "this npu device is fast in it")),
        (Device("mps", False), Choice("fp32", "this mps device has no bf16")),
        (
            SLOW,
            Choice(
                "fp16",
                "this cuda device is not fast in bf16; fp16 can overflow: watch for skipped steps",
                is_notice=True,
            ),
        ),
    ],
)
def test_automatic(device: Device, choice: Choice) -> None:
    assert choose("auto", None, None, "no", device) == choice


@pytest.mark.parametrize(
    ("asked", "bf16", "fp16", "launcher", "choice"),
    [
        ("fp32", None, None, "no", Choice("fp32", "asked for by precision")),
        ("bf16", True, False, "bf16", Choice("bf16", "asked for by precision")),
        ("auto", True, None, "no", Choice("bf16", "asked for by bf16: true")),
        ("auto", None, True, "no", Choice("fp16", "asked for by fp16: true")),
        ("auto", False, None, "no", Choice("fp32", "asked for by bf16: false")),
        ("auto", False, False, "no", Choice("fp32", "asked for by bf16 and fp16: false")),
        ("auto", None, None, "fp16", Choice("fp16", "asked for by the launcher's --mixed_precision")),
        ("auto", None, None, "fp8", Choice("auto", "left to the launcher: fp8")),
    ],
)
def test_what_is_asked_for_wins(
    asked: str, bf16: bool | None, fp16: bool | None, launcher: str, choice: Choice
) -> None:
    assert choose(asked, bf16, fp16, launcher, FAST) == choice  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "bf16", "fp16", "launcher", "message"),
    [
        ("auto", True, True, "no", "bf16: true contradicts fp16: true; keep one of them"),
        ("fp32", True, None, "no", "precision: fp32 contradicts bf16: true; keep one of them"),
        ("bf16", None, True, "no", "precision: bf16 contradicts fp16: true; keep one of them"),
        ("bf16", False, None, "no", "precision: bf16 contradicts bf16: false; keep one of them"),
        (
            "fp32",
            None,
            None,
            "bf16",
            "precision fp32 (asked for by precision) contradicts the launcher's --mixed_precision bf16; "
            "leave one of them out",
        ),
        (
            "auto",
            None,
            True,
            "bf16",
            "precision fp16 (asked for by fp16: true) contradicts the launcher's --mixed_precision bf16; "
            "leave one of them out",
        ),
    ],
)
def test_contradictions(asked: str, bf16: bool | None, fp16: bool | None, launcher: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose(asked, bf16, fp16, launcher, FAST)  # type: ignore[arg-type]
    assert error.value.problems == [message]


def test_half_precision_on_a_cpu_is_done_with_a_notice() -> None:
    reason = "asked for by bf16: true; many CPUs are far slower in it than in fp32"
    assert choose("auto", True, None, "no", CPU) == Choice("bf16", reason, is_notice=True)


@pytest.mark.parametrize(
    ("asked", "fp16", "launcher"), [("fp16", None, "no"), ("auto", True, "no"), ("auto", None, "fp16")]
)
def test_fp16_needs_a_gpu(asked: str, fp16: bool | None, launcher: str) -> None:
    with pytest.raises(ConfigError, match=r"precision fp16 \(asked for by .*\) needs a GPU, and the run is on the CPU"):
        choose(asked, None, fp16, launcher, CPU)  # type: ignore[arg-type]
    assert choose(asked, None, fp16, launcher, SLOW).name == "fp16"  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "fast"), [("npu", True), ("xpu", True), ("xpu", False), ("mps", False)])
def test_the_device_that_is_there_is_taken(kind: str, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: SimpleNamespace(type=kind))
    monkeypatch.setattr("transformers.utils.import_utils.is_torch_bf16_gpu_available", lambda: fast)
    assert current_device(use_cpu=False) == Device(kind, fast)
    assert current_device(use_cpu=True) == Device("cpu")


@pytest.mark.parametrize("fast", [True, False])
def test_cuda_comes_first(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: fast and not including_emulation)
    assert current_device(use_cpu=False) == Device("cuda", fast)


def test_nothing_but_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert current_device(use_cpu=False) == Device("cpu")
