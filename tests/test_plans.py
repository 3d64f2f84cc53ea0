"""Plans: validation in Python, and the yaml interface through jsonargparse."""

import dataclasses
import textwrap
from typing import Any

import jsonargparse
import pytest
import yaml

from lightning_chunkmbs.plans import ActivationOffloadPlan, ChunkMBSPlan, FSDPPlan, RecomputePlan, coerce_plan
from tests.documented import INIT_ARGS

PLANS = [ChunkMBSPlan, RecomputePlan, ActivationOffloadPlan]
BLOCKS = ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]
PARSED: dict[str, Any] = {
    "recompute": True,
    "recompute_plan": RecomputePlan(apply_modules=BLOCKS),
    "enable_activation_offload": True,
    "activation_offload_plan": ActivationOffloadPlan(apply_modules=BLOCKS),
    "enable_chunk_mbs": True,
    "chunkmbs_plan": ChunkMBSPlan(
        apply_modules=BLOCKS[1:],
        chunk_mbs=2,
        chunk_kwarg_names=["position_embeddings", "position_ids", "rope_deltas", "attention_mask"],
    ),
    "fsdp_plan": None,
}


class Base:
    pass


class Options(Base):
    """Takes the plans as a strategy does: through ``init_args`` of a subclass."""

    def __init__(
        self,
        chunkmbs_plan: ChunkMBSPlan | None = None,
        recompute_plan: RecomputePlan | None = None,
        activation_offload_plan: ActivationOffloadPlan | None = None,
        fsdp_plan: FSDPPlan | None = None,
        recompute: bool = True,
        enable_activation_offload: bool = True,
        enable_chunk_mbs: bool = True,
    ) -> None:
        self.chunkmbs_plan = chunkmbs_plan
        self.recompute_plan = recompute_plan
        self.activation_offload_plan = activation_offload_plan
        self.fsdp_plan = fsdp_plan
        self.recompute = recompute
        self.enable_activation_offload = enable_activation_offload
        self.enable_chunk_mbs = enable_chunk_mbs


def parser() -> jsonargparse.ArgumentParser:
    result = jsonargparse.ArgumentParser(exit_on_error=False)
    result.add_subclass_arguments(Base, "strategy")
    return result


def parse(init_args: str) -> jsonargparse.Namespace:
    head = f"strategy:\n  class_path: {__name__}.Options\n  init_args:\n"
    return parser().parse_string(head + textwrap.indent(init_args, "    "))


def build(config: jsonargparse.Namespace) -> Options:
    # instantiate replaces instantiate_classes in newer releases.
    root = parser()
    build_all = root.instantiate if hasattr(root, "instantiate") else root.instantiate_classes
    strategy = build_all(config).strategy
    assert isinstance(strategy, Options)
    return strategy


def test_the_documented_yaml_parses_unchanged() -> None:
    assert vars(build(parse(INIT_ARGS))) == PARSED


def test_the_documented_yaml_as_dicts() -> None:
    raw = yaml.safe_load(INIT_ARGS)
    for cls, name in zip(PLANS, ["chunkmbs_plan", "recompute_plan", "activation_offload_plan"], strict=True):
        assert coerce_plan(raw[name], cls, name) == PARSED[name]


def test_dump_and_parse_round_trips() -> None:
    init_args = INIT_ARGS + "fsdp_plan:\n  reshard_after_forward: false\n  param_dtype: bfloat16\n  cpu_offload: true\n"
    first = parse(init_args)
    dumped = parser().dump(first)
    second = parser().parse_string(dumped)
    assert parser().dump(second) == dumped
    assert vars(build(second)) == {
        **PARSED,
        "fsdp_plan": FSDPPlan(reshard_after_forward=False, param_dtype="bfloat16", cpu_offload=True),
    }


def test_fields_from_the_command_line() -> None:
    config = parser().parse_args(
        [
            f"--strategy={__name__}.Options",
            "--strategy.fsdp_plan.forward_prefetch=2",
            '--strategy.recompute_plan={"apply_modules": ["a.{*}"]}',
            "--strategy.chunkmbs_plan.apply_modules=['a.{*}']",
            "--strategy.chunkmbs_plan.chunk_mbs=3",
            "--strategy.chunkmbs_plan.batch_dims={'position_ids': 1}",
        ]
    )
    options = build(config)
    assert options.fsdp_plan == FSDPPlan(forward_prefetch=2)
    assert options.recompute_plan == RecomputePlan(apply_modules=["a.{*}"])
    assert options.chunkmbs_plan == ChunkMBSPlan(apply_modules=["a.{*}"], chunk_mbs=3, batch_dims={"position_ids": 1})


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        (INIT_ARGS.replace("chunk_arg_indexs", "chunk_arg_indexes"), "chunk_arg_indexes"),
        (INIT_ARGS.replace("chunk_mbs: 2", "chunk_mbss: 2"), "chunk_mbss"),
        (INIT_ARGS.replace("apply_modules", "apply_module"), "apply_module"),
        (INIT_ARGS.replace("recompute_plan", "recompute_plans"), "recompute_plans"),
        (INIT_ARGS + "fsdp_plan: {reshard: false}", "reshard"),
    ],
)
def test_yaml_with_a_misspelt_key_is_rejected_by_name(wrong: str, key: str) -> None:
    with pytest.raises(jsonargparse.ArgumentError, match=rf"'?\b{key}(\.apply_modules)?'? is not (accepted|expected)"):
        parse(wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (INIT_ARGS.replace("chunk_mbs: 2", "chunk_mbs: many"), r"(?s)chunk_mbs.*int.*Given value: many"),
        (INIT_ARGS.replace("chunk_mbs: 2", "chunk_mbs: true"), r"(?s)chunk_mbs.*int.*Given value: True"),
        (INIT_ARGS.replace("chunk_mbs: 2", "chunk_mbs: 1.5"), r"(?s)chunk_mbs.*int.*Given value: 1.5"),
        ("recompute_plan: {apply_modules: layers.0}", "apply_modules.*\n.*list.*layers.0"),
        ("recompute_plan: {apply_modules: [{0-3}]}", "apply_modules.*\n.*str.*{'0-3': None}"),
    ],
)
def test_yaml_with_a_value_of_the_wrong_type(wrong: str, message: str) -> None:
    with pytest.raises(jsonargparse.ArgumentError, match=message):
        parse(wrong)


def test_yaml_with_a_value_out_of_bounds_gets_our_text() -> None:
    config = parse(INIT_ARGS.replace("chunk_mbs: 2", "chunk_mbs: 0"))
    with pytest.raises(ValueError, match=r"chunk_mbs \(samples per chunk\) must be at least 1, but got 0"):
        build(config)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"host_memory_gb": -1},
            ValueError,
            r"host_memory_gb must be 0 or more, but got -1; leave it out for no limit",
        ),
        ({"host_memory_gb": float("nan")}, ValueError, r"host_memory_gb must be 0 or more, but got nan"),
        ({"host_memory_gb": "4"}, TypeError, r"host_memory_gb must be a number of GB or null, but got '4' \(str\)"),
        ({"host_memory_gb": True}, TypeError, r"host_memory_gb must be a number of GB or null, but got True"),
        ({"min_bytes": -1}, ValueError, r"ActivationOffloadPlan.min_bytes must be at least 0, but got -1"),
        ({"min_bytes": None}, TypeError, r"ActivationOffloadPlan.min_bytes must be an integer, but got None"),
        ({"prefetch_bytes": -1}, ValueError, r"ActivationOffloadPlan.prefetch_bytes must be at least 0, but got -1"),
        ({"prefetch_bytes": 1.5}, TypeError, r"ActivationOffloadPlan.prefetch_bytes must be an integer, but got 1.5"),
        ({"pin_memory": 1}, TypeError, r"ActivationOffloadPlan.pin_memory must be true or false, but got 1"),
        ({"stream_hidden_states": None}, TypeError, r"stream_hidden_states must be true or false, but got None"),
    ],
)
def test_offload_plan_errors(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ActivationOffloadPlan(apply_modules=["a.{*}"], **fields)


def test_offload_plan_from_yaml() -> None:
    settings = "host_memory_gb: 1\n  min_bytes: 2\n  prefetch_bytes: 3\n  pin_memory: false"
    plan = build(
        parse(f"activation_offload_plan:\n  apply_modules: ['a.{{*}}']\n  {settings}\n")
    ).activation_offload_plan
    expected = {"host_memory_gb": 1.0, "min_bytes": 2, "prefetch_bytes": 3, "pin_memory": False}
    assert plan == ActivationOffloadPlan(apply_modules=["a.{*}"], **expected)
    assert ActivationOffloadPlan(apply_modules=["a.{*}"]).prefetch_bytes is None


@pytest.mark.parametrize("cls", [*PLANS, FSDPPlan])
def test_help_documents_every_field(cls: type) -> None:
    result = jsonargparse.ArgumentParser()
    result.add_class_arguments(cls, "plan")
    text = " ".join(result.format_help().split())
    for field in dataclasses.fields(cls):
        # The help of a documented field is longer than its type and default, which are always there.
        described = text.split(f"--plan.{field.name} ", 1)[1].split("(", 1)[0]
        assert len(described.split()) >= 5, described


def test_defaults_are_not_shared() -> None:
    first, second = ChunkMBSPlan(apply_modules=["a"]), ChunkMBSPlan(apply_modules=["a"])
    assert (first.chunk_mbs, first.batch_dim, first.chunk_arg_indexs) == (1, 0, [0])
    assert (first.chunk_kwarg_names, first.batch_dims) == ([], {})
    assert first.chunk_arg_indexs is not second.chunk_arg_indexs
    assert FSDPPlan() == FSDPPlan(apply_modules=[], reshard_after_forward=True, forward_prefetch=1)


def test_plans_are_frozen_and_keyword_only() -> None:
    plan = RecomputePlan(apply_modules=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.apply_modules = ["b"]  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        RecomputePlan(["a"])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"chunk_mbs": 0},
            ValueError,
            r"chunk_mbs \(samples per chunk\) must be at least 1, but got 0; write 1 or more",
        ),
        ({"chunk_mbs": -2}, ValueError, r"must be at least 1, but got -2"),
        ({"chunk_mbs": 1.0}, TypeError, r"chunk_mbs .* must be an integer, but got 1.0 \(float\); write 1 or more"),
        ({"chunk_mbs": True}, TypeError, r"must be an integer, but got True \(bool\)"),
        ({"chunk_mbs": "2"}, TypeError, r"must be an integer, but got '2' \(str\)"),
        ({"batch_dim": -1}, ValueError, r"batch_dim must be at least 0, but got -1; write 0 or more"),
        ({"batch_dim": "0"}, TypeError, r"batch_dim must be an integer, but got '0' \(str\)"),
        ({"chunk_arg_indexs": [0, -1]}, ValueError, r"A position in .*chunk_arg_indexs must be at least 0, but got -1"),
        ({"chunk_arg_indexs": ["0"]}, TypeError, r"A position in .*chunk_arg_indexs must be an integer, but got '0'"),
        ({"chunk_arg_indexs": [False]}, TypeError, r"must be an integer, but got False \(bool\)"),
        ({"chunk_arg_indexs": 0}, TypeError, r"chunk_arg_indexs must be a list of positions, but got 0; write .*\[0\]"),
        ({"chunk_arg_indexs": [0, 1, 0]}, ValueError, r"everything once, but 0 is given twice; delete one of them"),
        ({"chunk_kwarg_names": ["a", "a"]}, ValueError, r"chunk_kwarg_names must .* once, but 'a' is given twice"),
        ({"chunk_kwarg_names": [1]}, TypeError, r"A name in .*chunk_kwarg_names must be a string, but got 1 \(int\)"),
        ({"chunk_kwarg_names": "a"}, TypeError, r"chunk_kwarg_names must be a list of names, but got 'a'; write"),
        (
            {"chunk_arg_indexs": []},
            ValueError,
            r"must declare an argument that carries the batch.*chunk_arg_indexs: \[",
        ),
        ({"batch_dims": {"a": -1}}, ValueError, r"The dimension of 'a' in .*batch_dims must be at least 0, but got -1"),
        (
            {"batch_dims": {"a": None}},
            TypeError,
            r"The dimension of 'a' in .*batch_dims must be an integer, but got None",
        ),
        ({"batch_dims": {0: 1}}, TypeError, r"A key of .*batch_dims must be the name of an argument, but got 0"),
        ({"batch_dims": ["a"]}, TypeError, r"batch_dims must map argument names to dimensions.*write {name: 1}"),
    ],
)
def test_chunk_plan_errors(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ChunkMBSPlan(**{"apply_modules": ["a.{*}"], **fields})


def test_keyword_arguments_alone_may_carry_the_batch() -> None:
    plan = ChunkMBSPlan(apply_modules=["a"], chunk_arg_indexs=[], chunk_kwarg_names=["hidden_states"])
    assert plan.chunk_kwarg_names == ["hidden_states"]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"forward_prefetch": -1}, ValueError, r"FSDPPlan.forward_prefetch must be at least 0, but got -1"),
        ({"forward_prefetch": True}, TypeError, r"FSDPPlan.forward_prefetch must be an integer, but got True"),
        (
            {"param_dtype": "float16"},
            ValueError,
            r"FSDPPlan.param_dtype must be 'bfloat16' or 'float32', but got 'float16'",
        ),
        (
            {"reduce_dtype": "bf16"},
            ValueError,
            r"FSDPPlan.reduce_dtype must be 'bfloat16' or 'float32', but got 'bf16'",
        ),
        ({"output_dtype": 32}, TypeError, r"FSDPPlan.output_dtype must be the name of a dtype, .* but got 32"),
        ({"cast_forward_inputs": "no"}, TypeError, r"FSDPPlan.cast_forward_inputs must be true or false, but got 'no'"),
        ({"cpu_offload": 1}, TypeError, r"FSDPPlan.cpu_offload must be true or false, but got 1"),
        ({"compile_blocks": 1}, TypeError, r"FSDPPlan.compile_blocks must be true or false, but got 1"),
        ({"replicate_size": 0}, ValueError, r"FSDPPlan.replicate_size must be at least 1, but got 0"),
        ({"reshard_after_forward": 1}, TypeError, r"FSDPPlan.reshard_after_forward must be true or false, but got 1"),
    ],
)
def test_fsdp_plan_errors(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FSDPPlan(**fields)


@pytest.mark.parametrize("cls", [*PLANS, FSDPPlan])
@pytest.mark.parametrize(
    ("patterns", "error", "message"),
    [
        (
            "a.{*}",
            TypeError,
            r"apply_modules must be a list of patterns, but got the string 'a.{\*}'; write \['a.{\*}'\]",
        ),
        (None, TypeError, r"apply_modules must be a list of patterns, but got None \(NoneType\)"),
        (
            [{"0-3": None}],
            TypeError,
            r"apply_modules must be a string, but got {'0-3': None}. In a YAML flow list, .* must be quoted",
        ),
        (
            ["a", None],
            TypeError,
            r"apply_modules must be a string, but got None. In a YAML flow list, .* must be quoted",
        ),
        (["a", "b", "a"], ValueError, r"apply_modules must name everything once, but 'a' is given twice; delete one"),
    ],
)
def test_pattern_list_errors(cls: type, patterns: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"{cls.__name__}\.{message}"):
        cls(apply_modules=patterns)


@pytest.mark.parametrize("cls", PLANS)
def test_an_empty_pattern_list(cls: type) -> None:
    with pytest.raises(
        ValueError, match=rf"{cls.__name__}.apply_modules must name a module, .*\['model.layers.{{\*}}'\]"
    ):
        cls(apply_modules=[])


def test_coerce_keeps_none_and_plans() -> None:
    plan = RecomputePlan(apply_modules=["a"])
    assert coerce_plan(None, RecomputePlan, "recompute_plan") is None
    assert coerce_plan(plan, RecomputePlan, "recompute_plan") is plan
    assert coerce_plan({}, FSDPPlan, "fsdp_plan") == FSDPPlan()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (
            ["a"],
            TypeError,
            r"chunkmbs_plan must be a ChunkMBSPlan, a dict of its fields, or None, but got \['a'\] \(list",
        ),
        (RecomputePlan(apply_modules=["a"]), TypeError, r"but got RecomputePlan\(.*\) \(RecomputePlan\)"),
        (
            {"chunk_mbs": 2},
            ValueError,
            r"must have the key 'apply_modules', but got only \['chunk_mbs'\]; add 'apply_mod",
        ),
        ({"apply_modules": ["a"], "chunk_mbss": 2}, ValueError, r"no key 'chunk_mbss'; did you mean 'chunk_mbs'\?"),
        (
            {"apply_modules": ["a"], "zzz": 2},
            ValueError,
            r"no key 'zzz'; remove it. Its keys: apply_modules, chunk_mbs,",
        ),
        ({"apply_modules": ["a"], 0: 2}, ValueError, r"no key '0'; remove it"),
        ({"apply_modules": ["a"], "chunk_mbs": 0}, ValueError, r"must be at least 1, but got 0"),
    ],
)
def test_coerce_errors(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        coerce_plan(value, ChunkMBSPlan, "chunkmbs_plan")
