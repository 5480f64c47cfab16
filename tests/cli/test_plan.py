"""`omnictl plan` and `omnictl recipes` from the entry point on: exit codes, and what stands on stdout or stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omnictl import cli
from tests.recipe_data import recipe_data, write_recipe

HEAVY = ("torch", "vllm", "diffusers", "transformers", "docker", "httpx", "rich", "pydantic")

pytestmark = pytest.mark.usefixtures("no_user_settings")


@dataclass(frozen=True)
class Done:
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Call the entry point, with an executable first on PATH that notes that it was called and fails."""
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\necho 'driver is broken' >&2\nexit 9\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")

    def run(*arguments: str, code: int = 0) -> Done:
        monkeypatch.setattr(sys, "argv", ["omnictl", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        done = Done(*capfd.readouterr())
        assert (ended.value.code or 0) == code, done
        return done

    return run


def test_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, omnictl.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert {name.split(".")[0] for name in done.stdout.split()} & set(HEAVY) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("plan", "--help"),
        ("recipes", "list"),
        ("recipes", "validate"),
        ("recipes", "show", "sidekick"),
        ("plan", "sidekick", "--hardware", "cpu-2x24"),
    ],
)
def test_commands_that_need_no_gpu_do_not_look_for_one(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    run(*arguments)
    assert not (tmp_path / "calls").exists()


def test_a_broken_gpu_probe_is_told_and_the_plan_is_made_without(run: Run, tmp_path: Path) -> None:
    done = run("plan", "sim-chain")
    assert (tmp_path / "calls").exists()
    assert "exit status 9: driver is broken; no GPU is used" in done.stderr
    assert "placement  cpu" in done.stdout


def test_the_table_shows_stages_devices_and_memory(run: Run) -> None:
    shown = run("plan", "sidekick", "--hardware", "cpu-2x24").stdout
    for part in ("found by short name", "2 cores, 24.0 GiB free, no GPU", "cpu (the only one)", "cpu: verified"):
        assert part in shown
    for part in ("ear", "thinker", "talker", "code2wav", "float32", "618 MiB", "256 MiB", "thinker->talker", "shm"):
        assert part in shown


def test_json_is_one_document_on_stdout(run: Run) -> None:
    done = run("plan", "sidekick", "--hardware", "cpu-2x24", "--json")
    plan = json.loads(done.stdout)
    assert (plan["name"], plan["placement"]) == ("sidekick", "cpu")
    assert done.stderr == ""


def test_explain_says_where_each_value_came_from(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICTL_SET", "stages.talker.slots=5")
    arguments = ("plan", "sidekick", "--hardware", "cpu-2x24", "--explain", "--set", "stages.ear.slots=3")
    shown = run(*arguments).stdout
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines()}
    assert lines["stages.ear.slots"] == "3 --set"
    assert lines["stages.talker.slots"] == "5 OMNICTL_SET"
    assert lines["stages.code2wav.slots"] == "16 recipe"
    assert lines["stages.ear.replicas"] == "1 default"
    dtype = "float32 auto: the CPU has neither avx512_bf16 nor amx_bf16"
    assert lines["stages.thinker.engine_settings.dtype"] == dtype


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("plan", "sidekik"), 2, "no recipe is called 'sidekik' (did you mean 'sidekick'?)"),
        (("plan", "sidekick", "--hardware", "h10"), 3, "unknown profile (did you mean 'h100'?)"),
        (("plan", "sidekick", "--set", "stages.thinker.slotz=1"), 3, "unknown key 'slotz' (did you mean 'slots'?)"),
        (("plan", "sidekick", "--gpus", "-1"), 2, "--gpus"),
        (("plan", "sidekick", "--hardware", "cpu-2x2"), 4, "MiB short"),
        (("plan", "sidekick", "--hardware", "h100", "--gpus", "1"), 4, "--gpus 1: the recipe cannot honour it"),
        (("plan", "sidekick", "--gpu", "1"), 2, "No such option: --gpu"),
        (("plan",), 2, "Missing argument"),
        (("recipes", "show", "x.yaml"), 2, "no such file"),
    ],
)
def test_each_cause_has_its_exit_code_and_says_what_to_do(
    run: Run, arguments: tuple[str, ...], code: int, expected: str
) -> None:
    done = run(*arguments, code=code)
    assert expected in done.stderr
    assert done.stdout == ""


def test_a_plan_that_does_not_fit_names_the_shortfall_and_a_way_out(run: Run) -> None:
    told = run("plan", "sidekick", "--hardware", "cpu-2x24", "--set", "stages.thinker.replicas=99", code=4).stderr
    assert "error: recipe sidekick does not fit cpu-2x24" in told
    assert "24 GiB free:" in told
    (hint,) = (line for line in told.splitlines() if line.startswith("hint: fewer replicas fit: "))
    run("plan", "sidekick", "--hardware", "cpu-2x24", *hint.removeprefix("hint: fewer replicas fit: ").split())


def test_gpus_without_a_count_in_the_profile_are_planned_for(run: Run, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, recipe_data())
    arguments = ("plan", str(path), "--hardware", "h100", "--gpus", "2", "--set", "stages.writer.replicas=2", "--json")
    plan = json.loads(run(*arguments).stdout)
    assert [process["devices"] for process in plan["processes"]] == [["cuda:0"], ["cuda:1"], ["cpu"]]


def test_the_list_shows_every_recipe_and_what_is_wrong_with_a_broken_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    write_recipe(folder, recipe_data())
    (folder / "acme" / "broken.yaml").write_text("meta: {}\n")
    monkeypatch.setenv("OMNICTL_RECIPE_DIRS", str(folder))
    rows = json.loads(run("recipes", "list", "--json").stdout)
    named: dict[str, Any] = {row["model_id"]: row for row in rows}
    assert named["acme/parrot"]["tasks"] == ["chat", "speech"]
    assert named["acme/parrot"]["problem"] is None
    assert "problems" in named["acme/broken"]["problem"]
    assert named["omnictl/sidekick"]["name"] == "sidekick"
    shown = run("recipes", "list").stdout
    assert "acme/broken" in shown
    assert "Sidekick" in shown


def test_show_is_a_recipe_again(run: Run, tmp_path: Path) -> None:
    shown = run("recipes", "show", "sim-chain", "--set", "stages.think.slots=9").stdout
    path = tmp_path / "again.yaml"
    path.write_text(shown)
    again = run("recipes", "show", str(path)).stdout
    assert again == shown
    data = json.loads(run("recipes", "show", str(path), "--json").stdout)
    assert data["omnictl"]["stages"]["think"]["slots"] == 9


def test_validate_fails_with_every_problem_of_every_recipe(run: Run, tmp_path: Path) -> None:
    first, second = recipe_data(), recipe_data()
    first["omnictl"]["stages"]["writer"]["slotz"] = 1
    second["omnictl"]["edges"][0]["target"] = "nobody"
    paths = [write_recipe(tmp_path / str(index), data) for index, data in enumerate((first, second))]
    done = run("recipes", "validate", "sidekick", *map(str, paths), code=3)
    assert done.stdout.splitlines() == ["sidekick: ok", f"{paths[0]}: 1 problem", f"{paths[1]}: 2 problems"]
    assert f"{paths[0]}: omnictl.stages.writer.slotz: unknown key (did you mean 'slots'?)" in done.stderr
    assert f"{paths[1]}: edges.0: unknown stage 'nobody'" in done.stderr
    rows = json.loads(run("recipes", "validate", str(paths[1]), "--json", code=3).stdout)
    assert len(rows[0]["problems"]) == 2
    assert "sim-chain" in run("recipes", "validate").stdout
