"""A worker process sees its own devices and no others."""

from __future__ import annotations

import os

import pytest

from runtime.devices import claim_devices


@pytest.mark.parametrize(
    ("devices", "names", "visible"),
    [
        (("cpu",), ("cpu",), ""),
        (("cuda:1",), ("cuda:0",), "1"),
        (("cuda:3", "cuda:0"), ("cuda:0", "cuda:1"), "3,0"),
        (("cpu", "cuda:2"), ("cpu", "cuda:0"), "2"),
    ],
)
def test_devices_get_names_of_the_process(
    devices: tuple[str, ...], names: tuple[str, ...], visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert claim_devices(devices) == names
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
