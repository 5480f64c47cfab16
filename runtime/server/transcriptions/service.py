"""The work of transcriptions: a clip to a RequestSpec, and what was heard to a text, a list or events."""

from __future__ import annotations

from typing import Any

from runtime.plan import Modality, Plan
from runtime.requests import Delta, Done, RequestSpec
from runtime.server import sse
from runtime.server.calls import Call
from runtime.server.media import media_payload
from runtime.server.names import require_model, require_text
from runtime.server.ports import Orchestrator
from runtime.server.replies import Pieces
from runtime.server.transcriptions.form import Upload
from runtime.server.transcriptions.schema import (
    Transcript,
    TranscriptionForm,
    json_transcript,
    text_delta,
    text_done,
    verbose_transcript,
)
from runtime.server.transcriptions.subtitles import to_srt, to_vtt
from runtime.server.usage import heard_s

TASK = "transcription"
FIELDS = {"audio": "file"}
"""What the ear calls its input -> the field it came from."""


class TranscriptionService:
    def __init__(self, orchestrator: Orchestrator, plan: Plan) -> None:
        self._orchestrator = orchestrator
        self._plan = plan

    async def open(self, upload: Upload, request_id: str) -> Call:
        """Check what the schema cannot, then submit. Raises what the request is refused for."""
        require_model(self._plan, upload.form.model)
        if upload.form.prompt is not None:
            require_text(self._plan, upload.form.prompt, "prompt")
        clip = media_payload(
            request_id, upload.data, index=0, modality=Modality.AUDIO, media_format=upload.audio_format, name="file"
        )
        spec = RequestSpec(
            task=TASK,
            modalities=(Modality.TEXT,),
            inputs={Modality.AUDIO: [clip]},
            params=upload.form.model_dump(include={"language", "prompt", "temperature"}, exclude_none=True),
            request_id=request_id,
        )
        return await Call.open(self._orchestrator, spec, FIELDS)

    async def complete(self, upload: Upload, request_id: str) -> dict[str, Any] | str:
        """The whole transcript in the wanted format: JSON-able, or a text file's content."""
        transcript, seconds = Transcript(), 0.0
        async with await self.open(upload, request_id) as call:
            async for event in call.events():
                match event:
                    case Delta(payload=payload):
                        transcript.add(payload.meta)
                    case Done():
                        seconds = heard_s(self._plan, event.usage)
        return rendered(transcript, upload.form, seconds)

    async def frames(self, call: Call) -> Pieces:
        """What is heard as events, as it comes; the last one has all of it."""
        transcript = Transcript()
        async for event in call.events():
            if isinstance(event, Delta) and (text := transcript.add(event.payload.meta)):
                yield sse.frame(text_delta(text))
        yield sse.frame(text_done(transcript))


def rendered(transcript: Transcript, form: TranscriptionForm, seconds: float) -> dict[str, Any] | str:
    match form.response_format:
        case "json":
            return json_transcript(transcript, seconds)
        case "verbose_json":
            return verbose_transcript(transcript, seconds, form.temperature)
        case "srt":
            return to_srt(transcript.segments)
        case "vtt":
            return to_vtt(transcript.segments)
        case "text":
            return transcript.text + "\n"
