#!/usr/bin/env python3
"""Other quantizers of the package index beside the recipe: the same model, linears, tokens and texts, our measurement.

Each peer gets an environment of its own (`runs/peers/env-NAME`, pinned by requirements/peer-NAME.txt). There it
quantizes the linears that the recipe quantizes, at the same group size, on all calibration rows that the recipe reads,
and hands back a plain float checkpoint. Peers that train make as many steps of as many sequences as the recipe's
refinement and final pass together. Rows are appended to the results of benchmarks/accuracy.py, and stand in one table
with those of the same budget:

    python benchmarks/accuracy.py --config recipes/smollm2_quickstart.yaml --bits 2 --methods gptq ours
    python benchmarks/peers.py --config recipes/smollm2_quickstart.yaml --bits 2 --share_torch

Keys of the recipe may follow the options (`--model.units '[attention,mlp]'`): the same ones in both commands. What is
finished is not run again. A peer that does not install or run is reported with its own error; the others go on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from accuracy import budget_of, changes_of, model_options, require_recipe
from accuracy_job import check_job
from accuracy_table import Row, document, read_rows
from accuracy_texts import options as text_options
from accuracy_texts import write_texts
from peer_environments import PeerError, call, make_environment
from peer_job import PEERS
from safetensors.torch import save_file
from torch import Tensor

from gsq_module import cli
from gsq_module.coverage import measure_coverage
from gsq_module.evaluation import HiddenStates
from gsq_module.export.reader import open_checkpoint
from gsq_module.measures import Measured
from gsq_module.problems import UserError
from gsq_module.recipe_run import Run
from gsq_module.run_results import measure_original, measure_weights
from gsq_module.strategies import register_strategies
from gsq_module.streaming.checkpoint import Checkpoint
from gsq_module.streaming.model import StreamedModel
from gsq_module.summary import device_name

HERE = Path(__file__).resolve().parent
BITS = ("2", "3", "4")


class RecipeCLI(cli.GSQCLI):
    """The product's command line; it only reads the recipe."""

    run: Run

    def evaluate(self, model, datamodule, **_: Any) -> None:  # type: ignore[override]
        with cli.user_errors():
            self.run = self._run(model, datamodule)


class Bench:
    """What all peers are given and measured with.

    Args:
        run: The recipe, checked; its texts are tokenized.
        model: Its model.
        budget: As `accuracy.py` names it.
        changes: What that budget changes of the recipe.
        folder: Where jobs go.
    """

    def __init__(self, run: Run, model: StreamedModel, budget: str, changes: Sequence[str], folder: Path) -> None:
        self._run, self._model, self._budget, self._folder = run, model, budget, folder
        self._changes = list(changes)
        coverage = measure_coverage(model, run.recipe)
        self._linears = coverage.quantized
        self._others = [
            name
            for name, module in model.model.named_modules()
            if isinstance(module, torch.nn.Linear) and name not in coverage.quantized
        ]
        folder.mkdir(parents=True, exist_ok=True)
        self._rows = folder / "rows.safetensors"
        # All that ours looks at. Its GPTQ sees a part of them, its refinement another.
        rows = torch.cat([run.data.train, run.data.gptq, run.data.validation])
        save_file({"rows": rows}, self._rows)

    def quantize(self, peer: str, bits: str, python: Path) -> tuple[Path, dict[str, Any]]:
        """Let a peer quantize in its environment.

        Returns:
            Folder of the checkpoint, and what the job says of itself.

        Raises:
            PeerError: It fails.
        """
        recipe, data = self._run.recipe, self._run.data
        folder = self._folder / f"{bits}bit-{peer}-seed{recipe.seed}-{self._budget}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        epochs = recipe.refinement.epochs + recipe.final_pass.epochs
        job = {
            "peer": peer,
            "model": str(self._model.checkpoint.directory.resolve()),
            "rows": str(self._rows.resolve()),
            "checkpoint": str((folder / "checkpoint").resolve()),
            "scratch": str(folder.resolve()),
            "result": str((folder / "result.json").resolve()),
            "linears": self._linears,
            "others": self._others,
            "bits": int(bits),
            "group_size": recipe.group_size,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "seed": recipe.seed,
            "steps": epochs * data.steps_per_epoch,
            "batch_size": data.batch_size,
        }
        (folder / "job.json").write_text(json.dumps(job))
        log = folder.with_suffix(".log")
        log.unlink(missing_ok=True)
        call([str(python), str(HERE / "peer_job.py"), str(folder / "job.json")], log)
        return folder / "checkpoint", json.loads((folder / "result.json").read_text())

    def measure(self, checkpoint: Path, bits: str, original: HiddenStates) -> dict[str, Measured]:
        """Figures of a peer's checkpoint by text, beside the original.

        Raises:
            PeerError: Its weights are no `bits`-bit weights by groups.
        """
        opened = open_checkpoint(checkpoint)
        check_levels(opened, self._linears, 2 ** int(bits), self._run.recipe.group_size)
        model = StreamedModel.from_checkpoint(opened, self._model.device, self._model.dtype)
        return measure_weights(self._run, model, original=original)

    def row(self, peer: str, bits: str, python: Path, original: HiddenStates, figures: Mapping[str, Measured]) -> Row:
        """One row as `accuracy.py` writes them.

        Args:
            figures: The original's.
        """
        began = time.perf_counter()
        checkpoint, said = self.quantize(peer, bits, python)
        wall_seconds = time.perf_counter() - began
        measured = self.measure(checkpoint, bits, original)
        shutil.rmtree(checkpoint.parent)
        return {
            "method": f"{peer} {said['version']}",
            "bits": bits,
            "seed": self._run.recipe.seed,
            "budget": self._budget,
            "changes": self._changes,
            "processes": 1,
            "wall_seconds": round(wall_seconds, 1),
            "perplexity": {
                text: {"original": figures[text].perplexity, "quantized": value.perplexity}
                for text, value in measured.items()
            },
            "kl_divergence": {text: {"quantized": value.kl_divergence} for text, value in measured.items()},
            "top1_agreement": {text: {"quantized": value.top1_agreement} for text, value in measured.items()},
            "seconds": {"refine": said["seconds"], "total": wall_seconds},
            "resumed": False,
            "peak_device_bytes": said["peak_device_bytes"],
            "peak_host_bytes": said["peak_host_bytes"],
            "device": device_name(self._model.device),
        }


def check_levels(checkpoint: Checkpoint, linears: Iterable[str], levels: int, group_size: int) -> None:
    """Whether each group of each linear holds no more different weights than there are codes.

    Raises:
        PeerError: Some hold more: the peer left them in float, or had other groups.
    """
    for name in linears:
        used = levels_used(checkpoint.tensor(f"{name}.weight"), group_size)
        if used > levels:
            raise PeerError(f"{name}: {used} different weights in one group of {group_size}, where {levels} codes are")


def levels_used(weight: Tensor, group_size: int) -> int:
    """The most different values in one group of a weight `[out, in]`."""
    ordered = weight.unflatten(1, (-1, group_size)).sort(-1).values
    return int((ordered.diff(dim=-1) != 0).sum(-1).max()) + 1


def read_recipe(options: Sequence[str], out: Path) -> tuple[Run, StreamedModel]:
    """The recipe with its texts tokenized, and its model.

    Raises:
        UserError: It quantizes what peers do not.
    """
    sys.argv = sys.argv[:1]  # LightningCLI warns of arguments beside its own
    register_strategies()
    run = RecipeCLI(["evaluate", *options, f"--run_dir={out / 'run'}"]).run
    if run.recipe.embedding_bits or run.recipe.head_bits:
        raise UserError("model.embedding_bits, model.head_bits: peers quantize linears of the blocks; leave them out")
    model = run.open_model()
    run.data.tokenize(run.tokenizer(model.checkpoint.directory))
    return run, model


def environments(peers: Iterable[str], root: Path, share_torch: bool) -> tuple[dict[str, Path], list[str]]:
    """Interpreters by peer, and a line for each environment that could not be made."""
    pythons, failed = {}, []
    for peer in peers:
        try:
            print(f"{peer}: environment", flush=True)
            pythons[peer] = make_environment(peer, root, share_torch)
        except PeerError as error:
            failed.append(f"{peer} did not install: {error}")
    return pythons, failed


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Any = parser.add_argument
    recipe = HERE.parent / "recipes" / "smollm2_full.yaml"
    add("--config", type=Path, default=recipe, help="recipe: model, units, group size, texts, steps")
    add("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER", help=", ".join(PEERS))
    add("--bits", nargs="+", choices=BITS, default=list(BITS), metavar="BITS", help=", ".join(BITS))
    add("--seed", type=int, default=0, help="of what is random (default: 0)")
    add("--share_torch", action="store_true", help="use this environment's packages where the pins allow it")
    add("--environments", type=Path, default=Path("runs/peers"), help="folder of the environments and their logs")
    add(
        "--out",
        type=Path,
        default=Path("runs/accuracy"),
        help="as of accuracy.py: texts, logs, results.jsonl, table.md",
    )
    options, overrides = parser.parse_known_args(arguments)
    require_recipe(parser, options.config)
    return options, overrides


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a peer failed. What a user can mend ends it with status 2 before any is
    installed."""
    options, overrides = parse(arguments)
    keys = [f"--config={options.config}", *text_options(options.out / "texts"), f"--seed_everything={options.seed}"]
    check_job("ours", [*keys, *overrides], options.out / "run")
    with cli.user_errors():
        write_texts(options.out / "texts")
        keys += [*model_options(options.config, overrides, options.out / "model"), *overrides]
    changes, file = changes_of(overrides), options.out / "results.jsonl"
    budget = budget_of(options.config, changes)
    known = {(row["method"].split()[0], row["bits"], row["seed"], row["budget"]) for row in read_rows(file)}
    missing = [
        (peer, bits)
        for bits in options.bits
        for peer in options.peers
        if (peer, bits, options.seed, budget) not in known
    ]
    pythons, failed = dict[str, Path](), list[str]()
    if missing:
        with cli.user_errors():
            run, model = read_recipe(keys, options.out)
        peers = dict.fromkeys(peer for peer, _ in missing)
        pythons, failed = environments(peers, options.environments, options.share_torch)
    if pythons:
        bench = Bench(run, model, budget, changes, options.out / "jobs")
        original, figures = measure_original(run, model)
        with closing(original):
            for peer, bits in missing:
                if peer not in pythons:
                    continue
                print(f"{peer}: {bits} bits", flush=True)
                try:
                    row = bench.row(peer, bits, pythons[peer], original, figures)
                except PeerError as error:
                    failed.append(f"{peer} did not run at {bits} bits: {error}")
                    continue
                with file.open("a") as results:
                    results.write(json.dumps(row) + "\n")
    rows = read_rows(file)
    if rows:
        (options.out / "table.md").write_text(document(rows) + "\n")
        print(document([row for row in rows if row["budget"] == budget]))
    print(*failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
