"""`polysilicon run`: text from a model through our layers, kernels and engine."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polysilicon.errors import PolysiliconError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from polysilicon.engine import Engine, Output, SamplingParams


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    prompt: Annotated[str | None, typer.Argument(help="What to ask.")] = None,
    model: Annotated[
        str, typer.Option(help="smollm2, gemma3-270m, a Hugging Face folder or a GGUF file.")
    ] = "smollm2",
    device: Annotated[
        str | None,
        typer.Option(help="As `polysilicon devices` lists it; by default the current one."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep this much probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: fewer repetitions.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Default: what the device wants.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="A conversation, line by line.")] = False,
    batch: Annotated[
        Path | None, typer.Option(help="A file with one prompt a line, run together.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a result.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that a model folder carries.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pickled weights, which can run code.")
    ] = False,
) -> None:
    """Generates text and shows which kernel served every op, and why."""
    if (prompt is not None) + chat + (batch is not None) != 1:
        raise typer.BadParameter("give exactly one of PROMPT, --chat and --batch FILE")
    from rich.console import Console

    from polysilicon.engine import Engine, SamplingParams

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
    # All that can be wrong with the call is told before the weights are read.
    prompts = _prompts(prompt, batch)
    loaded = _load(model, device, dtype, trust_remote_code, allow_pickle)
    with Console(stderr=True).status("adapting, and compiling" if compiled else "adapting"):
        engine = Engine(loaded, device=device, compile=compiled)
    session = Session(engine, params, as_json)
    if chat:
        failed = session.chat()
    elif batch is not None:
        failed = session.batch(prompts)
    else:
        failed = session.one(prompts[0])
    if failed:
        raise typer.Exit(1)


def _prompts(prompt: str | None, batch: Path | None) -> list[str]:
    if batch is not None:
        # Empty lines separate prompts for the eye and are none.
        try:
            text = batch.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{batch} cannot be read as text: {error}") from error
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise RequestError(f"{batch} has no prompts: write one a line")
        return lines
    if prompt is not None and not prompt.strip():
        raise RequestError("the prompt is empty: write what to ask")
    return [] if prompt is None else [prompt]


def _load(
    model: str, device: str | None, dtype: str, trust_remote_code: bool, allow_pickle: bool
) -> Any:
    from polysilicon.devices import require_runnable, resolve
    from polysilicon.loading import load

    target = require_runnable(resolve(device))
    return load(
        model,
        dtype=dtype,
        device=target.torch_device,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )


@dataclass
class Session:
    """One call of the command: an engine, how to sample, and where results go."""

    engine: Engine
    params: SamplingParams
    as_json: bool

    def one(self, prompt: str) -> bool:
        """Streams the answer to one prompt; whether it failed."""
        output = self._answer(self._tokens(prompt))
        if self.as_json:
            self._print_json(output)
        else:
            self._print_tables()
        return output.error is not None

    def batch(self, prompts: Sequence[str]) -> bool:
        """Runs all prompts together and shows each result once those before it are shown."""
        results: dict[int, Output | RequestError] = {}
        index_of: dict[int, int] = {}
        for index, prompt in enumerate(prompts):
            try:
                index_of[self.engine.add_request(self._tokens(prompt), self.params)] = index
            except RequestError as error:
                results[index] = error
        shown = 0
        while shown < len(prompts):
            while shown in results:
                self._show(prompts[shown], results[shown])
                shown += 1
            for update in self.engine.step() if self.engine.has_work() else ():
                if update.output is not None:
                    results[index_of[update.request_id]] = update.output
        if not self.as_json:
            self._print_tables()
        return any(isinstance(r, RequestError) or r.error is not None for r in results.values())

    def chat(self) -> bool:
        """Answers line by line; each turn computes only what is new. Whether a turn failed."""
        if not self.engine.has_chat_template:
            raise RequestError("this model has no chat template: ask it one PROMPT at a time")
        messages: list[dict[str, str]] = []
        known: list[int] = []
        failed = False
        for line in _lines(sys.stdin.isatty()):
            messages.append({"role": "user", "content": line})
            try:
                tokens = self.engine.encode_chat(messages, known)
                output = self._answer(tokens)
            except PolysiliconError as error:
                # The conversation goes on without this turn.
                typer.echo(f"error: {error}", err=True)
                messages.pop()
                failed = True
                continue
            messages.append({"role": "assistant", "content": output.text})
            known = [*tokens, *output.token_ids]
            if self.as_json:
                self._print_json(output)
            else:
                typer.echo(
                    f"  ({output.prefilled_tokens} prompt tokens computed, "
                    f"{output.reused_tokens} reused)"
                )
        if not self.as_json:
            self._print_tables()
        return failed

    def _tokens(self, prompt: str) -> str | list[int]:
        if not self.engine.has_chat_template:
            return prompt
        return self.engine.encode_chat([{"role": "user", "content": prompt}])

    def _answer(self, prompt: str | list[int]) -> Output:
        output = None
        for update in self.engine.stream(prompt, self.params):
            if not self.as_json:
                typer.echo(update.text, nl=False)
                sys.stdout.flush()
            output = update.output
        assert output is not None  # a stream ends with its output, or raises
        if not self.as_json:
            typer.echo()
        return output

    def _show(self, prompt: str, result: Output | RequestError) -> None:
        error = result if isinstance(result, RequestError) else result.error
        if self.as_json and isinstance(result, RequestError):
            refused = {"prompt": prompt, "finish_reason": "error", "error": str(error)}
            typer.echo(json.dumps({"schema": 1, **refused}))
        elif isinstance(result, RequestError) or not self.as_json:
            text = "" if isinstance(result, RequestError) else result.text
            typer.echo(f"> {prompt}\n{text}{f'error: {error}' if error else ''}\n")
        else:
            self._print_json(result, prompt=prompt)

    def _print_json(self, output: Output, **more: str) -> None:
        report = self.engine.report()
        data = {
            "schema": 1,
            **more,
            "text": output.text,
            "token_ids": list(output.token_ids),
            "finish_reason": output.finish_reason,
            "prompt_tokens": output.prompt_tokens,
            "prefilled_tokens": output.prefilled_tokens,
            "reused_tokens": output.reused_tokens,
            "ttft_s": output.ttft_s,
            "tokens_per_s": output.tokens_per_s,
            "device": report.device,
            "ops": [row.as_dict() for row in report.ops],
        }
        if output.error is not None:
            data["error"] = str(output.error)
        typer.echo(json.dumps(data))

    def _print_tables(self) -> None:
        from rich.console import Console

        console = Console()
        console.print()
        for table in self.engine.report().tables():
            console.print(table)


def _lines(terminal: bool) -> Iterator[str]:
    """Lines of standard input that are not empty, up to its end."""
    while True:
        if terminal:
            typer.echo("> ", nl=False)
            sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
