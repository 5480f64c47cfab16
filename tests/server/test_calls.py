"""One accepted request from the server's view: its one terminal, what leaving it early does, and who is to blame for
silence.
"""

from __future__ import annotations

import pytest

from runtime.errors import Aborted, InvalidRequest, OmniError, StageError, UnsupportedMedia
from runtime.plan import Modality
from runtime.requests import AbortedRequest, Done, Event, Failed, ModalityEnd
from runtime.server.calls import Call
from runtime.server.chat.schema import ChatRequest
from runtime.server.chat.service import ChatService
from runtime.server.settings import MediaSettings
from runtime.server.speech.schema import SpeechRequest
from runtime.server.speech.service import SpeechService
from runtime.server.transcriptions.form import Upload
from runtime.server.transcriptions.schema import TranscriptionForm
from runtime.server.transcriptions.service import TranscriptionService
from tests.plans import sim_plan
from tests.server.told import Submitted, Told

END = ModalityEnd("r", Modality.TEXT, "stop", {})


async def read(call: Call) -> list[Event]:
    async with call:
        return [event async for event in call.events()]


async def test_a_request_that_is_done_is_not_aborted() -> None:
    handle = Told(END, Done("r", {}))
    assert await read(Call(handle)) == [END, Done("r", {})]
    assert handle.num_aborts == 0


async def test_a_failure_is_raised_under_the_name_of_the_client_s_field() -> None:
    handle = Told(Failed("r", UnsupportedMedia("broken", param="audio")))
    with pytest.raises(UnsupportedMedia) as caught:
        await read(Call(handle, {"audio": "file"}))
    assert caught.value.param == "file"
    assert handle.num_aborts == 0


async def test_an_abort_by_somebody_else_is_raised() -> None:
    with pytest.raises(Aborted):
        await read(Call(Told(AbortedRequest("r"))))


async def test_a_request_without_a_terminal_is_a_fault_of_ours() -> None:
    handle = Told(END)
    with pytest.raises(StageError, match="ended without saying how"):
        await read(Call(handle))
    assert handle.num_aborts == 1


async def test_leaving_early_aborts_once() -> None:
    handle = Told(END, END, Done("r", {}))
    async with Call(handle) as call:
        assert await anext(call.events()) == END
    assert handle.num_aborts == 1


@pytest.mark.parametrize(
    ("usage", "error"), [({"frames": 0.0}, InvalidRequest), ({"frames": 9.0}, StageError), ({}, StageError)]
)
async def test_silence_is_the_text_s_fault_if_its_reader_says_so(
    usage: dict[str, float], error: type[OmniError]
) -> None:
    """F106: "..." as a text to speak is a mistake of the client's, not of the server's."""
    service = SpeechService(None, sim_plan())  # type: ignore[arg-type]  # nothing is submitted
    body = SpeechRequest(model="m", input="...")
    for pieces in (service.audio, service.frames):
        call = Call(Told(ModalityEnd("r", Modality.AUDIO, "stop", {}), Done("r", {"talk": usage})))
        with pytest.raises(error):
            await anext(pieces(body, call))


async def test_clips_go_out_under_the_names_of_the_client_s_fields() -> None:
    """So the stage that decodes them can say which one is broken."""
    plan, orchestrator = sim_plan(), Submitted()
    model = plan.served_names[0]
    upload = Upload(TranscriptionForm(model=model), b"x", "wav")
    await TranscriptionService(orchestrator, plan).open(upload, "r")  # type: ignore[arg-type]
    audio = {"type": "input_audio", "input_audio": {"data": "eHh4", "format": "wav"}}
    messages = [{"role": "user", "content": [audio, {"type": "text", "text": "and"}, audio]}]
    body = ChatRequest.model_validate({"model": model, "messages": messages})
    await ChatService(orchestrator, plan, MediaSettings()).open(body, "r")  # type: ignore[arg-type]
    names = [payload.meta["name"] for spec in orchestrator.specs for payload in spec.inputs[Modality.AUDIO]]
    assert names == ["file", "messages[0].content[0].input_audio", "messages[0].content[2].input_audio"]
