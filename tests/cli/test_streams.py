"""Closed standard streams, and Ctrl-C before anything has begun."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.stand_in import BANNER, WORDS

PROGRAM = (
    "import sys; from outpace.cli.main import main; from outpace.cli.backend import Backend; "
    "from tests.cli.stand_in import Script, StandIn; sys.exit(main(sys.argv[1:], Backend(llm=StandIn(Script()))))"
)


def run(redirection: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and notes of the command on a stand-in engine, started by a shell with this redirection."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [["generate", "-"], ["chat"]])
def test_closed_standard_input(arguments: list[str]) -> None:
    message = "outpace: standard input is closed: there is nothing to read a prompt from\n"
    assert run("<&-", *arguments) == (2, "", message)


def test_closed_standard_input_that_is_not_read() -> None:
    code, out, notes = run("<&-", "generate", "Hi")
    assert (code, out, notes.splitlines()[-1]) == (0, "".join(WORDS) + "\n", BANNER)


@pytest.mark.parametrize("arguments", [["generate", "Hi"], ["generate", "Hi", "--json"], ["demo"], ["--help"]])
def test_closed_standard_output(arguments: list[str]) -> None:
    message = "outpace: standard output is closed: there is nowhere to write to; /dev/null would do\n"
    assert run(">&-", *arguments) == (2, "", message)


def test_closed_standard_error_leaves_the_answer_alone_on_standard_output() -> None:
    assert run("2>&-", "generate", "Hi") == (0, "".join(WORDS) + "\n", "")
    assert run("2>&-", "generate") == (2, "", "")


def test_all_closed() -> None:
    assert run("<&- >&- 2>&-", "generate", "-") == (2, "", "")


def test_ctrl_c_while_the_command_is_still_being_imported() -> None:
    program = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'rich': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from outpace.cli.main import main\n"
        "sys.exit(main(['--version']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
