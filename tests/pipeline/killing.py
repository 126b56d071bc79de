"""Kill a run with SIGKILL at chosen instants and start it again. A script: its children are forked after all imports.

An instant is the number of a function call made from the project's own code, C functions (write, fsync, rename) among
them, counted from the begin of `fit`: the same number is the same place in every run, whatever the machine's load.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from toy_runs import contents, run, summary_of  # noqa: E402

from gsq_module.atomic import write_atomically  # noqa: E402
from gsq_module.cli import GSQCLI  # noqa: E402
from gsq_module.memory.stages import StageClock  # noqa: E402
from gsq_module.metrics_log import read_rows  # noqa: E402

OWN = (str(ROOT / "gsq_module"), str(ROOT / "callbacks"))


class Instants:
    """A profile function that counts instants, and kills the process at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.count = 0
        self.places: dict[str, list[int]] = {}
        self._clock: StageClock | None = None
        self._writing = 0

    def install(self) -> None:
        init, fit = StageClock.__init__, GSQCLI.fit

        def watched(clock: StageClock, *args: Any, **kwargs: Any) -> None:
            init(clock, *args, **kwargs)
            self._clock = clock

        def counted(*args: Any, **kwargs: Any) -> None:
            sys.setprofile(self)
            try:
                fit(*args, **kwargs)
            finally:
                sys.setprofile(None)

        StageClock.__init__, GSQCLI.fit = watched, counted  # type: ignore[method-assign]

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is write_atomically.__code__ and event in ("call", "return"):
            self._writing += 1 if event == "call" else -1
        if event not in ("call", "c_call") or not frame.f_code.co_filename.startswith(OWN):
            return
        self.count += 1
        if self.at is None:
            stage = self._clock.current if self._clock is not None else None
            place = "write" if self._writing else stage.name if stage is not None else "between"
            self.places.setdefault(place, []).append(self.count)
        elif self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def start(recipe: Path, run_dir: Path, options: list[str], at: int | None, places: Path | None = None) -> int:
    """Run `fit` in a forked child; its exit status, negative where a signal ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        with open(run_dir.with_suffix(".txt"), "a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            instants = Instants(at)
            if at is not None or places is not None:
                instants.install()
            run(recipe, run_dir, *options)
            if places is not None:
                places.write_text(json.dumps(instants.places))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    finally:
        os._exit(status)


def result(run_dir: Path) -> dict[str, Any]:
    """All that a run comes to, but for what depends on the time."""
    summary = summary_of(run_dir)
    for key in ("seconds", "peak_memory", "export"):
        del summary[key]
    for unit in summary["units"]:
        del unit["seconds"]
    rows = read_rows(run_dir / "metrics" / "version_0" / "metrics.csv")
    left = sorted(path.name for path in run_dir.iterdir() if path.name != "config.1.yaml")
    return {"export": contents(run_dir / "export"), "summary": summary, "metrics": rows, "left": left}


def differences(run_dir: Path, undisturbed: dict[str, Any]) -> list[str]:
    found = result(run_dir)
    return [key for key in undisturbed if found[key] != undisturbed[key]]


def choose(places: dict[str, list[int]], count: int, seed: int) -> list[tuple[str, int]]:
    """Random instants, of all kinds of places in turn."""
    numbers, kinds = random.Random(seed), sorted(places)
    return [(kind, numbers.choice(places[kind])) for kind in (kinds[i % len(kinds)] for i in range(count))]


def main(recipe: str, folder: str, how: str, count: str, seed: str, *options: str) -> None:
    """Print what came of `count` kills as JSON: `each` of a new run, or `chain`, all of one run."""
    torch.set_num_threads(1)
    sys.argv = ["run.py"]
    into = Path(folder)
    say: Callable[..., int] = lambda name, at=None, places=None: start(  # noqa: E731
        Path(recipe), into / name, list(options), at, places
    )
    assert say("undisturbed", places=into / "places.json") == 0, (into / "undisturbed.txt").read_text()
    places = json.loads((into / "places.json").read_text())
    undisturbed = result(into / "undisturbed")
    total = sum(map(len, places.values()))
    kills: list[dict[str, Any]] = []
    if how == "each":
        for number, (place, at) in enumerate(choose(places, int(count), int(seed))):
            name = f"killed{number}"
            kill = {"place": place, "at": at, "killed": say(name, at), "resumed": say(name)}
            kills.append(
                kill | {"different": differences(into / name, undisturbed) if not kill["resumed"] else ["all"]}
            )
            shutil.rmtree(into / name)
    else:
        numbers = random.Random(int(seed))
        for number in range(int(count)):
            at = numbers.randrange(total * (number + 1) // int(count))
            kills.append({"at": at, "killed": say("killed", at)})
        kills[-1] |= {"resumed": say("killed")}
        kills[-1] |= {"different": differences(into / "killed", undisturbed) if not kills[-1]["resumed"] else ["all"]}
    print(json.dumps({"places": {place: len(instants) for place, instants in places.items()}, "kills": kills}))


if __name__ == "__main__":
    main(*sys.argv[1:])
