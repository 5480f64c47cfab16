"""What a person, or a log, sees of a long transfer."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from omnictl import progress
from omnictl.progress import BarProgress, LineProgress, show_progress


def test_a_log_gets_one_line_a_change_of_state(capsys: pytest.CaptureFixture[str]) -> None:
    with LineProgress().transfer("voice from host", 1000, 200) as advance:
        for _ in range(8):
            advance(100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "voice from host (1000 B)"
    assert lines[1].startswith("voice from host: done in ")
    assert len(lines) == 2


def test_a_long_transfer_says_that_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "REPORT_EVERY_S", 0.0)
    with LineProgress().transfer("voice", 1000, 200) as advance:
        advance(300)
        advance(-500)
    assert capsys.readouterr().err.splitlines()[1:3] == ["voice: 50 %", "voice: 0 %"]


def test_work_that_fails_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"), LineProgress().work("converting"):
        raise ValueError("no")
    assert capsys.readouterr().err == "converting\n"


def test_a_terminal_gets_a_bar() -> None:
    drawn = io.StringIO()
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[moved]}"))
    with Progress(*columns, console=Console(file=drawn, force_terminal=True, width=120)) as bars:
        shown = BarProgress(bars)
        shown.say("asking the index")
        with shown.transfer("voice", 1000, 200) as advance:
            advance(300)
            assert (bars.tasks[0].completed, bars.tasks[0].total) == (500, 1000)
            bars.refresh()
        with shown.work("converting"):
            assert bars.tasks[0].total is None
        assert bars.tasks == []
    assert "asking the index" in drawn.getvalue()
    assert "500 B of 1000 B" in drawn.getvalue()


def test_without_a_terminal_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress() as shown:
        assert isinstance(shown, LineProgress)
        shown.say("hello")
    assert capsys.readouterr().err == "hello\n"
