"""Images, videos and sounds in the messages of a chat: what reaches the stage, and what is refused by which name. From
addresses above all: nobody may be reached through us whom the client could not reach itself (F115).
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

import omnictl.settings
from runtime.errors import ConfigError, InvalidRequest, OmniError, PayloadTooLarge, UnsupportedMedia, UnsupportedValue
from runtime.plan import Modality, Plan, TaskPlan
from runtime.requests import RequestSpec
from runtime.server.chat.schema import ChatRequest
from runtime.server.chat.service import ChatService
from runtime.server.fetch import is_public
from runtime.server.settings import MediaSettings, media_settings
from tests.plans import sim_plan
from tests.server.origin import IMAGE, Origin, serving_origin
from tests.server.serving import MODEL
from tests.server.told import Submitted

TYPES = {"image_url": "image/png", "video_url": "video/mp4", "audio_url": "audio/mpeg"}
HERE = "127.0.0.1"
ALLOWED = MediaSettings(private_hosts=(HERE,))


def seeing_plan(**limits: Any) -> Plan:
    plan = sim_plan(limits=limits)
    chat = plan.tasks["chat"]
    inputs = {Modality.TEXT: "think", **{m: "think" for m in (Modality.AUDIO, Modality.IMAGE, Modality.VIDEO)}}
    return plan.model_copy(update={"tasks": {"chat": TaskPlan(inputs=inputs, outputs=chat.outputs)}})


async def ask(
    parts: list[Mapping[str, Any]], settings: MediaSettings = ALLOWED, plan: Plan | None = None, **fields: Any
) -> RequestSpec:
    """What the orchestrator gets of a chat with these parts."""
    orchestrator = Submitted()
    service: Any = ChatService(orchestrator, plan or seeing_plan(), settings)  # type: ignore[arg-type]
    body = ChatRequest.model_validate({"model": MODEL, "messages": [{"role": "user", "content": parts}], **fields})
    async with await service.open(body, "r"):
        (spec,) = orchestrator.specs
    return spec


def link(url: str, kind: str = "image_url") -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}}


def data_url(data: bytes, content_type: str) -> str:
    return f"data:{content_type};base64,{base64.b64encode(data).decode()}"


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    async with serving_origin() as one:
        yield one


async def test_what_reaches_the_stage(origin: Origin) -> None:
    """Media count over the whole request, in its order, whatever their kind and wherever they come from."""
    clip = {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"wav").decode(), "format": "wav"}}
    parts: list[Mapping[str, Any]] = [
        link(data_url(b"video", "video/mp4"), "video_url"),
        {"type": "text", "text": "what is this?"},
        link(origin.url("/image")),
        clip,
        link(data_url(b"sound", "audio/ogg"), "audio_url"),
        {"type": "image_url", "image_url": {"url": data_url(b"picture", "image/jpeg"), "detail": "auto"}},
    ]
    spec = await ask(parts, mm_processor_kwargs={"use_audio_in_video": True, "fps": 2})
    (text,) = spec.inputs[Modality.TEXT]
    (message,) = text.meta["messages"]
    assert message["content"] == [
        {"type": "video", "index": 0},
        {"type": "text", "text": "what is this?"},
        {"type": "image", "index": 1},
        {"type": "audio", "index": 2},
        {"type": "audio", "index": 3},
        {"type": "image", "index": 4},
    ]
    found = {
        (m, p.meta["index"], p.meta["format"], bytes(p.tensors["data"]))
        for m, payloads in spec.inputs.items()
        if m is not Modality.TEXT
        for p in payloads
    }
    assert found == {
        (Modality.VIDEO, 0, "", b"video"),
        (Modality.IMAGE, 1, "", IMAGE),
        (Modality.AUDIO, 2, "wav", b"wav"),
        (Modality.AUDIO, 3, "", b"sound"),
        (Modality.IMAGE, 4, "", b"picture"),
    }
    media = [p for m, payloads in spec.inputs.items() if m is not Modality.TEXT for p in payloads]
    assert all(p.meta["modality"] in spec.inputs and p.kind == "media" for p in media)
    assert {p.meta["name"] for p in media} >= {"messages[0].content[0].video_url", "messages[0].content[3].input_audio"}
    assert spec.params["mm_processor_kwargs"] == {"use_audio_in_video": True, "fps": 2.0}


async def refused(error: type[OmniError], part: Mapping[str, Any], match: str, *args: Any, **named: Any) -> OmniError:
    with pytest.raises(error, match=match) as caught:
        await ask([{"type": "text", "text": "hi"}, part], *args, **named)
    assert caught.value.param is not None
    assert caught.value.param.startswith(f"messages[0].content[1].{part['type']}")
    return caught.value


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/hostname",
        "FILE:///etc/hostname",
        "ftp://127.0.0.1/image",
        "gopher://127.0.0.1/",
        "/etc/hostname",
        "image.png",
        "//127.0.0.1/image",
        " ",
        "http://",
        "http://[::1",
        "http://a..b/",
        f"http://{'a' * 70}.example/",
        "http://xn--a.com/",
        "http://user:secret@127.0.0.1/",
        "http://127.0.0.1/" + "x" * 9000,
        "data:,x",
        "data:image/png,x",
        "data:image/png;base64,!",
        "data:image/png;base64,",
    ],
)
async def test_what_is_no_address_is_refused(kind: str, url: str) -> None:
    await refused(InvalidRequest, link(url.replace("image/png", TYPES[kind]), kind), "url: ")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]"]
)
async def test_this_machine_is_not_fetched_from(origin: Origin, host: str) -> None:
    """However it is written; and it is not even connected to."""
    part = link(origin.url("/image", host))
    error = await refused(UnsupportedValue, part, "is not a public one", MediaSettings())
    assert "OMNICTL_MEDIA_PRIVATE_HOSTS" in str(error.hint)
    assert origin.paths == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07::1", True),
        ("10.0.0.1", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("fec0::1", False),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.215.14", True),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::1", False),
    ],
)
def test_which_addresses_are_public(address: str, expected: bool) -> None:
    assert is_public(address) == expected


async def test_a_redirect_is_looked_at_again(origin: Origin) -> None:
    """The first host is allowed by name; where it leads is not."""
    for target in (origin.url("/image", "localhost"), "http://169.254.169.254/latest/meta-data"):
        await refused(UnsupportedValue, link(origin.url(f"/redirect?{target}")), "is not a public one")
    await refused(UnsupportedValue, link(origin.url("/redirect?file:///etc/hostname")), "expected an address")
    broken = ("http://a:b/", "//[::1", "http://xn--a.com/", "http://a..b/")
    for target in broken:
        await refused(InvalidRequest, link(origin.url(f"/redirect?{target}")), "no address|could not be fetched")
    assert [path.split("?")[0] for path in origin.paths] == ["/redirect"] * (3 + len(broken))


async def test_redirects_are_followed_so_far(origin: Origin) -> None:
    spec = await ask([link(origin.url("/redirect?/image"))])
    assert bytes(spec.inputs[Modality.IMAGE][0].tensors["data"]) == IMAGE
    await refused(InvalidRequest, link(origin.url("/loop")), "more than 5 redirects")
    assert origin.paths.count("/loop") == 6


@pytest.mark.parametrize(
    ("path", "error", "match"),
    [
        ("/endless", PayloadTooLarge, r"more; at most 100000 bytes \(limit OMNICTL_MEDIA_MAX_BYTES\)"),
        ("/announced", PayloadTooLarge, "1000000000000 bytes; at most 100000"),
        ("/drip", InvalidRequest, r"did not come within 0.5 s \(limit OMNICTL_MEDIA_FETCH_TIMEOUT_S\)"),
        ("/empty", InvalidRequest, "empty file"),
        ("/packed", InvalidRequest, "encoded as gzip"),
        ("/cut", InvalidRequest, "could not be fetched"),
        ("/nonsense", InvalidRequest, "could not be fetched"),
        ("/missing", InvalidRequest, "answered 404"),
        ("/typed?text/html", UnsupportedMedia, "'text/html'; expected image/"),
        ("/typed?video/mp4", UnsupportedMedia, "'video/mp4'; expected image/"),
    ],
)
async def test_bad_answers(origin: Origin, path: str, error: type[OmniError], match: str) -> None:
    settings = MediaSettings(private_hosts=(HERE,), max_bytes=100_000, fetch_timeout_s=0.5 if path == "/drip" else 30)
    await refused(error, link(origin.url(path)), match, settings)
    assert origin.paths == [path]


@pytest.mark.parametrize("content_type", ["", "application/octet-stream", "image/webp", "IMAGE/PNG; q=1"])
async def test_types_that_will_do(origin: Origin, content_type: str) -> None:
    assert (await ask([link(origin.url(f"/typed?{content_type.replace(' ', '')}"))])).inputs[Modality.IMAGE]
    assert (await ask([link(data_url(b"x", content_type.replace(" ", "")))])).inputs[Modality.IMAGE]


async def test_a_host_that_is_not_there(origin: Origin) -> None:
    await refused(InvalidRequest, link("http://127.0.0.1:1/"), "could not be fetched")
    await refused(InvalidRequest, link("http://no.such.host.invalid/"), "could not be fetched")


async def test_fetching_can_be_switched_off(origin: Origin) -> None:
    settings = MediaSettings(fetch=False, private_hosts=(HERE,))
    error = await refused(UnsupportedValue, link(origin.url("/image")), "OMNICTL_MEDIA_FETCH is off", settings)
    assert "data:" in str(error.hint)
    assert origin.paths == []
    assert (await ask([link(data_url(b"x", "image/png"))], settings)).inputs[Modality.IMAGE]


async def test_bytes_of_one_and_of_all() -> None:
    settings, picture = MediaSettings(max_bytes=900), link(data_url(b"x" * 900, "image/png"))
    assert len((await ask([picture] * 2, settings)).inputs[Modality.IMAGE]) == 2
    await refused(PayloadTooLarge, link(data_url(b"x" * 901, "image/png")), "901 bytes; at most 900", settings)
    clip = {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"x" * 901).decode(), "format": "wav"}}
    await refused(PayloadTooLarge, clip, "901 bytes; at most 900", settings)
    with pytest.raises(PayloadTooLarge, match=r"more than 1000 bytes together \(limit max_body_bytes\)"):
        await ask([picture] * 2, settings, seeing_plan(max_body_bytes=1000))


@pytest.mark.parametrize("kind", TYPES)
async def test_how_many_of_a_kind(kind: str) -> None:
    settings = MediaSettings(max_audios=1, max_images=1, max_videos=1)
    part = link(data_url(b"x", TYPES[kind]), kind)
    await ask([part], settings)
    name = kind.removesuffix("_url")
    with pytest.raises(InvalidRequest, match=rf"at most 1 of {name} \(limit OMNICTL_MEDIA_MAX_{name.upper()}S\)"):
        await ask([part, part], settings)


async def test_what_the_model_does_not_take() -> None:
    plan = sim_plan()
    for kind in ("image_url", "video_url"):
        part = link(data_url(b"x", TYPES[kind]), kind)
        await refused(UnsupportedValue, part, f"sim-chain takes no {kind[:5]} but text, audio", ALLOWED, plan)
    with pytest.raises(UnsupportedValue, match="mm_processor_kwargs.fps: sim-chain takes no video"):
        await ask([{"type": "text", "text": "hi"}], ALLOWED, plan, mm_processor_kwargs={"fps": 2})
    with pytest.raises(UnsupportedValue, match="mm_processor_kwargs.fps: the messages have no video"):
        await ask([{"type": "text", "text": "hi"}], mm_processor_kwargs={"fps": 2})


def test_settings_come_from_the_environment() -> None:
    """The tool knows the variables, so that it can tell of one that is nearly one of them."""
    fields = {f"OMNICTL_MEDIA_{field.name.upper()}" for field in dataclasses.fields(MediaSettings)}
    assert fields == set(omnictl.settings.MEDIA_VARIABLES)
    assert media_settings({}) == MediaSettings()
    given = {"MAX_BYTES": "1000", "FETCH": "off", "FETCH_TIMEOUT_S": "2.5", "PRIVATE_HOSTS": "Files.local, 10.0.0.1"}
    found = media_settings({f"OMNICTL_MEDIA_{name}": value for name, value in given.items()})
    expected = MediaSettings(
        max_bytes=1000, fetch=False, fetch_timeout_s=2.5, private_hosts=("files.local", "10.0.0.1")
    )
    assert found == expected
    for name, bad in [("MAX_BYTES", "1 MiB"), ("MAX_VIDEOS", "-1"), ("FETCH", "maybe"), ("FETCH_TIMEOUT_S", "inf")]:
        with pytest.raises(ConfigError, match=f"OMNICTL_MEDIA_{name}: {bad!r}; expected"):
            media_settings({f"OMNICTL_MEDIA_{name}": bad})


def test_over_http_by_name_and_status(http: httpx.Client) -> None:
    """F103, F106: what the service refuses leaves as the client's mistake, streamed or not."""
    url = {"url": "http://127.0.0.1:1/x.wav", "detail": "high"}
    for part, status, param in [
        ({"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/x.wav"}}, 400, "audio_url.url"),
        ({"type": "audio_url", "audio_url": {"url": "file:///etc/hostname"}}, 400, "audio_url.url"),
        ({"type": "audio_url", "audio_url": {"url": data_url(b"x", "image/png")}}, 415, "audio_url.url"),
        ({"type": "image_url", "image_url": {"url": data_url(b"x", "image/png")}}, 400, "image_url"),
        ({"type": "image_url", "image_url": url}, 400, "image_url.detail"),
    ]:
        for stream in (False, True):
            messages = [{"role": "user", "content": [part]}]
            reply = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "stream": stream})
            assert (reply.status_code, reply.json()["error"]["param"]) == (status, f"messages[0].content[0].{param}")
