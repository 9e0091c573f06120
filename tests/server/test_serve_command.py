"""`llmfromscratch serve`: options become settings, and what is wrong is said before a model is loaded."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from llmfromscratch import cli
from llmfromscratch.errors import RequestError
from llmfromscratch.server import command, running


def options(*words: str):
    return cli._parser().parse_args(["serve", *words])


def test_options_become_settings(tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("# ours\nurgent=5\n\nusual\n", encoding="utf-8")
    found = command.settings(
        options("some/model.gguf", "--max-queue", "3", "--request-timeout", "1.5", "--api-key", "low=-2", "--api-keys",
                str(keys))
    )  # fmt: skip
    assert (found.model_name, found.max_queue, found.request_timeout) == ("model.gguf", 3, 1.5)
    assert found.api_keys == {"low": -2, "urgent": 5, "usual": 0}
    assert command.settings(options()).model_name == "smollm2-135m-instruct"
    assert command.settings(options("x", "--model-name", "mine")).model_name == "mine"


@pytest.mark.parametrize(
    ("line", "keys"),
    [("a", {"a": 0}), ("a=3", {"a": 3}), ("a=-3", {"a": -3}), ("a==", {"a==": 0}), ("a==4", {"a=": 4})],
)
def test_a_key_may_have_a_priority_and_may_end_like_base64(line, keys):
    assert command.api_keys([line]) == keys


@pytest.mark.parametrize("line", ["a=high", "a=1.5", "a=99999999"])
def test_a_priority_that_is_no_number_is_refused_without_showing_the_key(line):
    with pytest.raises(RequestError, match="the priority of an API key") as caught:
        command.api_keys([line])
    assert "a=" not in str(caught.value)


def test_a_file_without_keys_does_not_leave_the_server_open(tmp_path):
    empty = tmp_path / "keys.txt"
    empty.write_text("# none yet\n", encoding="utf-8")
    with pytest.raises(RequestError, match="holds no API key"):
        command.settings(options("--api-keys", str(empty)))
    with pytest.raises(RequestError, match="cannot be read"):
        command.settings(options("--api-keys", str(tmp_path / "missing")))


@pytest.mark.parametrize("port", [-1, 65536, True, "8000"])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(RequestError, match="port is"):
        running.bind("127.0.0.1", port)


def test_an_address_that_is_taken_or_not_ours_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert cli.main(["serve", "no such model", "--port", str(port)]) == 1
    shown = capsys.readouterr().err
    assert "cannot listen" in shown and str(port) in shown and "no such model" not in shown
    with pytest.raises(RequestError, match="cannot listen at no host"):
        running.bind("no host", 0)


def test_without_the_extra_one_sentence_says_what_to_install():
    hidden = "import sys; sys.modules['fastapi'] = None; from llmfromscratch.cli import main; sys.exit(main(['serve']))"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "llmfromscratch: Serving needs fastapi, which is not installed; run: pip install 'llmfromscratch[serve]'\n"
    )


def test_the_package_of_the_server_loads_nothing_before_it_is_asked():
    code = "import llmfromscratch.server, sys; print('fastapi' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=120)
    assert done.stdout == "False False\n"
