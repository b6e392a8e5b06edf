"""The command itself: what it imports, what it says, its exit codes, chat and status."""

import io
import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from rich.console import Console

from baton.cli.chat import Conversation, repl
from baton.cli.console import MergedLog
from baton.cli.main import main
from baton.cli.status import table
from baton.cluster.errors import BatonError
from tests.support.redis import make_record


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return int(ended.value.code or 0)


def test_the_command_imports_neither_torch_nor_a_service_nor_the_network() -> None:
    code = (
        "import sys, baton.cli.main, baton.cli.up, baton.cli.services, baton.cli.status\n"
        "names = ('torch', 'transformers', 'router', 'prefill_service', 'decode_service')\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    for name in ("up", "router", "prefill", "decode", "chat", "status", "kv-size", "model"):
        assert name in shown


@pytest.mark.parametrize("command", ["up", "router", "prefill", "decode"])
def test_each_process_explains_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert f"usage: baton {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["up", "router", "prefill", "decode"])
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "--port", "http") == 2
    said = capsys.readouterr().err
    assert said.startswith("baton: --port must be a port") and said.count("\n") == 1


def test_a_taken_port_is_a_sentence_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert run("up", "--port", str(port)) == 2
    assert f"Cannot listen on 127.0.0.1:{port}: it is taken" in capsys.readouterr().err


def test_a_missing_model_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("up", "--port", "0", "--model", "/no/such/model.gguf") == 1
    said = capsys.readouterr().err
    assert "/no/such/model.gguf" in said and "Traceback" not in said


def test_nothing_to_talk_to_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("chat", "--url", "http://127.0.0.1:1", "--message", "hi") == 1
    assert "Nothing answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_status_without_a_redis_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--redis", "redis://127.0.0.1:1/0") == 1
    assert "Redis is not available" in capsys.readouterr().err
    assert run("status", "--redis", "localhost") == 1
    assert "--redis must be a URL" in capsys.readouterr().err


def test_kv_size_answers_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("kv-size", "--layers=30", "--kv-heads=3", "--head-dim=64") == 0
    assert "= 23,040 B" in capsys.readouterr().out


def test_the_status_table_shows_load_and_draining_prefill_first() -> None:
    workers = [
        make_record("decode-0", running=3, waiting=1, free_blocks=17, draining=True),
        make_record("prefill-0", handoffs_in_flight=2),
    ]
    out = io.StringIO()
    Console(file=out, width=200).print(table(workers))
    _, prefill, decode = out.getvalue().splitlines()
    assert prefill.split()[:2] == ["prefill", "prefill-0"]
    assert "3/8" in decode and "17/64 free" in decode and "draining" in decode


def test_the_status_table_cuts_no_id_at_80_columns() -> None:
    names = ["prefill-machine-17-0123", "prefill-on-a-machine-far-away-in-another-room-0123"]
    out = io.StringIO()
    workers = [make_record(name, free_blocks=17) for name in names]
    Console(file=out, width=80).print(table(workers, width=80))
    text = out.getvalue()
    assert names[0] in text and "17/64 free" in text and "…" not in text
    ids = "".join(line[9:].split(" ")[0] for line in text.splitlines()[1:])
    assert names[1] in ids


def test_the_merged_log_names_every_line_in_one_column() -> None:
    out = io.StringIO()
    log = MergedLog(["router", "prefill-0"], stream=out)
    log.say("router", "hello [bold]")
    log.say("prefill-0", "x" * 500)
    log.say("baton", "bye")
    assert out.getvalue().splitlines() == [
        "router    │ hello [bold]",
        "prefill-0 │ " + "x" * 500,
        "baton     │ bye",
    ]


def test_json_lines_of_children_pass_unchanged() -> None:
    out = io.StringIO()
    MergedLog(["router"], raw=True, stream=out).say("router", '{"a": 1}')
    assert out.getvalue() == '{"a": 1}\n'


class FakeServer:
    """Answers like the router: the words of the last message, in pieces."""

    def __init__(self, broken: bool = False, error: bool = False) -> None:
        self.requests: list[dict[str, object]] = []
        self._broken, self._error = broken, error

    def client(self) -> httpx.Client:
        return httpx.Client(base_url="http://baton", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "smollm2"}]})
        body = json.loads(request.content)
        self.requests.append(body)
        if self._error:
            return httpx.Response(503, json={"error": {"message": "There is no decode worker."}})
        return httpx.Response(200, content=b"".join(self._events(body)))

    def _events(self, body: dict[str, list[dict[str, str]]]) -> Iterator[bytes]:
        yield b": a comment\n\n"
        for word in body["messages"][-1]["content"].split():
            event = {"choices": [{"delta": {"content": f"{word}."}}]}
            yield f"data: {json.dumps(event)}\n\n".encode()
        if self._broken:
            yield b'data: {"error": {"message": "The worker died."}}\n\n'
        yield b"data: [DONE]\n\n"


def test_a_conversation_streams_and_remembers_both_sides() -> None:
    server = FakeServer()
    talk = Conversation("http://baton", system="Be brief.")
    with server.client() as client:
        assert list(talk.ask(client, "one two")) == ["one.", "two."]
        assert list(talk.ask(client, "three")) == ["three."]
    assert server.requests[-1]["model"] == "smollm2"
    assert server.requests[-1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "one.two."},
        {"role": "user", "content": "three"},
    ]


def test_an_answer_that_failed_midway_is_not_remembered() -> None:
    talk = Conversation("http://baton")
    with FakeServer(broken=True).client() as client, pytest.raises(BatonError, match="died"):
        list(talk.ask(client, "one"))
    assert talk.messages == []


def test_the_servers_own_words_are_shown_when_it_refuses() -> None:
    with FakeServer(error=True).client() as client, pytest.raises(BatonError, match="no decode"):
        list(Conversation("http://baton").ask(client, "one"))


def test_the_repl_goes_on_after_an_error_starts_over_and_ends_at_end_of_input(
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed = iter(["hello", "", "/new", "again"])

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    talk, server = Conversation("http://baton"), FakeServer()
    with server.client() as client:
        repl(talk, client, read)
    assert [request["messages"] for request in server.requests] == [
        [{"role": "user", "content": "hello"}],
        [{"role": "user", "content": "again"}],
    ]
    assert "hello.\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["up", "--tls-dir", "x"], "--tls-dir needs --ray"),
        (["up", "--cpus-per-worker", "2"], "--cpus-per-worker needs --ray"),
        (["explain", "hi", "--ttft-ms", "nan"], "--ttft-ms must be a number of milliseconds"),
        (["bench", "--json", "/missing/x.json"], "/missing/x.json: No such file or directory"),
        (["certs", "init", "/dev/null/x"], "/dev/null/x: Not a directory"),
    ],
)
def test_what_cannot_be_done_is_a_sentence_before_any_work(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) in (1, 2)
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown


def test_an_api_key_that_is_none_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_API_KEY", "schlüssel")
    assert run("cache", "ls") == 2
    assert "BATON_API_KEY is no API key" in capsys.readouterr().err
