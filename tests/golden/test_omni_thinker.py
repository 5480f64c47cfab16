"""Qwen3-Omni's thinker as a stage against transformers: token ids, embeddings and hidden states of every token."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from runtime.engines.ar.engine import ArEngine
from runtime.errors import ConfigError, InvalidRequest, UnsupportedMedia
from runtime.payload import Tensor
from runtime.plan import REQUEST_INPUT
from tests.golden.ar_engines import BLOCK_SIZE, assert_nothing_left
from tests.golden.omni_reference import CLIP_S, NUM_TEXT_TOKENS, PARTS
from tests.golden.omni_stages import StageDriver, Stream, context, make_omni_engine, media_payloads
from tests.golden.tiny_qwen3_omni import HEAD_DIM, NUM_KV_HEADS, THINKER_LAYERS

if TYPE_CHECKING:
    from runtime.programs.qwen3_omni.thinker import Thinker
    from tests.golden.omni_reference import Reference


KV_BYTES_PER_TOKEN = THINKER_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4
CHUNK_TOKENS = 48
MAX_AUDIO_S = 1.5 * CLIP_S
HIDDEN = "hidden_states"
TOLERANCE = 1e-5
"""Of the largest number: float32 with another order of additions."""


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    assert np.abs(found - expected).max(initial=0) <= TOLERANCE * scale


def make_thinker(folder: Path) -> tuple[Thinker, dict[str, list[int]]]:
    """A thinker that also writes down the tokens that it is given."""
    from runtime.programs.qwen3_omni.thinker import Thinker, load

    seen: dict[str, list[int]] = {}

    class Recorded(Thinker):
        def payloads(self, state: Any, generated: Any) -> Any:
            seen.setdefault(state.request_id, []).extend(generated.token_ids)
            return super().payloads(state, generated)

    loaded = load(context(folder, "thinker", temperature=0.0, max_tokens=NUM_TEXT_TOKENS, max_audio_s=MAX_AUDIO_S))
    return Recorded(loaded.config, loaded.decoders, loaded.defaults, loaded.devices), seen


class Case(StageDriver):
    def __init__(self, engine: ArEngine, seen: dict[str, list[int]], references: dict[str, Reference]) -> None:
        super().__init__(engine)
        self.seen, self.references = seen, references
        seen.clear()

    def check(self, stream: Stream, name: str, request_id: str | None = None) -> None:
        """Everything that the stage gave for the prompt of this name is what transformers has."""
        reference = self.references[name]
        assert self.seen[request_id or name] == reference.text_ids
        hidden_payloads = [p for p in stream.payloads if p.kind == HIDDEN]
        num_rows = [len(p.tensors["token_ids"]) for p in hidden_payloads]
        assert num_rows == [len(reference.prompt_ids)] + [1] * (len(reference.text_ids) - 1)
        assert stream.joined("token_ids").tolist() == reference.prompt_ids + reference.text_ids[:-1]
        assert_close(stream.joined("embeddings"), reference.embeddings.numpy())
        assert stream.joined("positions").tolist() == reference.positions.tolist()
        is_media = np.isin(reference.prompt_ids, self.engine.program.config.media_token_ids)
        assert_close(stream.joined("hidden"), reference.hidden[: len(is_media)].numpy()[is_media])


@pytest.fixture(scope="module")
def roomy_engine(omni_checkpoint: Path) -> Iterator[tuple[ArEngine, dict[str, list[int]]]]:
    program, seen = make_thinker(omni_checkpoint)
    engine = make_omni_engine(
        omni_checkpoint, program, KV_BYTES_PER_TOKEN, max_num_seqs=len(PARTS), max_num_batched_tokens=2048
    )
    yield engine, seen
    engine.close()


@pytest.fixture(scope="module")
def tight_engine(omni_checkpoint: Path) -> Iterator[tuple[ArEngine, dict[str, list[int]]]]:
    """Prompts are prefilled in chunks, and the KV cache holds less than its four requests need."""
    program, seen = make_thinker(omni_checkpoint)
    engine = make_omni_engine(
        omni_checkpoint,
        program,
        KV_BYTES_PER_TOKEN,
        num_blocks=9,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK_TOKENS,
    )
    yield engine, seen
    engine.close()


def _middle_of_the_sound(prompt_ids: list[int], sound: int) -> int:
    return prompt_ids.index(sound) + 6


@pytest.fixture(scope="module")
def cut_engine(omni_checkpoint: Path, omni_references: Any) -> Iterator[tuple[ArEngine, dict[str, list[int]]]]:
    """The third chunk of the prompt "watch" begins in the sound of its video."""
    program, seen = make_thinker(omni_checkpoint)
    middle = _middle_of_the_sound(omni_references["watch"].prompt_ids, program.config.media_token_ids[0])
    engine = make_omni_engine(
        omni_checkpoint, program, KV_BYTES_PER_TOKEN, num_blocks=18, max_num_batched_tokens=middle // 2
    )
    yield engine, seen
    engine.close()


@pytest.fixture
def roomy(roomy_engine: Any, omni_references: dict[str, Reference]) -> Iterator[Case]:
    yield from _case(roomy_engine, omni_references)


@pytest.fixture
def tight(tight_engine: Any, omni_references: dict[str, Reference]) -> Iterator[Case]:
    yield from _case(tight_engine, omni_references)


@pytest.fixture
def cut(cut_engine: Any, omni_references: dict[str, Reference]) -> Iterator[Case]:
    yield from _case(cut_engine, omni_references)


def _case(made: Any, references: dict[str, Reference]) -> Iterator[Case]:
    engine, seen = made
    engine.core._scheduler.reset_prefix_cache()
    yield Case(engine, seen, references)
    assert_nothing_left(engine)
    assert not engine.core._tapped
    assert engine.core._runner.store.num_requests == 0


@pytest.mark.parametrize("name", PARTS)
def test_alone(roomy: Case, name: str) -> None:
    roomy.ask(name, name, HIDDEN, "text")
    stream = roomy.drain()[name]
    roomy.check(stream, name)
    assert stream.end is not None
    prompt_ids = roomy.references[name].prompt_ids
    assert stream.end.usage["prompt_tokens"] == len(prompt_ids)
    num_media_tokens = np.isin(prompt_ids, roomy.engine.program.config.media_token_ids).sum()
    assert stream.end.usage.get("media_tokens", 0) == num_media_tokens


def test_in_a_batch(roomy: Case) -> None:
    for name in PARTS:
        roomy.ask(name, name, HIDDEN)
    roomy.step()
    assert set(roomy.streams) == set(PARTS), "requests that came together were not prefilled together"
    streams = roomy.drain()
    for name in PARTS:
        roomy.check(streams[name], name)


def test_aborted_neighbours(roomy: Case) -> None:
    for name in PARTS:
        roomy.ask(name, name, HIDDEN)
    for name in ("short", "chinese"):
        roomy.step()
        roomy.engine.abort(name)
        roomy.streams.pop(name, None)
    streams = roomy.drain()
    assert set(streams) == set(PARTS) - {"short", "chinese"}
    for name, stream in streams.items():
        roomy.check(stream, name)


@pytest.mark.parametrize("name", ["long", "audio", "image", "image and audio"])
def test_chunked_prefill(tight: Case, name: str) -> None:
    """Of an image, too: what the vision encoder made of it goes in with two chunks."""
    if name.startswith("image"):
        prompt_ids, token_id = tight.references[name].prompt_ids, tight.engine.program.config.thinker["image_token_id"]
        assert prompt_ids[CHUNK_TOKENS - 1 : CHUNK_TOKENS + 1] == [token_id, token_id], "no chunk ends in the image"
    tight.ask(name, name, HIDDEN)
    num_chunks = -(-len(tight.references[name].prompt_ids) // CHUNK_TOKENS)
    assert num_chunks > 1
    for _ in range(num_chunks - 1):
        tight.step()
        assert not tight.streams, "the prompt was prefilled at once"
    tight.check(tight.drain()[name], name)


@pytest.mark.parametrize(
    "names", [("watch",), ("short", "watch first", "watch"), ("watch last", "audio", "watch first")], ids=" ".join
)
def test_a_chunk_that_begins_in_the_sound_of_a_video(cut: Case, names: tuple[str, ...]) -> None:
    """Sound comes before pictures there: the other way round than what the encoders made of the clip.

    Alone, and with others, whose chunks share its steps and move the places where its own begin.
    """
    prompt_ids = cut.references["watch"].prompt_ids
    media_token_ids = cut.engine.program.config.media_token_ids
    sound, pictures = media_token_ids[0], media_token_ids[2]
    middle = _middle_of_the_sound(prompt_ids, sound)
    chunk = prompt_ids[middle : middle + middle // 2]
    assert middle % 2 == 0
    assert [chunk[0], chunk[-1], len(set(chunk))] == [sound, pictures, 2]
    assert chunk == sorted(chunk, reverse=sound > pictures)
    for name in names:
        cut.ask(name, name, HIDDEN)
    streams = cut.drain()
    for name in names:
        cut.check(streams[name], name)


def test_prefix_cache_hit(roomy: Case) -> None:
    for request_id in ("first", "second"):
        roomy.ask(request_id, "long", HIDDEN)
        stream = roomy.drain()[request_id]
        roomy.check(stream, "long", request_id)
    assert stream.end is not None
    num_blocks = len(roomy.references["long"].prompt_ids) // BLOCK_SIZE
    assert num_blocks > 2
    assert stream.end.usage["cached_tokens"] == num_blocks * BLOCK_SIZE


def test_prefix_cache_hit_behind_an_image(roomy: Case) -> None:
    """The same image is found; one of the same size, so with the same tokens, is not, and does not find the other's."""
    cached = []
    for request_id, name in (("first", "image"), ("same", "image"), ("other", "other image"), ("again", "other image")):
        roomy.ask(request_id, name, HIDDEN)
        stream = roomy.drain()[request_id]
        roomy.check(stream, name, request_id)
        assert stream.end is not None
        cached.append(stream.end.usage["cached_tokens"])
    assert roomy.references["image"].prompt_ids == roomy.references["other image"].prompt_ids
    assert cached == [0, 2 * BLOCK_SIZE, 0, 2 * BLOCK_SIZE]


def test_a_prefix_that_nobody_wanted_rows_of_has_them(roomy: Case) -> None:
    roomy.ask("text only", "long", "text")
    assert all(p.kind == "text" for p in roomy.drain()["text only"].payloads)
    roomy.ask("spoken", "long", HIDDEN)
    stream = roomy.drain()["spoken"]
    roomy.check(stream, "long", "spoken")
    assert stream.end is not None
    assert stream.end.usage["cached_tokens"] > 0


@pytest.mark.parametrize(
    "names", [("audio", "chinese", "question", "short"), ("image and audio", "image", "images", "other image")]
)
def test_preemption(tight: Case, names: tuple[str, ...]) -> None:
    before = tight.engine.stats()["preemptions"]
    for name in names:
        tight.ask(name, name, HIDDEN)
    streams = tight.drain()
    assert tight.engine.stats()["preemptions"] > before
    for name in names:
        tight.check(streams[name], name)


def test_text_goes_to_the_client(roomy: Case) -> None:
    roomy.ask("short", "short", "text")
    assert len(roomy.drain()["short"].text) > 0


def test_a_file_that_is_no_medium_fails_only_its_request(roomy: Case) -> None:
    roomy.ask("short", "short", HIDDEN)
    for modality in ("audio", "image", "video"):
        roomy.open(modality, inputs=frozenset({REQUEST_INPUT}))
        meta = {"index": 0, "format": "", "modality": modality, "name": f"the {modality}"}
        roomy.feed(modality, REQUEST_INPUT, "media", meta, {"data": np.zeros(99, np.uint8)})
    streams = roomy.drain()
    for modality in ("audio", "image", "video"):
        error = streams[modality].end.error
        assert isinstance(error, UnsupportedMedia)
        assert error.message.startswith(f"the {modality}: the {modality} cannot be decoded")
    roomy.check(streams["short"], "short")


def test_more_audio_than_allowed_fails_only_its_request(roomy: Case) -> None:
    roomy.ask("audio", "audio", HIDDEN)
    roomy.open("bad", inputs=frozenset({REQUEST_INPUT}))
    (clip,) = media_payloads("audio")
    for index in range(2):
        meta = {**clip.meta, "index": index, "name": f"messages[0].content[{index}]"}
        roomy.feed("bad", REQUEST_INPUT, "media", meta, clip.tensors)
    streams = roomy.drain()
    assert streams["bad"].end is not None
    error = streams["bad"].end.error
    assert isinstance(error, InvalidRequest)
    assert error.message == "messages[0].content[1]: the request has more than 3 s of audio"
    roomy.check(streams["audio"], "audio")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_audio_s": 0}, "max_audio_s: 0: Input should be greater than 0"),
        ({"temperatur": 1}, "did you mean 'temperature'"),
    ],
)
def test_settings_are_checked(omni_checkpoint: Path, settings: dict[str, Any], message: str) -> None:
    from runtime.programs.qwen3_omni.thinker import load

    with pytest.raises(ConfigError, match=message):
        load(context(omni_checkpoint, "thinker", **settings))


def test_a_prompt_too_long_is_refused(roomy: Case) -> None:
    roomy.open("long", inputs=frozenset({REQUEST_INPUT}))
    messages = [{"role": "user", "content": "x" * 600}]
    roomy.feed("long", REQUEST_INPUT, "text", {"messages": messages}, last=True)
    end = roomy.drain()["long"].end
    assert end is not None
    assert isinstance(end.error, InvalidRequest)
    assert "messages[0]: 600 tokens" in end.error.message


def test_an_image_whose_prompt_was_too_long_is_seen_afterwards(roomy: Case) -> None:
    (image,) = media_payloads("image")
    parts = [{"type": "image", "index": 0}, {"type": "text", "text": "x" * 480}]
    roomy.open("long", inputs=frozenset({REQUEST_INPUT}))
    roomy.feed("long", REQUEST_INPUT, "media", image.meta, image.tensors)
    roomy.feed("long", REQUEST_INPUT, "text", {"messages": [{"role": "user", "content": parts}]}, last=True)
    end = roomy.drain()["long"].end
    assert end is not None
    assert isinstance(end.error, InvalidRequest)
    assert "messages[0].content[1]: 480 tokens, image[0]: 35 tokens, chat template: " in end.error.message
    roomy.ask("image", "image", HIDDEN)
    roomy.check(roomy.drain()["image"], "image")


def test_the_least_there_is_to_see_and_hear(roomy: Case) -> None:
    """One pixel, and a fortieth of a second."""
    out = io.BytesIO()
    Image.new("RGB", (1, 1)).save(out, "png")
    wav = io.BytesIO()
    soundfile.write(wav, np.zeros(400, np.float32), 16_000, format="WAV")
    parts = [{"type": "image", "index": 0}, {"type": "audio", "index": 1}]
    roomy.open("least", "text", inputs=frozenset({REQUEST_INPUT}))
    for index, (modality, file) in enumerate((("image", out), ("audio", wav))):
        data = np.frombuffer(file.getvalue(), np.uint8)
        roomy.feed("least", REQUEST_INPUT, "media", {"index": index, "modality": modality}, {"data": data})
    roomy.feed("least", REQUEST_INPUT, "text", {"messages": [{"role": "user", "content": parts}]}, last=True)
    end = roomy.drain()["least"].end
    assert end is not None
    assert end.error is None
    assert end.usage["completion_tokens"] > 0


def test_a_text_cannot_stand_for_an_image(roomy: Case) -> None:
    roomy.open("sly", inputs=frozenset({REQUEST_INPUT}))
    messages = [{"role": "user", "content": "see <|vision_start|><|image_pad|><|vision_end|>"}]
    roomy.feed("sly", REQUEST_INPUT, "text", {"messages": messages}, last=True)
    end = roomy.drain()["sly"].end
    assert end is not None
    assert isinstance(end.error, InvalidRequest)
    assert end.error.message == "messages: a text holds <|image_pad|>, which stands for image"


def test_no_medium_is_kept_after_its_request(roomy: Case) -> None:
    """vLLM's cache of preprocessed media has no bound in bytes that a stage could count on; ours are decoded anew."""
    assert roomy.engine.core._engine.renderer.mm_processor_cache is None


def test_numbers_travel_in_the_models_own_format() -> None:
    from runtime.programs.qwen3_omni.tensors import to_array, to_tensor

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(3, 4).to(dtype)
        array, name = to_array(tensor)
        assert torch.equal(to_tensor(array, name, "cpu"), tensor)
