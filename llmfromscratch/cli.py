"""The command line: `llmfromscratch generate | chat | serve | quantize | models | doctor | lab | board | grade`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmfromscratch import learner_engine
from llmfromscratch.errors import LLMFromScratchError

if TYPE_CHECKING:
    from llmfromscratch import sampling
    from llmfromscratch.engine import LLM

_DEFAULT_MODEL = "smollm2-135m-instruct"
_METHODS = ("int8", "int4", "nf4", "w8a8", "gptq", "awq", "awq+gptq")  # quantized_model.KINDS, without importing torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 done, 1 failed with a sentence, 130 interrupted."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without emoji shows a question mark
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        if getattr(options, "engine", None):
            learner_engine.activate(options.engine)
        return command(options)
    except LLMFromScratchError as error:
        print(f"llmfromscratch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llmfromscratch", description="An LLM inference engine to read and rebuild.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="answer one prompt")
    generate.add_argument("prompt", help="the question; '-' reads it from standard input")
    generate.add_argument("--raw", action="store_true", help="continue the text instead of answering it as a chat")
    _add_model_options(generate)
    generate.set_defaults(command=_generate)

    chat = commands.add_parser("chat", help="talk to the model; an empty line or Ctrl-D ends")
    chat.add_argument("--system", help="what the model is told to be")
    _add_model_options(chat)
    chat.set_defaults(command=_chat)

    _add_serve(commands)
    _add_quantize(commands)

    models = commands.add_parser("models", help="list the known models and where they lie")
    models.add_argument("--fetch", metavar="NAME", help="fetch and verify one now")
    models.set_defaults(command=_models)

    doctor = commands.add_parser("doctor", help="say what is wrong with this environment and how to mend it")
    doctor.set_defaults(command=_doctor)
    _add_course(commands)
    return parser


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's clients expect it",
        epilog="Ctrl-C finishes what runs and ends; a second one ends at once. Keys on a command line can be read by "
        "everybody on the machine: --api-keys takes them from a file.",
    )
    serve.add_argument(
        "model", nargs="?", default=_DEFAULT_MODEL, help="name, folder, file or hub id (default: %(default)s)"
    )
    serve.add_argument("--host", default="127.0.0.1", help="where to listen (default: this machine only)")
    serve.add_argument("--port", type=int, default=8000, help="(default: %(default)s; 0: any that is free)")
    serve.add_argument("--model-name", help="what clients call the model (default: the last part of MODEL)")
    serve.add_argument(
        "--api-key", action="append", default=[], metavar="KEY[=PRIORITY]", help="ask for this key; may be repeated"
    )
    serve.add_argument("--api-keys", type=Path, metavar="FILE", help="keys from a file, one KEY[=PRIORITY] a line")
    serve.add_argument("--max-requests", type=int, help="requests computed at a time")
    serve.add_argument("--max-queue", type=int, help="requests that may wait; one more is refused")
    serve.add_argument("--max-streams", type=int, help="answers streamed at a time")
    serve.add_argument("--max-prompt-tokens", type=int, help="tokens of a prompt at most")
    serve.add_argument("--request-timeout", type=float, metavar="S", help="seconds until an answer is given up")
    serve.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    serve.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: %(default)s)")
    _add_quantization(serve)
    serve.add_argument("--engine", metavar="DIR", help="use the modules in this folder in the place of the package's")
    serve.set_defaults(command=_serve)


def _add_quantization(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quantization",
        choices=("native", *_METHODS),
        help="weights in few bits, less to read for each token; native keeps a GGUF's own",
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=("int8", "int4"), help="keys and values in few bits: more tokens in the same memory"
    )


def _add_quantize(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    quantize = commands.add_parser(
        "quantize",
        help="write a model with fewer bits a weight into a folder, which serves wherever a model is asked for",
        epilog="int8: a scale a row. int4, nf4: a grid for each 32 columns. w8a8: int8, activations too. gptq, awq, "
        "awq+gptq: int4, calibrated on a text, which takes minutes.",
    )
    quantize.add_argument(
        "model", nargs="?", default=_DEFAULT_MODEL, help="name, folder, file or hub id (default: %(default)s)"
    )
    quantize.add_argument("--method", required=True, choices=_METHODS, help="how")
    quantize.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    quantize.add_argument("--dtype", default="auto", help="of the weights that stay numbers (default: %(default)s)")
    quantize.add_argument(
        "--engine", metavar="DIR", help="use the modules in this folder in the place of the package's"
    )
    quantize.set_defaults(command=_quantize)


def _add_course(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    lab = commands.add_parser("lab", help="open JupyterLab on your copies of the chapters")
    lab.add_argument("--no-browser", action="store_true", help="print the address only")
    lab.add_argument("--port", type=int, help="where to listen; the next free one if it is taken")
    lab.add_argument("--dir", type=Path, metavar="DIR", help="your course folder (default: my_course in the clone)")
    lab.set_defaults(command=_lab)

    board = commands.add_parser("board", help="show whose each module is, points and open exercises")
    board.add_argument("--dir", type=Path, metavar="DIR", help="your course folder (default: my_course in the clone)")
    board.set_defaults(command=_board)

    grade = commands.add_parser(
        "grade",
        help="grade notebooks; runs what is in them, contained",
        epilog="Exit code: 0 all points, 1 points missing, 2 a file could not be graded. The docstring of "
        "llmfromscratch.course.grading.grade says what is kept out and what is not.",
    )
    grade.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a notebook, a copy of one of the chapters")
    grade.add_argument("--json", metavar="PATH", help="write the grades as JSON; '-' prints them instead of the table")
    grade.add_argument("--junit", metavar="PATH", help="write the grades as JUnit XML")
    grade.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds a notebook may run (default: 600)"
    )
    grade.add_argument("--memory", type=float, default=6.0, metavar="GB", help="memory it may hold (default: 6)")
    grade.add_argument("--chapters", type=Path, metavar="DIR", help="the chapters as handed out (default: the clone's)")
    grade.set_defaults(command=_grade)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=_DEFAULT_MODEL, help="name, folder, file or hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: %(default)s)")
    _add_quantization(parser)
    parser.add_argument("--engine", metavar="DIR", help="use the modules in this folder in the place of the package's")
    _add_sampling_options(parser)


# Options that are fields of SamplingParams: name, type, what it does. What is not given keeps its neutral value.
_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "new tokens at most (default: 256)"),
    ("temperature", float, "0 takes the most probable token; above 0 draws (default: 0)"),
    ("top_k", int, "draw from the K most probable tokens"),
    ("top_p", float, "draw from the smallest set of tokens that has this probability"),
    ("min_p", float, "drop tokens below this share of the most probable one's probability"),
    ("typical_p", float, "draw from the most typical tokens that have this probability"),
    ("repetition_penalty", float, "above 1 makes tokens of prompt and answer less likely"),
    ("presence_penalty", float, "taken off the logits of tokens that the answer holds"),
    ("frequency_penalty", float, "taken off as often as the answer holds them"),
    ("seed", int, "repeat the same draws"),
    ("regex", str, "the answer matches this regular expression"),
    ("json_schema", str, "the answer is JSON of this schema"),
)
_TEXTS = (  # those that may be given several times
    ("stop", "end the answer before this text"),
    ("bad_words", "the answer will not contain this text"),
    ("required_words", "the answer contains this text before it ends"),
)
_FLAGS = (
    ("include_stop", "keep the stop text that ended the answer"),
    ("ignore_eos", "go on past the model's end tokens"),
)


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Left out of the options where they are not given, so that a preset's values stand."""
    group, absent = parser.add_argument_group("sampling"), argparse.SUPPRESS
    group.add_argument("--preset", metavar="NAME", help="begin with settings for code, facts, chat or stories")
    for name, kind, does in _SAMPLING:
        metavar = {int: "N", float: "X", str: "TEXT"}[kind]
        group.add_argument(_flag(name), dest=name, type=kind, default=absent, metavar=metavar, help=does)
    for name, does in _TEXTS:
        group.add_argument(
            _flag(name),
            dest=name,
            action="append",
            default=absent,
            metavar="TEXT",
            help=f"{does}; may be given several times",
        )
    for name, does in _FLAGS:
        group.add_argument(_flag(name), dest=name, action="store_true", default=absent, help=does)


def _flag(name: str) -> str:
    return {"bad_words": "--bad-word", "required_words": "--required-word"}.get(name, "--" + name.replace("_", "-"))


def _generate(options: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    params = _params(options)
    llm = _load(options)
    is_chat = not options.raw and llm.tokenizer is not None and llm.tokenizer.chat_template
    chat = llm.chat_prompt([{"role": "user", "content": prompt}]) if is_chat else prompt
    _, failed = _print_stream(llm, chat, params)
    return failed


def _chat(options: argparse.Namespace) -> int:
    params = _params(options)
    llm = _load(options)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            question = ""
            print()  # the prompt's line is still open
        if not question:
            return 0
        messages.append({"role": "user", "content": question})
        try:
            answer, _ = _print_stream(llm, llm.chat_prompt(messages), params)
        except KeyboardInterrupt:  # stops the answer, not the conversation
            print("\n(interrupted; the question is forgotten)")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _params(options: argparse.Namespace) -> sampling.SamplingParams:
    """Checked before the model is loaded, which takes longer."""
    from llmfromscratch import sampling  # torch is imported only by the commands that need it

    names = [*(name for name, _, _ in _SAMPLING), *(name for name, _ in (*_TEXTS, *_FLAGS))]
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if options.preset is None:
        return sampling.SamplingParams(**given)
    return sampling.SamplingParams.preset(options.preset, **given)


def _load(options: argparse.Namespace) -> LLM:
    from llmfromscratch.engine import LLM

    return LLM(
        options.model,
        dtype=options.dtype,
        device=options.device,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
    )


def _print_stream(llm: LLM, prompt: str | list[int], params: sampling.SamplingParams) -> tuple[str, int]:
    """Prints the answer as it comes; returns it and the exit code."""
    answer = ""
    for piece in llm.stream(prompt, params):
        print(piece.text, end="", flush=True)
        answer += piece.text
        if piece.error:
            print(f"\nllmfromscratch: the answer was given up: {piece.error}", file=sys.stderr)
            return answer, 1
    print()
    return answer, 0


def _serve(options: argparse.Namespace) -> int:
    try:
        from llmfromscratch.server import command
    except ModuleNotFoundError as error:
        print(f"llmfromscratch: {error}", file=sys.stderr)
        return 1
    if command.serve(options):
        return 0
    # at once means that nothing is waited for: neither a step of the model nor a thread that reads a long prompt
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


def _quantize(options: argparse.Namespace) -> int:
    from llmfromscratch import loading, quantized_files, quantized_model
    from llmfromscratch.engine import LLM
    from llmfromscratch.placement import format_bytes

    quantized_files.check_new(options.out)  # now, as the rest may take minutes
    # nothing is computed with it but the calibration: no cache, no fused layers
    llm = LLM(
        options.model, dtype=options.dtype, device="cpu", quantization=options.method, kv_cache="none", layers="plain"
    )
    folder = quantized_files.save(llm, options.out, options.model)
    dtype = llm.model.norm.weight.dtype
    before = sum(loading.module_sizes(llm.config, dtype).values())
    after = quantized_model.nbytes(llm.model)
    kind = str(dtype).removeprefix("torch.")
    print(
        f"{folder}: {format_bytes(after)} of weights in {options.method}, {before / after:.1f} times less than "
        f"{format_bytes(before)} in {kind}."
    )
    return 0


def _models(options: argparse.Namespace) -> int:
    from llmfromscratch import hub

    if options.fetch:
        print(hub.resolve(options.fetch))
        return 0
    for name, known in hub.known_models().items():
        print(f"{name}: {known.file if hub.is_cached(known) else 'not fetched yet; it is fetched at first use'}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from llmfromscratch import doctor

    checks = doctor.checks()
    print(doctor.report(checks))
    return doctor.exit_code(checks)


def _lab(options: argparse.Namespace) -> int:
    from llmfromscratch.course import lab

    return lab.open_lab(lab.course_folder(options.dir), browser=not options.no_browser, port=options.port)


def _board(options: argparse.Namespace) -> int:
    from llmfromscratch.course import lab, progress
    from llmfromscratch.course.board import Board

    folder = lab.course_folder(options.dir)
    print(Board.of(progress.Course(folder) if progress.is_course(folder) else None))
    return 0


def _grade(options: argparse.Namespace) -> int:
    from llmfromscratch.course.grading import grade as grading
    from llmfromscratch.course.grading import reports as grade_reports

    memory = int(options.memory * 2**30)
    grades = grading.grade_all(options.files, options.chapters or grading.CHAPTERS, options.timeout, memory)
    print(grade_reports.as_json(grades) if options.json == "-" else grade_reports.as_text(grades))
    if options.json and options.json != "-":
        Path(options.json).write_text(grade_reports.as_json(grades), encoding="utf-8")
    if options.junit:
        Path(options.junit).write_text(grade_reports.as_junit(grades), encoding="utf-8")
    return grading.exit_code(grades)
