"""The converter's process: its errors come out as what they are, and it does not outlive whoever wanted it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from omnictl.processes import ProcessId, descendants
from omnictl.pulling import convert
from runtime.errors import ConfigError, OmniError, WeightsError


def test_an_unknown_converter_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown converter 'sidekick\.voic' \(did you mean 'sidekick\.voice'\?\)"):
        convert("sidekick.voic", tmp_path)


def test_a_broken_file_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "heart.onnx").write_bytes(b"not a model")
    with pytest.raises(WeightsError, match=r"converter sidekick\.voice failed: \w+: ") as caught:
        convert("sidekick.voice", tmp_path)
    assert "Traceback" not in str(caught.value)


def test_another_export_of_the_voice_is_refused(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "other", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph), tmp_path / "heart.onnx")
    with pytest.raises(WeightsError, match="has no tensor .* to cut at; it is another export"):
        convert("sidekick.voice", tmp_path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OmniError, match=r"heart\.onnx"):
        convert("sidekick.voice", tmp_path)


def test_a_converter_ends_with_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    call = f"convert('sidekick.thinker', Path({str(tmp_path)!r}))"
    code = f"from pathlib import Path; from omnictl.pulling import convert; {call}"
    with subprocess.Popen([sys.executable, "-P", "-c", code], stderr=subprocess.DEVNULL) as parent:
        child = _busy_child(parent)
        parent.kill()
    assert child.wait(100), "the converter lives on without its parent"


def _busy_child(parent: subprocess.Popen[bytes]) -> ProcessId:
    """The converter's process, once it is loading its libraries."""
    deadline_s = time.monotonic() + 100
    while time.monotonic() < deadline_s:
        for child in descendants(parent.pid):
            if "libtorch" in Path(f"/proc/{child.pid}/maps").read_text():
                return child
        time.sleep(0.01)
    raise AssertionError("the converter did not start")
