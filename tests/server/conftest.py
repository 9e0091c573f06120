"""A tiny model behind a real server, one for all tests of a file; each test leaves nothing behind."""

from __future__ import annotations

import pytest
from serving import Held, Serving, nothing_left
from tiny_models import save_tiny

from llmfromscratch import LLM, sampling


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LLM:
    return LLM(save_tiny(tmp_path_factory.mktemp("tiny")), dtype="float64", device="cpu", max_requests=4)


@pytest.fixture
def llm(loaded):
    loaded.sampler = sampling.Sampler()
    loaded.use_scheduler(max_requests=4)
    yield loaded
    if isinstance(loaded.sampler, Held):
        loaded.sampler.let_all()  # a test that failed half-way leaves it closed
    nothing_left(loaded)


@pytest.fixture(scope="module")
def shared(loaded):
    with Serving(loaded) as server:
        yield server


@pytest.fixture
def server(llm, shared) -> Serving:
    """The file's own server, with usual settings."""
    return shared
