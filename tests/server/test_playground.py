"""The playground page in a real browser, against a server whose answers are known."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from megavm.profiler.viewer import PAGE as PROFILER

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

ROOT: Final = Path(__file__).resolve().parents[2]
PLAYGROUND: Final = ROOT / "server" / "pages" / "playground.html"
HOSTILE: Final = "<img src=x onerror=alert(1)> <b>bold</b> &amp;\n\n  two"
STORY: Final = ["Once", " upon", " a", " time"]
KEY: Final = "secret"


class FakeServer(ThreadingHTTPServer):
    """Answers as the last message says: "story", "long", "refuse", "break", "hostile" or echoes.

    Each piece of "paced", and a recording, waits for a ``release`` of its own.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.key: str | None = None
        self.models: list[dict[str, Any]] = [{"id": "stories", "max_model_len": 1024}]
        self.loading = False
        self.trace = b""
        self.release = threading.Semaphore(0)
        self.gone = threading.Event()  # a client left in the middle of its answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        pages = {"/": PLAYGROUND, "/profiler": PROFILER}
        if self.path in pages:
            self._send(200, "text/html; charset=utf-8", pages[self.path].read_bytes())
        elif self.server.loading:
            self._error(503, "The model is still loading.")
        elif self._allowed():
            self._json(200, {"object": "list", "data": self.server.models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if not self._allowed():
            return
        if self.path == "/v1/profile":
            self._profile(body)
        elif "messages" in body:
            text = body["messages"][-1]["content"]
            self._answer(text, lambda t, f: {"delta": {"content": t}, "finish_reason": f})
        else:
            self._answer(body["prompt"], lambda t, f: {"text": t, "finish_reason": f})

    def _allowed(self) -> bool:
        key = self.server.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._error(401, "The API key is wrong.")
        return False

    def _profile(self, body: dict[str, Any]) -> None:
        if body["steps"] == 13:
            self._error(409, "A recording runs already.")
            return
        self.server.release.acquire(timeout=15)
        name = 'attachment; filename="stories.megatrace"'
        self._send(200, "application/octet-stream", self.server.trace, disposition=name)

    def _answer(self, text: str, choice: Callable[[str, str | None], dict[str, Any]]) -> None:
        if text.startswith("refuse"):
            self._error(400, "the model has no chat template")
            return
        pieces = {
            "story": STORY,
            "paced": STORY,
            "hostile": [HOSTILE[:9], HOSTILE[9:]],
            "long": ["words and "] * 400,
            "break": ["half of"],
            "fault": ["half of"],
        }.get(text.split()[0], ["You said: ", text])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            if "messages" in self.server.bodies[-1]:
                self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for i, piece in enumerate(pieces):
                if text == "paced":
                    self.server.release.acquire(timeout=15)
                time.sleep(0.1 if text == "long" else 0.005)
                last = i == len(pieces) - 1 and text not in ("break", "fault")
                self._event({"choices": [choice(piece, "stop" if last else None)]})
            if text == "break":
                return
            if text == "fault":
                self._event({"error": {"message": "worker 3 waits", "code": 500}})
            usage = {"prompt_tokens": 7, "completion_tokens": len(pieces)}
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
        except ConnectionError:
            self.server.gone.set()

    def _event(self, value: object) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _error(self, status: int, message: str) -> None:
        self._json(status, {"error": {"message": message, "type": "x", "code": None}})

    def _json(self, status: int, value: object) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: int, kind: str, body: bytes, disposition: str = "inline") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Disposition", disposition)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Playground:
    """A tab with the page, and what a user does in it. What goes wrong fails the test."""

    def __init__(self, page: Page, screenshots: Path) -> None:
        self.page = page
        self.problems: list[str] = []
        self.refused: list[int] = []
        self._screenshots = screenshots
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        page.on("console", self._hear)
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        page.on("request", self._ask)
        page.on("response", lambda answer: self._note(answer.status))

    def _hear(self, message: Any) -> None:
        # The browser itself tells of every answer of 400 and more: `refused` has those.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.problems.append(f"{message.type}: {message.text}")

    def _note(self, status: int) -> None:
        if status >= 400:
            self.refused.append(status)

    def _ask(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            self.problems.append(f"request of {request.url}")

    def open(self, server: FakeServer) -> Playground:
        self.page.goto(server.url)
        self.wait("!document.getElementById('model').disabled")
        return self

    def wait(self, condition: str, seconds: float = 15) -> None:
        """Until a condition in the page holds; the page's policy forbids Playwright's own way."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"not true within {seconds} s: {condition}"
            time.sleep(0.02)

    def send(self, text: str) -> Playground:
        self.page.get_by_label("message", exact=True).fill(text)
        self.page.keyboard.press("Enter")
        return self

    def answered(self, count: int = 1) -> Locator:
        """The last of `count` answers, once it is whole."""
        answers = self.page.locator(".entry:not(.ours)")
        self.wait(
            f"document.querySelectorAll('.entry:not(.ours)').length === {count}"
            " && !document.querySelector('.streaming') && document.getElementById('stop').hidden"
        )
        return answers.last

    def text(self) -> str:
        """The text of the last answer."""
        return self.page.locator(".entry:not(.ours) .text").last.text_content() or ""

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def set(self, label: str, value: str) -> None:
        self.page.get_by_label(label, exact=True).fill(value)

    def picture(self, name: str) -> None:
        self.page.screenshot(path=self._screenshots / f"playground-{name}.png")


@pytest.fixture
def make_playground(browser: Browser, screenshots: Path) -> Iterator[Callable[..., Playground]]:
    """make_playground(color_scheme="dark", ...) -> the page in a browser of its own."""
    made: list[tuple[Any, Playground]] = []

    def make(**options: Any) -> Playground:
        options.setdefault("viewport", {"width": 1200, "height": 800})
        context = browser.new_context(**options)
        context.set_default_timeout(15_000)
        playground = Playground(context.new_page(), screenshots)
        made.append((context, playground))
        return playground

    yield make
    problems = [problem for _, playground in made for problem in playground.problems]
    for context, _ in made:
        context.close()
    assert not problems, problems


@pytest.fixture
def page(make_playground: Callable[..., Playground], server: FakeServer) -> Playground:
    return make_playground().open(server)


# --- the file -----------------------------------------------------------------------------------


def test_the_page_allows_its_own_script_and_style_alone() -> None:
    html = PLAYGROUND.read_text("utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    for directive, tag in (("script-src", 'script type="module"'), ("style-src", "style")):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag.split()[0]}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy[1], "write this into the page's policy"


def test_the_page_names_no_other_place_and_writes_no_html() -> None:
    html = PLAYGROUND.read_text("utf-8")
    assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", html)


# --- chat ---------------------------------------------------------------------------------------


def test_an_answer_streams_with_its_statistics(
    make_playground: Callable[..., Playground], server: FakeServer
) -> None:
    page = make_playground()
    page.page.add_init_script("performance.now = () => globalThis.milliseconds ?? 0")
    page.open(server)

    def at(milliseconds: int) -> None:
        page.page.evaluate(f"globalThis.milliseconds = {milliseconds}")

    at(1000)
    page.send("paced")
    page.wait("document.querySelector('.streaming')")
    for count in range(1, len(STORY) + 1):
        at(1100 + 100 * count)
        server.release.release()
        shown = "".join(STORY[:count])
        page.wait(f"document.querySelector('.entry:not(.ours) .text')?.textContent === '{shown}'")
    assert page.answered().locator(".stats").inner_text() == (
        "4 tokens · 8.0 tokens/s · first after 0.20 s · prompt 7 tokens · stop"
    )
    assert server.bodies[-1] == {
        "model": "stories",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "paced"}],
    }


def test_a_conversation_is_sent_whole(page: Playground, server: FakeServer) -> None:
    page.set("System prompt", "be kind")
    page.send("one").answered(1)
    page.send("two").answered(2)
    assert server.bodies[-1]["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "You said: one"},
        {"role": "user", "content": "two"},
    ]
    page.button("Clear").click()
    page.send("three").answered(1)
    assert len(server.bodies[-1]["messages"]) == 2


def test_what_was_not_answered_is_not_repeated(page: Playground, server: FakeServer) -> None:
    page.send("refuse").answered(1)
    page.send("hello").answered(2)
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "hello"}]


def test_settings_are_sent_and_kept(page: Playground, server: FakeServer) -> None:
    values = {"temperature": "0.5", "top_p": "0.9", "top_k": "5", "min_p": "0.1", "seed": "7"}
    for name, value in {**values, "max_tokens": "20"}.items():
        page.set(name, value)
    page.set(r"stop: one text per line, \n is a new line", "END\n\\n\\n")
    page.set("API key, kept until this tab is closed", KEY)
    page.page.reload()
    page.send("hello").answered()
    body = server.bodies[-1]
    assert {name: body[name] for name in values} == {k: float(v) for k, v in values.items()}
    assert (body["max_tokens"], body["stop"]) == (20, ["END", "\n\n"])
    stored = page.page.evaluate("JSON.stringify(localStorage)")
    assert "0.9" in stored
    assert KEY not in stored
    page.button("Reset").click()
    page.send("hello").answered(2)
    assert "temperature" not in server.bodies[-1]


def test_a_setting_that_is_no_number_is_not_sent(page: Playground, server: FakeServer) -> None:
    page.set("top_p", "3")
    page.send("hello")
    page.page.wait_for_timeout(200)
    assert server.bodies == []
    page.set("top_p", "1")
    page.send("hello").answered()


def test_what_the_model_says_is_only_text(page: Playground) -> None:
    page.send("hostile").answered()
    assert page.text() == HOSTILE
    assert page.page.locator("#entries img, #entries b").count() == 0
    page.send(HOSTILE).answered(2)
    assert page.text() == "You said: " + HOSTILE


@pytest.mark.parametrize("how", ["Escape", "Stop", "Clear"])
def test_a_stopped_answer_closes_its_connection(
    page: Playground, server: FakeServer, how: str
) -> None:
    page.send("long")
    page.wait("document.querySelector('.streaming .text')?.textContent")
    if how == "Escape":
        page.page.keyboard.press("Escape")
    else:
        page.button(how).click()
    assert server.gone.wait(5)
    if how == "Clear":
        assert page.page.locator("#welcome").is_visible()
    else:
        assert page.answered().locator(".stats").inner_text().endswith("stopped")
        assert page.text().startswith("words and")
    page.send("hello").answered(1 if how == "Clear" else 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("refuse", "the model has no chat template"),
        ("break", "The answer broke off: the server ended its stream early."),
        ("fault", "worker 3 waits"),
    ],
)
def test_an_error_is_the_servers_sentence_and_can_be_retried(
    page: Playground, server: FakeServer, text: str, said: str
) -> None:
    page.send(text)
    entry = page.answered()
    assert entry.locator(".error").inner_text().startswith(said)
    assert said in page.page.locator("#announcement").inner_text()
    if text != "refuse":
        assert page.text() == "half of"
    entry.get_by_role("button", name="Retry").click()
    page.wait("document.querySelectorAll('.entry').length === 2")
    page.answered()
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "user", "content": text}],
        [{"role": "user", "content": text}],
    ]


def test_a_server_that_went_away_is_a_sentence(page: Playground) -> None:
    page.page.route("**/v1/chat/completions", lambda route: route.abort())
    page.send("hello")
    error = page.answered().locator(".error").inner_text()
    assert error == "The server does not answer: is it still running?"


def test_a_message_can_be_edited(page: Playground, server: FakeServer) -> None:
    page.send("one").answered(1)
    page.send("two").answered(2)
    page.button("Edit").first.click()
    message = page.page.get_by_label("message", exact=True)
    assert message.input_value() == "one"
    page.page.keyboard.press("Escape")
    assert message.input_value() == ""
    assert page.page.locator(".entry").count() == 4
    page.button("Edit").first.click()
    page.send("1").answered(1)
    assert [m["content"] for m in server.bodies[-1]["messages"]] == ["1"]


def test_shift_enter_begins_a_line(page: Playground, server: FakeServer) -> None:
    page.page.get_by_label("message", exact=True).click()
    page.page.keyboard.type("one")
    page.page.keyboard.press("Shift+Enter")
    page.page.keyboard.type("two")
    page.page.keyboard.press("Enter")
    page.answered()
    assert server.bodies[-1]["messages"][0]["content"] == "one\ntwo"


# --- complete -----------------------------------------------------------------------------------


def test_a_model_without_a_template_completes(page: Playground, server: FakeServer) -> None:
    page.send("refuse")
    page.answered().get_by_role("button", name="Use Complete").click()
    page.send("story").answered()
    assert page.text() == "Once upon a time"
    body = server.bodies[-1]
    assert (body["prompt"], body["max_tokens"]) == ("story", 256)
    assert "messages" not in body
    page.button("Continue").click()
    page.answered(2)
    assert server.bodies[-1]["prompt"] == "storyOnce upon a time"
    page.button("Chat").click()
    assert page.page.locator(".entry").count() == 2


# --- the server ---------------------------------------------------------------------------------


def test_a_wrong_key_is_told_and_a_right_one_taken(
    make_playground: Callable[..., Playground], server: FakeServer
) -> None:
    server.key = KEY
    page = make_playground()
    page.page.goto(server.url)
    page.page.get_by_text("The API key is wrong.").wait_for()
    page.wait("document.activeElement.id === 'api-key'")
    page.page.keyboard.type(KEY)
    page.page.keyboard.press("Tab")
    page.wait("!document.getElementById('model').disabled")
    page.send("hello").answered()
    assert page.text() == "You said: hello"


def test_a_server_that_loads_is_waited_for(
    make_playground: Callable[..., Playground], server: FakeServer
) -> None:
    server.loading = True
    page = make_playground()
    page.page.goto(server.url)
    page.page.get_by_text("The model is still loading.").wait_for()
    server.loading = False
    page.wait("!document.getElementById('model').disabled")
    assert page.page.locator("#models-error").is_hidden()
    assert page.page.title() == "stories - megavm"


def test_there_are_links_to_the_other_pages(page: Playground) -> None:
    links = page.page.get_by_role("navigation").get_by_role("link")
    assert [link.get_attribute("href") for link in links.all()] == ["profiler", "metrics"]


def test_a_recording_opens_in_the_profiler(
    page: Playground, server: FakeServer, small_trace: bytes
) -> None:
    server.trace = small_trace
    page.set("steps to record", "3")
    page.button("Record 3 steps").click()
    page.page.get_by_text("Recording the next 3 steps").wait_for()
    server.release.release()
    page.page.get_by_text("stories.megatrace, ").wait_for()
    assert server.bodies[-1] == {"steps": 3}
    with page.page.expect_download() as download:
        page.page.get_by_role("link", name="Save").click()
    assert download.value.suggested_filename == "stories.megatrace"
    assert download.value.path().read_bytes() == small_trace
    with page.page.expect_popup() as popup:
        page.button("Open in the profiler").click()
    # The title is drawn with the trace, a frame after the trace is there.
    profiler = Playground(popup.value, Path())
    profiler.wait("document.title === 'stories.megatrace - megavm profiler'")
    assert profiler.page.evaluate("window.profiler.panes.length") == 1
    assert not profiler.problems


def test_a_recording_that_fails_is_the_servers_sentence(page: Playground) -> None:
    page.set("steps to record", "13")
    page.button("Record 13 steps").click()
    page.page.get_by_text("A recording runs already.").wait_for()
    assert page.refused == [409]
    assert page.button("Record 13 steps").is_enabled()


@pytest.fixture(scope="session")
def small_trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A trace of the shipped model."""
    from megavm.llm import LLM
    from megavm.profiler.recorder import Recorder
    from megavm.sampling_params import SamplingParams

    llm = LLM("stories", machine="cpu")
    recorder = Recorder(steps=3)
    llm.record(recorder)
    llm.generate("Once upon a time", SamplingParams(max_tokens=3))
    path = tmp_path_factory.mktemp("traces") / "small.megatrace"
    recorder.trace().save(path)
    return path.read_bytes()


# --- how it looks -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_it_fits_its_window(
    make_playground: Callable[..., Playground], server: FakeServer, scheme: str, width: int
) -> None:
    height = 800 if width > 400 else 720
    page = make_playground(color_scheme=scheme, viewport={"width": width, "height": height})
    page.open(server)
    page.picture(f"{scheme}-{width}-empty")
    page.send("Tell me of a fox, a hen and the " + "long " * 30 + "road").answered(1)
    page.send("refuse").answered(2)
    page.send("x" * 300 + "\n  indented").answered(3)
    page.picture(f"{scheme}-{width}")
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not page.page.evaluate(wide)
    assert not page.page.evaluate("document.getElementById('log').scrollWidth > innerWidth")
    if width == 400:
        page.button("Settings").click()
        page.picture(f"{scheme}-{width}-settings")
        assert not page.page.evaluate(wide)
        assert page.page.get_by_label("temperature", exact=True).is_visible()
        page.page.keyboard.press("Escape")
        assert page.page.locator("#panel").is_hidden()


def test_the_theme_can_be_changed_and_is_kept(page: Playground) -> None:
    theme = "document.documentElement.dataset.theme"
    assert page.page.evaluate(theme) == "light"
    page.button("Theme").click()
    page.page.reload()
    assert page.page.evaluate(theme) == "dark"


def test_every_control_has_a_name(page: Playground) -> None:
    page.send("hello").answered()
    nameless = page.page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea, a')].filter((e) =>"
        " !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length))"
        ".map((e) => e.outerHTML)"
    )
    assert nameless == []
