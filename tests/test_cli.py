"""The command line answers on standard output, complains in one sentence on standard error, and says so by its code."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
import torch
from tiny_models import save_tiny

from llmfromscratch import LLM, SamplingParams, cli, hub

SENTENCE = (
    "The answer to this question lies in the intricate dance of light and color. "
    "The sky appears blue because of a phenomenon known as Rayleigh scattering."
)  # fmt: skip


def command(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """A command line of its own, as a person would run it."""
    return subprocess.run(
        [sys.executable, "-m", "llmfromscratch", *arguments],
        input=text,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "TQDM_DISABLE": "1"},
        timeout=200,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def expected(tiny) -> LLM:
    return LLM(tiny, dtype="float64", device="cpu")


# ---- as a person runs it -----------------------------------------------------------------------------------------


@pytest.mark.model
def test_generate_answers_with_the_real_model(smollm2_gguf):
    done = command("generate", "Why is the sky blue?", "--max-tokens", "40", "--dtype", "float32")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(SENTENCE)
    assert done.stdout.endswith("\n")


@pytest.mark.model
def test_chat_over_a_pipe_answers_each_line_and_remembers_the_conversation(smollm2_fp32):
    params = SamplingParams(max_tokens=8)
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Name a colour."}]
    first = smollm2_fp32.chat(messages, params).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And another?"}]
    second = smollm2_fp32.chat(messages, params).text
    more = ["--max-tokens", "8", "--dtype", "float32", "--device", "cpu"]
    done = command("chat", "--system", "You are brief.", *more, text="Name a colour.\nAnd another?\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"> {first}\n> {second}\n> \n"


WRONG_COMMANDS = [
    (["generate", "x", "--model", "smollm2-135m-instrukt"], "llmfromscratch: smollm2-135m-instrukt: no such file"),
    (["generate", "x", "--temperature", "-1"], "llmfromscratch: temperature is -1.0; it must be 0 (greedy)"),
    (["generate", "x", "--top-p", "0.9"], "llmfromscratch: top_p is 0.9 and temperature is 0"),
    (["chat", "--preset", "poems"], "llmfromscratch: There is no preset 'poems'; there are code, facts, chat, stories"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG_COMMANDS)
def test_an_error_is_one_sentence_on_stderr_with_code_1_and_no_traceback(arguments, sentence):
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1


def test_help_is_shown_for_the_package_run_as_a_module():
    done = command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("generate", "chat", "models", "doctor"):
        assert f"\n    {name} " in done.stdout


IMPORT = """
import sys, llmfromscratch
assert "torch" not in sys.modules, "importing the package imported torch"
from llmfromscratch import LLM, SamplingParams, diverges_at
assert "torch" in sys.modules
assert set(llmfromscratch.__all__) <= set(dir(llmfromscratch))
try:
    llmfromscratch.LMM
except AttributeError as error:
    print(error)
"""


def test_importing_the_package_does_not_import_torch_until_a_name_is_asked_for():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, encoding="utf-8", timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "module 'llmfromscratch' has no attribute 'LMM'\n"


# ---- inside this process, with a tiny model ----------------------------------------------------------------------


def options(tiny: str, *more: str) -> list[str]:
    return ["--model", tiny, "--dtype", "float64", "--device", "cpu", *more]


def test_generate_prints_the_engines_answer_to_the_prompt_as_a_chat(tiny, expected, capsys):
    assert cli.main(["generate", "Hi", *options(tiny, "--max-tokens", "8")]) == 0
    answer = expected.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=8))
    assert capsys.readouterr().out == answer.text + "\n"


def test_raw_continues_the_text_and_a_dash_reads_it_from_standard_input(tiny, expected, capsys, monkeypatch):
    answer = expected.generate("Once", SamplingParams(max_tokens=8, temperature=0.9, seed=5))[0]
    more = ["--raw", *options(tiny, "--max-tokens", "8", "--temperature", "0.9", "--seed", "5")]
    assert cli.main(["generate", "Once", *more]) == 0
    assert capsys.readouterr().out == answer.text + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once"))
    assert cli.main(["generate", "-", *more]) == 0
    assert capsys.readouterr().out == answer.text + "\n"


EVERY_OPTION = {
    "temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.99, "repetition_penalty": 1.3,
    "presence_penalty": 0.2, "frequency_penalty": 0.1, "seed": 5, "stop": ("Q", "zz"), "include_stop": True,
    "ignore_eos": True, "max_tokens": 12, "bad_words": ("xyz",), "required_words": ("a", "b"),
}  # fmt: skip


@pytest.mark.parametrize("command_name", ["generate", "chat"])
def test_every_option_of_sampling_reaches_the_parameters_under_its_own_name(command_name):
    arguments = [command_name, *(["x"] if command_name == "generate" else [])]
    for name, value in EVERY_OPTION.items():
        flag = {"bad_words": "--bad-word", "required_words": "--required-word"}.get(name, "--" + name.replace("_", "-"))
        for one in value if isinstance(value, tuple) else (value,):
            arguments += [flag] if one is True else [flag, str(one)]
    assert cli._params(cli._parser().parse_args(arguments)) == SamplingParams(**EVERY_OPTION)
    one = [*arguments[: 1 + (command_name == "generate")], "--regex", "a+"]
    assert cli._params(cli._parser().parse_args(one)) == SamplingParams(regex="a+")


def test_a_preset_can_be_changed_by_options_beside_it():
    given = cli._parser().parse_args(["generate", "x", "--preset", "chat", "--top-p", "0.5", "--max-tokens", "7"])
    assert cli._params(given) == SamplingParams.preset("chat", top_p=0.5, max_tokens=7)


def test_sampling_options_change_the_answer_as_the_parameters_do(tiny, expected, capsys):
    params = SamplingParams(max_tokens=20, temperature=1.1, top_p=0.8, seed=5, ignore_eos=True)
    text = expected.generate("Once", params)[0].text
    stop = text[5:7]
    more = ["--max-tokens", "20", "--temperature", "1.1", "--top-p", "0.8", "--seed", "5", "--ignore-eos"]
    assert cli.main(["generate", "Once", "--raw", *options(tiny, *more)]) == 0
    assert capsys.readouterr().out == text + "\n"
    assert cli.main(["generate", "Once", "--raw", *options(tiny, *more, "--stop", stop)]) == 0
    assert capsys.readouterr().out == text[: text.index(stop)] + "\n"


def test_chat_keeps_the_conversation_and_ends_at_an_empty_line(tiny, expected, capsys, monkeypatch):
    params = SamplingParams(max_tokens=6)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}]
    first = expected.chat(messages, params).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "b"}]
    second = expected.chat(messages, params).text
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n\nnever read\n"))
    assert cli.main(["chat", "--system", "S", *options(tiny, "--max-tokens", "6")]) == 0
    assert capsys.readouterr().out == f"> {first}\n> {second}\n> "


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--seed", "-1"], "seed is -1"),
        (["--dtype", "float7"], "float7"),
        (["--device", "toaster"], "toaster"),
        (["--engine", "no/such/folder"], "folder"),
    ],
)
def test_a_wrong_option_is_refused_in_a_sentence(tiny, capsys, more, sentence):
    for name in (["generate", "x"], ["chat"]):
        assert cli.main([*name, *options(tiny), *more]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("llmfromscratch: ")
        assert sentence in err


def test_sampling_options_are_checked_before_the_model_is_loaded(capsys):
    assert cli.main(["generate", "x", "--model", "no-such-model", "--max-tokens", "0"]) == 1
    assert "max_tokens is 0" in capsys.readouterr().err


def test_an_answer_that_was_given_up_says_why_and_ends_with_code_1(tiny, capsys, monkeypatch):
    def broken(*arguments, **named):
        llm = LLM(*arguments, **named)
        llm.model.norm.weight = torch.nn.Parameter(llm.model.norm.weight * float("nan"))
        return llm

    monkeypatch.setattr("llmfromscratch.engine.LLM", broken)
    assert cli.main(["generate", "x", "--raw", *options(tiny)]) == 1
    assert "given up: the model's logits are NaN" in capsys.readouterr().err


def test_an_interruption_ends_with_code_130_and_no_traceback(tiny, capsys, monkeypatch):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("llmfromscratch.engine.LLM", interrupted)
    assert cli.main(["generate", "x"]) == 130
    assert capsys.readouterr() == ("", "\n")


def test_an_interruption_in_a_chat_stops_the_answer_and_not_the_conversation(tiny, expected, capsys, monkeypatch):
    class Interrupted(LLM):
        def stream(self, prompt, params=None):
            if b"stop me" in bytes(self.tokenizer.decode(prompt), "utf-8"):
                raise KeyboardInterrupt
            return super().stream(prompt, params)

    monkeypatch.setattr("llmfromscratch.engine.LLM", Interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("stop me\na\n"))
    assert cli.main(["chat", *options(tiny, "--max-tokens", "6")]) == 0
    answer = expected.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=6)).text
    assert capsys.readouterr().out == f"> \n(interrupted; the question is forgotten)\n> {answer}\n> \n"


def test_a_terminal_that_lacks_a_character_shows_a_question_mark_instead_of_failing(tiny, monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    more = ["--temperature", "1.5", "--seed", "1", "--max-tokens", "40", "--raw"]
    assert cli.main(["generate", "x", *options(tiny, *more)]) == 0
    screen.flush()
    assert b"?" in screen.buffer.getvalue()


def test_models_lists_the_known_models_and_whether_they_are_here(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(hub.CACHE_VARIABLE, str(tmp_path))
    assert cli.main(["models"]) == 0
    assert capsys.readouterr().out == "smollm2-135m-instruct: not fetched yet; it is fetched at first use\n"


@pytest.mark.model
def test_models_shows_where_a_fetched_model_lies_and_fetch_prints_its_path(capsys, smollm2_gguf):
    assert cli.main(["models"]) == 0
    assert capsys.readouterr().out == f"smollm2-135m-instruct: {smollm2_gguf}\n"
    assert cli.main(["models", "--fetch", "smollm2-135m-instruct"]) == 0
    assert capsys.readouterr().out == f"{smollm2_gguf}\n"


def test_a_missing_command_is_refused_with_the_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert "usage: llmfromscratch" in capsys.readouterr().err
