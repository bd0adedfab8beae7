"""Whatever a control listener does with its bytes, the control plane gets an answer or an error, in time."""

import contextlib
import socketserver
import threading
from ipaddress import ip_network

import pytest

from rl_core.destinations import Reach
from rl_core.engines.client import EngineClient
from rl_core.engines.control_client import MAX_ANSWER_BYTES, ControlClient
from rl_core.errors import EngineError, EngineUnreachable
from rl_core.types import SamplingParams


@contextlib.contextmanager
def listener(talk):
    """A listener that says what `talk` writes; its URL. `talk` is given a way to wait until the test is over."""
    over = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(65536)
            with contextlib.suppress(OSError):
                talk(self.request.sendall, over)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            over.set()
            server.shutdown()
            thread.join()


def answer(status, body):
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return lambda send, _: send(head.encode() + body)


def trickle(head, more):
    """The head at once, then `more` again and again until nobody listens."""

    def talk(send, over):
        send(head)
        while not over.wait(0.02):
            send(more)

    return talk


OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "talk",
    [trickle(OK + b"\r\n", b" "), trickle(b"", b"H"), trickle(OK, b"X-More: y\r\n")],
    ids=["body", "status line", "headers"],
)
def test_an_answer_that_never_ends_is_left_in_time(talk):
    with (
        listener(talk) as url,
        ControlClient(url, "t", timeout_s=0.5) as client,
        pytest.raises(EngineError, match="no answer from the engine"),
    ):
        client.status()


def test_an_answer_over_its_bound_is_not_read_to_its_end():
    body = b" " * (MAX_ANSWER_BYTES + 1)
    with (
        listener(answer(200, body)) as url,
        ControlClient(url, "t") as client,
        pytest.raises(EngineError, match="over"),
    ):
        client.metrics()


@pytest.mark.parametrize(
    ("status", "body"),
    [(500, b'{"error":{"message":"\xff"}}'), (503, b"[" * 200_000), (200, b"[" * 200_000), (200, b'"\\ud800"')],
)
def test_nonsense_is_an_error_of_the_engine(status, body):
    with listener(answer(status, body)) as url, ControlClient(url, "t") as client, pytest.raises(EngineError):
        client.status()


@pytest.mark.parametrize(
    "url", ["http://exa mple:1", "http://gpu..example:1", "http://a\x00b", "http://-\u20ac\u2028:1"]
)
async def test_what_is_no_address_is_an_engine_that_is_not_reached(url):
    with pytest.raises(EngineUnreachable), ControlClient(url, "t") as control:
        control.status()
    with pytest.raises(EngineUnreachable):
        async with EngineClient(url, "t") as client:
            await client.generate([1], SamplingParams())


def test_text_is_told_without_nul():
    body = b'{"name":"r","slots":{"default":{"version":null,"root":"","state":"poisoned","error":"a\\u0000b"}}}'
    with listener(answer(200, body)) as url, ControlClient(url, "t") as client:
        assert client.status().slots["default"].error == "a\ufffdb"


async def test_with_a_reach_nothing_else_is_asked():
    asked = []
    with listener(lambda *_: asked.append(1)) as url:
        for text, said in ((url, "must begin with https"), (url.replace("http", "https"), "not a public address")):
            with pytest.raises(EngineUnreachable, match=said), ControlClient(text, "t", reach=Reach()) as control:
                control.status()
        with pytest.raises(EngineUnreachable, match="https"):
            async with EngineClient(url.replace("127.0.0.1", "localhost"), "t", reach=Reach()) as client:
                await client.generate([1], SamplingParams())
    assert not asked


def test_a_network_that_was_named_is_asked_by_its_address():
    body = b'{"name":"r","slots":{}}'
    with (
        listener(answer(200, body)) as url,
        ControlClient(url, "t", reach=Reach([ip_network("127.0.0.0/8")])) as client,
    ):
        assert client.status().name == "r"
