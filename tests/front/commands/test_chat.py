"""`megavm chat`: messages, commands of the conversation, errors."""

from __future__ import annotations

import re

import pytest
from command_line import Run
from fake_llm import FakeLLM, FakeTokenizer, last_params

from megavm.commands.chat import Chat


def chat_calls() -> list[list[tuple[str, str]]]:
    return [
        [(message["role"], message["content"]) for message in messages]
        for messages, _ in FakeLLM.made[-1].calls
    ]


def test_chat_answers_each_line_and_remembers(run: Run) -> None:
    result = run("chat", "m", "--system", "be kind", stdin="hello\n\nbye\n")
    assert result.code == 0
    assert result.out == "w0 w1 w2 \nw0 w1 w2 \n"
    assert result.err.count("tokens/s") == 2
    system, answer = ("system", "be kind"), ("assistant", "w0 w1 w2 ")
    assert chat_calls() == [
        [system, ("user", "hello")],
        [system, ("user", "hello"), answer, ("user", "bye")],
    ]
    assert last_params().max_tokens is None


def test_chat_is_quiet_when_asked(run: Run) -> None:
    assert run("chat", "m", "--quiet", stdin="hello\n").err == ""


def test_chat_talks_to_the_shipped_model_by_default(run: Run) -> None:
    run("chat", stdin="/bye\n")
    assert FakeLLM.made[-1].model == "stories"


def test_chat_reads_messages_of_several_lines(run: Run) -> None:
    run("chat", "m", stdin='"""one\n\n two"""\n"""\n/bye\n"""\n"""open\nend')
    assert [calls[-1][1] for calls in chat_calls()] == ["one\n\n two", " /bye", "open\nend"]


def test_chat_commands_change_the_conversation(run: Run) -> None:
    result = run(
        "chat",
        "m",
        stdin="/set parameter temperature 0.5\n/set parameter stop a b\n/set system be brief\n"
        "hello\n/clear\nagain\n/show\n/help\n/bye\nnever read\n",
    )
    assert result.code == 0
    assert chat_calls() == [
        [("system", "be brief"), ("user", "hello")],
        [("system", "be brief"), ("user", "again")],
    ]
    assert last_params().temperature == 0.5
    assert last_params().stop == ("a b",)
    assert re.search(r"temperature +0\.5", result.out)
    assert "/set parameter NAME VALUE" in result.out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/dance", "'/dance' is not a command"),
        ("/set parameter temperature hot", "temperature: 'hot' is not a number"),
        ("/set parameter temperature -3", "temperature must be"),
        ("/set parameter colour red", "no parameter 'colour'"),
        ("/set parameter temperature", "not a command"),
    ],
)
def test_a_bad_chat_command_over_a_pipe_ends_it(run: Run, line: str, said: str) -> None:
    assert said in run("chat", "m", stdin=f"{line}\nhello\n").error
    assert FakeLLM.made[-1].calls == []


def test_on_a_terminal_an_error_leaves_the_conversation_as_it_was(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", "/dance", "fail", "again"])

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        FakeLLM.failure = ValueError("too long") if line == "fail" else None
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(Chat, "_is_interactive", staticmethod(lambda: True))
    result = run("chat", "m")
    assert result.code == 0
    assert result.err.count("megavm: error: ") == 2
    assert [calls[-1][1] for calls in chat_calls()] == ["hello", "fail", "again"]
    assert len(chat_calls()[-1]) == 3


def test_a_full_context_is_said_and_clear_begins_anew(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", "again", "/clear", "again"])

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(Chat, "_is_interactive", staticmethod(lambda: True))
    monkeypatch.setattr(FakeLLM, "max_prompt_len", 15)
    result = run("chat", "m")
    assert result.code == 0
    assert result.err.count("the answer was cut: the context is full; /clear begins") == 2
    assert result.err.count("megavm: error: ") == 1
    assert "19 tokens with this message, and the context has room for 15: /clear" in result.err
    assert chat_calls() == [[("user", "hello")], [("user", "again")]]


def test_an_answer_that_max_tokens_cuts_is_not_cut_by_the_context(run: Run) -> None:
    result = run("chat", "m", "--max-tokens", "2", stdin="hello\n")
    assert result.code == 0
    assert "the context is full" not in result.err


def test_chat_without_a_template_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "chats", False)
    assert "no chat template" in run("chat", "m", stdin="hello\n").error


def test_a_chat_template_is_passed_on(run: Run) -> None:
    assert run("chat", "m", "--chat-template", "own.jinja", stdin="hello\n").code == 0
    assert FakeLLM.made[-1].keywords["chat_template"] == "own.jinja"
