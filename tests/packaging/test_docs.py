"""Generated pages are fresh, links lead somewhere, and the commands that the README shows exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from omnictl.cli import app
from tests.docs import DOCS, PAGES

ROOT = Path(__file__).parents[2]
PAGES_WITH_LINKS = [p for p in [ROOT / "README.md", *DOCS.rglob("*.md")]]


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_fresh(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text()
    assert page == PAGES[name](), f"docs/{name}.md is stale; write it with `python -m tests.docs {name}`"


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [t for t in targets if not (page.parent / t).exists()] == []


def test_the_readme_names_only_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    verbs = set(re.findall(r"^ +omnictl ([a-z]+)", text, re.MULTILINE))
    assert verbs
    assert verbs <= set(get_command(app).commands)  # type: ignore[attr-defined]
    targets = set(re.findall(r"(?:^ +|`)make ([a-z0-9]+(?:-[a-z0-9]+)*)", text, re.MULTILINE))
    defined = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets
    assert targets <= defined
