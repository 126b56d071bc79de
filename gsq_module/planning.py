"""From a recipe and a config.json to the memory plan: blocks are run on tensors without data, weights are not read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gsq_module.data.module import CalibrationData
from gsq_module.geometry import count_blocks, find_units, kinds_of_blocks
from gsq_module.memory.allocator import setting_in_force
from gsq_module.memory.plan import MemoryPlan
from gsq_module.memory.sizes import BlockShape, Job, OuterShape, UnitShape
from gsq_module.memory.working_set import WorkingSet
from gsq_module.module import DTYPES, GSQModule
from gsq_module.outer import outer_parts
from gsq_module.quantization.training_ops import accumulating_in_place, squared_error
from gsq_module.streaming.activations import choose_location
from gsq_module.streaming.calls import BlockCall
from gsq_module.streaming.fast_paths import torch_path
from gsq_module.streaming.model import StreamedModel
from gsq_module.streaming.synthetic import SyntheticCheckpoint
from gsq_module.streaming.tree import meta_model
from gsq_module.streaming.units import Branch, Unit, catch, trace_units


def strategy_name(trainer: Trainer) -> str:
    """`single`, `ddp` or `sharded`: how the plan calls what a Trainer does."""
    if trainer.world_size == 1:
        return "single"
    return "ddp" if "DDP" in type(trainer.strategy).__name__ else "sharded"


def plan_run(
    folder: Path,
    recipe: GSQModule,
    data: CalibrationData,
    device: torch.device,
    free_bytes: int | None,
    world_size: int = 1,
    strategy: str = "single",
    reload_max_gib: float = 0.0,
) -> MemoryPlan:
    """Predict the memory of a run.

    Args:
        folder: Has the model's config.json.
        recipe: The `model` section.
        data: The `data` section; its texts are not read.
        device: The device of the run; need not exist. Decides the compute dtype.
        free_bytes: Of the device, which decides where `store: auto` puts hidden states; None for a CPU.
        world_size: Processes that share the run.
        strategy: `single`, `ddp` or `sharded`.
        reload_max_gib: As the recipe's key.

    Raises:
        ValueError: The model cannot be streamed, or a unit is not found in it.
    """
    dtype = recipe.torch_dtype(device)
    tree = meta_model(folder)
    checkpoint = SyntheticCheckpoint(folder, tree)
    model = StreamedModel(tree, checkpoint, torch.device("cpu"), dtype)
    job = _job(model, recipe, data, dtype, world_size, reload_max_gib, strategy)
    blocks = _blocks(model, recipe, job)
    plan = MemoryPlan(job, blocks)
    quantized = sum(unit.weights * len(kind.indices) for kind in blocks for unit in kind.units)
    quantized += sum(part.weights for part in job.outer)
    return plan.changed(
        store=choose_location(recipe.store, plan.store_bytes, free_bytes),
        evaluation_store=choose_location(recipe.store, plan.evaluation_store_bytes, free_bytes),
        float_bytes=job.float_bytes - quantized * checkpoint.dtype().itemsize,
    )


def _job(
    model: StreamedModel,
    recipe: GSQModule,
    data: CalibrationData,
    dtype: torch.dtype,
    world_size: int,
    reload_max_gib: float,
    strategy: str,
) -> Job:
    itemsize = dtype.itemsize
    stored = model.checkpoint.dtype() if dtype == torch.float32 else dtype
    all_bytes = itemsize * sum(value.numel() for value in model.model.parameters())
    before, around = (
        itemsize * _numel(model.model.get_submodule(path) for path in paths)
        for paths in (model.paths_around_blocks(head=False), model.paths_around_blocks(head=True))
    )
    return Job(
        hidden_size=model.hidden_size,
        itemsize=itemsize,
        store_itemsize=stored.itemsize,
        vocabulary_bytes=before,
        head_bytes=around,
        vocabulary=model.embedding.num_embeddings,
        seq_len=data.seq_len,
        evaluation_seq_len=data.evaluation_seq_len,
        microbatch=data.microbatch_size or data.batch_size // world_size,
        shares_batch=data.microbatch_size is None,
        forward_batch=data.sequences_at_once(data.seq_len),
        # Training rows go through the blocks where units are refined on them.
        samples=(data.train_samples if recipe.refinement.epochs else 0) + data.validation_samples + data.gptq_samples,
        evaluation_samples=data.evaluation_samples * len(data.evaluation),
        evaluation_store="device",
        candidates=recipe.grid.num_candidates,
        windowed=recipe.grid.is_windowed,
        group_size=recipe.group_size,
        logit_itemsize=DTYPES[recipe.refinement.logit_dtype].itemsize,
        storage_bits=recipe.grid.storage_bits,
        expandable_segments=setting_in_force().expandable_segments,
        measure_initial=recipe.measure_initial and recipe.refinement.epochs > 0,
        fused=recipe.kernels == "auto",
        gptq=recipe.initializer == "gptq",
        original_stream=recipe.target == "original_stream",
        cached=recipe.targets == "cached",
        store="device" if recipe.store == "auto" else recipe.store,
        world_size=world_size,
        strategy=strategy,
        model_bytes=all_bytes,
        whole_bytes=itemsize * _numel(map(model.model.get_submodule, model.all_paths())),
        final_pass=recipe.final_pass.epochs > 0,
        reload=all_bytes <= reload_max_gib * 2**30,
        float_bytes=all_bytes // itemsize * model.checkpoint.dtype().itemsize,
        outer=tuple(
            OuterShape(part.kind, *part.shape, part.grid.storage_bits, part.group_size, len(part.modules))
            for part in outer_parts(model, recipe)
        ),
        float_blocks=model.num_blocks - count_blocks(model, recipe),
    )


def _numel(modules: Iterable[nn.Module]) -> int:
    return sum(value.numel() for module in modules for value in (*module.parameters(), *module.buffers()))


def _blocks(model: StreamedModel, recipe: GSQModule, job: Job) -> tuple[BlockShape, ...]:
    """Each kind of block once."""
    sizes = {job.forward_batch, job.microbatch}
    # On real tensors: where it is traced, transformers makes attention masks that a run does without.
    calls = {size: model.record_shapes(torch.zeros(size, job.seq_len, dtype=torch.int64)) for size in sizes}
    found = []
    # Not fake are those calls, and buffers of the tree on the meta device.
    with FakeTensorMode(allow_non_fake_inputs=True), torch_path():
        for indices in kinds_of_blocks(model, count_blocks(model, recipe)):
            here = {size: calls[size][indices[0]] for size in sizes}
            found.append(_measure(model, recipe, job, tuple(indices), here))
    return tuple(found)


def _measure(
    model: StreamedModel, recipe: GSQModule, job: Job, indices: tuple[int, ...], calls: dict[int, BlockCall]
) -> BlockShape:
    index = indices[0]
    block = model.load_block(index)

    def hidden(batch_size: int) -> Tensor:
        return torch.empty(batch_size, job.seq_len, job.hidden_size, dtype=model.dtype)

    whole = hidden(job.forward_batch)
    with torch.no_grad(), WorkingSet() as forward:
        calls[job.forward_batch](block, whole)
    inputs = hidden(job.microbatch)
    measured = []
    units = find_units(model, index, recipe)
    trace_units(block, calls[job.microbatch], inputs, units, check=False)
    for unit in units:
        call = catch(block, calls[job.microbatch], inputs, unit, with_branch=False).call
        assert call is not None
        with WorkingSet() as capture:
            catch(block, calls[job.forward_batch], whole, unit, with_branch=True)
        measured.append(_measure_unit(unit, Branch(unit, {job.microbatch: call}), inputs, job, capture.peak))
    tensors = {id(tensor): tensor.nbytes for call in calls.values() for tensor in call.tensors()}
    shape = BlockShape(indices, job.itemsize * _numel([block]), sum(tensors.values()), forward.peak, tuple(measured))
    model.release_block(index)
    return shape


def _measure_unit(unit: Unit, student: Branch, inputs: Tensor, job: Job, capture: int) -> UnitShape:
    taken: list[tuple[Tensor, int]] = []

    def note(linear: nn.Linear, args: tuple[Tensor, ...]) -> None:
        if all(args[0] is not tensor for tensor, _ in taken):
            taken.append((args[0], linear.in_features))

    handles = [linear.register_forward_pre_hook(note) for linear in unit.linears.values()]
    with torch.no_grad():
        squared_error(student(inputs), inputs)
    for handle in handles:
        handle.remove()
    hessians = tuple(width for _, width in taken)
    taken.clear()
    with torch.no_grad(), WorkingSet() as validation:
        squared_error(student(inputs), inputs)
    return UnitShape(
        kind=unit.kind,
        linears=tuple((linear.out_features, linear.in_features) for linear in unit.linears.values()),
        hessians=hessians,
        nbytes=job.itemsize * _numel([unit.module]),
        capture=capture,
        training=_training(unit, student, inputs),
        validation=validation.peak,
    )


def _training(unit: Unit, student: Branch, inputs: Tensor) -> int:
    """Working set of a microbatch whose gradients join those of an earlier one."""
    weights = [linear.weight for linear in unit.linears.values()]
    for weight in weights:
        weight.requires_grad_(True)
    with WorkingSet() as training, accumulating_in_place(student.modules()):
        squared_error(student(inputs), inputs).backward()
        training.reset()
        squared_error(student(inputs), inputs).backward()
    for weight in weights:
        weight.requires_grad_(False)
        weight.grad = None
    return training.peak - sum(weight.nbytes for weight in weights)
