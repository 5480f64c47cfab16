"""The work of chat: a checked request to a RequestSpec, and its events to a completion or to chunks."""

from __future__ import annotations

import asyncio
import base64
import itertools
import time
from typing import Any

from runtime.errors import UnsupportedValue
from runtime.graph import select
from runtime.payload import Payload
from runtime.plan import REQUEST_INPUT, Modality, PayloadKind, Plan
from runtime.requests import Delta, Done, ModalityEnd, RequestSpec
from runtime.server import sse
from runtime.server.audio import Samples, encode_clip, require_sound, samples_of
from runtime.server.calls import Call
from runtime.server.chat.media import MediaReader
from runtime.server.chat.schema import ChatRequest, Message, ProcessorOptions, completion
from runtime.server.chat.stages import stage_params
from runtime.server.chat.stream import ChatStream
from runtime.server.names import find_voice, require_model, require_text
from runtime.server.ports import Orchestrator
from runtime.server.replies import Pieces
from runtime.server.settings import MediaSettings
from runtime.server.usage import chat_usage

TASK = "chat"
FIELDS = {"audio": "messages"}
"""What the ear calls its input -> the field it came from."""
ENCODER_OF = {"pcm16": "pcm"}
"""Where chat calls a format otherwise than speech does."""


class ChatService:
    def __init__(self, orchestrator: Orchestrator, plan: Plan, media: MediaSettings) -> None:
        self._orchestrator = orchestrator
        self._plan = plan
        self._media = MediaReader(plan, media)

    async def open(self, body: ChatRequest, request_id: str) -> Call:
        """Check what the schema cannot, then submit. Raises what the request is refused for."""
        require_model(self._plan, body.model)
        texts = [part.text for message in body.messages for part in message.content if part.text is not None]
        if texts:
            require_text(self._plan, "".join(texts), "messages")
        self._media.check(body.messages)
        # the transcript of a spoken answer is its text: an answer is never audio alone
        modalities = (Modality.TEXT, Modality.AUDIO) if body.speaks else (Modality.TEXT,)
        params = self._params(body, modalities)
        media = await self._media.read(body.messages, request_id)
        spec = RequestSpec(
            task=TASK,
            modalities=modalities,
            inputs={Modality.TEXT: [self._prompt(body.messages, request_id)], **media},
            params=params,
            request_id=request_id,
        )
        return await Call.open(self._orchestrator, spec, FIELDS)

    async def complete(self, body: ChatRequest, request_id: str) -> dict[str, Any]:
        """The whole answer as a chat.completion."""
        created, texts, reason = int(time.time()), [], "stop"
        pieces: list[Samples] = []
        usage: dict[str, Any] = {}
        async with await self.open(body, request_id) as call:
            async for event in call.events():
                match event:
                    case Delta(modality=Modality.TEXT, payload=payload):
                        texts.append(payload.meta["text"])
                    case Delta(modality=Modality.AUDIO, payload=payload):
                        pieces.append(samples_of(payload))
                    case ModalityEnd(modality=Modality.TEXT):
                        reason = event.reason
                    case Done():
                        usage = chat_usage(self._plan, event.usage)
        text = "".join(texts)
        message: dict[str, Any] = {"role": "assistant", "refusal": None}
        message["content"] = text if "text" in body.modalities else None
        if body.speaks:
            message["audio"] = await _audio(body, request_id, text, pieces)
        return completion(request_id, created, body.model, {"message": message, "finish_reason": reason}, usage)

    async def frames(self, body: ChatRequest, request_id: str, call: Call) -> Pieces:
        """The answer as events: chunks as they come, then the usage if wanted, then the end mark."""
        stream = ChatStream(body, request_id, encoder_format(body))
        async for event in call.events():
            if isinstance(event, Done):
                usage = chat_usage(self._plan, event.usage)
            else:
                for chunk in await stream.chunks(event):
                    yield sse.frame(chunk)
        for chunk in stream.last_chunks(usage):
            yield sse.frame(chunk)
        yield sse.DONE

    def _prompt(self, messages: list[Message], request_id: str) -> Payload:
        """The messages as the thinker takes them; media are numbered in the order they appear."""
        indices = itertools.count()
        wired = []
        for message in messages:
            role = "system" if message.role == "developer" else message.role
            parts: list[dict[str, Any]] = [
                {"type": "text", "text": part.text}
                if part.modality is Modality.TEXT
                else {"type": str(part.modality), "index": next(indices)}
                for part in message.content
            ]
            alone = len(parts) == 1 and parts[0]["type"] == "text"
            wired.append({"role": role, "content": parts[0]["text"] if alone else parts})
        return Payload(kind=PayloadKind.TEXT, request_id=request_id, edge=REQUEST_INPUT, meta={"messages": wired})

    def _params(self, body: ChatRequest, modalities: tuple[Modality, ...]) -> dict[str, Any]:
        params: dict[str, Any] = {"sampling": body.sampling()}
        inputs = [Modality.TEXT, *(part.modality for message in body.messages for part in message.content)]
        if body.stage_params:
            running = select(self._plan, TASK, modalities, inputs).stages
            params["stage_params"] = stage_params(self._plan, body.stage_params, running)
        if body.mm_processor_kwargs is not None:
            params["mm_processor_kwargs"] = self._processor_options(body.mm_processor_kwargs, Modality.VIDEO in inputs)
        if body.speaks:
            asked = body.audio.voice if body.audio else None
            if (voice := find_voice(self._plan, asked, "audio.voice")) is not None:
                params["voice"] = voice
            if body.seed is not None:
                params["seed"] = body.seed
        return params

    def _processor_options(self, given: ProcessorOptions, has_video: bool) -> dict[str, Any]:
        """All of them are about video. UnsupportedValue where the model takes none, or the request has none."""
        options = given.model_dump(exclude_unset=True)
        if options and not has_video:
            param = f"mm_processor_kwargs.{next(iter(options))}"
            takes = Modality.VIDEO in self._plan.tasks[TASK].inputs
            reason = "the messages have no video" if takes else f"{self._plan.name} takes no video"
            raise UnsupportedValue(f"{param}: {reason}", param=param)
        return options


def encoder_format(body: ChatRequest) -> str | None:
    """The encoder of the wanted audio format; None when no audio is wanted."""
    if not body.speaks:
        return None
    asked = body.audio.format if body.audio else "wav"
    return ENCODER_OF.get(asked, asked)


async def _audio(body: ChatRequest, request_id: str, transcript: str, pieces: list[Samples]) -> dict[str, Any]:
    require_sound(sum(piece.size for piece in pieces))
    data = await asyncio.to_thread(_encoded, encoder_format(body) or "wav", pieces)
    # nothing is kept to refer to: the audio expires as it is sent
    return {"id": f"audio-{request_id}", "data": data, "expires_at": int(time.time()), "transcript": transcript}


def _encoded(audio_format: str, pieces: list[Samples]) -> str:
    return base64.b64encode(encode_clip(audio_format, pieces)).decode()
