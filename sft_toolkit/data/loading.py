"""Token data sets as a DataLoader reads them: their layout (rows or bins) and the orders of training and evaluation."""

from __future__ import annotations

from functools import partial
from typing import Any

from datasets import Dataset
from torch.utils.data import DataLoader

from sft_toolkit.args import PreparationArguments
from sft_toolkit.data.orders import ordering_of
from sft_toolkit.data.plan import PackingPlan, plan_packing, plan_parts
from sft_toolkit.data.sampler import EpochSampler, StreamOrder, in_parts
from sft_toolkit.data.stream import Streamed
from sft_toolkit.data.token_dataset import PackedDataset, Parts, RowsDataset
from sft_toolkit.data.transforms import transform_of

Batches = RowsDataset | PackedDataset


def for_training(tokens: Dataset, args: PreparationArguments, seed: int, plan: PackingPlan | None = None) -> Batches:
    """Rows to pad, or bins of at most `max_length` tokens, changed by `args.transform` each time they are read.

    Args:
        tokens: columns `input_ids` and `labels`; others serve the sampler.
        seed: of the transform.
        plan: made before, of these very tokens.
    """
    transform = transform_of(args.transform, seed, None if args.packing else args.max_length)
    if not args.packing:
        return RowsDataset(tokens, transform)
    plan = plan or plan_packing(tokens, args.max_length, ordering_of(args.sampler))
    return PackedDataset(tokens, plan.bins, transform)


def for_evaluation(tokens: Dataset, args: PreparationArguments, parts: Parts = ()) -> Batches:
    """Rows or bins as they are; no bin holds rows of two parts, so that their losses can be told apart.

    Args:
        parts: names and rows of the sources of `tokens`, one behind the other.
    """
    if not args.packing:
        return RowsDataset(tokens, parts=parts)
    if not parts:
        return PackedDataset(tokens, plan_packing(tokens, args.max_length).bins)
    plan, bins = plan_parts(tokens, args.max_length, [rows for _, rows in parts])
    return PackedDataset(tokens, plan.bins, parts=[(name, n) for (name, _), n in zip(parts, bins, strict=True)])


def training_order(dataset: Batches, args: Any, micro_batch: int) -> EpochSampler:
    """The order that `args.sampler` names, for `TrainingArguments`; blank rows even out the ranks.

    Raises:
        ConfigError: as `ordering_of`.
    """
    if isinstance(dataset, Streamed):
        return StreamOrder(len(dataset), 0, shuffle=False)
    default = "sequential" if args.train_sampling_strategy == "sequential" else "shuffle"
    ordering = ordering_of(getattr(args, "sampler", None), default)
    facts = dataset.facts(micro_batch * args.world_size * args.gradient_accumulation_steps)
    multiple = 1 if args.dataloader_drop_last or args.world_size == 1 else micro_batch * args.world_size
    sampler = EpochSampler(
        facts.size, seed_of(args), pad_to_multiple_of=multiple, ordering=partial(ordering.order, facts, seed_of(args))
    )
    sampler.stamps_epoch = dataset.transform is not None
    return sampler


def evaluation_order(dataset: Batches, args: Any, by_part: bool) -> EpochSampler:
    """Every row once, in file order.

    Args:
        by_part: no batch holds rows of two parts of the data set; blank rows fill up each part.
    """
    multiple = args.eval_batch_size * args.world_size
    if not by_part or not dataset.parts:
        return EpochSampler(len(dataset), 0, shuffle=False, pad_to_multiple_of=multiple if args.world_size > 1 else 1)
    order = in_parts([size for _, size in dataset.parts], multiple)
    return EpochSampler(len(order), 0, ordering=lambda epoch: order)


def batches_by_part(dataset: Batches, args: Any) -> list[tuple[str, int]]:
    """Name and batches, on each rank, of the parts of a data set in `evaluation_order` by part."""
    multiple = args.eval_batch_size * args.world_size
    return [(name, -(-size // multiple)) for name, size in dataset.parts]


def seed_of(args: Any) -> int:
    """The seed of data orders in `TrainingArguments`."""
    return int(args.seed if args.data_seed is None else args.data_seed)


def dataloader(
    dataset: Batches, args: Any, micro_batch: int, order: EpochSampler, drop_last: bool, collate: Any
) -> DataLoader[Any]:
    """The loader of one process, under all `dataloader_*` arguments; accelerate splits it over ranks."""
    return DataLoader(
        dataset,
        batch_size=micro_batch,
        sampler=order,
        drop_last=drop_last,
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        in_order=args.dataloader_in_order,
    )
