"""What a checkpoint contains of a run besides the user's objects: the entry "fabric".

Random generators, loss scales, schedulers, numbers of steps, and the positions of data loaders. Saving gathers the
states of the generators: each rank receives about 10 KB from every other. Of the tensors in positions only the shapes
are sent: each rank writes its own. If the data was partitioned differently, ranks without a state of their own continue
from that of rank 0.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

from torch.optim import Optimizer

from fabric.checkpoints.loader_positions import LoaderPositions
from fabric.loop.setup import SetUp
from fabric.strategies.accelerators.accelerator_registry import device_rngs
from fabric.strategies.checkpoint.state import named_objects
from fabric.strategies.checkpoint.tensors import in_memory, of_all_ranks_with
from fabric.strategies.data.device_loader import DeviceLoader
from fabric.strategies.data.rng import process_rngs
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.generator_interface import Rng


@final
class RunState:
    """Reads what is added to a checkpoint of `state`, and restores it.

    Schedulers and loaders that `state` names are saved there only. The numbers of steps are those of the optimizers
    that it names.
    """

    def __init__(self, runtime: Runtime, set_up: SetUp, state: Any, report_once: Callable[[str], None]) -> None:
        self._runtime = runtime
        objects = dict(named_objects(state))
        named = {id(each) for each in objects.values()}
        loaders = [loader for each in set_up.loaders if (loader := each()) is not None and id(loader) not in named]
        self._loaders = LoaderPositions(loaders, runtime, report_once)
        self._stateful = {
            "scalers": set_up.scalers(),
            "schedulers": [s for each in set_up.schedulers if (s := each()) is not None and id(s) not in named],
        }
        self._steps = {
            name: set_up.optimizers[each]
            for name, each in objects.items()
            if isinstance(each, Optimizer) and each in set_up.optimizers
        }

    def read(self) -> dict[str, Any]:
        """The entry to save, with `TensorShards`. Ranks: all call it."""
        collective, share = self._runtime.collective, self._runtime.share
        generators = {name: rng.read() for name, rng in _rngs(self._runtime).items()}
        own = {"share": [share.index, share.count], **generators}
        of_ranks = of_all_ranks_with(collective, self._loaders.read(), own)
        return {
            "generators": [generators for _, generators in of_ranks],
            "loaders": self._loaders.merged([positions for positions, _ in of_ranks]),
            "steps": {name: counter.state_dict() for name, counter in self._steps.items()},
            **{kind: [each.state_dict() for each in objects] for kind, objects in self._stateful.items()},
        }

    def write(self, entry: Mapping[str, Any] | None, *, resume_loaders: bool = True) -> None:
        """Restore the run from the entry, with a `Stored` for each tensor. Ranks: all call it.

        None: the checkpoint has no entry, which is reported. `resume_loaders=False`: loaders keep their positions.
        """
        report, share = self._runtime.report, self._runtime.share
        if entry is None:
            report(
                "The checkpoint has no states of random generators, loss scales and schedulers, which `fabric.save` "
                "writes. Those of this run are unchanged, so it does not continue exactly like the run that was saved."
            )
            return
        for kind, objects in self._stateful.items():
            if len(entry[kind]) == len(objects):
                for each, state in zip(objects, entry[kind], strict=True):
                    each.load_state_dict(in_memory(state))
            elif objects:
                report(
                    f"The checkpoint has {len(entry[kind])} {kind}, and this run {len(objects)}: they are unchanged."
                )
        for name in self._steps.keys() & entry["steps"].keys():
            self._steps[name].load_state_dict(in_memory(entry["steps"][name]))
        if resume_loaders:
            self._loaders.write(entry["loaders"])
        states = entry["generators"]
        own = next((each for each in states if each["share"] == [share.index, share.count]), states[0])
        saved = in_memory(own)
        for name, rng in _rngs(self._runtime).items():
            if name in saved:
                rng.write(saved[name])


def is_run(state: Any) -> bool:
    """Whether `state` resumes a run: it has an optimizer or a prepared loader."""
    return any(isinstance(each, (Optimizer, DeviceLoader)) for _, each in named_objects(state))


def _rngs(runtime: Runtime) -> dict[str, Rng]:
    named = process_rngs()
    return named | {f"{runtime.device.type} {number}": rng for number, rng in enumerate(device_rngs(runtime.devices))}
