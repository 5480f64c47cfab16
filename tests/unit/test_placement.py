"""Plans: what fits is placed with every value final, what does not fit is refused with numbers and a way out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnictl.assembly import split_cores
from omnictl.budget import SERVER_RESERVE_BYTES, device_budgets
from omnictl.explain import explain
from omnictl.hardware import Cpu, Gpu, Hardware, make_profile
from omnictl.placement import make_plan
from omnictl.recipe import Recipe, load_recipe
from omnictl.units import GIB, MIB
from runtime.errors import PlanError
from runtime.plan import ConnectorKind, Plan
from tests.recipe_data import make_recipe, recipe_data, write_recipe

pytestmark = pytest.mark.usefixtures("no_user_settings")

CPU = make_profile("cpu-8x64")
AVX512 = replace(CPU, cpu=replace(CPU.cpu, flags=("avx2", "avx512f")))


def gpu(index: int, total_gib: float, free_gib: float, capability: tuple[int, int] = (9, 0)) -> Gpu:
    return Gpu(index, "NVIDIA H100", f"GPU-{index}", int(total_gib * GIB), int(free_gib * GIB), capability)


def with_gpus(*gpus: Gpu) -> Hardware:
    return replace(CPU, name="test machine", gpus=gpus)


def load(tmp_path: Path, *overrides: str) -> Recipe:
    return load_recipe(str(write_recipe(tmp_path, recipe_data())), overrides=overrides)


def refuse(recipe: Recipe, hardware: Hardware, gpus: int | None = None) -> PlanError:
    with pytest.raises(PlanError) as caught:
        make_plan(recipe, hardware, gpus=gpus)
    return caught.value


def settings_of(plan: Plan, stage: str = "writer") -> dict[str, Any]:
    return plan.stage(stage).engine_settings


# ---- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "dtype", "size"),
    [(("avx2",), "float32", 4), (("avx512_bf16",), "bfloat16", 2), (("amx_bf16",), "bfloat16", 2)],
)
def test_auto_dtype_on_a_cpu_is_what_it_computes(flags: tuple[str, ...], dtype: str, size: int) -> None:
    plan = make_plan(make_recipe(recipe_data()), replace(CPU, cpu=replace(CPU.cpu, flags=flags)))
    assert settings_of(plan)["dtype"] == dtype
    assert plan.stage("writer").memory.weights_bytes == 10**9 * size * 12 // 10
    assert plan.provenance["stages.writer.engine_settings.dtype"].startswith("auto: the CPU ")


@pytest.mark.parametrize(("capability", "dtype"), [((9, 0), "bfloat16"), ((7, 5), "float16")])
def test_auto_dtype_on_a_gpu_is_what_it_computes(capability: tuple[int, int], dtype: str) -> None:
    plan = make_plan(make_recipe(recipe_data()), with_gpus(gpu(0, 80, 70, capability)))
    assert settings_of(plan)["dtype"] == dtype


def test_an_explicit_dtype_beats_auto(tmp_path: Path) -> None:
    plan = make_plan(load(tmp_path, "stages.writer.engine_settings.dtype=bfloat16"), CPU)
    assert settings_of(plan)["dtype"] == "bfloat16"
    assert plan.provenance["stages.writer.engine_settings.dtype"] == "--set"


def test_lengths_and_batch_follow_the_model_and_the_slots(tmp_path: Path) -> None:
    plan = make_plan(load(tmp_path), CPU)
    assert (settings_of(plan)["max_model_len"], settings_of(plan)["max_num_seqs"]) == (4096, 8)
    assert plan.provenance["stages.writer.engine_settings.max_model_len"] == "model.context_length"
    plan = make_plan(load(tmp_path, "stages.writer.slots=3"), CPU)
    assert settings_of(plan)["max_num_seqs"] == 3


def test_memory_is_a_fifth_more_than_the_parameters(tmp_path: Path) -> None:
    plan = make_plan(load(tmp_path, "stages.speaker.parameters=7", "stages.speaker.bytes_per_parameter=0.5"), CPU)
    assert plan.stage("speaker").memory.weights_bytes == 5  # ceil(round(3.5) x 1.2)
    source = plan.provenance["stages.speaker.memory.weights_bytes"]
    assert source == "7 parameters x 0.5 bytes x 1.2"


def test_an_edge_is_inproc_only_within_one_process(tmp_path: Path) -> None:
    assert make_plan(load(tmp_path), CPU).edges[0].connector is ConnectorKind.SHM
    together = "placements.cpu.processes={all: {stages: [writer, speaker], reserve: 1 GiB}}"
    plan = make_plan(load(tmp_path, together), CPU)
    assert plan.edges[0].connector is ConnectorKind.INPROC
    assert plan.provenance["edges.writer->speaker.connector"] == "auto: both ends in process all"
    copies = ["stages.writer.replicas=2", "stages.speaker.replicas=2"]
    plan = make_plan(load(tmp_path, together, *copies), CPU)
    assert plan.edges[0].connector is ConnectorKind.SHM, "replicas are bound independently of each other"
    assert [process.name for process in plan.processes] == ["all-0", "all-1"]


def test_an_explicit_connector_beats_auto_and_is_refused_where_it_cannot_work(tmp_path: Path) -> None:
    together = "placements.cpu.processes={all: {stages: [writer, speaker], reserve: 1 GiB}}"
    plan = make_plan(load(tmp_path, together, "edges.0.connector=shm"), CPU)
    assert plan.edges[0].connector is ConnectorKind.SHM
    error = refuse(load(tmp_path, "edges.0.connector=inproc"), CPU)
    assert error.problems == (
        "placement cpu: edge writer->speaker: connector inproc needs both ends in one process without copies",
    )


def test_replicas_are_copies_of_their_process(tmp_path: Path) -> None:
    plan = make_plan(load(tmp_path, "stages.speaker.replicas=3"), CPU)
    assert [(p.name, [(r.stage, r.index) for r in p.replicas]) for p in plan.processes] == [
        ("writer", [("writer", 0)]),
        ("speaker-0", [("speaker", 0)]),
        ("speaker-1", [("speaker", 1)]),
        ("speaker-2", [("speaker", 2)]),
    ]


@pytest.mark.parametrize(
    ("num_cores", "wanted", "expected"),
    [
        (2, [None, None, None], [1, 1, 1]),
        (8, [None, None, None], [3, 3, 2]),
        (8, [None, 6, None], [1, 6, 1]),
        (2, [4, None], [4, 1]),
        (4, [None], [4]),
        (4, [], []),
    ],
)
def test_cores_are_split_over_the_processes(num_cores: int, wanted: list[int | None], expected: list[int]) -> None:
    assert split_cores(num_cores, wanted) == expected


def test_a_plan_survives_being_written_and_read(tmp_path: Path) -> None:
    plan = make_plan(load(tmp_path), CPU)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


# ---- every accepted value arrives, and where it came from ---------------------------------------------------

SENTINELS = [
    ("stages.writer.slots", "77", ["stages.writer.slots", "stages.writer.engine_settings.max_num_seqs"]),
    ("stages.writer.cache", "2 GiB", ["stages.writer.memory.cache_bytes"]),
    ("stages.speaker.cache", "3 MiB", ["stages.speaker.memory.cache_bytes"]),
    ("stages.speaker.activation", "5 MiB", ["stages.speaker.memory.activation_bytes"]),
    ("stages.speaker.parameters", "3M", ["stages.speaker.memory.weights_bytes"]),
    ("stages.speaker.bytes_per_parameter", "2", ["stages.speaker.memory.weights_bytes"]),
    ("stages.speaker.program", "acme.other", ["stages.speaker.program"]),
    ("stages.speaker.stall_timeout_s", "7.5", ["stages.speaker.stall_timeout_s"]),
    ("stages.speaker.start_timeout_s", "8.5", ["stages.speaker.start_timeout_s"]),
    ("stages.writer.engine_settings.block_size", "64", ["stages.writer.engine_settings.block_size"]),
    (
        "stages.writer.engine_settings.max_num_batched_tokens",
        "9",
        ["stages.writer.engine_settings.max_num_batched_tokens"],
    ),
    ("stages.writer.engine_settings.enforce_eager", "false", ["stages.writer.engine_settings.enforce_eager"]),
    ("stages.writer.engine_settings.kv_cache_dtype", "fp8", ["stages.writer.engine_settings.kv_cache_dtype"]),
    ("stages.writer.engine_settings.quantization", "awq", ["stages.writer.engine_settings.quantization"]),
    ("stages.writer.program_settings.greeting", "hi", ["stages.writer.program_settings.greeting"]),
    ("edges.0.mode", "whole", ["edges.writer->speaker.mode"]),
    ("edges.0.payload", "latents", ["edges.writer->speaker.payload"]),
    ("edges.0.capacity", "9 MiB", ["edges.writer->speaker.capacity_bytes"]),
    ("limits.request_timeout_s", "3.5", ["limits.request_timeout_s"]),
    ("restarts.max_restarts", "2", ["restarts.max_restarts"]),
    ("tasks.chat.outputs.audio", "writer", ["tasks.chat.outputs.audio"]),
    ("short_names", "[polly]", ["name", "served_names"]),
    ("placements.cpu.processes.writer.reserve", "1 GiB", ["processes.writer.reserve_bytes"]),
    (
        "placements.cpu.processes.speaker.num_threads",
        "3",
        ["processes.speaker.num_threads", "processes.writer.num_threads"],
    ),
    ("placements.cpu.processes.writer.environment.A", "b", ["processes.writer.environment.A"]),
]


@pytest.mark.parametrize(("key", "value", "expected"), SENTINELS, ids=[key for key, _, _ in SENTINELS])
def test_an_override_reaches_exactly_what_it_names(tmp_path: Path, key: str, value: str, expected: list[str]) -> None:
    before = {path: value for path, value, _ in explain(make_plan(load(tmp_path), AVX512))}
    after = explain(make_plan(load(tmp_path, f"{key}={value}"), AVX512))
    changed = {path: source for path, value, source in after if before.get(path) != value}
    assert sorted(changed) == sorted(expected)
    derived = ("parameters", "bytes_per_parameter", "num_threads", "short_names")
    if key.split(".")[-1] not in derived:
        assert changed[expected[0]] == "--set"


def test_every_value_of_a_plan_has_a_source(tmp_path: Path) -> None:
    sources = {path: source for path, _, source in explain(make_plan(load(tmp_path), CPU))}
    assert sources["stages.writer.stall_timeout_s"] == "default"
    assert sources["stages.writer.program_settings.greeting"] == "recipe"
    assert sources["processes.writer.reserve_bytes"] == "placement cpu"
    assert sources["processes.writer.num_threads"] == "8 cores over 2 processes"
    assert sources["placement"] == "the first that fits"


# ---- choosing a placement -----------------------------------------------------------------------------------


def test_a_placement_with_gpus_goes_first_and_brings_its_values(tmp_path: Path) -> None:
    plan = make_plan(load(tmp_path), with_gpus(gpu(0, 80, 70)))
    assert plan.placement == "cuda"
    assert plan.process_of("writer", 0).devices == ("cuda:0",)
    assert plan.process_of("speaker", 0).devices == ("cpu",)
    assert (plan.stage("writer").slots, plan.stage("writer").memory.cache_bytes) == (64, 8 * GIB)
    assert plan.provenance["stages.writer.memory.cache_bytes"] == "placement cuda"


def test_the_next_placement_is_taken_when_the_first_does_not_fit_and_the_reason_is_kept(tmp_path: Path) -> None:
    plan = make_plan(load(tmp_path), with_gpus(gpu(0, 80, 2)))
    assert plan.placement == "cpu"
    assert "placement cuda: cuda:0: 10.7" in plan.provenance["placement"]
    assert "it uses no GPU" in plan.provenance["placement"]


def test_a_placement_that_was_asked_for_is_taken_or_refused(tmp_path: Path) -> None:
    hardware = with_gpus(gpu(0, 80, 2))
    assert make_plan(load(tmp_path, "placement=cpu"), hardware).provenance["placement"] == "--set; it uses no GPU"
    error = refuse(load(tmp_path, "placement=cuda"), hardware)
    assert error.hint == "placement cpu fits: --set placement=cpu --gpus 0"
    error = refuse(load(tmp_path, "placement=cudda"), hardware)
    assert error.problems == ("placement: unknown placement 'cudda' (did you mean 'cuda'?)",)


def test_gpus_that_were_asked_for_are_used_or_the_wish_is_refused(tmp_path: Path) -> None:
    recipe, two = load(tmp_path), with_gpus(gpu(0, 80, 60), gpu(1, 80, 70))
    assert make_plan(recipe, two, gpus=1).process_of("writer", 0).devices == ("cuda:1",)
    assert make_plan(recipe, two, gpus=0).placement == "cpu"
    assert refuse(recipe, two, gpus=2).problems == (
        "--gpus 2: the recipe's processes use 1 at most; ask for 1, or for more replicas",
    )
    assert make_plan(load(tmp_path, "stages.writer.replicas=2"), two, gpus=2).placement == "cuda"
    assert "--gpus 3: test machine has 2 that can be used" in refuse(recipe, two, gpus=3).problems
    assert "--gpus 1: cpu-8x64 has 0 that can be used" in refuse(recipe, CPU, gpus=1).problems
    error = refuse(load(tmp_path, "placement=cpu"), two, gpus=1)
    assert error.problems == ("--gpus 1: placement cpu cannot honour it; placements: cpu (CPU), cuda (GPU)",)


def test_hardware_that_is_known_not_to_work_is_refused(tmp_path: Path) -> None:
    data = recipe_data()
    data["meta"]["hardware"] = {"h100": "unsupported", "cpu": "verified"}
    data["omnictl"]["placement"] = "cuda"
    error = refuse(load_recipe(str(write_recipe(tmp_path, data))), with_gpus(gpu(0, 80, 70)))
    assert error.problems == ("placement cuda: the recipe is known not to work on h100 (meta.hardware)",)


# ---- memory -------------------------------------------------------------------------------------------------


def test_stages_on_one_device_are_summed_against_what_is_free_there() -> None:
    """24 GiB in all, 18 of them free because somebody else has 6: three stages that would fit one by one."""
    data = recipe_data()
    section = data["omnictl"]
    stage = {"engine": "module", "program": "acme.x", "parameters": 1, "bytes_per_parameter": 1}
    section["stages"] = {
        name: stage | {"activation": f"{size} GiB"} for name, size in (("a", 7), ("b", 4.5), ("c", 6.4))
    }
    section["edges"] = [{"source": s, "target": t, "payload": "text", "mode": "whole"} for s, t in ("ab", "bc")]
    section["tasks"] = {"chat": {"inputs": {"text": "a"}, "outputs": {"text": "c"}}}
    section["placements"] = {"cuda": {"processes": {"all": {"stages": ["a", "b", "c"], "gpus": 1, "reserve": "1 GiB"}}}}
    error = refuse(make_recipe(data), with_gpus(gpu(0, 24, 18)))
    assert error.problems == (
        "placement cuda: cuda:0: 18.9 GiB needed, 18 GiB free (of 24 GiB, 6 GiB in use): 921.6 MiB short "
        "(stage a 7 GiB, stage c 6.4 GiB, stage b 4.5 GiB, reserve of all 1 GiB)",
    )
    assert error.hint == "cuda:0 needs 18.9 GiB free: end other programs, which use 6 GiB"
    assert make_plan(make_recipe(data), with_gpus(gpu(0, 24, 19))).placement == "cuda"


def test_what_does_not_fit_is_refused_with_the_shortfall_and_a_smaller_cache(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    needed = device_budgets(make_plan(recipe, CPU), CPU)[0].needed_bytes
    tight = replace(CPU, cpu=replace(CPU.cpu, free_bytes=needed - 100 * MIB))
    error = refuse(recipe, tight)
    assert error.exit_code == 4
    assert "100 MiB short" in error.problems[0]
    assert error.hint == "a smaller cache fits: --set 'stages.writer.cache=924 MiB'"
    assert make_plan(load(tmp_path, "stages.writer.cache=924 MiB"), tight)


def test_a_smaller_cache_is_not_told_when_a_request_would_not_fit_in_it(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    needed = device_budgets(make_plan(recipe, CPU), CPU)[0].needed_bytes
    error = refuse(recipe, replace(CPU, cpu=replace(CPU.cpu, free_bytes=needed - 600 * MIB)))
    assert error.hint is not None
    assert error.hint.startswith("cpu needs ")


def test_a_cache_that_cannot_hold_one_request_is_refused(tmp_path: Path) -> None:
    (problem,) = refuse(load(tmp_path, "stages.writer.cache=256 MiB"), CPU).problems
    assert "stages.writer.cache: 256 MiB holds 2048 tokens; one request of max_model_len 4096 needs 512 MiB" in problem
    smaller = ["stages.writer.cache=256 MiB", "stages.writer.engine_settings.kv_cache_dtype=fp8"]
    assert make_plan(load(tmp_path, *smaller), AVX512)


def test_fewer_replicas_are_told_when_those_fit(tmp_path: Path) -> None:
    error = refuse(load(tmp_path, "stages.writer.replicas=40"), CPU)
    assert error.hint == "fewer replicas fit: --set stages.writer.replicas=10"
    assert make_plan(load(tmp_path, "stages.writer.replicas=10"), CPU)


def test_more_gpus_are_told_when_those_fit(tmp_path: Path) -> None:
    recipe = load(tmp_path, "stages.writer.replicas=2", "stages.writer.activation=50 GiB", "placement=cuda")
    hardware = replace(make_profile("h100x2"), name="two")
    assert refuse(recipe, hardware, gpus=1).hint == "more GPUs fit: --gpus 2"
    assert refuse(recipe, make_profile("h100")).hint == "fewer replicas fit: --set stages.writer.replicas=1"
    data = recipe_data()
    data["omnictl"]["placements"] = {"cuda": data["omnictl"]["placements"]["cuda"]}
    data["omnictl"]["placements"]["cuda"]["processes"]["speaker"]["gpus"] = 1
    data["omnictl"]["stages"]["speaker"]["activation"] = "50 GiB"
    data["omnictl"]["stages"]["writer"]["activation"] = "50 GiB"
    wanted = "2 GPUs like NVIDIA H100 80GB HBM3 would fit, with placement cuda"
    assert refuse(make_recipe(data), make_profile("h100")).hint == wanted
    assert refuse(make_recipe(data), make_profile("cpu-8x64")).problems == (
        "every placement needs a GPU; cpu-8x64 has none that can be used",
    )


def test_shared_memory_is_a_device_too(tmp_path: Path) -> None:
    error = refuse(load(tmp_path, "edges.0.capacity=64 MiB"), replace(CPU, shm_free_bytes=48 * MIB))
    assert "shm: 64 MiB needed, 48 MiB free: 16 MiB short" in error.problems[0]
    assert "--shm-size" in str(error.hint)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    error = refuse(
        load(
            tmp_path,
            "edges.0.target=speeker",
            "edges.0.connector=inproc",
            "tasks.chat.inputs.text=writr",
            "stages.writer.cache=900 GiB",
            "stages.speaker.parameters=100B",
        ),
        replace(CPU, shm_free_bytes=0),
        gpus=3,
    )
    told = "\n".join(error.problems)
    for part in ("unknown stage 'speeker'", "unknown stage 'writr'", "--gpus 3", "process writer needs a GPU"):
        assert part in told
    told = "\n".join(refuse(load(tmp_path, "edges.0.target=speeker", "stages.writer.cache=900 GiB"), CPU).problems)
    assert "unknown stage 'speeker'" in told
    assert "GiB short" in told


# ---- properties ---------------------------------------------------------------------------------------------

SIZES_MIB = st.integers(0, 3000)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """A chain of module stages, some on GPUs, spread over processes in any way."""
    names = [f"s{index}" for index in range(draw(st.integers(1, 5)))]
    groups = [draw(st.integers(0, 2)) for _ in names]
    replicas = {group: draw(st.integers(1, 3)) for group in sorted(set(groups))}
    data = recipe_data()
    section = data["omnictl"]
    section["stages"] = {
        name: {
            "engine": "module",
            "program": "acme.x",
            "activation": f"{draw(SIZES_MIB)} MiB",
            "cache": f"{draw(SIZES_MIB)} MiB",
            "replicas": replicas[group],
        }
        for name, group in zip(names, groups, strict=True)
    }
    pairs = list(zip(names, names[1:], strict=False))
    edge = {"payload": "text", "mode": "whole", "capacity": f"{draw(st.integers(1, 200))} MiB"}
    section["edges"] = [{"source": source, "target": target, **edge} for source, target in pairs]
    section["tasks"] = {"chat": {"inputs": {"text": names[0]}, "outputs": {"text": names[-1]}}}
    section["placements"] = {
        "only": {
            "processes": {
                f"p{group}": {
                    "stages": [name for name, own in zip(names, groups, strict=True) if own == group],
                    "gpus": draw(st.integers(0, 1)),
                    "reserve": f"{draw(SIZES_MIB)} MiB",
                }
                for group in replicas
            }
        }
    }
    return make_recipe(data)


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    gpus = tuple(gpu(index, 10, draw(st.integers(0, 10_000)) / 1024) for index in range(draw(st.integers(0, 3))))
    free_bytes = draw(st.integers(0, 40_000)) * MIB
    cpu = Cpu("test", draw(st.integers(1, 16)), 40 * GIB, free_bytes)
    return Hardware("test machine", cpu, gpus, draw(st.integers(0, 2000)) * MIB)


def used_bytes(plan: Plan) -> dict[str, int]:
    """The sums once more, in the plainest way."""
    used = {"cpu": SERVER_RESERVE_BYTES, "shm": 0}
    for process in plan.processes:
        for device in {"cpu", *process.devices}:
            used[device] = used.get(device, 0) + process.reserve_bytes
        for replica in process.replicas:
            memory = plan.stage(replica.stage).memory
            for device in process.devices:
                used[device] += memory.weights_bytes + memory.cache_bytes + memory.activation_bytes
    for edge in plan.edges:
        bytes_in_flight = edge.capacity_bytes * plan.stage(edge.source).replicas * plan.stage(edge.target).replicas
        used["cpu"] += bytes_in_flight
        used["shm"] += bytes_in_flight if edge.connector == "shm" else 0
    return used


def plan_or_problems(recipe: Recipe, hardware: Hardware) -> Plan | tuple[str, ...]:
    try:
        return make_plan(recipe, hardware)
    except PlanError as error:
        return error.problems


@given(recipe=recipes(), hardware=machines())
@settings(deadline=None)
def test_no_device_is_oversubscribed_and_every_replica_has_one_place(recipe: Recipe, hardware: Hardware) -> None:
    free = {"cpu": hardware.cpu.free_bytes, "shm": hardware.shm_free_bytes}
    free |= {gpu.device: gpu.free_bytes for gpu in hardware.gpus}
    plan = plan_or_problems(recipe, hardware)
    if not isinstance(plan, Plan):
        assert plan
        assert all("short" in problem or "needs a GPU" in problem for problem in plan)
        return
    assert all(size_bytes <= free[device] for device, size_bytes in used_bytes(plan).items())
    places = sorted((replica.stage, replica.index) for process in plan.processes for replica in process.replicas)
    assert places == sorted((stage.name, index) for stage in plan.stages for index in range(stage.replicas))
    for process in plan.processes:
        assert process.num_threads >= 1
        assert len(process.devices) == 1


@given(recipe=recipes(), free_mib=st.integers(0, 40_000))
@settings(deadline=None)
def test_on_a_cpu_what_fits_is_never_refused(recipe: Recipe, free_mib: int) -> None:
    processes = recipe.omnictl.placements["only"].processes.values()
    plain = Hardware("big", Cpu("test", 4, 1 << 60, 1 << 60), (), 1 << 60)
    if any(process.gpus for process in processes):
        assert all("needs a GPU" in problem for problem in refuse(recipe, plain).problems)
        return
    needed_bytes = used_bytes(make_plan(recipe, plain))["cpu"]
    tight = replace(plain, cpu=replace(plain.cpu, free_bytes=free_mib * MIB))
    if needed_bytes <= free_mib * MIB:
        assert make_plan(recipe, tight)
    else:
        assert "short" in refuse(recipe, tight).problems[0]
