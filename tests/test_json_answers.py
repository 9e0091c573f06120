"""The real model at temperature 1, held to thirty schemas: whatever it draws, it ends, parses and is valid."""

from __future__ import annotations

import json
from collections import Counter

import jsonschema
import pytest
from thirty_schemas import SCHEMAS

from llmfromscratch import LLM, SamplingParams

SEEDS = range(20)
MAX_TOKENS = 160
VALIDATOR = jsonschema.Draft202012Validator


def test_there_are_thirty_schemas_and_all_are_schemas():
    assert len(SCHEMAS) == 30
    for schema in SCHEMAS.values():
        VALIDATOR.check_schema(schema)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_at_temperature_1_every_answer_stops_and_is_valid_under_its_schema(smollm2_gguf):
    llm = LLM(smollm2_gguf, device="cpu", max_requests=60)
    asked = [(name, seed) for name in SCHEMAS for seed in SEEDS]
    prompts = [f"Question: {name}, as JSON?\nAnswer: " for name, _ in asked]
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=MAX_TOKENS, json_schema=SCHEMAS[name])
        for name, seed in asked
    ]
    different = Counter()
    for (name, seed), answer in zip(asked, llm.generate(prompts, params), strict=True):
        assert answer.finish_reason == "stop", (name, seed, answer.finish_reason, answer.error, answer.text)
        value = json.loads(answer.text)
        VALIDATOR(SCHEMAS[name], format_checker=VALIDATOR.FORMAT_CHECKER).validate(value)
        different[name, answer.text] += 1
    assert len(different) > 300, "the model draws: it does not say the same thing each time"
