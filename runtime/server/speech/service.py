"""The work of speech: text to a RequestSpec, and its audio to bytes or events."""

from __future__ import annotations

from typing import Any

from runtime.errors import InvalidRequest
from runtime.payload import Payload
from runtime.plan import REQUEST_INPUT, Modality, PayloadKind, Plan
from runtime.requests import Delta, Done, RequestSpec
from runtime.server import sse
from runtime.server.audio import AudioTrack, Base64Stream
from runtime.server.calls import Call
from runtime.server.names import find_voice, require_model, require_text
from runtime.server.ports import Orchestrator
from runtime.server.replies import Pieces
from runtime.server.speech.schema import SpeechRequest, audio_delta, audio_done
from runtime.server.usage import found_nothing_to_say, speech_usage

TASK = "speech"


class SpeechService:
    def __init__(self, orchestrator: Orchestrator, plan: Plan) -> None:
        self._orchestrator = orchestrator
        self._plan = plan

    async def open(self, body: SpeechRequest, request_id: str) -> Call:
        """Check what the schema cannot, then submit. Raises what the request is refused for."""
        require_model(self._plan, body.model)
        require_text(self._plan, body.input, "input")
        params: dict[str, Any] = {"speed": body.speed}
        if (voice := find_voice(self._plan, body.voice, "voice")) is not None:
            params["voice"] = voice
        if body.seed is not None:
            params["seed"] = body.seed
        text = Payload(kind=PayloadKind.TEXT, request_id=request_id, edge=REQUEST_INPUT, meta={"text": body.input})
        spec = RequestSpec(TASK, (Modality.AUDIO,), {Modality.TEXT: [text]}, params, request_id=request_id)
        return await Call.open(self._orchestrator, spec)

    async def audio(self, body: SpeechRequest, call: Call) -> Pieces:
        """The bytes of one audio file, as they come."""
        track = AudioTrack(body.response_format)
        async for event in call.events():
            if isinstance(event, Delta) and (data := await track.add(event.payload)):
                yield data
            elif isinstance(event, Done):
                self._require_words(event)
        if rest := await track.finish():
            yield rest

    async def frames(self, body: SpeechRequest, call: Call) -> Pieces:
        """The same bytes in events, and a last event with the usage."""
        track, encoded = AudioTrack(body.response_format), Base64Stream()
        usage: dict[str, int] = {}
        async for event in call.events():
            if isinstance(event, Delta) and (audio := encoded.add(await track.add(event.payload))):
                yield sse.frame(audio_delta(audio))
            elif isinstance(event, Done):
                self._require_words(event)
                usage = speech_usage(self._plan, event.usage)
        if rest := encoded.add(await track.finish()) + encoded.finish():
            yield sse.frame(audio_delta(rest))
        yield sse.frame(audio_done(usage))

    def _require_words(self, done: Done) -> None:
        """Silence is the text's fault if the stage that reads it says so; else it is ours."""
        if found_nothing_to_say(self._plan, done.usage):
            raise InvalidRequest("input: nothing in it can be pronounced", param="input")
