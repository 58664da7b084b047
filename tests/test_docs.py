"""What the documents show is true: commands exist, recipes load, links lead somewhere.

A fenced block is checked by its language: `console` and `sh` line by line against the real command line and the
Makefile, `yaml` as a recipe if it has a `model`, `python` by compiling it, and by running it where the fence says
`python run`, `mermaid` state diagrams against the rules that they draw.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from actors.registry.rules import LEGAL
from app import recipe as recipes
from app.cli.application import cli
from cluster.config import parse

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / layer / "README.md" for layer in ("app", "deployments", "actors", "cluster")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
README_LINES = 150


@dataclass(frozen=True)
class Block:
    """One fenced block: where its first line stands, the words after the fence, the text."""

    path: Path
    line: int
    info: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def _blocks() -> Iterator[Block]:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for fence in re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, fence.start(2)) + 1
            yield Block(path, line, tuple(fence[1].split()), fence[2])


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block as words, without prompts, comments, variables and redirection signs."""
    lines = text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        # A console block with prompts: what has none is output.
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;<>()"):
                while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
                    words.pop(0)
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def flywheel_arguments(words: list[str]) -> list[str] | None:
    """What a command gives to our command line; None if it is another program's."""
    if words[0] in ("flywheel", ".venv/bin/flywheel"):
        return words[1:]
    if "app" in words and words[words.index("app") - 1] == "-m":
        return words[words.index("app") + 1 :]
    return None


def check_arguments(arguments: list[str]) -> None:
    """Parse `arguments` as typer would, without running anything: verbs, options and values have to exist."""
    command: Any = typer.main.get_command(cli)
    context = None
    rest = arguments
    while True:
        context = type(command).context_class(command, info_name=command.name, parent=context)
        values, rest, _ = command.make_parser(context).parse_args(list(rest))
        if values.get("help") or not hasattr(command, "commands"):
            break
        verb, rest = rest[0], rest[1:]
        assert verb in command.commands, f"there is no verb {verb!r} among {sorted(command.commands)}"
        command = command.commands[verb]
    assert not rest, f"{command.name} does not take {rest}"
    if not values.get("help"):
        missing = [each.name for each in command.params if each.required and not values.get(each.name)]
        assert not missing, f"{command.name} needs {missing}"


def check_shell(block: Block) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for words in commands(block.text):
        arguments = flywheel_arguments(words)
        if arguments is not None:
            check_arguments(arguments)
        if words[0] == "make":
            asked = {word for word in words[1:] if "=" not in word}
            assert asked <= set(targets), f"the Makefile has no target {asked - set(targets)}"


def check_yaml(block: Block) -> None:
    content = yaml.safe_load(block.text)
    if "model" in content:
        parse(recipes.Recipe, content, source=str(block))


def check_python(block: Block) -> None:
    compile(block.text, str(block), "exec")
    if "run" in block.info:
        subprocess.run([sys.executable, "-c", block.text], cwd=ROOT, check=True, timeout=60)


def check_mermaid(block: Block) -> None:
    """The stages of a version, drawn as `rules.LEGAL` has them; what goes beyond is forced or given up, and says so."""
    lines = re.findall(r"^ *(\w+) --> (\w+)(?:: (.*))?$", block.text, re.MULTILINE)
    drawn = {(origin, target): label for origin, target, label in lines}
    legal = {(origin, target) for origin, targets in LEGAL.items() for target in targets if origin != target}
    assert legal <= drawn.keys(), f"not drawn: {legal - drawn.keys()}"
    beyond = {label.split(" ")[0] for move, label in drawn.items() if move not in legal}
    assert beyond <= {"--force", "abandoned"}, f"not legal, and drawn as if: {beyond}"


CHECKS = {
    "console": check_shell,
    "sh": check_shell,
    "bash": check_shell,
    "yaml": check_yaml,
    "python": check_python,
    "mermaid": check_mermaid,
}


@pytest.mark.parametrize("block", [block for block in _blocks() if block.info], ids=str)
def test_a_block_is_true(block: Block) -> None:
    assert block.info[0] in CHECKS, f"nobody checks blocks in {block.info[0]!r}; a picture has no language"
    CHECKS[block.info[0]](block)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link]
    broken = [target for target in targets if target and not (path.parent / target).exists()]
    assert broken == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_this_checker_sees_what_is_wrong() -> None:
    check_arguments(["models", "show", "error-triage@champion"])
    with pytest.raises(AssertionError, match="no verb 'trane'"):
        check_arguments(["trane"])
    with pytest.raises(Exception, match="--stepz"):
        check_arguments(["train", "error-triage", "--stepz", "3"])
    with pytest.raises(AssertionError, match="needs"):
        check_arguments(["plan"])
    with pytest.raises(AssertionError, match="does not take"):
        check_arguments(["train", "error-triage", "second"])


def test_words_of_a_shell_block() -> None:
    text = "$ A=1 flywheel plan x  # why\noutput\n$ flywheel serve x > out.yaml && serve deploy out.yaml\n"
    assert list(commands(text)) == [
        ["flywheel", "plan", "x"], ["flywheel", "serve", "x"], ["out.yaml"], ["serve", "deploy", "out.yaml"],
    ]  # fmt: skip
    submit = "RAY_ADDRESS=http://h:1 ray job submit -- python -m app train r.yaml"
    assert [flywheel_arguments(words) for words in commands(submit)] == [["train", "r.yaml"]]
