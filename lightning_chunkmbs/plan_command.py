"""``python -m lightning_chunkmbs plan --config file.yaml``: what a configuration needs, before it is run."""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI, Namespace
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn

from .cli import Parser
from .meshes import sharded_over
from .plan_report import report, table
from .planner import Hardware, Planner
from .precision import dtypes_for
from .rehearsal import configured_optimizers, rehearsed
from .strategy import ChunkMBSStrategy
from .trees import leaves, map_tree

__all__ = ["main"]

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

_DESCRIPTION = """Predicts memory and step time of a configuration. The model is built on the meta device and nothing of
it is allocated. Everything that `fit` takes (--config, --model.…, --data.…, --trainer.…) may be given too."""


def size_in_bytes(text: str) -> int:
    """Read a number of bytes with a unit, as ``80GiB`` or ``64GB``."""
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?i?b?)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"a size is a number and a unit, as 80GiB or 64GB, and not {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_chunkmbs plan", description=_DESCRIPTION)
    add = parser.add_argument
    add("--devices", type=int, required=True, help="all devices of the job")
    add("--device_memory", type=size_in_bytes, required=True, help="memory of one device, as 80GiB")
    add("--headroom", type=float, default=0.1, help="share of it left to allocator and libraries (0.1)")
    add("--link_gbps", type=float, default=200.0, help="10^9 bits a second that a device sends in a collective (200)")
    add("--tflops", type=float, default=100.0, help="10^12 operations a second that a device reaches here (100)")
    add("--pcie_gbps", type=float, default=200.0, help="10^9 bits a second between device and host, each way (200)")
    add("--latency_us", type=float, default=20.0, help="microseconds that a collective costs at least (20)")
    add("--no_overlap", action="store_true", help="collectives do not run beside computation (so on a CPU)")
    add("--batch", choices=["data", "example"], default="data", help="a batch of the data, or example_input_array")
    add("--micro_batch", type=int, help="samples of a micro-batch, in place of those of the batch")
    add("--sequence_length", type=int, help="its length, in place of that of the batch")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


class _PlanCLI(LightningCLI):
    """Builds trainer, model and data from their configuration, the model on the meta device and for one CPU."""

    def instantiate_classes(self) -> None:
        config = self.config.clone()
        model = Namespace(model=config.pop("model"))
        # Newer versions of jsonargparse call it by a shorter name.
        instantiate = getattr(self.parser, "instantiate", None) or self.parser.instantiate_classes
        self.config_init = instantiate(config)
        with torch.device("meta"):
            self.model = instantiate(model)["model"]
        self.datamodule = self.config_init["data"]
        self._add_configure_optimizers_method_to_model(self.subcommand)
        self.trainer = self.instantiate_trainer(accelerator="cpu", devices=1, num_nodes=1, logger=False)


def main(args: Sequence[str]) -> None:
    """Plan for what command line arguments say, and print it.

    Raises:
        ValueError: the configuration has another strategy, or says nothing of a batch.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
        print(_planned(list(args)))


def _planned(args: list[str]) -> str:
    options, rest = _options().parse_known_args(args)
    cli = _PlanCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=1,
        save_config_callback=None,
        parser_class=Parser,
        args=rest,
        run=False,
    )
    on_cpu = str(cli.config.trainer.accelerator) == "cpu"
    hardware = Hardware(
        devices=options.devices,
        memory=options.device_memory,
        headroom=options.headroom,
        link_gbps=options.link_gbps,
        tflops=options.tflops,
        pcie_gbps=options.pcie_gbps,
        latency=options.latency_us * 1e-6,
        overlap=not (options.no_overlap or on_cpu),
    )
    planner, wanted = planner_for(cli.model, cli.datamodule, cli.trainer, options, foreach=not on_cpu)
    planned = planner.plan(hardware, wanted)
    if options.json:
        return json.dumps(report(planner, planned, hardware), indent=2)
    return table(planner, planned, hardware)


def planner_for(
    module: LightningModule, data: LightningDataModule, trainer: Trainer, options: argparse.Namespace, *, foreach: bool
) -> tuple[Planner, int | None]:
    """Return a planner for a module, and the samples per chunk that its plans ask for; None: as many as fit."""
    strategy = trainer.strategy
    if not isinstance(strategy, ChunkMBSStrategy):
        raise ValueError(
            f"Plans are made for ChunkMBSStrategy, and trainer.strategy is {type(strategy).__name__}. Write "
            f"class_path: lightning_chunkmbs.ChunkMBSStrategy there."
        )
    with torch.device("meta"):
        _configure(module)
    plans, fsdp_plan = strategy._declared.plans_for(module), strategy._declared.fsdp_plan
    chunk_plan = plans.chunkmbs_plan
    wanted = chunk_plan.chunk_mbs if chunk_plan is not None and plans.enable_chunk_mbs else 1
    ranks = sharded_over(options.devices, fsdp_plan.replicate_size, strategy._tensor_parallel_size)
    plugin = strategy.precision_plugin
    batch, step = _batch(module, data, options)
    planner = Planner(
        module,
        plans,
        batch,
        step=step,
        around=partial(rehearsed, module, trainer, options.devices),
        ranks=ranks,
        micro_batches=trainer.accumulate_grad_batches,
        dtypes=dtypes_for(plugin, fsdp_plan),
        context=plugin.forward_context,
        optimizers=partial(configured_optimizers, module, trainer, options.devices),
        foreach=foreach,
    )
    return planner, None if wanted == "auto" else wanted


def _configure(module: LightningModule) -> None:
    """Let the module build what it builds in ``configure_model``."""
    try:
        module.configure_model()
    except Exception as error:
        raise RuntimeError(
            f"configure_model of {type(module).__name__} cannot be run without processes: {type(error).__name__}: "
            f"{error}. Leave fully_shard and meshes to the strategy: it shards what the plans name."
        ) from error


# -- the batch -----------------------------------------------------------------------------------------------------


def _batch(
    module: LightningModule, data: LightningDataModule, options: argparse.Namespace
) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return a micro-batch, and what runs a step with it; None: ``training_step``."""
    if options.batch == "example":
        example = module.example_input_array
        if example is None:
            raise ValueError(
                f"--batch example takes example_input_array of the module, and {type(module).__name__} has none. Set "
                f"it in __init__, or leave --batch out to take a batch of the data."
            )
        return _resized(example, options), lambda batch: _call(module, batch)
    data.prepare_data()
    data.setup("fit")
    batch, _, _ = next(iter(CombinedLoader(data.train_dataloader(), "max_size_cycle")))
    return _resized(batch, options), None


def _call(module: nn.Module, example: Any) -> Any:
    if isinstance(example, dict):
        return module(**example)
    return module(*example) if isinstance(example, tuple) else module(example)


def _resized(batch: Any, options: argparse.Namespace) -> Any:
    """Give the batch other sizes: along dimensions that have the size of the first tensor's first and second one."""
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
    if not tensors:
        raise ValueError("A micro-batch holds a tensor, and this one holds none.")
    sizes = dict(_changes(tensors[0], options))

    def resize(value: Any, _path: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = list(value.shape)
        for dim, (before, after) in sizes.items():
            if dim < len(shape) and shape[dim] == before:
                shape[dim] = after
        return torch.empty(shape, dtype=value.dtype, device="meta")

    return map_tree(resize, batch)


def _changes(first: Tensor, options: argparse.Namespace) -> Iterator[tuple[int, tuple[int, int]]]:
    for dim, wanted in enumerate((options.micro_batch, options.sequence_length)):
        if wanted is not None and dim >= first.ndim:
            raise ValueError(
                f"--sequence_length is the size of a batch's second dimension, and its first tensor has the shape "
                f"{tuple(first.shape)}. Leave it out."
            )
        if wanted is not None:
            yield dim, (first.shape[dim], wanted)
