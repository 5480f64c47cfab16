"""Qwen3-Omni's talker as a stage against transformers: the first code and the residual codes of every frame."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from runtime.engines.ar.engine import ArEngine
from runtime.errors import InvalidRequest
from tests.golden.ar_engines import assert_nothing_left
from tests.golden.omni_reference import NUM_CODEC_TOKENS, PARTS
from tests.golden.omni_stages import StageDriver, Stream, context, make_omni_engine
from tests.golden.tiny_qwen3_omni import CODEC_END, HEAD_DIM, NUM_CODE_GROUPS, NUM_KV_HEADS, TALKER_LAYERS

if TYPE_CHECKING:
    from tests.golden.omni_reference import Reference

KV_BYTES_PER_TOKEN = TALKER_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4
CHUNK_TOKENS = 48
EDGE = "thinker->talker"
HIDDEN = "hidden_states"
CODES = "codec_codes"


class Case(StageDriver):
    """Feeds the talker with what the thinker has in transformers."""

    def __init__(self, engine: ArEngine, references: dict[str, Reference]) -> None:
        super().__init__(engine)
        self.references = references
        self.fed: dict[str, int] = {}

    def begin(
        self, name: str, request_id: str | None = None, positions: np.ndarray | None = None, **params: Any
    ) -> None:
        """The prompt, and nothing of what the thinker said. positions: [n], instead of the reference's."""
        reference, request_id = self.references[name], request_id or name
        self.open(request_id, CODES, inputs=frozenset({EDGE}), **params)
        ids = np.array(reference.prompt_ids, np.int32)
        is_media = np.isin(ids, self.engine.program.config.media_token_ids)
        hidden = reference.hidden[: len(ids)][is_media]
        placed = reference.positions.numpy() if positions is None else np.broadcast_to(positions, (3, len(ids)))
        tensors = {
            "token_ids": ids,
            "embeddings": reference.embeddings[: len(ids)].numpy(),
            "hidden": hidden.numpy(),
            "positions": placed.astype(np.int32),
        }
        self.feed(request_id, EDGE, HIDDEN, {"dtype": "float32"}, tensors)
        self.fed[request_id] = len(ids)

    def more(self, name: str, num_rows: int, request_id: str | None = None) -> None:
        """Rows of what the thinker said, and with its last one the end."""
        reference, request_id = self.references[name], request_id or name
        rows = reference.embeddings[self.fed[request_id] :][:num_rows]
        self.fed[request_id] += len(rows)
        first = self.fed[request_id] - len(rows) - len(reference.prompt_ids)
        ids = np.array(reference.text_ids[first : first + len(rows)], np.int32)
        is_last = self.fed[request_id] == len(reference.embeddings)
        if len(rows):
            self.feed(request_id, EDGE, HIDDEN, {"dtype": "float32"}, {"token_ids": ids, "embeddings": rows.numpy()})
        if is_last:
            self.feed(request_id, EDGE, HIDDEN, last=True)

    def whole(self, name: str, request_id: str | None = None, **params: Any) -> None:
        self.begin(name, request_id, **params)
        self.more(name, 10_000, request_id)

    def check(self, stream: Stream, name: str) -> None:
        """Where the length ends it, transformers does not complete the last token, and we do."""
        reference = self.references[name]
        codes = stream.joined("codes", axis=1)
        num_frames = reference.codes.shape[1]
        assert codes[:, :num_frames].tolist() == reference.codes.tolist()
        ended = reference.code0[-1] == CODEC_END
        assert codes.shape == (NUM_CODE_GROUPS, num_frames if ended else num_frames + 1)
        assert codes[0].tolist() == reference.code0[: codes.shape[1]]
        assert stream.end is not None
        assert stream.end.error is None
        assert stream.end.reason == ("stop" if ended else "length")


def make_talker(folder: Path, **settings: Any) -> Any:
    from runtime.programs.qwen3_omni.talker import load

    return load(context(folder, "talker", **{"temperature": 0.0, "max_tokens": NUM_CODEC_TOKENS, **settings}))


@pytest.fixture(scope="module")
def roomy_engine(omni_checkpoint: Path) -> Iterator[ArEngine]:
    engine = make_omni_engine(omni_checkpoint, make_talker(omni_checkpoint), KV_BYTES_PER_TOKEN)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tight_engine(omni_checkpoint: Path) -> Iterator[ArEngine]:
    """Prompts are prefilled in chunks, and the KV cache holds less than its requests need."""
    engine = make_omni_engine(
        omni_checkpoint,
        make_talker(omni_checkpoint),
        KV_BYTES_PER_TOKEN,
        num_blocks=9,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK_TOKENS,
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def sampling_engine(omni_checkpoint: Path) -> Iterator[ArEngine]:
    engine = make_omni_engine(omni_checkpoint, make_talker(omni_checkpoint, temperature=0.9), KV_BYTES_PER_TOKEN)
    yield engine
    engine.close()


@pytest.fixture
def roomy(roomy_engine: ArEngine, omni_references: dict[str, Reference]) -> Iterator[Case]:
    yield from _case(roomy_engine, omni_references)


@pytest.fixture
def tight(tight_engine: ArEngine, omni_references: dict[str, Reference]) -> Iterator[Case]:
    yield from _case(tight_engine, omni_references)


@pytest.fixture
def sampling(sampling_engine: ArEngine, omni_references: dict[str, Reference]) -> Iterator[Case]:
    yield from _case(sampling_engine, omni_references)


def _case(engine: ArEngine, references: dict[str, Reference]) -> Iterator[Case]:
    yield Case(engine, references)
    assert_nothing_left(engine)
    assert not engine.core._tapped
    assert not engine.core._inputs


@pytest.mark.parametrize("name", PARTS)
def test_alone(roomy: Case, name: str) -> None:
    roomy.whole(name)
    roomy.check(roomy.drain()[name], name)


def test_a_batch_of_four_with_aborted_neighbours(roomy: Case) -> None:
    kept = ("short", "question", "chinese", "audio")
    for name in kept:
        roomy.whole(name)
        roomy.whole(name, f"doomed {name}")
    roomy.step()
    assert roomy.engine.stats()["running"] == 8, "eight requests that came together were not prefilled together"
    for name in kept:
        roomy.step()
        roomy.engine.abort(f"doomed {name}")
        roomy.streams.pop(f"doomed {name}")
    streams = roomy.drain()
    assert set(streams) == set(kept)
    for name in kept:
        roomy.check(streams[name], name)


@pytest.mark.parametrize("name", ["long", "audio", "image and audio"])
def test_chunked_prefill(tight: Case, name: str) -> None:
    tight.whole(name)
    tight.step()
    assert not tight.streams, "the prompt was prefilled at once"
    tight.check(tight.drain()[name], name)


def test_preemption(tight: Case) -> None:
    before = tight.engine.stats()["preemptions"]
    names = ("long", "short")
    for name in names:
        tight.whole(name)
    streams = tight.drain()
    assert tight.engine.stats()["preemptions"] > before
    for name in names:
        tight.check(streams[name], name)


def test_a_frame_waits_for_its_row(roomy: Case) -> None:
    """One row at a time: each lets exactly one more frame out, and in between there is nothing to do."""
    roomy.begin("short")
    assert roomy.engine.next_step_s() is None, "it began before the thinker said anything"
    before = roomy.engine.stats()["held"]
    roomy.more("short", 1)
    for number in range(1, 6):
        assert roomy.engine.next_step_s() == 0.0
        roomy.step()
        assert roomy.engine.next_step_s() is None, "it would step without the next row"
        assert len(roomy.streams["short"].payloads) == number
        roomy.more("short", 1)
    assert roomy.engine.stats()["held"] == before, "a step was made for nobody"
    roomy.more("short", 10_000)
    roomy.check(roomy.drain()["short"], "short")


@pytest.mark.parametrize("name", ["image", "video", "watch first"])
def test_positions_of_media_matter(roomy: Case, name: str) -> None:
    """Else the references would not tell right positions from those of a text."""
    reference = roomy.references[name]
    roomy.begin(name, positions=np.arange(len(reference.prompt_ids)))
    roomy.more(name, 10_000)
    found = roomy.drain()[name].joined("codes", axis=1)
    num_frames = min(found.shape[1], reference.codes.shape[1])
    assert found[:, :num_frames].tolist() != reference.codes[:, :num_frames].tolist()


def test_held_requests_keep_their_slots_while_others_run(tight: Case) -> None:
    """Four slots, all taken by requests of which some are held back; more wait. None is admitted over the limit."""
    before = tight.engine.stats()["held"]
    held, running = ("short", "question"), ("short", "short", "short")
    for name in held:
        tight.begin(name, f"held {name}")
        tight.more(name, 2, f"held {name}")
    for number, name in enumerate(running):
        tight.whole(name, f"runs {number}")
    for _ in range(12):
        tight.step()
        assert tight.engine.core.counts[0] <= 4
    assert tight.engine.stats()["held"] > before
    for name in held:
        tight.more(name, 10_000, f"held {name}")
    streams = tight.drain()
    for request_id, stream in streams.items():
        tight.check(stream, request_id.split()[1] if request_id.startswith("held") else "short")


def test_abort_of_a_request_that_is_held(roomy: Case) -> None:
    roomy.begin("short")
    roomy.more("short", 1)
    roomy.step()
    roomy.engine.abort("short")
    roomy.feed("short", EDGE, HIDDEN, last=True)
    assert set(roomy.drain()) == {"short"}


def test_a_thinker_without_a_word(roomy: Case) -> None:
    roomy.begin("short")
    roomy.feed("short", EDGE, HIDDEN, last=True)
    stream = roomy.drain()["short"]
    assert stream.payloads == []
    assert stream.end is not None
    assert stream.end.error is None
    assert stream.end.usage["completion_tokens"] == 0


def test_seeded_sampling_alone_and_in_company(sampling: Case) -> None:
    sampling.whole("short", seed=7)
    alone = sampling.drain()["short"].joined("codes", axis=1).tolist()
    sampling.whole("short", "again", seed=7)
    sampling.whole("short", "other", seed=8)
    for number, name in enumerate(("question", "chinese", "audio")):
        sampling.whole(name, f"stranger {number}")
        sampling.step()
    streams = sampling.drain()
    assert streams["again"].joined("codes", axis=1).tolist() == alone
    other = streams["other"].joined("codes", axis=1).tolist()
    assert other[0] != alone[0]
    assert other[1:] != alone[1:]


def test_an_unseeded_answer_can_be_made_again(sampling: Case) -> None:
    codes = []
    for _ in range(2):
        sampling.whole("short")
        stream = sampling.drain()["short"]
        codes.append(stream.joined("codes", axis=1).tolist())
    assert codes[0] != codes[1]
    sampling.whole("short", seed=stream.payloads[0].meta["seed"])
    assert sampling.drain()["short"].joined("codes", axis=1).tolist() == codes[1]


def test_voices(roomy: Case) -> None:
    roomy.whole("short", voice="Chelsie")
    found = roomy.drain()["short"].joined("codes", axis=1)
    assert found[0].tolist() != roomy.references["short"].code0[: found.shape[1]]
    roomy.open("bad", CODES, inputs=frozenset({EDGE}), voice="nobody")
    end = roomy.drain()["bad"].end
    assert end is not None
    assert isinstance(end.error, InvalidRequest)
    assert end.error.message == "voice: 'nobody'; expected one of aiden, chelsie, ethan"


def test_no_steps_for_nothing_while_those_that_wait_keep_the_memory(tight: Case) -> None:
    """Requests without a next row fill the cache: the others sleep until a row comes, and all end as they should."""
    held = ("question", "audio", "short")
    streams: dict[str, Stream] = {}
    for name in held:
        tight.begin(name)
        tight.more(name, 1)
        streams |= tight.drain()
    tight.whole("long")
    streams |= tight.drain()
    before = tight.engine.stats()
    assert (before["running"], before["queued"]) == (3, 1)
    assert "long" not in streams
    for name in held:
        tight.more(name, 10_000)
    for name, stream in tight.drain().items():
        streams.setdefault(name, Stream()).payloads += stream.payloads
        streams[name].end = stream.end
    for name in (*held, "long"):
        tight.check(streams[name], name)
