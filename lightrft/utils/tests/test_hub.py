"""The hub where its name has no address."""
import os
import socket
import sys

import pytest
from huggingface_hub import constants

from lightrft.models.tokenizer import load_tokenizer
from lightrft.utils import hub
from lightrft.utils.errors import UserError


@pytest.fixture(name="asked")
def fixture_asked(monkeypatch):
    """Addresses that are asked for; none is known. The hub's clients are online, and as before afterwards."""
    asked = []

    def unknown(host, *args, **kwargs):
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(hub, "getproxies", dict)
    if "datasets" in sys.modules:
        monkeypatch.setattr(sys.modules["datasets"].config, "HF_HUB_OFFLINE", False)
    return asked


def test_a_model_of_the_hub_fails_at_once_in_one_sentence(asked, capsys):
    for _ in range(2):
        with pytest.raises(UserError, match="cannot load the tokenizer of 'org/absent'"):
            load_tokenizer("org/absent")
    assert asked == ["hub.example"], "asked once, and never by a client that tries again"
    said = capsys.readouterr().err
    assert said.count("hub.example has no address here (Name or service not known)") == 1
    assert constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"


def test_behind_a_proxy_and_with_an_address_nothing_is_switched(asked, monkeypatch):
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy:3128"})
    hub.prefer_cache_without_network()
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [])
    hub.prefer_cache_without_network()
    assert not constants.HF_HUB_OFFLINE and not asked
