"""`generation.speculation` in TensorRT-LLM's words, over the stand-in that tests/signatures compares."""

import json
import subprocess
import sys
from pathlib import Path

STANDIN = Path(__file__).parent / "standin"
PROGRAM = """
import json, sys
from dataclasses import asdict
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from nemorl.config.generation import TrtllmGenerationConfig
from nemorl.generation.trtllm_engine.engine import engine_arguments
from nemorl.generation.types import EngineOptions

found = []
for section in (
    None,
    {"method": "prompt_lookup", "max_tokens": 5, "max_match": 3},
    {"method": "draft_model", "model_path": "/small", "max_tokens": 3},
    {"method": "mtp", "max_tokens": 2},
):
    config = TrtllmGenerationConfig(backend="trtllm", speculation=section)
    given = engine_arguments(config, EngineOptions(Path("m"), Path("m"), 64, device="cuda"))
    drafts = given.get("speculative_config")
    described = None if drafts is None else [type(drafts).__name__, asdict(drafts)]
    found.append([described, given.get("disable_overlap_scheduler", False)])
print(json.dumps(found))
"""


def test_drafts_are_those_of_speculation_and_exactly_checked() -> None:
    command = [sys.executable, "-c", PROGRAM, str(STANDIN)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found[0] == [None, False]
    (lookup, _), (draft, _), (mtp, _) = found[1:]
    assert [overlap_off for _, overlap_off in found[1:]] == [True] * 3
    names = [name for name, _ in (lookup, draft, mtp)]
    assert names == ["NGramDecodingConfig", "DraftTargetDecodingConfig", "MTPDecodingConfig"]
    assert [fields["max_draft_len"] for _, fields in (lookup, draft, mtp)] == [5, 3, 2]
    assert (lookup[1]["max_matching_ngram_size"], lookup[1]["is_public_pool"]) == (3, False)
    assert draft[1]["speculative_model"] == "/small"
    for _, fields in (lookup, draft, mtp):
        assert fields["allow_advanced_sampling"], "otherwise earlier releases draw greedily"
        assert not fields["use_rejection_sampling"]
    assert not mtp[1]["use_relaxed_acceptance_for_thinking"], "which accepts what is not drawn"
