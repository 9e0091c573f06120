"""`serve(llm)` in a notebook: one line starts a server in the background; its handle says where and ends it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from html.parser import HTMLParser

import nbclient
import nbformat
import pytest
from scripted_engine import scripted
from tiny_models import save_tiny

from llmfromscratch import RequestError, SamplingParams
from llmfromscratch.server import ServerSettings, serve

TEXT = "Ada wrote the first program."
ASK = {"model": "llmfromscratch", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 100}


@pytest.fixture
def llm(tmp_path):
    return scripted(tmp_path / "model", TEXT)


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read()


def ask(server) -> str:
    body = json.dumps(ASK).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"]


def port_of(server) -> int:
    return int(server.url.rpartition(":")[2])


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_it_answers_as_soon_as_the_line_is_over(llm):
    with serve(llm) as server:
        assert json.loads(get(server.url + "/health"))["status"] == "ok"
        assert ask(server) == TEXT


def test_the_engine_can_be_used_in_the_notebook_meanwhile(llm):
    with serve(llm) as server:
        assert llm.generate("x", SamplingParams(max_tokens=100))[0].text == TEXT
        assert ask(server) == TEXT
    assert llm.generate("x", SamplingParams(max_tokens=100))[0].text == TEXT


def test_stopping_finishes_what_runs_and_frees_the_port_and_the_memory(tmp_path):
    llm = scripted(tmp_path / "model", TEXT, seconds=0.03)
    server = serve(llm)
    answers = []
    client = threading.Thread(target=lambda: answers.append(ask(server)))
    client.start()
    until = time.monotonic() + 20
    while not llm.core.scheduler.running and time.monotonic() < until:
        time.sleep(0.01)
    server.stop()
    client.join(30)
    assert answers == [TEXT]
    assert is_free(port_of(server)) and llm.metrics.running == llm.metrics.blocks_used == 0
    llm.cache.audit()


def test_interrupting_a_stop_ends_at_once(tmp_path, monkeypatch):
    llm = scripted(tmp_path / "model", TEXT * 50, seconds=0.05)  # a minute and more
    server = serve(llm)
    failures = []

    def client():
        try:
            ask(server)
        except (OSError, urllib.error.HTTPError) as error:
            failures.append(error)

    waiting = threading.Thread(target=client)
    waiting.start()
    until = time.monotonic() + 20
    while not llm.core.scheduler.running and time.monotonic() < until:
        time.sleep(0.01)
    join = server._thread.join

    def interrupted(timeout=None):
        monkeypatch.setattr(server._thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(server._thread, "join", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    waiting.join(20)
    assert time.monotonic() - began < 15 and is_free(port_of(server)) and not server.running
    server.stop()  # there is nothing left to wait for


def test_stopping_twice_is_fine_and_the_handle_says_how_it_stands(llm):
    server = serve(llm)
    assert repr(server) == f"<server at {server.url}, running>"
    server.stop()
    server.stop()
    assert repr(server) == f"<server at {server.url}, stopped>"
    assert "stopped" in server._repr_html_() and "href" not in server._repr_html_()


def test_what_the_notebook_shows_is_a_link_to_the_page(llm):
    class Links(HTMLParser):
        found: list = []

        def handle_starttag(self, tag, attributes):
            if tag == "a":
                self.found.append(dict(attributes)["href"])

    with serve(llm) as server:
        links = Links()
        links.feed(server._repr_html_())
        (address,) = links.found
        assert b"<h1>llmfromscratch</h1>" in get(address)


def test_two_servers_run_side_by_side(llm, tmp_path):
    other = scripted(tmp_path / "other", "Something else.")
    with serve(llm) as one, serve(other) as two:
        assert one.url != two.url
        assert (ask(one), ask(two)) == (TEXT, "Something else.")


def test_a_port_can_be_chosen_and_had_again_at_once(llm):
    with serve(llm) as server:
        port = port_of(server)
        assert ask(server) == TEXT
    with serve(llm, port=port) as server:
        assert port_of(server) == port and ask(server) == TEXT


def test_a_port_that_is_taken_is_named(llm):
    with serve(llm) as server, pytest.raises(RequestError, match=f"port {port_of(server)}: .*; name another one"):
        serve(llm, port=port_of(server))


@pytest.mark.parametrize("port", [-1, 65536, "8000", True, None])
def test_a_port_that_cannot_be_meant_is_refused(llm, port):
    with pytest.raises(RequestError, match=repr(port)):
        serve(llm, port=port)


def test_a_host_that_is_not_this_machine_is_refused(llm):
    with pytest.raises(RequestError, match=r"cannot listen at 203\.0\.113\.7"):
        serve(llm, host="203.0.113.7")  # reserved for documentation


def test_a_server_on_all_interfaces_is_linked_at_the_local_one(llm):
    with serve(llm, host="0.0.0.0") as server:
        assert server.url.startswith("http://127.0.0.1:") and ask(server) == TEXT


def test_the_settings_are_the_servers(llm):
    with serve(llm, settings=ServerSettings(api_keys={"secret": 0})) as server:
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(server)
        assert refused.value.code == 401
        refused.value.close()


def test_a_program_that_forgets_to_stop_it_ends_all_the_same(tmp_path):
    save_tiny(tmp_path / "model")
    program = (
        "from llmfromscratch import LLM\nfrom llmfromscratch.server import serve\n"
        f"print(serve(LLM({str(tmp_path / 'model')!r}, device='cpu', kv_cache_memory=1_000_000)))"
    )
    quiet = {**os.environ, "TQDM_DISABLE": "1"}  # on a slow machine a line says that layers are being compiled
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=quiet)
    assert (done.returncode, done.stderr) == (0, "") and "running" in done.stdout


def test_in_a_real_notebook_one_line_starts_it_and_the_next_cells_talk_to_it(tmp_path):
    save_tiny(tmp_path / "model", max_position_embeddings=256)
    cells = [
        "from llmfromscratch import LLM\n"
        "from llmfromscratch.server import serve\n"
        f"llm = LLM({str(tmp_path / 'model')!r}, dtype='float32', device='cpu', kv_cache_memory=1_000_000)",
        "server = serve(llm)\nserver",
        "import json, urllib.request\n"
        "json.loads(urllib.request.urlopen(server.url + '/watch').read())['blocks']['held']",
        "server.stop()\nserver",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    started, watched, stopped = (cell.outputs[-1].data for cell in notebook.cells[1:])
    assert "running" in started["text/plain"] and 'href="http://127.0.0.1:' in started["text/html"]
    assert watched["text/plain"] == "0"
    assert "stopped" in stopped["text/plain"]
