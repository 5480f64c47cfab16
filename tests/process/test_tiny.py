"""`omnictl up NAME --tiny`: built, served, asked by the official SDK for text and speech, taken down."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.served import Served, ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 12
NUM_FRAMES = 30
SAMPLES_PER_FRAME = 1920


def test_the_tiny_omni_model_is_built_served_and_taken_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICTL_SHM_DIR", str(shm_dir := tmp_path / "shm"))
    shm_dir.mkdir()
    length = ("--set", f"stages.talker.program_settings.max_tokens={NUM_FRAMES}")
    served = Served(tmp_path, "qwen3-omni", "--tiny", *length)
    try:
        assert [model.id for model in served.client.models.list()] == ["qwen3-omni", "qwen/qwen3-omni-30b-a3b-instruct"]
        limits = {"max_tokens": NUM_TOKENS, "temperature": 0.0}
        answer = ask(served.client, "qwen3-omni", "Wie heißt du? 你好", ["text", "audio"], **limits)
        assert answer.text
        assert len(answer.audio_s) > 1, "speech comes in chunks"
        assert 0 < NUM_FRAMES * SAMPLES_PER_FRAME - len(answer.samples) < SAMPLES_PER_FRAME
        assert answer.samples.any()
        (told,) = served.omnictl("chat", "Wie heißt du? 你好").splitlines()[:1]
        assert told
        server = psutil.Process(served.stages()["thinker"]["pid"]).parent()
        assert server is not None
        processes = [server, *server.children(recursive=True)]
    finally:
        served.down()
    assert json.loads(served.omnictl("ps", "--json")) == {"deployments": []}
    assert not [process for process in processes if process.is_running()]
    assert list(shm_dir.iterdir()) == []
