"""`omnictl chat`: a question in text, sound or pictures; the answer streamed to the terminal and into a sound file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from omnictl import output
from omnictl.state import Store
from runtime.errors import ConfigError, InvalidRequest, NotRunning


def command(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The question. Default: standard input, or a dialogue.")
    ] = None,
    voice_in: Annotated[Path | None, typer.Option(metavar="FILE", help="A question as a wav or mp3 file.")] = None,
    image: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="A picture to ask about.")] = None,
    video: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="A video to ask about.")] = None,
    audio_out: Annotated[Path | None, typer.Option(metavar="FILE.wav", help="Have it spoken, into this file.")] = None,
    name: Annotated[str | None, typer.Option(metavar="DEPLOYMENT", help="Default: the only one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole answer as one JSON document.")] = False,
) -> None:
    """Ask a running deployment.

    The answer goes to stdout as it comes; the times to its first text, first audio and end go to stderr.
    """
    from omnictl.client import audio_part, seen_part
    from omnictl.conversation import Conversation

    store = Store()
    deployment = store.load(store.choose(name))
    if not deployment.is_alive:
        raise NotRunning(f"{deployment.name} does not run ({deployment.observed})", hint="omnictl up NAME")
    if audio_out is not None:
        _check_sound_file(audio_out)
    media = [audio_part(voice_in)] if voice_in is not None else []
    media += [seen_part("image", file) for file in image or ()] + [seen_part("video", file) for file in video or ()]
    is_dialogue = text is None and not media and sys.stdin.isatty()
    if is_dialogue and as_json:
        raise ConfigError("--json is one document and a dialogue has several answers; give TEXT")
    if text is None and not media and not is_dialogue:
        text = sys.stdin.read()
    with Conversation(deployment, audio_out, quiet=as_json) as conversation:
        if is_dialogue:
            conversation.hold()
            return
        answer = conversation.ask(text, media)
    if as_json:
        output.print_json(answer.to_document())


def _check_sound_file(path: Path) -> None:
    if path.suffix.lower() != ".wav":
        raise InvalidRequest(
            f"--audio-out {path}: ends in {path.suffix!r}; expected .wav", hint="it is written as a wav file"
        )
    if not path.absolute().parent.is_dir():
        raise InvalidRequest(f"--audio-out {path}: there is no such folder")
