"""Connectors within one process: what each of them promises, and how they are opened."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime.connectors import KINDS, ShmSettings, open_connectors
from runtime.connectors.base import INLINE_BYTES, Connector
from runtime.errors import ConfigError, ConnectorError
from runtime.messages import Ref
from runtime.payload import Payload, pack

KIB, MIB = 1 << 10, 1 << 20


def payload(size_bytes: int, *, request_id: str = "r", fill: int = 1) -> Payload:
    data = np.full(size_bytes, fill, np.uint8)
    return Payload("latents", request_id, 2, "a->b", 5, True, {"fill": fill}, {"data": data})


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture(params=KINDS)
def connector(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connector]:
    kind: str = request.param
    opened = open_connectors([kind], shm=ShmSettings(tmp_path))[kind]
    yield opened
    opened.close()
    assert files(tmp_path) == []


# ---- what every connector promises ---------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 1, INLINE_BYTES, MIB, 9 * MIB])
def test_a_payload_arrives_as_it_was(connector: Connector, size_bytes: int) -> None:
    sent = payload(size_bytes)
    ref = connector.put(sent)
    got = connector.get(ref)
    assert (got.kind, got.request_id, got.epoch, got.edge, got.sequence, got.last, got.meta) == (
        *("latents", "r", 2, "a->b", 5, True),
        {"fill": 1},
    )
    np.testing.assert_array_equal(got.tensors["data"], sent.tensors["data"])
    assert ref.size_bytes == pack(sent).size_bytes


def test_small_payloads_ride_in_the_ref_and_large_ones_do_not(connector: Connector) -> None:
    overhead = pack(payload(64)).size_bytes - 64
    small, large = connector.put(payload(INLINE_BYTES - overhead)), connector.put(payload(INLINE_BYTES - overhead + 1))
    assert small.inline is not None
    assert len(small.inline) == INLINE_BYTES == small.size_bytes
    assert large.inline is None
    assert connector.health().num_payloads == 1
    assert not connector.reclaim(small)


def test_what_is_got_cannot_be_written(connector: Connector) -> None:
    for size_bytes in (100, MIB):
        got = connector.get(connector.put(payload(size_bytes)))
        with pytest.raises(ValueError, match="read-only"):
            got.tensors["data"][0] = 7


def test_two_consumers_do_not_see_each_others_changes(connector: Connector) -> None:
    ref = connector.put(payload(MIB))
    first, second = connector.get(ref), connector.get(ref)
    first.meta["fill"] = 9
    del first.tensors["data"]
    assert second.meta == {"fill": 1}
    assert connector.get(ref).tensors.keys() == {"data"}


def test_reclaim_frees_once(connector: Connector) -> None:
    ref = connector.put(payload(MIB))
    connector.release(ref)
    assert connector.health().used_bytes >= MIB
    assert connector.reclaim(ref)
    assert not connector.reclaim(ref)
    assert (connector.health().used_bytes, connector.health().num_payloads) == (0, 0)


def test_a_ref_is_an_error_once_it_is_reclaimed(connector: Connector) -> None:
    old = connector.put(payload(MIB, fill=1))
    connector.reclaim(old)
    with pytest.raises(ConnectorError, match="was reclaimed before this get"):
        connector.get(old)
    new = connector.put(payload(MIB, fill=2))
    with pytest.raises(ConnectorError, match="was reclaimed before this get"):
        connector.get(old)
    assert connector.get(new).meta == {"fill": 2}


def test_cleanup_frees_what_was_put_and_never_got_of_this_request_only(connector: Connector) -> None:
    refs = [connector.put(payload(MIB, request_id="over")) for _ in range(3)]
    kept = connector.put(payload(MIB, request_id="goes on", fill=3))
    assert connector.reclaim(refs[0])
    connector.cleanup("over")
    connector.cleanup("over")
    connector.cleanup("never known")
    assert connector.health().num_payloads == 1
    assert not any(connector.reclaim(ref) for ref in refs)
    with pytest.raises(ConnectorError):
        connector.get(refs[1])
    assert connector.get(kept).meta == {"fill": 3}


def test_a_credit_of_an_earlier_process_frees_nothing(connector: Connector) -> None:
    ref = connector.put(payload(MIB))
    foreign = Ref(ref.connector, "omnictl-1-1-00000000-1", ref.token, ref.offset, ref.size_bytes)
    assert not connector.reclaim(foreign)
    assert connector.health().num_payloads == 1


def test_a_ref_that_never_was_is_an_error(connector: Connector) -> None:
    for arena in ("", "omnictl-1-1-00000000-1", "../../etc/passwd"):
        with pytest.raises(ConnectorError, match=r"gone|no name of a segment|another process"):
            connector.get(Ref(connector.put(payload(0)).connector, arena, 1, 64, 64))


def test_a_ref_of_another_connector_is_an_error(connector: Connector) -> None:
    for inline in (None, pack(payload(0)).to_bytes()):
        with pytest.raises(ConnectorError, match="connector 'mooncake' was given to"):
            connector.get(Ref("mooncake", inline=inline))


def test_damaged_inline_bytes_are_an_error(connector: Connector) -> None:
    ref = connector.put(payload(100))
    assert ref.inline is not None
    with pytest.raises(ConnectorError, match="damaged payload"):
        connector.get(Ref(ref.connector, inline=ref.inline[:-64]))


def test_a_closed_connector_takes_nothing(connector: Connector) -> None:
    connector.put(payload(MIB))
    connector.close()
    connector.close()
    with pytest.raises(ConnectorError, match="is closed"):
        connector.put(payload(MIB))
    assert connector.health().num_payloads == 0


def test_threads_share_a_connector(connector: Connector) -> None:
    """Each thread puts, reads and frees payloads of its own; all must find what they put, and nothing is left."""
    failures: list[object] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        held: list[tuple[Ref, int]] = []
        try:
            for i in range(150):
                fill = chance.randrange(256)
                size_bytes = chance.choice([100, 20 * KIB, 200 * KIB, MIB])
                held.append((connector.put(payload(size_bytes, request_id=f"{number}-{i % 3}", fill=fill)), fill))
                if len(held) > 6:
                    ref, expected = held.pop(chance.randrange(len(held)))
                    data = connector.get(ref).tensors["data"]
                    assert data.min() == data.max() == expected
                    connector.release(ref)
                    assert connector.reclaim(ref) == (ref.inline is None)
            for i in range(3):
                connector.cleanup(f"{number}-{i}")
            assert not any(connector.reclaim(ref) for ref, _ in held)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert (connector.health().used_bytes, connector.health().num_payloads) == (0, 0)


def test_a_tensor_that_cannot_travel_costs_no_memory(connector: Connector) -> None:
    with pytest.raises(ConnectorError, match="has dtype"):
        connector.put(Payload("latents", "r", tensors={"x": np.zeros(MIB, np.longdouble)}))
    assert connector.health().used_bytes == 0


# ---- inproc --------------------------------------------------------------------------------------------


def test_inproc_hands_over_by_reference() -> None:
    (connector,) = open_connectors(["inproc"]).values()
    sent = payload(MIB)
    got = connector.get(connector.put(sent))
    assert np.shares_memory(got.tensors["data"], sent.tensors["data"])
    assert sent.tensors["data"].flags.writeable


# ---- the factory ---------------------------------------------------------------------------------------


def test_the_factory_opens_what_is_asked_in_the_folder_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNICTL_SHM_DIR", str(tmp_path))
    connectors = open_connectors()
    assert set(connectors) == set(KINDS)
    connectors["shm"].put(payload(MIB))
    assert len(files(tmp_path)) == 1
    for connector in connectors.values():
        connector.close()
    assert files(tmp_path) == []


def test_the_factory_refuses_a_connector_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="connector 'mooncake' is not known; expected one of inproc, shm"):
        open_connectors(["mooncake"])
