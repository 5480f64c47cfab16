"""Programs by name: the model-family glue of a stage, and the only place where model names may appear.

A lazy registry: nothing of a family is imported before a stage of it is loaded.
"""

from __future__ import annotations

import difflib
from typing import Any

from runtime.engines.base import LoadContext, resolve
from runtime.errors import ConfigError

PROGRAMS: dict[str, str] = {
    "qwen2_5_omni.talker": "runtime.programs.qwen2_5_omni.talker:load",
    "qwen2_5_omni.thinker": "runtime.programs.qwen2_5_omni.thinker:load",
    "qwen2_5_omni.token2wav": "runtime.programs.qwen2_5_omni.token2wav:load",
    "qwen3_omni.captioner": "runtime.programs.qwen3_omni.captioner:load",
    "qwen3_omni.code2wav": "runtime.programs.qwen3_omni.code2wav:load",
    "qwen3_omni.thinker": "runtime.programs.qwen3_omni.thinker:load",
    "qwen3_omni.talker": "runtime.programs.qwen3_omni.talker:load",
    "sidekick.ear": "runtime.programs.sidekick.ear:load",
    "sidekick.thinker": "runtime.programs.sidekick.thinker:load",
    "sidekick.talker": "runtime.programs.sidekick.talker:load",
    "sidekick.code2wav": "runtime.programs.sidekick.code2wav:load",
}
"""program name -> "module:factory"; the factory takes a LoadContext."""

CONVERTERS: dict[str, str] = {
    "qwen3_omni.tiny": "runtime.programs.qwen3_omni.tiny:build",
    "sidekick.thinker": "runtime.programs.sidekick.convert:thinker",
    "sidekick.voice": "runtime.programs.sidekick.convert:voice",
}
"""converter name -> "module:function(folder)"; makes what the program loads, in place, of fetched files or
of nothing.
"""


def load_program(context: LoadContext) -> Any:
    """Build the program of a stage; ConfigError with the nearest name when it does not exist."""
    name = context.stage.program
    if name not in PROGRAMS:
        near = difflib.get_close_matches(name, PROGRAMS, n=1)
        raise ConfigError(
            f"stage {context.stage.name}: unknown program {name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""),
            hint=f"known programs: {', '.join(sorted(PROGRAMS))}",
        )
    return resolve(PROGRAMS[name])(context)
