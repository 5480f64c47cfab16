"""Qwen3-Omni's captioner: the thinker, trained to describe one sound without being told how. Runs on engine `ar`.

Refuses what the model was not made for and would answer all the same: texts, instructions, further turns or clips.
"""

from __future__ import annotations

from typing import Any

from runtime.engines.ar.program import Prompt
from runtime.engines.base import LoadContext
from runtime.errors import InvalidRequest
from runtime.programs.qwen3_omni import thinker

EXPECTED = "this model describes one audio clip: expected one message of the user with one audio part and nothing else"


class Captioner(thinker.Thinker):
    def prompt(self, state: Any, tokenizer: Any) -> Prompt:
        """InvalidRequest, naming it, for the first thing that is not the clip."""
        for number, message in enumerate(state.messages or []):
            where, content = f"messages[{number}]", message["content"]
            if message["role"] != "user":
                raise _refused(f"{where}.role", f"{message['role']!r}")
            if number:
                raise _refused(where, "a second message")
            kinds = ["text"] if isinstance(content, str) else [part["type"] for part in content]
            for position, kind in enumerate(kinds):
                if kind != "audio" or position:
                    place = where if isinstance(content, str) else f"{where}.content[{position}]"
                    raise _refused(place, "a second clip" if kind == "audio" else kind)
        return super().prompt(state, tokenizer)


def _refused(param: str, found: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {found}; {EXPECTED}", param=param)


def load(context: LoadContext) -> thinker.Thinker:
    return thinker.load(context, Captioner)
