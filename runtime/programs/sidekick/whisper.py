"""Whisper in CTranslate2: spectrograms to tokens, tokens to text. One window at a time.

Knows prompts, special tokens and decoding; nothing of clips, windows or requests. The ear calls it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from runtime.errors import InvalidRequest, WeightsError
from runtime.programs.loading import require_module
from runtime.programs.media.audio import FloatArray
from runtime.programs.sidekick.transcript import Heard, first_round, sounds_like_speech

FILES = ("model.bin", "config.json", "tokenizer.json", "vocabulary.txt")
MAX_LENGTH = 448
"""Tokens that the decoder has places for, those of the prompt included; half of them are for the answer."""
MAX_PROMPT_TOKENS = MAX_LENGTH // 2 - 1
_DEFAULT_SUPPRESSED = -1
"""Stands for the tokens that the model's own configuration bans."""
_MIN_TOKENS, _TOKENS_PER_S = 16, 15.0
"""A window gets so many tokens, and so many more for each second of sound: more than speech takes in most languages."""


class Recognizer:
    """The model and its tokenizer. Rows are decoded one by one: on a CPU a batch takes as long as its rows."""

    def __init__(self, folder: Path, compute_type: str, num_threads: int, stage: str) -> None:
        library = require_module("ctranslate2", stage)
        tokenizers = require_module("tokenizers", stage)
        self._view = library.StorageView.from_array
        library.set_random_seed(secrets.randbits(31))  # sampling is not to repeat itself from start to start
        try:
            self._model = library.models.Whisper(
                str(folder), device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=num_threads
            )
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            language_ids = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])["lang_ids"]
        except Exception as exc:  # neither library has a base class for what it raises
            raise WeightsError(
                f"stage {stage}: {folder} cannot be loaded: {exc}", hint="fetch the weights again with `omnictl pull`"
            ) from exc
        self._language_ids = {self._tokenizer.id_to_token(i).strip("<|>"): i for i in language_ids}
        self._end, self._start, self._previous, self._transcribe, no_timestamps = (
            self._tokenizer.token_to_id(f"<|{name}|>")
            for name in ("endoftext", "startoftranscript", "startofprev", "transcribe", "notimestamps")
        )
        self.first_timestamp: int = no_timestamps + 1
        self._never = [_DEFAULT_SUPPRESSED, *range(self._end + 1, self.first_timestamp)]

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of the languages that the model knows."""
        return tuple(self._language_ids)

    def encode(self, features: FloatArray) -> Any:
        """What the other methods want of a window's log-mel features [num_mels, num_frames]."""
        return self._model.encode(self._view(np.ascontiguousarray(features[None])))

    def detect_language(self, encoded: Any) -> str:
        ((best, *_),) = self._model.detect_language(encoded)
        return str(best[0]).strip("<|>")

    def prompt_tokens(self, text: str) -> list[int]:
        """The end of a prompt, as much as the model takes. What looks like a control token in it is left out."""
        if not text.strip():
            return []
        tokens = self._tokenizer.encode(" " + text.strip(), add_special_tokens=False).ids
        return [token for token in tokens if token < self._end][-MAX_PROMPT_TOKENS:]

    def transcribe(
        self, encoded: Any, language: str, prompt: Sequence[int], temperature: float, sound_s: float
    ) -> Heard:
        """Greedy at temperature 0, else sampled. `sound_s` of the window are sound, which bounds the text.

        A text in circles from what may be no speech is begun a second time, up to its first round, for its scores.
        """
        before = [self._previous, *prompt] if prompt else []
        start = [*before, self._start, self._language_ids[language], self._transcribe]
        max_tokens = min(_MIN_TOKENS + math.ceil(_TOKENS_PER_S * sound_s), MAX_LENGTH // 2, MAX_LENGTH - len(start))
        heard = self._generate(encoded, start, temperature, max_tokens)
        num_head = self._num_before_second_round(heard.tokens)
        if num_head == len(heard.tokens) or sounds_like_speech(heard):
            return heard
        head = self._generate(encoded, start, temperature, num_head)
        return replace(heard, average_log_prob=head.average_log_prob, num_steps=heard.num_steps + head.num_steps)

    def _num_before_second_round(self, tokens: Sequence[int]) -> int:
        """Tokens up to the end of the first round of a loop, timestamps included; all if there is no loop."""
        places = [place for place, token in enumerate(tokens) if token < self._end]
        num_text = first_round([tokens[place] for place in places])
        return places[num_text] if num_text < len(places) else len(tokens)

    def _generate(self, encoded: Any, start: Sequence[int], temperature: float, max_tokens: int) -> Heard:
        (result,) = self._model.generate(
            encoded,
            [start],
            beam_size=1,
            sampling_temperature=temperature or 1.0,
            sampling_topk=0 if temperature else 1,
            # the library stops at half of this, and where prompt and text together reach it
            max_length=max(2 * max_tokens, max_tokens + len(start)),
            suppress_tokens=self._never,
            return_scores=True,
            return_no_speech_prob=True,
        )
        tokens = result.sequences_ids[0]
        return Heard(
            tokens=tokens,
            no_speech_prob=result.no_speech_prob,
            average_log_prob=result.scores[0],
            cut_off=len(tokens) >= max_tokens,
            num_steps=len(tokens),
        )

    def text(self, tokens: Sequence[int]) -> str:
        """Without timestamps and other control tokens."""
        words: str = self._tokenizer.decode([token for token in tokens if token < self._end])
        return words

    def language(self, code: Any) -> str:
        """A language that a client names, as the model knows it; InvalidRequest for others."""
        if not isinstance(code, str) or code.lower() not in self._language_ids:
            raise InvalidRequest(
                f"language: got {code!r}; expected an ISO-639-1 code such as en",
                param="language",
                hint=f"known: {', '.join(self._language_ids)}",
            )
        return code.lower()
