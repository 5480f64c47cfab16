"""The reference that staged serving is compared with: it must be able to tell a right answer from a wrong one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.golden.omni_reference import NUM_CODEC_TOKENS, NUM_TEXT_TOKENS
from tests.golden.tiny_qwen3_omni import CODEBOOK, CODEC_END, NUM_CODE_GROUPS, ROLES, omni_tokenizer

if TYPE_CHECKING:
    from tests.golden.omni_reference import Reference


def test_answers_differ(omni_references: dict[str, Reference]) -> None:
    references = list(omni_references.values())
    assert len({tuple(r.text_ids) for r in references}) == len(references)
    assert len({tuple(r.code0) for r in references}) == len(references)
    assert len({token for r in references for token in r.text_ids}) > 30
    assert len({int(code) for r in references for code in r.codes.flatten()}) > CODEBOOK // 2


def test_speech_ends_by_itself_and_by_length(omni_references: dict[str, Reference]) -> None:
    ended = [r.code0[-1] == CODEC_END for r in omni_references.values()]
    assert any(ended)
    assert not all(ended)


def test_shapes(omni_references: dict[str, Reference]) -> None:
    for reference in omni_references.values():
        num_rows = len(reference.prompt_ids) + len(reference.text_ids) - 1
        assert 1 < len(reference.text_ids) <= NUM_TEXT_TOKENS
        assert reference.embeddings.shape == reference.hidden.shape == (num_rows, 64)
        assert reference.codes.shape == (NUM_CODE_GROUPS, len(reference.code0) - 1)
        assert len(reference.code0) <= NUM_CODEC_TOKENS
        assert reference.codes[0].tolist() == reference.code0[:-1]
        assert reference.samples.abs().max() > 0.01


def test_a_role_is_one_token() -> None:
    tokenizer = omni_tokenizer()
    for role in ROLES:
        assert tokenizer(f"<|im_start|>{role}\n")["input_ids"][1:2] == tokenizer.convert_tokens_to_ids([role])
